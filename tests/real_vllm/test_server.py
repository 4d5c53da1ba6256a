"""What a vLLM server reports over HTTP. TRL sends weights with NCCL, so that no trainer on a CPU can use a server."""

import os
import subprocess
import sys
from types import SimpleNamespace

import engines
import pytest
import torch
from transformers import AutoModelForCausalLM

from safe_trainers import PrecisionError
from safe_trainers.rollout.vllm import check_served_model, check_server, has_float32_head


PROMPTS = [[40, 41, 42, 43], [50, 51, 52]]


@pytest.fixture(scope="module")
def serve(folders, tmp_path_factory):
    """Starts servers of the tiny text model, and returns TRL's client of each."""
    from trl.generation.vllm_client import VLLMClient

    servers = []

    def start(*options):
        port = engines.free_port()
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folders["text"])]
        log = (tmp_path_factory.mktemp("server") / "log.txt").open("w")
        servers.append(
            subprocess.Popen(
                [*command, "--dtype", "float16", "--max-model-len", "256", "--port", str(port), *options],
                env={**os.environ, "VLLM_SERVER_DEV_MODE": "1"}, stdout=log, stderr=subprocess.STDOUT,
            )
        )  # fmt: skip
        return VLLMClient(base_url=f"http://127.0.0.1:{port}", connection_timeout=240)

    yield start
    for server in servers:
        server.terminate()
        server.wait(60)


@pytest.fixture(scope="module")
def plain(serve):
    return serve("--logprobs-mode", "processed_logprobs")


def test_a_server_in_the_dtype_of_the_run_passes(plain):
    assert check_server(plain, "float16") is None
    assert not has_float32_head(SimpleNamespace(vllm_client=plain))


def test_a_server_in_another_dtype_is_refused(plain):
    with pytest.raises(PrecisionError, match="vllm-server-computes-otherwise") as caught:
        check_server(plain, "bfloat16")
    assert "a vLLM server that computes in float16" in str(caught.value)
    assert "start the server with `--dtype bfloat16`" in str(caught.value)


def test_a_server_of_another_model_is_refused(plain, folders, tmp_path, recwarn):
    own = AutoModelForCausalLM.from_pretrained(folders["text"])
    assert check_served_model(plain, own) is None
    own.config._name_or_path = str(tmp_path / "moved")
    assert check_served_model(plain, own) is None  # the same config under another name
    for name, value in (("vocab_size", 7), ("num_hidden_layers", 9), ("model_type", "qwen2")):
        other = AutoModelForCausalLM.from_pretrained(folders["text"])
        other.config._name_or_path = "org/other"
        setattr(other.config, name, value)
        with pytest.raises(PrecisionError, match="vllm-serves-another-model") as caught:
            check_served_model(plain, other)
        assert f"{name}=" in str(caught.value)
        assert "'org/other'" in str(caught.value)


def test_a_server_whose_model_is_unknown_here_is_reported():
    own = SimpleNamespace(config=SimpleNamespace(_name_or_path="org/own"))
    served = {"org/other-name": "vllm-server-of-unknown-model", "mirror/own": None, "org/own": None}
    for name, warned in served.items():
        client = SimpleNamespace(get_server_info=lambda name=name: {"model_config": {"model": name}})
        found = check_served_model(client, own)
        assert (found and found.id) == warned


def test_an_fp8_cache_is_refused_and_a_float32_head_is_seen(serve):
    client = serve("--kv-cache-dtype", "fp8", "--hf-overrides", '{"head_dtype": "float32"}')
    with pytest.raises(PrecisionError, match="vllm-quantises-its-cache") as caught:
        check_server(client, "float16")
    assert "a vLLM server with a KV cache in fp8" in str(caught.value)
    assert has_float32_head(SimpleNamespace(vllm_client=client))


def test_a_server_samples_what_the_model_computes(plain, folders):
    found = plain.generate(PROMPTS, n=1, max_tokens=16, temperature=1.0)
    assert found["prompt_ids"] == PROMPTS
    model = AutoModelForCausalLM.from_pretrained(folders["text"], dtype=torch.float16)
    for prompt, completion, logps in zip(PROMPTS, found["completion_ids"], found["logprobs"], strict=True):
        ids = torch.tensor([prompt + completion])
        with torch.no_grad():
            scores = model(ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        own = scores.gather(1, torch.tensor(completion).unsqueeze(1)).squeeze(1)
        assert (own - torch.tensor([row[0] for row in logps])).abs().max() < 5e-3


def test_trl_cannot_send_weights_to_a_server_from_a_cpu(plain):
    with pytest.raises((NotImplementedError, RuntimeError), match=r"CUDA device|weight-transfer engine"):
        plain.init_communicator(device="cpu")
