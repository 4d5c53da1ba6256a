"""TRL sends vLLM prompts whose image tokens the processor has expanded, and vLLM expands the first of them again."""

import os
import tempfile


os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
import transformers as hf
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from trl.generation.vllm_generation import VLLMGeneration


THREAD = "https://github.com/huggingface/trl/issues/6294"
MECHANISMS = ("safe_trainers/rollout/vllm_images.py",)
QUESTION = "image tokens in the prompt that vLLM computes, where the trainer has 4"
NEEDS = "vllm"
WORDS = ["<pad>", "<eos>", "<image>", "a", "b"]


def main():
    from vllm import LLM

    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, "<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = hf.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>",
                                        additional_special_tokens=["<image>"])  # fmt: skip
    pictures = hf.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    processor = hf.LlavaProcessor(pictures, tokenizer, patch_size=16, vision_feature_select_strategy="default",
                               num_additional_image_tokens=1, image_token="<image>")  # fmt: skip
    text = hf.LlamaConfig(vocab_size=len(WORDS), hidden_size=64, intermediate_size=64, num_hidden_layers=1,
                       num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64)  # fmt: skip
    tower = hf.CLIPVisionConfig(hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
                             image_size=32, patch_size=16, projection_dim=64)  # fmt: skip
    config = hf.LlavaConfig(vision_config=tower, text_config=text, image_token_index=2,
                         architectures=["LlavaForConditionalGeneration"])  # fmt: skip
    picture = Image.new("RGB", (32, 32))
    prompt = processor(images=[picture], text=["a <image> b"])["input_ids"][0]
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        processor.save_pretrained(folder)
        engine = LLM(folder, load_format="dummy", enforce_eager=True, max_model_len=64, gpu_memory_utilization=0.1)
        sampler = VLLMGeneration.__new__(VLLMGeneration)
        vars(sampler).update(
            mode="colocate", model=nn.Identity(), accelerator=None, llm=engine, temperature=1.0, top_p=1.0, top_k=0,
            min_p=0.0, repetition_penalty=1.0, max_completion_length=4, logprobs=0, generation_kwargs={},
            structured_outputs_regex=None, tensor_parallel_size=1, enable_sleep_mode=False,
        )  # fmt: skip
        computed = sampler.generate([prompt], [[picture]], 1)[0][0].count(2)
    print("FIXED" if computed == prompt.count(2) else "FAULT", computed)


if __name__ == "__main__":
    main()
