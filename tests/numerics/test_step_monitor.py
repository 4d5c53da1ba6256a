"""Skipped steps are seen, hold the schedule and end a run that goes nowhere; the optimizer's metrics are right."""

import itertools
import json
import math

import cells
import pytest
import torch
from cells import Cell
from policing import reset_accelerate
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, TrainerCallback
from two_processes import run_in_two_processes

import safe_trainers
from safe_trainers import PrecisionError
from safe_trainers.numerics.replay import Replay
from safe_trainers.numerics.step_monitor import StepMonitor
from safe_trainers.numerics.update_sample import EVERY, UpdateSample
from safe_trainers.testing import fp16_on_cpu


pytestmark = pytest.mark.filterwarnings("ignore::safe_trainers.PrecisionWarning")

FUSED, PLAIN = "adamw_torch_fused", "adamw_torch"
UPDATES = ("precision/grad_zero_frac", "precision/update_lost_frac", "precision/stalled_params")


class Watch(TrainerCallback):
    """The weights before each optimizer step, its gradients, and the weights after it."""

    def __init__(self):
        self.before, self.gradients, self.after = [], [], []

    def copy(self, optimizer, what):
        return [what(p).detach().double().clone() for group in optimizer.param_groups for p in group["params"]]

    def on_pre_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
        self.before.append(self.copy(optimizer, lambda p: p))
        self.gradients.append(self.copy(optimizer, lambda p: p.grad))

    def on_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
        self.after.append(self.copy(optimizer, lambda p: p))


def build(safe=True, *, infinite=0, flag="fp16", steps=12, weights=torch.float32, callbacks=(), **changes):
    """An SFT trainer whose gradients are infinite in the first optimizer steps; fp16 with a real scaler."""
    reset_accelerate()
    config = (cells.SAFE_CONFIG if safe else cells.PLAIN)["sft"]
    made = cells.arguments(Cell("text", "sft", "fp32", flag), config, steps, model_init_kwargs=None, **changes)
    made["model"] = AutoModelForCausalLM.from_pretrained(cells.folder("text"), dtype=weights)
    if "eval_strategy" in changes:
        made["eval_dataset"] = made["train_dataset"]
    trainer = fp16_on_cpu((cells.SAFE if safe else cells.STOCK)["sft"])(**made, callbacks=list(callbacks))

    def poison(gradient):
        return torch.full_like(gradient, math.inf) if trainer.state.global_step < infinite else gradient

    next(trainer.model.parameters()).register_hook(poison)
    return trainer


def logged(trainer, name):
    """The values of one key, by step."""
    return {entry["step"]: entry[name] for entry in trainer.state.log_history if name in entry}


def schedule(total, held=0, rate=1e-3):
    """The learning rates of a linear schedule of which the first `held` steps did not count."""
    return [pytest.approx(rate * (1 - max(0, step - held) / total)) for step in range(total)]


# ---- skipped steps ----


@pytest.mark.parametrize(
    "changes",
    [{}, {"max_grad_norm": 0.0}, {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}],
    ids=["clipped", "not clipped", "accumulated"],
)
@pytest.mark.parametrize("optim", [FUSED, PLAIN])
def test_seven_skipped_steps_are_seen_and_hold_the_schedule(optim, changes):
    watch = Watch()
    trainer = build(infinite=7, optim=optim, callbacks=[watch], **changes)
    trainer.train()
    assert list(logged(trainer, "learning_rate").values()) == schedule(12, held=7)
    assert list(logged(trainer, "precision/skipped_steps").values()) == [1, 2, 3, 4, 5, 6, 7, 7, 7, 7, 7, 7]
    assert list(logged(trainer, "precision/effective_steps").values()) == [0] * 7 + [1, 2, 3, 4, 5]
    assert list(logged(trainer, "precision/loss_scale").values()) == [2.0 ** (15 - min(i, 6)) for i in range(12)]
    for before, after in zip(watch.before[:7], watch.after[:7], strict=True):
        assert all(map(torch.equal, before, after))
    for before, after in zip(watch.before[7:], watch.after[7:], strict=True):
        assert not any(map(torch.equal, before, after))
    assert trainer.state.global_step == 12


@pytest.mark.parametrize("safe", [True, False])
def test_a_run_of_grpo_with_an_adapter_goes_on_after_seven_skipped_steps(safe):
    reset_accelerate()
    watch = Watch()
    config = (cells.SAFE_CONFIG if safe else cells.PLAIN)["grpo"]
    made = cells.arguments(Cell("llava", "grpo", "fp16", "fp16", lora=True), config, steps=10)
    trainer = fp16_on_cpu((cells.SAFE if safe else cells.STOCK)["grpo"])(**made, callbacks=[watch])
    adapter = next(p for p in trainer.model.parameters() if p.requires_grad)
    adapter.register_hook(lambda g: torch.full_like(g, math.inf) if trainer.state.global_step < 7 else g)
    trainer.train()
    assert list(logged(trainer, "learning_rate").values()) == schedule(10, held=7 if safe else 0)
    assert all(map(torch.equal, watch.before[0], watch.after[6]))
    assert not all(map(torch.equal, watch.after[6], watch.after[9]))
    if safe:
        assert logged(trainer, "precision/skipped_steps")[10] == 7
        assert logged(trainer, "precision/effective_steps")[10] == 3


def test_stock_loses_seven_steps_of_schedule_with_the_default_optimizer():
    watch = Watch()
    stock = build(safe=False, infinite=7, callbacks=[watch])
    assert stock.args.optim == FUSED
    stock.train()
    assert list(logged(stock, "learning_rate").values()) == schedule(12)  # as if all 12 had been taken
    assert all(map(torch.equal, watch.before[0], watch.after[6]))
    plain = build(safe=False, infinite=7, optim=PLAIN)
    plain.train()
    assert list(logged(plain, "learning_rate").values()) == schedule(12, held=7)


@pytest.mark.parametrize("optim", [FUSED, PLAIN])
def test_a_run_without_skips_is_stocks(optim):
    runs = [build(safe=safe, optim=optim) for safe in (False, True)]
    for trainer in runs:
        trainer.train()
    stock, safe = runs
    assert cells.fingerprint(safe.model) == cells.fingerprint(stock.model)
    assert logged(safe, "learning_rate") == logged(stock, "learning_rate")
    assert set(logged(safe, "precision/skipped_steps").values()) == {0}


def test_callbacks_after_a_step_find_it_said_whether_it_was_skipped():
    seen = []

    class Asks(TrainerCallback):
        def on_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
            seen.append(optimizer.step_was_skipped)

    build(infinite=2, steps=4, callbacks=[Asks()]).train()
    assert seen == [True, True, False, False]


class Reads(TorchDispatchMode):
    """Counts how often a number is read from a tensor, each of which waits for a GPU."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


def test_one_read_of_the_device_more_in_each_step(monkeypatch):
    reads = {}
    original = torch.Tensor.tolist
    for safe, steps in itertools.product((False, True), (11, 15)):
        trainer = build(safe=safe, steps=steps, logging_steps=100)
        with Reads() as counter:
            monkeypatch.setattr(torch.Tensor, "tolist", lambda t: (setattr(counter, "count", counter.count + 1),
                                                                  original(t))[1])  # fmt: skip
            trainer.train()
            monkeypatch.undo()
        reads[safe, steps] = counter.count
    stock, safe = (reads[which, 15] - reads[which, 11] for which in (False, True))  # without the log at the end
    assert safe - stock == 4


def test_too_many_in_a_row_are_one_clear_error():
    trainer = build(infinite=99, max_consecutive_skips=5)
    before = cells.fingerprint(trainer.model)
    with pytest.raises(PrecisionError) as stopped:
        trainer.train()
    first, why, fix = str(stopped.value).splitlines()[1:]
    assert first.startswith(
        "- 5 optimizer steps in a row, up to step 5, were skipped; step 5 is skipped: `model.embed_tokens` is the "
        "first module that computes a gradient that is not finite, that of its weight, from finite gradients"
    )
    assert why == (
        "  why: gradients that contain inf or NaN cannot be applied. The loss scale fell from 65536 to 2048 over "
        "these steps, and no weight changed."
    )
    assert fix == (
        "  fix: look at the backward pass of `Embedding`: `torch.autograd.set_detect_anomaly(True)` shows the "
        "operation  [optimizer-steps-skipped]"
    )
    assert cells.fingerprint(trainer.model) == before
    trainer = build(infinite=99, max_consecutive_skips=20, steps=30)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Replay, "again", lambda *_: None)  # as without memory for a second pass
        with pytest.raises(PrecisionError, match=r"from 65536 to 0\.0625 over.*\n.*fix: `bf16=True`.*fp32_modules="):
            trainer.train()


def test_a_scale_that_has_fallen_to_its_end_stops_before_a_step_makes_nan_of_the_weights():
    """However many skips are allowed: the first gradients that are finite again would be unscaled to NaN."""
    settings = {"infinite": 3, "steps": 5, "max_consecutive_skips": 1000, "loss_scale_init": 2.0**-120,
                "loss_scale_backoff_factor": 0.03125}  # fmt: skip
    trainer = build(**settings)
    before = cells.fingerprint(trainer.model)
    with pytest.raises(PrecisionError, match=r"2 optimizer steps in a row.*\n.*fell from 7.52316e-37 to 7.34684e-40"):
        trainer.train()
    assert cells.fingerprint(trainer.model) == before
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(safe_trainers.numerics.step_monitor, "SMALLEST_SCALE", 0.0)
        trainer = build(**settings)
        trainer.train()
    assert not any(p.isfinite().all() for p in trainer.model.parameters())


def test_a_step_that_is_taken_begins_the_count_anew():
    trainer = build(infinite=4, max_consecutive_skips=5, steps=8)
    trainer.train()
    assert trainer._run.skipped_in_a_row == 0
    assert trainer.precision[StepMonitor].skipped == 4
    trainer.train()  # a second run of the same trainer counts from the start
    assert (trainer.precision[StepMonitor].skipped, trainer.precision[StepMonitor].taken) == (4, 4)


def test_a_plain_config_stops_after_fifty():
    reset_accelerate()
    made = cells.arguments(Cell("text", "sft", "fp32", "fp16"), cells.PLAIN["sft"], steps=60, logging_steps=100)
    trainer = fp16_on_cpu(cells.SAFE["sft"])(**made)
    next(trainer.model.parameters()).register_hook(lambda gradient: torch.full_like(gradient, math.nan))
    with pytest.raises(PrecisionError, match="50 optimizer steps in a row"):
        trainer.train()


@pytest.mark.parametrize(
    ("settings", "fix"),
    [
        ({"max_consecutive_skips": 0}, "max_consecutive_skips=50"),
        ({"max_consecutive_skips": 2.5}, "max_consecutive_skips=50"),
        ({"max_consecutive_skips": None}, "max_consecutive_skips=50"),
        ({"overflow_probe_steps": 0}, "overflow_probe_steps=100"),
        ({"overflow_probe_steps": True}, "overflow_probe_steps=100"),
    ],
)
def test_numbers_of_steps_that_cannot_be_are_refused(settings, fix, tmp_path):
    with pytest.raises(PrecisionError, match="steps-out-of-range") as refused:
        safe_trainers.SafeSFTConfig(str(tmp_path), use_cpu=True, **settings)
    assert fix in str(refused.value)


# ---- metrics ----


class Reference:
    """The metrics from whole copies in float64, at the places of the sample, or at all."""

    def __init__(self, sample=None, dense=None):
        self.places = None if sample is None else [places.tolist() for places in sample._places]
        self.dense, self.last = dense, None
        self.begin()

    def begin(self):
        self.zero = self.elements = self.lost = self.nonzero = 0.0
        self.stalled = None

    def look(self, before, gradients, after):
        """One look, element by element; a place stands for an equal part of its parameter."""
        last, self.last = self.last or before, after
        self.stalled = 0
        for number, (w, g, new, old) in enumerate(zip(before, gradients, after, last, strict=True)):
            w, g, new, old = (t.flatten().tolist() for t in (w, g, new, old))
            places = range(len(w)) if self.places is None else self.places[number]
            part = len(w) / len(places)
            if self.dense is None or self.dense[number]:
                self.zero += part * sum(g[i] == 0 for i in places)
                self.elements += len(w)
            self.nonzero += part * sum(g[i] != 0 for i in places)
            self.lost += part * sum(g[i] != 0 and new[i] == w[i] for i in places)
            self.stalled += all(new[i] == old[i] for i in places)

    def values(self):
        return {
            "grad_zero_frac": pytest.approx(self.zero / self.elements, rel=1e-12),
            "update_lost_frac": pytest.approx(self.lost / self.nonzero, rel=1e-12),
            "stalled_params": self.stalled,
        }


def steps_of(sample, parameters, optimizer, rounds, metrics_every):
    """Random gradients, half of them zero in one parameter; yields before, gradients, after and the metrics."""
    for number in range(1, rounds + 1):
        for index, parameter in enumerate(parameters):
            parameter.grad = torch.randn_like(parameter)
            if index == 1:
                parameter.grad[::2] = 0
        before = [p.detach().double().clone() for p in parameters]
        gradients = [p.grad.double().clone() for p in parameters]
        sample.before()
        optimizer.step()
        assert sample.after(skipped=False)
        after = [p.detach().double().clone() for p in parameters]
        yield before, gradients, after, sample.metrics(lambda sums: sums) if number % metrics_every == 0 else None


@pytest.mark.parametrize("size", [10**9, 60], ids=["every element", "a sample"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sample_against_a_slow_reference(dtype, size, seed_everything):
    parameters = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in [(40, 7), (30,), (3,), (11, 5)]]
    groups = [{"params": parameters[:3], "lr": 1e-3}, {"params": parameters[3:], "lr": 1e-5}]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
    state = torch.random.get_rng_state()
    sample = UpdateSample(optimizer, sparse={id(parameters[0])}, size=size)
    assert torch.equal(torch.random.get_rng_state(), state)
    reference = Reference(None if size > 1000 else sample, dense=[False, True, True, True])
    if size == 60:  # by size, at least 8 where there are so many
        assert [len(places) for places in sample._places] == [46, 8, 3, 9]
    seen = []
    for before, gradients, after, metrics in steps_of(sample, parameters, optimizer, 6, metrics_every=3):
        reference.look(before, gradients, after)
        if metrics is not None:
            assert metrics == reference.values()
            seen.append(metrics)
            reference.begin()
    assert len(seen) == 2
    if dtype == torch.bfloat16:
        assert 0 < seen[0]["update_lost_frac"] < 1
    assert 0 < seen[0]["grad_zero_frac"] < 1


def test_what_cannot_move_is_not_counted():
    frozen, moving = nn.Parameter(torch.ones(20)), nn.Parameter(torch.ones(20))
    optimizer = torch.optim.SGD([{"params": [frozen], "lr": 0.0}, {"params": [moving], "lr": 1.0}])
    sample = UpdateSample(optimizer)

    def look(*gradients, skipped=False):
        frozen.grad, moving.grad = gradients
        sample.before()
        if not skipped:
            optimizer.step()
        return sample.after(skipped), sample.metrics(lambda sums: sums)

    ones, zeros = torch.full((20,), 0.25), torch.zeros(20)
    assert look(ones, ones) == (True, {"grad_zero_frac": 0, "update_lost_frac": 0, "stalled_params": 0})
    assert look(ones, zeros) == (True, {"grad_zero_frac": 0.5, "stalled_params": 1})  # no gradient was lost
    assert look(ones, ones * 1e-9) == (True, {"grad_zero_frac": 0, "update_lost_frac": 1, "stalled_params": 1})
    assert look(ones, ones, skipped=True) == (False, {})
    assert look(ones, None) == (False, {})  # what has a gradient has no learning rate, and the other way round
    assert look(None, ones) == (True, {"grad_zero_frac": 0, "update_lost_frac": 0, "stalled_params": 0})


@pytest.mark.parametrize("infinite", [0, 3])
def test_the_metrics_of_a_run_against_a_slow_reference(infinite):
    watch = Watch()
    trainer = build(infinite=infinite, callbacks=[watch], steps=15, logging_steps=6, learning_rate=1e-5,
                    weights=torch.float16, upcast_trainables=True)  # fmt: skip
    trainer.train()
    heads = {id(trainer.model.get_output_embeddings().weight)}
    embeddings = {id(m.weight) for m in trainer.model.modules() if isinstance(m, nn.Embedding)} - heads
    ordered = [p for group in trainer.optimizer.param_groups for p in group["params"]]
    reference = Reference(trainer.precision[StepMonitor]._sample, dense=[id(p) not in embeddings for p in ordered])
    taken, found = -1, {}
    for step in range(15):
        taken += step >= infinite
        if step >= infinite and taken % EVERY == 0:
            reference.look(watch.before[step], watch.gradients[step], watch.after[step])
        if (step + 1) % 6 == 0:
            found[step + 1] = reference.values()
            reference.begin()
    history = {entry["step"]: entry for entry in trainer.state.log_history if "loss" in entry}
    assert sorted(history) == [6, 12]
    for step, expected in found.items():
        assert {key: history[step][f"precision/{key}"] for key in expected} == expected


def test_an_embedding_counts_where_it_is_the_head_as_well():
    trainer = build()
    table = trainer.model.get_input_embeddings().weight
    trainer.train()
    tied = trainer.model.get_output_embeddings().weight is table
    dense = dict(
        zip(
            map(id, trainer.precision[StepMonitor]._sample._parameters),
            trainer.precision[StepMonitor]._sample._dense.tolist(),
            strict=True,
        )
    )
    assert dense[id(table)] == tied
    assert sum(not value for value in dense.values()) == (0 if tied else 1)


def test_half_weights_lose_updates_that_full_ones_keep():
    lost = {}
    for weights in (torch.bfloat16, torch.float32):
        trainer = build(flag="bf16", weights=weights, learning_rate=1e-6, steps=6)
        trainer.train()
        lost[weights] = {name: list(logged(trainer, name).values()) for name in UPDATES}
        assert not any("skipped" in key or "scale" in key for key in trainer.state.log_history[0])
        assert len(lost[weights][UPDATES[0]]) == 2  # of 6 steps, two were looked at
    count = sum(p.requires_grad for p in trainer.model.parameters())
    assert lost[torch.float32][UPDATES[1]] == [pytest.approx(0, abs=0.02)] * 2
    assert lost[torch.float32][UPDATES[2]] == [0, 0]
    assert min(lost[torch.bfloat16][UPDATES[1]]) > 0.9
    assert count >= max(lost[torch.bfloat16][UPDATES[2]]) >= min(lost[torch.bfloat16][UPDATES[2]]) > 0


def test_gradients_that_underflow_are_counted():
    zeros = {}
    for scale in (2.0**16, 2.0**-20):
        trainer = build(loss_scale_init=scale, steps=2)
        trainer.train()
        zeros[scale] = logged(trainer, UPDATES[0])[1]
    assert zeros[2.0**16] < 0.01
    assert zeros[2.0**-20] > 0.3


def test_a_warm_up_begins_without_an_update():
    trainer = build(flag=None, steps=4, warmup_steps=2)
    trainer.train()
    assert list(logged(trainer, "precision/update_lost_frac")) == [2]  # the first learning rate is 0


def test_the_mean_of_the_finite_norms():
    single = build(infinite=2, steps=8, logging_steps=1)
    single.train()
    norms = list(logged(single, "grad_norm").values())
    assert [math.isfinite(norm) for norm in norms] == [False] * 2 + [True] * 6
    assert list(logged(single, "precision/grad_norm_finite")) == [3, 4, 5, 6, 7, 8]
    window = build(infinite=2, steps=8, logging_steps=4)
    window.train()
    assert logged(window, "precision/grad_norm_finite") == {
        4: pytest.approx(sum(norms[2:4]) / 2),
        8: pytest.approx(sum(norms[4:]) / 4),  # the end of an epoch hands over the last one twice
    }


def test_without_metrics_skips_are_still_seen():
    trainer = build(infinite=7, precision_metrics=False)
    trainer.train()
    assert list(logged(trainer, "learning_rate").values()) == schedule(12, held=7)
    assert not any(key.startswith("precision/") for entry in trainer.state.log_history for key in entry)
    assert trainer.precision[StepMonitor].skipped == 7
    assert trainer.precision[StepMonitor]._sample is None
    assert trainer.precision[StepMonitor]._norms == []


def test_evaluations_have_none_and_the_last_log_what_was_not_logged():
    trainer = build(steps=2)
    trainer.train()
    trainer.log({"eval_loss": 1.0})
    with_metrics = [entry for entry in trainer.state.log_history if any("precision/" in key for key in entry)]
    assert [entry["step"] for entry in with_metrics] == [1, 2]
    for evaluation in ({}, {"eval_strategy": "steps", "eval_steps": 3}):  # after which the model is in eval mode
        trainer = build(infinite=2, steps=3, logging_steps=10, **evaluation)
        trainer.train()
        last = trainer.state.log_history[-1]
        assert "train_loss" in last
        assert (last["precision/skipped_steps"], last["precision/effective_steps"]) == (2, 1)
        assert last["precision/loss_scale"] == 2.0**14
        assert math.isfinite(last["precision/grad_norm_finite"])
        assert set(UPDATES) <= last.keys()


@pytest.mark.parametrize("step", [2, 4])
def test_a_resumed_run_logs_the_same(step, tmp_path):
    settings = {"infinite": 3, "steps": 10, "logging_steps": 5, "save_strategy": "steps", "save_steps": 1}
    whole = build(**settings, output_dir=str(tmp_path / "whole"))
    whole.train()
    resumed = build(**settings, output_dir=str(tmp_path / "resumed"))
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{step}"))
    assert cells.fingerprint(resumed.model) == cells.fingerprint(whole.model)
    histories = [
        {e["step"]: {k: v for k, v in e.items() if k != "epoch"} for e in t.state.log_history if "loss" in e}
        for t in (whole, resumed)
    ]
    assert histories[0] == histories[1]
    assert {5, 10} == set(histories[0])
    assert histories[0][10]["precision/skipped_steps"] == 3
    assert UPDATES[2] in histories[0][10]


def test_a_checkpoint_with_a_scale_that_unscales_nothing_begins_with_the_configs(tmp_path, caplog):
    """A stock run of many skips leaves a scale of 0, from which the next step makes NaN of all weights."""
    build(steps=3, save_strategy="steps", save_steps=2, output_dir=str(tmp_path)).train()
    file = tmp_path / "checkpoint-2" / "scaler.pt"
    state = torch.load(file, weights_only=True)
    for scale in (0.0, 2.0**200):
        torch.save({**state, "scale": scale}, file)
        trainer = build(steps=3, loss_scale_init=1024.0)
        caplog.clear()
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        (said,) = [
            record.getMessage() for record in caplog.records if record.name == "safe_trainers.numerics.loss_scale"
        ]
        assert f"has the loss scale {scale:g}, which cannot unscale gradients: starting from 1024 instead" in said
        assert logged(trainer, "precision/loss_scale")[3] == 1024
        assert logged(trainer, "precision/effective_steps")[3] == 3
        assert all(p.isfinite().all() for p in trainer.model.parameters())


# ---- several processes ----

TOGETHER = """
import json, math, sys, torch
import test_step_monitor
from test_step_monitor import build
from torch.distributed.fsdp import fully_shard
from safe_trainers.numerics.update_sample import UpdateSample

trainer = build(steps=8, logging_steps=1, per_device_train_batch_size=2)
rank = trainer.args.process_index
first = next(trainer.model.parameters())
first.register_hook(lambda g: torch.full_like(g, math.inf) if rank == 1 and trainer.state.global_step < 2 else g)
trainer.train()
keys = ("step", "learning_rate", "grad_norm")
history = [{k: v for k, v in e.items() if k in keys or "precision/" in k}
           for e in trainer.state.log_history if "loss" in e]

# The same layers, whole and in shards, with the same gradients.
mesh = torch.distributed.init_device_mesh("cpu", (2,))
found = []
for sharded in (False, True):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(9, 7), torch.nn.Linear(7, 3)).to(torch.bfloat16)
    if sharded:
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sample = UpdateSample(optimizer, size=10**6)
    for _ in range(3):
        for parameter in model.parameters():
            gradient = torch.randn(parameter.shape, dtype=torch.bfloat16).relu()
            if sharded:
                gradient = torch.distributed.tensor.distribute_tensor(gradient, mesh, parameter.placements)
            parameter.grad = gradient
        sample.before()
        optimizer.step()
        sample.after(skipped=False)
    def total(sums):
        torch.distributed.all_reduce(sums)
        return sums
    found.append(sample.metrics(total))
content = {"history": history, "whole": found[0], "shards": found[1]}
open(f"{sys.argv[1]}/{rank}.json", "w").write(json.dumps(content))
"""


@pytest.mark.slow
def test_two_processes_decide_and_log_as_one(tmp_path):
    run_in_two_processes(TOGETHER, tmp_path, beside=__file__)
    results = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    alone = build(infinite=2, steps=8, per_device_train_batch_size=4)
    alone.train()
    single = [entry for entry in alone.state.log_history if "loss" in entry]
    history = results[0]["history"]
    assert len(history) == len(single) == 8
    # Two processes add the gradients of a batch in another order than one, so that single elements of the some 2,900
    # may underflow on one side only.
    some = 2 / 2900
    for together, one in zip(history, single, strict=True):
        assert together == {
            key: pytest.approx(one[key], rel=1e-2, abs=some if key.endswith("_frac") else 1e-12) for key in together
        }
        assert together["precision/skipped_steps"] == min(2, together["step"])
    assert results[0]["whole"] == results[0]["shards"] == results[1]["shards"]
    assert 0 < results[0]["shards"]["update_lost_frac"] < 1
    assert 0 < results[0]["shards"]["grad_zero_frac"] < 1
