"""Checks before loading whether saved adapters match the model, and stores trained weights that PEFT does not write.

PEFT writes only the output of a prompt encoder (P-tuning, prefixes with a projection), only the ranks that AdaLoRA has
kept so far, and no weight of the base that was unfrozen beside the adapters.
"""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate.utils.constants import FSDP_MODEL_NAME
from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import nn

from ..core.errors import Problem, refuse, warn
from ..core.files import read_json, replace_file
from ..model.parts import adapter_parameters, unwrap


WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
TRAINED = "safe_trainers_weights.safetensors"
"""Name of the file with the trained weights of a model with adapters that PEFT's files do not hold as they are."""
FSDP_FULL = f"{FSDP_MODEL_NAME}.bin"
"""Name of the file with all trained weights that accelerate writes under FSDP with `FULL_STATE_DICT`."""
SAME_ADAPTER = (
    "use the `peft_config` and the model that the adapter was trained with, or another `output_dir` for a new run"
)
REMOVED_RANKS = (
    "use the `peft_config` that the adapter was trained with; if AdaLoRA had removed ranks, and stock TRL or an older "
    "release saved the checkpoint, resume from one before the first removal, or start again with "
    "`resume_from_checkpoint=None`"
)


def not_written_by_peft(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the trained weights that a resumed run cannot get from PEFT's files.

    Args:
        model: The model of the run.

    Returns:
        The weights by name; all trained ones if PEFT writes a part of its adapters in another shape, because it then
        cannot load its own file into them. Empty for a model without adapters.
    """
    configs: Mapping[str, Any] = getattr(model, "peft_config", None) or {}
    if not configs:
        return {}
    from peft import get_peft_model_state_dict

    live = model.state_dict(keep_vars=True)
    written: set[int] = set()
    for name, config in configs.items():
        if config.is_prompt_learning:
            encoder = list(model.prompt_encoder[name].parameters())  # type: ignore[index, union-attr]
            saved = encoder if len(encoder) == 1 else []  # PEFT writes one tensor, what the encoder computes
        else:
            saved = get_peft_model_state_dict(model, live, name, save_embedding_layers=False).values()
        written.update(map(id, saved))
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    lacking = {name: parameter for name, parameter in trained.items() if id(parameter) not in written}
    adapters = {id(parameter) for parameter in adapter_parameters(model)}
    return trained if any(id(parameter) in adapters for parameter in lacking.values()) else lacking


def outside_adapters(model: nn.Module) -> Problem | None:
    """Warns about trained weights of the base, which are in no saved adapter.

    Args:
        model: The model of the run.

    Returns:
        The warning; `None` if the model has no adapters, or PEFT writes all that is trained.
    """
    if not getattr(model, "peft_config", None):
        return None
    own = _of_adapters(model)
    if all(id(parameter) in own for parameter in model.parameters() if parameter.requires_grad):
        return None
    names = [name for name, parameter in not_written_by_peft(model).items() if id(parameter) not in own]
    if not names:
        return None
    base = unwrap(model)
    modules = {id(p): name for name, module in base.named_modules() for p in module.parameters(recurse=False)}
    parameters = dict(model.named_parameters())
    holding = list(dict.fromkeys(modules[id(parameters[name])] for name in names))
    what = f"{len(names)} trained tensors outside of the adapters, such as {names[0]}"
    return warn("trained-weights-not-in-adapter", what, modules=holding)


def save_trained(folder: Path, model: nn.Module, writes: bool) -> None:
    """Writes the trained weights that PEFT's files do not hold.

    Args:
        folder: The checkpoint.
        model: The model; every process has to call this, because weights may be distributed.
        writes: Whether this process writes the file.
    """
    copies: dict[str, torch.Tensor] = {}
    for name, parameter in not_written_by_peft(model).items():
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter  # in all processes
        if writes:
            copies[name] = whole.detach().to("cpu", copy=True).contiguous()
        del whole  # at most one gathered tensor is in memory
    if copies:
        replace_file(folder / TRAINED, lambda file: file.write(save(copies)))


def load_default_adapter(folder: Path, model: Any) -> None:
    """Loads the adapter in the root of a checkpoint, if others are in folders of their own.

    PEFT saves the adapter `"default"` in the root, and others, such as a reference adapter, in folders. Older
    releases of transformers load only those in folders, if there are any.

    Args:
        folder: The checkpoint.
        model: The model with adapters.
    """
    configs: Mapping[str, Any] = getattr(model, "peft_config", None) or {}
    if len(configs) < 2 or "default" not in configs or not (folder / WEIGHTS).is_file():
        return
    model.load_adapter(str(folder), "default", is_trainable="default" in model.active_adapters)


def load_named_adapters(folder: Path, model: Any) -> bool:
    """Loads the adapters in folders of a checkpoint whose root has none, as there is no `"default"`.

    Args:
        folder: The checkpoint.
        model: The model, with adapters or without.

    Returns:
        Whether any was loaded.
    """
    names = [name for name in getattr(model, "peft_config", None) or {} if (folder / name / WEIGHTS).is_file()]
    if (folder / WEIGHTS).is_file() or not names:
        return False
    for name in names:
        model.load_adapter(str(folder / name), name, is_trainable=name in model.active_adapters)
    return True


@contextlib.contextmanager
def adapters_kept_active(model: Any) -> Iterator[None]:
    """Keeps which adapters are active, which weights are trained, and the parameters, while a block loads adapters.

    Loading activates one adapter, and makes all its weights trainable or none. It replaces parameters in half
    precision by others in float32, which an optimizer that exists already would not update.

    Args:
        model: The model, with adapters or without.
    """
    if not getattr(model, "peft_config", None) or not hasattr(model, "active_adapters"):
        yield
        return
    own, active = vars(model).get("active_adapter"), list(model.active_adapters)
    trained = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    places = [(module._parameters, dict(module._parameters)) for module in model.modules() if module._parameters]
    try:
        yield
    finally:
        for held, before in places:
            for name, parameter in before.items():
                loaded = held.get(name)
                if parameter is None or loaded is None or loaded is parameter or loaded.shape != parameter.shape:
                    continue
                with torch.no_grad():
                    parameter.copy_(loaded)
                held[name] = parameter
        if list(model.active_adapters) != active:
            # PEFT's wrapper activates one adapter, its tuner also several.
            model.set_adapter(active[0]) if len(active) == 1 else model.base_model.set_adapter(active)
        if own is not None:
            model.active_adapter = own
        for parameter, requires_grad in trained:
            if parameter.requires_grad != requires_grad:
                parameter.requires_grad_(requires_grad)


def load_trained(folder: Path, model: nn.Module) -> list[str]:
    """Loads the weights that `save_trained` wrote, and AdaLoRA's ranks.

    Args:
        folder: The checkpoint.
        model: The model; its weights are overwritten in place and keep their dtypes.

    Returns:
        The names of trained weights that no file of the checkpoint holds.
    """
    lacking = list(not_written_by_peft(model))  # it reads the state, so that FSDP2 shards what it has gathered
    file = folder / TRAINED
    parameters: dict[str, Any] = dict(model.named_parameters())
    saved = load_file(file) if file.is_file() else {}
    with torch.no_grad():
        for name, tensor in saved.items():
            parameter = parameters[name]
            if hasattr(parameter, "full_tensor"):
                from torch.distributed.tensor import distribute_tensor

                tensor = distribute_tensor(tensor.to(parameter.device), parameter.device_mesh, parameter.placements)
            parameter.copy_(tensor)
    for name, config in _configs_with_ranks(model).items():
        config.rank_pattern = _saved_config(folder if name == "default" else folder / name).get("rank_pattern")
    if (folder / FSDP_FULL).is_file():
        return []  # accelerate's file has all trained weights
    return [name for name in lacking if name not in saved]


def forget_ranks(model: nn.Module) -> None:
    """Lets PEFT load AdaLoRA's adapters into tensors of full size; it would first remove ranks from the model."""
    for config in _configs_with_ranks(model).values():
        config.rank_pattern = None


def _configs_with_ranks(model: nn.Module) -> dict[str, Any]:
    """Returns the AdaLoRA configs of a model by the name of the adapter."""
    configs: Mapping[str, Any] = getattr(model, "peft_config", None) or {}
    return {name: config for name, config in configs.items() if config.peft_type == "ADALORA"}


def holds_all_trained(folder: Path, model: nn.Module) -> bool:
    """Whether `save_trained` wrote every trained weight, so that PEFT need not load its files."""
    trained = {name: id(parameter) for name, parameter in model.named_parameters() if parameter.requires_grad}
    return trained.keys() <= _shapes(folder / TRAINED).keys() and not _of_adapters(model).isdisjoint(trained.values())


def _of_adapters(model: nn.Module) -> set[int]:
    """Returns the ids of the parameters that PEFT added to a model, with those of encoders of virtual tokens."""
    encoders = getattr(model, "prompt_encoder", None)
    return {id(p) for p in (*adapter_parameters(model), *(() if encoders is None else encoders.parameters()))}


def _shapes(file: Path) -> dict[str, list[int]]:
    """Returns the shapes in a safetensors file by name; empty if there is none."""
    if not file.is_file():
        return {}
    with safe_open(file, "pt") as opened:
        return {name: list(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118


def _saved_config(folder: Path) -> dict[str, Any]:
    """Returns the adapter config in a folder; empty if there is none."""
    file = folder / CONFIG
    return read_json(file) if file.is_file() else {}


def misfit(folder: Path, model: nn.Module) -> Problem | None:
    """Refuses saved adapters that differ from those of the model, and full weights in place of adapters or vice versa.

    Args:
        folder: A checkpoint.
        model: The model with its adapters.

    Returns:
        The refusal, which names a tensor; `None` if all match.
    """
    configs, what = getattr(model, "peft_config", None), f"resume_from_checkpoint={str(folder)!r}"
    if not configs:
        if not (folder / CONFIG).is_file():
            return None
        fix = "set `use_peft=True` (or `peft_config`) as in that run, or pass the merged model to a new run"
        return refuse("checkpoint-of-other-weights", what, saved="adapters", trained="all weights", fix=fix)
    if not any(folder.rglob(CONFIG)) and any(folder.glob("model*.safetensors")):
        fix = "drop `use_peft` (or `peft_config`), or pass the checkpoint as the model of a new run"
        return refuse("checkpoint-of-other-weights", what, saved="all weights", trained="adapters", fix=fix)
    parameters = {name: _shape(parameter) for name, parameter in model.named_parameters()}
    for name, shape in _shapes(folder / TRAINED).items():
        if shape != parameters.get(name):
            return _other_shape(what, name, shape, parameters.get(name), SAME_ADAPTER)
    if holds_all_trained(folder, model):
        return None
    from peft import get_peft_model_state_dict

    for name in configs:
        place = folder if name == "default" else folder / name
        file = place / WEIGHTS
        if not file.is_file():
            continue
        own = get_peft_model_state_dict(model, model.state_dict(keep_vars=True), adapter_name=name)
        live = {key: _shape(tensor) for key, tensor in own.items()}
        saved = _shapes(file)
        # Other tensors may be absent, because PEFT saves embeddings with an adapter only in some cases.
        absent = [key for key in live.keys() ^ saved.keys() if ".lora_" in key]
        differing = [key for key in live.keys() & saved.keys() if live[key] != saved[key]]
        if absent or differing or not live.keys() & saved.keys():
            key = sorted(differing or absent or saved or live)[0]
            fix = REMOVED_RANKS if _saved_config(place).get("peft_type") == "ADALORA" else SAME_ADAPTER
            return _other_shape(what, key, saved.get(key), live.get(key), fix)
    return None


def _shape(tensor: torch.Tensor) -> list[int]:
    """Returns the shape of a weight; ZeRO-3 records that of a partitioned one, which has no elements."""
    return list(getattr(tensor, "ds_shape", tensor.shape))


def _other_shape(what: str, name: str, saved: list[int] | None, live: list[int] | None, fix: str) -> Problem:
    """Makes the refusal of a checkpoint in which a tensor is absent, has another shape, or is not of this run."""
    detail = f"{name} is {saved or 'absent'} in the file and {live or 'absent'} in this run"
    return refuse("adapter-does-not-fit", what, detail=detail, fix=fix)


def saved_base(folder: Path) -> str | None:
    """Returns the base model in the adapter config of a checkpoint; `None` if there is none."""
    named: str | None = _saved_config(folder).get("base_model_name_or_path")
    return named
