"""The policy, as the table it is: what was asked for, where, with which weights, and what follows."""

import json
from dataclasses import FrozenInstanceError, fields

import pytest
from devices import A100, CPU, H200, MI300, MPS, OLD_AMD, T4, V100

from safe_trainers.core.errors import PrecisionError
from safe_trainers.policy.resolve import Choice, ModelFacts, PrecisionPolicy, Requested, resolve


FP32, BF16, FP16 = (ModelFacts(frozenset({name})) for name in ("float32", "bfloat16", "float16"))
UNKNOWN = ModelFacts()
FLASH_FP32 = ModelFacts(FP32.weights, attn_implementation="flash_attention_2")
FLASH_KERNEL_FP32 = ModelFacts(FP32.weights, attn_implementation="kernels-community/flash-attn2")
FLASH_KERNEL_BF16 = ModelFacts(BF16.weights, attn_implementation="kernels-community/flash-attn3")

#  flags                      device  weights  compute     autocast    loss scale  problems and warnings
TABLE = [
    (Requested(bf16=True), A100, FP32, "bfloat16", "bfloat16", "off", ()),
    (Requested(bf16=True), A100, BF16, "bfloat16", "bfloat16", "off", ()),
    (Requested(bf16=True), A100, UNKNOWN, "bfloat16", "bfloat16", "off", ()),
    (Requested(bf16=True), CPU, FP32, "bfloat16", "bfloat16", "off", ()),
    (Requested(bf16=True), A100, FP16, "bfloat16", "bfloat16", "off", ("half-weights-under-other-autocast",)),
    (Requested(bf16=True), T4, FP32, "bfloat16", "bfloat16", "off", ("bf16-is-emulated",)),
    (Requested(bf16=True), V100, FP16, "bfloat16", "bfloat16", "off",
     ("bf16-is-emulated", "half-weights-under-other-autocast")),
    (Requested(bf16=True), OLD_AMD, FP32, "bfloat16", "bfloat16", "off", ()),
    (Requested(bf16=False, fp16=True), T4, FP32, "float16", "float16", "dynamic", ()),
    (Requested(bf16=False, fp16=True), T4, FP16, "float16", "float16", "dynamic", ()),
    (Requested(bf16=False, fp16=True), A100, BF16, "float16", "float16", "dynamic",
     ("half-weights-under-other-autocast",)),
    (Requested(bf16=False, fp16=True), CPU, FP16, "float16", "off", "off", ("fp16-on-cpu",)),
    (Requested(bf16=False, fp16=True), CPU, FP32, "float32", "off", "off", ("fp16-on-cpu",)),
    (Requested(bf16=False, fp16=True), MPS, FP32, "float16", "float16", "dynamic", ()),
    (Requested(bf16=False, fp16=True), CPU, BF16, "bfloat16", "off", "off", ("fp16-on-cpu",)),
    (Requested(bf16=False), A100, FP32, "float32", "off", "off", ()),
    (Requested(bf16=False), A100, BF16, "bfloat16", "off", "off", ()),
    (Requested(bf16=False), T4, FP16, "float16", "off", "off", ()),
    (Requested(bf16=False), A100, UNKNOWN, "as loaded", "off", "off", ()),
    (Requested(bf16=False), A100, ModelFacts(attn_implementation="flash_attention_2"), "as loaded", "off", "off", ()),
    (Requested(bf16=False), A100, FLASH_KERNEL_FP32, "float32",
     "off", "off", ("flash-attention-needs-half",)),
    (Requested(bf16=False), A100, ModelFacts(frozenset({"float32", "bfloat16"})), "bfloat16 and float32", "off", "off",
     ()),
    (Requested(precision="auto"), A100, FP32, "bfloat16", "bfloat16", "off", ()),
    (Requested(precision="auto"), H200, FP32, "bfloat16", "bfloat16", "off", ()),
    (Requested(precision="auto"), MI300, FP32, "bfloat16", "bfloat16", "off", ()),
    (Requested(precision="auto"), T4, FP32, "float16", "float16", "dynamic", ()),
    (Requested(precision="auto"), V100, FP32, "float16", "float16", "dynamic", ()),
    (Requested(precision="auto"), CPU, FP32, "float32", "off", "off", ()),
    (Requested(precision="auto"), MPS, FP32, "float32", "off", "off", ()),
    (Requested(), T4, FP32, "float16", "float16", "dynamic", ()),
    (Requested(), CPU, FP32, "float32", "off", "off", ()),
    (Requested(precision="torch.bfloat16"), CPU, FP32, "bfloat16", "bfloat16", "off", ()),
    (Requested(precision="bf16"), T4, FP32, "bfloat16", "bfloat16", "off", ("bf16-is-emulated",)),
    (Requested(precision="fp16", fp16=True, bf16=False), T4, FP32, "float16", "float16", "dynamic", ()),
    (Requested(precision="fp16", bf16=True), T4, FP32, "float16", "float16", "dynamic",
     ("precision-contradicts-flag",)),
    (Requested(precision="fp32", bf16=True), A100, FP32, "float32", "off", "off", ("precision-contradicts-flag",)),
    (Requested(precision="bf16", bf16=False), A100, FP32, "bfloat16", "bfloat16", "off",
     ("precision-contradicts-flag",)),
    (Requested(bf16=False), A100, FLASH_FP32, "float32", "off", "off",
     ("flash-attention-needs-half",)),
    (Requested(bf16=True), A100, FLASH_FP32, "bfloat16", "bfloat16", "off", ()),
    (Requested(bf16=False), A100, FLASH_KERNEL_BF16, "bfloat16", "off",
     "off", ()),
    (Requested(precision="fp32"), A100, BF16, "bfloat16", "off", "off", ("half-weights-under-other-precision",)),
    (Requested(precision="bf16"), A100, FP16, "bfloat16", "bfloat16", "off", ("half-weights-under-other-precision",)),
    (Requested(precision="auto"), A100, FP16, "bfloat16", "bfloat16", "off", ("half-weights-under-other-autocast",)),
    (Requested(precision="auto"), CPU, BF16, "bfloat16", "off", "off", ()),
    (Requested(bf16=True, fp16=True), A100, FP32, "float16", "float16", "dynamic", ("two-half-formats",)),
    (Requested(bf16=True, rollout_compute="stock"), A100, FP32, "bfloat16", "bfloat16", "off",
     ("rollout-not-aligned",)),
    (Requested(bf16=True, rollout_compute="trainig"), A100, FP32, "bfloat16", "bfloat16", "off", ("unknown-choice",)),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "device", "model", "compute", "autocast", "loss_scale", "found"), TABLE)
def test_table(flags, device, model, compute, autocast, loss_scale, found):
    policy = resolve(flags, device, model)
    assert policy.compute.text == compute
    assert policy.autocast.text == autocast
    assert policy.loss_scale.text == loss_scale
    assert tuple(p.id for p in (*policy.problems, *policy.warnings)) == found
    assert all(choice.reason for _, choice in policy.choices())


def test_every_refusal_and_warning_of_plain_values_is_in_the_table():
    in_table = {finding for row in TABLE for finding in row[-1]}
    assert in_table == {
        "half-weights-under-other-autocast",
        "half-weights-under-other-precision",
        "two-half-formats",
        "bf16-is-emulated",
        "flash-attention-needs-half",
        "precision-contradicts-flag",
        "unknown-choice",
        "fp16-on-cpu",
        "rollout-not-aligned",
    }


def test_all_problems_come_in_one_error():
    policy = resolve(Requested(precision="bf16", config="SafeSFTConfig"), V100, FP16)
    with pytest.raises(PrecisionError) as caught:
        policy.check()
    assert str(caught.value) == (
        "2 problems with the precision of this run:\n"
        "- precision='bf16' on V100 (compute capability 7.0)\n"
        "  why: V100 (compute capability 7.0) has no bfloat16 arithmetic (compute capability 8.0 is required): "
        "PyTorch emulates it, which is many times slower.\n"
        '  fix: use SafeSFTConfig(precision="fp16"), or `fp16=True` with `bf16=False`  [bf16-is-emulated]\n'
        "- float16 weights with precision='bf16'\n"
        "  why: `precision` loads and computes in bfloat16, but these weights are float16.\n"
        "  fix: load the weights in bfloat16, `model_init_kwargs={'dtype': 'bfloat16'}`, or write "
        "`precision='fp16'`  [half-weights-under-other-precision]"
    )


def test_the_advice_fits_what_was_passed():
    named = str(resolve(Requested(bf16=True), A100, ModelFacts(FP16.weights)).warnings[0].fix)
    live = str(resolve(Requested(bf16=True), A100, ModelFacts(FP16.weights, live=True)).warnings[0].fix)
    assert "`model_init_kwargs={'dtype': 'bfloat16'}`" in named
    assert (
        "`from_pretrained(..., dtype='bfloat16')`" in live
    )  # TRL ignores model_init_kwargs for a model that is there
    assert str(resolve(Requested(bf16=True), T4, FP32).problems[0].fix) == "use `fp16=True` with `bf16=False`"


def test_the_advice_is_about_the_field_that_decided():
    """Either flag beside `precision` would be refused."""

    def fixes(model=FP32, device=A100, **flags):
        policy = resolve(Requested(**flags), device, model)
        return [str(problem.fix) for problem in (*policy.problems, *policy.warnings)]

    assert fixes(BF16, precision="fp16") == [
        "load the weights in float16, `model_init_kwargs={'dtype': 'float16'}`, or write `precision='bf16'`"
    ]
    assert fixes(precision="fp16", adapter_dtype="bfloat16") == [
        "drop `adapter_dtype='bfloat16'`, or use `precision='bf16'`"
    ]
    assert fixes(device=CPU, precision="fp16") == ["`precision='fp32'`, or `precision='bf16'`"]
    assert fixes(device=CPU, fp16=True) == ["drop `fp16=True`, or use `bf16=True`"]
    assert fixes(BF16, precision="fp32") == [
        "load the weights in float32, `model_init_kwargs={'dtype': 'float32'}`, or write `precision='bf16'`"
    ]
    packed = ModelFacts(BF16.weights, live=True, quantization="4bit")
    assert "`from_pretrained(..., dtype='float32')`" in fixes(packed, precision="fp32")[0]


def test_master_weights_are_what_is_trained():
    lora = resolve(Requested(bf16=True), A100, ModelFacts(BF16.weights, trainable=frozenset({"float32"})))
    assert (lora.master.text, lora.frozen_base.text) == ("float32", "bfloat16")


def test_a_policy_without_problems_passes():
    assert resolve(Requested(bf16=True), A100, FP32).check() is None


def test_an_unknown_precision_is_refused():
    with pytest.raises(PrecisionError, match="is not a dtype"):
        resolve(Requested(precision="fp12"), A100, FP32)


def test_frozen_and_hashable():
    policy = resolve(Requested(bf16=True), A100, FP32)
    with pytest.raises(FrozenInstanceError):
        policy.compute = Choice("float32", "because")
    assert hash(policy) == hash(resolve(Requested(bf16=True), A100, FP32))


def test_readable_and_serialisable():
    policy = resolve(Requested(bf16=True), T4, FP16)
    text, plain = str(policy), json.loads(json.dumps(policy.to_dict()))
    for field in fields(PrecisionPolicy):
        if field.name not in {"problems", "warnings"}:
            assert field.name in text
            assert set(plain[field.name]) == {"value", "reason"}
    assert [p["id"] for p in plain["problems"]] == ["bf16-is-emulated"]
    assert [p["id"] for p in plain["warnings"]] == ["half-weights-under-other-autocast"]
