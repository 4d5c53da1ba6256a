"""Batches whose mismatch is measured wait for the next log, or until they are many."""

import cells
import pytest
import torch
from cells import Cell
from mismatch_reference import batch
from torch.overrides import TorchFunctionMode

from safe_trainers.rollout import mismatch_meter
from safe_trainers.rollout.mismatch_meter import MismatchMeter


ROWS, WIDTH = 2, 8


class Sizes(TorchFunctionMode):
    """Counts how often the size of a mask is read."""

    def __init__(self):
        super().__init__()
        self.read = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.read += function is torch.Tensor.numel and args[0].shape == (ROWS, WIDTH)
        return function(*args, **(kwargs or {}))


class Meter(MismatchMeter):
    """A meter that a test finds."""

    def __init__(self, run):
        super().__init__(run)
        run.trainer.meter = self


class Trainer(cells.SAFE["grpo"]):
    features = tuple(Meter if feature is MismatchMeter else feature for feature in cells.SAFE["grpo"].features)


@pytest.fixture
def meter():
    return Trainer(**cells.arguments(Cell("text", "grpo", "fp32", None), cells.PLAIN["grpo"])).meter


def count(meter, number):
    for seed in range(number):
        trainer, sampler, mask = batch(ROWS, WIDTH, 0.1, seed=seed)
        meter._count(trainer, sampler, {"completion_mask": mask})


def test_the_size_of_a_batch_is_read_once_however_many_wait(meter):
    with Sizes() as sizes:
        count(meter, 10)
        first = sizes.read
        count(meter, 10)
    assert first > 0
    assert sizes.read == 2 * first


def test_batches_are_tallied_when_more_tokens_wait_than_the_limit(meter, monkeypatch):
    mode = meter.run.mode
    count(meter, 9)
    meter.before_log(mode)
    expected = meter.on_log({}, mode)
    monkeypatch.setattr(mismatch_meter, "WAITING", 3 * ROWS * WIDTH)
    waiting = []
    for seed in range(9):
        trainer, sampler, mask = batch(ROWS, WIDTH, 0.1, seed=seed)
        meter._count(trainer, sampler, {"completion_mask": mask})
        waiting.append(len(meter._waiting.get(mode, ())))
    assert waiting == [1, 2, 3, 0, 1, 2, 3, 0, 1]
    meter.before_log(mode)
    found = meter.on_log({}, mode)
    assert len(expected) > 9
    assert found.keys() == expected.keys()
    assert found == pytest.approx(expected, rel=1e-9)
