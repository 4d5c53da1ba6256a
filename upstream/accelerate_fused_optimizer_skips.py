"""accelerate does not notice that a fused optimizer skipped a step: the learning-rate schedule goes on."""

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer


THREAD = "https://github.com/huggingface/accelerate/issues/4242"
MECHANISMS = ("safe_trainers/numerics/loss_scale.py",)
QUESTION = "skipped steps that accelerate counts as taken, of 3"

weight = torch.nn.Parameter(torch.ones(4))
fused = torch.optim.AdamW([weight], lr=1e-3, fused=True)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
Accelerator(cpu=True)
optimizer = AcceleratedOptimizer(fused, scaler=scaler)
unnoticed = 0
for _ in range(3):
    scaler.scale((weight * torch.inf).sum()).backward()
    optimizer.step()
    unnoticed += not optimizer.step_was_skipped
    optimizer.zero_grad()
unchanged = bool((weight == 1).all())
print("FAULT" if unnoticed and unchanged else "FIXED", unnoticed)
