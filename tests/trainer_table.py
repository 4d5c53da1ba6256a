"""Trains each trainer of TRL, stock and between the two classes, and records what is covered: `docs/trainers.md`."""

import importlib
import warnings
from typing import Any

import cells
import torch
import transformers
import trl
from cells import Cell
from datasets import Dataset

from safe_trainers import PrecisionBase, PrecisionMixin, tiny
from safe_trainers.core.tasks import TASKS


QUESTION, ANSWER, OTHER = "what is it ?", "two red circles", "one blue circle"
ROWS = 8


def settings(**changes):
    made = cells.settings(Cell("text", "sft", "fp32", None))
    made.pop("max_length")
    return {**made, **changes}


def rows(**columns):
    return Dataset.from_dict({name: [value] * ROWS for name, value in columns.items()})


def prompts():
    return cells.dataset("grpo", "text").select_columns(["prompt"])


def messages():
    return rows(messages=[{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}])


def pairs():
    return rows(prompt=QUESTION, chosen=ANSWER, rejected=OTHER)


def alternating(completions, **kwargs):
    return [float(number % 2) for number, _ in enumerate(completions)]


def text(**changes):
    return {"model": tiny.build_model("text"), "processing_class": tiny.build_processor("text"), **changes}


def named(**changes):
    return text(model=str(cells.folder("text")), **changes)


def teacher():
    return tiny.build_model("text", seed=1)


MADE = {
    "a2po.A2PO": lambda m, c: text(
        reward_funcs=alternating,
        args=m.A2POConfig(**settings(max_completion_length=4, num_value_samples=2, filter_all_incorrect=False, **c)),
        train_dataset=prompts(),
    ),
    "bema_for_ref_model.DPO": lambda m, c: text(
        ref_model=teacher(), args=trl.DPOConfig(**settings(**c)), train_dataset=pairs()
    ),
    "cpo.CPO": lambda m, c: text(args=m.CPOConfig(**settings(**c)), train_dataset=pairs()),
    "distillation.Distillation": lambda m, c: text(
        teacher_model=teacher(),
        args=m.DistillationConfig(**settings(max_completion_length=4, **c)),
        train_dataset=prompts(),
    ),
    "gkd.GKD": lambda m, c: text(
        teacher_model=teacher(),
        args=m.GKDConfig(**settings(max_new_tokens=4, lmbda=1.0, **c)),
        train_dataset=messages(),
    ),
    "gmpo.GMPO": lambda m, c: text(
        reward_funcs=cells.token_reward,
        args=m.GMPOConfig(**settings(num_generations=2, max_completion_length=4, **c)),
        train_dataset=prompts(),
    ),
    "gold.GOLD": lambda m, c: text(
        teacher_model=teacher(),
        args=m.GOLDConfig(**settings(max_completion_length=4, lmbda=1.0, max_length=64, **c)),
        train_dataset=messages(),
    ),
    "iw_opd.IWOPD": lambda m, c: named(
        teacher_model=str(cells.folder("text")),
        args=m.IWOPDConfig(**settings(max_completion_length=4, lmbda=1.0, max_length=64, **c)),
        train_dataset=messages(),
    ),
    "kto.KTO": lambda m, c: text(
        ref_model=teacher(),
        args=m.KTOConfig(**settings(**c)),
        train_dataset=Dataset.from_dict(
            {"prompt": [QUESTION] * ROWS, "completion": [ANSWER] * ROWS, "label": [True, False] * (ROWS // 2)}
        ),
    ),
    "online_dpo.OnlineDPO": lambda m, c: text(
        ref_model=teacher(),
        reward_funcs=cells.token_reward,
        args=m.OnlineDPOConfig(**settings(max_new_tokens=4, max_length=64, **c)),
        train_dataset=prompts(),
    ),
    "orpo.ORPO": lambda m, c: text(args=m.ORPOConfig(**settings(**c)), train_dataset=pairs()),
    "sdft.SDFT": lambda m, c: named(
        args=m.SDFTConfig(**settings(num_generations=1, max_completion_length=4, **c)),
        train_dataset=rows(prompt=QUESTION, privileged_context=ANSWER),
    ),
    "sdpo.SDPO": lambda m, c: named(
        reward_funcs=alternating,
        args=m.SDPOConfig(**settings(num_generations=2, max_completion_length=4, **c)),
        train_dataset=prompts(),
    ),
    "tpo.TPO": lambda m, c: text(
        args=m.TPOConfig(**settings(**c)),
        train_dataset=rows(prompt=QUESTION, chosen=ANSWER, rejected=OTHER, reference=OTHER),
    ),
}
"""Arguments of each experimental trainer, from its module and further settings of its config."""

_SERVER = (
    "TRL's worker generates with a vLLM server with the development endpoints (`VLLM_SERVER_DEV_MODE=1`: `/pause`, "
    "`/resume`, `/init_weight_transfer_engine`, `/update_weights`), to which the weights are sent with NCCL"
)
NOT_TRAINED = {
    "async_distillation.AsyncDistillation": f"{_SERVER}; the teachers are vLLM servers",
    "async_grpo.AsyncGRPO": f"the constructor reads the name of a CUDA device; {_SERVER}",
    "server_distillation.ServerDistillation": "the teacher's log-probabilities come from a vLLM server",
}
"""Trainers that cannot be trained here, stock or safe, and what is missing."""

STABLE = {f"trainer.{task.algorithm}": name for name, task in TASKS.items()}
NAMES = (*STABLE, *sorted([*MADE, *NOT_TRAINED]))


def classes(name):
    """The module with the config, TRL's class and ours."""
    folder, _, algorithm = name.partition(".")
    if name in STABLE:
        return trl, cells.STOCK[STABLE[name]], cells.SAFE[STABLE[name]]
    module = importlib.import_module(f"trl.experimental.{folder}")
    stock = getattr(module, f"{algorithm}Trainer")
    return module, stock, type(f"Safe{algorithm}Trainer", (PrecisionMixin, stock, PrecisionBase), {})


def arguments(name, **changes) -> dict[str, Any]:
    """The arguments of a trainer: a text model in float32, two steps."""
    if name not in STABLE:
        return MADE[name](classes(name)[0], changes)
    task = STABLE[name]
    cell = Cell("text", task, "fp32", "bf16" if changes.get("bf16") else None)
    return cells.arguments(cell, cells.PLAIN[task])


def train(trainer_class, made):
    cells.reset_autocast()
    torch.manual_seed(0)
    trainer = trainer_class(**made)
    trainer.train()
    return trainer


def losses(trainer):
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def generates(name):
    """Whether a run of a trainer calls `generate`, and the run."""
    calls, generate = [], transformers.GenerationMixin.generate

    def counted(*args, **kwargs):
        calls.append(1)
        return generate(*args, **kwargs)

    transformers.GenerationMixin.generate = counted
    try:
        trainer = train(classes(name)[2], arguments(name))
    finally:
        transformers.GenerationMixin.generate = generate
    return bool(calls), trainer


def measure(name):
    """One row of the table.

    Returns:
        Whether losses and weights in float32 are those of stock, the dtype in which a run with `bf16=True` trains
        with stock and with ours, and the contract of the class with the hooks that fired.
    """
    _, stock, safe = classes(name)
    row: dict[str, Any] = {"name": name, "class": stock.__name__}
    if name in NOT_TRAINED:
        return {**row, "missing": NOT_TRAINED[name], "contract": _states(safe)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = train(stock, arguments(name))
        row["generates"], trainer = generates(name)
        row["same"] = losses(trainer) == losses(expected) and cells.fingerprint(trainer.model) == cells.fingerprint(
            expected.model
        )
        row["fired"] = {hook: count for hook, count in trainer.precision.coverage.fired.items() if count}
        row["contract"] = _states(safe)
        row["bf16"] = [computes(stock, name), computes(safe, name)]
    return row


def computes(trainer_class, name):
    """The dtype that a run with `bf16=True` computes in."""
    trainer = trainer_class(**arguments(name, bf16=True))
    return " and ".join(sorted(dtypes_while_training(trainer)))


def dtypes_while_training(trainer):
    """The dtypes of products in the decoder layers of the policy model whose gradients are computed."""
    seen: set[str] = set()
    layer = next(module for key, module in trainer.model.named_modules() if key.endswith("q_proj"))

    def record(module, args, output):
        if output.requires_grad:
            seen.add(str(output.dtype)[6:])

    layer.register_forward_hook(record)
    trainer.train()
    cells.reset_autocast()
    return seen


def _states(safe):
    from safe_trainers import contract_of

    return {one.area: one.state for one in contract_of(safe).coverage}
