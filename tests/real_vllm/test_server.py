"""What a vLLM server reports over HTTP. TRL sends weights with NCCL, so that no trainer on a CPU can use a server."""

import os
import subprocess
import sys
import time
from types import SimpleNamespace

import engines
import pytest
import requests
import torch
from transformers import AutoModelForCausalLM

from safe_trainers import PrecisionError
from safe_trainers.rollout.vllm import check_served_model, check_server, has_float32_head


PROMPTS = [[40, 41, 42, 43], [50, 51, 52]]


def wait_for(server, url, log):
    """Waits until a server answers; one that ends first fails the test with the errors in its log."""
    ends = time.monotonic() + 240
    while time.monotonic() < ends:
        if server.poll() is not None:
            errors = [line for line in log.read_text().splitlines() if "Error" in line]
            pytest.fail(f"the server ended with status {server.returncode}:\n" + "\n".join(errors))
        try:
            requests.get(f"{url}/health", timeout=5).raise_for_status()
        except requests.exceptions.RequestException:
            time.sleep(0.5)
        else:
            return
    pytest.fail(f"the server did not answer within 240 s:\n{log.read_text()[-2000:]}")


@pytest.fixture(scope="module")
def serve(folders, tmp_path_factory):
    """Starts servers of the tiny text model, and returns TRL's client of each."""
    from trl.generation.vllm_client import VLLMClient

    servers = []

    def start(*options):
        port = engines.free_port()
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folders["text"])]
        log = tmp_path_factory.mktemp("server") / "log.txt"
        with log.open("w") as written:
            server = subprocess.Popen(
                [*command, "--dtype", "float16", "--max-model-len", "256", "--port", str(port), *options],
                env={**os.environ, "VLLM_SERVER_DEV_MODE": "1"}, stdout=written, stderr=subprocess.STDOUT,
            )  # fmt: skip
        servers.append(server)
        url = f"http://127.0.0.1:{port}"
        wait_for(server, url, log)
        return VLLMClient(base_url=url, connection_timeout=30)

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


def test_a_float32_head_is_seen(serve):
    client = serve("--hf-overrides", '{"head_dtype": "float32"}')
    assert check_server(client, "float16") is None
    assert has_float32_head(SimpleNamespace(vllm_client=client))


@pytest.mark.skipif(
    "AVX512" not in torch.backends.cpu.get_cpu_capability(),  # CPUs with AMX have it too
    reason="vLLM makes an fp8 KV cache only on a CPU with AVX-512 or AMX",
)
def test_an_fp8_cache_is_refused(serve):
    client = serve("--kv-cache-dtype", "fp8")
    with pytest.raises(PrecisionError, match="vllm-quantises-its-cache") as caught:
        check_server(client, "float16")
    assert "a vLLM server with a KV cache in fp8" in str(caught.value)


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
