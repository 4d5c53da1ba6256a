"""Searches modules in float32 for each tiny family and a byte-level model, and compares them with fixed rules.

Each rule (the head, the last layer, in the byte model also the last two and four) is a budget of bytes. `tune`
searches the set with the smallest mismatch within this budget, and both sets are measured on held-out prompts. Then
`tune` searches without a goal, and its lines are pasted into a run, whose logged mismatch is compared with the
promise. `make bench-tune` writes `benchmarks/results/tune.jsonl` and the page.
"""

import argparse
import copy
import fcntl
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any


os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", HF_HUB_DISABLE_PROGRESS_BARS="1")
os.environ.update(TRL_EXPERIMENTAL_SILENCE="1", TOKENIZERS_PARALLELISM="false")
warnings.simplefilter("ignore")

import datasets
import families
import torch
from mismatch import build as byte_model
from mismatch import learn
from provenance import measured_with, read_results
from transformers import ByT5Tokenizer, PrinterCallback

from safe_trainers import SafeGRPOConfig, SafeGRPOTrainer
from safe_trainers.core.errors import SafeTrainersError
from safe_trainers.testing import fp16_on_cpu
from safe_trainers.tiny.models import finish
from safe_trainers.tuning.accelerate_state import forget_precision
from safe_trainers.tuning.groups import extra_bytes, find_groups, head_name, layer_names
from safe_trainers.tuning.measure import Bench, batches_of, measured
from safe_trainers.tuning.plan import Plan, rows_for
from safe_trainers.tuning.search import NOTHING, Goal, outermost
from safe_trainers.tuning.store import Store
from safe_trainers.tuning.tune import tune_trainer
from safe_trainers.weights.fp32_modules import find_modules


RESULT = Path(__file__).parent / "results" / "tune.jsonl"
PACKAGES = ("safe-trainers", "torch", "trl", "transformers")
BYTE = "byte model"
LAYERS = 4
"""Text layers of each family, so that the last layers are not all layers; tiny families have one or two."""
EXAMPLE = "safe-trainers tune tiny:llava --precision bf16 --sequences 16 --max_tokens 12 --max_bytes 40K"
AS_THEY_ARE = ("gemma4",)
"""Families whose layers are not alike, so that they keep the two that they have."""
SEQUENCES, LENGTH = 96, 16
"""Prompts of a search of a tiny family: three times the default, because nearly all of its tokens agree exactly."""
SEED = 4321
LIMIT = 300.0
"""Time limit of a search in seconds, the default of `tune`."""
MOST_ROUNDS = 10_000
"""Most rounds of a promise: the time limit ends it before, since nearly all tokens of tiny models agree exactly."""
ALL_PRECISIONS = (BYTE, "text", "qwen2_vl")
"""Models that are searched in all precisions; the others in bfloat16, which takes a third of the time."""
LEAST_STEPS = 12
UNSEEN = 4
"""Both sets are compared on this many times the sequences of the search, on prompts of their own."""


def deep_model(family: str, layers: int) -> Any:
    """Builds a tiny family with more text layers."""
    model = families.build_model(family)
    if family in AS_THEY_ARE:
        return model
    config = copy.deepcopy(model.config)
    text = config.get_text_config()
    before = text.num_hidden_layers
    text.num_hidden_layers = layers
    for key, value in vars(text).items():
        if isinstance(value, list) and len(value) == before and key != "cross_attention_layers":
            setattr(text, key, [value[number % before] for number in range(layers)])
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        deeper = type(model)(config)
    if family == "mllama":
        for name, gate in deeper.named_parameters():
            if "gate" in name and gate.numel() == 1:
                torch.nn.init.constant_(gate, 0.5)
    made = finish(deeper, families.build_tokenizer(family), "float32")
    made.generation_config = model.generation_config
    return made


class Subject:
    """A model with its prompts, of which trainers are built.

    Args:
        name: A family, or `BYTE`.
        folder: A folder for what trainers write.
        steps: Training steps of the byte model.
    """

    def __init__(self, name: str, folder: str, steps: int) -> None:
        self.name, self._folder = name, folder
        self.sequences = Plan().sequences if name == BYTE else SEQUENCES
        rows = self.unseen + UNSEEN * self.sequences
        if name == BYTE:
            self._model = byte_model(8)
            learn(self._model, steps, width=256)
            self._processor = ByT5Tokenizer(extra_ids=0)
            self._generation: dict[str, Any] = {}
            self._dataset = datasets.Dataset.from_dict({"prompt": _code(rows)})
            return
        self._processor = families.build_processor(name)
        self._generation = families.generation_kwargs(self._processor)
        self._dataset = families.dataset("grpo", name, rows)
        if name in ("mllama", "ovis2"):  # stock TRL cannot train them with images
            self._dataset = self._dataset.remove_columns("image")
        self._model = deep_model(name, LAYERS)

    @property
    def unseen(self) -> int:
        """The first prompt that a search, its selection and its promise do not use."""
        return rows_for(self.sequences, self.sequences)

    def build(self, precision: str, wrap: Any = lambda trainer_class: trainer_class, **changes: Any) -> Any:
        """Builds a trainer with a copy of the model."""
        settings = {
            "precision": precision,
            "use_cpu": True,
            "per_device_train_batch_size": self.sequences,
            "num_generations": 2,
            "max_completion_length": LENGTH,
            "report_to": [],
            "disable_tqdm": True,
            "save_strategy": "no",
            "precision_report": "off",
            "generation_kwargs": self._generation,
        }
        trainer = wrap(fp16_on_cpu(SafeGRPOTrainer))(
            copy.deepcopy(self._model),
            args=SafeGRPOConfig(self._folder, **{**settings, **changes}),
            reward_funcs=lambda completions, **_: [float(len(str(text)) % 5) for text in completions],
            processing_class=self._processor,
            train_dataset=self._dataset,
        )
        trainer.remove_callback(PrinterCallback)
        return trainer


def _code(rows: int) -> list[str]:
    """Prompts for the byte model: parts of the source of Python's standard library."""
    from mismatch import source

    text = source()
    places = torch.linspace(0, len(text) - 20, rows).long().tolist()
    return [bytes((text[place : place + 16] - 3).tolist()).decode("latin-1") for place in places]


def compare(subject: Subject, folder: Path) -> dict[str, Any]:
    """Compares the search with fixed rules, each at the rule's bytes, on held-out prompts."""
    forget_precision()
    trainer = subject.build("bf16", measured, precision_metrics=False)
    model = trainer.model
    layers, head = layer_names(model), head_name(model)
    rules = {"head only": [head], "last layer": [layers[-1]]}
    if subject.name == BYTE:
        rules |= {f"last {k} layers": list(layers[-k:]) for k in (2, 4)}
    sets = {name: frozenset(find_modules(model, names)) for name, names in rules.items()}
    budgets = {name: extra_bytes(model, names) for name, names in sets.items()}
    everything = outermost(NOTHING.union(*(group.modules for group in find_groups(model))))
    found: dict[str, Any] = {"layers": len(layers), "rules": {}}
    chosen = {}
    for name, budget in budgets.items():
        begun = time.process_time()
        plan = Plan(
            subject.name, goal=Goal(max_bytes=budget), precisions=("bf16",), sequences=subject.sequences, rounds=1,
            time_limit=LIMIT,
        )  # fmt: skip
        made = tune_trainer(
            lambda p, w: subject.build(p, w, precision_metrics=False), plan, Store(folder / "state.json")
        )
        chosen[name] = frozenset(find_modules(model, made.best.fp32_modules))
        found["rules"][name] = {
            "bytes": budget,
            "fp32_modules": list(made.best.fp32_modules),
            "bytes_used": made.best.nbytes,
            "cpu_seconds": round(time.process_time() - begun, 1),
            "measured": made.measurements,
        }
    forget_precision()
    trainer = subject.build("bf16", measured, precision_metrics=False)
    held_out = UNSEEN * subject.sequences
    bench = Bench(trainer, batches_of(trainer.train_dataset, subject.sequences, held_out, skip=subject.unseen))
    tokens = bench.sample(everything, SEED)
    unseen = {names: bench.measure(names, tokens) for names in {NOTHING, everything, *sets.values(), *chosen.values()}}
    found["plain"], found["everything"] = unseen[NOTHING].to_dict(), unseen[everything].to_dict()
    for name in rules:
        found["rules"][name] |= {"rule": unseen[sets[name]].to_dict(), "tuned": unseen[chosen[name]].to_dict()}
        found["rules"][name]["same_set"] = sets[name] == chosen[name]
    return found


def promise(subject: Subject, folder: Path) -> dict[str, Any]:
    """Searches over all precisions, pastes the lines into a run, and compares its metric with the promise.

    The run has twice as many steps as the promise had rounds, so that its own standard error is 0.7 of theirs.
    """
    begun, cpu = time.perf_counter(), time.process_time()
    precisions = ("bf16", "fp16", "fp32") if subject.name in ALL_PRECISIONS else ("bf16",)
    plan = Plan(subject.name, sequences=subject.sequences, time_limit=LIMIT, precisions=precisions, rounds=MOST_ROUNDS)
    made = tune_trainer(lambda p, w: subject.build(p, w, precision_metrics=False), plan, Store(folder / "state.json"))
    wall, cpu = time.perf_counter() - begun, time.process_time() - cpu
    forget_precision()
    settings = dict(made.settings)
    steps = max(LEAST_STEPS, -(-2 * made.promise.sequences // subject.sequences))
    trainer = subject.build(
        settings.pop("precision"), max_steps=steps, logging_steps=steps, learning_rate=0.0, seed=7, **settings
    )
    trainer.train()
    logged = next(e for e in trainer.state.log_history if "precision/logp_mismatch_mean" in e)
    content = made.to_dict()
    if subject.name != BYTE:
        for name in ("contributions", "rules", "measured_sets", "front"):
            content.pop(name)
    content |= {"wall_seconds": round(wall, 1), "cpu_seconds": round(cpu, 1)}
    return content | {"run": logged["precision/logp_mismatch_mean"], "steps": steps, "rows": subject.sequences}


def measure(name: str, steps: int, promised: Any = None) -> dict[str, Any]:
    """Measures one family; a promise that was measured before is kept."""
    row: dict[str, Any] = {"family": name}
    with tempfile.TemporaryDirectory() as scratch:
        try:
            subject = Subject(name, scratch, steps)
            begun = time.perf_counter()
            row |= compare(subject, Path(scratch))
            row["promise"] = promised or promise(subject, Path(scratch))
            row["seconds"] = round(time.perf_counter() - begun, 1)
        except (SafeTrainersError, AttributeError, ValueError, RuntimeError) as error:  # a result
            row["reason"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return row


def example() -> dict[str, Any]:
    """Runs the worked example of the page as a user does."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tune.json"
        words = [sys.executable, "-m", "safe_trainers.cli", *EXAMPLE.split()[1:], "--json", str(file)]
        environment = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1"}
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr[-2000:])
        result = json.loads(file.read_text(encoding="utf-8"))
    result.pop("state")
    printed = [line.rstrip() for line in done.stdout.splitlines() if not line.startswith("json ")]
    return {"commands": [EXAMPLE], "printed": printed, "result": result}


def heading_of(names: tuple[str, ...], before: dict[str, Any] | None = None) -> dict[str, Any]:
    """Returns the heading of the results; `before` is that of rows that are kept whatever they were measured with."""
    now = measured_with("python benchmarks/tune.py", *PACKAGES, before=before)
    return {**now, "sequences": SEQUENCES, "length": LENGTH, "models": list(names)}


def known_rows(output: Path, heading: dict[str, Any], kept: bool) -> dict[str, Any]:
    """Returns the rows of a file by family; unless they are `kept`, only those that were measured with the same."""
    before, rows = read_results(output)
    return {row["family"]: row for row in rows} if kept or before == heading else {}


def add(row: dict[str, Any], output: Path, names: tuple[str, ...], kept: bool) -> None:
    """Adds a row to the results; other processes may add rows of other families to the same file."""
    folder = os.open(output.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        heading = heading_of(names, (read_results(output)[0] or None) if kept else None)
        rows = known_rows(output, heading, kept) | {row["family"]: row}
        lines = [heading, *(rows[name] for name in names if name in rows)]
        output.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    finally:
        os.close(folder)


def main() -> None:
    """Measures the families that have no result of this package and these versions, and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="families to measure, separated by commas, even if they have results")
    parser.add_argument("--budgets", action="store_true", help="measure the searches within a budget, keep promises")
    parser.add_argument("--steps", type=int, default=150, help="training steps of the byte model")
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    torch.set_num_threads(1)
    datasets.disable_progress_bars()
    names = (*families.FAMILIES, BYTE)
    kept = bool(options.only or options.budgets)
    promises = known_rows(options.output, heading_of(names), kept) if options.budgets else {}
    for name in options.only.split(",") if options.only else names:
        if not kept and name in known_rows(options.output, heading_of(names), kept):
            continue
        row = measure(name, options.steps, promises.get(name, {}).get("promise"))
        add(row, options.output, names, kept)
        print(name, row.get("reason") or summary(row), file=sys.stderr, flush=True)
    if not options.only:
        shown = json.dumps(example(), indent=1) + "\n"
        options.output.with_name("tune_example.json").write_text(shown, encoding="utf-8")


def summary(row: dict[str, Any]) -> str:
    """One line for a family."""
    parts = [
        f"{name}: {found['tuned']['mean']:.1e} against {found['rule']['mean']:.1e}"
        for name, found in row["rules"].items()
    ]
    promised = row["promise"]
    parts.append(f"promise {promised['promise']['mean']:.2e}, run {promised['run']:.2e}")
    return f"{'; '.join(parts)} ({row['seconds']} s)"


if __name__ == "__main__":
    main()
