"""What each trainable is held in, decided tensor by tensor, with the reason."""

import cells
import pytest
import torch
from cells import Cell
from devices import A100, CPU, FUTURE, HALVES, T4
from peft import IA3Config, LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from safe_trainers import PrecisionError, PrecisionWarning
from safe_trainers.policy.resolve import ModelFacts, Requested, resolve
from safe_trainers.weights.cast import ParameterCast, apply_casts, extra_bytes, table
from safe_trainers.weights.trainables import TrainableContext, decide, refuse_upcast


BF16, FP16, NONE = Requested(bf16=True), Requested(bf16=False, fp16=True), Requested(bf16=False)
RATE = 5e-3  # high enough that nothing is lost in bfloat16 in so small a model


def policy_of(flags, device=A100, weights="float32", quantization="4bit"):
    return resolve(flags, device, ModelFacts(frozenset({weights}), quantization=quantization))


def adapted(dtype=torch.float32, **settings):
    model = AutoModelForCausalLM.from_pretrained(cells.folder("text"), dtype=dtype)
    torch.manual_seed(0)
    return get_peft_model(model, LoraConfig(r=4, **{"target_modules": ["q_proj", "v_proj"], **settings}))


def targets(model, policy, **context):
    """The dtypes by the kind of tensor."""
    decisions = decide(model, policy, TrainableContext(**{"learning_rate": RATE, **context}))
    kinds = {}
    for decision in decisions:
        kind = next((k for k in ("magnitude", "modules_to_save", "lora_A", "lora_B") if k in decision.name), "weight")
        kinds.setdefault(kind, set()).add(decision.target)
    return {kind: "/".join(sorted(dtypes)) for kind, dtypes in kinds.items()}


def test_the_cast_is_taken_over_where_it_is_safe():
    assert targets(adapted(), policy_of(BF16)) == {"lora_A": "bfloat16", "lora_B": "bfloat16"}


def test_what_needs_more_keeps_more():
    special = adapted(use_dora=True, modules_to_save=["lm_head"])
    assert targets(special, policy_of(BF16)) == {
        "lora_A": "bfloat16", "lora_B": "bfloat16", "magnitude": "float32", "modules_to_save": "float32",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"fresh": False}, "the adapter was not created by the trainer"),
        ({"learning_rate": 1e-6}, "% of the updates would round to zero in bfloat16 at learning_rate=1e-06"),
    ],
)
def test_why_an_adapter_keeps_its_bits(changes, reason):
    decisions = decide(adapted(), policy_of(BF16), TrainableContext(**{"learning_rate": RATE, **changes}))
    assert {d.target for d in decisions} == {"float32"}
    assert all(reason in d.reason for d in decisions)


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_2", "olora"])
def test_initialisations_that_stand_for_a_part_of_the_base_keep_their_bits(init):
    model = adapted(init_lora_weights=init)
    assert targets(model, policy_of(BF16)) == {"lora_A": "float32", "lora_B": "float32"}
    assert f"init_lora_weights={init!r}" in table(decide(model, policy_of(BF16), TrainableContext(RATE)))


def test_loftq_and_random_initialisations():
    model = adapted()
    for init, dtype in (("loftq", "float32"), ("eva", "float32"), ("gaussian", "bfloat16"), (False, "bfloat16")):
        model.peft_config["default"].init_lora_weights = init  # as their own tools leave the config
        assert targets(model, policy_of(BF16)) == {"lora_A": dtype, "lora_B": dtype}


def test_fsdp_gets_one_dtype():
    plain, dora = adapted(), adapted(use_dora=True)
    assert set(targets(plain, policy_of(BF16), one_dtype=True).values()) == {"bfloat16"}
    assert set(targets(dora, policy_of(BF16), one_dtype=True).values()) == {"float32"}
    asked = policy_of(Requested(bf16=True, adapter_dtype="bfloat16"))
    assert set(targets(dora, asked, adapter_dtype="bfloat16", one_dtype=True).values()) == {"float32"}
    half_head = adapted(torch.bfloat16, modules_to_save=["lm_head"])
    assert set(targets(half_head, policy_of(NONE, quantization=None), one_dtype=True).values()) == {"float32"}


@pytest.mark.parametrize(
    ("flags", "device", "weights", "quantization", "adapter"),
    [
        (BF16, A100, "float32", "4bit", "bfloat16"),
        (BF16, A100, "bfloat16", "8bit", "bfloat16"),
        (BF16, CPU, "float32", "4bit", "bfloat16"),
        (NONE, A100, "bfloat16", "4bit", "bfloat16"),
        (BF16, T4, "float32", "4bit", "as created"),
        (BF16, A100, "float32", None, "as created"),
        (NONE, A100, "float32", "4bit", "as created"),
        (NONE, A100, "float16", "4bit", "as created"),
        (FP16, A100, "float16", "4bit", "float32"),
        (FP16, T4, "float16", None, "float32"),
        (FP16, FUTURE, "float16", "4bit", "float32"),
        (FP16, CPU, "float32", "4bit", "as created"),
        (Requested(bf16=True, adapter_dtype="fp32"), A100, "float32", "4bit", "float32"),
        (Requested(bf16=True, adapter_dtype="float32"), A100, "bfloat16", None, "float32"),
        (Requested(bf16=False, adapter_dtype="bf16"), A100, "float32", None, "bfloat16"),
    ],
)
def test_the_policy_on_adapters(flags, device, weights, quantization, adapter):
    policy = policy_of(flags, device, weights, quantization)
    assert policy.adapter.text == adapter
    assert policy.adapter.reason


def test_bf16_adapters_are_refused_where_the_scaler_refuses_them():
    asked = Requested(bf16=False, fp16=True, adapter_dtype="bfloat16")
    (problem,) = policy_of(asked, T4).problems
    assert str(problem) == (
        "adapter_dtype='bfloat16' with fp16=True\n"
        "  why: fp16 training scales the loss, and the loss scaler on Tesla T4 (compute capability 7.5) cannot "
        "unscale bfloat16 gradients, so the optimizer would fail at the first step.\n"
        "  fix: drop `adapter_dtype='bfloat16'`, or use `bf16=True`  [adapter-dtype-cannot-be-scaled]"
    )
    assert policy_of(asked, FUTURE).problems == ()
    assert policy_of(asked, CPU).problems == ()


@pytest.mark.parametrize(("value", "text"), [("fp16", "adapter_dtype='auto'"), ("auto8", "adapter_dtype='auto'"),
                                             ("bfloat", "adapter_dtype='bfloat16'")])  # fmt: skip
def test_an_unknown_adapter_dtype_is_refused(value, text):
    with pytest.raises(PrecisionError) as error:
        policy_of(Requested(bf16=True, adapter_dtype=value)).check()
    assert f"adapter_dtype={value!r}" in str(error.value)
    assert str(error.value.problems[0].fix) == text


def test_asked_for_bfloat16_is_given_to_matrices_alone():
    asked = Requested(bf16=True, adapter_dtype="bfloat16")
    model = adapted(use_dora=True, modules_to_save=["lm_head"], init_lora_weights="olora")
    found = targets(model, policy_of(asked), adapter_dtype="bfloat16", learning_rate=1e-6, fresh=False)
    assert found == {
        "lora_A": "bfloat16", "lora_B": "bfloat16", "magnitude": "float32", "modules_to_save": "float32",
    }  # fmt: skip


def test_everything_the_scaler_refuses_becomes_float32():
    model = AutoModelForCausalLM.from_pretrained(cells.folder("text"), dtype=torch.float16)
    policy = policy_of(FP16, A100, "float16", None)
    decisions = decide(model, policy, TrainableContext(RATE, unscalable_dtypes=HALVES))
    assert {(d.source, d.target) for d in decisions} == {("float16", "float32")}
    assert policy.master.text == "float16"  # what is trained is not known from these plain values
    elements = sum(p.numel() for p in model.parameters())
    assert extra_bytes(decisions) == 2 * elements
    problem = refuse_upcast(decisions, HALVES)
    assert "model.embed_tokens.weight" in problem.what
    apply_casts(model, decisions)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert refuse_upcast(decide(model, policy, TrainableContext(RATE, unscalable_dtypes=HALVES)), HALVES) is None


def test_tied_weights_stay_tied():
    model = AutoModelForCausalLM.from_pretrained(cells.folder("text"), dtype=torch.float16)
    model.lm_head.weight = model.model.embed_tokens.weight
    decisions = decide(model, policy_of(FP16, A100, "float16", None), TrainableContext(RATE, unscalable_dtypes=HALVES))
    apply_casts(model, decisions)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.weight.dtype == torch.float32


def test_the_table_says_what_and_why_in_one_line_each():
    model = adapted(use_dora=True)
    text = table(decide(model, policy_of(BF16), TrainableContext(RATE)))
    first, second = text.splitlines()
    assert first.startswith("float32 -> bfloat16: 4 tensors (base_model.model.model.layers.0.self_attn.q_proj.lora_A")
    assert first.endswith(": a quantised base that computes in bfloat16, without loss scaling")
    assert second.startswith("float32 kept: 2 tensors (")
    assert second.endswith(": a DoRA magnitude, whose updates are smaller than the spacing of bfloat16")


def sft(**changes):
    made = cells.arguments(Cell("text", "sft", "fp32", None), cells.PLAIN["sft"], model_init_kwargs=None)
    return cells.SAFE["sft"](**{**made, **changes})


@pytest.mark.parametrize("given", [{"r": 4}, "lora", LoraConfig])
def test_a_peft_config_that_is_none_is_refused(given):
    with pytest.raises(PrecisionError, match="not-a-peft-config") as error:
        sft(peft_config=given)
    kind = type(given).__name__
    assert f"`peft_config` must be a `peft.PeftConfig`, got {kind}." in str(error.value)


def test_an_adapter_of_another_base_is_warned_about():
    model = adapted()
    sft(model=model)  # its own base: no warning, which would be an error in this suite
    model.peft_config["default"].base_model_name_or_path = "someone/another-model"
    with pytest.warns(PrecisionWarning, match=r"\[adapter-of-another-base\]") as caught:
        sft(model=model)
    (warning,) = [w.message for w in caught if isinstance(w.message, PrecisionWarning)]
    assert "names the base 'someone/another-model'" in str(warning)


@pytest.mark.parametrize("rate", [-1e-3, float("nan"), float("inf"), "1e-4", None])
def test_a_learning_rate_that_is_none_is_refused(rate):
    made = cells.arguments(Cell("text", "sft", "fp32", None), cells.PLAIN["sft"])
    made["args"].learning_rate = rate
    with pytest.raises(PrecisionError, match="learning-rate-out-of-range"):
        cells.SAFE["sft"](**made)


def test_other_methods_follow_what_is_asked():
    """IA3 multiplies activations with its vectors: in another dtype than the model's, attention gets two dtypes."""
    pytest.importorskip("bitsandbytes")

    def build(flag, adapter_dtype="auto"):
        config = BitsAndBytesConfig(load_in_4bit=True)
        made = cells.arguments(
            Cell("text", "sft", "bf16", flag), cells.SAFE_CONFIG["sft"], model_init_kwargs=None,
            adapter_dtype=adapter_dtype,
        )  # fmt: skip
        made["model"] = AutoModelForCausalLM.from_pretrained(
            cells.folder("text"), dtype=torch.bfloat16, quantization_config=config
        )
        made["peft_config"] = IA3Config(
            target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"], task_type="CAUSAL_LM"
        )
        return cells.SAFE["sft"](**made)

    trainer = build(None)
    assert {b.reason.split("`")[1] for b in trainer.precision.boundaries.operations} == {
        "scaled_dot_product_attention"
    }
    trainer.train()
    build("bf16").train()
    with pytest.warns(PrecisionWarning, match="half-trainables"):
        trainer = build("bf16", "bfloat16")
    assert {p.dtype for name, p in trainer.model.named_parameters() if "ia3" in name} == {torch.bfloat16}
    trainer.train()


@pytest.mark.parametrize("compiled_first", [False, True])
def test_casts_find_the_weights_of_a_compiled_model(compiled_first):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    compiled = torch.compile(model, backend="eager")
    names = [name for name, _ in (compiled if compiled_first else model).named_parameters()]
    casts = [ParameterCast(name, "float32", "bfloat16", "a test", 1) for name in (*names, "gone")]
    apply_casts(compiled, casts)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
