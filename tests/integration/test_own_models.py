"""Models as people write them: where stock fails in the first batch, they train or are refused at construction."""

import logging

import cells
import own_models
import pytest
import torch
from cells import Cell
from media_batches import media_batch
from own_models import (
    ConvolvesItself,
    EncodesImages,
    HidesEmbeddings,
    Multiplies,
    MultipliesUnderAutocast,
    NormalisesSpectrally,
    ProjectsItself,
)
from policing import reset_accelerate

from safe_trainers import PrecisionError, tiny
from safe_trainers.boundaries.placement import place
from upstream import TRANSFORMERS_4


SETTINGS = [("fp32", "bf16"), ("bf16", "bf16"), ("bf16", None), ("fp16", "fp16")]
MODELS = [
    EncodesImages,
    HidesEmbeddings,
    ProjectsItself,
    ConvolvesItself,
    MultipliesUnderAutocast,
    NormalisesSpectrally,
]


def run(inner, cell, safe, **changes):
    """The losses, gradient norms and weights of a run; the error of stock, where it has one."""
    config = (cells.SAFE_CONFIG if safe else cells.PLAIN)[cell.task]
    if safe and cell.flag == "fp16":
        changes["loss_scale_init"] = 256.0
    made = cells.arguments(cell, config, model_init_kwargs=None, **changes)
    made["model"] = own_models.build(inner, cells.SHORT[cell.weights])
    made["processing_class"] = tiny.build_processor("nocast")
    try:
        trainer = (cells.SAFE if safe else cells.STOCK)[cell.task](**made)
        trainer.train()
    except RuntimeError as error:
        if safe:
            raise
        cells.reset_autocast()
        return str(error)
    log = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    return [(entry["loss"], entry["grad_norm"]) for entry in log], cells.fingerprint(trainer.model), trainer


@pytest.mark.parametrize("task", ["sft", "grpo"])
@pytest.mark.parametrize(("weights", "flag"), SETTINGS)
@pytest.mark.parametrize("inner", MODELS, ids=lambda inner: inner.__name__)
def test_what_stock_cannot_compute_trains(inner, weights, flag, task):
    cell = Cell("nocast", task, weights, flag, lora=flag == "fp16" or task == "grpo")
    if TRANSFORMERS_4 and inner is HidesEmbeddings and cell.lora:
        pytest.skip("transformers 4 asks for the input embeddings of each model with adapters")
    stock, (log, weights_after, trainer) = run(inner, cell, safe=False), run(inner, cell, safe=True)
    assert len(log) == 2
    assert all(norm > 0 for _, norm in log)
    if isinstance(stock, str):
        assert "dtype" in stock or "should be the same" in stock
        assert trainer.precision.boundaries.boundaries
    else:  # the casts change nothing where stock trains
        assert (weights, flag) == ("bf16", "bf16")
        assert (log, weights_after) == stock[:2]


@pytest.mark.parametrize("inner", [EncodesImages, ProjectsItself], ids=lambda inner: inner.__name__)
def test_features_are_merged_as_a_model_would_that_casts_them(inner):
    """In float32 with bfloat16 autocast: the loss is that of the same model with a cast written by hand."""

    class CastsItself(inner):
        def encode_images(self, pixel_values):
            return super().encode_images(pixel_values).float()

    cell = Cell("nocast", "sft", "fp32", "bf16")
    log, weights, trainer = run(inner, cell, safe=True)
    own_log, own_weights, own_trainer = run(CastsItself, cell, safe=False)
    assert (log, weights) == (own_log, own_weights)
    assert [(b.module, "setitem" in b.reason) for b in trainer.precision.boundaries.operations] == [("model", True)]
    assert own_trainer.model is not trainer.model


def test_a_function_that_cannot_go_back_is_refused_with_the_lines_that_help():
    cell = Cell("nocast", "sft", "fp32", "bf16")
    with pytest.raises(PrecisionError) as refused:
        run(Multiplies, cell, safe=True)
    (problem,) = refused.value.problems
    assert problem.id == "media-cannot-compute"
    assert "decorate `forward` of `Product` with `@torch.amp.custom_fwd(device_type='cpu')`" in str(problem)
    assert len(run(MultipliesUnderAutocast, cell, safe=True)[0]) == 2  # the lines work, written as they stand


def test_a_function_behind_which_nothing_is_trained_is_not_refused():
    log, _, trainer = run(Multiplies, Cell("nocast", "sft", "fp32", "bf16", lora=True), safe=True)
    assert len(log) == 2
    assert trainer.precision.boundaries.operations == ()


def test_the_trial_can_be_left_out():
    with pytest.raises(RuntimeError, match="Index put requires"):
        run(EncodesImages, Cell("nocast", "sft", "fp32", "bf16"), safe=True, media_trial=False)
    cells.reset_autocast()
    *_, trainer = run(EncodesImages, Cell("nocast", "sft", "bf16", "bf16"), safe=True, media_trial=False)
    assert trainer.precision.report.facts["media trial"] == "not run: `media_trial=False`"


def test_the_trial_is_in_the_report_and_runs_only_with_media_in_half_precision():
    *_, trainer = run(EncodesImages, Cell("nocast", "sft", "fp32", "bf16"), safe=True)
    assert trainer.precision.report.facts["media trial"].endswith(" s, works")
    assert any(row[0] == "operations of model" for row in trainer.precision.report.tables[1].rows)
    reset_accelerate()  # transformers 4 keeps the precision of one trainer for the next
    *_, trainer = run(EncodesImages, Cell("nocast", "sft", "fp32", None), safe=True)
    assert "media trial" not in trainer.precision.report.facts


def test_another_model_of_the_class_gets_the_same_casts():
    *_, trainer = run(EncodesImages, Cell("nocast", "sft", "fp32", "bf16"), safe=True)
    other, batch = own_models.build(EncodesImages), media_batch("nocast")
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(RuntimeError, match="Index put requires"):
            other(**batch)
        place(trainer.precision.boundaries, other)
        assert other(**batch).logits.isfinite().all()


def test_a_spectral_norm_is_computed_as_often_as_in_stock():
    cell = Cell("nocast", "sft", "bf16", "bf16")
    vectors = []
    for safe in (False, True):
        *_, trainer = run(NormalisesSpectrally, cell, safe=safe)
        (norm,) = trainer.model.model.vision_tower.fc1.parametrizations.weight
        vectors.append(norm._u.clone())
    assert torch.equal(*vectors)


def test_a_trial_that_fails_for_another_reason_says_so_and_stops_nothing(caplog):
    class WantsMoreImages(EncodesImages):
        def encode_images(self, pixel_values):
            if len(pixel_values) == 1:
                raise ValueError("at least two images")
            return super().encode_images(pixel_values)

    with caplog.at_level(logging.INFO, logger="safe_trainers"):
        log, _, trainer = run(WantsMoreImages, Cell("nocast", "sft", "bf16", "bf16"), safe=True)
    assert len(log) == 2
    assert trainer.precision.report.facts["media trial"] == "not run: ValueError: at least two images"
