"""A stand-in for vLLM, which needs a GPU: the names that TRL imports, around a real model of transformers on the CPU.

What of vLLM's behaviour counts for the tests is done as vLLM does it: which dtype an engine takes without being told,
which model types it refuses in float16, that a weight has to have the shape of the one it replaces, that packed
weights keep the statistics that they were loaded with, and that a tied head is never loaded.
"""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig


__version__ = "0.28.0"
ENGINES: list["LLM"] = []  # every engine that was built
FLOAT16_REFUSED = {"gemma2", "gemma3", "gemma3_text", "glm4"}


@dataclass
class SamplingParams:
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int = 16
    logprobs: int | None = None
    structured_outputs: Any = None
    seed: int | None = None


@dataclass
class Logprob:
    logprob: float
    rank: int = 1


@dataclass
class CompletionOutput:
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]]


@dataclass
class RequestOutput:
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)


class LLM:
    """An engine: a model of its own, in a dtype of its own."""

    def __init__(self, model: str, dtype: str = "auto", quantization: str | None = None, **others: Any) -> None:
        self.arguments = {"model": model, "dtype": dtype, "quantization": quantization, **others}
        config = AutoConfig.from_pretrained(model)
        held = getattr(config, "dtype", None) or torch.float32
        automatic = torch.bfloat16 if held == torch.float32 else held  # as vLLM on a GPU that has bfloat16
        self.dtype = automatic if dtype == "auto" else getattr(torch, dtype)
        if self.dtype == torch.float16 and config.model_type in FLOAT16_REFUSED:
            raise ValueError(f"The model type {config.model_type!r} does not support float16.")
        packed = {"quantization_config": BitsAndBytesConfig(load_in_4bit=True)} if quantization else {}
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=self.dtype, **packed).eval()
        self.loaded: dict[str, torch.Tensor] = {}  # what was sent last, as it was sent
        self.loads = 0
        worker = SimpleNamespace(model_runner=SimpleNamespace(model=SimpleNamespace(load_weights=self.load_weights)))
        self.llm_engine = SimpleNamespace(
            model_executor=SimpleNamespace(driver_worker=worker),
            model_config=SimpleNamespace(max_model_len=others.get("max_model_len") or 1024),
        )
        ENGINES.append(self)

    @torch.no_grad()
    def load_weights(self, weights: Any) -> None:
        parameters = dict(self.model.named_parameters())
        for name, tensor in weights:
            self.loads += 1
            if name.startswith("lm_head.") and self.model.config.tie_word_embeddings:
                continue
            parameter = parameters[name]
            assert parameter.shape == tensor.shape, f"{name}: {tuple(tensor.shape)} into {tuple(parameter.shape)}"
            parameter.data.copy_(tensor)
            self.loaded[name] = tensor.detach().clone()

    @torch.no_grad()
    def generate(
        self, prompts: list[dict[str, Any]], sampling_params: SamplingParams, use_tqdm: bool = True
    ) -> list[RequestOutput]:
        results = []
        for prompt in prompts:
            ids = prompt["prompt_token_ids"]
            outputs = [self._complete(ids, sampling_params) for _ in range(sampling_params.n)]
            results.append(RequestOutput(ids, outputs))
        return results

    def _complete(self, ids: list[int], params: SamplingParams) -> CompletionOutput:
        sequence, chosen = torch.tensor([ids]), []
        for _ in range(params.max_tokens):
            logits = self.model(input_ids=sequence).logits[0, -1].float()
            scores = torch.log_softmax(logits / (params.temperature or 1.0), -1)
            token = int(scores.argmax() if params.temperature == 0 else torch.multinomial(scores.exp(), 1))
            chosen.append((token, scores[token].item()))
            sequence = torch.cat([sequence, torch.tensor([[token]])], 1)
            if token == self.model.generation_config.eos_token_id:
                break
        return CompletionOutput([t for t, _ in chosen], [{t: Logprob(score)} for t, score in chosen])

    def reset_prefix_cache(self) -> None:
        """The stand-in has none."""

    def sleep(self, level: int = 1) -> None:
        """It never sleeps."""

    def wake_up(self, tags: list[str] | None = None) -> None:
        """It never sleeps."""
