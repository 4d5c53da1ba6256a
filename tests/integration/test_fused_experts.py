"""LoRA on models whose weights disagree, fused experts among them: whatever meets, meets in one dtype."""

import copy
import functools
from dataclasses import dataclass
from importlib import import_module

import cells
import pytest
import torch
import transformers
from cells import Cell
from packaging.version import Version
from peft import LoraConfig, get_peft_model
from peft.helpers import disable_input_dtype_casting
from policing import reset_accelerate
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from safe_trainers import tiny
from safe_trainers.boundaries.cast_hooks import guard_fused, guard_leaves
from safe_trainers.core.dtypes import from_torch
from safe_trainers.testing import fp16_on_cpu
from safe_trainers.weights.unify_dtypes import make_computable


pytestmark = pytest.mark.filterwarnings("ignore::safe_trainers.PrecisionWarning")

# In transformers 5 all experts are fused, and have several implementations, of which one casts its input by itself.
FUSES = Version(transformers.__version__) >= Version("5")
EXPERTS = ("eager", "grouped_mm") if FUSES else ("eager",)
GROUPED_CASTS = FUSES and hasattr(import_module("transformers.integrations.moe"), "_grouped_mm")
"""Whether `grouped_mm` brings its input to the dtype of its weights, by a function of that name."""
WIDE = {
    "uniform": (),
    "norms": ("norm",),
    "embeddings": ("embed_tokens",),
    "head": ("lm_head",),
    "experts": ("mlp.experts",),
    "router": ("mlp.router",),
    "biases": ("bias",),
}
"""Which parameters are float32 in a half model."""
ADAPTERS = {
    "attention": {"target_modules": ["q_proj", "v_proj"]},
    "dora": {"target_modules": ["q_proj", "v_proj"], "use_dora": True},
    "experts": {"target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
}
HAS = {
    "text": (("norms", "embeddings", "head"), ("attention", "dora")),
    "gpt_oss": (("norms", "embeddings", "head", "experts", "router", "biases"), ("attention", "dora", "experts")),
    "qwen3_moe": (("norms", "embeddings", "head", "experts"), ("attention", "experts") if FUSES else ("attention",)),
}
"""What can be wide in a family, and what can be adapted."""
TAKES = {
    ("text", "norms"): "boundaries",
    ("text", "embeddings"): "matrices",  # rotary tables follow them, and query and key follow these
    ("text", "head"): "boundaries",
    ("gpt_oss", "norms"): "nothing",  # they cast back by themselves
    ("gpt_oss", "embeddings"): "boundaries",
    ("gpt_oss", "head"): "boundaries",
    ("gpt_oss", "experts"): "boundaries",
    ("gpt_oss", "router"): "boundaries",
    ("gpt_oss", "biases"): "matrices",  # one kernel adds them to a product
    ("qwen3_moe", "norms"): "vectors",  # norms of query and key, and attention takes one dtype
    ("qwen3_moe", "embeddings"): "matrices",
    ("qwen3_moe", "head"): "boundaries",
    ("qwen3_moe", "experts"): "boundaries",
}
"""The least that makes a model of transformers 5 compute without autocast. Under it, and where weights agree, stock
computes."""


@dataclass(frozen=True)
class Case:
    """A half model in which some parameters are float32, with adapters, under autocast or not."""

    family: str
    kind: str
    wide: str
    experts: str
    base: str
    held: str
    autocast: str | None

    def __str__(self) -> str:
        return "-".join(str(getattr(self, field)) for field in self.__dataclass_fields__)

    @property
    def mixed_precision(self) -> bool:
        return self.autocast is not None

    @property
    def takes(self) -> str:
        by_itself = self.wide == "experts" and self.experts == "grouped_mm"
        if self.wide == "uniform" or self.mixed_precision or by_itself:
            return "nothing"
        return TAKES[self.family, self.wide]


TABLE = [
    Case(family, kind, wide, experts, base, held, autocast)
    for family, (wides, kinds) in HAS.items()
    for kind in kinds
    for wide in ("uniform", *wides)
    for experts in (EXPERTS if family != "text" else EXPERTS[:1])
    for base in ("bf16", "fp16")
    for held in ("float32", "base")
    for autocast in (None, "bf16", "fp16")
]


@functools.cache
def original(family):
    if family != "qwen3_moe":
        return tiny.build_model(family)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=400, initializer_range=0.06, **sizes, **experts))


def widen(model, wide):
    for name, parameter in model.named_parameters():
        if any(part in name for part in WIDE[wide]):
            parameter.data = parameter.data.float()
    return model


def adapted(case):
    """The case's model with adapters that change what it computes, in training mode."""
    model = copy.deepcopy(original(case.family))
    if FUSES and case.family != "text":
        model.set_experts_implementation(case.experts)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(cells.SHORT[case.base])
    widen(model, case.wide)
    torch.manual_seed(0)
    config = LoraConfig(r=4, init_lora_weights=False, **ADAPTERS[case.kind])
    return get_peft_model(model, config, autocast_adapter_dtype=case.held == "float32").train()


IDS = torch.randint(8, 300, (2, 12), generator=torch.Generator().manual_seed(0))


def compute_context(case):
    dtype = cells.SHORT[case.autocast or "bf16"]
    return torch.autocast("cpu", dtype, enabled=case.mixed_precision)


def step(model, case):
    """Loss, logits and the gradients of a training step; the error where there is one."""
    model.zero_grad()
    try:
        with compute_context(case):
            output = model(input_ids=IDS, labels=IDS, use_cache=False)
        output.loss.backward()
    except RuntimeError as error:
        cells.reset_autocast()
        return str(error), None, None, {}
    gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    return None, output.loss.detach(), output.logits.detach(), gradients


def question(model, case):
    """Asks a model as `generate` runs it, with a cache, and as training does, without."""

    def failure():
        try:
            with torch.no_grad(), compute_context(case):
                for use_cache in (True, False):
                    model(input_ids=IDS, use_cache=use_cache)
        except RuntimeError as error:
            cells.reset_autocast()
            return str(error)
        return None

    return failure


def what_it_took(done):
    if not done.casts:
        return "boundaries" if done.guarded else "nothing"
    return "vectors" if any("vectors have the dtype" in cast.reason for cast in done.casts) else "matrices"


@pytest.mark.parametrize("case", cells.sliced(TABLE, "family", "kind", "wide", "mixed_precision"))
def test_adapters_train_on_weights_that_disagree(case):
    if case.experts == "grouped_mm" and not GROUPED_CASTS:
        pytest.skip("grouped_mm of this transformers does not cast, so that other dtypes meet than in the table")
    model = adapted(case)
    wide = copy.deepcopy(model).float()
    error, loss, _, gradients = step(model, case)
    stock_computes = error is None
    assert stock_computes or "dtype" in error
    done = make_computable(model, frozenset({case.autocast} if case.autocast else ()), question(model, case))
    assert done.error is None
    assert (what_it_took(done) == "nothing") == stock_computes
    if FUSES:
        assert what_it_took(done) == case.takes
    error, new_loss, logits, new_gradients = step(model, case)
    assert error is None
    assert new_gradients
    for name, gradient in new_gradients.items():
        assert gradient is not None, name
        assert gradient.isfinite().all(), name
        assert gradient.any(), name
    if stock_computes:  # nothing is changed, not even by boundaries that wait
        guard_leaves([model])
        _, guarded_loss, _, guarded = step(model, case)
        assert loss == new_loss == guarded_loss
        assert all(torch.equal(gradients[name], guarded[name]) for name in gradients)
    with torch.no_grad():
        expected = wide(input_ids=IDS, use_cache=False).logits  # (B, T, V)
    distance = (logits.float() - expected).norm(dim=-1) / expected.norm(dim=-1)
    # The median: a token to which two experts matter alike may be routed otherwise, and is then another number.
    assert distance.median() < (0.02 if "bf16" in (case.base, case.autocast) else 0.003)


def test_the_table_has_every_kind_of_mending():
    taken = {case.takes for case in TABLE}
    assert taken == {"nothing", "boundaries", "matrices", "vectors"}
    assert len(TABLE) == len({str(case) for case in TABLE})


@pytest.mark.parametrize("held", ["float32", "base"])
@pytest.mark.parametrize("family", ["text", "gpt_oss"])
def test_float32_inputs_meet_adapters_also_where_peft_does_not_cast_them(family, held):
    """PEFT casts what enters an adapter, and can be told not to; then the boundaries of its leaves do."""
    case = Case(family, "attention", "embeddings", "eager", "bf16", held, None)
    model = adapted(case)
    with disable_input_dtype_casting(model):
        assert "dtype" in step(model, case)[0]
        assert make_computable(model, frozenset({"bfloat16"}), question(model, case)).error is None
        error, _, _, gradients = step(model, case)
    assert error is None
    assert all(gradient.isfinite().all() and gradient.any() for gradient in gradients.values())


@pytest.mark.parametrize("checkpointing", ["reentrant", "not reentrant"])
@pytest.mark.parametrize("experts", EXPERTS)
def test_adapters_on_experts_under_gradient_checkpointing(experts, checkpointing):
    """The recomputed forward meets the same boundaries, and the same adapters."""
    case = Case("gpt_oss", "experts", "router", experts, "bf16", "float32", None)
    plain, checkpointed = adapted(case), adapted(case)
    for model in (plain, checkpointed):
        guard_leaves([model])
        guard_fused(model)
    checkpointed.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
    checkpointed.enable_input_require_grads()
    error, loss, _, gradients = step(checkpointed, case)
    assert error is None
    _, expected_loss, _, expected = step(plain, case)
    assert loss == expected_loss
    assert all(torch.equal(gradients[name], expected[name]) for name in expected)


# Real trainers.


def arguments(task, flag, kind, model=None, config=None, **changes):
    """What a trainer of gpt-oss with adapters is built with; the model itself, or its folder."""
    reset_accelerate()
    cell = Cell("gpt_oss", task, "bf16", flag)
    if model is not None:
        changes["model_init_kwargs"] = None
    made = cells.arguments(cell, config or cells.PLAIN[task], **changes)
    made["train_dataset"] = cells.dataset(task, "text")
    made["peft_config"] = LoraConfig(r=4, **ADAPTERS[kind])
    return made if model is None else made | {"model": model}


def trained(trainer_class, made):
    """Losses and weights of a run."""
    torch.manual_seed(0)
    trainer = trainer_class(**made)
    start = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert all(torch.tensor(losses).isfinite())
    moved = {
        name for name, p in trainer.model.named_parameters() if p.requires_grad and not torch.equal(p, start[name])
    }
    assert moved >= {name for name in start if "lora_B" in name}
    return losses, cells.fingerprint(trainer.model)


@pytest.mark.parametrize("kind", ["attention", "experts"])
@pytest.mark.parametrize("flag", [None, "bf16"])
@pytest.mark.parametrize("task", ["sft", "grpo"])
def test_a_uniform_gpt_oss_is_trained_as_stock_trains_it(task, flag, kind):
    # Rollouts of stock run outside autocast, on purpose not as here.
    changes = {"rollout_compute": "stock"} if task == "grpo" else {}
    safe = trained(cells.SAFE[task], arguments(task, flag, kind, config=cells.SAFE_CONFIG[task], **changes))
    assert safe == trained(cells.STOCK[task], arguments(task, flag, kind))


def live(family, wide):
    model = AutoModelForCausalLM.from_pretrained(cells.folder(family), dtype=torch.bfloat16)
    return widen(model, wide).requires_grad_(False)


@pytest.mark.parametrize(
    ("family", "wide", "kind"),
    [
        ("gpt_oss", "embeddings", "attention"),
        ("gpt_oss", "router", "experts"),
        ("gpt_oss", "biases", "experts"),
        ("text", "embeddings", "attention"),
    ],
)
@pytest.mark.parametrize("task", ["sft", "grpo"])
def test_a_reconciled_model_trains_where_stock_stops(task, family, wide, kind):
    with pytest.raises(RuntimeError, match="dtype"):
        trained(cells.STOCK[task], arguments(task, None, kind, live(family, wide)))
    cells.reset_autocast()
    model = live(family, wide)
    done = make_computable(
        model, frozenset(), question(model, Case(family, kind, wide, "eager", "bf16", "base", None))
    )
    assert done.error is None
    assert done.guarded > 0
    trained(cells.STOCK[task], arguments(task, None, kind, model))


@pytest.mark.parametrize(
    ("family", "wide", "kind", "takes"),
    [
        ("gpt_oss", "embeddings", "attention", "boundaries"),
        ("gpt_oss", "router", "experts", "boundaries"),
        ("gpt_oss", "biases", "experts", "matrices"),
        ("gpt_oss", "norms", "experts", "nothing"),
        ("text", "embeddings", "attention", "matrices"),
        ("text", "norms", "attention", "nothing"),  # the boundaries of leaves are there before it is asked
    ],
)
@pytest.mark.parametrize("task", ["sft", "grpo"])
def test_a_safe_trainer_reconciles_a_model_that_it_is_given(task, family, wide, kind, takes):
    made = arguments(task, None, kind, live(family, wide))
    torch.manual_seed(0)
    trainer = cells.SAFE[task](**made)
    done = trainer.precision.weights.layout
    kept = {name: from_torch(p.dtype) for name, p in trainer.model.named_parameters() if "lora" not in name}
    if FUSES:
        assert what_it_took(done) == takes
        assert ("float32" in kept.values()) == (not done.casts)
    trainer.train()
    assert kept == {name: from_torch(p.dtype) for name, p in trainer.model.named_parameters() if "lora" not in name}
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 2
    assert torch.tensor(losses).isfinite().all()


@pytest.mark.parametrize("wide", ["embeddings", "router", "biases"])
def test_under_autocast_weights_that_disagree_train_as_in_stock(wide):
    safe = trained(cells.SAFE["sft"], arguments("sft", "bf16", "experts", live("gpt_oss", wide)))
    if FUSES and not GROUPED_CASTS and wide != "router":  # stock does not train there
        with pytest.raises(RuntimeError, match="same dtype"):
            trained(cells.STOCK["sft"], arguments("sft", "bf16", "experts", live("gpt_oss", wide)))
        cells.reset_autocast()
        return
    assert safe == trained(cells.STOCK["sft"], arguments("sft", "bf16", "experts", live("gpt_oss", wide)))


@pytest.mark.parametrize("kind", ["attention", "experts"])
def test_a_float16_gpt_oss_trains_under_the_loss_scaler_with_its_norms_in_float32(kind):
    """Loaded in float16 it holds float32 norms, as it declares; adapters are float32."""
    made = arguments("sft", "fp16", kind, model_init_kwargs={"dtype": "float16"})
    torch.manual_seed(0)
    trainer = fp16_on_cpu(cells.SAFE["sft"])(**made)
    assert trainer.precision.model.weights == {"float16", "float32"}
    trainer.train()
    assert trainer.accelerator.scaler is not None
    held = {name: p.dtype for name, p in trainer.model.named_parameters()}
    assert {dtype for name, dtype in held.items() if "norm" in name or "lora" in name} == {torch.float32}
    assert {dtype for name, dtype in held.items() if "norm" not in name and "lora" not in name} == {torch.float16}
    assert all(torch.tensor([e["grad_norm"] for e in trainer.state.log_history if "grad_norm" in e]).isfinite())
