"""The precision capabilities of a device, as plain values."""

import functools
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .dtypes import BFLOAT16, FLOAT16, FLOAT32, to_torch


if TYPE_CHECKING:
    import torch

BF16_CAPABILITY = (8, 0)
"""First CUDA compute capability whose tensor cores multiply bfloat16 (Ampere)."""
_PRODUCT = 64
"""Rows and columns of the matrices that `float32_spacing` multiplies, as tensor cores need them."""


@dataclass(frozen=True)
class Device:
    """The precision capabilities of a device.

    Attributes:
        kind: `torch.device.type`: `"cuda"`, `"cpu"`, `"xpu"`, `"mps"`, ...
        name: Name for messages.
        capability: CUDA compute capability; `None` for other devices.
        rocm: Whether `"cuda"` is an AMD device, whose capability numbers have another meaning.
        unscalable_dtypes: The half dtypes whose gradients the device's loss scaler cannot unscale; `None` if
            accelerate builds neither a loss scaler nor autocast for fp16 (on CPU, where it does not report this).
    """

    kind: str
    name: str = ""
    capability: tuple[int, int] | None = None
    rocm: bool = False
    unscalable_dtypes: frozenset[str] | None = None

    @property
    def emulates_bf16(self) -> bool:
        """Whether bfloat16 is emulated: on CUDA before 8.0, where `torch.cuda.is_bf16_supported()` returns true."""
        return (
            self.kind == "cuda" and not self.rocm and self.capability is not None and self.capability < BF16_CAPABILITY
        )

    @property
    def scales_loss(self) -> bool:
        """Whether fp16 runs with autocast and a loss scaler."""
        return self.unscalable_dtypes is not None

    @property
    def preferred(self) -> tuple[str, str]:
        """The compute dtype of `precision="auto"` on this device, and the reason."""
        if self.kind == "cpu":
            return FLOAT32, "on a CPU, half precision saves too little time for its loss, and fp16 has no loss scaler"
        if self.kind == "mps":
            return FLOAT32, "half-precision results on MPS depend on the version of macOS"
        if self.emulates_bf16:
            return FLOAT16, f"{self} has float16 but no bfloat16 arithmetic (compute capability below 8.0)"
        return BFLOAT16, f"{self} has bfloat16 arithmetic, and bfloat16 needs no loss scaling"

    def __str__(self) -> str:
        capability = f" (compute capability {self.capability[0]}.{self.capability[1]})" if self.capability else ""
        return f"{self.name or self.kind}{capability}"


def detect_device(device: "torch.device | str | None" = None) -> Device:
    """Reads the capabilities of a device.

    Args:
        device: A torch device; by default the accelerator that accelerate gives this process, else the CPU.

    Returns:
        The capabilities. Reading the compute capability initialises CUDA, as `TrainingArguments` also does.
    """
    import torch

    device = _device_of_process() if device is None else torch.device(device)
    if device.type == "cpu":
        return Device(kind="cpu", name="CPU")

    dtypes = unscalable_dtypes(str(device))
    if device.type != "cuda":
        return Device(kind=device.type, name=device.type.upper(), unscalable_dtypes=dtypes)
    return Device(
        kind="cuda",
        name=torch.cuda.get_device_name(device),
        capability=torch.cuda.get_device_capability(device),
        rocm=torch.version.hip is not None,
        unscalable_dtypes=dtypes,
    )


def _device_of_process() -> "torch.device":
    """Returns the accelerator of this process, else the CPU.

    A config is made before accelerate selects the device. Without an index, each process of a launch would open a CUDA
    context, of some 500 MB, on the first GPU.
    """
    import torch

    # A build for GPUs names one on every machine.
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    rank = int(os.environ.get("LOCAL_RANK", "-1"))
    if found is None or rank < 0:
        return found or torch.device("cpu")
    return torch.device(found.type, rank % torch.accelerator.device_count())  # as accelerate's `PartialState`


def float32_spacing(device: "torch.device | str") -> float:
    """Measures how a device rounds the inputs of float32 matrix products, which may be computed in TF32 or bfloat16.

    Settings of torch and environment variables of NVIDIA's libraries decide that.

    Args:
        device: A torch device.

    Returns:
        The spacing at 1 of the numbers that are multiplied: 2^-23 for float32, 2^-10 for TF32, 2^-7 for bfloat16.
    """
    import torch

    for dtype in (torch.bfloat16, torch.float16):  # TF32 has the spacing of float16
        spacing = torch.finfo(dtype).eps
        # Half of the spacing is rounded to an even neighbour, which is 1.
        inputs = torch.full((_PRODUCT, _PRODUCT), 1 + spacing / 2, device=device)
        with torch.autocast(inputs.device.type, enabled=False):
            product = inputs @ torch.ones_like(inputs)
        if product[0, 0].item() == _PRODUCT:
            return spacing
    return torch.finfo(torch.float32).eps


@functools.cache
def unscalable_dtypes(device: str) -> frozenset[str]:
    """Finds the half dtypes whose gradients a device's loss scaler cannot unscale, by trying it on one element.

    A future torch may unscale bfloat16 on CUDA (https://github.com/pytorch/pytorch/pull/194947).

    Args:
        device: A torch device, with or without an index.

    Returns:
        A subset of `"bfloat16"` and `"float16"`.
    """
    import torch

    scaler, kind = torch.amp.GradScaler, torch.device(device).type
    return frozenset(dtype for dtype in (BFLOAT16, FLOAT16) if not can_unscale(scaler(kind), dtype, device))


def can_unscale(scaler: "torch.amp.GradScaler", dtype: str, device: str | None = None) -> bool:
    """Whether a loss scaler can unscale gradients of a dtype.

    Args:
        scaler: A new scaler, which cannot be used for anything else afterwards.
        dtype: `"float32"`, `"bfloat16"` or `"float16"`.
        device: The torch device; by default the scaler's.
    """
    import torch

    weight = torch.nn.Parameter(torch.zeros(1, dtype=to_torch(dtype), device=device or scaler._device))
    weight.grad = torch.ones_like(weight)
    scaler.scale(torch.ones((), device=weight.device))  # creates the tensor of the scale
    try:
        scaler.unscale_(torch.optim.SGD([weight], lr=0.0))
    except (NotImplementedError, RuntimeError, ValueError):
        return False
    return True
