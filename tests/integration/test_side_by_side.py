"""Scripts as users write them, run with stock TRL and with the safe trainers side by side.

Each function marked `@script` is one script. It is run with the names of TRL, with the trainers swapped, and with
trainers and configs swapped. In float32 a safe run is the stock run, bit for bit: losses, every metric that TRL logs,
weights, and what else the script returns. Where stock raises, safe raises the same type. What differs on purpose is
stated with the script.
"""

import copy
import functools
import itertools
import json
import pickle
from pathlib import Path
from typing import Any

import cells
import pytest
import torch
import transformers
from datasets import Dataset, DatasetDict
from peft import LoraConfig, PeftModel, get_peft_model
from side_by_side import LIBRARIES, Outcome, differences, run
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    EarlyStoppingCallback,
    TrainerCallback,
    TrainingArguments,
)
from trl import chat_template_utils

from safe_trainers import tiny


# Every script writes the same few settings; the rest is what it is about.
COMMON = {
    "output_dir": "out",
    "use_cpu": True,
    "bf16": False,
    "max_steps": 2,
    "per_device_train_batch_size": 4,
    "learning_rate": 1e-3,
    "logging_steps": 1,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
}
RL = {**COMMON, "num_generations": 2, "max_completion_length": 4}
SCRIPTS: list[Any] = []


def script(
    function=None,
    *,
    raises: type[BaseException] | None = None,
    safe_trains: str | None = None,
    differs: dict[str, str] | None = None,
    warns: str | None = None,
    needs: str | None = None,
    on_cpu: bool = False,
):
    """Registers a script.

    Args:
        function: The script.
        raises: What stock raises.
        safe_trains: Why safe trains where stock raises.
        differs: What differs (a metric, `"losses"`, `"weights"` or `"facts"`; `""` for all numbers), and why. That it
            does is checked.
        warns: A part of the warning that safe gives; others give none.
        needs: A task that older releases of TRL lack.
        on_cpu: Whether stock raises only on a machine without a GPU.
    """
    if function is None:
        return functools.partial(
            script,
            raises=raises,
            safe_trains=safe_trains,
            differs=differs,
            warns=warns,
            needs=needs,
            on_cpu=on_cpu,
        )
    expected = {"raises": raises, "safe_trains": safe_trains, "differs": differs, "warns": warns}
    marks = [cells.NEEDS_STABLE[needs]] if needs else []
    if on_cpu:
        marks.append(pytest.mark.skipif(torch.cuda.is_available(), reason="TRL trains here with its defaults"))
    SCRIPTS.append(pytest.param(function, expected, id=function.__name__, marks=marks))
    return function


@pytest.mark.parametrize(("function", "expected"), SCRIPTS)
def test_a_script_runs_as_with_trl(function, expected, tmp_path):
    stock, *others = (run(function, make(), tmp_path / name) for name, make in LIBRARIES.items())
    assert_outcome(stock, expected["raises"])
    for safe, name in zip(others, list(LIBRARIES)[1:], strict=True):
        assert_outcome(safe, None if expected["safe_trains"] else expected["raises"])
        if expected["warns"]:
            assert any(expected["warns"] in alarm for alarm in safe.alarms), (name, safe.alarms)
        else:
            assert safe.alarms == [], name
        if stock.error is None:
            found, intended = differences(stock, safe), expected["differs"] or {}
            assert bool(found) == bool(intended), (name, found)
            assert "" in intended or set(found) == set(intended), (name, found)


def assert_outcome(outcome: Outcome, raises: type[BaseException] | None) -> None:
    if raises is None and outcome.error is not None:
        raise outcome.error
    if raises is not None:
        assert isinstance(outcome.error, raises), repr(outcome.error)


def test_no_script_is_lost():
    assert len(SCRIPTS) >= 135
    assert len({parameter.id for parameter in SCRIPTS}) == len(SCRIPTS)


def test_the_comparison_can_fail(tmp_path):
    def slower(lib, folder):
        return sft(lib, learning_rate=1.001e-3)

    stock = run(sft_by_name, LIBRARIES["stock"](), tmp_path / "stock")
    other = run(slower, LIBRARIES["trainer swapped"](), tmp_path / "other")
    assert {"losses", "weights", "grad_norm"} <= set(differences(stock, other))
    missing = Outcome(log=[{"loss": 1.0, "mean_token_accuracy": 0.5}])
    assert differences(missing, Outcome(log=[{"loss": 1.0}])) == {"mean_token_accuracy": "row 0: 0.5 and None"}
    assert differences(Outcome(facts=1), Outcome(facts=2)) == {"facts": "1 and 2"}
    assert "rows" in differences(missing, Outcome())


# --- what the scripts share ------------------------------------------------------------------------------------------


def path(seed=0):
    """The folder of a saved model with its tokenizer, as `from_pretrained` takes it."""
    return str(cells.folder("text", seed))


def model(seed=0):
    return AutoModelForCausalLM.from_pretrained(path(seed), dtype=torch.float32)


def tokenizer():
    return AutoTokenizer.from_pretrained(path())


def rows(task, count=8):
    return cells.dataset(task, "text", count)


def lora(**changes):
    return LoraConfig(**{"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", **changes})


def reward(completion_ids, **kwargs):
    return [float(sum(ids) % 7) for ids in completion_ids]


async def slow_reward(completion_ids, **kwargs):
    return [float(len(set(ids))) for ids in completion_ids]


def reward_model_path(folder):
    """A saved reward model of one score, with its tokenizer."""
    torch.manual_seed(1)
    made = AutoModelForSequenceClassification.from_pretrained(path(), num_labels=1, dtype=torch.float32)
    made.config.pad_token_id = tokenizer().pad_token_id
    made.save_pretrained(folder / "reward")
    tokenizer().save_pretrained(folder / "reward")
    return str(folder / "reward")


def grpo(lib, settings=None, **arguments):
    """Builds and trains a GRPO trainer; `settings` are those of the config."""
    made = {
        "model": path(),
        "reward_funcs": reward,
        "args": lib.GRPOConfig(**{**RL, **(settings or {})}),
        "train_dataset": rows("grpo"),
        **arguments,
    }
    trainer = lib.GRPOTrainer(**made)
    trainer.train()
    return trainer


def sft(lib, trainer_class=None, arguments=None, **settings):
    """Builds and trains an SFT trainer; further keywords are settings of the config."""
    made = {
        "model": path(),
        "args": lib.SFTConfig(**{**COMMON, **settings}),
        "train_dataset": rows("sft"),
        **(arguments or {}),
    }
    trainer = (trainer_class or lib.SFTTrainer)(**made)
    trainer.train()
    return trainer


def weights_of(live):
    return cells.fingerprint(live)


def files(folder):
    """The names in a folder, without the report that safe adds to those of stock."""
    return sorted(entry.name for entry in Path(folder).iterdir() if entry.name != "precision_report.json")


# --- one class name swapped ------------------------------------------------------------------------------------------


@script
def grpo_by_name(lib, folder):
    trainer = lib.GRPOTrainer(model=path(), reward_funcs=reward, args=lib.GRPOConfig(**RL), train_dataset=rows("grpo"))
    trainer.train()
    return trainer


@script
def rloo_by_name(lib, folder):
    trainer = lib.RLOOTrainer(model=path(), reward_funcs=reward, args=lib.RLOOConfig(**RL), train_dataset=rows("rloo"))
    trainer.train()
    return trainer


@script
def sft_by_name(lib, folder):
    trainer = lib.SFTTrainer(model=path(), args=lib.SFTConfig(**COMMON), train_dataset=rows("sft"))
    trainer.train()
    return trainer


@script
def reward_by_name(lib, folder):
    trainer = lib.RewardTrainer(model=path(), args=lib.RewardConfig(**COMMON), train_dataset=rows("reward"))
    trainer.train()
    return trainer


@script
def dpo_by_name(lib, folder):
    trainer = lib.DPOTrainer(model=path(), args=lib.DPOConfig(**COMMON), train_dataset=rows("dpo"))
    trainer.train()
    return trainer


@script(needs="kto")
def kto_by_name(lib, folder):
    trainer = lib.KTOTrainer(model=path(), args=lib.KTOConfig(**COMMON), train_dataset=rows("kto"))
    trainer.train()
    return trainer


@script(needs="distillation")
def distillation_by_name(lib, folder):
    trainer = lib.DistillationTrainer(
        model=path(),
        teacher_model=path(1),
        args=lib.DistillationConfig(**COMMON, max_completion_length=4),
        train_dataset=rows("distillation"),
    )
    trainer.train()
    return trainer


# --- arguments and configs, however they are written -----------------------------------------------------------------


@script
def arguments_by_position(lib, folder):
    trainer = lib.GRPOTrainer(path(), reward, lib.GRPOConfig(**RL), rows("grpo"))
    trainer.train()
    return trainer


@script
def arguments_from_a_dict(lib, folder):
    config = {"args": lib.SFTConfig(**COMMON), "train_dataset": rows("sft"), "eval_dataset": None, "callbacks": None}
    trainer = lib.SFTTrainer(path(), **config)
    trainer.train()
    return trainer


@script(raises=ValueError, safe_trains="bf16, TRL's default, is off if the machine has no device for it", on_cpu=True)
def no_config_for_sft(lib, folder):
    """`args=None`: three epochs, as TRL's config defaults."""
    trainer = lib.SFTTrainer(path(), train_dataset=rows("sft"))
    trainer.train()
    return trainer


@script(raises=ValueError, safe_trains="bf16, TRL's default, is off if the machine has no device for it", on_cpu=True)
def no_config_for_grpo(lib, folder):
    trainer = lib.GRPOTrainer(path(), reward_funcs=reward, args=None, train_dataset=rows("grpo", 2))
    trainer.generation_config.max_new_tokens = 4  # in place of 256, for the time of the test
    trainer.train()
    return trainer


@script
def bf16_for_sft(lib, folder):
    return sft(lib, bf16=True)


@script
def bf16_for_grpo(lib, folder):
    return grpo(lib, {"bf16": True})


@script(differs={"": "stock generates with an adapter outside of the autocast that it trains in"})
def bf16_for_grpo_with_an_adapter(lib, folder):
    return grpo(lib, {"bf16": True, "max_completion_length": 64}, peft_config=lora())


@script(warns="half-trainables")
def bf16_weights_for_grpo(lib, folder):
    return grpo(lib, {"model_init_kwargs": {"dtype": "bfloat16"}})


@script
def training_arguments_of_transformers(lib, folder):
    trainer = lib.SFTTrainer(path(), args=TrainingArguments(**COMMON), train_dataset=rows("sft"))
    trainer.train()
    return trainer


@script
def config_of_hf_argument_parser(lib, folder):
    words = [f"--{key}={value}" for key, value in COMMON.items()]
    (args,) = transformers.HfArgumentParser(lib.SFTConfig).parse_args_into_dataclasses(words)
    trainer = lib.SFTTrainer(path(), args=args, train_dataset=rows("sft"))
    trainer.train()
    return trainer


@script
def config_of_trl_parser(lib, folder):
    (folder / "config.yaml").write_text(json.dumps(RL))
    (args,) = lib.TrlParser(lib.GRPOConfig).parse_args_and_config(["--config", "config.yaml", "--beta", "0.1"])
    return grpo(lib, args=args), args.beta


@script
def config_from_a_parsed_dict(lib, folder):
    (args,) = transformers.HfArgumentParser(lib.GRPOConfig).parse_dict(dict(RL))
    return grpo(lib, args=args)


@script
def config_copied_and_pickled(lib, folder):
    args = lib.GRPOConfig(**RL, beta=0.1)
    same = pickle.loads(pickle.dumps(copy.deepcopy(args)))
    assert same.to_dict() == args.to_dict()
    return grpo(lib, args=same), sorted(set(json.loads(args.to_json_string())) & {"beta", "num_generations", "bf16"})


@script
def config_changed_after_it_was_made(lib, folder):
    args = lib.GRPOConfig(**RL)
    args.learning_rate, args.temperature = 1e-2, 0.7
    return grpo(lib, args=args), args.to_dict()["learning_rate"]


@script
def two_trainers_with_one_config(lib, folder):
    args = lib.SFTConfig(**COMMON)
    first = lib.SFTTrainer(path(), args=args, train_dataset=rows("sft"))
    first.train()
    second = lib.SFTTrainer(path(), args=args, train_dataset=rows("sft"))
    second.train()
    return second, weights_of(first.model)


# --- the model -------------------------------------------------------------------------------------------------------


@script
def model_as_an_object(lib, folder):
    return grpo(lib, model=model())


@script
def model_as_an_object_with_its_tokenizer(lib, folder):
    return grpo(lib, model=model(), processing_class=tokenizer())


@script
def path_with_a_tokenizer(lib, folder):
    return sft(lib, arguments={"processing_class": tokenizer()})


@script
def model_without_a_name(lib, folder):
    return sft(lib, arguments={"model": tiny.build_model("text"), "processing_class": tiny.build_processor("text")})


@script(warns="mismatch-is-not-rounding")
def class_of_the_users_own(lib, folder):
    """TRL computes log-probabilities from hidden states and the head, past the `forward` that samples."""

    class Scaled(transformers.LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            out = super().forward(*args, **kwargs)
            out.logits = out.logits * 0.5
            return out

    return grpo(lib, model=Scaled.from_pretrained(path(), dtype=torch.float32), processing_class=tokenizer())


@script
def frozen_layers(lib, folder):
    live = model()
    live.model.embed_tokens.requires_grad_(False)
    return sft(lib, arguments={"model": live})


@script
def model_with_images(lib, folder):
    return grpo(lib, model=str(cells.folder("llava")), train_dataset=cells.dataset("grpo", "llava"))


@script
def two_trainers_of_one_model(lib, folder):
    """Supervised fine-tuning, then GRPO of the same object."""
    live = model()
    sft(lib, arguments={"model": live})
    return grpo(lib, model=live)


@script
def model_init_in_a_search(lib, folder):
    """A search over learning rates, which builds the model anew each time."""

    def model_init():
        return model()

    found = {}
    for rate in (1e-4, 1e-3):
        trainer = sft(lib, arguments={"model": model_init()}, learning_rate=rate)
        found[rate] = trainer.state.log_history[-1]["train_loss"]
    return trainer, min(found, key=found.get)


@script(raises=TypeError)
def model_init_as_an_argument(lib, folder):
    return grpo(lib, model_init=model)


@script(raises=RuntimeError)
def hyperparameter_search_without_a_backend(lib, folder):
    trainer = lib.SFTTrainer(path(), args=lib.SFTConfig(**COMMON), train_dataset=rows("sft"))
    trainer.hyperparameter_search(n_trials=1)
    return trainer


@script
def generate_after_training(lib, folder):
    trainer = grpo(lib, model=model(), processing_class=tokenizer())
    inputs = tokenizer()(["what is it ?"], return_tensors="pt")
    ids = trainer.model.generate(**inputs, max_new_tokens=6, do_sample=False)
    return trainer, ids.tolist()


@script
def copy_of_the_trained_model(lib, folder):
    trainer = sft(lib, arguments={"model": model()})
    twin = copy.deepcopy(trainer.model)
    inputs = tokenizer()(["what is it ?"], return_tensors="pt")
    with torch.no_grad():
        return trainer, [twin(**inputs).logits.sum().item(), weights_of(twin)]


@script
def compiled(lib, folder):
    """`torch.compile` with the backend that needs no compiler."""
    return sft(lib, torch_compile=True, torch_compile_backend="eager")


# --- adapters --------------------------------------------------------------------------------------------------------


@script
def adapter_from_a_config(lib, folder):
    return grpo(lib, peft_config=lora())


@script
def adapter_on_an_object(lib, folder):
    return sft(lib, arguments={"model": model(), "peft_config": lora()})


@script
def model_with_an_adapter(lib, folder):
    torch.manual_seed(0)
    return grpo(lib, model=get_peft_model(model(), lora()), processing_class=tokenizer())


@script
def adapter_loaded_to_train_on(lib, folder):
    first = sft(lib, arguments={"peft_config": lora()})
    first.save_model("adapter")
    second = PeftModel.from_pretrained(model(), "adapter", is_trainable=True)
    return grpo(lib, model=second, processing_class=tokenizer())


@script
def adapter_with_a_reference(lib, folder):
    """`beta > 0` with an adapter: the reference is the model without it."""
    return grpo(lib, {"beta": 0.1}, peft_config=lora())


@script
def adapter_with_checkpointing(lib, folder):
    return sft(lib, arguments={"peft_config": lora()}, gradient_checkpointing=True)


@script
def adapter_of_dpo(lib, folder):
    trainer = lib.DPOTrainer(
        model=model(),
        args=lib.DPOConfig(**COMMON),
        train_dataset=rows("dpo"),
        processing_class=tokenizer(),
        peft_config=lora(),
    )
    trainer.train()
    return trainer


@script
def adapter_saved_and_merged(lib, folder):
    trainer = sft(lib, arguments={"peft_config": lora(r=8, use_rslora=True)})
    trainer.save_model("adapter")
    merged = PeftModel.from_pretrained(model(), "adapter").merge_and_unload()
    return trainer, weights_of(merged)


@script(raises=ValueError)
def adapter_for_names_that_the_model_lacks(lib, folder):
    return sft(lib, arguments={"peft_config": lora(target_modules=["no_such_proj"])})


# --- data ------------------------------------------------------------------------------------------------------------


@script
def stream_for_sft(lib, folder):
    return sft(lib, arguments={"train_dataset": rows("sft").to_iterable_dataset()})


@script
def stream_for_grpo(lib, folder):
    return grpo(lib, train_dataset=rows("grpo").to_iterable_dataset())


@script
def several_evaluation_sets(lib, folder):
    sets = {"easy": rows("sft", 4), "hard": rows("sft", 2)}
    trainer = sft(lib, arguments={"eval_dataset": sets}, eval_strategy="steps", eval_steps=1)
    return trainer, sorted(key for row in trainer.state.log_history for key in row if key.endswith("_loss"))


@script
def evaluation_of_grpo_with_a_dataset_dict(lib, folder):
    sets = DatasetDict({"a": rows("grpo", 4), "b": rows("grpo", 2)})
    return grpo(lib, {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 2}, eval_dataset=sets)


@script
def evaluate_before_training(lib, folder):
    trainer = lib.SFTTrainer(
        path(), args=lib.SFTConfig(**COMMON), train_dataset=rows("sft"), eval_dataset=rows("sft", 4)
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    return trainer, [before, trainer.evaluate()["eval_loss"]]


@script
def evaluate_another_set(lib, folder):
    trainer = grpo(lib, {"per_device_eval_batch_size": 2})
    metrics = trainer.evaluate(rows("grpo", 4), metric_key_prefix="test")
    return trainer, [metrics["test_loss"], [key for key in metrics if "precision/" not in key]]


@script
def predict(lib, folder):
    trainer = lib.RewardTrainer(
        path(), args=lib.RewardConfig(**COMMON), train_dataset=rows("reward"), eval_dataset=rows("reward", 4)
    )
    trainer.train()
    made = trainer.predict(trainer.eval_dataset)
    return trainer, [made.predictions.tolist(), made.metrics["test_loss"]]


@script
def metrics_of_the_user(lib, folder):
    def compute_metrics(prediction):
        return {"agreement": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}

    arguments = {"compute_metrics": compute_metrics, "eval_dataset": rows("sft", 4)}
    trainer = sft(lib, arguments=arguments, eval_strategy="epoch", max_steps=-1, num_train_epochs=1)
    return trainer, [row["eval_agreement"] for row in trainer.state.log_history if "eval_agreement" in row]


@script
def logits_reduced_for_the_metrics(lib, folder):
    arguments = {
        "compute_metrics": lambda prediction: {"first": int(prediction.predictions[0, 0])},
        "preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1),
        "eval_dataset": rows("sft", 4),
    }
    trainer = sft(lib, arguments=arguments)
    return trainer, trainer.evaluate()["eval_first"]


@script
def collator_of_the_user(lib, folder):
    class Reversing(DataCollatorWithPadding):
        def __call__(self, features):
            made = super().__call__([{"input_ids": one["input_ids"][::-1]} for one in features])
            made["labels"] = made["input_ids"].clone()
            return made

    return sft(lib, arguments={"data_collator": Reversing(tokenizer())})


@script
def columns_that_are_kept(lib, folder):
    """`remove_unused_columns=False` in GRPO hands all columns to the reward."""
    seen = []

    def counting(completion_ids, solution, **kwargs):
        seen.extend(solution)
        return [float(len(text) % 3) for text in solution]

    trainer = grpo(lib, {"remove_unused_columns": False}, reward_funcs=counting)
    return trainer, seen


@script
def columns_that_are_removed(lib, folder):
    dataset = rows("sft").add_column("note", ["x"] * 8)
    return sft(lib, arguments={"train_dataset": dataset}, remove_unused_columns=True)


@script
def messages_in_one_column(lib, folder):
    dataset = rows("sft").map(lambda row: {"messages": row["prompt"] + row["completion"]})
    return sft(lib, arguments={"train_dataset": dataset.select_columns("messages")}, assistant_only_loss=True)


@script
def text_made_by_a_function(lib, folder):
    dataset = Dataset.from_dict({"question": ["what is it ?"] * 8, "answer": ["two red circles"] * 8})
    arguments = {
        "train_dataset": dataset,
        "formatting_func": lambda row: f"{row['question']} {row['answer']}",
    }
    return sft(lib, arguments=arguments)


@script
def loss_on_the_whole_text(lib, folder):
    return sft(lib, completion_only_loss=False, max_length=16)


@script
def examples_tokenised_by_the_user(lib, folder):
    encode = tokenizer()
    dataset = Dataset.from_dict({"input_ids": [encode("two red circles").input_ids] * 8})
    return sft(lib, arguments={"train_dataset": dataset})


@script
def loader_with_a_worker(lib, folder):
    return sft(lib, dataloader_num_workers=1, dataloader_persistent_workers=False)


@script(raises=KeyError)
def a_column_of_another_name(lib, folder):
    return grpo(lib, train_dataset=rows("grpo").rename_column("prompt", "question"))


@script(raises=ValueError)
def no_training_set(lib, folder):
    return grpo(lib, train_dataset=None)


# --- rewards ---------------------------------------------------------------------------------------------------------


@script
def rewards_of_all_kinds(lib, folder):
    """A function, an async function and a model, with weights."""
    return grpo(
        lib,
        {"reward_weights": [1.0, 0.5, 2.0]},
        reward_funcs=[reward, slow_reward, reward_model_path(folder)],
    )


@script
def reward_model_with_its_tokenizer(lib, folder):
    scores = AutoModelForSequenceClassification.from_pretrained(reward_model_path(folder), dtype=torch.float32)
    return grpo(lib, reward_funcs=[scores], reward_processing_classes=[tokenizer()])


@script
def async_rewards(lib, folder):
    return grpo(lib, reward_funcs=[slow_reward])


@script
def rewards_of_some_completions_only(lib, folder):
    def even(completion_ids, **kwargs):
        return [float(ids[0] % 5) if number % 2 else None for number, ids in enumerate(completion_ids)]

    return grpo(lib, reward_funcs=[reward, even])


@script
def reward_that_logs(lib, folder):
    def logging(completion_ids, log_metric=None, log_extra=None, trainer_state=None, **kwargs):
        log_metric("mean_id", float(sum(map(sum, completion_ids))))
        log_extra("length", [len(ids) for ids in completion_ids])
        return [float(trainer_state.global_step + sum(ids) % 7) for ids in completion_ids]

    return grpo(lib, reward_funcs=logging)


@script
def reward_as_an_object(lib, folder):
    class Length:
        __name__ = "length"

        def __call__(self, prompts, completions, **kwargs):
            return [float(len(one[0]["content"]) % 5) for one in completions]

    return grpo(lib, reward_funcs=[Length(), functools.partial(reward)])


@script(raises=ZeroDivisionError)
def reward_that_raises(lib, folder):
    return grpo(lib, reward_funcs=lambda completions, **kwargs: [1 / 0 for _ in completions])


@script(raises=ValueError)
def no_reward(lib, folder):
    return grpo(lib, reward_funcs=[])


@script(raises=ValueError)
def one_generation_for_a_prompt(lib, folder):
    return grpo(lib, {"num_generations": 1})


# --- methods that a subclass overrides -------------------------------------------------------------------------------


@script
def subclass_with_a_loss(lib, folder):
    class Weighted(lib.SFTTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            loss, outputs = super().compute_loss(
                model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch
            )
            loss = loss + 1e-3 * outputs.logits.float().pow(2).mean()
            return (loss, outputs) if return_outputs else loss

    return sft(lib, Weighted)


@script
def subclass_of_grpo_with_a_loss(lib, folder):
    class Halved(lib.GRPOTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch) * 0.5

    trainer = Halved(path(), reward, lib.GRPOConfig(**RL), rows("grpo"))
    trainer.train()
    return trainer


@script
def loss_as_an_argument(lib, folder):
    def doubled(outputs, labels, num_items_in_batch=None):
        logits, wanted = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        return 2 * torch.nn.functional.cross_entropy(logits, wanted)

    return sft(lib, arguments={"compute_loss_func": doubled})


@script
def subclass_that_changes_the_rollout(lib, folder):
    class Clipped(lib.GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            made = super()._generate_and_score_completions(inputs)
            made["advantages"] = made["advantages"].clamp(-0.5, 0.5)
            return made

    trainer = Clipped(path(), reward, lib.GRPOConfig(**RL), rows("grpo"))
    trainer.train()
    return trainer


@script
def subclass_with_rewards_of_its_own(lib, folder):
    class Shifted(lib.GRPOTrainer):
        def _calculate_rewards(self, *args, **kwargs):
            return super()._calculate_rewards(*args, **kwargs) * 2 + 1

    trainer = Shifted(path(), reward, lib.GRPOConfig(**RL), rows("grpo"))
    trainer.train()
    return trainer


@script
def subclass_that_logs(lib, folder):
    class Logging(lib.SFTTrainer):
        def log(self, logs, start_time=None):
            logs["twice_the_loss"] = 2 * logs.get("loss", 0.0)
            super().log(logs, start_time)

    return sft(lib, Logging)


@script
def subclass_with_a_training_step(lib, folder):
    class Counting(lib.SFTTrainer):
        norms = ()

        def training_step(self, model, inputs, num_items_in_batch=None):
            loss = super().training_step(model, inputs, num_items_in_batch)
            self.norms = (*self.norms, next(model.parameters()).grad.norm().item())
            return loss

    trainer = sft(lib, Counting)
    return trainer, trainer.norms


@script
def subclass_with_a_loader(lib, folder):
    class Ordered(lib.SFTTrainer):
        def get_train_dataloader(self):
            loader = DataLoader(
                self.train_dataset.select_columns(["input_ids"]), batch_size=2, collate_fn=self._padded
            )
            return self.accelerator.prepare(loader)

        def _padded(self, examples):
            made = self.processing_class.pad(examples, return_tensors="pt")
            return {**made, "labels": made["input_ids"]}

    return sft(lib, Ordered)


@script
def subclass_with_an_optimizer(lib, folder):
    class Momentum(lib.SFTTrainer):
        def create_optimizer(self, *args, **kwargs):
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=self.args.learning_rate, momentum=0.9)
            return self.optimizer

    return sft(lib, Momentum)


@script
def subclass_of_a_subclass(lib, folder):
    class First(lib.SFTTrainer):
        def __init__(self, *args, scale=1.0, **kwargs):
            super().__init__(*args, **kwargs)
            self.scale = scale

    class Second(First):
        def compute_loss(self, *args, **kwargs):
            return super().compute_loss(*args, **kwargs) * self.scale

    return sft(lib, Second, {"scale": 0.25})


# --- optimisers, schedules, accumulation -----------------------------------------------------------------------------


@script
def optimizer_and_schedule_of_the_user(lib, folder):
    live = model()
    optimizer = torch.optim.SGD(live.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    return grpo(lib, model=live, processing_class=tokenizer(), optimizers=(optimizer, schedule))


@script
def class_of_an_optimizer(lib, folder):
    chosen = (torch.optim.RMSprop, {"lr": 1e-3, "alpha": 0.9})
    return sft(lib, arguments={"optimizer_cls_and_kwargs": chosen})


@script
def adafactor(lib, folder):
    return sft(lib, optim="adafactor")


@script
def schedule_with_warm_up(lib, folder):
    return sft(lib, max_steps=4, warmup_steps=2, lr_scheduler_type="cosine", max_grad_norm=0.5, weight_decay=0.1)


@script
def no_clipping(lib, folder):
    return sft(lib, max_grad_norm=0.0)


@script
def accumulated_gradients(lib, folder):
    return grpo(lib, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2})


@script
def accumulated_gradients_of_sft(lib, folder):
    return sft(lib, per_device_train_batch_size=2, gradient_accumulation_steps=2)


@script
def gradient_checkpointing(lib, folder):
    return grpo(lib, {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}})


@script
def gradient_checkpointing_reentrant(lib, folder):
    return sft(lib, gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": True})


@script
def noise_on_embeddings(lib, folder):
    return sft(lib, neftune_noise_alpha=5.0)


# --- steps, seeds, logging -------------------------------------------------------------------------------------------


@script
def no_steps(lib, folder):
    """`max_steps=0` means epochs to transformers."""
    return sft(lib, max_steps=0, num_train_epochs=1)


@script
def epochs(lib, folder):
    return grpo(lib, {"max_steps": -1, "num_train_epochs": 0.5})


@script
def trained_twice(lib, folder):
    trainer = grpo(lib)
    first = weights_of(trainer.model)
    trainer.train()
    return trainer, first


@script
def logged_by_a_fraction(lib, folder):
    trainer = sft(lib, max_steps=4, logging_steps=0.5)
    return trainer, [row["step"] for row in trainer.state.log_history]


@script
def first_step_logged(lib, folder):
    return sft(lib, max_steps=3, logging_steps=10, logging_first_step=True)


@script
def metrics_in_the_log(lib, folder):
    trainer = grpo(lib, {"beta": 0.1})
    return trainer, [key for key in trainer.state.log_history[0] if not key.startswith("precision/")]


@script
def other_seeds(lib, folder):
    seen = [weights_of(grpo(lib, {"seed": seed}).model) for seed in (0, 1, 0)]
    assert seen[0] == seen[2] != seen[1]
    return grpo(lib, {"seed": 3, "data_seed": 4}), seen


@script
def completions_printed(lib, folder):
    return grpo(lib, {"log_completions": True, "num_completions_to_print": 1})


# --- algorithms ------------------------------------------------------------------------------------------------------


@script
def several_iterations(lib, folder):
    return grpo(lib, {"num_iterations": 2, "max_steps": 4})


@script
def several_steps_of_one_generation(lib, folder):
    return grpo(lib, {"steps_per_generation": 2, "max_steps": 4, "epsilon_high": 0.3})


@script
def reference_model(lib, folder):
    return grpo(lib, {"beta": 0.1})


@script
def reference_model_that_follows(lib, folder):
    return grpo(lib, {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1, "max_steps": 3})


@script
def loss_of_sequences(lib, folder):
    return grpo(lib, {"loss_type": "bnpo", "importance_sampling_level": "sequence", "scale_rewards": "batch"})


@script
def loss_of_dr_grpo(lib, folder):
    return grpo(lib, {"loss_type": "dr_grpo", "scale_rewards": "none", "mask_truncated_completions": True})


@script
def sampling_of_the_user(lib, folder):
    settings = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "repetition_penalty": 1.1}
    return grpo(lib, {**settings, "generation_kwargs": {"min_new_tokens": 2}})


@script
def tools(lib, folder):
    """A model that calls a tool in its first turn: what the tool returns is in the completion, and is not trained."""

    def add(a: int, b: int) -> int:
        """Adds two numbers.

        Args:
            a: The first.
            b: The second.
        """
        seen.append([a, b])
        return a + b

    class Calling(lib.GRPOTrainer):
        turns = 0

        def _generate_single_turn(self, *args, **kwargs):
            self.turns += 1
            if self.turns % 2 == 0:
                return super()._generate_single_turn(*args, **kwargs)
            self.generation_config.max_new_tokens, whole = 1, self.generation_config.max_new_tokens
            completions, *rest = super()._generate_single_turn(*args, **kwargs)
            self.generation_config.max_new_tokens = whole
            call = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call><|im_end|>'
            return [self.processing_class(call).input_ids for _ in completions], *rest

    seen: list[Any] = []
    encode = tokenizer()
    encode.chat_template = chat_template_utils.qwen3_chat_template
    live = model()
    encode.add_tokens(["<|im_end|>"], special_tokens=True)
    live.resize_token_embeddings(len(encode))
    trainer = Calling(
        live,
        reward,
        lib.GRPOConfig(**RL | {"max_completion_length": 160}),
        rows("grpo"),
        processing_class=encode,
        tools=[add],
    )
    trainer.train()
    assert seen
    return trainer, seen


@script
def rollout_of_the_user(lib, folder):
    def rollout(prompts, trainer):
        count = len(prompts)
        return {
            "prompt_ids": [[5, 6, 7]] * count,
            "completion_ids": [[8 + number, 9] for number in range(count)],
            "logprobs": None,
        }

    return grpo(lib, rollout_func=rollout)


@script
def dpo_with_a_reference(lib, folder):
    trainer = lib.DPOTrainer(
        model(), model(1), lib.DPOConfig(**COMMON, loss_type=["sigmoid", "sft"]), None, rows("dpo"), None, tokenizer()
    )
    trainer.train()
    return trainer


@script
def dpo_with_logps_computed_before(lib, folder):
    trainer = lib.DPOTrainer(
        path(), args=lib.DPOConfig(**COMMON, precompute_ref_log_probs=True), train_dataset=rows("dpo")
    )
    trainer.train()
    return trainer


@script(needs="kto")
def kto_with_a_reference(lib, folder):
    trainer = lib.KTOTrainer(
        model=model(),
        ref_model=model(1),
        args=lib.KTOConfig(**COMMON, desirable_weight=1.5),
        train_dataset=rows("kto"),
        processing_class=tokenizer(),
    )
    trainer.train()
    return trainer


@script
def reward_with_centred_scores(lib, folder):
    trainer = lib.RewardTrainer(
        path(), args=lib.RewardConfig(**COMMON, center_rewards_coefficient=0.01), train_dataset=rows("reward")
    )
    trainer.train()
    return trainer


# --- callbacks, checkpoints, files -----------------------------------------------------------------------------------


@script
def callbacks(lib, folder):
    class Watching(TrainerCallback):
        def __init__(self):
            self.seen = []

        def on_step_end(self, args, state, control, model=None, optimizer=None, **kwargs):
            self.seen.append([state.global_step, weights_of(model), len(optimizer.param_groups)])

        def on_log(self, args, state, control, logs=None, **kwargs):
            self.seen.append(logs.get("loss"))

    watching = Watching()
    trainer = sft(lib, arguments={"callbacks": [watching]})
    return trainer, watching.seen


@script
def callback_that_stops(lib, folder):
    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = True

    trainer = lib.SFTTrainer(path(), args=lib.SFTConfig(**COMMON), train_dataset=rows("sft"), callbacks=[Stop])
    assert trainer.pop_callback(Stop) is not None
    trainer.add_callback(Stop)
    trainer.train()
    return trainer, trainer.state.global_step


@script
def early_stopping(lib, folder):
    trainer = sft(
        lib,
        arguments={
            "eval_dataset": rows("sft", 4),
            "callbacks": [EarlyStoppingCallback(early_stopping_patience=1, early_stopping_threshold=100.0)],
        },
        max_steps=6,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        save_total_limit=1,
        metric_for_best_model="loss",
        load_best_model_at_end=True,
    )
    return trainer, trainer.state.global_step


@script
def best_model_at_the_end(lib, folder):
    trainer = grpo(
        lib,
        {
            "max_steps": 3,
            "eval_strategy": "steps",
            "eval_steps": 1,
            "save_strategy": "steps",
            "save_steps": 1,
            "per_device_eval_batch_size": 2,
            "metric_for_best_model": "reward",
            "load_best_model_at_end": True,
        },
        eval_dataset=rows("grpo", 4),
    )
    return trainer, Path(trainer.state.best_model_checkpoint).name


@script(differs={"num_tokens": "stock counts tokens from zero after it resumes"})
def resumed_by_path(lib, folder):
    sft(lib, max_steps=4, save_strategy="steps", save_steps=2)
    trainer = lib.SFTTrainer(path(), args=lib.SFTConfig(**COMMON | {"max_steps": 4}), train_dataset=rows("sft"))
    trainer.train(resume_from_checkpoint="out/checkpoint-2")
    return trainer, files("out")


@script
def resumed_by_true(lib, folder):
    grpo(lib, {"save_strategy": "steps", "save_steps": 1})
    trainer = lib.GRPOTrainer(path(), reward, lib.GRPOConfig(**RL | {"max_steps": 4}), rows("grpo"))
    trainer.train(resume_from_checkpoint=True)
    return trainer, trainer.state.global_step


@script(differs={"num_tokens": "stock counts tokens from zero after it resumes"})
def adapter_resumed(lib, folder):
    sft(lib, arguments={"peft_config": lora()}, save_strategy="steps", save_steps=2)
    trainer = lib.SFTTrainer(
        path(), args=lib.SFTConfig(**COMMON | {"max_steps": 4}), train_dataset=rows("sft"), peft_config=lora()
    )
    trainer.train(resume_from_checkpoint="out/checkpoint-2")
    return trainer


@script(raises=ValueError)
def resumed_from_nothing(lib, folder):
    trainer = lib.SFTTrainer(path(), args=lib.SFTConfig(**COMMON), train_dataset=rows("sft"))
    trainer.train(resume_from_checkpoint=True)
    return trainer


@script
def saved_and_loaded(lib, folder):
    trainer = grpo(lib)
    trainer.save_model("saved")
    loaded = AutoModelForCausalLM.from_pretrained("saved", dtype=torch.float32)
    assert weights_of(loaded) == weights_of(trainer.model)
    return trainer, [tokenizer().vocab_size, len(AutoTokenizer.from_pretrained("saved"))]


@script
def few_checkpoints_kept(lib, folder):
    trainer = sft(lib, max_steps=3, save_strategy="steps", save_steps=1, save_total_limit=1, save_only_model=True)
    return trainer, files("out")


@script
def nothing_is_pushed(lib, folder):
    return sft(lib, push_to_hub=False, hub_model_id="user/model", hub_strategy="end")


@script
def state_saved(lib, folder):
    trainer = sft(lib)
    trainer.save_state()
    trainer.log_metrics("train", {"loss": 1.0})
    trainer.save_metrics("train", {"loss": 1.0})
    return trainer, files("out")


@script
def model_card(lib, folder):
    trainer = sft(lib)
    trainer.create_model_card(model_name="mine", tags=["test"])
    return trainer, (folder / "out" / "README.md").is_file()


@script
def questions_to_the_trainer(lib, folder):
    trainer = sft(lib)
    loader = trainer.get_train_dataloader()
    return trainer, [
        trainer.is_world_process_zero(),
        trainer.num_examples(loader),
        trainer.get_num_trainable_parameters(),
        trainer.get_learning_rates(),
        sorted(next(iter(loader))),
        len(list(itertools.islice(trainer.get_eval_dataloader(trainer.train_dataset), 1))),
    ]


# --- mistakes --------------------------------------------------------------------------------------------------------


@script(raises=TypeError)
def misspelt_setting(lib, folder):
    return sft(lib, learning_rte=1e-3)


@script(raises=TypeError)
def misspelt_argument(lib, folder):
    return grpo(lib, dataset=rows("grpo"))


@script(raises=TypeError)
def tokenizer_as_it_was_once_called(lib, folder):
    return sft(lib, arguments={"tokenizer": tokenizer()})


@script(raises=OSError)
def no_such_model(lib, folder):
    return sft(lib, arguments={"model": str(folder / "no-model")})


@script(raises=ImportError)
def kernels_that_are_not_installed(lib, folder):
    return sft(lib, use_liger_kernel=True)


@script(raises=ValueError)
def both_halves(lib, folder):
    return sft(lib, bf16=True, fp16=True)


@script(raises=ValueError)
def generations_that_do_not_divide(lib, folder):
    return grpo(lib, {"num_generations": 3})


@script(
    raises=RuntimeError,
    safe_trains="dtypes that meet get a cast",
    warns="half-trainables",
)
def images_in_a_half_model(lib, folder):
    return grpo(
        lib,
        {"model_init_kwargs": {"dtype": "bfloat16"}},
        model=str(cells.folder("aria")),
        train_dataset=cells.dataset("grpo", "aria"),
    )
