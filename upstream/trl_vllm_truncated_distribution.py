"""With `top_p` below 1, vLLM's log-probabilities are of the tokens that it keeps, and TRL's of the whole vocabulary."""

import tempfile

from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

THREAD = "https://github.com/huggingface/trl/issues/6789"
MECHANISMS = ("safe_trainers/rollout/truncation.py",)
QUESTION = "mean difference of log-probabilities of sampler and trainer in float32 with top_p=0.5, in nats"
NEEDS = "vllm"


def main():
    words = {f"w{i}": i for i in range(128)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")), eos_token="w1", pad_token="w0"
    )
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, eos_token_id=1, pad_token_id=0, max_position_embeddings=64, dtype="float32",
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(config).save_pretrained(f"{folder}/model")
        tokenizer.save_pretrained(f"{folder}/model")
        args = GRPOConfig(
            folder, use_cpu=True, bf16=False, report_to=[], max_steps=1, per_device_train_batch_size=4,
            num_generations=4, max_completion_length=8, use_vllm=True, vllm_mode="colocate", top_p=0.5,
            vllm_max_model_length=64, vllm_gpu_memory_utilization=0.1, model_init_kwargs={"dtype": "float32"},
        )  # fmt: skip
        trainer = GRPOTrainer(
            f"{folder}/model",
            reward_funcs=lambda completion_ids, **kwargs: [float(sum(ids)) for ids in completion_ids],
            args=args,
            train_dataset=Dataset.from_list([{"prompt": "w5 w6"}] * 4),
        )
        trainer.train()
    difference = trainer.state.log_history[0]["sampling/sampling_logp_difference/mean"]
    print("FAULT" if difference > 1e-3 else "FIXED", f"{difference:.2f}")


if __name__ == "__main__":
    main()
