"""Runs that kill themselves in the middle of a save: `python kill_child.py MODEL FOLDER INSTANT...`.

Imports once, then forks for each instant: the child trains into FOLDER/INSTANT with `save_steps=1, save_total_limit=1`
and kills itself while it saves step `KILLED_AT`. Everything is real: the trainer, the files, the signal. What is
installed is an audit hook of Python, which sees each file operation before it is done.
"""

import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any


KILLED_AT = 2
STEPS = 3
MARKER = "safe_trainers_checkpoint.json"


def build(model: str | Path, output_dir: Path, **changes: Any) -> Any:
    """The trainer that is killed, and the one that goes on: GRPO with windows of 4 micro-batches, used twice."""
    import trl

    import safe_trainers
    from safe_trainers import tiny

    settings = {
        "output_dir": str(output_dir),
        "use_cpu": True,
        "bf16": False,
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 4,
        "num_iterations": 2,
        "num_generations": 2,
        "max_completion_length": 4,
        "beta": 0.0,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "save_total_limit": 1,
        "report_to": [],
        "disable_tqdm": True,
        "seed": 0,
    }
    rows = tiny.prompt_dataset(8, seed=0).remove_columns("image")
    numbered = [[{"role": "user", "content": "what " * (i + 1)}] for i in range(len(rows))]
    return safe_trainers.SafeGRPOTrainer(
        model=str(model),
        args=trl.GRPOConfig(**{**settings, **changes}),
        reward_funcs=token_reward,
        train_dataset=rows.remove_columns("prompt").add_column("prompt", numbered),
    )


def token_reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """A reward that differs between completions of random models."""
    return [float(sum(ids) % 7) for ids in completion_ids]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Instants:
    """The moments, by name: what is true just before the file operation at which the run is killed."""

    def __init__(self, instant: str, output_dir: Path) -> None:
        self.check = getattr(self, instant.replace("-", "_"))
        self.folder, self.older = output_dir / f"checkpoint-{KILLED_AT}", output_dir / f"checkpoint-{KILLED_AT - 1}"
        self.removed = 0

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if event in ("open", "os.mkdir", "os.rename", "os.remove", "shutil.rmtree"):
            self.check(event, args)

    def _inside(self, path: Any) -> bool:
        return isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(str(self.folder))

    def before_the_folder(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "os.mkdir" and self._inside(args[0]):
            die()

    def after_the_weights(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and self._inside(args[0]) and (self.folder / "model.safetensors").exists():
            die()

    def in_the_optimizer(self, event: str, args: tuple[Any, ...]) -> None:
        """torch writes this file outside Python: the kernel kills the write that passes half of its size."""
        weights = self.folder / "model.safetensors"
        if event == "open" and self._inside(args[0]) and weights.exists():
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            half = weights.stat().st_size  # AdamW keeps two numbers for each weight
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_FSIZE, (half, half))

    def before_the_state(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "os.rename" and os.fspath(args[1]).endswith("safe_trainers_state_0.pt") and self._inside(args[1]):
            die()

    def before_the_marker(self, event: str, args: tuple[Any, ...]) -> None:
        written = (self.folder / "trainer_state.json").exists()
        if event == "os.rename" and os.fspath(args[1]) == str(self.folder / MARKER) and written:
            die()

    def before_the_rotation(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "shutil.rmtree" and os.fspath(args[0]) == str(self.older):
            die()

    def in_the_rotation(self, event: str, args: tuple[Any, ...]) -> None:
        self.removed += event == "shutil.rmtree" and os.fspath(args[0]) == str(self.older)
        if event == "os.remove" and self.removed:
            self.removed += 1
            if self.removed > 4:
                die()


INSTANTS = [
    "before-the-folder",
    "after-the-weights",
    "in-the-optimizer",
    "before-the-state",
    "before-the-marker",
    "before-the-rotation",
    "in-the-rotation",
]


def main(model: str, folder: str, instants: list[str]) -> None:
    """Forks a run for each instant, and writes to FOLDER/signals.json which signal ended each."""
    import safe_trainers.trainers  # noqa: F401  # the slow imports, once
    from safe_trainers import tiny  # noqa: F401

    signals = {}
    for instant in instants:
        pid = os.fork()
        if pid == 0:
            output_dir = Path(folder, instant)
            trainer = build(model, output_dir)
            sys.addaudithook(Instants(instant, output_dir))
            trainer.train()
            os._exit(0)
        signals[instant] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    Path(folder, "signals.json").write_text(json.dumps(signals))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
