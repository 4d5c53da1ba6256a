"""A run that resumes between two generations samples new completions: it ends with other weights."""

import tempfile

from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import GRPOConfig, GRPOTrainer


THREAD = "https://github.com/huggingface/trl/issues/2657"
MECHANISMS = ("safe_trainers/checkpoint/trainer_state.py",)
QUESTION = "largest difference of a weight between a run of 4 steps and one that was resumed after step 3"

words = {f"w{i}": i for i in range(64)}
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")), eos_token="w1", pad_token="w0"
)
config = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=4, eos_token_id=1, pad_token_id=0,
)  # fmt: skip


def trained(folder, resume):
    set_seed(0)
    args = GRPOConfig(
        folder, use_cpu=True, bf16=False, report_to=[], max_steps=4, per_device_train_batch_size=2, num_generations=2,
        max_completion_length=4, steps_per_generation=2, save_steps=3, save_strategy="steps", learning_rate=1e-2,
    )  # fmt: skip
    trainer = GRPOTrainer(
        LlamaForCausalLM(config),
        reward_funcs=lambda completion_ids, **kwargs: [float(sum(ids)) for ids in completion_ids],
        args=args,
        train_dataset=Dataset.from_list([{"prompt": f"w{i} w6"} for i in range(8)]),
        processing_class=tokenizer,
    )
    trainer.train(resume_from_checkpoint=resume)
    return {name: p.detach() for name, p in trainer.model.named_parameters()}


with tempfile.TemporaryDirectory() as folder:
    whole = trained(folder, None)
    resumed = trained(folder, f"{folder}/checkpoint-3")
difference = max((resumed[name] - p).abs().max().item() for name, p in whole.items())
print("FAULT" if difference else "FIXED", f"{difference:.1e}")
