"""Checks of optimizer steps: a resumed run, and steps that fp16 skips."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from transformers import TrainerCallback

from .build import VISIBLE_RATE, Setup, Workshop, why_not_adapted, with_changes
from .judges import set_loss_scale
from .outcome import Row


STEPS, SAVED = 4, 3
WINDOW = {"steps_per_generation": 2, "gradient_accumulation_steps": 1}
"""Two steps of each rollout: step 3 is the first of the second rollout."""


def weights_of(trainer: Any) -> dict[str, torch.Tensor]:
    """Copies the parameters of a trainer's model.

    Args:
        trainer: The trainer.
    """
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def resume(shop: Workshop) -> Iterator[Row]:
    """Compares a run that is resumed from its checkpoint with the uninterrupted one.

    Args:
        shop: The trainer class.
    """
    runs = {
        "full, fp32": Setup(),
        "LoRA with dropout, bf16 autocast": Setup(flag="bf16", kind="lora", dropout=0.1),
        "4-bit LoRA, bf16 weights": Setup(weights="bf16", flag="bf16", kind="4bit", dropout=0.1),
    }
    if all(map(shop.subject.accepts, WINDOW)):
        runs["two steps of each rollout, fp32"] = Setup(changes=WINDOW)
    for run, setup in runs.items():
        missing = why_not_adapted(shop.subject, setup.kind)
        if missing:
            yield Row(run, "not applicable", missing)
            continue
        setup = with_changes(replace(setup, steps=STEPS), learning_rate=VISIBLE_RATE)
        failed = shop.control(Setup(kind=setup.kind))
        yield failed or shop.attempt(run, lambda s=setup, r=run: _resumed(shop, s, r))  # type: ignore[misc]


def _resumed(shop: Workshop, setup: Setup, run: str) -> Row:
    folder = shop.folder / "resumed"
    shutil.rmtree(folder, ignore_errors=True)
    saving = with_changes(setup, output_dir=str(folder), save_strategy="steps", save_steps=SAVED)
    whole, again = (_trained(shop, saving) for _ in range(2))
    if _differing(whole, again):
        return Row(run, "could not run", "two uninterrupted runs have different weights")
    resumed = _trained(shop, with_changes(setup, output_dir=str(folder)), str(folder / f"checkpoint-{SAVED}"))
    differing = _differing(whole, resumed)
    if differing:
        most = max(float((resumed[name].double() - whole[name].double()).abs().max()) for name in differing)
        found = f"{len(differing)} of {len(whole)} weights differ, by at most {most:.1e}"
        return Row(run, "fault", found, "resume-differs")
    return Row(run, "passed", f"{len(whole)} weights are bit-identical")


def _trained(shop: Workshop, setup: Setup, checkpoint: str | None = None) -> dict[str, torch.Tensor]:
    trainer = shop.construct(setup)
    trainer.train(resume_from_checkpoint=checkpoint)
    return weights_of(trainer)


def _differing(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> list[str]:
    return [name for name, value in one.items() if not torch.equal(value, two[name])]


class Steps(TrainerCallback):
    """Records for each optimizer step whether weights changed, and how far the schedule went.

    Attributes:
        changed: Whether a trainable weight changed, by step.
        scheduled: Steps of the learning-rate schedule after each step.
    """

    def __init__(self) -> None:
        self.changed: list[bool] = []
        self.scheduled: list[int] = []
        self._before: list[torch.Tensor] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Copies the weights."""
        self._before = [p.detach().clone() for p in model.parameters() if p.requires_grad]

    def on_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Compares the weights."""
        after = [p for p in model.parameters() if p.requires_grad]
        self.changed.append(not all(map(torch.equal, self._before, after)))

    def on_step_end(self, args: Any, state: Any, control: Any, lr_scheduler: Any = None, **kwargs: Any) -> None:
        """Reads the schedule."""
        inner = getattr(lr_scheduler, "scheduler", lr_scheduler)
        self.scheduled.append(int(inner.last_epoch))

    @property
    def ahead(self) -> int:
        """Steps of the schedule in optimizer steps that changed no weight."""
        moved = [now - before for before, now in zip([0, *self.scheduled], self.scheduled, strict=False)]
        return sum(step for step, changed in zip(moved, self.changed, strict=True) if not changed)


def skipped_steps(shop: Workshop) -> Iterator[Row]:
    """Makes one fp16 gradient overflow, and reads the schedule. The loss scaler is a stand-in for CUDA's.

    Args:
        shop: The trainer class.
    """
    failed = shop.control(Setup())
    if failed is not None:
        yield failed
        return
    for optimizer in ("adamw_torch_fused", "adamw_torch"):
        setup = with_changes(Setup(flag="fp16", steps=4), learning_rate=VISIBLE_RATE, optim=optimizer)
        yield shop.attempt(optimizer, lambda s=setup, r=optimizer: _overflowing(shop, s, r))  # type: ignore[misc]


def _overflowing(shop: Workshop, setup: Setup, run: str) -> Row:
    plain, spoiled = Steps(), Steps()
    for steps in (plain, spoiled):
        trainer = shop.construct(setup)
        set_loss_scale(trainer)
        trainer.add_callback(steps)
        if steps is spoiled:
            overflow(trainer)
        trainer.train()
    if not all(plain.changed) or plain.ahead:
        return Row(run, "could not run", "steps are skipped without an overflow")
    if all(spoiled.changed):
        return Row(run, "fault", "a step whose gradient is infinite changed weights", "scheduler-ahead")
    if spoiled.ahead:
        count = spoiled.changed.count(False)
        found = f"the schedule went {spoiled.ahead} steps on in {count} steps that changed no weight"
        return Row(run, "fault", found, "scheduler-ahead")
    return Row(run, "passed", f"{spoiled.changed.count(False)} of {len(spoiled.changed)} steps skipped")


def overflow(trainer: Any, step: int = 1) -> None:
    """Makes the gradients of one parameter infinite in one step.

    Args:
        trainer: The trainer.
        step: The number of optimizer steps before it.
    """
    parameter = next(p for p in trainer.model.parameters() if p.requires_grad)
    parameter.register_hook(lambda g: g * torch.inf if trainer.state.global_step == step else g)
