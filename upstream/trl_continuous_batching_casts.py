"""TRL casts the weights that are trained to half precision for continuous batching, and leaves them so."""

import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer


THREAD = "https://github.com/huggingface/trl/blob/main/trl/trainer/grpo_trainer.py"
MECHANISMS = ("safe_trainers/rollout/alignment.py",)
QUESTION = "float32 weights that are in bfloat16 after one step, as a share"

words = {f"w{i}": i for i in range(64)}
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")), eos_token="w1", pad_token="w0"
)
config = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=4, eos_token_id=1, pad_token_id=0,
)  # fmt: skip
with tempfile.TemporaryDirectory() as folder:
    args = GRPOConfig(
        folder, use_cpu=True, bf16=True, report_to=[], max_steps=1, per_device_train_batch_size=2, num_generations=2,
        max_completion_length=4, use_transformers_continuous_batching=True,
        transformers_continuous_batching_config={"num_blocks": 16, "block_size": 16, "max_batch_tokens": 64},
    )  # fmt: skip
    trainer = GRPOTrainer(
        LlamaForCausalLM(config),
        reward_funcs=lambda completion_ids, **kwargs: [float(sum(ids)) for ids in completion_ids],
        args=args,
        train_dataset=Dataset.from_list([{"prompt": "w5 w6"}] * 4),
        processing_class=tokenizer,
    )
    trainer.train()
parameters = list(trainer.model.parameters())
share = sum(p.dtype == torch.bfloat16 for p in parameters) / len(parameters)
print("FAULT" if share else "FIXED", f"{share:.2f}")
