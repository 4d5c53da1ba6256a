"""Builds the datasets and the embedded model of a recipe."""

import contextlib
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from textwrap import shorten
from typing import Any

from rich.console import Console

from ..core.errors import RecipeError


MODEL, TEACHER = "model", "teacher"
"""Folders below `output_dir` for the embedded models of a recipe."""


def check_model_exists(recipe: Any) -> None:
    """Raises a `RecipeError` if the model or a teacher cannot be found, before anything is written."""
    from transformers import AutoConfig

    from ..data.columns import embedded_name

    named = {recipe.model.model_name_or_path: recipe.model.model_revision}
    teacher = teacher_of(recipe)
    if teacher is not None:
        named[teacher] = recipe.training.teacher_model_revision
    # TRL 0.29 has this key in the arguments of the model, later releases in those of training.
    trusted = any(getattr(part, "trust_remote_code", False) for part in (recipe.training, recipe.model))
    for name, revision in named.items():
        if embedded_name(name) is not None:
            continue
        try:
            AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=trusted)
        except (OSError, ValueError) as error:
            raise RecipeError(f"model {name} cannot be read: {str(error).splitlines()[0]}") from None


def teacher_of(recipe: Any) -> str | None:
    """The teacher that a recipe names; `None` for a task without one."""
    return getattr(recipe.training, "teacher_model_name_or_path", None)


def make_datasets(recipe: Any) -> tuple[Any, Any, Any]:
    """Returns the training set, the evaluation set and, for embedded data, the held-out examples to score."""
    from .. import tiny
    from ..data.columns import embedded_name

    extra, seed = recipe.extra, recipe.training.seed
    embedded = embedded_name(recipe.script.dataset_name)
    if embedded is None:
        splits = _load_dataset(recipe)
        train = _with_columns(recipe, _split(recipe, splits, recipe.script.dataset_train_split))
        if recipe.training.eval_strategy == "no":
            return train, None, None
        return train, _with_columns(recipe, _split(recipe, splits, recipe.script.dataset_test_split)), None
    size = max(extra.evaluation_size, 1)
    if embedded == "preferences":
        train = tiny.preference_dataset(extra.dataset_size, seed, split="train")
        evaluation = tiny.preference_dataset(size, seed, split="heldout")
        held_out = evaluation if recipe.task == "reward" else None
    else:
        makers = {
            "sft": tiny.sft_dataset,
            "dpo": tiny.image_preference_dataset,
            "kto": tiny.unpaired_preference_dataset,
        }
        make = makers.get(recipe.task, tiny.prompt_dataset)
        train = make(extra.dataset_size, seed, split="train", shuffle_images=extra.shuffle_images)
        evaluation = make(size, seed, split="heldout")
        held_out = tiny.prompt_dataset(size, seed, split="heldout")
    # Each row of an embedded dataset has an image if the dataset has images.
    return _with_columns(recipe, train, False), _with_columns(recipe, evaluation, False), held_out


def _load_dataset(recipe: Any) -> Any:
    from datasets import load_dataset
    from datasets.exceptions import DatasetGenerationError, DatasetsError
    from trl import get_dataset

    script = recipe.script
    name, files = script.dataset_name, None
    try:
        if recipe.mixture.datasets:
            return get_dataset(recipe.mixture)
        if os.path.isfile(name):  # `load_dataset` needs the folder and the name of the file
            name, files = os.path.split(os.path.abspath(name))
        return load_dataset(name, name=script.dataset_config, data_files=files, streaming=script.dataset_streaming)
    except (DatasetsError, OSError, ValueError) as error:
        cause = error.__cause__ if isinstance(error, DatasetGenerationError) and error.__cause__ else error
        which = "of the mixture" if recipe.mixture.datasets else script.dataset_name
        raise RecipeError(f"dataset {which} cannot be loaded: {shorten(str(cause), 300)}") from error
    except StopIteration as error:  # raised for JSON files without a row
        raise RecipeError(f"dataset {script.dataset_name or 'of the mixture'} has no rows: a file is empty") from error
    except RuntimeError as error:  # raised for a loading script, which datasets 4 does not run
        raise RecipeError(
            f"dataset {script.dataset_name} cannot be loaded: {shorten(str(error), 300)}. Write: dataset_name: the "
            "folder, file or repository with its rows as JSON lines, CSV or Parquet"
        ) from error


def _with_columns(recipe: Any, dataset: Any, checks_images: bool = True) -> Any:
    """Applies the column settings of the recipe to a dataset, and checks its rows for images if the recipe asks."""
    from datasets import Dataset

    from ..data.dataset import prepare_dataset
    from ..data.rows import empty_row, read_columns
    from ..recipes.load import check_columns, check_reward_columns

    name = recipe.script.dataset_name or "of the mixture"
    made = prepare_dataset(dataset, recipe.extra, name, needs_images=recipe.extra.needs_images and checks_images)
    columns = made.column_names or list(next(iter(made), {}))
    check_columns(recipe, columns)
    check_reward_columns(recipe, columns, dataset.column_names or columns)
    if isinstance(made, Dataset):
        text_field = getattr(recipe.training, "dataset_text_field", None) or "text"
        read = read_columns(recipe.task, columns, text_field)
        wrong = empty_row(made, read, name, kept=len(made) < len(dataset))
        if wrong is not None:
            raise RecipeError(wrong)
    return made


def _split(recipe: Any, splits: Any, name: str) -> Any:
    from ..core.errors import nearest

    if name not in splits:
        near = nearest(name, list(splits))
        hint = f"; did you mean {near!r}?" if near else f", only {', '.join(splits)}"
        raise RecipeError(f"dataset {recipe.script.dataset_name} has no split {name!r}{hint}")
    return splits[name]


def make_model(recipe: Any, console: Console) -> str:
    """Returns the name of the model; an embedded one is built and warmed up first, and its folder is returned."""
    extra = recipe.extra
    return _make(recipe, console, recipe.model.model_name_or_path, MODEL, extra.warm_up_steps, extra.warm_up_bias)


def make_teacher(recipe: Any, console: Console) -> str:
    """Returns the name of the teacher, as `make_model` does; an embedded one is warmed up without a bias."""
    return _make(recipe, console, str(teacher_of(recipe)), TEACHER, recipe.script.teacher_warm_up_steps, 0.0)


def _make(recipe: Any, console: Console, name: str, folder_name: str, steps: int, bias: float) -> str:
    import torch
    from accelerate import PartialState

    from .. import tiny
    from ..data.columns import embedded_name

    family = embedded_name(name)
    if family is None:
        return str(name)
    # Such a small model is slower with several threads, on a busy machine many times slower.
    torch.set_num_threads(1)
    folder, state = Path(recipe.training.output_dir) / folder_name, PartialState()
    with _scratch_folder(folder, state) as scratch:
        made = scratch / "model"
        if state.is_main_process:
            tiny.save(family, made, seed=recipe.training.seed)
        _copy_to_machines(made, state)
        if steps:
            _warm_up(recipe, made, console, steps, bias)
        state.wait_for_everyone()
        if state.is_main_process:
            if folder.exists():
                shutil.rmtree(folder)
            made.rename(folder)
        state.wait_for_everyone()
    _copy_to_machines(folder, state, renew=True)
    return str(folder)


def _copy_to_machines(folder: Path, state: Any, renew: bool = False) -> None:
    """Copies the folder of an embedded model to machines that do not see the files of the main process.

    Args:
        folder: The folder, which the main process has written.
        state: accelerate's state.
        renew: Whether such a machine may have an older folder, which is replaced.
    """
    from accelerate.utils import broadcast_object_list, gather_object

    state.wait_for_everyone()
    token = [uuid.uuid4().hex if state.is_main_process else ""]
    mark = folder / f".{broadcast_object_list(token)[0]}"
    if state.is_main_process:
        mark.touch()
    state.wait_for_everyone()
    needs = state.is_local_main_process and not mark.is_file()
    if any(gather_object([needs])):
        paths = [path for path in folder.rglob("*") if path.is_file()] if state.is_main_process else []
        content = [{str(path.relative_to(folder)): path.read_bytes() for path in paths}]
        broadcast_object_list(content)
        if needs:
            if renew and folder.exists():
                shutil.rmtree(folder)
            for name, data in content[0].items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(data)
    state.wait_for_everyone()
    if state.is_local_main_process:
        mark.unlink(missing_ok=True)
    state.wait_for_everyone()


@contextlib.contextmanager
def _scratch_folder(folder: Path, state: Any) -> Iterator[Path]:
    """Yields a temporary folder beside `folder`, the same in all processes, and removes it at the end."""
    from accelerate.utils import broadcast_object_list

    name = [tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-") if state.is_main_process else ""]
    scratch = Path(broadcast_object_list(name)[0])
    try:
        yield scratch
    finally:
        if state.is_local_main_process:
            shutil.rmtree(scratch, ignore_errors=True)


def _warm_up(recipe: Any, folder: Path, console: Console, steps: int, bias: float) -> None:
    """Trains an embedded model on answers, and saves it in float32.

    It uses the autocast of the run, because accelerate allows only one mixed precision per process.
    """
    from .. import SafeSFTConfig, SafeSFTTrainer, tiny
    from .progress import show_progress

    extra, training = recipe.extra, recipe.training
    arguments = SafeSFTConfig(
        output_dir=str(folder.parent),
        bf16=training.bf16,
        fp16=training.fp16,
        use_cpu=training.use_cpu,
        max_steps=steps,
        per_device_train_batch_size=extra.warm_up_batch_size,
        learning_rate=extra.warm_up_learning_rate,
        completion_only_loss=True,
        gradient_checkpointing=False,
        max_length=None,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        logging_steps=max(1, steps // 5),
        precision_report="off",
        seed=training.seed,
    )
    dataset = tiny.sft_dataset(extra.dataset_size, training.seed, split="train", bias=bias)
    trainer = SafeSFTTrainer(model=str(folder), args=arguments, train_dataset=dataset)
    with show_progress(trainer, console, "warm-up", extra.progress):
        trainer.train()
    trainer.save_model(str(folder))
