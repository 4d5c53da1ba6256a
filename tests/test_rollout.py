"""What rollouts compute in, and that generation leaves the trainer's weights alone."""

import cells
import pytest
import torch
import trl
from cells import Cell
from peft import get_peft_model
from transformers import AutoModelForCausalLM

from safe_trainers import PrecisionBase, PrecisionMixin
from safe_trainers.rollout import casts_undone


SMALL = {"num_blocks": 32, "max_batch_tokens": 64}
CONTINUOUS = {"use_transformers_continuous_batching": True, "transformers_continuous_batching_config": SMALL}


def build(cell, safe=True, trainer_class=None, **changes):
    made = cells.arguments(cell, cells.PLAIN[cell.task], **changes)
    return (trainer_class or (cells.SAFE if safe else cells.STOCK)[cell.task])(**made)


# --- continuous batching ---------------------------------------------------------------------------------------------


def snapshot(trainer):
    """Every number that training goes on with, and where it is."""
    state = {
        f"{index}.{name}": value
        for index, group in enumerate(trainer.optimizer.state.values())
        for name, value in group.items()
    } if trainer.optimizer is not None else {}  # fmt: skip
    own = dict(trainer.model.named_parameters()) | dict(trainer.model.named_buffers()) | state
    grads = {f"{name}.grad": p.grad for name, p in trainer.model.named_parameters() if p.grad is not None}
    return {name: (t.data_ptr(), t.dtype, t.detach().clone()) for name, t in (own | grads).items()}


def assert_same(before, after):
    assert before.keys() == after.keys()
    for name, (place, dtype, value) in before.items():
        assert (after[name][0], after[name][1]) == (place, dtype), name
        assert torch.equal(after[name][2], value), name


def half_copy(trainer, cell):
    """A model of its own with the trainer's weights, in half precision."""
    copy = AutoModelForCausalLM.from_pretrained(cells.folder(cell.family))
    if cell.lora:
        copy = get_peft_model(copy, trainer.model.peft_config["default"])
    copy.load_state_dict(trainer.model.state_dict())
    return copy.to(cells.SHORT[cell.flag])


@pytest.mark.parametrize("cell", [
    Cell("text", "grpo", "fp32", "bf16"),
    Cell("text", "grpo", "fp32", "bf16", lora=True),
    Cell("text", "rloo", "bf16", "bf16", lora=True),
], ids=str)  # fmt: skip
def test_continuous_batching_leaves_masters_and_optimizer_alone(cell):
    seen = []

    class Watching(cells.SAFE[cell.task]):
        def _generate_single_turn(self, prompt_ids, *args, **kwargs):
            before = snapshot(self)
            result = super()._generate_single_turn(prompt_ids, *args, **kwargs)
            assert_same(before, snapshot(self))
            expected = half_copy(self, cell).generate_batch(
                prompt_ids,
                generation_config=self.generation_config,
                continuous_batching_config=self.continuous_batching_config,
            )
            tokens = result[0] if isinstance(result, tuple) else result
            assert [list(ids) for ids in tokens] == [output.generated_tokens for output in expected.values()]
            assert not self.generation_config.do_sample
            seen.append({dtype for _, dtype, _ in before.values() if dtype.is_floating_point})
            return result

    greedy = {"generation_kwargs": {"do_sample": False}}
    if cell.task == "grpo":  # alike completions have no advantage, and the entropy moves the weights all the same
        greedy["entropy_coef"] = 0.1
    trainer = build(cell, trainer_class=Watching, steps=3, **CONTINUOUS, **greedy)
    start = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    trainer.train()
    assert len(seen) == 3
    if cell.weights == "fp32":
        assert seen == [{torch.float32}] * 3
        moments = [s["exp_avg"] for s in trainer.optimizer.state.values()]
        assert {m.dtype for m in moments} == {torch.float32}
        assert any(m.abs().max() > 0 for m in moments)
        assert any(not torch.equal(p, start[n]) for n, p in trainer.model.named_parameters() if n in start)
    coverage = trainer.safety_contract["rollout"]
    assert (coverage.state, trainer.safety_contract.fired["rollout"]) == ("covered", 3)
    assert "half copy" in coverage.detail


def test_stock_trains_on_in_half():
    stock = build(Cell("text", "grpo", "fp32", "bf16"), safe=False, **CONTINUOUS)
    stock.train()
    assert {p.dtype for p in stock.model.parameters()} == {torch.bfloat16}  # silently


def test_gradients_that_are_being_accumulated_are_kept_too():
    """TRL's cast takes them along, in the middle of an optimizer step."""
    model = AutoModelForCausalLM.from_pretrained(cells.folder("text"))
    model(input_ids=torch.arange(6)[None], labels=torch.arange(6)[None]).loss.backward()
    before = {n: (p.data_ptr(), p.grad.data_ptr(), p.grad.clone()) for n, p in model.named_parameters()}
    buffers = {name: buffer for name, buffer in model.named_buffers()}
    with casts_undone(model):
        model.to(torch.bfloat16)
        assert {p.grad.dtype for p in model.parameters()} == {torch.bfloat16}
    for name, parameter in model.named_parameters():
        place, grad_place, grad = before[name]
        assert (parameter.data_ptr(), parameter.grad.data_ptr()) == (place, grad_place)
        assert torch.equal(parameter.grad, grad)
    assert buffers
    assert all(buffer is buffers[name] for name, buffer in model.named_buffers())


def test_weights_come_back_when_generation_fails():
    model = AutoModelForCausalLM.from_pretrained(cells.folder("text"))

    def fail():
        with casts_undone(model):
            model.to(torch.float16)
            raise RuntimeError("the thread died")

    with pytest.raises(RuntimeError, match="the thread died"):
        fail()
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_one_half_copy_is_alive_meanwhile():
    model = AutoModelForCausalLM.from_pretrained(cells.folder("text"))
    full = sum(p.nbytes for p in model.parameters())
    with casts_undone(model):
        model.to(torch.bfloat16)
        assert sum(p.nbytes for p in model.parameters()) * 2 == full


# --- what training computes in is looked at --------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["grpo", "rloo"])
@pytest.mark.parametrize(("flag", "seen"), [("bf16", torch.bfloat16), (None, torch.float32)])
def test_the_installed_trl_scores_in_what_the_policy_says(task, flag, seen):
    trainer = build(Cell("text", task, "fp32", flag, lora=True), steps=1)
    assert trainer._scored_in is None
    trainer.train()
    assert trainer._scored_in == seen
    assert not any(module._forward_pre_hooks for module in trainer.model.modules())


def test_rollouts_follow_a_trainer_that_scores_outside_autocast():
    autocast = []

    class Outside(trl.GRPOTrainer):
        def _get_per_token_logps_and_entropies(self, *args, **kwargs):
            forward = self.model.forward
            self.model.forward = self.model._original_forward
            try:
                with torch.autocast("cpu", enabled=False):
                    self.accelerator.native_amp, native = False, self.accelerator.native_amp
                    return super()._get_per_token_logps_and_entropies(*args, **kwargs)
            finally:
                self.model.forward = forward
                self.accelerator.native_amp = native

        def _generate_single_turn(self, *args, **kwargs):
            autocast.append(torch.is_autocast_enabled("cpu"))
            return super()._generate_single_turn(*args, **kwargs)

    class SafeOutside(PrecisionMixin, Outside, PrecisionBase):
        pass

    trainer = build(Cell("text", "grpo", "fp32", "bf16"), trainer_class=SafeOutside, steps=3)
    trainer.train()
    assert trainer._scored_in == torch.float32
    assert autocast == [True, False, False]  # what the first one computes in is the policy's word


def test_nothing_is_hooked_into_a_compiled_model():
    trainer = build(Cell("text", "grpo", "fp32", "bf16"), steps=1)
    trainer.args.torch_compile = True
    trainer.train()
    assert trainer._scored_in is None
