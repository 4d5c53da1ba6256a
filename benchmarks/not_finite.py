"""Puts NaN and infinity into runs, in 16 places, and records what stock and safe trainers make of it.

    python benchmarks/not_finite.py            # every place, precision and trainer; 10 minutes on 2 cores
    python benchmarks/not_finite.py --slice    # each place once: a minute

The value is put into one element in the second of four steps, or before the run for weights. Outcomes:

- `stopped`: an error ends the run, or its construction.
- `skipped`: the step is skipped, in fp16 by the loss scaler, and all trained weights are finite at the end. Without a
  loss scaler, a warning names it.
- `reported`: a warning names what is not finite, at the latest when the run ends.
- `unharmed`: the weights at the end equal those of the run without the value, bit by bit.
- `excluded`: the value is a reward, which TRL leaves out of the sum by design, and the weights are finite.
- `silent`: anything else.
"""

import argparse
import json
import math
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
warnings.simplefilter("ignore")

import cells
import torch
from cells import Cell
from policing import reset_accelerate
from rich.console import Console
from rich.table import Table
from transformers import TrainerCallback

from safe_trainers import PrecisionWarning
from safe_trainers.testing import fp16_on_cpu


RESULT = Path(__file__).parent / "results" / "not_finite.jsonl"
STEPS, SPOILED = 4, 1
LOSS_SCALE = 256.0
"""The first loss scale of both trainers, at which only the planted value overflows."""
TASKS = ("sft", "grpo", "rloo", "reward")
PRECISIONS = {"fp32": ("fp32", None), "bf16": ("fp32", "bf16"), "pure bf16": ("bf16", None), "fp16": ("fp32", "fp16")}
VALUES = {"nan": math.nan, "inf": math.inf}
REPORTS = ("weights-not-finite", "logps-not-finite", "infinite-rewards-ignored")
OUTCOMES = ("stopped", "skipped", "reported", "unharmed", "excluded", "silent")


def weight_of(trainer: Any, part: str) -> torch.nn.Parameter:
    """Returns the first trainable parameter whose name contains a part."""
    named = trainer.model.named_parameters()
    return next(p for name, p in named if part in name and p.requires_grad)


def spoil(tensor: torch.Tensor, value: float) -> torch.Tensor:
    """Returns a copy with the value as its first element."""
    spoiled = tensor.clone()
    spoiled.view(-1)[0] = value
    return spoiled


def in_gradient(part: str) -> Callable[[Any, float], None]:
    """A gradient element of a parameter, in one backward pass."""

    def place(trainer: Any, value: float) -> None:
        def hook(gradient: torch.Tensor) -> torch.Tensor:
            return spoil(gradient, value) if trainer.state.global_step == SPOILED else gradient

        weight_of(trainer, part).register_hook(hook)

    return place


def in_output(part: str) -> Callable[[Any, float], None]:
    """An output element of a module, in the forward passes of the loss of one step."""

    def place(trainer: Any, value: float) -> None:
        def hook(module: Any, args: Any, output: Any) -> Any:
            if trainer.state.global_step != SPOILED or not torch.is_grad_enabled():
                return output
            if isinstance(output, tuple):
                return (spoil(output[0], value), *output[1:])
            return spoil(output, value)

        module = next(m for name, m in trainer.model.named_modules() if name.endswith(part))
        module.register_forward_hook(hook)

    return place


def in_pixels(trainer: Any, value: float) -> None:
    """One pixel of an image, in the losses of one step."""

    def hook(tower: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if trainer.state.global_step != SPOILED or not torch.is_grad_enabled():
            return None
        spoiled = {k: spoil(v, value) if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()}
        return tuple(spoil(v, value) for v in args), spoiled

    tower = next(m for name, m in trainer.model.named_modules() if name.endswith("vision_tower"))
    tower.register_forward_pre_hook(hook, with_kwargs=True)


def in_weight(part: str) -> Callable[[Any, float], None]:
    """An element of a weight, after one step."""

    def place(trainer: Any, value: float) -> None:
        class Spoils(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                if state.global_step == SPOILED:
                    with torch.no_grad():
                        weight_of(trainer, part).view(-1)[0] = value

        trainer.add_callback(Spoils())

    return place


def in_loss(trainer: Any, value: float) -> None:
    """The loss of one step."""
    compute = trainer.compute_loss

    def spoiled(*args: Any, **kwargs: Any) -> Any:
        loss = compute(*args, **kwargs)
        if trainer.state.global_step != SPOILED:
            return loss
        return (loss[0] * value, *loss[1:]) if isinstance(loss, tuple) else loss * value

    trainer.compute_loss = spoiled


def in_optimizer(trainer: Any, value: float) -> None:
    """An element of the optimizer's state, after one step."""

    class Spoils(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
            if state.global_step == SPOILED:
                held = optimizer.state[weight_of(trainer, "q_proj")]["exp_avg"]
                held.view(-1)[0] = value

    trainer.add_callback(Spoils())


def in_reward(trainer: Any, value: float) -> None:
    """The reward of one completion, in one rollout."""
    reward = trainer.reward_funcs[0]

    def spoiled(*args: Any, **kwargs: Any) -> list[float]:
        rewards = reward(*args, **kwargs)
        return [value, *rewards[1:]] if trainer.state.global_step == SPOILED else rewards

    spoiled.__name__ = "spoiled"
    trainer.reward_funcs[0] = spoiled


def in_reference(trainer: Any, value: float) -> None:
    """A weight of the reference model, from the start."""
    with torch.no_grad():
        next(trainer.ref_model.parameters()).view(-1)[:] = value


PLACES: dict[str, tuple[Callable[[Any, float], None], tuple[str, ...]]] = {
    "gradient of the embeddings": (in_gradient("embed_tokens"), TASKS),
    "gradient of attention": (in_gradient("q_proj"), TASKS),
    "gradient of an MLP": (in_gradient("down_proj"), TASKS),
    "gradient of a norm": (in_gradient("layernorm"), TASKS),
    "output of the embeddings": (in_output("embed_tokens"), TASKS),
    "output of attention": (in_output("o_proj"), TASKS),
    "output of an MLP": (in_output("mlp"), TASKS),
    "output of the last norm": (in_output("model.norm"), TASKS),
    "pixel": (in_pixels, ("sft", "grpo", "rloo")),
    "loss": (in_loss, TASKS),
    "weight of the embeddings": (in_weight("embed_tokens"), TASKS),
    "weight of attention": (in_weight("q_proj"), TASKS),
    "weight of the last norm": (in_weight("model.norm"), TASKS),
    "optimizer state": (in_optimizer, TASKS),
    "reward": (in_reward, ("grpo", "rloo")),
    "reference model": (in_reference, ("grpo", "rloo")),
}
"""Where a value is put, and in which trainers the place exists."""


@contextmanager
def recorded() -> Iterator[list[warnings.WarningMessage]]:
    """Records all warnings of a block."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught


class Skips(TrainerCallback):
    """Counts the steps that the loss scaler has skipped, in the same way for both trainers: the scale falls.

    `accelerator.optimizer_step_was_skipped` is false if the optimizer is fused, because the scaler calls it then.
    """

    def __init__(self, accelerator: Any) -> None:
        self._scaler, self._scale, self.count = accelerator.scaler, 0.0, 0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Reads the scale."""
        self._scale = 0.0 if self._scaler is None else self._scaler.get_scale()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Counts a step."""
        self.count += self._scaler is not None and self._scaler.get_scale() < self._scale


def build(task: str, precision: str, safe: bool, place: str) -> Any:
    """Builds a trainer on a tiny model; in fp16 the loss scale begins so low that only the planted value overflows."""
    reset_accelerate()
    torch.manual_seed(0)
    weights, flag = PRECISIONS[precision]
    family, beta = "llava" if place == "pixel" else "text", 0.1 if place == "reference model" else 0.0
    cell = Cell(family, task, weights, flag, beta=beta)
    changes = {"precision_report": "off"} if safe else {}
    if safe and flag == "fp16":
        changes["loss_scale_init"] = LOSS_SCALE
    config = (cells.SAFE_CONFIG if safe else cells.PLAIN)[task]
    trainer_class = (cells.SAFE if safe else cells.STOCK)[task]
    trainer = fp16_on_cpu(trainer_class)(**cells.arguments(cell, config, steps=STEPS, **changes))
    scaler = trainer.accelerator.scaler
    if scaler is not None and not safe:
        scaler.load_state_dict({**scaler.state_dict(), "scale": LOSS_SCALE})
    return trainer


def run(place: str, value: str, task: str, precision: str, safe: bool) -> dict[str, Any]:
    """Runs one cell.

    Args:
        place: Key of `PLACES`.
        value: Key of `VALUES`; `""` puts nothing.
        task: One of `TASKS`.
        precision: Key of `PRECISIONS`.
        safe: Whether to use the safe trainer.

    Returns:
        The outcome with its detail, and the fingerprint of the weights.
    """
    with recorded() as caught:
        try:
            trainer = build(task, precision, safe, place)
            skipped = Skips(trainer.accelerator)
            trainer.add_callback(skipped)
            if value:
                PLACES[place][0](trainer, VALUES[value])
            trainer.train()
        except Exception as error:  # each error is an outcome
            cells.reset_autocast()
            return {"outcome": "stopped", "detail": f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"}
    log = trainer.state.log_history
    skips = [skipped.count, *(e["precision/skipped_steps"] for e in log if "precision/skipped_steps" in e)]
    finite = all(bool(p.isfinite().all()) for p in trainer.model.parameters())
    said = [str(w.message) for w in caught if issubclass(w.category, PrecisionWarning)]
    ids = {found for found in ("step-skipped", *REPORTS) if any(f"[{found}]" in text for text in said)}
    outcome = "silent"
    if finite and max(skips) > 0 and ("step-skipped" in ids or precision == "fp16"):
        outcome = "skipped"
    elif ids & set(REPORTS):
        outcome = "reported"
    elif finite and place == "reward" and value == "nan":
        outcome = "excluded"
    return {"outcome": outcome, "finite": finite, "fingerprint": cells.fingerprint(trainer.model)}


def main() -> int:
    """Runs the cells; the exit status is 1 if the safe trainers are silent in one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slice", action="store_true", help="each place in one cell; writes nothing")
    options = parser.parse_args()
    rows, plain = [], {}
    turn = 0
    for place, (_, tasks) in PLACES.items():
        grid = [(t, p, v) for t in tasks for p in PRECISIONS for v in VALUES]
        if options.slice:
            grid, turn = [grid[turn * 7 % len(grid)]], turn + 1
        for task, precision, value in grid:
            row: dict[str, Any] = {"place": place, "task": task, "precision": precision, "value": value}
            for side, safe in (("stock", False), ("safe", True)):
                found = run(place, value, task, precision, safe)
                key = (task, precision, safe, place if place in ("pixel", "reference model") else "")
                if found["outcome"] == "silent" and found["finite"]:
                    if key not in plain:
                        plain[key] = run(place, "", task, precision, safe)["fingerprint"]
                    if found["fingerprint"] == plain[key]:
                        found["outcome"] = "unharmed"
                row[side] = {k: v for k, v in found.items() if k != "fingerprint"}
            rows.append(row)
            if row["safe"]["outcome"] == "silent":
                print(row, file=sys.stderr, flush=True)
    table = Table("side", *OUTCOMES)
    for side in ("stock", "safe"):
        counts = Counter(row[side]["outcome"] for row in rows)
        table.add_row(side, *(str(counts[outcome]) for outcome in OUTCOMES))
    Console().print(table)
    if not options.slice:
        from matrix import PACKAGES
        from provenance import measured_with

        lines = [json.dumps(measured_with("python benchmarks/not_finite.py", *PACKAGES))]
        lines += [
            json.dumps({**row, "stock": row["stock"]["outcome"], "safe": row["safe"]["outcome"]}) for row in rows
        ]
        RESULT.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return int(any(row["safe"]["outcome"] == "silent" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
