"""No bit of an adapter is lost between PEFT and the first step, on quantised bases of every TRL trainer."""

import itertools
import sys
from dataclasses import dataclass

import cells
import pytest
import torch
from cells import Cell
from live_bytes import LiveBytes
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

from safe_trainers.core.trl import has_rollouts
from safe_trainers.model.inventory import quantization_method
from safe_trainers.model.sequence_trial import LENGTH


pytest.importorskip("bitsandbytes")

TASKS = [("grpo", 0.0), ("grpo", 0.1), ("rloo", 0.0), ("rloo", 0.1), ("sft", 0.0), ("reward", 0.0)]
TASKS += [(task, 0.0) for task in ("dpo", "kto", "distillation") if task in cells.STABLE]
METHODS = ("fresh", "given", "dora", "save-fp32", "save-fp16", "pissa-config", "pissa-model")
QUANTIZED = {"4bit": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "8bit": {"load_in_8bit": True}}


@dataclass(frozen=True)
class Row:
    method: str
    task: str
    beta: float
    base: str  # "4bit", "8bit" or "full"

    def __str__(self):
        return f"{self.method}-{self.task}-beta{self.beta:g}-{self.base}"


def rows(*bases):
    made = [Row(method, task, beta, base) for method, (task, beta), base in itertools.product(METHODS, TASKS, bases)]
    return [row for row in made if (row.method, row.base) != ("dora", "8bit")]  # stock crashes in its first step


def load(row, source, base):
    """A tiny model, quantised as it is loaded; a reward model has one score."""
    auto = AutoModelForSequenceClassification if row.task == "reward" else AutoModelForCausalLM
    extra = {"num_labels": 1} if row.task == "reward" else {}
    if base != "full":
        # PEFT draws a PiSSA adapter from weights that are not packed.
        skipped = ["q_proj", "v_proj", "lm_head", "score"] if row.method == "pissa-config" else None
        extra["quantization_config"] = BitsAndBytesConfig(**QUANTIZED[base], llm_int8_skip_modules=skipped)
    torch.manual_seed(0)
    dtype = torch.float16 if row.method == "save-fp16" else torch.float32
    return auto.from_pretrained(source, dtype=dtype, **extra)


def given_model(row, folder):
    """A model with an adapter that holds something."""
    torch.manual_seed(0)
    if row.method == "pissa-model":
        # As PEFT documents it: the residual is quantised, and the principal part is the adapter.
        whole = get_peft_model(load(row, cells.folder("text"), "full"), peft_config(row))
        whole.peft_config["default"].init_lora_weights = True
        whole.save_pretrained(folder / "adapter")
        whole.unload().save_pretrained(folder / "residual")
        AutoTokenizer.from_pretrained(cells.folder("text")).save_pretrained(folder / "residual")
        return PeftModel.from_pretrained(
            load(row, folder / "residual", row.base), folder / "adapter", is_trainable=True
        )
    model = get_peft_model(load(row, cells.folder("text"), row.base), peft_config(row))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    return model


def peft_config(row):
    head = "score" if row.task == "reward" else "lm_head"
    return LoraConfig(
        r=4,
        target_modules=["q_proj", "v_proj"],
        task_type="SEQ_CLS" if row.task == "reward" else "CAUSAL_LM",
        use_dora=row.method == "dora",
        init_lora_weights="pissa" if row.method.startswith("pissa") else True,
        modules_to_save=[head] if row.method.startswith("save") else None,
    )


def trainables(model):
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def build(row, trainer_class, monkeypatch, folder, **changes):
    """A trainer and a clone of every trainable, taken when PEFT had finished."""
    cell = Cell("text", row.task, "fp32", changes.pop("flag", None), beta=row.beta)
    made = cells.arguments(cell, changes.pop("config", cells.PLAIN[row.task]), model_init_kwargs=None, **changes)
    clones = {}
    if row.method in ("given", "pissa-model"):
        made["model"] = given_model(row, folder)
        clones.update(trainables(made["model"]))
    else:
        made["model"] = load(row, cells.folder("text"), row.base)
        made["peft_config"] = peft_config(row)
        module = sys.modules[cells.STOCK[row.task].__module__]
        original = module.get_peft_model

        def cloning(*args, **kwargs):
            model = original(*args, **kwargs)
            clones.update(trainables(model))
            return model

        monkeypatch.setattr(module, "get_peft_model", cloning)
    return trainer_class(**made), clones


def changed(trainer, clones):
    """Names of the trainables that are not bit for bit what PEFT made."""
    held = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
    packed = quantization_method(trainer.model) is not None
    assert held.keys() == clones.keys()
    assert len(held) >= 4
    return [
        name
        for name, p in held.items()
        # A head that was made for the task is brought to float32 beside packed weights, which keeps its numbers.
        if p.dtype != (torch.float32 if packed and ".score." in name else clones[name].dtype)
        or not torch.equal(p, clones[name].to(p.dtype))
    ]


@pytest.mark.filterwarnings("ignore::safe_trainers.PrecisionWarning")
@pytest.mark.parametrize("row", rows("4bit", "8bit"), ids=str)
def test_every_bit_is_kept_where_stock_keeps_none(row, monkeypatch, tmp_path):
    trainer, clones = build(row, cells.SAFE[row.task], monkeypatch, tmp_path)
    assert changed(trainer, clones) == []
    stock, clones = build(row, cells.STOCK[row.task], monkeypatch, tmp_path)
    assert len(changed(stock, clones)) >= 4


@pytest.mark.filterwarnings("ignore::safe_trainers.PrecisionWarning")
@pytest.mark.parametrize("row", rows("full"), ids=str)
def test_unquantised_adapters_are_those_of_stock(row, monkeypatch, tmp_path):
    trainer, clones = build(row, cells.SAFE[row.task], monkeypatch, tmp_path)
    assert changed(trainer, clones) == []
    stock, _ = build(row, cells.STOCK[row.task], monkeypatch, tmp_path)
    held = trainables(stock.model)
    assert changed(trainer, held) == []


@pytest.mark.parametrize("task", ["grpo", "rloo"])
@pytest.mark.parametrize("adapter_dtype", ["auto", "bfloat16"])
def test_policy_and_reference_adapters_start_bit_equal(task, adapter_dtype, monkeypatch, tmp_path):
    """Stock rounds the policy's and not the frozen reference's: the first KL divergence is not zero."""
    row = Row("given", task, 0.1, "4bit")

    def differing(trainer):
        held = dict(trainer.model.named_parameters())
        pairs = [(p, held[name.replace(".default.", ".ref.")]) for name, p in held.items() if ".default." in name]
        assert len(pairs) == 4
        return sum(a.dtype != b.dtype or not torch.equal(a, b) for a, b in pairs)

    changes = {"config": cells.SAFE_CONFIG[task], "adapter_dtype": adapter_dtype, "flag": "bf16"}
    safe, _ = build(row, cells.SAFE[task], monkeypatch, tmp_path, **changes)
    assert differing(safe) == 0
    stock, _ = build(row, cells.STOCK[task], monkeypatch, tmp_path, flag="bf16")
    assert differing(stock) == 4


def test_live_bytes_can_count():
    kept = torch.ones(1000)
    with LiveBytes([kept]) as count:
        first = torch.zeros(2000)
        del first
        second = torch.zeros(1500)
        del kept
    assert count.peak == 2000 * 4
    assert count.now == second.nbytes - 4000


WEIGHED = [row for row in rows("4bit", "8bit") if row.method in ("fresh", "given", "save-fp32") and row.task != "rloo"]


@pytest.fixture(scope="module")
def wider(tmp_path_factory):
    """A model of some megabytes: in one of kilobytes the scales of a layer, which are looked at, are a per cent."""
    folder = tmp_path_factory.mktemp("wider")
    tokenizer = AutoTokenizer.from_pretrained(cells.folder("text"))
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=512, intermediate_size=1024, num_hidden_layers=2,
        num_attention_heads=8, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.filterwarnings("ignore::safe_trainers.PrecisionWarning")
@pytest.mark.parametrize("row", WEIGHED, ids=str)
def test_construction_needs_no_more_memory_than_stocks(row, wider):
    """Counted in bytes of tensors, from the loaded model on.

    A trainer with rollouts asks its model about positions in a forward pass. Each rollout of stock's has one of at
    least as many tokens, so that its number is that of its construction and of such a forward pass after it.
    """
    peaks = {}
    for safe in (False, True):
        cell = Cell("text", row.task, "fp32", None, beta=row.beta)
        made = cells.arguments(cell, cells.PLAIN[row.task], model_init_kwargs=None)
        made["model"] = load(row, wider, row.base)
        if row.method == "given":
            made["model"] = get_peft_model(made["model"], peft_config(row))
        else:
            made["peft_config"] = peft_config(row)
        base = sum(tensor.untyped_storage().nbytes() for tensor in made["model"].parameters())
        with LiveBytes(made["model"].parameters()) as count:
            trainer = (cells.SAFE if safe else cells.STOCK)[row.task](**made)
        peaks[safe] = base + count.peak
        if not safe and has_rollouts(type(trainer)):
            peaks[safe] = max(peaks[safe], base + count.now + forward_bytes(load(row, wider, row.base)))
        del trainer
    assert peaks[True] <= 1.01 * peaks[False]


def forward_bytes(model):
    """The largest number of bytes of tensors that a forward pass of two short sequences makes."""
    ids = torch.ones((2, LENGTH), dtype=torch.long)
    model.train()  # in evaluation mode, bitsandbytes on CPU repacks the weights
    with torch.no_grad(), LiveBytes() as count:
        model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    return count.peak
