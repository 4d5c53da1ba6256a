"""Sends LoRA adapters to vLLM as adapters: two small factors for each layer, in place of merged weights.

vLLM gets the weights of the base once, with the first sync, because the trainer's base may be quantised or may differ
from the checkpoint that the engine has loaded. Each sync sends the factors, in the dtype of the engine. The scaling of
each layer is multiplied into its second factor in float32, so that layers may have different scalings and ranks.
"""

import contextlib
import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from safetensors.torch import save_file
from torch import nn

from ..core.errors import PrecisionError, refuse
from ..core.patches import replace
from ..model.parts import find_parts, unwrap
from ..weights.merged import is_packed, rounded, weights_of
from .vllm import model_of, weights_reloaded
from .weight_sync import AdapterSync


RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The largest ranks that vLLM makes room for: `MaxLoRARanks` in vllm/config/lora.py."""
NUMBER, NAME = 1, "policy"
"""Id and name of the adapter in the engine."""
_FACTORS = ("lora_A", "lora_B")


def reason_against(model: nn.Module, colocated: bool, sharded: bool) -> str | None:
    """Returns why an adapter cannot be sent as factors.

    Args:
        model: The policy model with PEFT adapters.
        colocated: Whether this process builds the engine.
        sharded: Whether each process holds a part of the weights.

    Returns:
        What vLLM does not apply; `None` if it applies the whole adapter.
    """
    if not colocated:
        return "a server gets merged weights from TRL"
    if sharded:
        return "each process holds a part of the factors"
    base = unwrap(model)
    layers = {name: part for name, part in base.named_modules() if isinstance(part, BaseTunerLayer)}
    names = {adapter for layer in layers.values() for adapter in layer.active_adapters}
    if len(names) != 1:
        return f"{len(names)} adapters are active"
    for name, layer in layers.items():
        reason = _reason_of_layer(layer, next(iter(names)))
        if reason is not None:
            return f"{reason} on {name}"
    beside = [name for name, part in base.named_modules() if isinstance(part, AuxiliaryTrainingWrapper)]
    beside += [name for name, p in base.named_parameters() if p.requires_grad and not _is_factor(name)]
    if beside:
        return f"{beside[0]} is trained beside the factors"
    towers = {part for tower in find_parts(model).towers.values() for part in tower.modules()}
    adapted = next((name for name, layer in layers.items() if layer in towers), None)
    if adapted is not None:
        return f"vLLM applies no adapter to {adapted}, a part of a tower"
    return None if _serves_adapters(base) else f"vLLM's class for {type(base).__name__} applies no adapters"


def _reason_of_layer(layer: Any, adapter: str) -> str | None:
    base = type(layer.get_base_layer())
    if not isinstance(layer, LoraLayer) or adapter not in layer.lora_A or not issubclass(base, nn.Linear):
        return f"an adapter of type {type(layer).__name__}, for {base.__name__},"
    if adapter in getattr(layer, "lora_variant", ()):
        return f"a variant of LoRA, {type(layer.lora_variant[adapter]).__name__},"
    if layer.disable_adapters or layer.merged:
        return "a disabled or merged adapter"
    if getattr(layer.lora_B[adapter], "bias", None) is not None:
        return "an adapter with a bias"
    return f"rank {layer.r[adapter]}, above {RANKS[-1]}," if layer.r[adapter] > RANKS[-1] else None


def _is_factor(name: str) -> bool:
    return any(f".{factor}." in name for factor in _FACTORS)


def _serves_adapters(base: Any) -> bool:
    """Whether vLLM's class for a model applies adapters; `True` if the installed vLLM does not say."""
    try:
        from vllm.model_executor.models import ModelRegistry, supports_lora
    except ImportError:  # construction of the engine reports a missing vLLM
        return True
    known: Mapping[str, Any] = getattr(ModelRegistry, "models", {})
    name = type(base).__name__
    found = (known[name],) if name in known else ()
    return all(supports_lora(entry.load_model_cls()) for entry in found)


def engine_kwargs(arguments: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """Completes the arguments of an engine that applies the adapter; arguments that TRL passes are kept.

    Args:
        arguments: Keyword arguments for `vllm.LLM`.
        model: The policy model with PEFT adapters.
    """
    rank = max(layer.r[adapter] for _, layer, adapter in _layers(model))
    room = next(size for size in RANKS if size >= rank)
    return {"enable_lora": True, "max_lora_rank": room, "max_loras": 1, **arguments}


def _layers(model: nn.Module) -> Iterator[tuple[str, Any, str]]:
    """Yields the name, the layer and the active adapter of each adapted layer."""
    for name, part in unwrap(model).named_modules():
        if isinstance(part, LoraLayer) and isinstance(part, BaseTunerLayer):
            yield name, part, part.active_adapters[0]


class NativeSync(AdapterSync):
    """Sends the base once and the factors of an adapter with each sync.

    Args:
        model: The model with PEFT adapters.
        dtype: The dtype of the engine; `None` for that of each weight.
        llm: The `vllm.LLM` in this process, built with `engine_kwargs`.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype | None, llm: Any) -> None:
        super().__init__(model, dtype, measure=False)
        self._llm, self._has_base = llm, False
        self._folder = tempfile.TemporaryDirectory(prefix="safe-trainers-adapter-")
        _ask_for_adapter(llm, self._folder.name)

    @contextlib.contextmanager
    def sending(self, generation: Any) -> Iterator[None]:
        """Lets TRL's sync send the weights of the base, or nothing if the engine has them, and sends the factors.

        Args:
            generation: TRL's `VLLMGeneration`.
        """
        if self._has_base:
            with self.merged():
                yield
        else:
            with without_adapter_layers(model_of(self._llm)), weights_reloaded(generation), self.merged():
                yield
            self._has_base = True
        self._send_factors()

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the weights of the base once, with their names without PEFT; nothing afterwards."""
        if self._has_base:
            return
        sent: set[tuple[Any, ...]] = set()
        for weight in weights_of(self._model, self._dtype, checked=True, merge=False):
            if not weight.buffer and weight.place not in sent:
                sent.add(weight.place)
                yield weight.name, weight.rounded(weight.load(), self._dtype)

    @torch.no_grad()
    def _send_factors(self) -> None:
        """Writes the factors as a PEFT checkpoint, and makes the engine load it in place of the last one."""
        tensors = {}
        rank = 1
        for name, layer, adapter in _layers(self._model):
            first, second = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
            dtype = self._dtype or _dtype_of(layer)
            factors = (("lora_A", first), ("lora_B", second.float() * layer.scaling[adapter]))
            for factor, exact in factors:
                key = f"base_model.model.{name}.{factor}.weight"
                tensors[key] = rounded(exact, dtype, key).contiguous()
            rank = max(rank, layer.r[adapter])
        folder = Path(self._folder.name)
        save_file(tensors, folder / "adapter_model.safetensors")
        described = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": []}
        (folder / "adapter_config.json").write_text(json.dumps(described))
        engine = self._llm.llm_engine
        engine.remove_lora(NUMBER)
        engine.add_lora(_request(self._folder.name))
        self._check_applied()

    def _check_applied(self) -> None:
        """Refuses an engine that ignores factors, because it has no layer of their name that takes an adapter."""
        manager = model_of(self._llm).lora_manager
        loaded = manager.get_adapter(NUMBER)
        ignored = sorted(set(loaded.loras) - set(manager.modules)) if loaded is not None else [NAME]
        if ignored:
            given = f"adapter_sync='native', with an adapter on {ignored[0]}"
            raise PrecisionError([refuse("vllm-ignores-the-adapter", given, count=len(ignored))])


def _dtype_of(layer: Any) -> torch.dtype:
    base = layer.get_base_layer()
    return torch.float32 if is_packed(base) else base.weight.dtype


def _request(folder: str) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest(NAME, NUMBER, folder)


def _ask_for_adapter(llm: Any, folder: str) -> None:
    """Makes each call of `generate` of an engine use the adapter."""
    original = llm.generate

    def generate(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **{"lora_request": _request(folder), **kwargs})

    replace("native-adapter", llm, "generate", generate)


@contextlib.contextmanager
def without_adapter_layers(model: Any) -> Iterator[None]:
    """Gives the layers of an engine their names without adapters while the block runs, so that they can be loaded.

    Args:
        model: The engine's model, whose layers vLLM has wrapped.
    """
    with contextlib.ExitStack() as stack:
        for name, wrapper in model.lora_manager.modules.items():
            parent, _, last = name.rpartition(".")
            owner = model.get_submodule(parent)
            if owner._modules.get(last) is wrapper:
                stack.callback(owner._modules.__setitem__, last, wrapper)
                owner._modules[last] = wrapper.base_layer
        yield
