"""The dataclasses whose fields are the keys of a recipe, by task; importing them imports TRL."""

from dataclasses import dataclass, field

from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments
from trl.scripts.grpo import GRPOScriptArguments
from trl.scripts.rloo import RLOOScriptArguments

import safe_trainers

from ..core.dtypes import parse_dtype
from ..core.errors import RecipeError
from ..core.tasks import TASKS
from ..data.checks import out_of_range
from ..data.dataset import DatasetArguments
from .ranges import OWN


@dataclass
class RecipeArguments(DatasetArguments):
    """The keys of a recipe beside TRL's; those about the dataset's columns are in `DatasetArguments`.

    Attributes:
        needs_images: Refuse a dataset without an `image` or `images` column.
        dataset_size: Number of training examples of an embedded dataset.
        evaluation_size: Number of held-out examples that the result is measured on, by greedy decoding; 0 for none.
        shuffle_images: A control: each question gets the image of another one, so that nothing can be learned.
        warm_up_steps: Steps of supervised training of an embedded model before the run.
        warm_up_learning_rate: The learning rate of the warm-up.
        warm_up_batch_size: The batch size of the warm-up.
        warm_up_bias: Share of the warm-up's answers that name the same colour whatever the image shows. The model's
            greedy answer is then that colour, and the reward has to teach it better.
        bnb_4bit_compute_dtype: Compute dtype of 4-bit layers; unset, that of the run.
        progress: Show a progress bar.
    """

    needs_images: bool = field(default=False, metadata={"help": "Refuse a dataset without images."})
    dataset_size: int = field(default=1024, metadata={"help": "Training examples of an embedded dataset."})
    evaluation_size: int = field(default=192, metadata={"help": "Held-out examples to measure the result on."})
    shuffle_images: bool = field(default=False, metadata={"help": "Control: each question gets another's image."})
    warm_up_steps: int = field(default=0, metadata={"help": "Supervised steps of an embedded model before the run."})
    warm_up_learning_rate: float = field(default=6e-4, metadata={"help": "Learning rate of the warm-up."})
    warm_up_batch_size: int = field(default=32, metadata={"help": "Batch size of the warm-up."})
    warm_up_bias: float = field(default=0.0, metadata={"help": "Share of warm-up answers that name one colour."})
    bnb_4bit_compute_dtype: str | None = field(
        default=None, metadata={"help": "Compute dtype of 4-bit layers; unset: the run's."}
    )
    progress: bool = field(default=True, metadata={"help": "Show a progress bar."})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bnb_4bit_compute_dtype is not None:
            parse_dtype(self.bnb_4bit_compute_dtype, field="bnb_4bit_compute_dtype", allow_auto=False)
        found = [out_of_range(name, getattr(self, name), accepted) for name, accepted in OWN.items()]
        wrong = [problem for problem in found if problem is not None]
        if wrong:
            raise RecipeError(wrong)


@dataclass
class DistillationScriptArguments(ScriptArguments):
    """TRL's keys of a dataset, and those of an embedded teacher.

    Attributes:
        teacher_warm_up_steps: Steps of supervised training of an embedded teacher before the run.
    """

    teacher_warm_up_steps: int = field(default=0, metadata={"help": "Supervised steps of an embedded teacher."})


_SCRIPTS = {"grpo": GRPOScriptArguments, "rloo": RLOOScriptArguments, "distillation": DistillationScriptArguments}
"""The dataset and reward keys of a task; the others have only TRL's keys of a dataset."""


def recipe_classes(task: str) -> tuple[type, ...]:
    """The dataclasses whose fields are the keys of a recipe.

    The parser and the schemas are made from them: after adding a field, run `make schema`.

    Args:
        task: One of `TASKS`.

    Raises:
        UnsupportedVersionError: If the task's trainer is not stable in the installed TRL.
    """
    config = getattr(safe_trainers, TASKS[task].config)
    return RecipeArguments, _SCRIPTS.get(task, ScriptArguments), config, ModelConfig, DatasetMixtureConfig
