"""Scoring computes what `generate` samples: positions without the padding, token types of answers, scaled logits."""

from __future__ import annotations

import contextlib
import functools
import tempfile
from pathlib import Path
from typing import Any

import cells
import datasets
import pytest
import torch
import transformers
import trl
from cells import Cell
from torch.overrides import TorchFunctionMode
from transformers import ByT5Tokenizer, GPT2Config, GPT2LMHeadModel

from benchmarks import families
from safe_trainers import tiny
from safe_trainers.core.device import float32_spacing
from safe_trainers.model.sequence_trial import depends_on_shift, sees_future
from safe_trainers.rollout import head_scaling
from safe_trainers.rollout.mismatch import EPS
from safe_trainers.rollout.scoring_inputs import positions_of
from upstream import why_not_built


SIZE = {"vocab_size": 259, "bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, **SIZE}
NARROW = {"n_embd": 64, "n_layer": 2, "n_head": 2, **SIZE}
ABSOLUTE = {
    "gpt2": NARROW,
    "gpt_bigcode": NARROW,
    "gpt_neo": {
        "hidden_size": 64,
        "num_layers": 2,
        "num_heads": 2,
        "attention_types": [[["global", "local"], 1]],
        **SIZE,
    },
    "opt": {**SMALL, "ffn_dim": 128, "word_embed_proj_dim": 64},
}
RELATIVE = {
    "llama": {**SMALL, "intermediate_size": 128},
    "phi3": {**SMALL, "num_key_value_heads": 2, "intermediate_size": 128},
    "falcon": SMALL,
    "gptj": {**NARROW, "rotary_dim": 16},
}
LEFT_OUT = {"aya_vision", "cohere2_vision"}
"""Families of the evidence whose text models scale logits that the model around them does not scale."""
SCORES_SCALED = pytest.mark.skipif(
    not hasattr(trl.trainer.utils, "add_fused_lm_head"),
    reason="this TRL scores with the forward pass that generate uses",
)


def built(family: str) -> Any:
    """A tiny model of a family; skips the test if the installed transformers cannot build it."""
    reason = families.ABSENT.get(family) or (family in tiny.VISION_FAMILIES and why_not_built(family))
    if reason:
        pytest.skip(reason)
    return families.build_model(family)


def build(kind: str, config: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    made = transformers.CONFIG_MAPPING[kind](**config)
    return transformers.AutoModelForCausalLM.from_config(made).eval()


@functools.cache
def folder(family: str) -> Path:
    return families.save(family, Path(_root().name) / family, seed=1)


@functools.cache
def _root() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="safe-trainers-scoring-")


# ---- What a model is asked ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", [*ABSOLUTE, *RELATIVE])
def test_absolute_positions_are_found_in_every_dtype(kind: str, dtype: torch.dtype) -> None:
    model = build(kind, (ABSOLUTE | RELATIVE)[kind]).to(dtype)
    assert depends_on_shift(model, EPS[str(dtype)[6:]]) == (kind in ABSOLUTE)


class Tf32(TorchFunctionMode):
    """Rounds the inputs of float32 products to 10 bits of mantissa, as a GPU does in TF32."""

    PRODUCTS = (torch.nn.functional.linear, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__,
                torch.nn.functional.scaled_dot_product_attention)  # fmt: skip

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.PRODUCTS:
            args = [self.rounded(arg) for arg in args]
        return func(*args, **(kwargs or {}))

    def rounded(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dtype != torch.float32:
            return value
        bits = value.detach().contiguous().view(torch.int32)
        even = (bits >> 13) & 1
        return ((bits + 0xFFF + even) & ~0x1FFF).view(torch.float32)


@pytest.mark.parametrize("kind", [*ABSOLUTE, *RELATIVE])
def test_products_in_tf32_are_not_taken_for_positions(kind: str) -> None:
    """A stand-in: TF32 needs a GPU."""
    model = build(kind, (ABSOLUTE | RELATIVE)[kind])
    with Tf32():
        assert float32_spacing("cpu") == EPS["float16"]
        assert depends_on_shift(model, EPS["bfloat16"]) == (kind in ABSOLUTE)


@pytest.mark.parametrize("kind", ["llama", "phi3", "gptj"])
def test_weights_that_are_coarser_than_the_run_are_not_taken_for_positions(kind: str) -> None:
    """Half-precision weights under the autocast of the other format are asked without autocast."""
    model = build(kind, RELATIVE[kind])
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1 and "emb" not in name and "wte" not in name:
                weight.mul_(16)  # a sharp model, in which rounding has a larger effect
    assert not depends_on_shift(model.to(torch.bfloat16), EPS["float16"])


@pytest.mark.parametrize("family", [f for f in families.FAMILIES if families.family_spec(f).modality != "audio"])
def test_families_with_rotary_positions_get_no_others(family: str) -> None:
    model = built(family)
    assert not depends_on_shift(model, EPS["float32"])
    with torch.autocast("cpu", torch.bfloat16):
        assert not depends_on_shift(model, EPS["bfloat16"])


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16], ids=str)
def test_small_effects_of_positions_are_found_under_autocast(autocast: torch.dtype) -> None:
    """A norm after the rotation, as in HunYuan: the effect is smaller than the rounding of half precision."""
    model = build("llama", RELATIVE["llama"])
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(_shift_by_position, with_kwargs=True)
    wrapped = torch.autocast("cpu", autocast)(type(model).forward)
    model.forward = functools.partial(wrapped, model)  # as accelerate wraps a model
    assert depends_on_shift(model, EPS[str(autocast)[6:]])
    assert not depends_on_shift(model, EPS[str(autocast)[6:]], wrapped=True)  # under autocast


def _shift_by_position(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    cos, sin = kwargs["position_embeddings"]
    return args, {**kwargs, "position_embeddings": (cos * 1.03, sin)}


def test_tokens_of_paligemmas_prompts_see_the_future_and_those_of_its_answers_do_not() -> None:
    model = built("paligemma")
    assert sees_future(model, EPS["float32"], token_type=0)
    assert not sees_future(model, EPS["float32"], token_type=1)
    assert not sees_future(built("gemma3"), EPS["float32"], token_type=0)


def test_asking_leaves_no_trace_and_a_model_that_cannot_be_asked_is_left_alone(caplog) -> None:
    model = build("gpt2", ABSOLUTE["gpt2"]).train()
    before = torch.random.get_rng_state()
    assert depends_on_shift(model, EPS["float32"])
    assert model.training
    assert torch.equal(torch.random.get_rng_state(), before)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    model.transformer.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("images only")))
    caplog.set_level("INFO")
    assert not depends_on_shift(model, EPS["float32"])
    assert "images only" in caplog.text


def test_positions_are_those_of_generate() -> None:
    mask = torch.tensor([[0, 0, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]])
    assert positions_of(mask).tolist() == [[0, 0, 0, 1, 2, 2], [0, 1, 2, 3, 4, 5]]


# ---- Text: left-padded prompts --------------------------------------------------------------------------------------


def text_trainer(safe: bool, task: str, kind: str = "gpt2", model: Any = None, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = {**(ABSOLUTE | RELATIVE)[kind], "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    prompts = ["a" * (3 + 5 * length) for length in range(8)]  # of different lengths, so that TRL pads them
    return (cells.SAFE if safe else cells.STOCK)[task](
        model=build(kind, config) if model is None else model,
        args=cells.PLAIN[task](**cells.settings(Cell("text", task, "fp32", None), max_completion_length=8, **changes)),
        train_dataset=datasets.Dataset.from_dict({"prompt": prompts}),
        reward_funcs=cells.token_reward,
        processing_class=ByT5Tokenizer(extra_ids=0),
    )


def scores(trainer: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scores a rollout; returns the scores, those of each sequence alone without padding, and the mask."""
    rows = [trainer.train_dataset[index] for index in (0, 0, 5, 5)]
    batch = trainer._generate_and_score_completions(rows)
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    width = batch["completion_ids"].shape[1]
    with torch.no_grad():
        found = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, width)[0]
        alone = torch.zeros_like(found)
        for row in range(len(ids)):
            kept = ids[row][mask[row] == 1][None]
            logps = trainer.model(input_ids=kept).logits[:, :-1].log_softmax(-1)
            logps = logps.gather(-1, kept[:, 1:, None]).squeeze(-1)[0]
            answer = int(batch["completion_mask"][row].sum())
            alone[row, :answer] = logps[-answer:]
    assert int(batch["prompt_mask"].sum()) < batch["prompt_mask"].numel()
    return found, alone, batch["completion_mask"]


def changes(trainer: Any) -> set[tuple[str, str]]:
    """The places and changes of the report's table of differences from stock TRL."""
    return {tuple(map(str, row[:2])) for row in trainer.precision.report.table("changed from stock").rows}


def difference(trainer: Any) -> float:
    found, alone, mask = scores(trainer)
    return float(((found - alone).abs() * mask).max())


@pytest.mark.parametrize("task", ["grpo", "rloo"])
def test_left_padded_prompts_are_scored_at_the_positions_at_which_they_were_sampled(task: str) -> None:
    assert difference(text_trainer(False, task)) > 0.01  # stock counts the padding
    trainer = text_trainer(True, task)
    assert difference(trainer) < 1e-5
    trainer.train()
    assert next(e["precision/logp_mismatch_max"] for e in trainer.state.log_history if "loss" in e) < 1e-5
    assert ("scoring", "gets position_ids without the padding") in changes(trainer)
    assert not any(module._forward_pre_hooks for module in trainer.model.modules())


def test_a_model_that_computes_only_under_autocast_is_asked_at_its_first_rollout() -> None:
    """Its layers get float32 from the embeddings, and have half-precision weights."""
    model = build("gpt2", ABSOLUTE["gpt2"])
    model.transformer.h.to(torch.bfloat16).requires_grad_(False)
    assert depends_on_shift(model, EPS["bfloat16"]) is None
    trainer = text_trainer(True, "grpo", model=model, bf16=True, steps=1)
    trainer.train()
    assert ("scoring", "gets position_ids without the padding") in changes(trainer)


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "autocast"])
def test_hooks_of_observers_do_not_see_that_the_model_is_asked(bf16: bool) -> None:
    """They count as many forward passes as in stock."""
    counts = []
    for safe in (False, True):
        trainer, seen = text_trainer(safe, "grpo", model=build("gpt2", ABSOLUTE["gpt2"]), bf16=bf16, steps=1), []
        trainer.model.transformer.h[0].register_forward_hook(lambda *_, seen=seen: seen.append(1))
        torch.manual_seed(1)
        trainer.train()
        counts.append(len(seen))
    assert counts[0] == counts[1] > 0
    assert ("scoring", "gets position_ids without the padding") in changes(trainer)
    assert len(trainer.model.transformer.h[0]._forward_hooks) == 1


def test_rotary_models_get_the_inputs_of_stock_and_train_with_its_bits() -> None:
    runs = [text_trainer(safe, "grpo", "llama") for safe in (False, True)]
    for run in runs:
        torch.manual_seed(1)
        run.train()
    assert difference(runs[0]) < 1e-5
    assert cells.fingerprint(runs[0].model) == cells.fingerprint(runs[1].model)
    assert {place for place, _ in changes(runs[1])}.isdisjoint({"scoring", "rollout"})


# ---- Images ---------------------------------------------------------------------------------------------------------


def image_trainer(family: str, task: str, safe: bool = True, **changes: Any) -> Any:
    built(family)
    torch.manual_seed(0)
    options = cells.settings(Cell(family, task, "fp32", None), steps=1, **families.settings(task, family), **changes)
    rewards = {"reward_funcs": cells.token_reward} if task in ("grpo", "rloo") else {}
    return (cells.SAFE if safe else cells.STOCK)[task](
        model=str(folder(family)),
        args=cells.PLAIN[task](**options, model_init_kwargs={"dtype": "float32"}),
        **families.trainer_inputs(task, family),
        **rewards,
    )


def mismatch(trainer: Any) -> float:
    return next(e["precision/logp_mismatch_max"] for e in trainer.state.log_history if "loss" in e)


def future(trainer: Any) -> float:
    """How much the last token of a completion changes the scores of those before it."""
    batch = trainer._generate_and_score_completions([trainer.train_dataset[0]] * 2)
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask, width = torch.ones_like(ids), batch["completion_ids"].shape[1]
    media = {name: batch[name] for name in ("pixel_values", "token_type_ids", "num_images")}
    found = []
    for last in (10, 11):
        ids[:, -1] = last
        with torch.no_grad():
            found.append(trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, width, **media)[0])
    return float((found[0] - found[1])[:, :-1].abs().max())


def test_answers_of_paligemma_are_scored_without_their_future() -> None:
    assert future(image_trainer("paligemma", "grpo", safe=False)) > 1e-3
    trainer = image_trainer("paligemma", "grpo")
    assert future(trainer) < 1e-5
    trainer.train()
    assert mismatch(trainer) < 1e-5
    assert ("scoring", "answers get the token type 1") in changes(trainer)
    assert ("scoring", "gets position_ids without the padding") not in changes(trainer)


def inputs_of_loss(trainer: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """What the model is called with in the loss of a batch."""
    seen: list[dict[str, Any]] = []
    handle = trainer.model.register_forward_pre_hook(lambda m, a, kwargs: seen.append(kwargs), with_kwargs=True)
    trainer.compute_loss(trainer.model, dict(batch))
    handle.remove()
    return seen[-1]


def influence(trainer: Any) -> float:
    """How much the last token of an answer changes the log-probabilities of the tokens before it in a loss."""
    batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    names = ("input_ids", "attention_mask", "token_type_ids", "pixel_values")
    found = inputs_of_loss(trainer, batch)
    inputs = {name: found[name] for name in names}
    last = inputs["attention_mask"][0].nonzero().max()
    ids = inputs["input_ids"].clone()
    ids[0, last] = ids[0, last - 1]
    assert ids[0, last] != inputs["input_ids"][0, last]
    with torch.no_grad():
        one, other = (trainer.model(**{**inputs, "input_ids": x}).logits for x in (inputs["input_ids"], ids))
    return float((one - other)[0, :last].abs().max())


def test_fine_tuning_paligemma_does_not_see_the_tokens_that_it_predicts() -> None:
    assert influence(image_trainer("paligemma", "sft", safe=False)) > 1e-3
    trainer = image_trainer("paligemma", "sft")
    assert influence(trainer) < 1e-5
    batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    changed = inputs_of_loss(trainer, batch)["token_type_ids"]
    images = batch["input_ids"] == trainer.model.config.image_token_id
    assert images.any()
    assert torch.equal(changed == 1, (batch["labels"] != -100) & ~images)
    assert not batch["token_type_ids"].any()  # TRL's batch is not modified


scale_of = functools.partial(head_scaling.left_out, compute_context=contextlib.nullcontext)


@SCORES_SCALED
@pytest.mark.parametrize("family", sorted(LEFT_OUT))
def test_rollouts_scale_logits_where_the_forward_pass_leaves_it_out(family: str) -> None:
    trainer = image_trainer(family, "grpo")
    head = trainer.model.get_output_embeddings()
    before = dict(head._forward_hooks)
    trainer.train()
    assert mismatch(trainer) < 1e-5
    assert dict(head._forward_hooks) == before
    assert ("rollout", "scales logits as scoring does") in changes(trainer)


@SCORES_SCALED
def test_stock_samples_other_probabilities_than_it_scores() -> None:
    """The forward pass that `generate` uses differs from the scored one by the scale, in stock."""
    trainer = image_trainer("aya_vision", "grpo", safe=False)
    process = scale_of(trainer.model, trainer.temperature)
    logits = torch.tensor([[1.0, -2.0, 8.0]])
    scale = trainer.model.config.text_config.logit_scale
    assert scale != 1
    assert torch.equal(process(logits), logits * scale)


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "llava", "text"])
def test_models_that_apply_what_their_config_says_are_left_alone(family: str) -> None:
    trainer = image_trainer(family, "grpo")
    assert scale_of(trainer.model, trainer.temperature) is None


@SCORES_SCALED
def test_granite_inside_of_llava_next_is_scaled() -> None:
    config = built("llava_next").config
    size = {name: getattr(config.text_config, name) for name in ("vocab_size", "hidden_size", "intermediate_size")}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config.text_config = transformers.CONFIG_MAPPING["granite"](**size, **heads, logits_scaling=8.0)
    torch.manual_seed(0)
    model = transformers.LlavaNextForConditionalGeneration(config)
    trl.trainer.utils.add_fused_lm_head(model, temperature=0.7)
    process = scale_of(model, temperature=0.7)
    logits = torch.tensor([[8.0, -16.0]])
    assert torch.equal(process(logits), logits / 8)
    assert scale_of(model, temperature=7.0) is None  # not what was scored


@SCORES_SCALED
def test_a_model_that_computes_only_under_autocast_is_asked_under_autocast() -> None:
    model = image_trainer("aya_vision", "grpo").model
    model.model.language_model.to(torch.bfloat16)  # the projector and the head remain float32
    assert scale_of(model, 1.0) is None
    process = head_scaling.left_out(model, 1.0, lambda: torch.autocast("cpu", torch.bfloat16))
    assert process(torch.tensor(8.0)) == 8 * model.config.text_config.logit_scale


def test_a_soft_cap_comes_after_the_scale() -> None:
    config = transformers.CONFIG_MAPPING["gemma2"](final_logit_softcapping=2.0)
    config.logit_scale = 0.5
    logits = torch.tensor([3.0, -9.0])
    assert torch.allclose(head_scaling.postprocessing(config)(logits), torch.tanh(logits * 0.5 / 2.0) * 2.0)
    assert head_scaling.postprocessing(transformers.CONFIG_MAPPING["llama"]()) is None


def test_the_head_is_put_back_if_a_rollout_fails() -> None:
    model = GPT2LMHeadModel(GPT2Config(**NARROW)).eval()
    ids = torch.tensor([[5, 6]])
    plain = model(ids).logits
    with head_scaling.applied(model, lambda logits: logits * 0.5):
        assert torch.equal(model(ids).logits, plain * 0.5)
    model.lm_head.weight.data = model.lm_head.weight.data[:, :1]
    with pytest.raises(RuntimeError), head_scaling.applied(model, lambda logits: logits * 0.5):
        model(ids)
    assert not model.lm_head._forward_hooks
