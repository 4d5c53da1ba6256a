"""transformers logs the loss 0.0 for a step whose loss is NaN, trains on, and saves weights that are NaN."""

import tempfile

import torch
from datasets import Dataset
from transformers import Trainer, TrainingArguments


THREAD = "https://github.com/huggingface/transformers/blob/main/src/transformers/trainer.py"
MECHANISMS = ("safe_trainers/numerics/gradient_norm.py", "safe_trainers/numerics/finite_watch.py")
QUESTION = "weights that are NaN after a run whose log has no NaN loss"


class Model(torch.nn.Module):
    """A line through points, one of which is NaN."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))

    def forward(self, x, labels):
        return {"loss": ((x * self.weight).sum(1) - labels).square().mean()}


rows = [{"x": [1.0, 2.0, 3.0], "labels": 1.0}] * 2 + [{"x": [1.0, float("nan"), 3.0], "labels": 1.0}]
with tempfile.TemporaryDirectory() as folder:
    args = TrainingArguments(
        folder, use_cpu=True, report_to=[], max_steps=3, per_device_train_batch_size=1, logging_steps=1,
        save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(Model(), args, train_dataset=Dataset.from_list(rows))
    trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
broken = int(trainer.model.weight.isnan().sum())
silent = broken and all(loss == loss for loss in losses)
print("FAULT" if silent else "FIXED", broken, f"(logged losses {losses})")
