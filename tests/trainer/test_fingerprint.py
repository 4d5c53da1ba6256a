"""What is compared between the processes of a run, and what the refusal shows."""

import functools
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from safe_trainers import SafeGRPOConfig
from safe_trainers.trainer import fingerprint
from safe_trainers.trainer.fingerprint import Fingerprint, arguments_of, differences, settings_of, versions


def prints(*parts, hosts=None):
    return [Fingerprint(rank, (hosts or ["a", "b", "b", "b"])[rank], part) for rank, part in enumerate(parts)]


def test_equal_processes_are_not_refused():
    same = {"trl version": '"1.16.0"', "learning_rate": "1e-05"}
    assert differences(prints(same, dict(same), dict(same))) is None


def test_the_refusal_names_rank_host_and_key():
    first = {"trl version": '"1.16.0"', "learning_rate": "1e-05", "beta": "0.0"}
    problem = differences(prints(first, first | {"trl version": '"1.15.0"', "learning_rate": "0.0001"}))
    assert problem.id == "ranks-differ"
    assert problem.what == (
        "differences from rank 0 (a): rank 1 (b): trl version 1.15.0, not 1.16.0; learning_rate 0.0001, not 1e-05"
    )


def test_ranks_of_a_machine_with_the_same_differences_are_named_together():
    first, second = {"beta": "0.0", "tf32": "null"}, {"beta": "0.1", "tf32": "null"}
    problem = differences(prints(first, second, second, first))
    assert problem.what == "differences from rank 0 (a): ranks 1, 2 (b): beta 0.1, not 0.0"


def test_many_and_long_differences_are_cut():
    first = {f"key{number}": '"x"' for number in range(9)}
    problem = differences(prints(first, {name: f'"{"y" * 100}"' for name in first}))
    assert problem.what.endswith("; and 4 more")
    assert "y" * 60 + "..., not x" in problem.what
    assert "y" * 61 not in problem.what


def test_what_only_one_process_has_is_not_compared():
    assert differences(prints({"peft version": '"1"'}, {"deepspeed version": '"2"'})) is None


def test_versions_have_no_labels_of_a_build():
    found = versions()
    assert found["torch version"] == torch.__version__.partition("+")[0]
    assert {"Python version", "safe-trainers version", "trl version", "transformers version"} <= set(found)
    assert found["Python version"].count(".") == 1


def test_arguments_of_one_process_are_not_compared(tmp_path):
    same = arguments_of(SafeGRPOConfig(str(tmp_path / "a"), learning_rate=1e-4))
    local = SafeGRPOConfig(
        str(tmp_path / "b"), learning_rate=1e-4, seed=7, run_name="b", logging_steps=10, report_to="none",
        dataloader_num_workers=2, dataloader_pin_memory=False, log_level="error", disable_tqdm=True,
        vllm_gpu_memory_utilization=0.1, vllm_server_host="node7", hub_token="secret", ddp_timeout=7,
    )  # fmt: skip
    assert arguments_of(local) == same
    assert "secret" not in str(same)


@pytest.mark.parametrize(
    "change", [{"learning_rate": 1e-5}, {"per_device_train_batch_size": 16}, {"save_steps": 3}, {"data_seed": 1},
               {"fp32_modules": ["mlp"]}, {"model_init_kwargs": {"dtype": "bfloat16"}}, {"optim": "sgd"}],
)  # fmt: skip
def test_arguments_that_must_be_equal_are_compared(change, tmp_path):
    plain = arguments_of(SafeGRPOConfig(str(tmp_path)))
    (key,) = change
    changed = arguments_of(SafeGRPOConfig(str(tmp_path), **change))
    different = {name for name in plain if plain[name] != changed[name]}
    assert different - {"generation_batch_size"} == {key}  # which follows from the batch size


@dataclass
class Arguments:
    reward: Any = None
    places: dict[str, Any] = field(default_factory=dict)
    dtype: Any = None


def test_values_of_processes_are_compared_without_addresses_and_devices():
    def made(rank):
        return Arguments(
            functools.partial(print, rank), {"device_map": {"": rank}, "revision": "main"}, torch.bfloat16
        )

    assert arguments_of(made(0)) == arguments_of(made(1))
    assert arguments_of(made(0))["places"] == {"revision": "main"}
    assert arguments_of(made(0))["dtype"] == "torch.bfloat16"


def test_arguments_are_not_changed(tmp_path):
    args = SafeGRPOConfig(str(tmp_path), model_init_kwargs={"dtype": torch.bfloat16})
    arguments_of(args)
    assert args.model_init_kwargs == {"dtype": torch.bfloat16}


def test_local_folders_and_files_may_have_other_names(tmp_path):
    values = {"model_name_or_path": str(tmp_path), "dataset_name": "org/data"}
    assert settings_of(values) == {"dataset_name": "org/data"}


def test_one_process_compares_nothing(monkeypatch):
    monkeypatch.setattr(fingerprint, "gather_object", lambda found: pytest.fail("it was gathered"))
    assert fingerprint.compare({"beta": 0.0}) is None
