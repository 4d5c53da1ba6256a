"""Loads packages in a process that may crash: `python -P -m safe_trainers.doctor.probes NAME...`.

Each probe prints a line of JSON after `MARK` when it starts and when it ends. The first failure ends the process with
a traceback, because a partly imported package would break the next probe.
"""

import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any


MARK = "\x1edoctor "
"""Prefix of the lines that a probe prints."""

NEEDED = {
    "torch": ("torch", ()),
    "accelerate": ("accelerate", ("Accelerator",)),
    "transformers": ("transformers", ("Trainer", "AutoProcessor", "AutoModelForImageTextToText")),
    "peft": ("peft", ("LoraConfig", "get_peft_model")),
    "trl": ("trl", ("GRPOTrainer", "SFTTrainer", "RLOOTrainer", "RewardTrainer")),
    "safe-trainers": ("safe_trainers", ("SafeGRPOTrainer",)),
}
"""Packages that every run needs: their module, and the names to import from it, which load its submodules."""

OPTIONAL = {
    "torchvision": ("torchvision", ()),
    "bitsandbytes": ("bitsandbytes", ("nn",)),
    "vllm": ("vllm", ("LLM", "SamplingParams")),
    "deepspeed": ("deepspeed", ()),
    "flash-attn": ("flash_attn", ("flash_attn_func",)),
}
"""Packages that only some runs need."""


def main(names: list[str]) -> None:
    """Runs probes and prints their results."""
    for name in names:
        _print(name=name)
        began = time.perf_counter()
        if name in TRIALS:
            facts = TRIALS[name]()
        else:
            _load(name)
            facts = AFTER[name]() if name in AFTER else {}
        _print(name=name, seconds=round(time.perf_counter() - began, 1), facts=facts)


def _print(**values: Any) -> None:
    sys.stdout.write(f"\n{MARK}{json.dumps(values)}\n")
    sys.stdout.flush()


def _load(name: str) -> None:
    module, wanted = {**NEEDED, **OPTIONAL}[name]
    loaded = importlib.import_module(module)
    for attribute in wanted:
        getattr(loaded, attribute)


def _devices() -> dict[str, Any]:
    """Returns the devices that torch finds, their dtypes, and the error of a float32 product on each."""
    import torch

    from ..core.device import detect_device
    from ..core.dtypes import BFLOAT16

    accelerator = torch.accelerator.current_accelerator()
    kinds = [f"{accelerator.type}:{i}" for i in range(torch.accelerator.device_count())] if accelerator else []
    devices = []
    for name in [*kinds, "cpu"]:
        device = detect_device(name)
        preferred, why = device.preferred
        memory = torch.cuda.mem_get_info(name) if device.kind == "cuda" else (None, None)
        devices.append(
            {
                "device": name,
                "name": str(device),
                "free": memory[0],
                "total": memory[1],
                "bfloat16": _bfloat16(device.kind, device.emulates_bf16, preferred == BFLOAT16),
                "float16": "with a loss scaler" if device.scales_loss else "neither autocast nor a loss scaler",
                "preferred": preferred,
                "why": why,
                "float32_error": _float32_error(name),
            }
        )
    return {"devices": devices, "threads": torch.get_num_threads(), "cuda": torch.version.cuda or torch.version.hip}


def _bfloat16(kind: str, emulated: bool, preferred: bool) -> str:
    if kind == "cpu":
        return "native" if _cpu_multiplies_bfloat16() else "emulated"
    return "emulated" if emulated else "native" if preferred else "not known"


def _cpu_multiplies_bfloat16() -> bool:
    """Returns whether `/proc/cpuinfo` lists bfloat16 instructions."""
    if not os.path.exists("/proc/cpuinfo"):
        return False
    with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as stream:
        flags = next((line for line in stream if line.startswith(("flags", "Features"))), "").split()
    return bool({"avx512_bf16", "amx_bf16", "bf16"} & set(flags))


def _float32_error(device: str) -> float:
    """Returns the relative error of a float32 product: 1e-6, or 1e-3 if inputs are rounded to TF32 or bfloat16."""
    import torch

    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(256, 256, generator=generator, dtype=torch.float64) for _ in range(2))  # (256, 256)
    exact = left @ right
    made = (left.float().to(device) @ right.float().to(device)).double().cpu()
    return float((made - exact).abs().max() / exact.abs().max())


def _quantise() -> dict[str, Any]:
    """Quantises a small layer to 4 and 8 bits and computes a gradient through each.

    Returns:
        The relative error of the output of each layer.
    """
    import torch
    from bitsandbytes import nn

    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    torch.manual_seed(0)
    dense = torch.nn.Linear(64, 64, bias=False)
    inputs = torch.randn(8, 64)  # (8, 64)
    expected = dense(inputs).detach()
    errors = {}
    for bits in (4, 8):
        layer = (
            nn.Linear4bit(64, 64, bias=False, quant_type="nf4")
            if bits == 4
            else nn.Linear8bitLt(64, 64, bias=False, has_fp16_weights=False)
        )
        layer.load_state_dict(dense.state_dict())
        layer = layer.to(device)
        given = inputs.to(device).requires_grad_()
        made = layer(given)
        made.sum().backward()
        if given.grad is None or not bool(given.grad.isfinite().all()):
            raise RuntimeError(f"the gradient of a {bits}-bit layer is missing or not finite on {device}")
        errors[f"error of {bits} bit"] = round(float((made.detach().cpu() - expected).norm() / expected.norm()), 4)
    return errors


def _processes() -> dict[str, Any]:
    """Counts the processes that join a process group."""
    from datetime import timedelta

    import torch
    from torch import distributed

    seconds = float(os.environ.get("SAFE_TRAINERS_DOCTOR_WAIT", "30"))
    distributed.init_process_group("gloo", timeout=timedelta(seconds=seconds))
    present = torch.ones(1)  # (1,)
    distributed.all_reduce(present)
    distributed.destroy_process_group()
    return {"processes": int(present.item())}


AFTER: dict[str, Callable[[], dict[str, Any]]] = {"torch": _devices, "bitsandbytes": _quantise}
"""The probe of a package, after loading it."""

TRIALS: dict[str, Callable[[], dict[str, Any]]] = {"processes": _processes}
"""Probes of anything but packages."""


if __name__ == "__main__":
    main(sys.argv[1:])
