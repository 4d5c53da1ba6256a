"""Trains every multimodal family of the installed transformers with the stock and the safe `SFTTrainer`.

    python benchmarks/every_family.py                      # the families without results; an hour on one core
    python benchmarks/every_family.py --only llava,git     # measures these families again

The families are those of transformers' auto classes. A tiny model of each is built from its config, and inputs for it
are found by trying the forms that transformers' processors make. Each family runs in a process of its own, two steps
in each precision. A family that stock TRL cannot train in float32 is listed with the reason.
"""

import argparse
import contextlib
import io
import json
import multiprocessing
import os
import re
import resource
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import quiet  # noqa: F401  (sets the environment)
from provenance import measured_with, read_results


RESULT = Path(__file__).parent / "results" / "every_family.jsonl"
PACKAGES = ("safe-trainers", "torch", "trl", "transformers", "peft")
LIMITS = {"float32": 1e-6, "bfloat16": 2**-7, "bf16": 2**-7, "fp16": 2**-10}
"""Largest relative difference of the losses of stock and safe, by the dtype that is computed in."""
SECONDS = 300
"""The time limit of a family."""
MEMORY = 12 * 2**30
"""The limit of a family's address space, in bytes."""


@dataclass(frozen=True)
class Cell:
    """A combination of weights and autocast.

    Attributes:
        weights: The dtype in which the model is loaded.
        flag: `"bf16"`, `"fp16"` or `None`.
        lora: Whether adapters are trained.
    """

    weights: str
    flag: str | None
    lora: bool = False


CELLS = {
    "fp32": Cell("float32", None),
    "fp32, bf16=True": Cell("float32", "bf16"),
    "bf16": Cell("bfloat16", None),
    "bf16, bf16=True": Cell("bfloat16", "bf16"),
    "fp16, fp16=True, LoRA": Cell("float16", "fp16", lora=True),
}
"""The cells by name, first the one that decides whether TRL can train a family."""


@dataclass
class Subject:
    """A family that is trained.

    Attributes:
        family: The family.
        folder: A saved model of it.
        kind: `"image"`, `"sound"` or `"text"`.
        inputs: The inputs of each step, with labels.
        settings: Training arguments that stock TRL needs to train the family.
    """

    family: str
    folder: str
    kind: str
    inputs: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)


DTYPES = re.compile(r"dtype|scalar ?type|should be the same", re.IGNORECASE)
"""Matches PyTorch's errors about two different dtypes."""
RETRIES: tuple[dict[str, Any], ...] = ({"gradient_checkpointing": False}, {"router_aux_loss_coef": 0.0})
"""Training arguments that are tried if stock TRL crashes in float32: TRL's defaults ask for what some models lack."""


def run_cell(subject: Subject, cell: Cell, safe: bool) -> Any:
    """Trains a cell.

    Args:
        subject: The family.
        cell: The cell.
        safe: Whether to train with the safe trainer.

    Returns:
        The outcome, and the losses and trained weights; no weights if it did not train.
    """
    import torch

    from safe_trainers.bench.judges import LOSS_SCALE, Outcome, conclude, fresh, judge_error

    fresh()
    outcome, started, trainer, values = Outcome(), time.perf_counter(), None, {}
    with warnings.catch_warnings(record=True) as said, contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("always")
        try:
            trainer = build_trainer(subject, cell, safe)
            scaler = trainer.accelerator.scaler
            if scaler is not None:  # torch's initial scale would skip both steps
                scaler.load_state_dict({**scaler.state_dict(), "scale": LOSS_SCALE})
            gradients: set[str] = set()
            trainer.add_callback(_Gradients(gradients))
            trainer.train()
            if safe and trainer._run.media_trial is not None:
                values["trial"] = trainer._run.media_trial
            losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
            trained = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
            values |= {"losses": losses, "weights": trained}
            if not gradients:
                outcome.faults.append("no trainable weight has a gradient")
            if not all(abs(loss) < float("inf") for loss in losses):
                outcome.faults.append("a loss is not finite")
            narrow = sorted({str(p.dtype)[6:] for name, p in trained.items() if "lora_" in name} - {"float32"})
            if narrow:
                outcome.faults.append(f"adapters in {', '.join(narrow)}")
        except Exception as error:  # every error is a result
            judge_error(error, built=trainer is not None, outcome=outcome)
    conclude(outcome, said, started)
    del trainer
    fresh()
    torch.manual_seed(0)
    return outcome, values


def build_trainer(subject: Subject, cell: Cell, safe: bool) -> Any:
    """Builds the trainer of a cell."""
    import torch
    import transformers
    import trl
    from any_family.models import Sampler, families, lora_targets
    from datasets import Dataset
    from peft import LoraConfig

    import safe_trainers
    from safe_trainers import tiny
    from safe_trainers.testing import fp16_on_cpu

    torch.manual_seed(0)
    folder, kind, inputs = subject.folder, subject.kind, subject.inputs
    model_class = getattr(transformers, families()[subject.family])
    model = model_class.from_pretrained(folder, dtype=getattr(torch, cell.weights))
    tokenizer = tiny.build_tokenizer("text")
    sample = {name: value for name, value in inputs.items() if name != "labels"}
    rows = {"input_ids": inputs["input_ids"].tolist()}
    if kind != "text":
        rows["pixel_values" if kind == "image" else "input_features"] = [0] * len(inputs["input_ids"])
    args = trl.SFTConfig(
        output_dir=str(Path(folder) / "out"), use_cpu=True, bf16=cell.flag == "bf16", fp16=cell.flag == "fp16",
        max_steps=2, per_device_train_batch_size=len(inputs["input_ids"]), learning_rate=1e-4, logging_steps=1,
        report_to=[], save_strategy="no", disable_tqdm=True, max_length=None, remove_unused_columns=False,
        dataset_kwargs={"skip_prepare_dataset": True}, **subject.settings,
    )  # fmt: skip
    made: dict[str, Any] = {
        "model": model,
        "args": args,
        "train_dataset": Dataset.from_dict(rows),
        "processing_class": tokenizer if kind == "text" else Sampler(tokenizer, sample, kind),
        "data_collator": lambda rows: {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in inputs.items()},
    }
    if cell.lora:
        made["peft_config"] = LoraConfig(r=4, target_modules=lora_targets(model))
    chosen = safe_trainers.SafeSFTTrainer if safe else trl.SFTTrainer
    trainer = (fp16_on_cpu(chosen) if cell.flag == "fp16" else chosen)(**made)
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def _Gradients(found: set[str]) -> Any:  # noqa: N802  (a class whose base is imported late)
    from transformers import TrainerCallback

    class Gradients(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            found.update(name for name, p in model.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0)

    return Gradients()


def compare(stock: Mapping[str, Any], safe: Mapping[str, Any]) -> dict[str, Any]:
    """Compares two runs.

    Args:
        stock: The losses and weights of one.
        safe: Those of the other.

    Returns:
        Whether losses and weights are bit-identical, and the largest relative difference of the losses. The weights
        that Adam has changed say less: its first steps have the size of the learning rate, whatever the gradient.
    """
    import torch

    weights = safe["weights"]
    same = (name in weights and torch.equal(weight, weights[name]) for name, weight in stock["weights"].items())
    pairs = list(zip(stock["losses"], safe["losses"], strict=True))
    return {
        "identical": stock["losses"] == safe["losses"] and all(same),
        "difference": max(abs(one - other) / max(abs(one), 1e-9) for one, other in pairs),
    }


def measure(family: str, known: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Builds a family, finds its inputs and trains all cells.

    Args:
        family: The family.
        known: Its row, if cells have been trained before; only the others are trained.

    Returns:
        The row of the results.
    """
    import torch
    from any_family.inputs import first_line, shapes
    from any_family.models import build, families, find_inputs

    torch.set_num_threads(1)
    row: dict[str, Any] = {"family": family, "model": families()[family]}
    try:
        model = build(family)
    except Exception as error:  # a family that cannot be built is listed
        return row | {"step": "build", "reason": f"{type(error).__name__}: {first_line(error)}"}
    row["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    try:
        kind, inputs = find_inputs(model)
    except Exception as error:  # as above
        return row | {"step": "inputs", "reason": f"{type(error).__name__}: {str(error)[:600]}"}
    row |= {"kind": kind, "inputs": shapes({name: value for name, value in inputs.items() if name != "labels"})}
    with tempfile.TemporaryDirectory(prefix="every-family-") as folder:
        try:
            model.save_pretrained(folder)
        except Exception as error:  # as above
            return row | {"step": "save", "reason": f"{type(error).__name__}: {first_line(error)}"}
        two_stacks = bool(model.config.is_encoder_decoder)
        del model
        known = known or {}
        row["cells"] = dict(known.get("cells", {}))
        row |= {name: known[name] for name in ("settings", "because") if name in known}
        subject = Subject(family, folder, kind, inputs, known.get("settings", {}))
        for name, cell in CELLS.items():
            if name in row["cells"]:
                continue
            stock, values = run_cell(subject, cell, safe=False)
            if name == "fp32" and stock.outcome != "trained":
                reason = why(stock)
                for subject.settings in (*RETRIES, {}):
                    stock, values = run_cell(subject, cell, safe=False)
                    if stock.outcome == "trained":
                        row |= {"settings": subject.settings, "because": reason}
                        break
                else:
                    row |= {"step": "stock", "reason": f"an encoder-decoder: {reason}" if two_stacks else reason}
            safe, others = run_cell(subject, cell, safe=True)
            found = {"stock": stock.to_dict(), "safe": safe.to_dict()}
            if "weights" in values and "weights" in others:
                found |= compare(values, others)
            if "trial" in others:
                trial = others["trial"]
                found["trial"] = trial.skipped or trial.error or "works"
            row["cells"][name] = found
            if "reason" in row:
                break
    return row


def why(outcome: Any) -> str:
    """Describes a crash or a wrong result."""
    text: str = outcome.message or "; ".join(outcome.faults)
    return f"{text} ({outcome.frame})" if outcome.frame else text


def versions() -> dict[str, str]:
    """The versions of the packages that results depend on."""
    return {package: version(package) for package in PACKAGES}


def run_family(family: str, known: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Measures a family in a process of its own, with limits of time and memory.

    The process is forked, so that each does not have to import the libraries again.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_measure_in_child, args=(family, known, sender))
    started = time.perf_counter()
    process.start()
    sender.close()
    from any_family.models import families

    row: dict[str, Any] = {"family": family, "model": families()[family], "step": "process"}
    try:
        row = receiver.recv() if receiver.poll(SECONDS) else row | {"reason": f"more than {SECONDS} s"}
    except EOFError:  # the process died
        process.join()
        row |= {"reason": f"the process ended with status {process.exitcode}"}
    if process.is_alive():
        process.kill()
    process.join()
    return row | {"seconds": round(time.perf_counter() - started, 1)}


def _measure_in_child(family: str, known: Mapping[str, Any] | None, sender: Any) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    sender.send(measure(family, known))


def complete(row: Mapping[str, Any] | None) -> bool:
    """Whether a family has results in all cells, or cannot be trained by stock TRL."""
    return row is not None and ("reason" in row or row["cells"].keys() == CELLS.keys())


def unfit(row: Mapping[str, Any]) -> list[str]:
    """Describes what the safe trainer does wrong in a family that stock trains in float32.

    These are wrong results, refusals of what stock trains, results that differ from those of stock, and crashes. A
    crash is left out if stock crashes with the same error, and the error is not about dtypes.
    """
    lines = []
    for name, cell in {} if "reason" in row else row["cells"].items():
        stock, safe, place = cell["stock"], cell["safe"], f"{row['family']}, {name}"
        same = stock.get("message") == safe.get("message") and not DTYPES.search(safe.get("message", ""))
        if stock["outcome"] == safe["outcome"] == "crashed" and same:
            continue  # the model cannot be trained in this way, in any precision
        if safe["outcome"] in ("crashed", "wrong"):
            text = safe.get("message") or "; ".join(safe["faults"])
            lines.append(f"{place}: {safe['outcome']}: {text} {safe.get('frame', '')}")
        elif safe["outcome"] == "refused" and stock["outcome"] == "trained":
            lines.append(f"{place}: refused ({', '.join(safe.get('ids', []))}), and stock trains it")
        elif (
            stock["outcome"] == "trained" and not cell["difference"] <= LIMITS[CELLS[name].flag or CELLS[name].weights]
        ):
            lines.append(f"{place}: the losses differ from those of stock by {cell['difference']:.1e}")
    return lines


def main() -> int:
    """Measures the families that have no results, and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="families to measure, separated by commas, even if they have results")
    parser.add_argument("--again", action="store_true", help="measure families that have results too")
    options = parser.parse_args()
    import matrix_cell  # noqa: F401  (imported once, before the processes are forked)
    import torch
    from any_family.models import families

    torch.set_num_threads(1)

    heading, rows = read_results(RESULT)
    known = {row["family"]: row for row in rows} if heading.get("versions") == versions() and not options.again else {}
    if options.only:
        names = options.only.split(",")
        known = {name: row for name, row in known.items() if name not in names}
    else:
        names = [name for name in families() if not complete(known.get(name))]
    heading = {
        **measured_with("python benchmarks/every_family.py", *PACKAGES, before=heading or None),
    }
    for name in names:
        known[name] = run_family(name, known.get(name))
        rows = [known[family] for family in families() if family in known]
        RESULT.write_text("".join(json.dumps(line) + "\n" for line in (heading, *rows)), encoding="utf-8")
        print(name, known[name].get("reason", "")[:200], *unfit(known[name]), sep="\n  ", file=sys.stderr)
    problems = [line for row in known.values() for line in unfit(row)]
    trained = sum("reason" not in row for row in known.values())
    print(f"{len(known)} families, {trained} trained by stock TRL in float32")
    print(f"{len(problems)} problems", *problems, sep="\n")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
