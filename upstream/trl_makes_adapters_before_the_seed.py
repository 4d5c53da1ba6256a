"""TRL makes the adapters of a `peft_config` before it sets `seed`, so that two runs of one seed differ."""

import tempfile

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer


THREAD = "https://github.com/huggingface/trl/issues/6688"
MECHANISMS = ("safe_trainers/trainer/mixin.py",)
QUESTION = "trainers, of SFT and GRPO, whose adapters depend on the random state before the trainer is built"

words = {f"w{i}": i for i in range(64)}
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")), eos_token="w1", pad_token="w0"
)
config = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=4, eos_token_id=1, pad_token_id=0,
)  # fmt: skip
common = {"use_cpu": True, "bf16": False, "report_to": [], "seed": 0}


def adapter(kind, state):
    torch.manual_seed(7)
    model = LlamaForCausalLM(config)
    torch.manual_seed(state)
    with tempfile.TemporaryDirectory() as folder:
        if kind == "sft":
            build, args, other, rows = SFTTrainer, SFTConfig(folder, **common), {}, [{"text": "w5 w6"}] * 4
        else:
            args = GRPOConfig(folder, per_device_train_batch_size=2, num_generations=2, **common)
            other = {"reward_funcs": lambda completion_ids, **kwargs: [0.0] * len(completion_ids)}
            build, rows = GRPOTrainer, [{"prompt": "w5 w6"}] * 4
        trainer = build(
            model, args=args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer,
            peft_config=LoraConfig(r=4, target_modules=["q_proj"]), **other,
        )  # fmt: skip
    return next(weight for name, weight in trainer.model.named_parameters() if "lora_A" in name)


differ = sum(not torch.equal(adapter(kind, 1), adapter(kind, 2)) for kind in ("sft", "grpo"))
print("FAULT" if differ else "FIXED", differ)
