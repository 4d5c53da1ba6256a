"""The experts of a fresh vLLM are those that the same model chooses here, and losses use what an engine returns.

vLLM's CPU kernels pack the weights of experts when an engine is built, and compute with the packed ones after weights
were loaded again: these engines get no weights. vLLM returns experts only with Triton, which has no build for CPUs.
Here they are read where vLLM itself captures them, one request at a time, and put where it returns them.
"""

import engines
import moe_models
import numpy as np
import pytest
import torch
import trl
from datasets import Dataset
from policing import reset_accelerate
from transformers import AutoModelForCausalLM

from safe_trainers import PrecisionError, SafeGRPOConfig, SafeGRPOTrainer, tiny
from safe_trainers.experts import from_vllm
from safe_trainers.experts.routes import ROUTES_KEY, ExpertRoutes
from safe_trainers.experts.tape import Recorder, Tape
from safe_trainers.model.routers import find_routers
from safe_trainers.rollout.vllm import model_of


REWARD = {"reward_funcs": lambda completion_ids, **_: [float(sum(ids) % 7) for ids in completion_ids]}


@pytest.fixture
def folder(tmp_path):
    if not from_vllm.returns_experts():
        pytest.skip("this vLLM does not return experts")
    tokenizer = tiny.build_tokenizer("text")
    model = moe_models.moe(
        "qwen3_moe", vocab_size=len(tokenizer), hidden_size=64, head_dim=32, num_local_experts=16,
        num_experts_per_tok=4,
        num_hidden_layers=3, moe_intermediate_size=32, max_position_embeddings=256, mlp_only_layers=[1],
        pad_token_id=tokenizer.pad_token_id, bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def prompts():
    tokenizer = tiny.build_tokenizer("text")
    ids = [[(7 * row + 3 * place) % (len(tokenizer) - 8) + 4 for place in range(3 + row % 4)] for row in range(8)]
    return Dataset.from_dict({"prompt": [tokenizer.decode(row) for row in ids]})


def trainer_of(folder, safe=True, **changes):
    reset_accelerate()
    settings = {
        "output_dir": str(folder.parent / "out"), "use_cpu": True, "bf16": False, "per_device_train_batch_size": 8,
        "num_generations": 2, "max_steps": 1, "report_to": [], "save_strategy": "no", "disable_tqdm": True,
        "model_init_kwargs": {"dtype": "float32"}, "logging_steps": 1, **engines.VLLM, **changes,
    }  # fmt: skip
    config, made = (SafeGRPOConfig, SafeGRPOTrainer) if safe else (trl.GRPOConfig, trl.GRPOTrainer)
    trainer = made(str(folder), args=config(**settings), train_dataset=prompts(), **REWARD)
    trainer._last_loaded_step = 0  # the engine has these weights already
    return trainer


@pytest.fixture
def capturing(monkeypatch):
    """Engines return what vLLM's routers pass to the place where it captures them."""
    if from_vllm._has_runner():
        return
    monkeypatch.setattr(from_vllm, "_has_runner", lambda: True)
    monkeypatch.setattr(
        from_vllm,
        "engine_kwargs",
        lambda arguments: {**arguments, "enable_prefix_caching": False, "enforce_eager": True},
    )
    build = from_vllm.EngineRoutes.__init__

    def init(self, llm, routers):
        seen = {}
        for module in model_of(llm).modules():
            router = getattr(module, "router", None)
            if hasattr(router, "set_capture_fn"):
                router.set_capture_fn(lambda ids, n=module.layer_id: seen.setdefault(n, []).append(ids.clone()))
        original = llm.generate

        def generate(prompts, *args, **kwargs):
            outputs = []
            for prompt in prompts:
                seen.clear()
                outputs += original([prompt], *args, **kwargs)
                chosen = {number: torch.cat(parts) for number, parts in seen.items()}
                first = next(iter(chosen.values()))
                routes = np.zeros((len(first), 3, first.shape[1]), np.uint8)  # (S, layers, k), as vLLM has it
                for number, ids in chosen.items():
                    routes[:, number] = ids.numpy()
                outputs[-1].outputs[0].routed_experts = routes
            return outputs

        llm.generate = generate
        build(self, llm, routers)

    monkeypatch.setattr(from_vllm.EngineRoutes, "__init__", init)


def kept_batches(trainer):
    batches = []
    original = trainer._generate_and_score_completions

    def keep(*args):
        batches.append(original(*args))
        return batches[-1]

    trainer._generate_and_score_completions = keep
    return batches


def test_the_experts_of_a_fresh_engine_are_those_that_a_hook_sees_here(folder, capturing):
    trainer = trainer_of(folder, router_replay="rollout")
    routers = trainer.precision[ExpertRoutes].routers
    assert [router.name for router in routers.found] == [f"model.layers.{n}.mlp.gate" for n in (0, 2)]
    batches = kept_batches(trainer)
    trainer.train()
    batch = batches[0]
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    model = AutoModelForCausalLM.from_pretrained(folder)
    recorder = Recorder(routers, len(ids))
    tape = Tape(model, find_routers(model))
    tape.follow(recorder)
    with torch.no_grad():
        model(input_ids=ids, attention_mask=mask, use_cache=False)
    own, record = recorder.finish(), batch[ROUTES_KEY]
    computed = mask.bool()
    computed[torch.arange(len(ids)), ids.shape[1] - 1 - mask.flip(1).argmax(1)] = False  # the last token
    assert computed.sum() > 60
    for columns in (slice(0, 4), slice(4, 8)):
        assert torch.equal(own[..., columns].sort(-1)[0][computed], record[..., columns].sort(-1)[0][computed])
    log = trainer.state.log_history[0]
    assert log["precision/router_flip_frac"] == 0
    assert log["precision/logp_mismatch_max"] < 1e-4


def test_losses_use_what_the_engine_returns(folder, capturing):
    """Experts that the engine did not choose, in its place, change the log-probabilities."""
    means = []
    for wrong in (False, True):
        trainer = trainer_of(folder, router_replay="rollout", seed=1)
        engine = trainer.precision[ExpertRoutes]._engine
        record = engine.record

        def other(*args, record=record, wrong=wrong):
            found = record(*args)
            return torch.where(found < 16, (found + 5) % 16, found) if wrong else found

        engine.record = other
        trainer.train()
        means.append(trainer.state.log_history[0]["precision/logp_mismatch_mean"])
        engines.end_engines()
    assert means[0] < 1e-4 < 1e-2 < means[1]


def test_stock_asks_for_no_experts_and_neither_does_a_run_without_replay(folder):
    for safe in (False, True):
        trainer = trainer_of(folder, safe)
        config = trainer.vllm_generation.llm.llm_engine.vllm_config
        assert not getattr(config, "aux_output_config", config.model_config).enable_return_routed_experts
        engines.end_engines()


def test_a_server_is_refused(folder):
    with pytest.raises(PrecisionError, match="does not pass them on"):
        trainer_of(folder, router_replay="rollout", vllm_mode="server")


def test_an_engine_that_cannot_return_them_is_refused(folder):
    if from_vllm._has_runner():
        pytest.skip("this engine returns them")
    with pytest.raises(PrecisionError, match="only with Triton"):
        trainer_of(folder, router_replay="rollout")
