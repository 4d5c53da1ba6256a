"""A run that ends with an error, or is interrupted, leaves the model as a run that ends by itself does."""

import pytest
import test_expert_runs as experts
import torch


class InterruptedError(Exception):
    """What ends a run in these tests."""


def interrupt(trainer, step):
    """Ends the run in a backward pass, after `step` steps."""

    def hook(gradient):
        if trainer.state.global_step == step:
            raise InterruptedError
        return gradient

    next(p for p in trainer.model.parameters() if p.requires_grad and p.dim() > 1).register_hook(hook)


def hooks_of(model):
    """Names of the functions that modules call, without those that transformers adds."""
    found = [f for m in model.modules() for table in (m._forward_pre_hooks, m._forward_hooks) for f in table.values()]
    return {f.__qualname__ for f in found if not f.__module__.startswith("transformers")}


@experts.pytestmark[0]
@experts.pytestmark[1]
@pytest.mark.parametrize("step", [0, 1])
def test_an_interrupted_run_leaves_no_hooks(step, tmp_path):
    trainer = experts.trainer_of(
        tmp_path, router_replay="rollout", record_steps=3, max_steps=3, max_completion_length=8
    )
    before = hooks_of(trainer.model)
    interrupt(trainer, step)
    with pytest.raises(InterruptedError):
        trainer.train()
    assert hooks_of(trainer.model) == before
    with torch.no_grad():
        trainer.model(torch.arange(5, 12)[None])  # routers choose again
    assert trainer.precision.not_finite is None or not trainer.precision.not_finite._replay.calls
