"""The check of one NaN in a run: in a gradient, a weight, a pixel or a reward."""

import logging
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import TrainerCallback

from ..model.parts import find_parts
from .build import Heard, Setup, Workshop, quiet
from .cells import VISION
from .outcome import Row


STEPS, SPOILED = 4, 1
_REPORTS = re.compile(r"\bnan\b|\binf\b|finite", re.IGNORECASE)


def spoil(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy with NaN as its first element.

    Args:
        tensor: A floating-point tensor of any shape.
    """
    spoiled = tensor.clone()
    spoiled.view(-1)[0] = math.nan
    return spoiled


def weight_of(trainer: Any) -> torch.nn.Parameter:
    """Returns a trainable weight of an attention layer, else the first trainable weight.

    Args:
        trainer: The trainer.
    """
    trainable = [(name, p) for name, p in trainer.model.named_parameters() if p.requires_grad]
    return next((p for name, p in trainable if "q_proj" in name), trainable[0][1])


def in_gradient(trainer: Any, step: int = SPOILED) -> None:
    """Puts NaN into one element of a gradient, in one step.

    Args:
        trainer: The trainer.
        step: The number of optimizer steps before it.
    """
    weight_of(trainer).register_hook(lambda g: spoil(g) if trainer.state.global_step == step else g)


def in_last_gradient(trainer: Any) -> None:
    """Puts NaN into one element of a gradient, in the last step, after which no rollout fails.

    Args:
        trainer: The trainer.
    """
    in_gradient(trainer, STEPS - 1)


def in_weight(trainer: Any) -> None:
    """Puts NaN into one element of a weight, after one step.

    Args:
        trainer: The trainer.
    """

    class Spoils(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == SPOILED:
                with torch.no_grad():
                    weight_of(trainer).view(-1)[0] = math.nan

    trainer.add_callback(Spoils())


def in_pixels(trainer: Any) -> None:
    """Puts NaN into one pixel, in the losses of one step.

    Args:
        trainer: The trainer.
    """

    def hook(tower: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if trainer.state.global_step != SPOILED or not torch.is_grad_enabled():
            return None
        floating = {k: spoil(v) if _is_floating(v) else v for k, v in kwargs.items()}
        return tuple(spoil(v) if _is_floating(v) else v for v in args), floating

    tower = next(iter(find_parts(trainer.model).towers.values()))
    tower.register_forward_pre_hook(hook, with_kwargs=True)


def in_reward(trainer: Any) -> None:
    """Makes the reward of one completion NaN, in one rollout.

    Args:
        trainer: The trainer.
    """
    reward = trainer.reward_funcs[0]

    def spoiled(*args: Any, **kwargs: Any) -> list[float]:
        rewards = reward(*args, **kwargs)
        return [math.nan, *rewards[1:]] if trainer.state.global_step == SPOILED else rewards

    spoiled.__name__ = "spoiled"
    trainer.reward_funcs[0] = spoiled


def _is_floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def nan(shop: Workshop) -> Iterator[Row]:
    """Puts one NaN into a run, in each place.

    Args:
        shop: The trainer class.
    """
    subject = shop.subject
    places: list[tuple[str, Callable[[Any], None], Setup]] = [
        ("gradient, fp32", in_gradient, Setup(steps=STEPS)),
        ("gradient of the last step, fp32", in_last_gradient, Setup(steps=STEPS)),
        ("gradient, bf16 autocast", in_gradient, Setup(flag="bf16", steps=STEPS)),
        ("weight, fp32", in_weight, Setup(steps=STEPS)),
    ]
    if subject.takes_images:
        places.append(("pixel, fp32", in_pixels, Setup(VISION, steps=STEPS)))
    if subject.task in ("grpo", "rloo"):
        places.append(("reward, fp32", in_reward, Setup(steps=STEPS)))
    for run, place, setup in places:
        failed = shop.control(setup)
        yield failed or shop.attempt(run, lambda p=place, s=setup, r=run: _spoiled(shop, p, s, r))  # type: ignore[misc]


def _spoiled(shop: Workshop, place: Callable[[Any], None], setup: Setup, run: str) -> Row:
    trainer, heard = shop.construct(setup), Heard()
    place(trainer)
    loggers = [logging.getLogger(name) for name in ("", "transformers", "trl", "accelerate")]
    for logger in loggers:
        logger.addHandler(heard)
    try:
        with quiet() as said:
            trainer.train()
    except Exception as error:  # an error that ends the run is one of the right results
        return Row(run, "passed", f"stops: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}")
    finally:
        for logger in loggers:
            logger.removeHandler(heard)
    wrong = sum(not bool(p.isfinite().all()) for p in trainer.model.parameters())
    if not wrong:
        return Row(run, "passed", "all weights are finite")
    lines = [*(str(entry.message) for entry in said), *heard.lines]
    reports = next((line for line in lines if _REPORTS.search(line)), None)
    if reports is not None:
        return Row(run, "passed", f"warns: {' '.join(reports.split())[:120]}")
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    if any(not math.isfinite(float(entry["loss"])) for entry in log):
        return Row(run, "passed", "the log has a loss that is not finite")
    shown = {key: log[-1].get(key) for key in ("loss", "grad_norm")}
    logged = ", ".join(f"{key} {value}" for key, value in shown.items() if value is not None)
    return Row(run, "fault", f"{wrong} weights are NaN at the end; the last step logs {logged}", "silent-nan")
