"""TRL casts the float32 adapters that PEFT made for a 4-bit model to bfloat16, whatever the learning rate."""

import tempfile

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from trl import SFTConfig, SFTTrainer


THREAD = "https://github.com/huggingface/trl/blob/main/trl/trainer/sft_trainer.py"
MECHANISMS = ("safe_trainers/trainer/trl_patches.py", "safe_trainers/weights/trainables.py")
QUESTION = "share of the elements of new adapters that have another value than PEFT gave them"

config = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=4,
)  # fmt: skip
lora = LoraConfig(r=8, target_modules=["q_proj", "v_proj"])
words = {"<pad>": 0, "</s>": 1}
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<pad>")), eos_token="</s>", pad_token="<pad>"
)
with tempfile.TemporaryDirectory() as folder:
    LlamaForCausalLM(config).save_pretrained(folder)
    four_bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")

    def load():
        return AutoModelForCausalLM.from_pretrained(folder, quantization_config=four_bits)

    torch.manual_seed(0)
    made = {n: p.detach().clone() for n, p in get_peft_model(load(), lora).named_parameters() if "lora_A" in n}
    torch.manual_seed(0)
    args = SFTConfig(folder, use_cpu=True, report_to=[], seed=0, max_steps=1)
    data = Dataset.from_list([{"input_ids": [5, 6, 7]}] * 4)
    trainer = SFTTrainer(load(), args, train_dataset=data, processing_class=tokenizer, peft_config=lora)
    kept = {n: p.detach() for n, p in trainer.model.named_parameters() if "lora_A" in n}
changed = sum((kept[name].float() != made[name]).sum().item() for name in made)
share = changed / sum(p.numel() for p in made.values())
print("FAULT" if share else "FIXED", f"{share:.3f}", f"({ {p.dtype for p in kept.values()} })")
