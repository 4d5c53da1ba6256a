"""Classes of users between the two of the package: own constructors, own scorings, extra models, own optimizers."""

import cells
import pytest
import torch
import trl
from cells import Cell
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from safe_trainers import (
    PrecisionBase,
    PrecisionMixin,
    PrecisionWarning,
    SafeDPOConfig,
    SafeGRPOConfig,
    SafeSFTConfig,
    tiny,
)
from safe_trainers.core.patches import has_replacements, replaced_by
from upstream import needs_images_of_turns


def sandwiched(between):
    return type(f"Safe{between.__name__}", (PrecisionMixin, between, PrecisionBase), {"config_class": SafeGRPOConfig})


class AlphaFirst(trl.GRPOTrainer):
    def __init__(self, alpha, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.alpha = alpha


class AlphaSecond(trl.GRPOTrainer):
    def __init__(self, model, alpha=0.1, *args, **kwargs):
        super().__init__(model, *args, **kwargs)
        self.alpha = alpha


class AlphaAnywhere(trl.GRPOTrainer):
    def __init__(self, *args, **kwargs):
        self.alpha = kwargs.pop("alpha")
        super().__init__(*args, **kwargs)


@pytest.mark.parametrize("between", [AlphaFirst, AlphaSecond, AlphaAnywhere])
def test_a_constructor_may_have_arguments_of_its_own(between):
    made = cells.arguments(Cell("text", "grpo", "fp32", None), SafeGRPOConfig)
    safe = sandwiched(between)
    assert safe(alpha=0.5, **made).alpha == 0.5
    with pytest.raises(TypeError, match="beta_of_mine"):
        safe(**made, alpha=0.5, beta_of_mine=1)
    positional = [made.pop("model")] if between is AlphaSecond else []
    if between is not AlphaAnywhere:
        assert safe(*positional, 0.5, **made).alpha == 0.5


class ScoresReferenceFirst(trl.GRPOTrainer):
    """Scores its reference before TRL's loss scores the policy."""

    first = True

    def _score_reference(self, inputs):
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        with torch.no_grad():
            for parameter in self.ref_model.parameters():
                parameter.mul_(1.5)
            self._get_per_token_logps_and_entropies(self.ref_model, ids, mask, inputs["completion_ids"].size(1))

    def compute_loss(self, model, inputs, *args, **kwargs):
        if self.first:
            self._score_reference(inputs)
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        if not self.first:
            self._score_reference(inputs)
        return loss


@pytest.mark.parametrize("corrects", [False, True])
def test_scorings_of_other_models_are_not_taken_for_the_policys(corrects):
    logs = {}
    for first in (False, True):
        made = cells.arguments(
            Cell("text", "grpo", "fp32", None), SafeGRPOConfig, steps=1, beta=1e-6, rollout_correction=corrects,
            logging_steps=1,
        )  # fmt: skip
        torch.manual_seed(0)
        trainer = sandwiched(type("First", (ScoresReferenceFirst,), {"first": first}))(**made)
        trainer.train()
        logs[first] = next(entry for entry in trainer.state.log_history if "loss" in entry)
    for key in ("loss", "grad_norm", "precision/logp_mismatch_mean"):
        assert logs[True][key] == logs[False][key], key
    assert logs[True]["precision/logp_mismatch_mean"] < 1e-5


class WithCritic(trl.GRPOTrainer):
    """Has another model, without a head of a language model."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.critic = AutoModelForSequenceClassification.from_pretrained(cells.folder("text"), num_labels=1)


def test_another_model_may_have_no_head():
    made = cells.arguments(Cell("text", "grpo", "bf16", "bf16"), SafeGRPOConfig, steps=1, cast_lm_head_to_fp32=True)
    trainer, seen = sandwiched(WithCritic)(**made), set()
    trainer.model.lm_head.register_forward_hook(lambda module, args, output: seen.add(output.dtype))
    trainer.train()
    assert seen == {torch.float32}
    assert replaced_by(trainer.model.lm_head, "forward") == ["float32-head"]
    assert not has_replacements(trainer.critic.score)


def test_a_reference_model_of_the_user_keeps_its_dtype():
    made = cells.arguments(Cell("text", "dpo", "fp32", None), SafeDPOConfig, steps=1)
    reference = AutoModelForCausalLM.from_pretrained(cells.folder("text"), dtype=torch.bfloat16)
    with pytest.warns(PrecisionWarning, match="Its weights are bfloat16, and those of the policy float32"):
        cells.SAFE["dpo"](**made, ref_model=reference).train()
    assert {parameter.dtype for parameter in reference.parameters()} == {torch.bfloat16}


def test_the_best_weights_of_a_model_that_was_compiled_meanwhile_are_loaded(tmp_path):
    made = cells.arguments(
        Cell("text", "sft", "bf16", "bf16"), SafeSFTConfig, steps=2, eval_strategy="steps", eval_steps=1,
        save_strategy="steps", save_steps=1, load_best_model_at_end=True, output_dir=str(tmp_path),
    )  # fmt: skip
    trainer = cells.SAFE["sft"](**made, eval_dataset=made["train_dataset"])
    trainer.model = torch.compile(trainer.model, backend="eager")
    trainer.train()
    saved = load_file(f"{trainer.state.best_model_checkpoint}/model.safetensors")
    live = {name.removeprefix("_orig_mod."): tensor for name, tensor in trainer.model.state_dict().items()}
    assert saved
    assert all(torch.equal(live[name.removeprefix("_orig_mod.")], tensor) for name, tensor in saved.items())


class NoRate(torch.optim.SGD):
    """Chooses its step size itself, and has no learning rate in its groups."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        for group in self.param_groups:
            group["lr"] = None

    def step(self, closure=None):
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter -= 0.1 * parameter.grad


def test_an_optimizer_may_have_no_learning_rate():
    made = cells.arguments(Cell("text", "sft", "fp32", None), SafeSFTConfig, steps=2, logging_steps=1)

    def train(kind):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_pretrained(cells.folder("text"))
        optimizer = NoRate([p for p in model.parameters() if p.requires_grad])
        constant = torch.optim.lr_scheduler.LRScheduler.__new__(Constant)
        trainer = kind(**{**made, "model": model, "args": kind_of(kind)}, optimizers=(optimizer, constant))
        trainer.train()
        return cells.fingerprint(trainer.model)

    kind_of = {
        cells.SAFE["sft"]: made["args"],
        cells.STOCK["sft"]: cells.arguments(
            Cell("text", "sft", "fp32", None), trl.SFTConfig, steps=2, logging_steps=1
        )["args"],
    }.__getitem__
    made["args"].model_init_kwargs = kind_of(cells.STOCK["sft"]).model_init_kwargs = None
    assert train(cells.SAFE["sft"]) == train(cells.STOCK["sft"])


class Constant(torch.optim.lr_scheduler.LRScheduler):
    """Sets no learning rate."""

    def step(self, epoch=None):
        return None

    def get_last_lr(self):
        return [0.0]

    def state_dict(self):
        return {}


class InChunks(trl.GRPOTrainer):
    """Generates two rows at a time."""

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        made = [super(InChunks, self)._generate_single_turn(prompt_ids[i : i + 2], *args, **kwargs) for i in (0, 2)]
        return tuple(_joined([part[n] for part in made]) for n in range(len(made[0])))


def _joined(parts):
    return [row for part in parts for row in part] if isinstance(parts[0], list) else parts[0]


class OwnInputs(trl.GRPOTrainer):
    """Prepares the inputs of `generate` itself, and expects tensors."""

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        ids = torch.tensor([[1, *prompt_ids[0]]])
        prepared = super(trl.GRPOTrainer, self)._prepare_inputs({"input_ids": ids, "attention_mask": ids != 0})
        assert all(isinstance(value, torch.Tensor) for value in prepared.values())
        return super()._generate_single_turn(prompt_ids, *args, **kwargs)


class Reversed(trl.GRPOTrainer):
    """Reverses the rows of a batch."""

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        return {
            key: value.flip(0) if isinstance(value, torch.Tensor) and value.dim() else value
            for key, value in batch.items()
        }


@pytest.mark.parametrize("between", [InChunks, OwnInputs, Reversed])
def test_own_rollouts_are_measured(between):
    made = cells.arguments(
        Cell("text", "grpo", "fp32", None), SafeGRPOConfig, steps=1, logging_steps=1, num_generations=2
    )
    trainer = sandwiched(between)(**made)
    trainer.train()
    log = next(entry for entry in trainer.state.log_history if "precision/logp_mismatch_mean" in entry)
    assert log["precision/logp_mismatch_mean"] < 1e-5
    assert log["precision/unscored_frac"] == 0


class ReversedRollouts(trl.GRPOTrainer):
    """Generates for the rows of a batch in reversed order."""

    def _generate_single_turn(self, prompt_ids, images, fields, *args, **kwargs):
        fields = {
            key: value.flip(0) if isinstance(value, torch.Tensor) else value[::-1] for key, value in fields.items()
        }
        ids, *others = super()._generate_single_turn(prompt_ids[::-1], images[::-1], fields, *args, **kwargs)
        return ids[::-1], *others


@needs_images_of_turns
def test_rows_that_only_their_images_tell_apart_are_measured():
    made = cells.arguments(
        Cell("llava", "grpo", "fp32", None), SafeGRPOConfig, steps=1, logging_steps=1, num_generations=4,
        per_device_train_batch_size=16, max_completion_length=2, temperature=0.05,
    )  # fmt: skip
    made["train_dataset"] = tiny.prompt_dataset(16, seed=0)  # one prompt, and a different image in each row
    trainer = sandwiched(ReversedRollouts)(**made)
    trainer.train()
    log = next(entry for entry in trainer.state.log_history if "precision/logp_mismatch_mean" in entry)
    assert log["precision/logp_mismatch_max"] < 1e-5
    assert log["precision/unscored_frac"] == 0
