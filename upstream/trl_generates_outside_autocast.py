"""TRL generates in the dtype of the weights, and computes the loss under autocast."""

import tempfile

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer


THREAD = "https://github.com/huggingface/trl/issues/6688"
MECHANISMS = ("safe_trainers/rollout/alignment.py",)
QUESTION = "dtypes of the same layer in rollout and loss that differ (0 or 1)"

words = {f"w{i}": i for i in range(64)}
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")), eos_token="w1", pad_token="w0"
)
config = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=4, eos_token_id=1, pad_token_id=0,
)  # fmt: skip
seen = {True: set(), False: set()}
with tempfile.TemporaryDirectory() as folder:
    args = GRPOConfig(
        folder, use_cpu=True, bf16=True, report_to=[], max_steps=1, per_device_train_batch_size=2, num_generations=2,
        max_completion_length=4,
    )  # fmt: skip
    trainer = GRPOTrainer(
        LlamaForCausalLM(config),
        reward_funcs=lambda completion_ids, **kwargs: [float(sum(ids)) for ids in completion_ids],
        args=args,
        train_dataset=Dataset.from_list([{"prompt": "w5 w6"}] * 4),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=4, target_modules=["q_proj"]),
    )
    layer = trainer.model.get_base_model().model.layers[0].mlp.up_proj
    layer.register_forward_hook(lambda module, args, output: seen[torch.is_grad_enabled()].add(output.dtype))
    trainer.train()
differs = seen[True] != seen[False]
print("FAULT" if differs else "FIXED", int(differs), f"(rollout {seen[False]}, loss {seen[True]})")
