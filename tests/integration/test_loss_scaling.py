"""fp16 with a real autocast and a loss scaler that refuses what CUDA's refuses: safe trains where stock stops."""

import math

import cells
import pytest
import torch
from cells import Cell
from peft import LoraConfig, get_peft_model
from policing import reset_accelerate
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BitsAndBytesConfig,
    TrainerCallback,
)

from safe_trainers import PrecisionError, PrecisionWarning
from safe_trainers.testing import fp16_on_cpu


pytestmark = pytest.mark.filterwarnings("ignore::safe_trainers.PrecisionWarning")

TASKS = ["sft", "grpo", "rloo", "reward"]
QUANTIZED = {
    "4bit": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float16},
    "8bit": {"load_in_8bit": True},
}
CUDA_BF16 = "\"_amp_foreach_non_finite_check_and_unscale_cuda\" not implemented for 'BFloat16'"
TORCH_FP16 = "Attempting to unscale FP16 gradients"


class Watch(TrainerCallback):
    """The autocast dtype inside the forward passes of training, and the scaler after each step."""

    def __init__(self):
        self.autocast, self.scaled = set(), []

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        leaf = next(module for module in model.modules() if isinstance(module, torch.nn.Linear))
        leaf.register_forward_pre_hook(self.note)

    def note(self, module, args):
        if torch.is_grad_enabled():
            on = torch.is_autocast_enabled("cpu")
            self.autocast.add(torch.get_autocast_dtype("cpu") if on else None)


def load(task, dtype, quantized=None, **config):
    auto = AutoModelForSequenceClassification if task == "reward" else AutoModelForCausalLM
    extra = {"num_labels": 1} if task == "reward" else {}
    if quantized is not None:
        extra["quantization_config"] = BitsAndBytesConfig(**QUANTIZED[quantized] | config)
    torch.manual_seed(0)
    return auto.from_pretrained(cells.folder("text"), dtype=dtype, **extra)


def build(task, model, safe=True, flag="fp16", steps=2, lora=None, config=None, **changes):
    """A trainer with a real fp16, and what watches it."""
    reset_accelerate()  # one mixed precision per process, and a step that failed leaves its state
    cell = Cell("text", task, "fp32", flag)
    kind = config or (cells.SAFE_CONFIG if safe else cells.PLAIN)[task]
    made = cells.arguments(cell, kind, steps=steps, model_init_kwargs=None, **changes)
    watch = Watch()
    peft_config = LoraConfig(r=4, **lora) if lora is not None else None
    trainer_class = (cells.SAFE if safe else cells.STOCK)[task]
    torch.manual_seed(0)
    trainer = fp16_on_cpu(trainer_class)(**{**made, "model": model}, peft_config=peft_config, callbacks=[watch])
    return trainer, watch


def lora(task, **more):
    return {"target_modules": ["q_proj", "v_proj"], "task_type": "SEQ_CLS" if task == "reward" else "CAUSAL_LM"} | more


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("quantized", ["4bit", "8bit"])
@pytest.mark.parametrize("task", TASKS)
def test_a_quantised_model_trains_under_fp16_where_stock_stops(task, quantized):
    pytest.importorskip("bitsandbytes")
    stock, _ = build(task, load(task, torch.float16, quantized), safe=False, lora=lora(task))
    with pytest.raises(NotImplementedError) as stopped:
        stock.train()
    assert str(stopped.value) == CUDA_BF16
    cells.reset_autocast()

    safe, watch = build(task, load(task, torch.float16, quantized), steps=15, lora=lora(task))
    before = {name: p.detach().clone() for name, p in safe.model.named_parameters() if p.requires_grad}
    safe.train()
    assert safe.state.global_step == len(losses(safe)) == 15
    assert watch.autocast == {torch.float16}
    # RLOO's losses are large, and its first steps find the scale.
    assert safe.accelerator.scaler.get_scale() in ({2.0**13} if task == "rloo" else {2.0**16})
    trained = {name: p for name, p in safe.model.named_parameters() if p.requires_grad}
    assert {p.dtype for p in trained.values()} == {torch.float32}
    assert all(not torch.equal(p, before[name]) for name, p in trained.items())


def test_fp16_and_bf16_reach_the_same_loss_on_a_4bit_base():
    pytest.importorskip("bitsandbytes")
    last = {}
    for flag, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        model = load("sft", dtype, "4bit", bnb_4bit_compute_dtype=dtype)
        trainer, watch = build("sft", model, flag=flag, steps=15, lora=lora("sft"), learning_rate=1e-2)
        trainer.train()
        assert watch.autocast == {dtype}
        first, *_, last[flag] = losses(trainer)
        assert last[flag] < first - 0.3  # it learns: two runs that stand still would agree too
    assert last["fp16"] == pytest.approx(last["bf16"], rel=0.02)


@pytest.mark.parametrize("quantized", ["4bit", "8bit"])
@pytest.mark.parametrize(("task", "more"), [("reward", {}), ("grpo", {"modules_to_save": ["lm_head"]}),
                                            ("rloo", {"modules_to_save": ["lm_head"]})])  # fmt: skip
def test_a_trained_head_on_a_quantised_base_meets_what_it_is_given(task, more, quantized):
    pytest.importorskip("bitsandbytes")
    stock, _ = build(task, load(task, torch.float32, quantized), safe=False, flag=None, lora=lora(task, **more))
    with pytest.raises(RuntimeError, match=r"dtype|same type|Float"):
        stock.train()
    safe, _ = build(task, load(task, torch.float32, quantized), flag=None, lora=lora(task, **more))
    safe.train()
    assert len(losses(safe)) == 2


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("task", ["sft", "grpo"])
def test_a_checkpoint_that_was_quantised_in_bfloat16_trains_in_float16(task, nested, tmp_path):
    pytest.importorskip("bitsandbytes")
    load(task, torch.bfloat16, "4bit", bnb_4bit_use_double_quant=nested).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(cells.folder("text")).save_pretrained(tmp_path)

    def loaded():
        return AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float16)

    stock, _ = build(task, loaded(), safe=False, lora=lora(task))
    with pytest.raises(RuntimeError, match=r"autocast|BFloat16|dtype"):
        stock.train()
    cells.reset_autocast()

    model = loaded()
    packed = {name: p for name, p in model.named_parameters() if p.dtype == torch.uint8}
    before = {name: (p.data_ptr(), p.detach().clone(), p.quant_state.absmax.clone()) for name, p in packed.items()}
    assert len(before) == 7
    assert {p.quant_state.dtype for p in packed.values()} == {torch.bfloat16}
    safe, watch = build(task, model, steps=15, lora=lora(task))
    for name, p in packed.items():
        pointer, content, absmax = before[name]
        assert p.data_ptr() == pointer
        assert torch.equal(p, content)
        assert torch.equal(p.quant_state.absmax, absmax)
        assert p.quant_state.dtype == torch.float16
        assert p.quant_state.nested == nested
    assert {p.dtype for p in model.parameters()} == {torch.uint8, torch.float16, torch.float32}
    assert model.config.dtype == torch.float16
    safe.train()
    assert watch.autocast == {torch.float16}
    assert all(math.isfinite(loss) for loss in losses(safe))
    assert len(losses(safe)) == 15


def given_half_adapter():
    return get_peft_model(load("sft", torch.float16), LoraConfig(**lora("sft")), autocast_adapter_dtype=False)


HALF_TRAINABLES = {
    "full": lambda: (load("sft", torch.float16), None),
    "adapter": lambda: (given_half_adapter(), None),
    "modules_to_save": lambda: (load("sft", torch.float16), lora("sft", modules_to_save=["lm_head"])),
}


@pytest.mark.parametrize("what", HALF_TRAINABLES)
def test_half_trainables_are_float32_before_the_optimizer_exists(what):
    model, adapter = HALF_TRAINABLES[what]()
    stock, _ = build("sft", model, safe=False, lora=adapter)
    with pytest.raises(ValueError, match=TORCH_FP16):
        stock.train()
    cells.reset_autocast()

    model, adapter = HALF_TRAINABLES[what]()
    halves = {name: p.detach().clone() for name, p in model.named_parameters() if p.dtype == torch.float16}
    safe, watch = build("sft", model, lora=adapter)
    trained = {name: p for name, p in safe.model.named_parameters() if p.requires_grad}
    assert {p.dtype for p in trained.values()} == {torch.float32}
    assert all(torch.equal(p, halves[name].float()) for name, p in trained.items() if name in halves)
    assert "MiB more: the loss scaler cannot unscale float16 gradients" in str(safe.precision.weights)
    safe.train()
    assert watch.autocast == {torch.float16}
    assert {p.dtype for group in safe.optimizer.param_groups for p in group["params"]} == {torch.float32}


def test_upcasting_can_be_refused():
    with pytest.raises(PrecisionError, match="half-trainables-under-loss-scaling") as refused:
        build("sft", load("sft", torch.float16), upcast_trainables=False)
    message = str(refused.value)
    assert (
        "upcast_trainables=False with fp16=True and 12 trainable parameters in float16: model.embed_tokens" in message
    )
    assert "drop `upcast_trainables=False` (float32 takes 0." in message
    trainer, _ = build("sft", load("sft", torch.float32), upcast_trainables=False)
    assert trainer.precision.policy.master.text == "float32"


def test_bf16_adapters_under_fp16_are_refused():
    with pytest.raises(PrecisionError, match="adapter_dtype='bfloat16' with fp16=True"):
        build("sft", load("sft", torch.float32), lora=lora("sft"), adapter_dtype="bfloat16")


def test_half_weights_trained_under_bf16_are_warned_about_with_the_share_that_is_lost():
    rates = {1e-3: 0, 1e-6: 0}
    for rate in rates:
        with pytest.warns(PrecisionWarning, match=r"\[half-trainables\]") as caught:
            build("sft", load("sft", torch.bfloat16), flag="bf16", learning_rate=rate)
        (text,) = [str(w.message) for w in caught if "half-trainables" in str(w.message)]
        assert f"at learning_rate={rate:g}, " in text
        rates[rate] = int(text.split("% of their first updates")[0].split()[-1])
    assert rates[1e-3] < 20 < 80 < rates[1e-6]


def test_the_configs_scale_is_the_scalers():
    settings = {"loss_scale_init": 1024.0, "loss_scale_growth_interval": 2, "loss_scale_growth_factor": 4.0,
                "loss_scale_backoff_factor": 0.25}  # fmt: skip
    trainer, _ = build("sft", load("sft", torch.float32), **settings, steps=5)
    scaler = trainer.accelerator.scaler
    assert (scaler.get_growth_interval(), scaler.get_growth_factor(), scaler.get_backoff_factor()) == (2, 4.0, 0.25)
    trainer.train()
    assert scaler.get_scale() == 1024.0 * 4.0**2  # it grew after steps 2 and 4


def test_a_plain_config_leaves_the_scaler_as_it_is():
    trainer, _ = build("sft", load("sft", torch.float32), config=cells.PLAIN["sft"])
    assert trainer.accelerator.scaler.get_growth_interval() == 2000
    safe, _ = build("sft", load("sft", torch.float32))
    assert safe.accelerator.scaler.get_growth_interval() == 400
