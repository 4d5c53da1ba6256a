"""accelerate's FSDP2 policy for mixed precision reduces gradients, and returns outputs, in half precision."""

import torch
from accelerate.utils import FullyShardedDataParallelPlugin


THREAD = "https://github.com/huggingface/accelerate/blob/main/src/accelerate/utils/dataclasses.py"
MECHANISMS = ("safe_trainers/policy/distributed.py",)
QUESTION = "dtypes of gradient reduction and outputs that are bfloat16, of 2"

plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
plugin.set_mixed_precision("bf16")
policy = plugin.mixed_precision_policy
found = [policy.reduce_dtype, policy.output_dtype]
half = sum(dtype == torch.bfloat16 for dtype in found)
print("FAULT" if half else "FIXED", half, f"(reduce_dtype {found[0]}, output_dtype {found[1]})")
