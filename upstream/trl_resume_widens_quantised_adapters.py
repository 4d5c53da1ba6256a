"""The adapters of a 4-bit model train in bfloat16, and after a resume in float32: the run ends with other weights."""

import tempfile

from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    set_seed,
)
from trl import SFTConfig, SFTTrainer


THREAD = "https://github.com/huggingface/trl/blob/main/trl/trainer/sft_trainer.py"
MECHANISMS = ("safe_trainers/trainer/trl_patches.py", "safe_trainers/weights/trainables.py")
QUESTION = "largest difference of an adapter between a run of 4 steps and one that was resumed after step 2"

config = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=4,
)  # fmt: skip
words = {"<pad>": 0, "</s>": 1}
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<pad>")), eos_token="</s>", pad_token="<pad>"
)


def trained(model, folder, resume):
    set_seed(0)
    args = SFTConfig(
        folder, use_cpu=True, bf16=False, report_to=[], max_steps=4, save_steps=2, learning_rate=1e-2, seed=0
    )
    four_bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    trainer = SFTTrainer(
        AutoModelForCausalLM.from_pretrained(model, quantization_config=four_bits),
        args,
        train_dataset=Dataset.from_list([{"input_ids": [5, 6, 7 + i]} for i in range(8)]),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=8, target_modules=["q_proj", "v_proj"]),
    )
    trainer.train(resume_from_checkpoint=resume)
    return {name: p.detach() for name, p in trainer.model.named_parameters() if "lora_" in name}


set_seed(0)
with tempfile.TemporaryDirectory() as folder:
    LlamaForCausalLM(config).save_pretrained(f"{folder}/model")
    whole = trained(f"{folder}/model", f"{folder}/run", None)
    resumed = trained(f"{folder}/model", f"{folder}/run", f"{folder}/run/checkpoint-2")
difference = max((resumed[name].float() - p.float()).abs().max().item() for name, p in whole.items())
kinds = {str(p.dtype)[6:] for p in whole.values()}, {str(p.dtype)[6:] for p in resumed.values()}
print("FAULT" if difference else "FIXED", f"{difference:.1e}", f"(whole {kinds[0]}, resumed {kinds[1]})")
