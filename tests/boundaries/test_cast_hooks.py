"""The casts inside a model: where they act, where they do not, and what they survive."""

import copy
import functools
import inspect
import pickle

import pytest
import torch
from media_batches import guarded, media_batch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPooling

from safe_trainers import tiny
from safe_trainers.boundaries.cast_hooks import (
    cast_floating,
    count_casts,
    guard_features,
    guard_inputs,
    guard_leaves,
    release_features,
    remove_casts,
    widen_embeddings,
)
from safe_trainers.model.parts import find_parts
from upstream import towers_count_in_the_dtype_of_pixels


CRASHES = (
    r"(expected m1 and m2|should be the same|same dtype|expected scalar type|Index put requires|expect parameter)"
)


@functools.cache
def logits(family, dtype):
    """The logits with pixels that were cast by hand: what the boundaries have to reproduce."""
    model = tiny.build_model(family, dtype=dtype).eval()
    batch = media_batch(family)
    batch["pixel_values"] = batch["pixel_values"].to(dtype)
    with torch.no_grad():
        return model(**batch).logits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", ["aria", "llama4", "nocast"])
def test_float32_pixels_enter_a_half_tower(family, dtype):
    model, batch = tiny.build_model(family, dtype=dtype).eval(), media_batch(family)
    with torch.no_grad():
        with pytest.raises(RuntimeError, match=CRASHES):
            model(**batch)
        found = guarded(model)(**batch).logits
        if family == "aria" and towers_count_in_the_dtype_of_pixels():
            pytest.skip("patch positions of this transformers have the dtype of the pixels")
        assert torch.equal(found, logits(family, dtype))


@pytest.mark.parametrize("family", tiny.VISION_FAMILIES)
def test_boundaries_change_no_number_where_stock_works(family):
    batch = media_batch(family)
    plain = tiny.build_model(family, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        try:
            expected = plain(**batch).logits
        except RuntimeError:
            assert family in {"aria", "llama4", "nocast"}
            return
        assert torch.equal(guarded(copy.deepcopy(plain))(**batch).logits, expected)


@pytest.mark.parametrize("family", tiny.VISION_FAMILIES)
def test_float32_weights_under_autocast(family):
    batch, model = media_batch(family), tiny.build_model(family).eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        try:
            expected, said = model(**batch).logits, ""
        except RuntimeError as error:  # bf16 features are put by index into fp32 embeddings
            expected, said = None, str(error)
        if expected is None:
            assert family in {"nocast", "smolvlm"}  # SmolVLM in older releases
            assert "Index put requires" in said
        else:
            assert family != "nocast"
            assert torch.equal(guarded(copy.deepcopy(model))(**batch).logits, expected)
        assert guarded(model)(**batch).logits.isfinite().all()


def test_generation_sees_the_signature_it_inspects():
    model = guarded(tiny.build_model("nocast"))
    plain = tiny.build_model("nocast")
    assert inspect.signature(model.model.get_image_features) == inspect.signature(plain.model.get_image_features)


def test_deepcopy_has_boundaries_of_its_own():
    model = guarded(tiny.build_model("nocast", dtype=torch.bfloat16).eval())
    batch = media_batch("nocast")
    copied = copy.deepcopy(model)
    assert copied.model.get_image_features.__self__ is copied.model
    with torch.no_grad():
        expected = model(**batch).logits
        for parameter in model.parameters():
            parameter.zero_()
        assert torch.equal(copied(**batch).logits, expected)


def test_hooks_can_be_pickled():
    leaf = nn.Linear(2, 2).to(torch.bfloat16)
    assert guard_leaves([leaf]) == 1
    assert pickle.loads(pickle.dumps(leaf))(torch.ones(1, 2)).dtype == torch.bfloat16


def test_placing_twice_changes_nothing():
    model = guarded(tiny.build_model("aria", dtype=torch.bfloat16))
    parts = find_parts(model)
    assert guard_leaves(parts.towers.values()) == 0
    assert guard_features(parts) == ()


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("lora", [False, True])
def test_gradients_flow_through_both_boundaries(lora, checkpointing):
    model = guarded(tiny.build_model("aria", dtype=torch.bfloat16))
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if lora:
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
        model.enable_input_require_grads()
    model.train()
    batch = media_batch("aria")
    model(**batch, labels=batch["input_ids"]).loss.backward()
    trained = {name: p.grad for name, p in model.named_parameters() if p.requires_grad and p.grad is not None}
    assert any("vision_tower" in name for name in trained)
    assert all(grad.isfinite().all() for grad in trained.values())


def test_compiled_model_computes_the_same():
    leaf = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2)).to(torch.bfloat16)
    guard_leaves([leaf])
    x = torch.randn(3, 4)
    compiled = torch.compile(leaf, backend="eager")
    assert torch.equal(compiled(x), leaf(x))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(compiled(x), leaf(x))


def test_a_compiled_model_with_both_boundaries_computes_the_same():
    batch = media_batch("nocast")
    model = guarded(tiny.build_model("nocast", dtype=torch.bfloat16).eval())
    with torch.no_grad():
        expected = model(**batch).logits
        assert torch.equal(torch.compile(model, backend="eager")(**batch).logits, expected)


LEAVES = {
    "linear": (lambda: nn.Linear(4, 4), (2, 4)),
    "conv1d": (lambda: nn.Conv1d(4, 4, 1), (2, 4, 3)),
    "conv2d": (lambda: nn.Conv2d(3, 4, 2), (2, 3, 4, 4)),
    "conv3d": (lambda: nn.Conv3d(3, 4, 2), (2, 3, 4, 4, 4)),
    "layernorm": (lambda: nn.LayerNorm(4), (2, 4)),
    "groupnorm": (lambda: nn.GroupNorm(2, 4), (2, 4, 3)),
}


@pytest.mark.parametrize("name", LEAVES)
def test_each_leaf_fails_without_and_works_with_its_boundary(name):
    make, shape = LEAVES[name]
    leaf, x = make().to(torch.bfloat16), torch.randn(shape)
    with pytest.raises(RuntimeError, match=CRASHES):
        leaf(x)
    guard_leaves([leaf])
    assert torch.equal(leaf(x), leaf(x.to(torch.bfloat16)))


def test_attention_module_with_keyword_inputs():
    leaf, x = nn.MultiheadAttention(4, 2, batch_first=True).to(torch.bfloat16), torch.randn(1, 3, 4)
    with pytest.raises(RuntimeError, match=CRASHES):
        leaf(query=x, key=x, value=x, need_weights=False)
    guard_leaves([leaf])
    out, _ = leaf(query=x, key=x, value=x, need_weights=False)
    assert out.dtype == torch.bfloat16


def test_float32_norms_keep_their_precision():
    norm, x = nn.LayerNorm(4), torch.randn(2, 4, dtype=torch.bfloat16)
    expected = norm(x)  # mixed inputs are supported there, and give bf16
    guard_leaves([norm])
    assert norm(x).dtype == expected.dtype
    assert torch.equal(norm(x), expected)


def test_autocast_is_left_alone():
    leaf, x = nn.Linear(4, 4), torch.randn(2, 4)
    guard_leaves([leaf])
    with torch.autocast("cpu", torch.bfloat16):
        assert leaf(x.half()).dtype == torch.bfloat16


def test_integers_and_unchanged_values_pass_through():
    ids, x = torch.arange(3), torch.ones(3)
    nested = {"a": [ids, (x, None)], "b": "text"}
    cast = cast_floating(nested, torch.bfloat16)
    assert cast["a"][0] is ids
    assert cast["a"][1][0].dtype == torch.bfloat16
    assert nested["a"][1][0] is x  # what was given is not changed
    assert cast_floating(nested, torch.float32) is nested


def test_model_outputs_keep_their_class_and_their_attributes():
    output = BaseModelOutputWithPooling(last_hidden_state=torch.ones(1, 2), pooler_output=torch.ones(1))
    output.extra = [torch.ones(2), torch.arange(2)]
    cast = cast_floating(output, torch.float16)
    assert type(cast) is BaseModelOutputWithPooling
    assert cast.last_hidden_state.dtype == cast["pooler_output"].dtype == cast[0].dtype == torch.float16
    assert cast.extra[0].dtype == torch.float16
    assert cast.extra[1].dtype == torch.int64
    assert output.extra[0].dtype == output.pooler_output.dtype == torch.float32


def test_what_was_placed_on_features_can_be_taken_back():
    model = tiny.build_model("llava")
    parts = find_parts(model)
    assert not release_features(parts)
    before = [dict(vars(container)) for container in parts.containers]
    assert guard_features(parts)
    assert release_features(parts)
    assert [dict(vars(container)) for container in parts.containers] == before
    assert not release_features(parts)


# ---- embeddings in the other half format than autocast ----


def hidden_error(model, ids, reference):
    with torch.no_grad(), torch.autocast("cpu", torch.float16):
        return (model(input_ids=ids).logits.double() - reference).abs().mean().item()


def test_embeddings_in_bfloat16_do_not_round_what_float16_holds():
    torch.manual_seed(0)
    model = tiny.build_model("text", dtype=torch.bfloat16).eval()
    ids = torch.randint(20, 200, (4, 32))
    with torch.no_grad():
        reference = copy.deepcopy(model).double()(input_ids=ids).logits
    rounded = hidden_error(model, ids, reference)
    widen_embeddings(model.get_input_embeddings())
    assert hidden_error(model, ids, reference) < rounded / 2


def test_embeddings_are_widened_under_autocast_only():
    embeddings = nn.Embedding(3, 4).to(torch.bfloat16)
    widen_embeddings(embeddings)
    ids = torch.tensor([0, 2])
    assert embeddings(ids).dtype == torch.bfloat16
    with torch.autocast("cpu", torch.float16):
        assert torch.equal(embeddings(ids), embeddings.weight[ids].float())
    assert embeddings.weight.dtype == torch.bfloat16


def test_features_follow_widened_embeddings():
    model = guarded(tiny.build_model("llava", dtype=torch.bfloat16).eval())
    model.model.vision_tower.float()
    model.model.multi_modal_projector.float()
    widen_embeddings(model.get_input_embeddings())
    batch = media_batch("llava")
    with torch.no_grad(), torch.autocast("cpu", torch.float16):
        features = model.get_image_features(batch["pixel_values"])
        assert model(**batch).logits.isfinite().all()
    output = features.pooler_output if hasattr(features, "pooler_output") else features
    assert {part.dtype for part in output} == {torch.float32}


def test_all_casts_of_a_model_are_removed_and_other_hooks_stay():
    model = nn.Sequential(nn.Embedding(8, 4, dtype=torch.float16), nn.Linear(4, 4, dtype=torch.float16))
    seen = []
    model[1].register_forward_pre_hook(lambda module, args, kwargs: seen.append(args), with_kwargs=True)
    guard_leaves([model])
    guard_inputs(model[1], torch.float16)
    widen_embeddings(model[0])
    assert count_casts(model).total() == 3
    remove_casts(model)
    assert not count_casts(model)
    assert [len(module._forward_pre_hooks) for module in model] == [0, 1]
    assert not model[0]._forward_hooks
    assert list(model[1]._forward_pre_hooks) == list(model[1]._forward_pre_hooks_with_kwargs)
    model(torch.arange(3))
    assert len(seen) == 1
    with pytest.raises(RuntimeError, match=CRASHES):
        model[1](torch.ones(2, 4))
