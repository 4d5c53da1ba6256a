"""Plants faults into runs, and records whether `safe-trainers diff` names the module and the cause.

    python benchmarks/diff_faults.py             # every fault, 20 pairs without a fault, and the time; 5 minutes
    python benchmarks/diff_faults.py NAME ...    # these faults only, and nothing is written

Each fault is planted into one of two runs of two steps that are otherwise equal. The module and the cause that it must
be given are written next to it, and were fixed before the comparison.
"""

import argparse
import contextlib
import io
import json
import re
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
warnings.simplefilter("ignore")

import cells
import torch
from cells import Cell
from peft import LoraConfig
from policing import reset_accelerate
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback

from safe_trainers.diff.compare import Comparison, compare_recordings, compare_rollout
from safe_trainers.diff.storage import FOLDER, MOST_BYTES
from safe_trainers.testing import fp16_on_cpu


RESULT = Path(__file__).parent / "results" / "diff_faults.json"
STEPS = 2


@dataclass(frozen=True)
class Fault:
    """A fault, and what must be said of it.

    Attributes:
        name: What is wrong.
        cell: The run, as family, trainer, precision and `lora`.
        module: A regular expression of the module that must be named.
        cause: The cause that must be named.
        plant: Changes the trainer of the second run.
        changes: Arguments of the second run.
        both: Arguments of both runs; `lora_dropout` is an argument of the adapter.
        rollout: Whether rollout and training of the second run are compared, not two runs.
    """

    name: str
    cell: tuple[str, ...]
    module: str
    cause: str
    plant: Callable[[Any], None] | None = None
    changes: dict[str, Any] = field(default_factory=dict)
    both: dict[str, Any] = field(default_factory=dict)
    rollout: bool = False


TEXT, TEXT_LORA, TEXT_BF16 = ("text", "sft", "fp32"), ("text", "sft", "fp32", "lora"), ("text", "sft", "bf16")
OSS, LLAVA, LLAVA_LORA = ("gpt_oss", "sft", "fp32"), ("llava", "sft", "fp32"), ("llava", "sft", "fp32", "lora")
GEMMA, QWEN_LORA = ("gemma3", "sft", "fp32"), ("qwen2_5_vl", "sft", "fp32", "lora")
GRPO, GRPO_LORA, GRPO_BF16 = ("text", "grpo", "fp32"), ("text", "grpo", "fp32", "lora"), ("text", "grpo", "bf16")
DPO, ARIA = ("text", "dpo", "fp32"), ("aria", "sft", "fp32")


def module_of(trainer: Any, end: str) -> Any:
    """Returns the first module whose name ends with `end`."""
    return next(module for name, module in trainer.model.named_modules() if name.endswith(end))


def after_step(trainer: Any, action: Callable[[], Any]) -> None:
    """Runs an action after each step."""

    class Acts(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            action()

    trainer.add_callback(Acts())


def wrap(module: Any, change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replaces the forward method of one module."""
    module.forward = change(module.forward)


def computed_in(end: str, dtype: torch.dtype) -> Callable[[Any], None]:
    """A module that computes in another dtype, and returns the dtype of its input."""

    def change(forward: Any) -> Any:
        def rounded(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return forward(hidden.to(dtype).to(hidden.dtype), *args, **kwargs).to(dtype).to(hidden.dtype)

        return rounded

    return lambda trainer: wrap(module_of(trainer, end), change)


def without_autocast(end: str) -> Callable[[Any], None]:
    """A module that computes in float32 in a run under autocast."""

    def change(forward: Any) -> Any:
        def plain(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            with torch.autocast("cpu", enabled=False):
                return forward(hidden.float(), *args, **kwargs)

        return plain

    return lambda trainer: wrap(module_of(trainer, end), change)


def truncated(end: str) -> Callable[[Any], None]:
    """A layer that multiplies with 10 bits of mantissa, as TF32 does."""

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        return (tensor.view(torch.int32) & ~0x1FFF).view(torch.float32)

    def plant(trainer: Any) -> None:
        layer = module_of(trainer, end)
        layer.forward = lambda hidden: torch.nn.functional.linear(
            hidden + (cut(hidden.detach()) - hidden).detach(),
            layer.weight + (cut(layer.weight.detach()) - layer.weight).detach(), layer.bias)  # fmt: skip

    return plant


def attribute(end: str, name: str, value: Any) -> Callable[[Any], None]:
    """A module with another value of an attribute."""

    def plant(trainer: Any) -> None:
        module = module_of(trainer, end)
        now = getattr(module, name)
        setattr(module, name, value(now) if callable(value) else value)

    return plant


@torch.no_grad()
def _swap(one: torch.Tensor, other: torch.Tensor) -> None:
    kept = one.clone()
    one.copy_(other)
    other.copy_(kept)


def swapped(first: str, second: str) -> Callable[[Any], None]:
    """Two layers with each other's weights."""
    return lambda trainer: _swap(module_of(trainer, first).weight, module_of(trainer, second).weight)


def weight(end: str, change: Callable[[torch.Tensor], torch.Tensor], name: str = "weight") -> Callable[[Any], None]:
    """A layer with a changed weight or buffer."""

    def plant(trainer: Any) -> None:
        tensor = getattr(module_of(trainer, end), name)
        tensor.data.copy_(change(tensor.data.clone()))

    return plant


def stored_in(end: str, dtype: torch.dtype) -> Callable[[Any], None]:
    """A layer whose weights are stored in another dtype."""
    return lambda trainer: module_of(trainer, end).to(dtype) and None


def nudged(tensor: torch.Tensor) -> torch.Tensor:
    """One element, one unit in the last place larger."""
    tensor.view(-1)[5] = torch.nextafter(tensor.view(-1)[5], torch.tensor(torch.inf))
    return tensor


def collated(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[Any], None]:
    """Other batches from the same data."""

    def plant(trainer: Any) -> None:
        collate = trainer.data_collator
        trainer.data_collator = lambda rows: change(dict(collate(rows)))

    return plant


def positions(offset: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def change(batch: dict[str, Any]) -> dict[str, Any]:
        rows, length = batch["input_ids"].shape
        return batch | {"position_ids": (torch.arange(length) + offset).expand(rows, length).clone()}

    return change


def left_padded(batch: dict[str, Any]) -> dict[str, Any]:
    lengths = batch["attention_mask"].sum(1).tolist()
    width = batch["input_ids"].shape[1]
    names = [name for name in ("input_ids", "attention_mask", "labels") if name in batch]
    return batch | {n: torch.stack([torch.roll(row, width - k) for row, k in zip(batch[n], lengths, strict=True)])
                    for n in names}  # fmt: skip


def inside_positions(trainer: Any) -> None:
    """The model's own code, which passes positions that are off by one to its rotary embedding."""

    def change(forward: Any) -> Any:
        def shifted(input_ids: Any = None, **kwargs: Any) -> Any:
            positions = torch.arange(input_ids.shape[1]).expand(*input_ids.shape) + 1
            return forward(input_ids=input_ids, **kwargs | {"position_ids": positions})

        return shifted

    wrap(trainer.model.model, change)


def decoded_positions(trainer: Any) -> None:
    """Positions that are off by one while single tokens are decoded."""

    def change(forward: Any) -> Any:
        def shifted(input_ids: Any = None, position_ids: Any = None, **kwargs: Any) -> Any:
            if input_ids.shape[1] == 1 and position_ids is not None:
                position_ids = position_ids + 1
            return forward(input_ids=input_ids, position_ids=position_ids, **kwargs)

        return shifted

    wrap(trainer.model.model, change)


def decoded_scale(trainer: Any) -> None:
    """A norm that scales by another factor while single tokens are decoded."""

    def change(forward: Any) -> Any:
        return lambda hidden: forward(hidden) * (1.01 if hidden.shape[1] == 1 else 1.0)

    wrap(module_of(trainer, "layers.0.post_attention_layernorm"), change)


def stale_adapter(trainer: Any) -> None:
    """An adapter that still has the weights of the first step in the second."""
    factor = module_of(trainer, "q_proj.lora_B.default").weight
    first = factor.detach().clone()
    after_step(trainer, lambda: factor.data.copy_(first))


def disabled_adapter(trainer: Any) -> None:
    after_step(trainer, lambda: setattr(module_of(trainer, "q_proj"), "_disable_adapters", True))


def dropout_off(trainer: Any) -> None:
    """A dropout that stays in evaluation mode."""
    dropout = module_of(trainer, "q_proj.lora_dropout.default")
    dropout.train = lambda mode=True: dropout
    dropout.training = False


def other_random_state(trainer: Any) -> None:
    trainer.model.register_forward_pre_hook(lambda *_: torch.rand(1) and None)


def rope_theta(trainer: Any) -> None:
    rotary = module_of(trainer, "rotary_emb")
    parameters = rotary.config.rope_parameters
    parameters["rope_theta"] = 5e5
    half = rotary.inv_freq.shape[0]
    rotary.inv_freq.copy_(5e5 ** -(torch.arange(half) / half))


def shorter_window(trainer: Any) -> None:
    trainer.model.config.sliding_window = 8


def lost_state(trainer: Any) -> None:
    """An optimizer whose first moments are lost before the second step."""

    def action() -> None:
        for state in trainer.optimizer.state.values():
            state["exp_avg"].zero_()

    after_step(trainer, action)


def halved_loss(trainer: Any) -> None:
    compute = trainer.compute_loss

    def halved(*args: Any, **kwargs: Any) -> Any:
        result = compute(*args, **kwargs)
        return (result[0] * 0.5, *result[1:]) if isinstance(result, tuple) else result * 0.5

    trainer.compute_loss = halved


def halved_gradient(end: str) -> Callable[[Any], None]:
    return lambda trainer: module_of(trainer, end).weight.register_hook(lambda g: g * 0.5) and None


def damped(end: str) -> Callable[[Any], None]:
    """A layer whose backward pass returns half of the gradient of its input."""

    class Half(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
            return tensor.view_as(tensor)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * 0.5

    def change(forward: Any) -> Any:
        return lambda hidden: forward(Half.apply(hidden))

    return lambda trainer: wrap(module_of(trainer, end), change)


def scaled_output(end: str, factor: float) -> Callable[[Any], None]:
    return lambda trainer: module_of(trainer, end).register_forward_hook(lambda m, a, output: output * factor) and None


def other_activation(trainer: Any) -> None:
    module_of(trainer, "layers.0.mlp").act_fn = torch.nn.GELU()


def eager(trainer: Any) -> None:
    trainer.model.set_attn_implementation("eager")


def checkpointing(preserve: bool) -> dict[str, Any]:
    kwargs = {"use_reentrant": False, "preserve_rng_state": preserve}
    return {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": kwargs}


Q, BATCH = r"q_proj$", r"^$|^\(loss\)$"
DROPS = {"lora_dropout": 0.1}

FAULTS = (
    # dtype
    Fault("a linear layer computes in bfloat16", TEXT, r"mlp\.down_proj$", "dtype", computed_in("mlp.down_proj", torch.bfloat16)),
    Fault("a norm computes in float16", LLAVA_LORA, r"language_model\.norm$", "dtype", computed_in("language_model.norm", torch.float16)),
    Fault("a vision layer computes in bfloat16", LLAVA, r"mlp\.fc1$", "dtype", computed_in("mlp.fc1", torch.bfloat16)),
    Fault("a weight is rounded to bfloat16", OSS, r"layers\.1\.self_attn\.o_proj$", "dtype", weight("layers.1.self_attn.o_proj", lambda w: w.bfloat16().float())),
    Fault("a layer is not under autocast", TEXT_BF16, r"self_attn\.v_proj$", "dtype", without_autocast("self_attn.v_proj")),
    Fault("a frozen layer is stored in bfloat16", ("text", "sft", "bf16", "lora"), r"mlp\.up_proj$", "dtype", stored_in("mlp.up_proj", torch.bfloat16)),
    Fault("rotary frequencies are rounded to bfloat16", GEMMA[:2] + ("fp32", "lora"), r"rotary_emb$", "dtype", weight("rotary_emb", lambda w: w.bfloat16().float(), "sliding_attention_inv_freq")),
    # inputs
    Fault("position ids are off by one", TEXT, BATCH, "inputs", collated(positions(1)), both={"collate": positions(0)}),
    Fault("the model shifts position ids by one", OSS, r"^model\.rotary_emb$", "inputs", inside_positions),
    Fault("the attention mask is off", TEXT, BATCH, "inputs", collated(lambda b: b | {"attention_mask": torch.ones_like(b["attention_mask"])}), both={"uneven": True}),
    Fault("labels are shifted by one", TEXT_LORA, BATCH, "inputs", collated(lambda b: b | {"labels": torch.roll(b["labels"], 1, 1)})),
    Fault("images are normalised differently", LLAVA, BATCH + r"|vision_tower$", "inputs", collated(lambda b: b | {"pixel_values": b["pixel_values"] * 1.05})),
    Fault("one token id is replaced", QWEN_LORA, BATCH, "inputs", collated(lambda b: b | {"input_ids": torch.cat([b["input_ids"][:, :-1], b["input_ids"][:, -2:-1]], 1)})),
    # batch shape
    Fault("two micro-batches instead of one", TEXT, BATCH, "batch shape", changes={"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}),
    Fault("padding to a multiple of 64", TEXT_LORA, BATCH, "batch shape", changes={"pad_to_multiple_of": 64}),
    Fault("padding on the left", OSS, BATCH, "batch shape", collated(left_padded), both={"uneven": True}),
    # weights
    Fault("two projections are swapped", TEXT, Q, "weights", swapped("q_proj", "k_proj")),
    Fault("two vision projections are swapped", LLAVA, r"vision_tower.*k_proj$", "weights", swapped("k_proj", "v_proj")),
    Fault("one weight differs by one ulp", GEMMA, r"language_model.*mlp\.gate_proj$", "weights", weight("mlp.gate_proj", nudged)),
    Fault("the adapter is stale", TEXT_LORA, r"q_proj\.lora_B\.default$", "weights", stale_adapter),
    Fault("an embedding row is zero", ARIA, r"embed_tokens$", "weights", weight("embed_tokens", lambda w: torch.cat([w[:40], w[40:80] * 0, w[80:]]))),
    # settings
    Fault("the attention scale is wrong", TEXT, r"self_attn$", "setting", attribute("self_attn", "scaling", lambda s: s * 0.5)),
    Fault("another eps of a norm", GEMMA, r"input_layernorm$", "setting", attribute("layers.0.input_layernorm", "eps", 1e-4)),
    Fault("another eps of a vision norm", LLAVA, r"vision_tower.*layer_norm1$", "setting", attribute("layer_norm1", "eps", 1e-3)),
    Fault("another rope theta", TEXT, r"rotary_emb$", "setting", rope_theta),
    Fault("another LoRA alpha", TEXT_LORA, Q, "setting", attribute("q_proj", "scaling", {"default": 4.0})),
    Fault("the adapter is switched off", QWEN_LORA, Q, "setting", disabled_adapter),
    Fault("a dropout is switched off", TEXT_LORA, r"q_proj\.lora_dropout\.default$", "setting", dropout_off, both=DROPS),
    Fault("another dropout probability", LLAVA_LORA, r"lora_dropout\.default$", "setting", attribute("v_proj.lora_dropout.default", "p", 0.2), both=DROPS),
    Fault("another sliding window", OSS, r"^model$", "setting", shorter_window),
    Fault("another number of experts", OSS, r"router$", "setting", attribute("router", "top_k", 1)),
    # random state
    Fault("another random state in dropout", TEXT_LORA, r"q_proj\.lora_dropout\.default$", "random state", other_random_state, both=DROPS),
    Fault("checkpointing with another random state", TEXT_LORA, r"lora_dropout\.default$", "random state", changes=checkpointing(False), both=DROPS | checkpointing(True)),
    # kernel
    Fault("TF32-like truncation", TEXT, r"mlp\.up_proj$", "kernel", truncated("mlp.up_proj")),
    Fault("another attention kernel", OSS[:0] + TEXT, r"self_attn$", "kernel", eager),
    Fault("another activation function", TEXT, r"mlp\.act_fn$", "kernel", other_activation),
    Fault("the projector's output is scaled in code", LLAVA_LORA, r"multi_modal_projector$", "kernel", scaled_output("multi_modal_projector", 1.01)),
    Fault("a backward pass returns half a gradient", TEXT, r"mlp\.down_proj$", "kernel", damped("mlp.down_proj")),
    Fault("the gradient of one weight is halved", GRPO, r"v_proj$", "kernel", halved_gradient("v_proj")),
    # loss and optimizer
    Fault("the loss is halved", TEXT, r"^\(loss\)$", "kernel", halved_loss),
    Fault("another kind of loss", TEXT, r"^\(loss\)$", "setting", changes={"loss_type": "dft"}),
    Fault("another beta of DPO", DPO, r"^\(loss\)$", "setting", changes={"beta": 0.5}),
    Fault("gradients are clipped lower", TEXT, r"^\(gradients\)$", "setting", changes={"max_grad_norm": 1e-3}),
    Fault("other betas of the optimizer", GRPO_LORA, r"^\(optimizer\)$", "setting", changes={"adam_beta2": 0.9}),
    Fault("another eps of the optimizer", TEXT, r"^\(optimizer\)$", "setting", changes={"adam_epsilon": 1e-4}),
    Fault("another weight decay", TEXT_LORA, r"^\(optimizer\)$", "setting", changes={"weight_decay": 0.1}),
    Fault("the optimizer's state is lost", TEXT, r"^\(optimizer\)$", "optimizer state", lost_state),
    # rollout against training
    Fault("rollout: positions are off by one", GRPO, r"rotary_emb$", "inputs", decoded_positions, rollout=True),
    Fault("rollout: another scale in decoding", GRPO, r"layers\.0\.post_attention_layernorm$", "kernel", decoded_scale, rollout=True),
    Fault("rollout: generates in another dtype", GRPO_BF16, r"", "dtype", changes={"rollout_compute": "stock"}, rollout=True),
    Fault("rollout: dropout is active", GRPO_LORA, r"lora_dropout\.default$", "random state", both=DROPS, rollout=True),
)  # fmt: skip

CLEAN = (
    TEXT, TEXT_LORA, TEXT_BF16, OSS, LLAVA, LLAVA_LORA, GEMMA, QWEN_LORA, GRPO, GRPO_LORA, GRPO_BF16, DPO, ARIA,
    ("text", "sft", "fp16"), ("text", "reward", "fp32"), ("smolvlm", "sft", "bf16", "lora"), ("idefics3", "sft", "fp32"),
    ("llava", "grpo", "fp32", "lora"), ("gemma3", "grpo", "fp32"), ("gpt_oss", "grpo", "fp32"),
)  # fmt: skip
"""The runs that are recorded twice without a fault."""


def longer(row: dict[str, Any], index: int) -> dict[str, Any]:
    """Makes the sequences of a batch of different lengths, so that there is padding."""
    text = " ".join([row["completion"][0]["content"]] * (1 + index % 3))
    return row | {"completion": [{"role": "assistant", "content": text}]}


def run(cell: tuple[str, ...], folder: Path, plant: Any = None, **changes: Any) -> None:
    """Trains for two steps with recordings, quietly."""
    reset_accelerate()
    family, task, precision, *lora = cell
    uneven = changes.pop("uneven", False)
    dropout, collate = changes.pop("lora_dropout", 0.0), changes.pop("collate", None)
    flag = None if precision == "fp32" else precision
    described = Cell(family, task, "fp32", flag, lora=bool(lora))
    settings = {"record_steps": [1, 2], "precision_report": "off", "output_dir": str(folder), **changes}
    made = cells.arguments(described, cells.SAFE_CONFIG[task], STEPS, **settings)
    if uneven:
        made["train_dataset"] = made["train_dataset"].map(longer, with_indices=True)
    if lora:
        made["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=dropout)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        torch.manual_seed(0)  # the adapters' first weights
        trainer = fp16_on_cpu(cells.SAFE[task])(**made)
        if collate is not None and plant is None:
            collated(collate)(trainer)
        if plant is not None:
            plant(trainer)
        trainer.train()
    cells.reset_autocast()


class Runs:
    """Runs without a fault, each made once."""

    def __init__(self, root: Path) -> None:
        self._root, self._made = root, dict[str, Path]()

    def clean(self, cell: tuple[str, ...], **both: Any) -> Path:
        key = f"{cell} {sorted(both.items(), key=str)}"
        if key not in self._made:
            self._made[key] = self._root / f"clean-{len(self._made)}"
            run(cell, self._made[key], **both)
        return self._made[key]


def judged(fault: Fault, runs: Runs, root: Path) -> dict[str, Any]:
    """Plants a fault, and returns what is said of it."""
    folder = root / "faulty"
    shutil.rmtree(folder, ignore_errors=True)
    run(fault.cell, folder, fault.plant, **fault.both | fault.changes)
    if fault.rollout:
        found = compare_rollout(str(folder))
    else:
        found = compare_recordings(str(runs.clean(fault.cell, **fault.both)), str(folder))
    return {"fault": fault.name, "run": " ".join(fault.cell), **described(found, fault)}


def described(found: Comparison, fault: Fault) -> dict[str, Any]:
    cause = found.cause
    if cause is None:
        return {"module": None, "cause": None, "right": False, "text": "no difference beyond noise"}
    first = found.differences[0]
    right = re.search(fault.module, cause.module) is not None and cause.kind == fault.cause
    ulp = first.ulp if first.ulp < float("inf") else None
    return {"module": cause.module or "the model", "cause": cause.kind, "right": right, "text": cause.text,
            "phase": first.phase, "ulp": ulp and round(ulp, 1), "expected": [fault.module, fault.cause]}  # fmt: skip


def time_of_steps(task: str, width: int, root: Path, steps: int = 12) -> dict[str, Any]:
    """Compares the time of a recorded step with that of a step that is not recorded, in alternation in one run."""
    times: dict[bool, list[float]] = {True: [], False: []}
    recorded = list(range(4, steps + 1, 2))

    class Timed(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.began = time.perf_counter()

    class Ends(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step > 2:
                times[state.global_step in recorded].append(time.perf_counter() - timed.began)

    timed = Timed()
    reset_accelerate()
    folder = root / f"time-{task}-{width}"
    made = cells.arguments(Cell("text", task, "fp32", None), cells.SAFE_CONFIG[task], steps,
                           record_steps=recorded, output_dir=str(folder), precision_report="off")  # fmt: skip
    if width > 64:
        from transformers import AutoConfig, AutoTokenizer

        config = AutoConfig.from_pretrained(made["model"])
        changed = LlamaConfig(vocab_size=config.vocab_size, hidden_size=width, intermediate_size=2 * width,
                              num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=8,
                              pad_token_id=config.pad_token_id, bos_token_id=config.bos_token_id,
                              eos_token_id=config.eos_token_id)  # fmt: skip
        made["processing_class"] = AutoTokenizer.from_pretrained(made["model"])
        made["model"] = LlamaForCausalLM(changed)
        made["args"].model_init_kwargs = None
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        trainer = cells.SAFE[task](**made)
        trainer.callback_handler.callbacks.insert(0, timed)
        trainer.add_callback(Ends())
        events = next(c for c in trainer.callback_handler.callbacks if c is timed)
        trainer.train()
    assert events is timed
    sizes = [path.stat().st_size for path in (folder / FOLDER).glob("step-*.safetensors")]
    medians = {kind: statistics.median(values) for kind, values in times.items()}
    return {"trainer": task, "width": width, "layers": 4 if width > 64 else 1,
            "step_ms": round(1e3 * medians[False], 1), "recorded_ms": round(1e3 * medians[True], 1),
            "ratio": round(medians[True] / medians[False], 2), "largest_bytes": max(sizes)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="faults; by default all")
    names = parser.parse_args().names
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        runs = Runs(root)
        rows = []
        for fault in FAULTS:
            if names and not any(name in fault.name for name in names):
                continue
            try:
                rows.append(judged(fault, runs, root))
            except Exception as error:
                print("FAILED", fault.name, repr(error)[:200]); continue
            row = rows[-1]
            mark = "right" if row["right"] else "WRONG"
            print(f"{mark}  {fault.name}: {row['module']}: {row['cause']}: {row['text']}", flush=True)
        print(f"{sum(row['right'] for row in rows)} of {len(rows)} faults: module and cause are right")
        if names:
            return
        clean = []
        for cell in CLEAN:
            shutil.rmtree(root / "again", ignore_errors=True)
            run(cell, root / "again")
            found = compare_recordings(str(runs.clean(cell)), str(root / "again"))
            clean.append({"run": " ".join(cell), "compared": found.compared, "equal": found.cause is None})
            print(clean[-1], flush=True)
        times = [time_of_steps(*case, root) for case in (("sft", 64), ("grpo", 64), ("sft", 512), ("grpo", 512))]
        for row in times:
            print(row)
            assert row["largest_bytes"] <= MOST_BYTES
    content = {"versions": {"torch": torch.__version__}, "faults": rows, "clean": clean, "time": times}
    RESULT.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
