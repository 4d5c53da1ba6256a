"""With `top_p` below 1, vLLM's log-probabilities are of the tokens that it keeps, and TRL's of all tokens."""

import os
import tempfile


os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from trl.generation.vllm_generation import VLLMGeneration


THREAD = "https://github.com/huggingface/trl/issues/6789"
MECHANISMS = ("safe_trainers/rollout/truncation.py",)
QUESTION = "mean difference of log-probabilities of sampler and trainer in float32 with top_p=0.5, in nats"
NEEDS = "vllm"


def constants(code):
    """Yields the constants of a function and of the functions inside of it."""
    for value in code.co_consts:
        yield value
        if hasattr(value, "co_consts"):
            yield from constants(value)


def main():
    from vllm import LLM, SamplingParams

    methods = [value for value in vars(VLLMGeneration).values() if hasattr(value, "__code__")]
    mode = "processed_logprobs"  # that of TRL's engine
    found = any(mode in map(str, constants(method.__code__)) for method in methods)
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, eos_token_id=1, pad_token_id=0, max_position_embeddings=64, dtype="float32",
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        engine = LLM(
            folder, dtype="float32", enforce_eager=True, skip_tokenizer_init=True, max_model_len=64, seed=0,
            logprobs_mode=mode if found else "raw_logprobs", gpu_memory_utilization=0.1,
        )  # fmt: skip
        how = SamplingParams(top_p=0.5, max_tokens=16, logprobs=0, ignore_eos=True, detokenize=False)
        output = engine.generate([{"prompt_token_ids": [5, 6, 7]}], how)[0].outputs[0]
    tokens = torch.tensor([[5, 6, 7, *output.token_ids]])
    sampler = torch.tensor(
        [step[token].logprob for step, token in zip(output.logprobs, output.token_ids, strict=True)]
    )
    with torch.no_grad():
        logits = model(tokens).logits[0, 2:-1]
    trainer = logits.log_softmax(-1).gather(-1, tokens[0, 3:, None]).squeeze(-1)
    difference = (trainer - sampler).abs().mean().item()
    print("FAULT" if difference > 1e-3 else "FIXED", f"{difference:.2f}")


if __name__ == "__main__":
    main()
