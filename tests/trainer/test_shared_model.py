"""One model object that several trainers get, one after another."""

import copy
import dataclasses
import functools
import gc
import os
import warnings
import weakref
from functools import partial

import cells
import pytest
import torch
import trl
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

import safe_trainers
from safe_trainers import PrecisionError, PrecisionWarning
from safe_trainers.boundaries.cast_hooks import count_casts, remove_casts
from safe_trainers.core.tasks import TASKS
from upstream import needs_transformers_5, needs_trl_1


GENERATION = {"num_generations": 2, "max_completion_length": 4}


def load(dtype=torch.float32):
    return AutoModelForCausalLM.from_pretrained(cells.folder("text"), dtype=dtype)


def build(task, model, precision, folder, safe=True, settings=None, **arguments):
    os.environ.pop("ACCELERATE_MIXED_PRECISION", None)  # transformers 4 leaves there what the last config asked for
    algorithm, library, prefix = TASKS[task].algorithm, *((safe_trainers, "Safe") if safe else (trl, ""))
    given = {
        "output_dir": str(folder), "max_steps": 1, "per_device_train_batch_size": 2, "report_to": [], "use_cpu": True,
        "save_strategy": "no", "disable_tqdm": True, "logging_steps": 1,
    }  # fmt: skip
    given |= {"precision": precision} if safe else {"bf16": precision == "bf16"}
    if task in {"grpo", "rloo"}:
        given |= GENERATION
        arguments = {"reward_funcs": cells.token_reward} | arguments
    return getattr(library, f"{prefix}{algorithm}Trainer")(
        model=model,
        args=getattr(library, f"{prefix}{algorithm}Config")(**given, **(settings or {})),
        train_dataset=cells.dataset(task, "text"),
        processing_class=AutoTokenizer.from_pretrained(cells.folder("text")),
        **arguments,
    )


def computed(trainer, model):
    """The dtypes that the query projections returned in a run."""
    return returned(model, trainer.train)


def evaluated(trainer, model):
    """The dtypes that the query projections returned in an evaluation."""
    return returned(model, partial(trainer.evaluate, cells.dataset("sft", "text")))


def returned(model, call):
    """The dtypes that the query projections of a model returned during a call."""
    seen = set()
    handles = [
        module.register_forward_hook(lambda module, args, output: seen.add(output.dtype))
        for name, module in model.named_modules() if name.endswith("q_proj")
    ]  # fmt: skip
    call()
    for handle in handles:
        handle.remove()
    return seen


ORDERS = [("bf16", "fp32"), ("fp32", "bf16")]
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@pytest.mark.parametrize(("first", "second"), ORDERS)
@pytest.mark.parametrize("task", ["sft", "dpo", "grpo", "rloo"])
def test_a_second_trainer_computes_in_its_own_dtype(task, first, second, tmp_path):
    model = load()
    assert computed(build("sft", model, first, tmp_path), model) == {DTYPES[first]}
    weights = copy.deepcopy(model.state_dict())
    trainer = build(task, model, second, tmp_path)
    assert computed(trainer, model) == {DTYPES[second]}
    # The same run on a model that no trainer has had.
    fresh = load()
    fresh.load_state_dict(weights)
    alone = build(task, fresh, second, tmp_path)
    alone.train()
    assert cells.fingerprint(fresh) == cells.fingerprint(model)


@needs_transformers_5("computes in the precision of the later trainer")
@pytest.mark.parametrize("task", ["sft", "dpo", "grpo", "rloo"])
def test_stock_computes_in_the_dtype_of_the_first_trainer(task, tmp_path):
    model = load()
    assert computed(build("sft", model, "fp32", tmp_path, safe=False), model) == {torch.float32}
    assert torch.float32 in computed(build(task, model, "bf16", tmp_path, safe=False), model)


def test_an_adapter_on_a_trained_base_computes_in_its_own_dtype(tmp_path):
    """PEFT's wrapper passes on attributes of the base, among them accelerate's mark."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj"], r=2)
    model = load()
    build("sft", model, "fp32", tmp_path).train()
    assert computed(build("dpo", model, "bf16", tmp_path, peft_config=config), model) == {torch.bfloat16}


def test_two_trainers_that_are_built_first_compute_in_their_own_dtype(tmp_path):
    model = load()
    trainers = [build("sft", model, precision, tmp_path) for precision in ("fp32", "bf16", "fp32")]
    assert [computed(trainer, model) for trainer in trainers] == [
        {torch.float32}, {torch.bfloat16}, {torch.float32},
    ]  # fmt: skip


def test_training_again_does_not_wrap_the_model_again(tmp_path):
    model = load()
    trainer = build("sft", model, "bf16", tmp_path)
    depths = []
    for _ in range(2):
        trainer.train()
        depth, method = 0, model.forward
        while (method := getattr(method, "__wrapped__", None)) is not None:
            depth += 1
        depths.append(depth)
    assert depths[0] == depths[1] > 0


def test_a_trained_reward_model_computes_in_the_dtype_of_the_new_run(tmp_path):
    from transformers import AutoModelForSequenceClassification

    reward = AutoModelForSequenceClassification.from_pretrained(cells.folder("text"), num_labels=1)
    tokenizer = AutoTokenizer.from_pretrained(cells.folder("text"))
    reward.config.pad_token_id = tokenizer.pad_token_id
    build("reward", reward, "bf16", tmp_path).train()
    trainer = build("grpo", load(), "fp32", tmp_path, reward_funcs=reward, reward_processing_classes=tokenizer)
    assert computed(trainer, reward) == {torch.float32}


def test_modules_in_float32_belong_to_one_trainer(tmp_path):
    model = load(torch.bfloat16)
    first = build("sft", model, "bf16", tmp_path, settings={"fp32_modules": ["layers.0"]})
    assert count_casts(model)["float32-module"] == 1
    assert computed(first, model) == {torch.float32}
    second = build("dpo", model, "bf16", tmp_path)
    assert not count_casts(model)["float32-module"]
    assert computed(second, model) == {torch.bfloat16}


def test_casts_of_a_deepcopy_are_removed_and_the_original_keeps_its_own(tmp_path):
    model = load(torch.bfloat16)
    build("sft", model, "bf16", tmp_path, settings={"fp32_modules": ["layers.0"]})
    twin = copy.deepcopy(model)
    remove_casts(twin)
    assert not count_casts(twin)
    assert count_casts(model)["float32-module"] == 1
    assert twin.model.layers[0].forward.__self__ is twin.model.layers[0]


def test_a_refused_construction_leaves_the_model_as_it_was(tmp_path):
    model = load(torch.bfloat16)
    before = {name: parameter.dtype for name, parameter in model.named_parameters()}
    prints = cells.fingerprint(model)

    class Refusing(safe_trainers.PrecisionMixin.features[0]):
        def check(self, model):
            raise PrecisionError([safe_trainers.core.errors.refuse("no-routers", "a test", reason="a test")])

    class Refused(safe_trainers.SafeSFTTrainer):
        features = (*safe_trainers.SafeSFTTrainer.features, Refusing)

    config = safe_trainers.SafeSFTConfig(
        output_dir=str(tmp_path), precision="bf16", fp32_modules=["layers.0"], report_to=[], use_cpu=True
    )
    with pytest.raises(PrecisionError, match="a test"):
        Refused(model=model, args=config, train_dataset=cells.dataset("sft", "text"),
                processing_class=AutoTokenizer.from_pretrained(cells.folder("text")))  # fmt: skip
    assert not count_casts(model)
    assert {name: parameter.dtype for name, parameter in model.named_parameters()} == before
    assert cells.fingerprint(model) == prints


def test_a_trainer_whose_casts_were_replaced_warns(tmp_path):
    model = load(torch.bfloat16)
    first = build("sft", model, "bf16", tmp_path, settings={"fp32_modules": ["layers.0"]})
    build("dpo", model, "bf16", tmp_path)
    with pytest.warns(PrecisionWarning, match="build SafeSFTTrainer after .* finished  .model-of-another-trainer"):
        first.train()


@needs_trl_1("does not prepare a dataset that is given to `evaluate`")
def test_a_trainer_that_is_used_again_does_not_warn(tmp_path):
    model = load(torch.bfloat16)
    trainer = build("sft", model, "bf16", tmp_path, settings={"fp32_modules": ["layers.0"]})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train()
        trainer.evaluate(cells.dataset("sft", "text"))
        trainer.train()
    assert not [str(one.message) for one in caught if "another trainer" in str(one.message)]


def test_a_model_does_not_keep_its_trainer_alive(tmp_path):
    model = load()
    trainer = build("sft", model, "bf16", tmp_path)
    trainer.train()
    alive = weakref.ref(trainer)
    del trainer
    gc.collect()
    build("dpo", model, "fp32", tmp_path)
    gc.collect()
    assert alive() is None


@needs_trl_1("does not prepare a dataset that is given to `evaluate`")
@pytest.mark.parametrize(("first", "second"), ORDERS)
def test_an_earlier_trainer_evaluates_in_its_own_dtype(first, second, tmp_path):
    model = load()
    trainer = build("sft", model, first, tmp_path)
    trainer.train()
    later = build("sft", model, second, tmp_path)
    for _ in range(2):
        assert evaluated(trainer, model) == {DTYPES[first]}
        assert evaluated(later, model) == {DTYPES[second]}
    later.train()
    assert evaluated(trainer, model) == {DTYPES[first]}
    assert evaluated(later, model) == {DTYPES[second]}


STOCK = pytest.param(False, marks=needs_transformers_5("computes an evaluation before training as training does"))


@pytest.mark.parametrize("safe", [True, STOCK])
def test_an_evaluation_before_training_computes_as_training_does(safe, tmp_path):
    """transformers prepares a model for an evaluation only if the accelerator has prepared no other one."""
    dataset = cells.dataset("dpo", "text")
    model = load()
    trainer = build("dpo", model, "bf16", tmp_path, safe=safe, eval_dataset=dataset)
    seen = set()
    model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda module, args, output: seen.add(output.dtype))
    trainer.evaluate()
    assert seen == {torch.bfloat16 if safe else torch.float32}
    seen.clear()
    trainer.train()
    trainer.evaluate()
    assert seen == {torch.bfloat16}


def test_a_refused_construction_leaves_a_trained_model_as_it_was(tmp_path):
    model = load(torch.bfloat16)
    trainer = build("sft", model, "bf16", tmp_path, settings={"fp32_modules": ["layers.0"]})
    trainer.train()
    casts, forward = count_casts(model), model.forward
    hooks = [dict(module._forward_hooks) for module in model.modules()]
    with pytest.raises(PrecisionError, match="no-such-module"):
        build("dpo", model, "bf16", tmp_path, settings={"fp32_modules": ["nothing_like_it"]})
    assert count_casts(model) == casts
    assert model.forward == forward
    assert hooks == [dict(module._forward_hooks) for module in model.modules()]
    model(torch.arange(4)[None])  # computes as before, with modules in float32


def test_weights_that_a_refused_construction_has_widened_are_cast_back(tmp_path):
    """Casts of a whole layout have names in the base model, and those of trained weights in PEFT's wrapper."""
    from safe_trainers.boundaries.cast_hooks import casts_kept_on_error

    model = load(torch.bfloat16)
    before = cells.fingerprint(model)

    def widen_and_fail():
        with casts_kept_on_error(model):
            model.float()
            raise KeyError

    with pytest.raises(KeyError):
        widen_and_fail()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert cells.fingerprint(model) == before


def test_casts_are_found_when_accelerate_has_added_or_removed_its_hook():
    from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

    from safe_trainers.weights import fp32_modules

    for hooked_first in (True, False):
        model = load(torch.bfloat16)
        layer = model.model.layers[0]
        if hooked_first:
            add_hook_to_module(layer, ModelHook())
        fp32_modules.guard(model, {"model.layers.0": layer})
        if hooked_first:
            remove_hook_from_module(layer)
        else:
            add_hook_to_module(layer, ModelHook())
        assert count_casts(model)["float32-module"] == 1
        remove_casts(model)
        assert not count_casts(model)
        model(torch.arange(4)[None])


def test_hooks_of_users_need_not_be_hashable(tmp_path):
    @dataclasses.dataclass
    class Recorder:
        seen: int = 0

        def __call__(self, module, args, output):
            self.seen += 1

    model, recorder = load(), Recorder()
    model.register_forward_hook(recorder)
    build("sft", model, "bf16", tmp_path).train()
    assert recorder.seen


def test_what_a_user_has_put_around_a_prepared_model_stays(tmp_path):
    """Also if it copies the name of what it wraps; the fused head of TRL's SFT and DPO replaces it."""
    model, calls = load(), []
    build("sft", model, "bf16", tmp_path).train()
    inner = model.forward

    @functools.wraps(inner)
    def counted(*args, **kwargs):
        calls.append(args)
        return inner(*args, **kwargs)

    model.forward = counted
    build("grpo", model, "bf16", tmp_path).train()
    assert calls


@needs_trl_1("does not prepare a dataset that is given to `evaluate`")
def test_evaluations_in_turn_leave_one_entry_of_the_model(tmp_path):
    model = load()
    first = build("sft", model, "bf16", tmp_path)
    first.train()
    second = build("sft", model, "fp32", tmp_path)
    for trainer in (second, first, second, first):
        evaluated(trainer, model)
    assert [len(trainer.accelerator._models) for trainer in (first, second)] == [1, 1]


def test_a_vision_model_trains_after_a_construction_that_failed_late(monkeypatch):
    """transformers has installed hooks of its own in the sample pass, and installs them once."""
    cell = cells.Cell("llava", "grpo", "bf16", "bf16")

    def losses(fails):
        model = AutoModelForImageTextToText.from_pretrained(cells.folder("llava"), dtype=torch.bfloat16)
        made = {**cells.arguments(cell, cells.PLAIN["grpo"], model_init_kwargs=None), "model": model}
        if fails:
            with monkeypatch.context() as patch:
                patch.setattr(trl.GRPOTrainer, "add_callback", fail)
                with pytest.raises(RuntimeError, match="after the sample"):
                    safe_trainers.SafeGRPOTrainer(**made)
        trainer = safe_trainers.SafeGRPOTrainer(**made)
        torch.manual_seed(0)
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    def fail(*args, **kwargs):
        raise RuntimeError("after the sample")

    assert losses(fails=True) == losses(fails=False)
