"""On CPUs with bfloat16 units, one evaluation of a 4-bit layer changes the gradients of all later training steps."""

import bitsandbytes as bnb
import torch


THREAD = "https://github.com/bitsandbytes-foundation/bitsandbytes/blob/main/bitsandbytes/nn/modules.py"
MECHANISMS = ("safe_trainers/model/packed_layers.py", "safe_trainers/weights/bitsandbytes.py")
QUESTION = "gradient norm of the input after an evaluation, as a share of the norm before it"

torch.manual_seed(0)
layer = bnb.nn.Linear4bit(256, 256, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4")
layer.weight = bnb.nn.Params4bit(torch.randn(256, 256), requires_grad=False, quant_type="nf4")
layer = layer.to("cpu")
if not getattr(layer, "support_avx512bf16_for_cpu", True):
    print("NOT RUN (this CPU has no bfloat16 units)")
    raise SystemExit


def norm():
    """Returns the norm of the input's gradient; a gradient that is missing counts as 0."""
    x = torch.ones(2, 256, dtype=torch.bfloat16, requires_grad=True)
    (layer(x) * torch.linspace(0, 1, 256)).sum().backward()
    return 0.0 if x.grad is None else x.grad.float().norm().item()


before = norm()
with torch.no_grad():
    layer.eval()(torch.ones(2, 256, dtype=torch.bfloat16))
layer.train()
share = norm() / before
print("FAULT" if abs(share - 1) > 1e-2 else "FIXED", f"{share:.2f}")
