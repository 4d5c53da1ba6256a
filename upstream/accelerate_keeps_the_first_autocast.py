"""accelerate leaves a model as the first accelerator has prepared it, with its autocast or without one."""

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState


THREAD = "https://github.com/huggingface/accelerate/blob/main/src/accelerate/accelerator.py"
MECHANISMS = ("safe_trainers/policy/distributed.py",)
QUESTION = "second runs of a model, in bfloat16 after float32 and the other way, that compute in the first dtype, of 2"


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, values):
        product = self.layer(values)
        computed.append(product.dtype)
        return product


wrong, computed = 0, []
for order in (("no", "bf16"), ("bf16", "no")):
    model = Model()
    for precision in order:
        AcceleratorState._reset_state()
        PartialState._reset_state()
        accelerator = Accelerator(cpu=True, mixed_precision=precision)
        accelerator.prepare_model(model)(torch.ones(1, 4))
    wrong += computed[-1] == computed[-2]
print("FAULT" if wrong else "FIXED", wrong)
