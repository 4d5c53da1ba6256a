"""With `rollout_correction=True` the losses of samples of `generate` have TRL's importance weights."""

import cells
import pytest
import torch
from cells import Cell
from policing import reset_accelerate

from safe_trainers import PrecisionError, SafeGRPOConfig, SafeGRPOTrainer, SafeRLOOConfig
from safe_trainers.rollout.logprob_recorder import SAMPLER_KEY


HAS_LIMITS = "vllm_importance_sampling_clip_min" in SafeGRPOConfig.__dataclass_fields__
needs_limits = pytest.mark.skipif(not HAS_LIMITS, reason="the limits of this TRL have other names")

MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo")
TEXT = Cell("text", "grpo", "fp32", None)


def weights_by_hand(difference, mode, low, high):
    """TRL's weights in float64, one token or sequence after the other."""
    rows = []
    for row in difference.double().tolist():
        if mode.startswith("sequence"):
            row = [sum(row)]
        weights = [2.718281828459045**value for value in row]
        if mode.endswith("mask"):
            rows.append([weight if low <= weight <= high else 0.0 for weight in weights])
        else:
            rows.append([min(max(weight, low), high) for weight in weights])
    return torch.tensor(rows, dtype=torch.float32)


class Compared(SafeGRPOTrainer):
    """Computes each loss twice: weighted here, and with TRL's own code for samples of vLLM."""

    noise = 0.2  # standard deviation in nats of what is added to the sampler's log-probabilities
    pairs, unweighted, seen, ratios = (), (), (), ()

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        noise = torch.randn(batch[SAMPLER_KEY].shape, generator=torch.Generator().manual_seed(self.state.global_step))
        return {**batch, SAMPLER_KEY: batch[SAMPLER_KEY] + self.noise * noise}

    def _compute_loss(self, model, inputs):
        plain = dict(inputs)
        kept = []
        scoring = self._get_per_token_logps_and_entropies

        def keep(*args, **kwargs):
            result = scoring(*args, **kwargs)
            kept.append(result[0].detach())
            return result

        self._get_per_token_logps_and_entropies = keep
        ours = super()._compute_loss(model, inputs)
        del self._get_per_token_logps_and_entropies
        args = self.args
        difference = plain.get("old_per_token_logps", kept[0]) - plain[SAMPLER_KEY]
        difference = difference.where(plain["completion_mask"] != 0, 0.0)
        low = args.vllm_importance_sampling_clip_min
        weights = weights_by_hand(
            difference, args.vllm_importance_sampling_mode, 0.0 if low is None else low,
            args.vllm_importance_sampling_clip_max,
        )  # fmt: skip
        losses = [ours]
        for correction in (True, False):
            self.use_vllm = self.vllm_importance_sampling_correction = correction
            losses.append(super()._compute_loss(model, {**plain, "importance_sampling_ratio": weights}))
        self.use_vllm = False
        self.ratios = (*self.ratios, difference.exp()[plain["completion_mask"].bool()])
        if not torch.is_grad_enabled():
            self.pairs = (*self.pairs, (ours.item(), losses[1].item(), None, None))
            return ours
        parameters = [p for p in model.parameters() if p.requires_grad]
        grads = [torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True) for loss in losses]
        flat = [torch.cat([g.flatten() for g in found if g is not None]) for found in grads]
        self.pairs = (*self.pairs, (ours.item(), losses[1].item(), flat[0], flat[1]))
        self.unweighted = (*self.unweighted, flat[2])
        self.seen = (*self.seen, plain)
        return ours


def difference_of(own, other):
    """The norm of the difference of two gradients as a share of the second one's."""
    return ((own - other).norm() / other.norm()).item()


def build(trainer_class=SafeGRPOTrainer, cell=TEXT, config=SafeGRPOConfig, **changes):
    reset_accelerate()
    changes = {"max_completion_length": 8, "rollout_correction": True, **changes}
    torch.manual_seed(0)
    return trainer_class(**cells.arguments(cell, config, **changes))


@needs_limits
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("loss_type", LOSSES)
def test_the_loss_is_that_of_trl_for_the_same_weights(loss_type, mode):
    limits = {"vllm_importance_sampling_clip_max": 1.4, "vllm_importance_sampling_clip_min": 0.6}
    level = "sequence" if loss_type == "luspo" else "token"
    trainer = build(
        Compared, loss_type=loss_type, vllm_importance_sampling_mode=mode, importance_sampling_level=level, **limits
    )
    trainer.train()
    assert len(trainer.pairs) == 2
    for (ours, theirs, own, other), unweighted in zip(trainer.pairs, trainer.unweighted, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-6)
        assert difference_of(own, other) < 1e-5
        assert difference_of(own, unweighted) > 1e-2  # what stock trains


@needs_limits
@pytest.mark.parametrize("changes", [{"beta": 0.1}, {"steps_per_generation": 2, "num_iterations": 2}])
def test_weights_do_not_change_the_kl_term_and_use_old_log_probabilities(changes):
    trainer = build(Compared, vllm_importance_sampling_mode="token_truncate", steps=4, **changes)
    trainer.train()
    for ours, theirs, own, other in trainer.pairs:
        assert ours == pytest.approx(theirs, abs=1e-6)
        assert difference_of(own, other) < 1e-5
    assert all(("old_per_token_logps" in batch) == ("num_iterations" in changes) for batch in trainer.seen)


@needs_limits
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"top_k": 10},
        {"top_p": 0.8},
        {"min_p": 0.05},
        {"temperature": 0.7},
        {"repetition_penalty": 1.1},
        {"top_k": 10, "top_p": 0.8, "min_p": 0.05, "temperature": 0.7, "repetition_penalty": 1.1},
    ],
    ids=lambda changes: "-".join(changes) or "untruncated",
)
def test_truncated_sampling_leaves_the_weights_at_one(changes):
    class Exact(Compared):
        noise = 0.0

    trainer = build(Exact, max_completion_length=32, **changes)
    trainer.train()
    assert torch.cat(trainer.ratios).mean().item() == pytest.approx(1.0, abs=1e-3)
    for (_, _, own, _), unweighted in zip(trainer.pairs, trainer.unweighted, strict=True):
        assert own.norm().item() == pytest.approx(unweighted.norm().item(), rel=0.05)
        assert own.norm() > 0


def test_the_buffered_batch_is_not_changed():
    class Watched(SafeGRPOTrainer):
        same = ()

        def compute_loss(self, model, inputs, *args, **kwargs):
            before = inputs["advantages"].clone()
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            self.same = (*self.same, torch.equal(inputs["advantages"], before))
            return loss

    trainer = build(Watched)
    trainer.train()
    assert trainer.same == (True, True)


@pytest.mark.parametrize("family", ["text", "qwen2_5_vl"])
def test_it_works_without_metrics_and_with_images(family):
    trainer = build(cell=Cell(family, "grpo", "fp32", "bf16", lora=True), precision_metrics=False)
    trainer.train()
    assert trainer.state.global_step == 2


@needs_limits
def test_evaluation_is_weighted_too():
    trainer = build(Compared, vllm_importance_sampling_mode="token_truncate")
    trainer.evaluate(trainer.train_dataset)
    assert trainer.pairs
    assert all(ours == pytest.approx(theirs, abs=1e-6) for ours, theirs, *_ in trainer.pairs)


def test_a_trainer_without_weights_of_tokens_is_refused():
    with pytest.raises(PrecisionError, match="rollout-cannot-be-corrected") as caught:
        build(cells.SAFE["rloo"], Cell("text", "rloo", "fp32", None), SafeRLOOConfig)
    assert "SafeRLOOTrainer has no importance weights of tokens" in str(caught.value)
    assert "rollout_correction=True" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"loss_type": "vespo"}, "computes weights of its own"),
        ({"use_liger_kernel": True}, "Liger"),
        ({"use_transformers_continuous_batching": True}, "continuous batching"),
    ],
)
def test_settings_without_log_probabilities_are_refused(changes, reason):
    if not changes.keys() <= SafeGRPOConfig.__dataclass_fields__.keys():
        pytest.skip("this TRL has no such setting")
    with pytest.raises(PrecisionError, match="rollout-cannot-be-corrected") as caught:
        build(**changes)
    assert reason in str(caught.value)


def test_samples_without_log_probabilities_end_the_run():
    trainer = build(generation_kwargs={"num_beams": 2})
    with pytest.raises(PrecisionError, match="were not recorded"):
        trainer.train()
    assert trainer.state.global_step == 0


@needs_limits
def test_a_probability_of_zero_ends_the_run():
    class Broken(SafeGRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            batch = super()._generate_and_score_completions(inputs)
            logps = batch[SAMPLER_KEY].clone()
            logps[0, 0] = -torch.inf
            return {**batch, SAMPLER_KEY: logps}

    limits = {"vllm_importance_sampling_clip_max": None, "vllm_importance_sampling_clip_min": 0.5}
    trainer = build(Broken, vllm_importance_sampling_mode="token_truncate", **limits)
    with pytest.raises(PrecisionError, match="importance-weights-not-finite"):
        trainer.train()


@pytest.mark.parametrize("old_logps", ["scored", "loss"])
@pytest.mark.parametrize("task", ["grpo", "rloo"])
def test_old_log_probabilities_are_those_of_the_loss_while_the_policy_is_unchanged(task, old_logps):
    key = "old_per_token_logps" if task == "grpo" else "old_logps"

    class Noisy(cells.SAFE[task]):
        """As if scoring had rounded otherwise than the loss."""

        compared = ()

        def _generate_and_score_completions(self, inputs):
            batch = super()._generate_and_score_completions(inputs)
            return {**batch, key: batch[key] + 0.05}

        def _compute_loss(self, model, inputs):
            loss = super()._compute_loss(model, inputs)
            with torch.no_grad():
                ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
                mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
                now, *_ = self._get_per_token_logps_and_entropies(model, ids, mask, inputs["completion_ids"].shape[1])
            now = now if task == "grpo" else (now * inputs["completion_mask"]).sum(1)
            self.compared = (*self.compared, (now - inputs[key]).abs().max().item())
            return loss

    cell = Cell("text", task, "fp32", None)
    trainer = build(
        Noisy, cell, cells.SAFE_CONFIG[task], rollout_correction=False, old_logps=old_logps, num_iterations=2, steps=4
    )
    trainer.train()
    first, second, third, fourth = trainer.compared  # two losses for each rollout; the policy changes after the first
    assert min(second, fourth) > 0.01
    if old_logps == "loss":
        assert max(first, third) == 0
    else:
        assert min(first, third) == pytest.approx(0.05, abs=1e-3)


@pytest.mark.parametrize("old_logps", ["scored", "loss"])
def test_without_noise_the_source_of_old_log_probabilities_changes_nothing(old_logps):
    trainer = build(rollout_correction=False, old_logps=old_logps, num_iterations=2, steps=4)
    trainer.train()
    plain = build(rollout_correction=False, num_iterations=2, steps=4)
    plain.train()
    assert cells.fingerprint(trainer.model) == cells.fingerprint(plain.model)


@pytest.mark.parametrize("old_logps", ["scored", "loss"])
def test_a_second_training_does_not_take_the_policy_for_unchanged(old_logps):
    """TRL keeps the batch of the first training, while the step is counted from 0 again."""
    cell = Cell("text", "grpo", "fp32", None)
    made = cells.arguments(
        cell, SafeGRPOConfig, 1, old_logps=old_logps, num_iterations=4, steps_per_generation=1, learning_rate=0.05
    )
    trainer = SafeGRPOTrainer(**made)
    trainer.train()
    trainer.train()
    last = [entry for entry in trainer.state.log_history if "loss" in entry][-1]
    assert abs(last["loss"]) > 0.01  # the loss of the scored log-probabilities, which an equal policy would make 0
    assert last.get("precision/logp_batch_noise", 0.0) == 0.0
