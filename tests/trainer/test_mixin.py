"""The sandwich on real trainers: when its hooks fire, what they see, and what they leave alone."""

import gc
import json
import warnings
import weakref
from types import SimpleNamespace

import cells
import pytest
import torch
import trl
from accelerate import dispatch_model
from cells import Cell
from datasets import Dataset, IterableDataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    BitsAndBytesConfig,
    Trainer,
)

from safe_trainers import (
    CheckpointError,
    ContractError,
    PrecisionBase,
    PrecisionError,
    PrecisionMixin,
    PrecisionWarning,
    SafeGRPOConfig,
    SafeGRPOTrainer,
    SafeRLOOTrainer,
    SafeSFTConfig,
    SafeSFTTrainer,
    tiny,
)
from safe_trainers.core.patches import replaced_by
from safe_trainers.trainer import base
from safe_trainers.trainer.base import move_early
from upstream import needs_streams, towers_count_in_the_dtype_of_pixels, why_not_built


def build(cell, safe=True, trainer_class=None, config=None, **changes):
    made = cells.arguments(cell, config or cells.PLAIN[cell.task], **changes)
    return (trainer_class or (cells.SAFE if safe else cells.STOCK)[cell.task])(**made)


GRPO = Cell("aria", "grpo", "bf16", "bf16")


def test_the_peft_hook_fires_after_trls_cast_and_before_the_trainer_exists():
    """TRL casts the adapters of a quantised model to bfloat16; at the hook they are as PEFT made them again."""
    pytest.importorskip("bitsandbytes")
    seen = {}

    class Watching(SafeSFTTrainer):
        def _adapters_ready(self, model):
            seen["held"] = len(self._adapter_guard._originals)
            super()._adapters_ready(model)
            seen["dtypes"] = {p.dtype for n, p in model.named_parameters() if "lora_" in n}
            seen["trained"] = all(p.requires_grad for n, p in model.named_parameters() if "lora_" in n)
            seen["optimizer"] = hasattr(self, "optimizer")
            seen["accelerator"] = hasattr(self, "accelerator")
            seen["wrapped"] = hasattr(model, "_original_forward")

    config = BitsAndBytesConfig(load_in_4bit=True)
    model = AutoModelForImageTextToText.from_pretrained(cells.folder("llava"), quantization_config=config)
    made = cells.arguments(Cell("llava", "sft", "fp32", "bf16", lora=True), trl.SFTConfig)
    made["args"].model_init_kwargs = None
    trainer = Watching(**{**made, "model": model})
    assert seen.pop("held") >= 4
    assert seen == {
        "dtypes": {torch.float32}, "trained": True, "optimizer": False, "accelerator": False, "wrapped": False,
    }  # fmt: skip
    assert trainer.precision.coverage.fired["adapters"] == 1


def aria_pixels():
    """What pixels of an Aria in bfloat16 are cast to: to nothing where that would move its patches."""
    return torch.float32 if towers_count_in_the_dtype_of_pixels() else torch.bfloat16


def test_hooks_are_reached_as_often_as_trl_calls_them():
    trainer = build(Cell("aria", "grpo", "bf16", "bf16", beta=0.1), max_steps=2)
    trainer.train()
    fired = trainer.precision.coverage.fired
    # Rollout and scoring batch of each generation.
    assert dict(fired) == {"adapters": 1, "inputs": 4, "rollout": 2, "buffer": 2}
    assert trainer.precision.coverage.missing() == []
    trainer = build(Cell("aria", "sft", "bf16", "bf16"), max_steps=2)
    trainer.train()
    assert dict(trainer.precision.coverage.fired) == {"adapters": 1, "inputs": 2}


@pytest.mark.parametrize("task", ["grpo", "rloo"])
def test_several_iterations_use_one_buffer_and_never_change_it(task):
    """num_iterations > 1 returns the same buffered dict for several steps."""
    seen = []

    class Watching(cells.SAFE[task]):
        def compute_loss(self, model, inputs, *args, **kwargs):
            seen.append(
                (id(inputs["pixel_values"]), inputs["pixel_values"].dtype, inputs["pixel_values"].sum().item())
            )
            return super().compute_loss(model, inputs, *args, **kwargs)

    trainer = build(
        Cell("aria", task, "bf16", "bf16"),
        trainer_class=Watching,
        steps=4,
        num_iterations=2,
        steps_per_generation=2,
        gradient_accumulation_steps=2,
    )
    trainer.train()
    assert {dtype for _, dtype, _ in seen} == {aria_pixels()}
    assert seen[0:2] == seen[2:4]
    assert trainer.precision.coverage.fired["rollout"] == 2
    assert {b["pixel_values"].dtype for b in trainer._buffered_inputs} == {aria_pixels()}
    assert {b["advantages"].dtype for b in trainer._buffered_inputs} == {torch.float32}


def test_the_buffer_holds_half_the_bytes():
    def media_bytes(safe):
        trainer = build(Cell("llava", "grpo", "bf16", "bf16"), safe)
        trainer.train()
        return sum(b["pixel_values"].nbytes for b in trainer._buffered_inputs)

    assert media_bytes(safe=True) * 2 == media_bytes(safe=False)


def test_what_trl_prepared_in_its_own_way_is_cast_before_it_is_buffered():
    class OwnWay(trl.GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            batch = super()._generate_and_score_completions(inputs)
            self.given = {**batch, "pixel_values": batch["pixel_values"].float()}
            return self.given

    class SafeOwnWay(PrecisionMixin, OwnWay, PrecisionBase):
        pass

    trainer = build(Cell("llava", "grpo", "bf16", "bf16"), trainer_class=SafeOwnWay)
    trainer.train()
    assert {b["pixel_values"].dtype for b in trainer._buffered_inputs} == {torch.bfloat16}
    assert trainer.given["pixel_values"].dtype == torch.float32  # TRL's own batch is not changed


@pytest.mark.parametrize("task", ["grpo", "rloo", "sft"])
def test_evaluation_is_covered(task):
    made = cells.arguments(Cell("aria", task, "bf16", None), cells.PLAIN[task], per_device_eval_batch_size=4)
    with pytest.raises(RuntimeError, match="should be the same"):
        cells.STOCK[task](**made, eval_dataset=made["train_dataset"]).evaluate()
    cells.reset_autocast()
    made = cells.arguments(Cell("aria", task, "bf16", None), cells.PLAIN[task], per_device_eval_batch_size=4)
    metrics = cells.SAFE[task](**made, eval_dataset=made["train_dataset"]).evaluate()
    assert torch.isfinite(torch.tensor(metrics["eval_loss"]))


@pytest.mark.parametrize("flag", ["bf16_full_eval", "fp16_full_eval"])
def test_an_evaluation_in_half_precision_leaves_the_weights_as_they_are(flag):
    losses = []
    for safe in (False, True):
        trainer = build(Cell("text", "sft", "fp32", None), safe, **{flag: True})
        trainer.train()
        trained = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
        losses.append(trainer.evaluate(trainer.train_dataset)["eval_loss"])
        now = trainer.model.state_dict()
        assert all(torch.equal(now[name], value) for name, value in trained.items()) == safe
    assert losses[0] == losses[1]  # the evaluation itself computes in half precision
    trainer.train()  # stock's optimizer, whose state is float32, fails with half weights
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}


@pytest.mark.parametrize("task", ["grpo", "rloo"])
def test_several_pictures_in_a_prompt(task):
    rows = tiny.prompt_dataset(8, seed=0)
    pictures = [rows[i]["image"] for i in range(8)]
    data = Dataset.from_dict(
        {
            "prompt": [rows[i]["prompt"] for i in range(8)],
            "images": [[pictures[i]] if i % 2 else [pictures[i], pictures[i - 1]] for i in range(8)],
        }
    )
    for safe in (False, True):
        made = cells.arguments(Cell("aria", task, "bf16", "bf16"), cells.PLAIN[task])
        trainer = (cells.SAFE if safe else cells.STOCK)[task](**{**made, "train_dataset": data})
        if safe:
            trainer.train()
            assert all(torch.isfinite(torch.tensor(e["loss"])) for e in trainer.state.log_history if "loss" in e)
        else:
            with pytest.raises((RuntimeError, ValueError)) as stopped:
                trainer.train()
            cells.reset_autocast()
            if "Image features and image tokens do not match" in str(stopped.value):
                pytest.skip("this TRL drops images of Aria prompts with several images")
            assert "should be the same" in str(stopped.value)


def test_pictures_that_a_tool_returns_follow_the_tower_too():
    """TRL prepares tool images by themselves, in `super()._prepare_inputs`."""
    trainer = build(GRPO)
    processor = trainer.processing_class
    rows = tiny.prompt_dataset(2, seed=0)
    inputs = processor.image_processor(images=[rows[0]["image"], rows[1]["image"]], return_tensors="pt")
    trainer._prepare_inputs_of_a_model = super(trl.GRPOTrainer, trainer)._prepare_inputs
    prepared = trainer._prepare_inputs_of_a_model(inputs)
    assert type(prepared) is type(inputs)
    assert inputs["pixel_values"].dtype == torch.float32
    # Images alone are enough for the comparison: the tower needs no text.
    assert prepared["pixel_values"].dtype == aria_pixels()


def test_a_trainer_that_calls_past_the_base_is_covered():
    """SDPO calls `_BaseTrainer._prepare_inputs(self, ...)`; the virtual `_prepare_input` is still reached."""
    trainer = build(GRPO)
    batch = {
        "pixel_values": torch.rand(1, 3, 32, 32),
        "second_per_grid_ts": torch.rand(1),
        "input_ids": torch.ones(1, 2),
    }
    prepared = Trainer._prepare_inputs(trainer, batch)
    assert prepared["pixel_values"].dtype == aria_pixels()
    assert prepared["second_per_grid_ts"] is batch["second_per_grid_ts"]


@pytest.mark.parametrize("stage", [2, 3])
def test_under_deepspeed_only_media_change_their_dtype(stage):
    """A stand-in: `is_deepspeed_enabled` alone is what makes stock cast every floating input; no engine runs here."""

    class Engine:
        zero_stage = stage
        hf_ds_config = SimpleNamespace(dtype=lambda: torch.bfloat16)

    class Accelerated:
        def __init__(self, accelerator):
            self.accelerator, self.state = accelerator, SimpleNamespace(deepspeed_plugin=Engine)

        def __getattr__(self, name):
            return getattr(self.accelerator, name)

    batch = {"pixel_values": torch.rand(1, 3, 32, 32), "second_per_grid_ts": torch.rand(3), "margin": torch.rand(2)}
    prepared = {}
    for safe in (False, True):
        trainer = build(Cell("aria", "sft", "bf16", "bf16"), safe)
        trainer.is_deepspeed_enabled = True
        trainer.accelerator = Accelerated(trainer.accelerator)
        prepared[safe] = trainer._prepare_inputs(dict(batch))
    assert {k: v.dtype for k, v in prepared[False].items()} == dict.fromkeys(batch, torch.bfloat16)
    assert {k: v.dtype for k, v in prepared[True].items()} == {
        "pixel_values": torch.bfloat16 if stage == 3 else aria_pixels(),
        "second_per_grid_ts": torch.float32,
        "margin": torch.float32,
    }
    # With sharded weights a tower cannot be asked: media get what stock gives them.
    assert ("ZeRO-3 shards the weights" in trainer.precision.media[0].reason) == (stage == 3)


def test_arguments_may_be_positional_as_in_trl():
    made = cells.arguments(GRPO, trl.GRPOConfig)
    trainer = SafeGRPOTrainer(made["model"], made["reward_funcs"], made["args"], made["train_dataset"])
    assert trainer.args is made["args"]
    with pytest.raises(TypeError, match="missing a required argument: 'reward_funcs'"):
        SafeRLOOTrainer(made["model"])


def test_without_args_a_safe_config_is_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer = SafeSFTTrainer(str(cells.folder("text")), train_dataset=cells.dataset("sft", "text"))
    assert isinstance(trainer.args, SafeSFTConfig)
    assert trainer.args.output_dir == "text-SFT"
    assert trainer.precision.policy.compute.text == "float32"  # auto, on a CPU
    # Stock decides bf16 for itself, and refuses its own decision on a machine without it.
    with pytest.raises(ValueError, match="doesn't support bf16/gpu"):
        trl.SFTConfig("out")


def test_the_reference_model_gets_boundaries_of_its_own():
    trainer = build(Cell("aria", "grpo", "bf16", "bf16", beta=0.1))
    assert trainer.ref_model is not None
    hooks = [m for m in trainer.ref_model.modules() if m._forward_pre_hooks]
    assert len(hooks) == len([m for m in trainer.model.modules() if m._forward_pre_hooks]) > 0


def test_nothing_is_placed_where_no_dtypes_can_meet():
    trainer = build(Cell("aria", "grpo", "fp32", None), config=SafeGRPOConfig, share_media_features="off")
    assert trainer.precision.boundaries.boundaries == ()
    assert not any(m._forward_pre_hooks for m in trainer.model.modules())
    assert replaced_by(trainer.model.model, "get_image_features") == ["frozen-towers"]  # not a boundary


def test_problems_of_a_live_model_are_refused_at_construction_all_at_once():
    model = AutoModelForImageTextToText.from_pretrained(cells.folder("aria"), dtype=torch.float16)
    made = cells.arguments(Cell("aria", "grpo", "fp16", "bf16"), SafeGRPOConfig, model_init_kwargs=None)
    made["args"].rollout_compute, made["args"].precision = "sometimes", "bf16"
    with pytest.raises(PrecisionError) as caught:
        SafeGRPOTrainer(**{**made, "model": model})
    assert [p.id for p in caught.value.problems] == ["unknown-choice", "half-weights-under-other-precision"]
    assert "`from_pretrained(..., dtype='bfloat16')`" in str(caught.value)


def test_declared_problems_are_refused_before_the_model_is_read(tmp_path):
    made = cells.arguments(Cell("text", "sft", "fp16", "bf16"), SafeSFTConfig, precision="bf16")
    with pytest.raises(PrecisionError, match="half-weights-under-other-precision"):
        SafeSFTTrainer(**{**made, "model": str(tmp_path / "no-such-model")})


@pytest.mark.parametrize("lora", [False, True])
def test_weights_in_the_other_half_format_are_warned_of_and_train(lora):
    """A text model gets through it; where it has an adapter, stock generates in the weights' own format."""
    cell = Cell("text", "grpo", "fp16", "bf16", lora=lora)
    assert cells.run(cell, safe=False).error is None
    with pytest.warns(PrecisionWarning, match="half-weights-under-other-autocast"):
        assert cells.run(cell, safe=True).error is None


def test_a_frozen_base_in_the_other_half_format_is_brought_to_where_it_computes():
    cell = Cell("llava", "sft", "fp16", "bf16", lora=True)
    assert "mixed dtype" in cells.run(cell, safe=False).error
    with pytest.warns(PrecisionWarning, match="half-weights-under-other-autocast"):
        outcome = cells.run(cell, safe=True, keep=True)
    assert outcome.error is None
    casts = outcome.trainer.precision.weights.layout.casts
    assert {(cast.source, cast.target) for cast in casts} <= {("float16", "bfloat16"), ("float16", "float32")}
    assert casts


def test_trained_weights_in_the_other_half_format_that_crash_are_refused_and_the_advice_trains():
    cell = Cell("llava", "sft", "fp16", "bf16")
    assert "mixed dtype" in cells.run(cell, safe=False).error
    said = cells.run(cell, safe=True).error
    assert "mixed-weights-cannot-meet" in said
    assert "`model_init_kwargs={'dtype': 'bfloat16'}`" in said
    assert cells.run(Cell("llava", "sft", "bf16", "bf16"), safe=True).error is None


def test_dtypes_are_spelt_for_trl_in_any_of_our_spellings():
    trainer = build(Cell("text", "sft", "bf16", None), model_init_kwargs={"dtype": "torch.bfloat16"})
    assert trainer.args.model_init_kwargs == {"dtype": "torch.bfloat16"}  # as the user wrote it
    assert trainer.precision.model.weights == {"bfloat16"}


def test_the_older_name_of_the_load_dtype_works_with_a_warning():
    """Stock TRL ignores `torch_dtype` without a sign, and loads float32."""
    cell = Cell("text", "sft", "fp32", "bf16")
    made = cells.arguments(cell, trl.SFTConfig, model_init_kwargs={"torch_dtype": "bfloat16"})
    stock = trl.SFTTrainer(**made)
    assert {p.dtype for p in stock.model.parameters()} == {torch.float32}
    with pytest.warns(PrecisionWarning, match="torch-dtype-renamed"):
        trainer = build(cell, model_init_kwargs={"torch_dtype": "bf16"})
    assert trainer.precision.model.weights == {"bfloat16"}
    trainer = build(cell, model_init_kwargs={"torch_dtype": torch.bfloat16, "dtype": "bfloat16"})
    assert trainer.precision.model.weights == {"bfloat16"}
    with pytest.raises(PrecisionError, match="two-load-dtypes"):
        build(cell, model_init_kwargs={"torch_dtype": "float16", "dtype": "bfloat16"})


def test_a_class_that_hands_its_arguments_on_can_be_called_by_position():
    class HandsOn(trl.GRPOTrainer):
        def __init__(self, *args, extra=1, **kwargs):
            self.extra = extra
            super().__init__(*args, **kwargs)

    class SafeHandsOn(PrecisionMixin, HandsOn, PrecisionBase):
        pass

    made = cells.arguments(GRPO, trl.GRPOConfig)
    trainer = SafeHandsOn(made["model"], made["reward_funcs"], made["args"], made["train_dataset"], extra=3)
    assert trainer.args is made["args"]
    assert trainer.extra == 3


def test_a_mixed_model_that_cannot_be_asked_is_left_to_train():
    """Kernels that want another device, before the trainer has moved the model: no reason to stop."""
    model = AutoModelForImageTextToText.from_pretrained(cells.folder("llava"), dtype=torch.bfloat16)
    model.model.language_model.norm.float()
    asked = []

    def only_cuda(module, args):
        asked.append(1)
        if len(asked) <= 2:
            raise RuntimeError("FlashAttention only supports CUDA tensors")

    model.model.language_model.register_forward_pre_hook(only_cuda)
    made = cells.arguments(Cell("llava", "sft", "bf16", "bf16"), trl.SFTConfig, model_init_kwargs=None)
    trainer = SafeSFTTrainer(**{**made, "model": model})
    assert len(asked) == 2  # the mixed weights, and media in half precision
    trainer.train()


def float32_tower():
    """A SmolVLM whose tower is float32 and whose text model is bfloat16."""
    if why_not_built("smolvlm"):
        pytest.skip(why_not_built("smolvlm"))
    model = AutoModelForImageTextToText.from_pretrained(cells.folder("smolvlm"), dtype=torch.bfloat16)
    model.model.vision_model.float()
    model.model.connector.float()
    return model


def test_a_mixed_model_is_asked_without_pictures_where_the_data_has_none():
    """SmolVLM merges features of another dtype than its text with a cast; without pictures there are none to merge."""
    for data, merges in ((cells.dataset("sft", "text"), False), (cells.dataset("sft", "smolvlm"), True)):
        model = float32_tower()
        made = cells.arguments(Cell("smolvlm", "sft", "bf16", None), trl.SFTConfig, model_init_kwargs=None)
        made |= {"model": model, "train_dataset": data}
        trainer = SafeSFTTrainer(**made)
        assert bool(trainer.precision.boundaries.operations) <= merges
        trainer.train()


def test_the_dataloader_moves_media_as_decided():
    """SFT's dataloader moves a batch before the trainer sees it: from the second batch on, its collator casts."""
    trainer = build(Cell("llava", "sft", "bf16", "bf16"))
    own = trainer.data_collator
    first = next(iter(trainer.get_train_dataloader()))
    assert first["pixel_values"].dtype == torch.float32
    trainer.train()
    later = next(iter(trainer.get_train_dataloader()))
    assert later["pixel_values"].dtype == torch.bfloat16
    assert later["input_ids"].dtype == torch.int64
    assert type(later) is type(first)
    assert trainer.data_collator is own  # TRL asks for its type


OPENED = []
"""Grows with each time that the stream is read from its beginning."""


def pictures_one_by_one():
    OPENED.append(1)
    yield from cells.dataset("grpo", "smolvlm")


@needs_streams
def test_a_stream_with_pictures_is_asked_with_a_picture():
    model = float32_tower()
    made = cells.arguments(Cell("smolvlm", "grpo", "bf16", None), trl.GRPOConfig, model_init_kwargs=None)
    stream = IterableDataset.from_generator(pictures_one_by_one)
    assert stream.column_names is None
    OPENED.clear()
    trl.GRPOTrainer(**{**made, "model": model, "train_dataset": stream})
    stock = len(OPENED)
    OPENED.clear()
    trainer = SafeGRPOTrainer(**{**made, "model": model, "train_dataset": stream})
    assert len(OPENED) == stock + 1
    assert "media trial" in trainer.precision.report.facts
    trainer.train()


def float32_norms(family):
    """A bfloat16 model whose norms are float32."""
    model = AutoModelForImageTextToText.from_pretrained(cells.folder(family), dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data = parameter.data.float()
    return model


class Mixing(torch.nn.Module):
    """A module that multiplies the output of a layer with a matrix of its own, of another dtype."""

    def __init__(self, width, dtype):
        super().__init__()
        self.inner = torch.nn.Linear(width, width, dtype=dtype)
        self.matrix = torch.nn.Parameter(torch.eye(width))

    def forward(self, hidden):
        return self.inner(hidden) @ self.matrix


def mixing(kind=Mixing):
    model = AutoModelForCausalLM.from_pretrained(cells.folder("text"), dtype=torch.bfloat16)
    model.model.norm = kind(model.config.hidden_size, torch.bfloat16)
    return model


class MixingOutOfReach(Mixing):
    """The same in code that no function mode reaches, as that of TorchScript."""

    def forward(self, hidden):
        hidden = self.inner(hidden)
        with torch._C.DisableTorchFunction():
            return hidden @ self.matrix


def test_trained_weights_that_meet_in_an_operation_train():
    made = cells.arguments(Cell("text", "sft", "bf16", None), trl.SFTConfig, model_init_kwargs=None)
    trainer = SafeSFTTrainer(**{**made, "model": mixing()})
    assert [b.module for b in trainer.precision.boundaries.operations] == ["model.norm"]
    assert trainer.precision.model.weights == {"bfloat16", "float32"}
    trainer.train()
    with pytest.raises(RuntimeError, match="same dtype"):
        trl.SFTTrainer(**{**made, "model": mixing()}).train()
    cells.reset_autocast()


def test_mixed_weights_that_cannot_meet_are_refused_and_the_advice_trains():
    made = cells.arguments(Cell("text", "sft", "bf16", None), trl.SFTConfig, model_init_kwargs=None)
    with pytest.raises(PrecisionError) as caught:
        SafeSFTTrainer(**{**made, "model": mixing(MixingOutOfReach)})
    assert [p.id for p in caught.value.problems] == ["mixed-weights-cannot-meet"]
    assert str(caught.value.problems[0].fix) == "`bf16=True`: autocast then casts both to one dtype"
    made = cells.arguments(Cell("text", "sft", "bf16", "bf16"), trl.SFTConfig, model_init_kwargs=None)
    trainer = SafeSFTTrainer(**{**made, "model": mixing(MixingOutOfReach)})
    trainer.train()
    assert trainer.precision.model.weights == {"bfloat16", "float32"}


def test_frozen_weights_that_cannot_meet_are_brought_to_one_dtype():
    """The same model with adapters: what is frozen may be cast, and it is said."""
    made = cells.arguments(Cell("text", "sft", "bf16", None, lora=True), trl.SFTConfig, model_init_kwargs=None)
    trainer = SafeSFTTrainer(**{**made, "model": mixing()})
    assert trainer.precision.model.weights == {"bfloat16"}
    assert "float32 -> bfloat16: 1 tensor (model.norm.matrix)" in str(trainer.precision.weights)
    trainer.train()
    stock = trl.SFTTrainer(**{**made, "model": mixing()})
    with pytest.raises(RuntimeError, match="same dtype"):
        stock.train()
    cells.reset_autocast()


def test_fused_experts_beside_float32_norms_train_without_a_cast():
    made = cells.arguments(Cell("aria", "sft", "bf16", None), trl.SFTConfig, model_init_kwargs=None)
    trainer = SafeSFTTrainer(**{**made, "model": float32_norms("aria")})
    trainer.train()
    assert trainer.precision.weights.layout.casts == ()
    assert trainer.precision.weights.layout.guarded > 0


@pytest.mark.parametrize("flag", [None, "bf16"])
def test_float32_norms_in_a_half_model_train(flag):
    """What k-bit preparation leaves behind; without autocast stock fails at the next Linear."""
    for safe in (False, True):
        made = cells.arguments(Cell("llava", "grpo", "bf16", flag), trl.GRPOConfig, model_init_kwargs=None)
        trainer = (SafeGRPOTrainer if safe else trl.GRPOTrainer)(**{**made, "model": float32_norms("llava")})
        if flag is None and not safe:
            with pytest.raises(RuntimeError, match="same dtype"):
                trainer.train()
            cells.reset_autocast()
        else:
            trainer.train()


def test_warnings_are_given_once_and_say_what_to_do():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PrecisionWarning)
        build(Cell("text", "sft", "bf16", None))
    texts = [str(w.message) for w in caught if issubclass(w.category, PrecisionWarning)]
    assert len(texts) == 1
    assert "trainable weights in bfloat16" in texts[0]
    assert "fix: `model_init_kwargs={'dtype': 'float32'}` with `bf16=True`" in texts[0]


def test_fp16_on_a_cpu_warns_that_nothing_happens():
    with pytest.warns(PrecisionWarning, match="fp16-on-cpu"):
        trainer = build(Cell("text", "sft", "fp32", "fp16"))
    assert trainer.precision.policy.compute.text == "float32"
    assert not trainer.accelerator.native_amp  # what accelerate says nothing about
    assert trainer.accelerator.scaler is None


def test_an_accelerator_that_disagrees_is_refused(monkeypatch):
    """A stray variable in the environment decides the precision behind the arguments' back."""

    class Stray(SafeSFTTrainer):
        def create_accelerator_and_postprocess(self):
            self.args.mixed_precision = "bf16"
            monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
            super().create_accelerator_and_postprocess()

    with pytest.raises(PrecisionError) as caught:
        build(Cell("text", "sft", "fp32", None), trainer_class=Stray)
    assert [p.id for p in caught.value.problems] == ["accelerator-disagrees"]


def test_decisions_can_be_read_and_stored():
    trainer = build(GRPO)
    trainer.train()
    for decided in (trainer.precision.policy, trainer.precision.model, trainer.precision.boundaries):
        json.dumps(decided.to_dict())
    assert "vision_tower" in str(trainer.precision.boundaries)
    cast = None if aria_pixels() == torch.float32 else "bfloat16"
    assert [(d.key, d.dtype) for d in trainer.precision.media] == [("pixel_values", cast)]


def test_the_rollout_context_is_the_users_choice():
    seen = {}

    class Watching(trl.GRPOTrainer):
        def _generate_single_turn(self, *args, **kwargs):
            seen[self.args.rollout_compute] = torch.is_autocast_enabled("cpu")
            return super()._generate_single_turn(*args, **kwargs)

    class SafeWatching(PrecisionMixin, Watching, PrecisionBase):
        config_class = SafeGRPOConfig

    for choice in ("training", "stock"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PrecisionWarning)
            trainer = build(
                Cell("text", "grpo", "fp32", "bf16"),
                trainer_class=SafeWatching,
                config=SafeGRPOConfig,
                rollout_compute=choice,
            )
            trainer.train()
    assert seen == {"training": True, "stock": False}


def test_a_trainer_that_skips_the_constructor_of_transformers_cannot_train():
    """A stand-in for trainers with a loop of their own, as PPO of TRL 1.9."""

    class OwnLoop(trl.SFTTrainer):
        def __init__(self, model, args):
            self.model, self.args = model, args

        def train(self):
            pass

    safe = type("SafeOwnLoop", (PrecisionMixin, OwnLoop, PrecisionBase), {})
    made = cells.arguments(Cell("text", "sft", "fp32", None), trl.SFTConfig)
    trainer = safe(model=tiny.build_model("text"), args=made["args"])
    with pytest.raises(ContractError, match="SafeOwnLoop cannot train: SFTTrainer was built without"):
        trainer.train()


@pytest.mark.parametrize("task", cells.STABLE)
def test_adapters_of_a_safe_config_depend_on_the_seed_alone(task):
    """Older releases of TRL make adapters before the seed: upstream/trl_makes_adapters_before_the_seed.py."""

    def adapter(seed: int, state: int) -> torch.Tensor:
        made = cells.arguments(Cell("text", task, "fp32", None, lora=True), cells.SAFE_CONFIG[task], seed=seed)
        made["peft_config"].init_lora_weights = True
        torch.manual_seed(state)
        trainer = cells.SAFE[task](**made)
        return next(p for name, p in trainer.model.named_parameters() if "lora_A" in name).detach().clone()

    first = adapter(seed=0, state=1)
    assert torch.equal(first, adapter(seed=0, state=2))
    assert not torch.equal(first, adapter(seed=1, state=1))


def test_a_model_is_on_the_device_of_the_run_before_it_is_tried(monkeypatch):
    """The device "meta" stands for a GPU."""

    def moved(args=None, **attributes):
        model = AutoModelForCausalLM.from_pretrained(cells.folder("text"))
        vars(model).update(attributes)
        given = {
            "fp16_full_eval": False,
            "bf16_full_eval": False,
            "device": torch.device("meta"),
            "parallel_mode": None,
        }
        move_early(model, SimpleNamespace(**given | (args or {})))
        return {parameter.device.type for parameter in model.parameters()}

    assert moved() == {"meta"}
    assert moved({"place_model_on_device": False}) == {"cpu"}
    assert moved({"bf16_full_eval": True}) == {"cpu"}
    assert moved({"deepspeed_plugin": object()}) == {"cpu"}
    assert moved(hf_device_map={"": "cpu"}) == {"cpu"}
    order = []
    monkeypatch.setattr(base, "move_early", lambda model, args: order.append("moved"))
    monkeypatch.setattr(base, "match_operations", lambda *args: order.append("tried"))
    build(GRPO)
    assert order == ["moved", "tried"]


def test_a_checkpoint_that_is_refused_leaves_nothing_on_the_model(tmp_path):
    trainer = build(Cell("llava", "grpo", "bf16", "bf16"))
    hooks = [(dict(m._forward_pre_hooks), dict(m._forward_hooks)) for m in trainer.model.modules()]
    with pytest.raises(CheckpointError):
        trainer.train(resume_from_checkpoint=str(tmp_path))
    assert [(dict(m._forward_pre_hooks), dict(m._forward_hooks)) for m in trainer.model.modules()] == hooks


def test_a_dispatched_model_is_freed_with_its_trainer():
    """accelerate replaces the `forward` of each module by one that refers to the module."""
    model = AutoModelForCausalLM.from_pretrained(cells.folder("text"))
    dispatch_model(model, {"": "cpu"}, force_hooks=True, main_device="cpu")
    made = cells.arguments(Cell("text", "sft", "fp32", None), cells.SAFE_CONFIG["sft"], 1)
    made["args"].model_init_kwargs = None
    tokenizer = AutoTokenizer.from_pretrained(cells.folder("text"))
    trainer = cells.SAFE["sft"](**made | {"model": model, "processing_class": tokenizer})
    trainer.train()
    alive = weakref.ref(model)
    del trainer, model, made
    gc.collect()
    assert alive() is None
