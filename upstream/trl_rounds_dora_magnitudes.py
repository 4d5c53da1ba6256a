"""TRL casts the magnitude vectors of DoRA on a 4-bit model to bfloat16, in which small updates round to nothing."""

import tempfile

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from trl import SFTConfig, SFTTrainer


THREAD = "https://github.com/huggingface/trl/issues/7268"
MECHANISMS = ("safe_trainers/trainer/trl_patches.py", "safe_trainers/weights/trainables.py")
QUESTION = (
    "share of the elements of DoRA's magnitude vectors that four steps with a learning rate of 1e-4 do not change"
)

config = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=4,
)  # fmt: skip
words = {"<pad>": 0, "</s>": 1}
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<pad>")), eos_token="</s>", pad_token="<pad>"
)
with tempfile.TemporaryDirectory() as folder:
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    four_bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=four_bits)
    args = SFTConfig(
        folder, use_cpu=True, bf16=False, report_to=[], seed=0, max_steps=4, learning_rate=1e-4, weight_decay=0.0,
        lr_scheduler_type="constant", optim="adamw_torch", save_strategy="no", logging_strategy="no",
    )  # fmt: skip
    data = Dataset.from_list([{"input_ids": [5, 6, 7, 8]}] * 32)
    dora = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], use_dora=True)
    trainer = SFTTrainer(model, args, train_dataset=data, processing_class=tokenizer, peft_config=dora)
    held = {name: p for name, p in trainer.model.named_parameters() if "lora_magnitude_vector" in name}
    before = {name: p.detach().clone() for name, p in held.items()}
    trainer.train()
same = sum((held[name].detach() == before[name]).sum().item() for name in before)
share = same / sum(p.numel() for p in before.values())
print("FAULT" if share > 0.1 else "FIXED", f"{share:.3f}", f"({ {p.dtype for p in held.values()} })")
