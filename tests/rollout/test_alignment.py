"""What rollouts compute in, and that generation leaves the trainer's weights alone."""

import contextlib
import copy
import shutil
import sys
import warnings

import cells
import pytest
import torch
import transformers
import trl
import vllm_stand_in
from cells import Cell
from peft import LoraConfig, get_peft_model
from policing import reset_accelerate
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM
from transformers.training_args import ParallelMode
from two_processes import run_in_two_processes

from safe_trainers import PrecisionBase, PrecisionError, PrecisionMixin, PrecisionWarning, SafeGRPOConfig
from safe_trainers.core.device import Device
from safe_trainers.rollout import alignment
from safe_trainers.rollout import vllm as engine
from safe_trainers.rollout.alignment import RolloutAlignment, undo_casts
from safe_trainers.testing import fp16_on_cpu
from upstream import needs_continuous_autocast, needs_continuous_settings


SMALL = {"num_blocks": 32, "max_batch_tokens": 64}
CONTINUOUS = {"use_transformers_continuous_batching": True, "transformers_continuous_batching_config": SMALL}


def build(cell, safe=True, trainer_class=None, **changes):
    made = cells.arguments(cell, cells.PLAIN[cell.task], **changes)
    return (trainer_class or (cells.SAFE if safe else cells.STOCK)[cell.task])(**made)


# --- continuous batching ---------------------------------------------------------------------------------------------


def snapshot(trainer):
    """Every number that training goes on with, and where it is."""
    state = {
        f"{index}.{name}": value
        for index, group in enumerate(trainer.optimizer.state.values())
        for name, value in group.items()
    } if trainer.optimizer is not None else {}  # fmt: skip
    own = dict(trainer.model.named_parameters()) | dict(trainer.model.named_buffers()) | state
    grads = {f"{name}.grad": p.grad for name, p in trainer.model.named_parameters() if p.grad is not None}
    return {name: (t.data_ptr(), t.dtype, t.detach().clone()) for name, t in (own | grads).items()}


def assert_same(before, after):
    assert before.keys() == after.keys()
    for name, (place, dtype, value) in before.items():
        assert (after[name][0], after[name][1]) == (place, dtype), name
        assert torch.equal(after[name][2], value), name


def half_copy(trainer, cell):
    """A model of its own with the trainer's weights, in half precision."""
    model = AutoModelForCausalLM.from_pretrained(cells.folder(cell.family))
    if cell.lora:
        model = get_peft_model(model, trainer.model.peft_config["default"])
    model.load_state_dict(trainer.model.state_dict())
    for parameter in model.parameters():  # and not the rotary frequencies, as in a model that is loaded in half
        parameter.data = parameter.data.to(cells.SHORT[cell.flag])
    return model


@needs_continuous_settings
@pytest.mark.parametrize("cell", [
    pytest.param(Cell("text", "grpo", "fp32", "bf16"), marks=needs_continuous_autocast),
    Cell("text", "grpo", "fp32", "bf16", lora=True),
    Cell("text", "rloo", "bf16", "bf16", lora=True),
], ids=str)  # fmt: skip
def test_continuous_batching_leaves_masters_and_optimizer_alone(cell):
    seen = []

    class Watching(cells.SAFE[cell.task]):
        def _generate_single_turn(self, prompt_ids, *args, **kwargs):
            before = snapshot(self)
            result = super()._generate_single_turn(prompt_ids, *args, **kwargs)
            assert_same(before, snapshot(self))
            expected = half_copy(self, cell).generate_batch(
                prompt_ids,
                generation_config=self.generation_config,
                continuous_batching_config=self.continuous_batching_config,
            )
            tokens = result[0] if isinstance(result, tuple) else result
            assert [list(ids) for ids in tokens] == [output.generated_tokens for output in expected.values()]
            assert not self.generation_config.do_sample
            seen.append({dtype for _, dtype, _ in before.values() if dtype.is_floating_point})
            return result

    greedy = {"generation_kwargs": {"do_sample": False}}
    if cell.task == "grpo":  # alike completions have no advantage, and the entropy moves the weights all the same
        greedy["entropy_coef"] = 0.1
    trainer = build(cell, trainer_class=Watching, steps=3, **CONTINUOUS, **greedy)
    start = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    trainer.train()
    assert len(seen) == 3
    if cell.weights == "fp32":
        assert seen == [{torch.float32}] * 3
        moments = [s["exp_avg"] for s in trainer.optimizer.state.values()]
        assert {m.dtype for m in moments} == {torch.float32}
        assert any(m.abs().max() > 0 for m in moments)
        assert any(not torch.equal(p, start[n]) for n, p in trainer.model.named_parameters() if n in start)
    coverage = trainer.precision.coverage["rollout"]
    assert (coverage.state, trainer.precision.coverage.fired["rollout"]) == ("covered", 3)
    assert "half-precision copy" in coverage.detail


TWO = """
import os, sys
import test_alignment as here

rank, safe = int(os.environ["RANK"]), sys.argv[2] == "safe"
here.cells.token_reward = lambda completion_ids, **_: [float(sum(ids) % 7) for ids in completion_ids]
cell = here.Cell("text", "grpo", "fp32", "bf16")
trainer = here.build(cell, safe=safe, steps=2, per_device_train_batch_size=4, learning_rate=1e-3, **here.CONTINUOUS)
assert trainer.accelerator.num_processes == 2
trainer.train()
open(f"{sys.argv[1]}/{rank}.txt", "w").write(here.cells.fingerprint(trainer.model))
"""


@pytest.mark.slow
@needs_continuous_settings
@needs_continuous_autocast
@pytest.mark.parametrize("trainer", ["stock", "safe"])
def test_two_processes_train_one_model_after_continuous_batching(trainer, tmp_path):
    """TRL's cast removes the hooks with which DDP averages gradients."""
    run_in_two_processes(TWO, tmp_path, trainer, beside=__file__)
    first, second = ((tmp_path / f"{rank}.txt").read_text() for rank in (0, 1))
    assert (first == second) is (trainer == "safe")


@needs_continuous_settings
@needs_continuous_autocast
def test_stock_trains_on_in_half():
    stock = build(Cell("text", "grpo", "fp32", "bf16"), safe=False, **CONTINUOUS)
    stock.train()
    assert {p.dtype for p in stock.model.parameters()} == {torch.bfloat16}  # silently


@needs_continuous_settings
@needs_continuous_autocast
def test_masters_are_kept_where_rollouts_compute_as_upstreams_do():
    made = cells.arguments(
        Cell("text", "grpo", "fp32", "bf16"), SafeGRPOConfig, rollout_compute="stock", **CONTINUOUS
    )  # fmt: skip
    trainer = cells.SAFE["grpo"](**made)
    trainer.train()
    assert trainer.precision.coverage["rollout"].state == "not covered"
    moments = [state["exp_avg"] for state in trainer.optimizer.state.values()]
    assert {tensor.dtype for tensor in (*trainer.model.parameters(), *moments)} == {torch.float32}


@needs_continuous_settings
@needs_continuous_autocast
@pytest.mark.parametrize("name", ["model.layers.0.mlp", "lm_head"])
def test_fp32_modules_compute_in_float32_in_continuous_batching(name):
    made = cells.arguments(
        Cell("text", "grpo", "fp32", "bf16"), SafeGRPOConfig, fp32_modules=[name], **CONTINUOUS
    )  # fmt: skip
    seen, generating = {"inside": set(), "outside": set()}, []

    class Watching(cells.SAFE["grpo"]):
        def _generate_single_turn(self, *args, **kwargs):
            generating.append(True)
            try:
                return super()._generate_single_turn(*args, **kwargs)
            finally:
                generating.pop()

    def watch(where, layer):
        def look(module, inputs, output):
            if generating:
                seen[where].add(output.dtype)

        layer.register_forward_hook(look)

    trainer = Watching(**made)
    module = trainer.model.get_submodule(name)
    watch("inside", getattr(module, "up_proj", module))
    watch("outside", trainer.model.model.layers[0].self_attn.q_proj)
    trainer.train()
    assert seen == {"inside": {torch.float32}, "outside": {torch.bfloat16}}
    assert "_apply" not in vars(module)
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}


def test_hooks_of_gradient_accumulators_fire_after_a_cast():
    """DDP averages gradients in such hooks. TRL's cast alone removes them, and each process trains its own model."""
    model = AutoModelForCausalLM.from_pretrained(cells.folder("text"))

    def fired(model, context):
        names, accumulators = set(), []
        for name, parameter in model.named_parameters():
            (accumulator, _), *_ = parameter.expand_as(parameter).grad_fn.next_functions  # as torch's reducer finds it
            accumulator.register_hook(lambda *_, name=name: names.add(name))
            accumulators.append(accumulator)
        originals = [parameter.data for parameter in model.parameters()]
        with context(model):
            model.to(torch.bfloat16)
        for parameter, data in zip(model.parameters(), originals, strict=True):
            assert context is undo_casts or parameter.dtype == torch.bfloat16
            parameter.data = data
        model(input_ids=torch.arange(6)[None], labels=torch.arange(6)[None]).loss.backward()
        return names

    assert fired(copy.deepcopy(model), contextlib.nullcontext) == set()
    assert fired(model, undo_casts) == {name for name, _ in model.named_parameters()}


def test_tied_weights_are_one_parameter_during_a_cast_and_after_it():
    model = AutoModelForCausalLM.from_pretrained(cells.folder("text"))
    tied, embedding = model.lm_head.weight, model.get_input_embeddings()
    embedding.weight = tied
    with undo_casts(model):
        model.to(torch.bfloat16)
        assert embedding.weight is model.lm_head.weight is not tied
        assert embedding.weight.dtype == torch.bfloat16
    assert embedding.weight is model.lm_head.weight is tied
    assert tied.dtype == torch.float32


def test_gradients_that_are_being_accumulated_are_kept_too():
    """TRL's cast would take them along, in the middle of an optimizer step."""
    model = AutoModelForCausalLM.from_pretrained(cells.folder("text"))
    model(input_ids=torch.arange(6)[None], labels=torch.arange(6)[None]).loss.backward()
    before = {n: (p.data_ptr(), p.grad.data_ptr(), p.grad.clone()) for n, p in model.named_parameters()}
    buffers = {name: buffer for name, buffer in model.named_buffers()}
    with undo_casts(model):
        model.to(torch.bfloat16)
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    for name, parameter in model.named_parameters():
        place, grad_place, grad = before[name]
        assert (parameter.data_ptr(), parameter.grad.data_ptr()) == (place, grad_place)
        assert torch.equal(parameter.grad, grad)
    assert buffers
    assert all(buffer is buffers[name] for name, buffer in model.named_buffers())


def test_weights_come_back_when_generation_fails():
    model = AutoModelForCausalLM.from_pretrained(cells.folder("text"))

    def fail():
        with undo_casts(model):
            model.to(torch.float16)
            raise RuntimeError("the thread died")

    with pytest.raises(RuntimeError, match="the thread died"):
        fail()
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
def test_a_cast_model_computes_as_one_that_was_loaded_in_half(half):
    """With rotary frequencies in half, as a plain cast leaves them, late tokens are in other places."""

    def logps(model, autocast=False):
        with torch.no_grad(), torch.autocast("cpu", half, enabled=autocast):
            scores = model(input_ids=ids).logits.float().log_softmax(-1)
        return scores[:, :-1].gather(-1, ids[:, 1:, None])

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=64, max_position_embeddings=1024,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if "_proj" in name and "attn" in name:  # attention that looks somewhere, as a trained one
            parameter.data *= 20 if name.split(".")[-2] in ("q_proj", "k_proj") else 5
    ids = torch.randint(64, (1, 1024))
    trained, cast = logps(model, autocast=True), copy.deepcopy(model).to(half)
    with undo_casts(model):
        model.to(half)
        assert {p.dtype for p in model.parameters()} == {half}
        assert {b.dtype for b in model.buffers()} == {torch.float32}
        mine = logps(model)
    assert not any("_apply" in vars(module) for module in model.modules())
    late = [(other - trained)[:, -256:].abs().mean().item() for other in (mine, logps(cast))]
    assert 2 * late[0] < late[1]


def test_one_half_copy_is_alive_meanwhile():
    model = AutoModelForCausalLM.from_pretrained(cells.folder("text"))
    full = sum(p.nbytes for p in model.parameters())
    with undo_casts(model):
        model.to(torch.bfloat16)
        assert sum(p.nbytes for p in model.parameters()) * 2 == full


@pytest.mark.parametrize(
    ("storage", "refused"), [(torch.float32, True), (torch.bfloat16, False), (torch.uint8, False)]
)
def test_packed_bytes_that_the_cast_would_take_for_numbers_are_refused(storage, refused):
    pytest.importorskip("bitsandbytes")
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_storage=storage)
    model = AutoModelForCausalLM.from_pretrained(cells.folder("text"), quantization_config=config)
    packed = model.model.layers[0].mlp.up_proj.weight
    before, dtype = packed.data.clone().view(torch.uint8), packed.dtype
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    with undo_casts(adapted):
        adapted.to(torch.bfloat16)
        assert (packed.dtype != dtype) == refused
    assert torch.equal(packed.data.view(torch.uint8), before)
    made = cells.arguments(Cell("text", "grpo", "bf16", "bf16"), cells.PLAIN["grpo"], model_init_kwargs=None)
    made["args"].use_transformers_continuous_batching = True
    if refused:
        with pytest.raises(PrecisionError, match="continuous-batching-casts-packed-weights") as caught:
            cells.SAFE["grpo"](**{**made, "model": adapted})
        assert "stored as float32" in str(caught.value)
    else:
        cells.SAFE["grpo"](**{**made, "model": adapted})


# --- what training computes in is looked at --------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["grpo", "rloo"])
@pytest.mark.parametrize(("flag", "seen"), [("bf16", torch.bfloat16), (None, torch.float32)])
def test_the_installed_trl_scores_in_what_the_policy_says(task, flag, seen):
    trainer = build(Cell("text", task, "fp32", flag, lora=True), steps=1)
    assert trainer.precision[RolloutAlignment].scored_in is None
    trainer.train()
    assert trainer.precision[RolloutAlignment].scored_in == seen
    assert not any(module._forward_pre_hooks for module in trainer.model.modules())


def test_rollouts_follow_a_trainer_that_scores_outside_autocast():
    autocast = []

    class Outside(trl.GRPOTrainer):
        def _get_per_token_logps_and_entropies(self, *args, **kwargs):
            forward = self.model.forward
            self.model.forward = self.model._original_forward
            try:
                with torch.autocast("cpu", enabled=False):
                    self.accelerator.native_amp, native = False, self.accelerator.native_amp
                    return super()._get_per_token_logps_and_entropies(*args, **kwargs)
            finally:
                self.model.forward = forward
                self.accelerator.native_amp = native

        def _generate_single_turn(self, *args, **kwargs):
            autocast.append(torch.is_autocast_enabled("cpu"))
            return super()._generate_single_turn(*args, **kwargs)

    class SafeOutside(PrecisionMixin, Outside, PrecisionBase):
        pass

    trainer = build(Cell("text", "grpo", "fp32", "bf16"), trainer_class=SafeOutside, steps=3)
    trainer.train()
    assert trainer.precision[RolloutAlignment].scored_in == torch.float32
    assert autocast == [True, False, False]  # what the first one computes in is the policy's word


def test_nothing_is_hooked_into_a_compiled_model():
    trainer = build(Cell("text", "grpo", "fp32", "bf16"), steps=1)
    trainer.args.torch_compile = True
    trainer.train()
    assert trainer.precision[RolloutAlignment].scored_in is None


# --- vLLM: what an engine is told, and what a server is asked --------------------------------------------------------


@pytest.fixture
def vllm(monkeypatch):
    return vllm_stand_in.install(monkeypatch)


@pytest.fixture
def server(vllm, monkeypatch):
    """A stand-in for a server, whose settings a test may change."""
    for name, value in {
        "model": str(cells.folder("text")),
        "dtype": "auto",
        "quantization": None,
        "cache_dtype": "auto",
        "answer": {},
    }.items():
        monkeypatch.setattr(vllm_stand_in.StandInClient, name, value)
    return vllm_stand_in.StandInClient


def with_vllm(monkeypatch, cell, safe=True, trainer_class=None, **changes):
    vllm_stand_in.forget_process(monkeypatch)
    reset_accelerate()
    trainer_class = trainer_class or (cells.SAFE if safe else cells.STOCK)[cell.task]
    changes = {"use_vllm": True, "vllm_mode": "colocate", **changes}
    return build(cell, trainer_class=fp16_on_cpu(trainer_class), **changes)


@pytest.mark.parametrize(("cell", "dtype"), [
    (Cell("text", "grpo", "fp32", "fp16"), torch.float16),
    (Cell("text", "grpo", "fp32", "bf16"), torch.bfloat16),
    (Cell("text", "grpo", "fp32", None), torch.float32),
    (Cell("text", "grpo", "fp16", None, lora=True), torch.float16),
    (Cell("text", "rloo", "fp32", "fp16", lora=True), torch.float16),
], ids=str)  # fmt: skip
def test_an_engine_computes_in_what_the_trainer_does(cell, dtype, vllm, monkeypatch):
    trainer = with_vllm(monkeypatch, cell)
    (own,) = vllm.ENGINES
    assert own.dtype == dtype
    assert own.arguments["dtype"] == trainer.precision.sampler_dtype
    trainer.train()
    assert (trainer.precision.coverage["rollout"].state, trainer.precision.coverage.fired["rollout"]) == ("covered", 2)


def test_the_capture_of_engines_is_undone(vllm, monkeypatch):
    def captured():
        return sys.modules["trl.generation.vllm_generation"].LLM

    with_vllm(monkeypatch, Cell("text", "grpo", "fp32", "bf16"))
    assert captured() is vllm.LLM

    def fail(*args, **kwargs):
        raise RuntimeError("no memory left")

    monkeypatch.setattr(vllm.LLM, "__init__", fail)
    with pytest.raises(RuntimeError, match="no memory left"):
        with_vllm(monkeypatch, Cell("text", "grpo", "fp32", "bf16"))
    assert captured() is vllm.LLM


def test_in_stock_fp16_is_the_trainers_alone(vllm, monkeypatch):
    """TRL passes no dtype, and an engine takes the checkpoint's: the mismatch is that of bfloat16."""
    mismatch = {}
    for safe in (False, True):
        torch.manual_seed(0)
        trainer = with_vllm(monkeypatch, Cell("text", "grpo", "fp32", "fp16"), safe, max_completion_length=16)
        trainer.train()
        logged = [e.get("sampling/sampling_logp_difference/mean") for e in trainer.state.log_history]
        mismatch[safe] = sum(v for v in logged if v is not None) / len([v for v in logged if v is not None])
    assert [own.dtype for own in vllm.ENGINES] == [torch.bfloat16, torch.float16]
    assert mismatch[False] > 5 * mismatch[True]


def test_what_is_asked_for_is_upstreams(vllm, monkeypatch):
    made = cells.arguments(
        Cell("text", "grpo", "fp32", "bf16", lora=True), SafeGRPOConfig, use_vllm=True, vllm_mode="colocate",
        rollout_compute="stock",
    )  # fmt: skip
    with pytest.warns(PrecisionWarning, match="rollout-not-aligned"):
        trainer = cells.SAFE["grpo"](**made)
    (own,) = vllm.ENGINES
    assert own.arguments["dtype"] == "auto"
    assert trainer.precision.coverage["rollout"].state == "not covered"
    trainer.vllm_generation.sync_weights()  # nothing is merged in the base all the same
    assert {tensor.dtype for tensor in own.loaded.values()} == {torch.float32}


@pytest.mark.parametrize("kind", sorted(engine.FLOAT16_REFUSED))
def test_models_that_vllm_refuses_in_float16_are_refused_before_an_engine_is_built(kind, vllm, monkeypatch):
    model = AutoModelForCausalLM.from_pretrained(cells.folder("text"), dtype=torch.float16)
    model.config.model_type = kind
    with pytest.raises(PrecisionError, match="vllm-refuses-fp16") as caught:
        with_given(monkeypatch, model, fp16=True)
    assert f"a {kind} model" in str(caught.value)
    assert "`precision='bf16'`" in str(caught.value)
    assert vllm.ENGINES == []
    trainer = with_given(monkeypatch, model.to(torch.bfloat16), bf16=True)
    assert vllm.ENGINES[0].dtype == torch.bfloat16
    assert trainer.precision.sampler_dtype == "bfloat16"


def with_given(monkeypatch, model, safe=True, peft_config=None, **changes):
    vllm_stand_in.forget_process(monkeypatch)
    reset_accelerate()
    settings = {"model_init_kwargs": None, "use_vllm": True, "vllm_mode": "colocate", **changes}
    made = cells.arguments(Cell("text", "grpo", "fp32", None), cells.PLAIN["grpo"], **settings)
    trainer_class = fp16_on_cpu((cells.SAFE if safe else cells.STOCK)["grpo"])
    return trainer_class(**{**made, "model": model, "peft_config": peft_config})


def test_a_server_in_another_dtype_is_refused_with_the_line_to_start_it_with(server, monkeypatch):
    cell = Cell("text", "grpo", "fp32", "fp16")
    with pytest.raises(PrecisionError, match="vllm-server-computes-otherwise") as caught:
        with_vllm(monkeypatch, cell, vllm_mode="server")
    assert "a vLLM server that computes in bfloat16" in str(caught.value)
    assert "start the server with `--dtype float16`" in str(caught.value)
    server.dtype = "float16"  # the advice
    trainer = with_vllm(monkeypatch, cell, vllm_mode="server")
    trainer.train()
    assert "server's dtype is compared" in str(trainer.precision.coverage)


def test_a_server_with_packed_weights_is_refused(server, monkeypatch):
    server.quantization = "bitsandbytes"
    with pytest.raises(PrecisionError, match="vllm-holds-packed-weights") as caught:
        with_vllm(monkeypatch, Cell("text", "grpo", "fp32", "bf16", lora=True), vllm_mode="server")
    assert "without `--quantization`" in str(caught.value)


@pytest.mark.parametrize("quantization", ["fp8", "awq"])
def test_a_server_with_other_quantised_weights_is_refused(server, monkeypatch, quantization):
    server.quantization = quantization
    with pytest.raises(PrecisionError, match=f"weights quantised by {quantization}"):
        with_vllm(monkeypatch, Cell("text", "grpo", "fp32", "bf16"), vllm_mode="server")


def test_a_server_with_a_quantised_cache_is_refused_with_the_line_to_start_it_with(server, monkeypatch):
    server.dtype, server.cache_dtype = "bfloat16", "fp8"
    with pytest.raises(PrecisionError, match="vllm-quantises-its-cache") as caught:
        with_vllm(monkeypatch, Cell("text", "grpo", "fp32", "bf16"), vllm_mode="server")
    assert "`--kv-cache-dtype auto`" in str(caught.value)
    server.cache_dtype = "auto"  # the advice
    with_vllm(monkeypatch, Cell("text", "grpo", "fp32", "bf16"), vllm_mode="server").train()


def test_a_server_that_cannot_be_asked_is_said(server, monkeypatch):
    """As in TRL before 1.10, whose client has no way."""
    server.answer = {"dtype": None}
    with pytest.warns(PrecisionWarning, match="start the server with `--dtype float16`"):
        with_vllm(monkeypatch, Cell("text", "grpo", "fp32", "fp16"), vllm_mode="server")


def test_a_process_without_the_servers_client_does_not_ask_about_the_float32_head(server, monkeypatch):
    """TRL gives the client of a server to the main process only."""
    server.dtype = "bfloat16"
    cell = Cell("text", "grpo", "fp32", "bf16")
    with pytest.warns(PrecisionWarning, match="sampler-without-float32-head"):
        trainer = with_vllm(monkeypatch, cell, vllm_mode="server", cast_lm_head_to_fp32=True)
    del trainer.vllm_generation.vllm_client
    with warnings.catch_warnings():
        warnings.simplefilter("error", PrecisionWarning)
        trainer._run.feature(RolloutAlignment).ready()


def test_weights_sent_to_a_server_are_announced_as_they_are(server, monkeypatch):
    server.dtype = "float16"
    trainer = with_vllm(monkeypatch, Cell("text", "grpo", "fp32", "fp16", lora=True), vllm_mode="server")
    for _ in range(2):
        trainer.vllm_generation.sync_weights()
    assert {dtype for _, dtype in trainer.vllm_generation.vllm_client.received} == {"torch.float16"}


def test_a_checkpoint_that_is_packed_already_is_refused(vllm, monkeypatch, tmp_path):
    pytest.importorskip("bitsandbytes")
    config = BitsAndBytesConfig(load_in_4bit=True)
    shutil.copytree(cells.folder("text"), tmp_path, dirs_exist_ok=True)  # its tokenizer
    AutoModelForCausalLM.from_pretrained(cells.folder("text"), quantization_config=config).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(PrecisionError, match="vllm-holds-packed-weights") as caught:
        with_given(monkeypatch, model, peft_config=LoraConfig(target_modules=["q_proj"]))
    assert "the unquantised checkpoint" in str(caught.value)
    assert vllm.ENGINES == []


A100, H100 = (Device("cuda", capability=c) for c in ((8, 0), (9, 0)))


@pytest.mark.parametrize(
    ("device", "version", "wrong"),
    [(A100, "0.10.2", True), (A100, "0.11.0", False), (A100, "0.22.0+cu129", False), (H100, "0.10.2", False),
     (A100, None, False), (Device("cpu"), "0.10.2", False)],
)  # fmt: skip
def test_cascade_attention_is_off_where_it_computes_wrongly(device, version, wrong):
    told = engine.engine_kwargs({"model": "m"}, "float16", device, version)
    assert told == {"model": "m", "dtype": "float16"} | ({"disable_cascade_attn": True} if wrong else {})
    # What TRL, or a user of its argument, passes is kept.
    assert engine.engine_kwargs({"dtype": "float32"}, "float16", device, version)["dtype"] == "float32"


def test_cascade_attention_is_said_once(vllm, monkeypatch):
    monkeypatch.setattr(alignment, "installed_version", lambda package: "0.10.2")
    old = type("OnAnA100", (cells.SAFE["grpo"],), {"precision_device": classmethod(lambda cls, args: A100)})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with_vllm(monkeypatch, Cell("text", "grpo", "fp32", None), trainer_class=old).train()
    assert len([w for w in caught if "cascade-attention-off" in str(w.message)]) == 1
    assert vllm.ENGINES[0].arguments["disable_cascade_attn"] is True


def test_cascade_attention_of_a_server_is_not_said_to_be_off(server, monkeypatch):
    monkeypatch.setattr(alignment, "installed_version", lambda package: "0.10.2")
    monkeypatch.setattr(server, "dtype", "float32")
    old = type("OnAnA100", (cells.SAFE["grpo"],), {"precision_device": classmethod(lambda cls, args: A100)})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with_vllm(monkeypatch, Cell("text", "grpo", "fp32", None), trainer_class=old, vllm_mode="server")
    assert not [w for w in caught if "cascade-attention-off" in str(w.message)]


# --- FSDP, which takes several processes: what is decided before, and without, them ----------------------------------


@pytest.mark.parametrize("loaded", ["load_in_4bit", "load_in_8bit"])
def test_packed_weights_under_fsdp_are_refused(loaded, vllm, monkeypatch):
    pytest.importorskip("bitsandbytes")
    config = BitsAndBytesConfig(**{loaded: True})
    model = AutoModelForCausalLM.from_pretrained(cells.folder("text"), quantization_config=config)
    adapter = LoraConfig(target_modules=["q_proj"])
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setattr(transformers.TrainingArguments, "parallel_mode", ParallelMode.DISTRIBUTED)
    with pytest.raises(PrecisionError, match="fsdp-sends-packed-weights") as caught:
        with_given(monkeypatch, model, peft_config=adapter)
    assert f"quantised to {loaded[-4:]}" in str(caught.value)
    assert vllm.ENGINES == []


@pytest.mark.parametrize("weights", ["bf16", "fp32"])
def test_a_base_that_fsdp_lets_drift_is_said(weights, vllm, monkeypatch):
    trainer = with_vllm(monkeypatch, Cell("text", "grpo", weights, "bf16", lora=True))
    trainer.is_fsdp_enabled = True
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.precision[RolloutAlignment]._wrap_sync(trainer.vllm_generation)
    said = [str(w.message) for w in caught if "fsdp-merges-in-place" in str(w.message)]
    assert len(said) == (weights == "bf16")
    assert all(text.startswith("adapters on a bfloat16 base under FSDP") for text in said)


# --- what is said ----------------------------------------------------------------------------------------------------


def said(cell, **changes):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = cells.arguments(cell, cells.PLAIN[cell.task], **changes)
        made["peft_config"].lora_dropout = 0.1
        cells.SAFE[cell.task](**made).train()
    return [str(w.message) for w in caught if "adapter-dropout-in-rollouts" in str(w.message)]


def test_adapter_dropout_is_said_once_where_completions_are_scored():
    cell = Cell("text", "grpo", "fp32", None, lora=True)
    (text,) = said(cell)
    assert text.startswith("lora_dropout=0.1")
    assert "`disable_dropout=True`" in text
    assert said(cell, disable_dropout=True) == []
    assert said(Cell("text", "sft", "fp32", None, lora=True)) == []


def test_fp32_modules_that_the_sampler_does_not_know_are_said(vllm, monkeypatch):
    made = cells.arguments(
        Cell("text", "grpo", "fp32", "bf16"), SafeGRPOConfig, use_vllm=True, vllm_mode="colocate",
        fp32_modules=["layers.0.mlp"],
    )  # fmt: skip
    with pytest.warns(PrecisionWarning, match="computes in bfloat16 throughout"):
        cells.SAFE["grpo"](**made)


@pytest.mark.parametrize("task", ["grpo", "sft"])
def test_rotary_frequencies_in_half_are_said(task):
    """A plain cast takes them along; a reference model, and an engine of vLLM, have them in float32."""

    def said(model):
        reset_accelerate()
        made = cells.arguments(Cell("text", task, "bf16", "bf16"), cells.PLAIN[task], model_init_kwargs=None)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            cells.SAFE[task](**{**made, "model": model})
        return [str(w.message) for w in caught if "rotary-frequencies-in-half" in str(w.message)]

    (text,) = said(AutoModelForCausalLM.from_pretrained(cells.folder("text")).to(torch.bfloat16))
    assert text.startswith("model.rotary_emb.inv_freq in bfloat16")
    assert "`from_pretrained(..., dtype='bfloat16')`" in text
    assert said(AutoModelForCausalLM.from_pretrained(cells.folder("text"), dtype="bfloat16")) == []


# --- the reference model ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["grpo", "rloo"])
def test_a_reference_model_is_held_as_the_policy_is_weight_by_weight(task, tmp_path):
    """TRL loads it by itself: as `model_init_kwargs` say, which the policy that is passed was not."""
    shutil.copytree(cells.folder("text"), tmp_path, dirs_exist_ok=True)
    AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).save_pretrained(tmp_path)
    held, kl = {}, {}
    for safe in (False, True):
        reset_accelerate()
        model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
        made = cells.arguments(Cell("text", task, "fp32", "bf16", beta=0.1), cells.PLAIN[task], steps=1)
        trainer = (cells.SAFE if safe else cells.STOCK)[task](**{**made, "model": model})
        reference = dict(trainer.ref_model.named_parameters())
        held[safe] = {n for n, p in model.named_parameters() if reference[n].dtype != p.dtype}
        trainer.train()
        kl[safe] = next(entry["kl"] for entry in trainer.state.log_history if "kl" in entry)
    assert held[False]
    assert held[True] == set()
    assert kl[True] == 0
    assert kl[False] != 0


def test_a_reference_of_another_class_than_the_policys_is_held_as_it_is():
    """TRL takes the class that the config names, not that of the model that was passed."""

    class Mine(LlamaForCausalLM):
        pass

    model = Mine.from_pretrained(cells.folder("text"), dtype=torch.bfloat16)
    made = cells.arguments(Cell("text", "grpo", "fp32", "bf16", beta=0.1), cells.PLAIN["grpo"], steps=1)
    made["args"] = cells.SAFE_CONFIG["grpo"](
        **cells.settings(Cell("text", "grpo", "fp32", "bf16", beta=0.1), steps=1, fp32_modules=["layers.0.mlp"])
    )
    trainer = cells.SAFE["grpo"](**{**made, "model": model})
    assert type(trainer.ref_model) is LlamaForCausalLM
    for name, parameter in trainer.ref_model.named_parameters():
        assert parameter.dtype == (torch.float32 if "layers.0.mlp" in name else torch.bfloat16)
    # Some releases load a reference in float32, and what stays so was never rounded as the policy's weights were.
    same = all(map(torch.equal, trainer.model.parameters(), trainer.ref_model.parameters()))
    trainer.train()
    kl = next(entry["kl"] for entry in trainer.state.log_history if "kl" in entry)
    assert kl == 0 if same else 0 < kl < 1e-5


def test_a_reference_model_follows_masters_that_were_upcast():
    cell = Cell("text", "grpo", "fp16", "fp16", beta=0.1)
    trainer = build(cell, trainer_class=fp16_on_cpu(cells.SAFE["grpo"]))
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
    assert {p.dtype for p in trainer.ref_model.parameters()} == {torch.float32}
