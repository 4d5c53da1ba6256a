"""While completions are made and scored, 4-bit weights are dequantised once and not for every token."""

from collections import Counter
from functools import partial

import cells
import pytest
import torch
import trl
from cells import Cell
from live_bytes import alive_at_the_loss
from peft import LoraConfig
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import BitsAndBytesConfig

from safe_trainers import SafeGRPOConfig, SafeGRPOTrainer, SafeRLOOConfig, SafeRLOOTrainer
from safe_trainers.model.inventory import bits
from safe_trainers.rollout import kept_casts, kept_weights
from safe_trainers.rollout.kept_casts import KeptCasts
from safe_trainers.rollout.kept_weights import KeptWeights, four_bit_layers, weights_kept
from safe_trainers.testing import fp16_on_cpu


bnb = pytest.importorskip("bitsandbytes")

TRAINERS = {"grpo": (SafeGRPOTrainer, SafeGRPOConfig), "rloo": (SafeRLOOTrainer, SafeRLOOConfig)}
TOKENS = 6
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16}


def build(cell, quantised=None, of=None, **changes):
    trainer, config = TRAINERS[cell.task]
    dtype = {"fp16": "float16", "bf16": "bfloat16", None: "float32"}[cell.flag]
    loading = {"dtype": dtype, "quantization_config": BitsAndBytesConfig(**{**NF4, **(quantised or {})})}
    changes = {"max_completion_length": TOKENS, "generation_kwargs": {"min_new_tokens": TOKENS}, **changes}
    torch.manual_seed(0)
    made = cells.arguments(cell, config, model_init_kwargs=loading, **changes)
    made["peft_config"] = LoraConfig(r=4, target_modules=r".*(?:model|language_model|layers).*\.(q_proj|v_proj)")
    return (of or trainer)(**made)


def trained(*args, **kwargs):
    """The weights, losses and rewards of a run, and its trainer."""
    trainer = build(*args, **kwargs)
    logs = cells.train_logs(trainer)
    numbers = [(log["loss"], log["grad_norm"], log.get("reward")) for log in logs if "grad_norm" in log]
    assert numbers
    return (cells.fingerprint(trainer.model), numbers), trainer.precision[KeptCasts].dequantised


@pytest.mark.parametrize(
    ("cell", "quantised", "changes"),
    [
        (Cell("text", "grpo", "bf16", "bf16", beta=0.1), {}, {}),
        (Cell("text", "grpo", "bf16", "bf16"), {"bnb_4bit_use_double_quant": True}, {}),
        (Cell("text", "grpo", "bf16", "bf16"), {"bnb_4bit_quant_type": "fp4"}, {"precision_metrics": False}),
        (Cell("text", "grpo", "bf16", "bf16"), {"bnb_4bit_quant_storage": torch.bfloat16}, {}),
        (Cell("text", "grpo", "fp32", None), {"bnb_4bit_compute_dtype": torch.float32}, {}),
        (Cell("text", "rloo", "bf16", "bf16", beta=0.1), {}, {}),
        (Cell("llava", "grpo", "bf16", "bf16"), {}, {}),
        (Cell("qwen2_5_vl", "rloo", "bf16", "bf16", beta=0.1), {}, {}),
    ],
)
def test_a_run_has_the_same_bits(cell, quantised, changes):
    changes = {"gradient_accumulation_steps": 2, "num_iterations": 2, **changes}
    on, nbytes = trained(cell, quantised, **changes)
    off, none = trained(cell, quantised, keep_frozen_casts=False, **changes)
    assert nbytes > none == 0
    assert on == off


def test_a_run_in_float16_has_the_same_bits():
    run = partial(
        trained, Cell("text", "grpo", "fp16", "fp16"), of=fp16_on_cpu(SafeGRPOTrainer), loss_scale_init=256.0
    )
    on, nbytes = run()
    assert nbytes > 0
    assert on == run(keep_frozen_casts=False)[0]


class Dequantisations(TorchDispatchMode):
    """Counts how often each 4-bit weight is dequantised; releases of bitsandbytes do it in one of two operations."""

    def __init__(self, model):
        super().__init__()
        self._names = {m.weight.data_ptr(): name for name, m in model.named_modules() if bits(m) == 4}
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        packed = {"bitsandbytes::dequantize_4bit": 0, "bitsandbytes::gemm_4bit": 1}.get(func.name().partition(".")[0])
        if packed is not None:
            self.counts[self._names[args[packed].data_ptr()]] += 1
        return func(*args, **(kwargs or {}))


def counting(trainer):
    class Counting(trainer):
        def _generate_single_turn(self, *args, **kwargs):
            with Dequantisations(self.model) as found:
                made = super()._generate_single_turn(*args, **kwargs)
            self.counts = [*getattr(self, "counts", []), found.counts]
            return made

    return Counting


def counts(trainer):
    trainer.train()
    return set(trainer.counts[0].values()), trainer


def test_a_weight_is_dequantised_twice_and_not_for_each_token():
    cell = Cell("text", "grpo", "bf16", "bf16")
    stock = cells.arguments(
        cell, trl.GRPOConfig, steps=1, max_completion_length=TOKENS, generation_kwargs={"min_new_tokens": TOKENS},
        model_init_kwargs={"dtype": "bfloat16", "quantization_config": BitsAndBytesConfig(**NF4)},
    )  # fmt: skip
    stock["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    assert counts(counting(trl.GRPOTrainer)(**stock))[0] == {TOKENS}
    of = counting(SafeGRPOTrainer)
    assert counts(build(cell, of=of, steps=1, keep_frozen_casts=False))[0] == {TOKENS}
    found, trainer = counts(build(cell, of=of, steps=1))
    assert found == {2}  # for the prompt, and for all tokens after it
    weights = sum(m.in_features * m.out_features for m in four_bit_layers(trainer.model))
    assert trainer.precision[KeptCasts].dequantised == 2 * weights
    assert not any("forward" in vars(m) for m in trainer.model.modules() if bits(m) == 4)


def test_layers_of_a_tower_compute_once_and_keep_nothing():
    cell = Cell("llava", "grpo", "bf16", "bf16")
    trainer = build(cell, of=counting(SafeGRPOTrainer), steps=3, share_media_features="off")
    trainer.train()
    by_part = {False: set(), True: set()}
    for name, count in trainer.counts[-1].items():  # in the first rollout the tower is also run for its dtype
        by_part["language_model" in name].add(count)
    assert by_part == {False: {1}, True: {2}}


def test_as_many_weights_are_kept_as_the_memory_allows(monkeypatch):
    """The free memory of the machine is replaced by a number."""
    cell = Cell("text", "grpo", "bf16", "bf16")
    layers = four_bit_layers(build(cell).model)
    sizes = [2 * m.in_features * m.out_features for m in layers]
    for limit in (0, min(sizes), sum(sizes) // 2, sum(sizes)):
        trainer = build(cell, of=counting(SafeGRPOTrainer), steps=1)
        with monkeypatch.context() as patched:
            patched.setattr(kept_casts, "spare_memory", lambda device, limit=limit: limit)
            trainer.train()
        kept = trainer.precision[KeptCasts].dequantised
        assert kept <= limit
        assert limit - kept < max(sizes)
        assert sum(count == TOKENS for count in trainer.counts[0].values()) > 0 or limit == sum(sizes)


def test_weights_are_freed_before_the_loss():
    alive = {}
    for keep in (False, True):
        trainer = build(Cell("text", "grpo", "bf16", "bf16"), steps=1, keep_frozen_casts=keep)
        alive[keep] = alive_at_the_loss(trainer)
    kept = trainer.precision[KeptCasts].dequantised
    assert kept > 50_000
    assert abs(alive[True] - alive[False]) < kept / 10


def layer(dtype=torch.bfloat16, **kwargs):
    torch.manual_seed(0)
    made = bnb.nn.Linear4bit(96, 64, compute_dtype=dtype, quant_type="nf4", **kwargs)
    made.load_state_dict({name: torch.randn(p.shape) for name, p in made.state_dict().items() if "." not in name})
    made = made.to("cpu")
    made.weight.quant_state.dtype = dtype  # the layer dequantises to the dtype in which it computes
    return made


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@torch.no_grad()
def test_outputs_are_those_of_the_layer(dtype, bias):
    own = layer(dtype, bias=bias)
    own.compute_type_is_set = True
    own.requires_grad_(False).train()  # a layer that is evaluated is packed in another order
    inputs = [torch.randn(shape, dtype=kind) for shape in ((1, 96), (5, 96), (2, 3, 96), (0, 96))
              for kind in (torch.float32, torch.bfloat16)]  # fmt: skip
    for _ in range(2):  # older releases round the bias to the dtype of each input, in place
        expected = [own(x) for x in inputs]
    with weights_kept([own], 2**20) as kept:
        for _ in range(3):
            for x, y in zip(inputs, expected, strict=True):
                made = own(x)
                assert made.dtype == y.dtype
                assert torch.equal(made, y)
    assert kept.nbytes == 96 * 64 * dtype.itemsize
    assert "forward" not in vars(own)


def test_gradients_need_the_layers_own_pass():
    own = layer().train()
    x = torch.randn(4, 96, dtype=torch.bfloat16, requires_grad=True)
    with weights_kept([own], 2**20) as kept:
        for _ in range(3):
            own(x).sum().backward()
    assert kept.nbytes == 0
    assert x.grad.any()


@pytest.mark.parametrize("change", ["another dtype", "packed for a kernel"])
@torch.no_grad()
def test_other_states_are_left_to_the_layer(change):
    own = layer().train()
    x = torch.randn(4, 96, dtype=torch.bfloat16)
    own(x)
    if change == "another dtype":
        own.weight.quant_state.dtype = torch.float32
    else:
        own.weight.quant_state.packing_format_for_cpu = True
    calls = []
    kept = KeptWeights(2**20)
    for _ in range(3):
        kept.forward(own, calls.append, x)
    assert len(calls) == 3
    assert kept.nbytes == 0


@pytest.mark.parametrize(("rows", "fused", "kept"), [(4, False, True), (1, False, False), (4, True, False)])
def test_on_cuda_layers_with_fused_kernels_keep_nothing(rows, fused, kept, monkeypatch):
    """An input that says it is on a GPU, and the list of bitsandbytes' operations, stand in for CUDA."""

    class OnCuda:
        device = torch.device("cuda")
        shape = torch.Size([rows, 96])

    own = layer()

    class Operations:
        pass

    if fused:
        Operations.gemm_4bit = None
    monkeypatch.setattr(torch.ops, "bitsandbytes", Operations)
    assert kept_weights._dequantises(own, OnCuda()) is kept


def test_a_layer_with_another_forward_pass_is_left_alone():
    model = torch.nn.Sequential(layer(), layer(), torch.nn.Linear(2, 2))
    model[1].forward = lambda x: x
    assert four_bit_layers(model) == [model[0]]


def test_the_report_names_the_bytes():
    trainer = build(Cell("text", "grpo", "bf16", "bf16"), steps=1)
    trainer.train()
    rows = trainer.precision.report.table("changed from stock").rows
    (row,) = (row for row in rows if "4-bit" in str(row[1]))
    assert f"{trainer.precision[KeptCasts].dequantised / 2**20:.1f} MB" in str(row[1])
