"""What a device computes by itself, as plain values."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .dtypes import BFLOAT16, FLOAT16, FLOAT32


if TYPE_CHECKING:
    import torch

BF16_CAPABILITY = (8, 0)
"""First CUDA compute capability whose tensor cores multiply bfloat16 (Ampere)."""


@dataclass(frozen=True)
class Device:
    """A device as far as precision is concerned.

    Attributes:
        kind: `"cuda"`, `"cpu"`, `"xpu"`, `"mps"`, ... as in `torch.device.type`.
        name: What a person calls it.
        capability: CUDA compute capability, `None` elsewhere.
        rocm: Whether `"cuda"` is AMD's, whose capability numbers mean something else.
        unscalable: The half dtypes whose gradients its loss scaler refuses; `None` where accelerate builds no loss
            scaler for fp16, and no autocast either: on CPU, where it says nothing about it.
    """

    kind: str
    name: str = ""
    capability: tuple[int, int] | None = None
    rocm: bool = False
    unscalable: frozenset[str] | None = None

    @property
    def emulates_bf16(self) -> bool:
        """Whether bfloat16 runs but is emulated: CUDA before 8.0, where `torch.cuda.is_bf16_supported()` says yes."""
        return (
            self.kind == "cuda" and not self.rocm and self.capability is not None and self.capability < BF16_CAPABILITY
        )

    @property
    def scales_loss(self) -> bool:
        """Whether fp16 runs with autocast and a loss scaler here."""
        return self.unscalable is not None

    @property
    def preferred(self) -> tuple[str, str]:
        """The compute dtype that `precision="auto"` stands for here, and why."""
        if self.kind == "cpu":
            return FLOAT32, "a CPU: half precision saves no time worth its loss, and fp16 has no scaler"
        if self.kind == "mps":
            return FLOAT32, "what MPS computes in half precision depends on the system's version"
        if self.emulates_bf16:
            return FLOAT16, f"{self} has no bfloat16 arithmetic (compute capability below 8.0), and has float16"
        return BFLOAT16, f"{self} computes bfloat16 natively, which needs no loss scaling"

    def __str__(self) -> str:
        capability = f" (compute capability {self.capability[0]}.{self.capability[1]})" if self.capability else ""
        return f"{self.name or self.kind}{capability}"


def detect_device(device: "torch.device | str | None" = None) -> Device:
    """Describes a live device.

    Args:
        device: A torch device; by default the accelerator that torch finds, else the CPU.

    Returns:
        The description. Asking for the capability initialises CUDA, as `TrainingArguments` does too.
    """
    import torch

    if device is None:
        device = torch.accelerator.current_accelerator() or "cpu"
    device = torch.device(device)
    if device.type == "cpu":
        return Device(kind="cpu", name="CPU")
    from .scaler import unscalable

    if device.type != "cuda":
        return Device(kind=device.type, name=device.type.upper(), unscalable=unscalable(device.type))
    return Device(
        kind="cuda",
        name=torch.cuda.get_device_name(device),
        capability=torch.cuda.get_device_capability(device),
        rocm=torch.version.hip is not None,
        unscalable=unscalable("cuda"),
    )
