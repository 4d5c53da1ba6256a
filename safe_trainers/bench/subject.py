"""The trainer class that is checked: its task, its config, and further arguments."""

import dataclasses
import importlib
import inspect
import os
import sys
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from ..core.errors import RecipeError, hint, nearest
from ..core.tasks import TASKS
from ..core.trl import ROLLOUT_METHOD, trl_bases


PLAIN = "trainer"
"""The task of a class that extends the `Trainer` of transformers, and not one of TRL's."""

OWNED = (
    "output_dir", "use_cpu", "bf16", "fp16", "max_steps", "save_strategy", "save_steps", "logging_steps", "report_to",
    "model_init_kwargs", "disable_tqdm",
)  # fmt: skip
"""Settings that the checks set."""


LIKE = {"CPOTrainer": "dpo", "ORPOTrainer": "dpo", "BCOTrainer": "kto"}
"""Experimental trainers of TRL whose constructor does not show their data, with the task whose data they take."""
SIGNS = {"reward_funcs": "grpo", "teacher_model": "distillation", "ref_model": "dpo"}
"""Arguments of a constructor that show the task; a class without one takes the data of SFT."""


@dataclass(frozen=True)
class Subject:
    """A trainer class.

    Attributes:
        name: The class, as `MODULE:CLASS`.
        trainer_class: The class.
        config_class: The class of its `args`.
        task: A task of `TASKS`, or `"trainer"`.
        args: Further settings of the config.
        inherits: Whether the class extends TRL's trainer of the task, so that it accepts the same data.
    """

    name: str
    trainer_class: type
    config_class: type
    task: str
    args: Mapping[str, Any] = field(default_factory=dict)
    inherits: bool = True

    @property
    def generates(self) -> bool:
        """Whether the trainer samples completions in the way of TRL's online trainers."""
        own = (base for base in self.trainer_class.__mro__ if not base.__module__.startswith("safe_trainers."))
        return any(ROLLOUT_METHOD in vars(base) for base in own)

    @property
    def takes_images(self) -> bool:
        """Whether there are training data with images for the trainer."""
        return self.task not in ("reward", PLAIN) and self.inherits

    @property
    def parameters(self) -> set[str]:
        """The names of the arguments of the constructor, through `*args` and `**kwargs` to those of its bases."""
        found: set[str] = set()
        for cls in self.trainer_class.__mro__:
            own = _parameters(cls).values()
            passed_on = {p.name for p in own if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
            found |= {p.name for p in own} - passed_on
            if own and not passed_on:
                break
        return found

    def accepts(self, setting: str) -> bool:
        """Whether the config has a setting.

        Args:
            setting: Its name.
        """
        return setting in _fields(self.config_class)


def describe(
    trainer_class: type, name: str = "", args: Mapping[str, Any] | None = None, task: str | None = None
) -> Subject:
    """Describes a trainer class.

    Args:
        trainer_class: The class.
        name: `MODULE:CLASS`; by default made from the class.
        args: Further settings of its config.
        task: Its task, of `TASKS`; by default detected.

    Returns:
        The description.

    Raises:
        RecipeError: If the class is not a trainer of transformers, or does not have a setting.
    """
    from transformers import Trainer

    name = name or f"{trainer_class.__module__}:{trainer_class.__qualname__}"
    if not (isinstance(trainer_class, type) and issubclass(trainer_class, Trainer)):
        raise RecipeError(
            f"{name} is not a trainer class: it does not extend transformers.Trainer. Pass a class such as "
            "trl:GRPOTrainer"
        )
    detected, inherits = _task_of(trainer_class)
    subject = Subject(
        name,
        trainer_class,
        _config_of(trainer_class),
        task or detected,
        dict(args or {}),
        inherits and task in (None, detected),
    )
    known = _fields(subject.config_class)
    for key in subject.args:
        if key in OWNED:
            raise RecipeError(f"--args {key}: the checks set {key} themselves. Drop it")
        if key not in known:
            near = hint(nearest(key, known))
            raise RecipeError(f"--args {key}: {subject.config_class.__name__} has no setting {key!r}{near}")
    return subject


def load_class(name: str) -> type:
    """Imports a class.

    Args:
        name: `MODULE:CLASS`; modules of the current folder can be imported.

    Raises:
        RecipeError: If the name has another form, or cannot be imported.
    """
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise RecipeError(f"--trainer must be MODULE:CLASS, such as trl:GRPOTrainer, got {name!r}")
    if not all(part.isidentifier() for part in module.split(".")):
        dotted = ".".join(part for part in module.removesuffix(".py").replace(os.sep, ".").split(".") if part)
        raise RecipeError(
            f"--trainer {name}: {module} is not the name of a module. Write its dotted name from the current folder: "
            f"--trainer {dotted}:{attribute}"
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module)
    except (Exception, SystemExit) as error:  # a module can fail in any way, and a script without a guard exits
        raise RecipeError(f"--trainer {name}: {module} cannot be imported: {type(error).__name__}: {error}") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            near = nearest(part, [entry for entry in dir(found) if entry.endswith("Trainer")])
            raise RecipeError(f"--trainer {name}: {module} has no class {part!r}{hint(near)}")
        found = getattr(found, part)
    return found


def parse_args(words: Sequence[str]) -> dict[str, Any]:
    """Reads `KEY=VALUE` words.

    Args:
        words: The words; values are YAML.

    Raises:
        RecipeError: If a word has another form.
    """
    found = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not (key and equals):
            raise RecipeError(f"--args must be KEY=VALUE, such as beta=0.1, got {word!r}")
        try:
            found[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise RecipeError(f"--args {key}: the value is not valid YAML: {' '.join(str(error).split())}") from error
    return found


def _fields(config_class: type) -> list[str]:
    return [entry.name for entry in dataclasses.fields(config_class) if entry.init]


def _task_of(trainer_class: type) -> tuple[str, bool]:
    """The task of the nearest base that has one, and whether it is the stable trainer of the task."""
    bases = trl_bases(trainer_class)
    by_name = {f"{task.algorithm}Trainer": name for name, task in TASKS.items()}
    for base in bases:
        if base.__name__ in by_name:
            return by_name[base.__name__], ".experimental." not in base.__module__
        if base.__name__ in LIKE:
            return LIKE[base.__name__], False
    if not bases:
        return PLAIN, False
    parameters = {name for cls in trainer_class.__mro__ for name in _parameters(cls)}
    return next((task for parameter, task in SIGNS.items() if parameter in parameters), "sft"), False


def _parameters(cls: type) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(vars(cls)["__init__"]).parameters if "__init__" in vars(cls) else {}


def _config_of(trainer_class: type) -> type:
    """The class of `args`: the attribute `config_class`, or the annotation of the nearest constructor with `args`."""
    from transformers import TrainingArguments

    for cls in trainer_class.__mro__:
        own = vars(cls).get("config_class")
        if isinstance(own, type):
            return own
        if "args" in _parameters(cls):
            found = _config_in(cls, _parameters(cls)["args"].annotation)
            if found is not None:
                return found
    return TrainingArguments


def _config_in(cls: type, annotation: Any) -> type | None:
    """The dataclass in an annotation, which may be a string or a union."""
    if isinstance(annotation, str):
        space = getattr(sys.modules.get(cls.__module__), "__dict__", {})
        names = [word.strip() for word in annotation.replace("Optional[", "").rstrip("]").split("|")]
        found = [space.get(word) for word in names]
    else:
        found = [annotation, *typing.get_args(annotation)]
    return next((entry for entry in found if isinstance(entry, type) and dataclasses.is_dataclass(entry)), None)
