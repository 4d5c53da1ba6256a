"""Reference and teacher models compute as the policy does, also those that TRL calls while it builds the trainer."""

import os

import cells
import pytest
import torch
from cells import Cell
from datasets import load_from_disk
from transformers import AutoModelForCausalLM, AutoTokenizer

from upstream import needs_transformers_5


def rows(task):
    """A dataset with a fingerprint of its own, so that no results of an earlier test are found."""
    return cells.dataset(task, "text").map(dict, load_from_cache_file=False, new_fingerprint=os.urandom(8).hex())


def first_log(task, precompute, dataset, flag="bf16", safe=True, **changes):
    """What a run logs in its first step, with a reference model that equals the policy."""
    config = (cells.SAFE_CONFIG if safe else cells.PLAIN)[task]
    made = cells.arguments(
        Cell("text", task, "fp32", flag), config, 1, precompute_ref_log_probs=precompute, disable_dropout=True,
        logging_steps=1, **changes,
    )  # fmt: skip
    reference = AutoModelForCausalLM.from_pretrained(cells.folder("text"), dtype=torch.float32)
    made |= {"ref_model": reference, "train_dataset": dataset}
    trainer = (cells.SAFE if safe else cells.STOCK)[task](**made)
    trainer.train()
    return next(entry for entry in trainer.state.log_history if "loss" in entry)


@pytest.mark.parametrize("task", [task for task in ("dpo", "kto") if task in cells.SAFE])
def test_a_reference_that_is_scored_before_training_is_prepared(task):
    for precompute in (False, True):
        log = first_log(task, precompute, rows(task), fp32_modules=["*.layers.0"])
        assert log["rewards/chosen"] == log["rewards/rejected"] == 0.0


@needs_transformers_5("keeps the precision of one trainer of a process for the next")
def test_reference_scores_of_another_precision_are_not_reused(tmp_path):
    """TRL names the file with the scores by the weights and the data alone."""
    for safe in (False, True):
        folder = str(tmp_path / str(safe))
        cells.dataset("dpo", "text").save_to_disk(folder)  # data in memory have no files of results
        wide = first_log("dpo", True, load_from_disk(folder), None, safe)
        half = first_log("dpo", True, load_from_disk(folder), "bf16", safe)
        assert wide["rewards/chosen"] == 0.0
        assert (half["rewards/chosen"] == 0.0) == safe


@pytest.mark.skipif("distillation" not in cells.SAFE, reason="this TRL has no trainer for it")
@pytest.mark.parametrize(("student", "teacher", "pattern"), [(2, 1, "*.layers.1"), (1, 2, "*.layers.0")])
def test_a_teacher_of_the_same_class_may_have_other_layers(student, teacher, pattern):
    def model(layers):
        source = AutoModelForCausalLM.from_pretrained(cells.folder("text"))
        source.config.num_hidden_layers, source.config.layer_types = layers, None
        torch.manual_seed(0)
        return type(source)(source.config)

    made = cells.arguments(Cell("text", "distillation", "fp32", "bf16"), cells.SAFE_CONFIG["distillation"], 1,
                           fp32_modules=[pattern])  # fmt: skip
    made["args"].model_init_kwargs = None
    made |= {"model": model(student), "teacher_model": model(teacher)}
    made["processing_class"] = AutoTokenizer.from_pretrained(cells.folder("text"))
    trainer = cells.SAFE["distillation"](**made)
    trainer.train()
    assert trainer.precision.weights.fp32_modules == (f"model.layers.{pattern[-1]}",)
