"""Measures the two ways to send LoRA adapters to the real vLLM, merged and native: bytes, time and mismatch.

    .venv/vllm/bin/python benchmarks/adapter_sync.py      # writes benchmarks/results/adapter_sync.json

A Llama of each size trains two steps of GRPO with vLLM in the same process, on the CPU. Its adapters have random
weights, so that they change what is sampled. The mismatch is TRL's `sampling/sampling_logp_difference`. The bytes are
those that reach the engine in one sync after the first, and the time is the median of five such syncs.
"""

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# First, because it sets the environment.
from vllm_runs import FLAGS, METRIC, write_results


# isort: split
import engines
import torch
from cells import Cell
from peft import LoraConfig
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from safe_trainers import SafeGRPOConfig


SIZES = ((256, 4), (1024, 4))
RANK, SYNCS = 16, 5


def save_model(folder: Path, tokenizer: Any, hidden: int, layers: int) -> str:
    """Saves a Llama with random weights, and returns its path."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers, num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64, vocab_size=len(tokenizer), bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(5)  # a random model is almost uniform
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def measure(folders: engines.Folders, model: str, precision: str, way: str) -> dict[str, Any]:
    """Trains with one way to send adapters, and sends them a few times more.

    Args:
        folders: The tiny models.
        model: Path of the model.
        precision: `"bf16"`, `"fp16"` or `"fp32"`.
        way: The value of `adapter_sync`.

    Returns:
        Bytes and seconds of one sync, and the mismatch in nats.
    """
    cell = Cell("text", "grpo", precision, FLAGS[precision])
    adapter = LoraConfig(r=RANK, target_modules="all-linear", lora_alpha=RANK)
    trainer = engines.build(
        folders, cell, config=SafeGRPOConfig, model=model, peft_config=adapter, adapter_sync=way,
        max_completion_length=64,
    )  # fmt: skip
    factors = [p for name, p in trainer.model.named_parameters() if "lora_" in name]
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.02)
    trainer.train()
    log = [entry[f"{METRIC}/mean"] for entry in trainer.state.log_history if "loss" in entry]
    sent = count_bytes(trainer.vllm_generation.llm)
    seconds = []
    for _ in range(SYNCS):
        with torch.no_grad():
            for factor in factors:
                factor += 1e-4
        started = time.perf_counter()
        trainer.vllm_generation.sync_weights()
        seconds.append(time.perf_counter() - started)
    return {"bytes": sum(sent) // SYNCS, "seconds": statistics.median(seconds), "mismatch": sum(log) / len(log)}


def count_bytes(llm: Any) -> list[int]:
    """Returns a list to which the bytes of each weight and of each adapter that the engine loads are appended."""
    sent: list[int] = []
    engine = llm.llm_engine
    model = engine.model_executor.driver_worker.model_runner.model
    load, add = model.load_weights, engine.add_lora

    def load_weights(weights: Any) -> Any:
        weights = list(weights)
        sent.extend(tensor.nbytes for _, tensor in weights)
        return load(weights)

    def add_lora(request: Any) -> Any:
        sent.append((Path(request.lora_path) / "adapter_model.safetensors").stat().st_size)
        return add(request)

    model.load_weights, engine.add_lora = load_weights, add_lora
    return sent


def main() -> int:
    """Measures every size and precision, and writes the results."""
    os.environ["MASTER_PORT"] = str(engines.free_port())
    rows = []
    with tempfile.TemporaryDirectory() as root:
        folders = engines.Folders(Path(root))
        tokenizer = AutoTokenizer.from_pretrained(folders["text"])
        for hidden, layers in SIZES:
            model = save_model(Path(root) / f"llama-{hidden}", tokenizer, hidden, layers)
            for precision in FLAGS:
                for way in ("merged", "native"):
                    row = {"hidden": hidden, "layers": layers, "precision": precision, "adapter_sync": way}
                    rows.append(row | measure(folders, model, precision, way))
                    print(rows[-1], file=sys.stderr)
        engines.end_engines()
    write_results("adapter_sync", rows, rank=RANK)
    return 0


if __name__ == "__main__":
    sys.exit(main())
