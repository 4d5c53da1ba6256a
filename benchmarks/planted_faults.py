"""The faults of `benchmarks/diff_faults.py`: how each is planted into a run, and what must be said of it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import TrainerCallback


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


def decoded_in(end: str, dtype: torch.dtype) -> Callable[[Any], None]:
    """A layer that computes in another dtype while single tokens are decoded."""

    def change(forward: Any) -> Any:
        def rounded(hidden: torch.Tensor) -> Any:
            return forward(hidden.to(dtype).float()).to(dtype).float() if hidden.shape[1] == 1 else forward(hidden)

        return rounded

    return lambda trainer: wrap(module_of(trainer, end), change)


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
    Fault(
        "a linear layer computes in bfloat16",
        TEXT,
        r"mlp\.down_proj$",
        "dtype",
        computed_in("mlp.down_proj", torch.bfloat16),
    ),
    Fault(
        "a norm computes in float16",
        LLAVA_LORA,
        r"language_model\.norm$",
        "dtype",
        computed_in("language_model.norm", torch.float16),
    ),
    Fault("a vision layer computes in bfloat16", LLAVA, r"mlp\.fc1$", "dtype", computed_in("mlp.fc1", torch.bfloat16)),
    Fault(
        "a weight is rounded to bfloat16",
        OSS,
        r"layers\.1\.self_attn\.o_proj$",
        "dtype",
        weight("layers.1.self_attn.o_proj", lambda w: w.bfloat16().float()),
    ),
    Fault(
        "a layer is not under autocast",
        TEXT_BF16,
        r"self_attn\.v_proj$",
        "dtype",
        without_autocast("self_attn.v_proj"),
    ),
    Fault(
        "a frozen layer is stored in bfloat16",
        ("text", "sft", "bf16", "lora"),
        r"mlp\.up_proj$",
        "dtype",
        stored_in("mlp.up_proj", torch.bfloat16),
    ),
    Fault(
        "rotary frequencies are rounded to bfloat16",
        (*GEMMA, "lora"),
        r"rotary_emb$",
        "dtype",
        weight("rotary_emb", lambda w: w.bfloat16().float(), "sliding_attention_inv_freq"),
    ),
    # inputs
    Fault(
        "position ids are off by one", TEXT, BATCH, "inputs", collated(positions(1)), both={"collate": positions(0)}
    ),
    Fault("the model shifts position ids by one", OSS, r"^model\.rotary_emb$", "inputs", inside_positions),
    Fault(
        "the attention mask is off",
        TEXT,
        BATCH,
        "inputs",
        collated(lambda b: b | {"attention_mask": torch.ones_like(b["attention_mask"])}),
        both={"uneven": True},
    ),
    Fault(
        "labels are shifted by one",
        TEXT_LORA,
        BATCH,
        "inputs",
        collated(lambda b: b | {"labels": torch.roll(b["labels"], 1, 1)}),
    ),
    Fault(
        "images are normalised differently",
        LLAVA,
        BATCH + r"|vision_tower$",
        "inputs",
        collated(lambda b: b | {"pixel_values": b["pixel_values"] * 1.05}),
    ),
    Fault(
        "one token id is replaced",
        QWEN_LORA,
        BATCH,
        "inputs",
        collated(lambda b: b | {"input_ids": torch.cat([b["input_ids"][:, :-1], b["input_ids"][:, -2:-1]], 1)}),
    ),
    # batch shape
    Fault(
        "two micro-batches instead of one",
        TEXT,
        BATCH,
        "batch shape",
        changes={"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
    ),
    Fault("padding to a multiple of 64", TEXT_LORA, BATCH, "batch shape", changes={"pad_to_multiple_of": 64}),
    Fault("padding on the left", OSS, BATCH, "batch shape", collated(left_padded), both={"uneven": True}),
    # weights
    Fault("two projections are swapped", TEXT, Q, "weights", swapped("q_proj", "k_proj")),
    Fault(
        "two vision projections are swapped", LLAVA, r"vision_tower.*k_proj$", "weights", swapped("k_proj", "v_proj")
    ),
    Fault(
        "one weight differs by one ulp",
        GEMMA,
        r"language_model.*mlp\.gate_proj$",
        "weights",
        weight("mlp.gate_proj", nudged),
    ),
    Fault("the adapter is stale", TEXT_LORA, r"q_proj\.lora_B\.default$", "weights", stale_adapter),
    Fault(
        "an embedding row is zero",
        ARIA,
        r"embed_tokens$",
        "weights",
        weight("embed_tokens", lambda w: torch.cat([w[:40], w[40:80] * 0, w[80:]])),
    ),
    # settings
    Fault(
        "the attention scale is wrong",
        TEXT,
        r"self_attn$",
        "setting",
        attribute("self_attn", "scaling", lambda s: s * 0.5),
    ),
    Fault(
        "another eps of a norm",
        GEMMA,
        r"input_layernorm$",
        "setting",
        attribute("layers.0.input_layernorm", "eps", 1e-4),
    ),
    Fault(
        "another eps of a vision norm",
        LLAVA,
        r"vision_tower.*layer_norm1$",
        "setting",
        attribute("layer_norm1", "eps", 1e-3),
    ),
    Fault("another rope theta", TEXT, r"rotary_emb$", "setting", rope_theta),
    Fault("another LoRA alpha", TEXT_LORA, Q, "setting", attribute("q_proj", "scaling", {"default": 4.0})),
    Fault("the adapter is switched off", QWEN_LORA, Q, "setting", disabled_adapter),
    Fault(
        "a dropout is switched off", TEXT_LORA, r"q_proj\.lora_dropout\.default$", "setting", dropout_off, both=DROPS
    ),
    Fault(
        "another dropout probability",
        LLAVA_LORA,
        r"lora_dropout\.default$",
        "setting",
        attribute("v_proj.lora_dropout.default", "p", 0.2),
        both=DROPS,
    ),
    Fault("another sliding window", OSS, r"^model$", "setting", shorter_window),
    Fault("another number of experts", OSS, r"router$", "setting", attribute("router", "top_k", 1)),
    # random state
    Fault(
        "another random state in dropout",
        TEXT_LORA,
        r"q_proj\.lora_dropout\.default$",
        "random state",
        other_random_state,
        both=DROPS,
    ),
    Fault(
        "checkpointing with another random state",
        TEXT_LORA,
        r"lora_dropout\.default$",
        "random state",
        changes=checkpointing(False),
        both=DROPS | checkpointing(True),
    ),
    # kernel
    Fault("TF32-like truncation", TEXT, r"mlp\.up_proj$", "kernel", truncated("mlp.up_proj")),
    Fault("another attention kernel", TEXT, r"self_attn$", "kernel", eager),
    Fault("another activation function", TEXT, r"mlp\.act_fn$", "kernel", other_activation),
    Fault(
        "the projector's output is scaled in code",
        LLAVA_LORA,
        r"multi_modal_projector$",
        "kernel",
        scaled_output("multi_modal_projector", 1.01),
    ),
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
    Fault(
        "rollout: another scale in decoding",
        GRPO,
        r"layers\.0\.post_attention_layernorm$",
        "kernel",
        decoded_scale,
        rollout=True,
    ),
    Fault(
        "rollout: decodes in another dtype",
        GRPO,
        r"mlp\.down_proj$",
        "dtype",
        decoded_in("mlp.down_proj", torch.bfloat16),
        rollout=True,
    ),
    Fault(
        "rollout: dropout is active", GRPO_LORA, r"lora_dropout\.default$", "random state", both=DROPS, rollout=True
    ),
)

HELD_OUT = (
    Fault("the head computes in bfloat16", GRPO, r"^lm_head$", "dtype", computed_in("lm_head", torch.bfloat16)),
    Fault("a gate is not under autocast", TEXT_BF16, r"mlp\.gate_proj$", "dtype", without_autocast("mlp.gate_proj")),
    Fault(
        "a projector's weight is rounded to bfloat16",
        ("smolvlm", "sft", "fp32"),
        r"modality_projection\.proj$",
        "dtype",
        weight("modality_projection.proj", lambda w: w.bfloat16().float()),
    ),
    Fault(
        "another eps of a second vision norm",
        ("idefics3", "sft", "fp32"),
        r"layer_norm2$",
        "setting",
        attribute("layer_norm2", "eps", 1e-3),
    ),
    Fault(
        "another scale of vision attention",
        GEMMA,
        r"encoder\.layers\.0\.self_attn$",
        "setting",
        attribute("encoder.layers.0.self_attn", "scale", lambda s: s * 1.5),
    ),
    Fault(
        "another scaling of one adapter",
        QWEN_LORA,
        r"language_model.*v_proj$",
        "setting",
        attribute("language_model.layers.0.self_attn.v_proj", "scaling", {"default": 1.0}),
    ),
    Fault(
        "another schedule of the learning rate",
        LLAVA_LORA,
        r"^\(optimizer\)$",
        "setting",
        changes={"lr_scheduler_type": "constant"},
    ),
    Fault(
        "a norm's weight is larger",
        ARIA,
        r"post_attention_layernorm$",
        "weights",
        weight("language_model.layers.0.post_attention_layernorm", lambda w: w * 1.1),
    ),
    Fault(
        "one weight of a reward head differs",
        ("text", "reward", "fp32"),
        r"^score$",
        "weights",
        weight("score", nudged),
    ),
    Fault("a projection is truncated", GEMMA, r"o_proj$", "kernel", truncated("self_attn.o_proj")),
    Fault("the gradient of a key projection is halved", OSS, r"k_proj$", "kernel", halved_gradient("k_proj")),
    Fault(
        "two micro-batches of images",
        LLAVA,
        BATCH,
        "batch shape",
        changes={"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
    ),
)
"""Faults that were written after the comparison was finished, and run once."""

CLEAN = (
    TEXT, TEXT_LORA, TEXT_BF16, OSS, LLAVA, LLAVA_LORA, GEMMA, QWEN_LORA, GRPO, GRPO_LORA, GRPO_BF16, DPO, ARIA,
    ("text", "sft", "fp16"), ("text", "reward", "fp32"), ("smolvlm", "sft", "bf16", "lora"),
    ("idefics3", "sft", "fp32"),
    ("llava", "grpo", "fp32", "lora"), ("gemma3", "grpo", "fp32"), ("gpt_oss", "grpo", "fp32"),
)  # fmt: skip
"""The runs that are recorded twice without a fault."""
