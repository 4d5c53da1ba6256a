"""TRL's vLLM code, run for real on a stand-in for vLLM and for a vLLM server (tests/stand_ins/vllm)."""

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import trl.generation


FOLDER = Path(__file__).parent / "stand_ins"
# TRL tells vLLM of the process by its environment; an accelerator that is built later would believe it, too.
PROCESS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
TRAINERS = ("grpo_trainer", "rloo_trainer")


class StandInClient:
    """TRL's client of a vLLM server, with an engine of the stand-in in place of the server."""

    # What the server was started with, set by tests.
    dtype, quantization, cache_dtype, answer = "auto", None, "auto", {}
    model = ""

    def __init__(self, base_url: str, group_port: int = 0, connection_timeout: float = 0.0, **_: Any) -> None:
        import vllm

        self.engine = vllm.LLM(type(self).model, dtype=type(self).dtype)
        self.received: list[tuple[str, str]] = []

    def init_communicator(self, device: Any = 0) -> None:
        """There is no NCCL."""

    def get_server_info(self) -> dict[str, Any]:
        return {
            "model_config": {
                "dtype": str(self.engine.dtype), "quantization": type(self).quantization,
                "logprobs_mode": "processed_logprobs", **type(self).answer,
            },
            "cache_config": {"cache_dtype": type(self).cache_dtype},
        }  # fmt: skip

    def update_named_params(self, metadata: list[tuple[str, str, list[int]]], named_params: Any) -> None:
        for (name, dtype, shape), (sent, tensor) in zip(metadata, named_params, strict=True):
            assert (name, dtype, shape) == (sent, str(tensor.dtype)[6:], list(tensor.shape))
            self.update_named_param(sent, tensor)

    def update_named_param(self, name: str, weights: torch.Tensor) -> None:
        self.received.append((name, str(weights.dtype)))
        self.engine.load_weights([(name, weights)])

    def reset_prefix_cache(self) -> None:
        self.engine.reset_prefix_cache()

    def generate(self, prompts: list[list[int]], n: int, max_tokens: int, temperature: float, **_: Any) -> dict:
        import vllm

        params = vllm.SamplingParams(n=n, max_tokens=max_tokens, temperature=temperature)
        outputs = self.engine.generate([{"prompt_token_ids": ids} for ids in prompts], params)
        completions = [completion for output in outputs for completion in output.outputs]
        return {
            "prompt_ids": [output.prompt_token_ids for output in outputs],
            "completion_ids": [completion.token_ids for completion in completions],
            "logprobs": [[[next(iter(p.values())).logprob] for p in c.logprobs] for c in completions],
            "logprob_token_ids": [[[token] for token in c.token_ids] for c in completions],
        }


def install(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Lets TRL find the stand-in, and imports TRL's vLLM modules anew, until `monkeypatch` is undone.

    Returns:
        The stand-in, whose `ENGINES` are those that were built.
    """
    monkeypatch.syspath_prepend(str(FOLDER))
    forget_process(monkeypatch)
    for name in list(sys.modules):
        if name.split(".")[0] == "vllm":
            monkeypatch.delitem(sys.modules, name)
    for name in ("vllm_client", "vllm_generation"):
        monkeypatch.setattr(trl.generation, name, getattr(trl.generation, name, None), raising=False)
        monkeypatch.delitem(sys.modules, f"trl.generation.{name}", raising=False)
    fresh = importlib.import_module("trl.generation.vllm_generation")
    monkeypatch.setattr(fresh, "VLLMClient", StandInClient)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)  # TRL before 1.10 asks it for its client
    for name in TRAINERS:
        monkeypatch.setattr(sys.modules[f"trl.trainer.{name}"], "VLLMGeneration", fresh.VLLMGeneration)
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        monkeypatch.setitem(sys.modules, name, sys.modules.pop(name))  # so that it is gone with the test
    stand_in = sys.modules["vllm"]
    stand_in.ENGINES.clear()
    return stand_in


def forget_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a second trainer in one test: what TRL told vLLM of the process."""
    for name in PROCESS:
        monkeypatch.setenv(name, "")  # so that it is known that there was none
        monkeypatch.delenv(name)
