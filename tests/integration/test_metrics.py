"""The mismatch of real rollouts in real trainers: what is logged is what a slow reference makes of the same tokens."""

import contextlib
import logging
import math
import warnings

import benchmark_modules
import cells
import pytest
import torch
import trl
import vllm_stand_in
from calling_tools import calling_tokenizer, look
from cells import Cell
from datasets import Dataset
from mismatch_reference import reference
from packaging.version import Version
from peft import LoraConfig
from policing import reset_accelerate
from transformers import OPTConfig, OPTForCausalLM, TrainerCallback

from safe_trainers import PrecisionError, SafeGRPOConfig, SafeGRPOTrainer, tiny
from safe_trainers.rollout.logprob_recorder import SAMPLER_KEY
from safe_trainers.rollout.mismatch import limits_of
from safe_trainers.rollout.mismatch_meter import _with_finite_weights
from safe_trainers.testing import fp16_on_cpu
from upstream import (
    CLIP_MAX,
    generate_asks_the_tower_first,
    needs_continuous_settings,
    needs_limit_below,
    needs_missing_logps,
    needs_tools,
)


pytestmark = pytest.mark.filterwarnings("ignore::safe_trainers.PrecisionWarning")

ALL = {
    f"precision/{name}"
    for name in (
        "unscored_frac", "logp_mismatch_mean", "logp_mismatch_max", "logp_mismatch_k1", "logp_mismatch_k3",
        "logp_mismatch_ulp", "seq_logratio_abs_mean", "seq_logratio_std", "seq_ess", "mismatch_pos_0_15",
    )
}  # fmt: skip
LIMITED = {"precision/is_masked_frac", "precision/phantom_clip_frac"}
MEAN, MAX = "precision/logp_mismatch_mean", "precision/logp_mismatch_max"
EXACT = 1e-5  # nats: float32 with a cache and padding beside float32 without


def ours(entry, prefix=""):
    """What a log says of rollouts."""
    named = {key.removeprefix(prefix): value for key, value in entry.items() if key.startswith(prefix)}
    named.pop("precision/logp_batch_noise", None)  # it is of losses
    wanted = (
        "precision/logp_",
        "precision/seq_",
        "precision/mismatch_",
        "precision/un",
        "precision/is_masked",
        "precision/phantom",
    )
    return {k: v for k, v in named.items() if k.startswith(wanted) and not k.startswith("precision/unrewarded")}


def logged(trainer):
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def watched(trainer_class):
    """A trainer that collects, on its own, what the metrics of each log have to be made from."""

    class Watched(trainer_class):
        rows, expected, errors = (), (), ()  # sequences since the last log; metrics of each log; errors of recordings
        forwards = None

        def _get_per_token_logps_and_entropies(self, *args, **kwargs):
            out = super()._get_per_token_logps_and_entropies(*args, **kwargs)
            if self.forwards is not None:
                self.forwards.append(out[0].detach().clone())
            return out

        def _generate_and_score_completions(self, inputs):
            self.forwards = []
            batch = super()._generate_and_score_completions(inputs)
            forwards, self.forwards = self.forwards, None
            sampler = full_forward(self, batch)
            if "old_per_token_logps" in batch or "old_logps" in batch:
                self.collect(batch.get("old_per_token_logps", forwards[0] if forwards else None), sampler, batch)
                return batch
            return {**batch, "full_forward": sampler}

        def _compute_loss(self, model, inputs):
            self.forwards = []
            loss = super()._compute_loss(model, inputs)
            forwards, self.forwards = self.forwards, None
            if "full_forward" in inputs:
                recorded, counts = inputs[SAMPLER_KEY], mask_of(inputs)
                error = (recorded - inputs["full_forward"])[counts.bool()].abs().max().item()
                self.errors = (*self.errors, error)
                self.collect(forwards[0], recorded, inputs)
            return loss

        def collect(self, trainer, sampler, batch):
            counts = mask_of(batch)
            sides = (side.double().tolist() for side in (trainer, sampler))
            self.rows = (*self.rows, *zip(*sides, counts.tolist(), strict=True))

        def log(self, logs, *args, **kwargs):
            if "loss" in logs or "eval_loss" in logs:
                computed = "bfloat16" if self.args.bf16 else "float16" if self.args.fp16 else "float32"
                self.expected = (*self.expected, reference(self.rows, computed, limits_of(self.args)))
                self.rows = ()
            super().log(logs, *args, **kwargs)

    return Watched


def mask_of(batch):
    return batch["completion_mask"] * batch.get("tool_mask", torch.ones_like(batch["completion_mask"]))


def full_forward(trainer, batch):
    """Log-probabilities of the completions by one forward pass outside autocast, without a cache."""
    media = {key: batch[key] for key in ("pixel_values", "image_grid_thw", "mm_token_type_ids") if key in batch}
    model = trainer.model.get_base_model() if hasattr(trainer.model, "get_base_model") else trainer.model
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=attention, use_cache=False, **media).logits
    width = batch["completion_ids"].shape[1]
    logits = logits[:, -width - 1 : -1].float() / trainer.temperature
    logps = logits.log_softmax(-1).gather(-1, batch["completion_ids"].unsqueeze(-1)).squeeze(-1)
    ends = trainer.generation_config.eos_token_id
    if isinstance(ends, list):  # TRL knows one end, and counts the padding after the others as tokens
        found = torch.isin(batch["completion_ids"], torch.tensor(ends)).int()
        logps[found.cumsum(1) > found] = torch.nan
    return logps


def train(cell, trainer_class=None, config=None, callbacks=(), **changes):
    reset_accelerate()
    made = cells.arguments(cell, config or cells.SAFE_CONFIG[cell.task], **{"max_completion_length": 8, **changes})
    torch.manual_seed(0)
    trainer = (trainer_class or cells.SAFE[cell.task])(**made, callbacks=list(callbacks))
    trainer.train()
    return trainer


# ---- What is logged is right ----

ALIGNED = [
    Cell("text", "grpo", "fp32", None),
    Cell("text", "grpo", "fp32", "bf16", lora=True, beta=0.1),
    Cell("llava", "grpo", "fp32", "bf16", lora=True),
    Cell("qwen2_5_vl", "grpo", "fp32", None, lora=True),
]


@pytest.mark.parametrize("cell", ALIGNED, ids=str)
def test_log_probabilities_of_the_loss_are_compared_with_those_that_were_sampled(cell):
    """With the weights in float32 and stock rollouts, one forward pass outside autocast is what the sampler has."""
    trainer = train(cell, watched(cells.SAFE[cell.task]), rollout_compute="stock" if cell.flag else "training",
                    steps=4, logging_steps=2, gradient_accumulation_steps=2)  # fmt: skip
    assert len(trainer.errors) == 8
    assert max(trainer.errors) < EXACT
    found = [ours(entry) for entry in logged(trainer)]
    assert len(found) == 2
    for entry, expected in zip(found, trainer.expected, strict=True):
        assert set(entry) == ALL | LIMITED
        assert entry == {name: pytest.approx(value, rel=1e-9, abs=1e-15) for name, value in expected.items()}
    assert all(entry[MEAN] > (1e-4 if cell.flag else 1e-9) for entry in found)


OLD = [
    (Cell("text", "grpo", "fp32", "bf16", lora=True), {"steps_per_generation": 2, "gradient_accumulation_steps": 1}),
    (Cell("text", "grpo", "fp32", "bf16", lora=True), {"num_iterations": 2, "beta": 0.1}),
    (Cell("text", "rloo", "fp32", "bf16", lora=True), {}),
    (Cell("llava", "rloo", "fp32", "bf16", lora=True, beta=0.1), {"gradient_accumulation_steps": 2}),
]


@pytest.mark.parametrize(("cell", "changes"), OLD, ids=lambda value: str(value)[:40])
def test_old_log_probabilities_are_compared_where_trl_has_them(cell, changes):
    trainer = train(cell, watched(cells.SAFE[cell.task]), rollout_compute="stock", steps=4, **changes)
    compared = 0
    for entry, expected in zip(map(ours, logged(trainer)), trainer.expected, strict=True):
        assert entry.keys() == expected.keys()
        compared += len(entry)
        # The reference is of a full forward pass here, and the differences are a thousand times its error.
        assert entry == {name: pytest.approx(value, rel=2e-2, abs=3e-6) for name, value in expected.items()}
    assert compared >= 2 * len(ALL)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_iterations": 2},
        {"steps_per_generation": 4, "gradient_accumulation_steps": 2},
        {"steps_per_generation": 4, "gradient_accumulation_steps": 1, "num_generations": 4},
    ],
    ids=str,
)
def test_a_loss_tells_the_change_of_policy_from_the_mismatch_with_the_sampler(changes):
    changes = {**changes, "steps": 4, "max_completion_length": 24}
    made = cells.arguments(Cell("text", "grpo", "fp32", "bf16"), SafeGRPOConfig, **changes)
    now = []

    class Scored(SafeGRPOTrainer):
        def _get_per_token_logps_and_entropies(
            self, model, input_ids, attention_mask, logits_to_keep, *args, **kwargs
        ):
            found = super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, *args, **kwargs
            )
            if torch.is_grad_enabled():
                now.append((self.state.global_step, found[0].detach(), input_ids))
            return found

        def _compute_loss(self, model, inputs):
            loss = super()._compute_loss(model, inputs)
            step, logps, _ = now[-1]
            now[-1] = (step, logps, {k: inputs[k] for k in ("old_per_token_logps", SAMPLER_KEY, "completion_mask")})
            return loss

    trainer = Scored(**made)
    trainer.train()
    moved, gaps = set(), []
    for step, entry in enumerate(logged(trainer)):
        losses = [(logps.double(), inputs) for at, logps, inputs in now if at == step]
        masks = [inputs["completion_mask"].bool() for _, inputs in losses]

        def mean(sizes, masks=masks):
            return torch.cat([size[mask] for size, mask in zip(sizes, masks, strict=True)]).abs().mean().item()

        change = mean([logps - inputs["old_per_token_logps"].double() for logps, inputs in losses])
        gap = mean([inputs["old_per_token_logps"].double() - inputs[SAMPLER_KEY].double() for _, inputs in losses])
        if "precision/logp_batch_noise" in entry:  # the rollout of this step
            assert entry["precision/logp_batch_noise"] == pytest.approx(change, rel=1e-9, abs=1e-12)
            assert "precision/logratio_policy" not in entry
        else:
            moved.add(step)
            assert entry["precision/logratio_policy"] == pytest.approx(change, rel=1e-9)
            assert entry["precision/logratio_gap"] == pytest.approx(gap, rel=1e-9)
            assert change > 10 * gap
            gaps.append(gap)
    assert max(gaps) > 1e-5
    assert moved == ({1, 3} if len(moved) == 2 else {1, 2, 3})


def test_the_temperature_is_on_both_sides():
    trainer = train(Cell("text", "grpo", "fp32", None), watched(SafeGRPOTrainer), temperature=0.6)
    assert max(trainer.errors) < EXACT
    assert max(entry[MAX] for entry in logged(trainer)) < EXACT


def test_what_is_cut_off_from_the_distribution_is_no_mismatch():
    changes = {"top_k": 3, "min_p": 0.1, "repetition_penalty": 1.3, "temperature": 1.4}
    trainer = train(Cell("text", "grpo", "fp32", None), watched(SafeGRPOTrainer), **changes)
    assert max(trainer.errors) < EXACT
    assert max(entry[MAX] for entry in logged(trainer)) < EXACT


@pytest.mark.parametrize("task", ["grpo", "rloo"])
def test_rows_are_not_mixed_up_by_shuffling_and_slicing(task):
    """Eight micro-batches of one rollout: a single row at another place would differ by whole nats."""
    changes = {"steps_per_generation": 8, "gradient_accumulation_steps": 8, "per_device_train_batch_size": 2}
    trainer = train(Cell("text", task, "fp32", None), **changes)
    for entry in logged(trainer):
        assert entry["precision/unscored_frac"] == 0
        assert 0 < entry[MAX] < EXACT


@pytest.mark.parametrize("family", ["text", "llava", "aria"])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_stock_rollouts_are_seen_to_differ(family, lora):
    """Four tokens by a model of one layer: aligned, both sides do the same arithmetic."""
    cell = Cell(family, "grpo", "fp32", "bf16", lora)
    found = {}
    for compute in ("training", "stock"):
        trainer = train(cell, rollout_compute=compute, max_completion_length=4)
        found[compute] = max(entry[MEAN] for entry in logged(trainer))
    assert found["training"] < 1e-6
    if not lora and (family == "text" or not generate_asks_the_tower_first()):  # stock generates under autocast, too
        assert found["stock"] < 1e-6
    else:
        assert 1e-3 < found["stock"] < 1e-2


@pytest.mark.parametrize("cell", [Cell("text", "grpo", "fp16", "fp16"), Cell("llava", "rloo", "fp32", "fp16", True)],
                         ids=str)  # fmt: skip
def test_real_fp16(cell):
    trainer = train(cell, fp16_on_cpu(cells.SAFE[cell.task]), max_completion_length=16, loss_scale_init=64.0)
    assert trainer.accelerator.scaler is not None
    for entry in logged(trainer):
        assert set(ours(entry)) >= ALL
        assert entry[MAX] < 5e-3  # bfloat16 has eight times that
        assert entry["precision/logp_mismatch_ulp"] < 1


def test_evaluation_has_its_own():
    cell = Cell("text", "grpo", "fp32", None)
    made = cells.arguments(cell, SafeGRPOConfig, max_completion_length=8, per_device_eval_batch_size=4)
    trainer = watched(SafeGRPOTrainer)(**made, eval_dataset=made["train_dataset"].select(range(6)))
    for _ in range(2):
        found = trainer.evaluate()
        assert set(ours(found, "eval_")) == ALL | LIMITED
        assert ours(found, "eval_") == {k: pytest.approx(v, rel=1e-9) for k, v in trainer.expected[-1].items()}
    trainer.train()
    assert set(ours(logged(trainer)[0])) == ALL | LIMITED


def test_what_was_seen_since_the_last_log_is_in_the_last_one():
    trainer = train(Cell("text", "grpo", "fp32", None), steps=3, logging_steps=10)
    assert set(ours(trainer.state.log_history[-1])) == ALL | LIMITED


def test_an_evaluation_after_the_last_step_leaves_the_last_log_its_own():
    cell = Cell("text", "grpo", "fp32", None)
    changes = {"logging_steps": 10, "eval_strategy": "steps", "eval_steps": 3, "per_device_eval_batch_size": 4}
    made = cells.arguments(cell, SafeGRPOConfig, steps=3, max_completion_length=8, **changes)
    trainer = watched(SafeGRPOTrainer)(**made, eval_dataset=made["train_dataset"].select(range(4)))
    trainer.train()
    assert not trainer.model.training
    evaluated, last = trainer.state.log_history
    assert set(ours(evaluated, "eval_")) == set(ours(last)) == ALL | LIMITED


def test_a_run_begins_with_nothing_of_one_that_was_stopped():
    class Stops(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            raise KeyboardInterrupt

    cell, stops = Cell("text", "grpo", "fp32", None), Stops()
    made = cells.arguments(cell, SafeGRPOConfig, steps=1, max_completion_length=8)
    trainer = watched(SafeGRPOTrainer)(**made, callbacks=[stops])
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.remove_callback(stops)
    trainer.rows = ()
    trainer.train()
    (entry,) = logged(trainer)
    assert ours(entry) == {
        name: pytest.approx(value, rel=1e-9, abs=1e-15) for name, value in trainer.expected[0].items()
    }


# ---- Nothing else changes ----

UNCHANGED = [
    (Cell("text", "grpo", "fp32", None), {}),
    (Cell("text", "grpo", "fp32", "bf16", lora=True, beta=0.1), {"steps_per_generation": 2, "num_iterations": 2}),
    (Cell("llava", "grpo", "bf16", "bf16", lora=True), {"temperature": 0.7, "top_k": 9}),
    (Cell("llava", "rloo", "fp32", "bf16"), {}),
    (Cell("text", "rloo", "fp32", None, beta=0.1), {"gradient_accumulation_steps": 2}),
]


class Tokens(TrainerCallback):
    def __init__(self):
        self.sampled = []

    def on_step_end(self, args, state, control, **kwargs):
        self.sampled.append([batch["completion_ids"].tolist() for batch in self.trainer._buffered_inputs])


@pytest.mark.parametrize(("cell", "changes"), UNCHANGED, ids=lambda value: str(value)[:40])
def test_tokens_losses_and_weights_are_the_same_without(cell, changes):
    runs = []
    for on in (True, False):
        reset_accelerate()
        watch = Tokens()
        made = cells.arguments(cell, cells.SAFE_CONFIG[cell.task], steps=4, precision_metrics=on, **changes)
        torch.manual_seed(0)
        trainer = watch.trainer = cells.SAFE[cell.task](**made, callbacks=[watch])
        trainer.train()
        timing = ("step_time", "train_runtime", "train_samples_per_second", "train_steps_per_second")
        numbers = [
            {k: v for k, v in entry.items() if not k.startswith("precision/") and k not in timing}
            for entry in trainer.state.log_history
        ]
        runs.append((watch.sampled, numbers, cells.fingerprint(trainer.model), torch.random.get_rng_state().tolist()))
        assert any(ours(entry) for entry in trainer.state.log_history) is on
        kept = on and cell.task == "grpo"
        assert any(SAMPLER_KEY in batch for batch in trainer._buffered_inputs) is kept
    for with_metrics, without in zip(*runs, strict=True):
        assert with_metrics == without


def test_trls_own_key_is_left_alone():
    trainer = train(Cell("text", "grpo", "fp32", None))
    assert all("sampling_per_token_logps" not in batch for batch in trainer._buffered_inputs)


# ---- Tools ----


@needs_tools
def test_turns_after_tools_are_measured_and_what_tools_return_is_not():
    torch.manual_seed(0)
    model, tokenizer = tiny.build_model("text"), calling_tokenizer()
    settings = cells.settings(Cell("text", "grpo", "fp32", None), 3) | {
        "per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 64,
        "max_tool_calling_iterations": 2, "generation_kwargs": {"max_new_tokens": 6},
    }  # fmt: skip
    trainer = watched(SafeGRPOTrainer)(
        model,
        args=SafeGRPOConfig(**settings),
        processing_class=tokenizer,
        reward_funcs=lambda completions, **_: [float(len(completion)) for completion in completions],
        train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": "what is in the picture"}]] * 8}),
        tools=[look],
    )
    trainer.train()
    assert any((batch["completion_mask"] > batch["tool_mask"]).any() for batch in trainer._buffered_inputs)
    assert max(trainer.errors) < EXACT
    for entry, expected in zip(map(ours, logged(trainer)), trainer.expected, strict=True):
        assert entry["precision/unscored_frac"] == 0
        assert entry["precision/mismatch_pos_16_63"] > 0  # turns after the first were there
        assert entry[MAX] < EXACT
        assert entry == {name: pytest.approx(value, rel=1e-9, abs=1e-15) for name, value in expected.items()}


# ---- What another sampler says ----


def sampled_elsewhere(missing):
    """A rollout of the user's, with log-probabilities of its own as vLLM gives them, `None` for some tokens."""

    def rollout(prompts, trainer):
        tokenizer = trainer.processing_class
        texts = [tokenizer.apply_chat_template(p, add_generation_prompt=True, tokenize=False) for p in prompts]
        ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
        completions, logps = [], []
        for row, prompt in enumerate(ids):
            whole = torch.tensor([prompt])
            with torch.no_grad():
                whole = trainer.model.generate(whole, max_new_tokens=5, do_sample=False, eos_token_id=None)
                logits = trainer.model(whole).logits[0, len(prompt) - 1 : -1]
            completions.append(whole[0, len(prompt) :].tolist())
            given = logits.log_softmax(-1).gather(-1, whole[0, len(prompt) :, None]).squeeze(-1).tolist()
            logps.append([missing if (row + place) % 4 == 0 else value for place, value in enumerate(given)])
        return {"prompt_ids": ids, "completion_ids": completions, "logprobs": logps}

    return rollout


@pytest.mark.parametrize("missing", [pytest.param(None, marks=needs_missing_logps), math.nan, -math.inf])
def test_log_probabilities_of_another_sampler_are_taken_and_missing_ones_counted(missing):
    made = cells.arguments(Cell("text", "grpo", "fp32", None), SafeGRPOConfig, max_completion_length=5)
    trainer = SafeGRPOTrainer(**made, rollout_func=sampled_elsewhere(missing))
    trainer.train()
    for entry in logged(trainer):
        assert entry["precision/unscored_frac"] == 0.25
        assert entry[MAX] < EXACT
        assert all(math.isfinite(value) for value in ours(entry).values())
        assert math.isfinite(entry["loss"])


def test_a_sampler_without_any_is_counted_whole():
    made = cells.arguments(Cell("text", "grpo", "fp32", None), SafeGRPOConfig, max_completion_length=5)

    def rollout(prompts, trainer):
        given = sampled_elsewhere(math.nan)(prompts, trainer)
        return {**given, "logprobs": [[math.nan] * len(row) for row in given["completion_ids"]]}

    trainer = SafeGRPOTrainer(**made, rollout_func=rollout)
    trainer.train()
    expected = {"precision/unscored_frac": 1.0, "precision/is_masked_frac": 0.0}  # each token weighs 1
    assert [ours(entry) for entry in logged(trainer)] == [expected] * 2


UNLIMITED = {"vllm_importance_sampling_mode": "token_truncate", CLIP_MAX: None,
             "vllm_importance_sampling_clip_min": 0.1}  # fmt: skip


def sampled_by_vllm(monkeypatch, broken, safe=True, **changes):
    """vLLM's stand-in samples, and the first token of each completion has a broken log-probability."""
    stand_in = vllm_stand_in.install(monkeypatch)
    reset_accelerate()
    complete = stand_in.LLM._complete

    def completes(self, ids, params):
        made = complete(self, ids, params)
        for entry in made.logprobs[0].values():
            entry.logprob = broken
        return made

    monkeypatch.setattr(stand_in.LLM, "_complete", completes)
    cell, classes = Cell("text", "grpo", "fp32", None), cells.SAFE if safe else cells.STOCK
    made = cells.arguments(cell, (cells.SAFE_CONFIG if safe else cells.PLAIN)["grpo"], use_vllm=True,
                           vllm_mode="colocate", **changes)  # fmt: skip
    return classes["grpo"](**made)


@pytest.mark.parametrize("mode", ["sequence_mask", "token_mask"])
@pytest.mark.parametrize("broken", [pytest.param(math.nan, marks=needs_missing_logps), -math.inf])
def test_what_trl_masks_for_a_broken_log_probability_of_vllm_is_counted(broken, mode, monkeypatch):
    trainer = sampled_by_vllm(monkeypatch, broken, vllm_importance_sampling_mode=mode)
    trainer.train()
    assert len(logged(trainer)) == 2
    for entry in logged(trainer):
        assert entry["precision/unscored_frac"] == 0.25
        masked = 0.0 if math.isnan(broken) else 1.0 if mode == "sequence_mask" else 0.25
        assert entry["precision/is_masked_frac"] == masked
        assert (entry["grad_norm"] == 0) is (masked == 1)  # nothing is learned, and the metric says why
        assert all(math.isfinite(value) for value in ours(entry).values())


@needs_limit_below
def test_importance_weights_that_are_not_finite_are_refused_where_stock_loses_its_weights(monkeypatch):
    stock = sampled_by_vllm(monkeypatch, -math.inf, safe=False, **UNLIMITED)
    with contextlib.suppress(RuntimeError):  # what samples meets it in the second step
        stock.train()
    assert not any(p.isfinite().all() for p in stock.model.parameters())
    vllm_stand_in.forget_process(monkeypatch)
    trainer = sampled_by_vllm(monkeypatch, -math.inf, **UNLIMITED)
    with pytest.raises(PrecisionError, match="importance-weights-not-finite") as refused:
        trainer.train()
    assert "4 of 16 importance weights are not finite" in str(refused.value)
    assert f"{CLIP_MAX}=3.0" in str(refused.value)
    vllm_stand_in.forget_process(monkeypatch)
    trainer = sampled_by_vllm(monkeypatch, -math.inf, **UNLIMITED | {CLIP_MAX: 3.0})
    trainer.train()
    assert all(math.isfinite(entry["grad_norm"]) for entry in logged(trainer))
    assert all(p.isfinite().all() for p in trainer.model.parameters())


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_a_reference_model_is_not_taken_for_the_policy(beta, monkeypatch):
    """The policy is not scored before the loss here, so that the reference model is scored first."""
    vllm_stand_in.install(monkeypatch)
    reset_accelerate()
    cell = Cell("text", "grpo", "fp32", None, beta=beta)
    changes = {"use_vllm": True, "vllm_mode": "colocate", "top_k": 10}
    changes["vllm_importance_sampling_correction"] = False
    trainer = SafeGRPOTrainer(**cells.arguments(cell, SafeGRPOConfig, **changes))
    trainer.vllm_generation.llm.llm_engine.model_config.dtype = torch.float32  # the stand-in has none
    trainer.train()
    assert [math.isfinite(entry["precision/logp_mismatch_mean"]) for entry in logged(trainer)] == [True, True]


def test_a_missing_importance_weight_names_what_mends_it():
    """Before 1.16 TRL hands NaN on."""
    batch = {"importance_sampling_ratio": torch.tensor([[1.0, math.nan]])}
    with pytest.raises(PrecisionError, match="`vllm_importance_sampling_correction=False`"):
        _with_finite_weights(batch)
    batch["importance_sampling_ratio"][0, 1] = 0.0
    assert _with_finite_weights(batch) is batch


# ---- Where there is nothing to compare ----


def absent(caplog, cell, why, trainer_class=None, **changes):
    with caplog.at_level(logging.WARNING, "safe_trainers.rollout.mismatch_meter"):
        trainer = train(cell, trainer_class, steps=3, **changes)
    assert [ours(entry) for entry in logged(trainer)] == [{}] * 3
    said = [record.getMessage() for record in caplog.records if record.name == "safe_trainers.rollout.mismatch_meter"]
    assert said == [f"precision/logp_mismatch_* are not logged: {why}"]
    return trainer


def test_beams_are_no_samples_of_one_distribution(caplog):
    trainer = absent(
        caplog,
        Cell("text", "grpo", "fp32", None),
        "generation neither samples nor decodes greedily",
        generation_kwargs={"num_beams": 2, "do_sample": False},
    )
    assert trainer.generation_config.num_beams == 2


@needs_continuous_settings
@pytest.mark.parametrize("task", ["grpo", "rloo"])
def test_continuous_batching_gives_none(task, caplog):
    trainer = absent(
        caplog,
        Cell("text", task, "fp32", None),
        "use_transformers_continuous_batching=True does not return log-probabilities",
        use_transformers_continuous_batching=True,
        transformers_continuous_batching_config={"num_blocks": 32, "max_batch_tokens": 64},
    )
    assert trainer.state.global_step == 3


@pytest.mark.parametrize("task", ["grpo", "rloo"])
def test_dropout_is_not_measured_as_mismatch(task, caplog):
    cell = Cell("text", task, "fp32", None)
    made = cells.arguments(cell, cells.SAFE_CONFIG[task], steps=2, per_device_eval_batch_size=4)
    adapter = LoraConfig(r=4, lora_dropout=0.5, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    trainer = cells.SAFE[task](**made, peft_config=adapter, eval_dataset=made["train_dataset"].select(range(4)))
    with caplog.at_level(logging.WARNING, "safe_trainers.rollout.mismatch_meter"):
        trainer.train()
    assert [ours(entry) for entry in logged(trainer)] == [{}] * 2
    (said,) = [r.getMessage() for r in caplog.records if r.name == "safe_trainers.rollout.mismatch_meter"]
    assert "dropout is active, and differs between rollout and loss" in said
    assert trainer.evaluate()[f"eval_{MAX}"] < EXACT


def test_dropout_that_is_no_module_is_found(caplog):
    """OPT calls `nn.functional.dropout` with a rate of its own, which `disable_dropout` does not reach either."""
    tokenizer = tiny.build_processor("text")
    for rate in (0.0, 0.1):
        torch.manual_seed(0)
        config = OPTConfig(vocab_size=len(tokenizer), hidden_size=16, ffn_dim=32, num_attention_heads=2, dropout=rate,
                           num_hidden_layers=1, word_embed_proj_dim=16, max_position_embeddings=256)  # fmt: skip
        made = cells.arguments(Cell("text", "grpo", "fp32", None), SafeGRPOConfig, model_init_kwargs=None)
        model = OPTForCausalLM(config)
        with caplog.at_level(logging.WARNING, "safe_trainers.rollout.mismatch_meter"):
            trainer = SafeGRPOTrainer(**made | {"model": model}, processing_class=tokenizer)
            trainer.train()
        said = [
            record.getMessage() for record in caplog.records if record.name == "safe_trainers.rollout.mismatch_meter"
        ]
        if rate:
            assert [ours(entry) for entry in logged(trainer)] == [{}] * 2
            assert "dropout is active, and differs between rollout and loss" in said[0]
        else:
            assert not said
            assert max(entry[MAX] for entry in logged(trainer)) < EXACT


# ---- Rewards that are no numbers ----


def rewards(value, rows):
    """The value for some rows of each rollout, and numbers for the others."""
    return lambda completions, **_: [value if row in rows else float(row) for row in range(len(completions))]


@pytest.mark.parametrize("value", [None, math.nan])
@pytest.mark.parametrize("task", ["grpo", "rloo"])
def test_a_reward_that_is_no_number_is_counted_and_reaches_no_loss(task, value):
    made = cells.arguments(Cell("text", task, "fp32", None), cells.SAFE_CONFIG[task], steps=3)
    trainer = cells.SAFE[task](**{**made, "reward_funcs": rewards(value, {0})})
    trainer.train()
    for entry in logged(trainer):
        assert entry["precision/unrewarded_frac"] == 0.25
        assert math.isfinite(entry["loss"])
        assert math.isfinite(entry["grad_norm"])
    assert all(p.isfinite().all() for p in trainer.model.parameters())


@pytest.mark.parametrize("value", [None, math.nan])
@pytest.mark.parametrize("task", ["grpo", "rloo"])
def test_of_several_functions_each_is_counted(task, value):
    """TRL leaves one without a number out of the sum, and logs nothing of it."""
    made = cells.arguments(Cell("text", task, "fp32", None), cells.SAFE_CONFIG[task])
    length, style = rewards(value, {0, 1}), rewards(value, {2})
    length.__name__, style.__name__ = "length", "style"
    trainer = cells.SAFE[task](**{**made, "reward_funcs": [length, style]})
    trainer.train()
    for entry in logged(trainer):
        found = {key: share for key, share in entry.items() if key.startswith("precision/unrewarded")}
        assert found == {
            "precision/unrewarded_frac": 0.0,
            "precision/unrewarded_frac/length": 0.5,
            "precision/unrewarded_frac/style": 0.25,
        }


@pytest.mark.parametrize("task", ["grpo", "rloo"])
def test_a_smaller_last_batch_of_an_evaluation_counts_by_its_completions(task):
    made = cells.arguments(Cell("text", task, "fp32", None), cells.SAFE_CONFIG[task], per_device_eval_batch_size=4)
    made["eval_dataset"] = made["train_dataset"].select(range(5))  # ten completions: 4, 4 and 2
    trainer = cells.SAFE[task](
        **{
            **made,
            "reward_funcs": lambda completions, **_: [None if len(completions) < 4 else 1.0 for _ in completions],
        }
    )
    trainer.evaluate()
    assert trainer.state.log_history[-1]["eval_precision/unrewarded_frac"] == pytest.approx(0.2)


@pytest.mark.parametrize("value", [math.inf, -math.inf])
@pytest.mark.parametrize(
    ("task", "settings"),
    [("rloo", {}), ("grpo", {"scale_rewards": "none"})],
    ids=["rloo", "grpo without scaling"],
)
def test_an_infinite_reward_is_refused_where_stock_trains_on(task, settings, value):
    cell, broken = Cell("text", task, "fp32", None), rewards(value, {0})
    broken.__name__ = "length_ratio"
    stock = cells.STOCK[task](**{**cells.arguments(cell, cells.PLAIN[task], **settings), "reward_funcs": broken})
    with contextlib.suppress(RuntimeError):  # RLOO's weights are gone after a step, which its next rollout meets
        stock.train()
    assert any(not math.isfinite(entry["reward"]) for entry in logged(stock))
    reset_accelerate()
    made = cells.arguments(cell, cells.SAFE_CONFIG[task], **settings)
    safe = cells.SAFE[task](**{**made, "reward_funcs": broken})
    with pytest.raises(PrecisionError, match="infinite-rewards") as refused:
        safe.train()
    assert "1 of 4 rewards of length_ratio are infinite" in str(refused.value)
    assert "return a finite number from length_ratio" in str(refused.value)


@pytest.mark.skipif(Version(trl.__version__) < Version("1.16"), reason="advantages are NaN in older releases")
@pytest.mark.parametrize("value", [math.inf, -math.inf])
@pytest.mark.parametrize(
    ("task", "settings", "warned"),
    [("grpo", {}, 1), ("rloo", {"reward_clip_range": (-5.0, 5.0)}, 0)],
    ids=["a group without advantage", "clipped"],
)
def test_an_infinite_reward_that_stock_leaves_out_or_clips_trains_to_the_same_losses(task, settings, warned, value):
    """The group of the first two completions has the advantage 0, and the other group learns."""
    cell, filtering = Cell("text", task, "fp32", None), rewards(value, {0})
    stock = cells.STOCK[task](**{**cells.arguments(cell, cells.PLAIN[task], **settings), "reward_funcs": filtering})
    stock.train()
    reset_accelerate()
    made = cells.arguments(cell, cells.SAFE_CONFIG[task], **settings)
    safe = cells.SAFE[task](**{**made, "reward_funcs": filtering})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        safe.train()
    assert [(row["loss"], row["grad_norm"]) for row in logged(safe)] == [
        (row["loss"], row["grad_norm"]) for row in logged(stock)
    ]
    assert all(row["grad_norm"] > 0 for row in logged(safe))
    assert len([w for w in caught if "infinite-rewards-ignored" in str(w.message)]) == warned


@pytest.mark.parametrize("weight", [math.nan, math.inf])
def test_a_reward_weight_that_is_no_number_is_refused_where_stock_trains_on(weight):
    cell = Cell("text", "grpo", "fp32", None)
    made = cells.arguments(cell, cells.PLAIN["grpo"], reward_weights=[2.0, weight])
    first = rewards(1.0, set())
    first.__name__ = "first"
    made["reward_funcs"] = [first, cells.token_reward]
    stock = cells.STOCK["grpo"](**made)
    with contextlib.suppress(RuntimeError):  # the weights of the model may be gone after a step
        stock.train()
    cells.reset_autocast()
    seen = {entry["reward"] for entry in logged(stock)}
    expected = {2.0 * entry["rewards/first/mean"] for entry in logged(stock)} if math.isnan(weight) else {math.inf}
    unweighted = {entry["rewards/first/mean"] + entry["rewards/token_reward/mean"] for entry in logged(stock)}
    # The second function counts for nothing, or alone; older releases log rewards without their weights.
    assert seen in (expected, unweighted)
    reset_accelerate()
    with pytest.raises(PrecisionError, match="reward-weights-not-finite") as refused:
        cells.SAFE["grpo"](**made)
    assert f"reward_weights=[2.0, {weight}]" in str(refused.value)
    assert "reward_weights=[2.0, 1.0]" in str(refused.value)


# ---- What it shows ----


def test_float16_on_both_sides_brings_them_together_and_in_the_trainer_alone_buys_nothing(monkeypatch):
    """The benchmark in small: a random model, 4 sequences of 128 tokens. The table is in docs/mismatch.md."""
    benchmark = benchmark_modules.load(monkeypatch, "mismatch")
    pairs = [
        ("bf16", "bf16"),
        ("fp16", "fp16"),
        ("bf16", "fp16"),
        ("autocast fp16", "fp16"),
        ("autocast bf16", "bf16"),
    ]
    rows = benchmark.measure(benchmark.build(), pairs, rows=4, lengths=(128,))
    found = {(row["sampler"], row["trainer"]): row for row in rows}
    bf16, fp16, alone = (found[pair] for pair in pairs[:3])
    assert 6 < bf16["logp_mismatch_mean"] / fp16["logp_mismatch_mean"] < 10
    assert bf16["logp_mismatch_k3"] > 30 * fp16["logp_mismatch_k3"]
    assert alone["logp_mismatch_mean"] > 0.8 * bf16["logp_mismatch_mean"]
    assert alone["logp_mismatch_k3"] > 0.6 * bf16["logp_mismatch_k3"]
    # In spacings of their dtypes both are the same: that is all that is between them.
    assert bf16["logp_mismatch_ulp"] == pytest.approx(fp16["logp_mismatch_ulp"], rel=0.5)
    # Generation under the trainer's autocast is no further apart than half weights are.
    assert found[pairs[4]]["logp_mismatch_mean"] < bf16["logp_mismatch_mean"]
    assert found[pairs[3]]["logp_mismatch_mean"] < fp16["logp_mismatch_mean"]
