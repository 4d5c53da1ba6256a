"""The package waits for the device a fixed number of times per step, and in no step of `generate`."""

import cells
import trl
from cells import Cell
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import TrainerCallback

from safe_trainers import SafeGRPOConfig, SafeGRPOTrainer


WAITS = {"aten._local_scalar_dense.default", "aten.nonzero.default", "aten.equal.default"}
"""Operations whose result the host needs."""


class Waits(TorchDispatchMode):
    """Counts the operations after which the host waits for the device."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += str(func) in WAITS
        return func(*args, **(kwargs or {}))


def waits(safe, tokens):
    """The waits in the third step of a run that samples a number of tokens."""
    trainer_class, config = (SafeGRPOTrainer, SafeGRPOConfig) if safe else (trl.GRPOTrainer, trl.GRPOConfig)
    length = {"max_completion_length": tokens, "generation_kwargs": {"min_new_tokens": tokens}}
    given = cells.arguments(
        Cell("text", "grpo", "fp32", "bf16", lora=True), config, steps=4, logging_steps=4, **length
    )
    trainer, counts, mode = trainer_class(**given), [], Waits()

    class Steps(TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            counts.append(mode.count)

    trainer.add_callback(Steps())
    with mode:
        trainer.train()
    return counts[2] - counts[1]


def test_there_is_no_wait_per_token_and_few_per_step():
    found = {(safe, tokens): waits(safe, tokens) for safe in (False, True) for tokens in (4, 12)}
    assert found[True, 12] - found[True, 4] == found[False, 12] - found[False, 4]
    # The gradient norm (read late by fused optimizers on CUDA), and the rewards, which are on the CPU by then.
    assert found[True, 4] - found[False, 4] <= 2
