"""What `safe-trainers tune` measures: the trainer of a recipe, or one for a model with prompts of its own."""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..core.errors import Problem, RecipeError, SafeTrainersError, write


TOKENS = 128
"""Most tokens of a measured completion by default."""
PROMPT_TOKENS = 16
BATCH = 8
OWN = ("bf16", "fp16", "precision", "fp32_modules")
"""The keys of a recipe that are replaced."""


class RecipeTarget:
    """A recipe whose trainer is built in several precisions.

    Attributes:
        own: The recipe's own precision.
        dataset: The name of its dataset.
        settings: Further lines that a precision needs.
    """

    def __init__(self, name: str, task: str | None, max_tokens: int | None, scratch: Path) -> None:
        from ..recipes.load import load_recipe
        from ..recipes.packaged import recipe_path
        from ..recipes.validate import check_recipe, tasks_of
        from ..recipes.yaml_file import read_file

        file = read_file(recipe_path(name))
        self._task = task or tasks_of(file)[0]
        if self._task not in ("grpo", "rloo"):
            why = "tune compares rollouts with their scoring, and only grpo and rloo have rollouts"
            raise RecipeError(Problem(f"{name} is a recipe of {self._task}", why=why))
        self._checked = check_recipe(file, self._task)
        values = self._checked.values
        if values.get("use_vllm"):
            why = "tune measures the model's own `generate`, and vLLM computes modules in its own dtype"
            raise RecipeError(Problem("use_vllm: true", why=why, fix=write(use_vllm=False)))
        training = load_recipe(self._checked).training
        self.own = "fp16" if training.fp16 else "bf16"
        self.dataset = str(values.get("dataset_name") or "the mixture")
        self._length = min(training.max_completion_length or TOKENS, max_tokens or TOKENS)
        self._scratch = scratch
        half = values.get("dtype") not in (None, "float32", "fp32")
        self.settings: Mapping[str, Mapping[str, Any]] = {"fp32": {"dtype": "float32"}} if half else {}

    def build(self, precision: str, measured: Callable[[type], type]) -> Any:
        """Builds the trainer.

        Args:
            precision: `"bf16"`, `"fp16"` or `"fp32"`.
            measured: Makes the class to build from a trainer class.
        """
        from dataclasses import replace

        from rich.console import Console

        import safe_trainers

        from ..core.tasks import TASKS
        from ..recipes.load import load_recipe
        from .run_recipe import build

        kept = {key: value for key, value in self._checked.values.items() if key not in OWN}
        changed = {
            "precision": precision,
            "precision_metrics": False,
            "precision_report": "off",
            "max_completion_length": self._length,
            "report_to": "none",
            "output_dir": str(self._scratch / "run"),
            **self.settings.get(precision, {}),
        }
        made = self._scratch / "run" / "model"
        if made.is_dir():  # an embedded model is built and warmed up once
            changed |= {"model_name_or_path": str(made), "warm_up_steps": 0}
        kept.pop("resume_from_checkpoint", None)
        recipe = load_recipe(replace(self._checked, values={**kept, **changed}))
        trainer_class = measured(getattr(safe_trainers, TASKS[self._task].trainer))
        trainer, _ = build(recipe, Console(quiet=True), trainer_class)
        return trainer


class ModelTarget:
    """A model, of which a trainer with prompts of its own is built in several precisions.

    Attributes:
        prompts: The prompts in words.
    """

    def __init__(self, name: str, length: int, sequences: int, scratch: Path) -> None:
        from ..data.columns import EMBEDDED_MODELS, embedded_name
        from ..tiny import FAMILIES
        from ..tuning.plan import rows_for

        self._name, self._length, self._scratch, self._rows = name, length, scratch, rows_for(sequences, BATCH)
        self._family = embedded_name(name)
        if self._family is not None and self._family not in FAMILIES:
            embedded = "not a model that generates" if self._family in EMBEDDED_MODELS else "not an embedded model"
            raise RecipeError(f"{name} is {embedded}; expected one of {', '.join(FAMILIES)}")
        if (
            self._family is None
            and not os.path.isdir(name)
            and (name.startswith((".", "/", "~")) or name.count("/") != 1)
        ):
            raise RecipeError(f"{name} is neither a recipe nor a model")
        self.prompts = "random tokens of the vocabulary, without images"
        if self._family is not None:
            self.prompts = "questions about generated images" if self._has_images else "generated questions"
        elif os.path.isdir(name):
            if not any(Path(name, file).is_file() for file in ("config.json", "adapter_config.json")):
                raise RecipeError(f"{name} is neither a recipe nor a model: it has no config.json")
            _check_memory(Path(name))

    @property
    def _has_images(self) -> bool:
        from .. import tiny

        return self._family in tiny.VISION_FAMILIES

    def build(self, precision: str, measured: Callable[[type], type]) -> Any:
        """Builds the trainer.

        Args:
            precision: `"bf16"`, `"fp16"` or `"fp32"`.
            measured: Makes the class to build from a trainer class.
        """
        import torch

        from .. import SafeGRPOConfig, SafeGRPOTrainer

        folder, dataset, generation = self._inputs()
        built: Any = measured(SafeGRPOTrainer)
        try:
            return built(
                folder,
                args=SafeGRPOConfig(
                    str(self._scratch),
                    precision=precision,
                    use_cpu=not torch.cuda.is_available(),
                    per_device_train_batch_size=BATCH,
                    num_generations=2,
                    max_completion_length=self._length,
                    generation_kwargs=generation,
                    precision_metrics=False,
                    precision_report="off",
                    report_to=[],
                    disable_tqdm=True,
                ),
                reward_funcs=lambda completions, **_: [0.0] * len(completions),
                train_dataset=dataset,
            )
        except (OSError, ValueError, KeyError, ImportError, AttributeError) as error:
            if isinstance(error, SafeTrainersError):
                raise
            why = " ".join(str(error).split())[:300]
            raise RecipeError(f"{self._name} cannot be built: {type(error).__name__}: {why}") from error

    def _inputs(self) -> tuple[str, Any, dict[str, Any]]:
        """The folder of the model, the prompts, and arguments of `generate`."""
        from datasets import Dataset

        from .. import tiny

        if self._family is not None:
            folder = tiny.save(self._family, self._scratch / "model")
            made = tiny.prompt_dataset(self._rows, seed=0)
            prompts = made if self._has_images else made.remove_columns("image")
            return str(folder), prompts, tiny.generation_kwargs(tiny.build_processor(self._family))
        import torch
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(self._name)
        except (OSError, ValueError, KeyError) as error:
            why = " ".join(str(error).split())[:300]
            raise RecipeError(f"the tokenizer of {self._name} cannot be read: {why}") from error
        special = set(tokenizer.all_special_ids)
        plain = torch.tensor([number for number in range(len(tokenizer)) if number not in special])
        generator = torch.Generator().manual_seed(0)
        chosen = torch.randint(len(plain), (self._rows, PROMPT_TOKENS), generator=generator)
        prompts = [tokenizer.decode(plain[row].tolist()) for row in chosen]
        return self._name, Dataset.from_dict({"prompt": prompts}), {}


def is_recipe(target: str) -> bool:
    """Whether a target is a recipe: a YAML file, or a packaged name such as `grpo/tiny_vlm_bf16`.

    Args:
        target: The target as it was written.
    """
    from ..core.tasks import TASKS

    return target.endswith((".yaml", ".yml")) or (
        target.split("/", maxsplit=1)[0] in TASKS and not os.path.isdir(target)
    )


def _check_memory(folder: Path) -> None:
    """Raises `RecipeError` if the weights of a folder, in float32, exceed the memory that is free."""
    import psutil
    import torch

    from ..report.stored_weights import read_weights, weight_files

    try:
        stored = [tensor for file in weight_files(folder) for tensor in read_weights(file).values()]
    except (ValueError, OSError) as error:
        raise RecipeError(f"{folder} cannot be built: {error}") from error
    needed = 4 * sum(tensor.elements for tensor in stored)
    free = psutil.virtual_memory().available
    if torch.cuda.is_available():
        free = max(free, torch.cuda.mem_get_info()[0])
    if needed > free:
        sizes = f"its weights take {needed / 2**30:.1f} GiB in float32, and {free / 2**30:.1f} GiB are free"
        raise RecipeError(
            f"{folder} does not fit: {sizes}. Use a machine with more memory, or a recipe with LoRA on a 4-bit "
            "or half-precision base"
        )


@contextlib.contextmanager
def explain_memory(target: str) -> Iterator[None]:
    """Turns errors of memory into one message."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        text = " ".join(str(error).split())
        if isinstance(error, MemoryError) or "out of memory" in text or "can't allocate memory" in text:
            raise RecipeError(
                f"{target} does not fit: {text[:200]}. Write fewer --sequences or --max_tokens, or use a machine with "
                "more memory"
            ) from error
        raise
