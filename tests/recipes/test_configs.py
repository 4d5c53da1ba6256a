"""The launch configs: one per engine, read by accelerate itself, without a precision that contradicts a recipe."""

from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser

from safe_trainers import RecipeError
from safe_trainers.cli.launch import find_config, read_config


ROOT = Path(__file__).parents[2] / "configs"
CONFIGS = {path.stem: path for path in sorted(ROOT.glob("*.yaml"))}
ENGINES = {"single_gpu": "NO", "ddp": "MULTI_GPU", "fsdp2": "FSDP", "zero2": "DEEPSPEED", "zero3": "DEEPSPEED"}
PRECISION = ("precision", "bf16", "fp16", "fp8", "16bit_dtype")
"""What the name of a key about precision holds."""


def keys_of(content):
    for key, value in content.items():
        yield key
        if isinstance(value, dict):
            yield from keys_of(value)


def launched(path, processes):
    """What accelerate makes of a config, as `launch` calls it."""
    options = ["--config_file", str(path), "--num_processes", str(processes), "--mixed_precision", "no", "script.py"]
    return _validate_launch_command(launch_command_parser().parse_args(options))[0]


def test_there_is_one_for_each_engine():
    assert set(CONFIGS) == set(ENGINES)
    contents = [path.read_text().split("\n", 2)[2] for path in CONFIGS.values()]
    assert len(set(contents)) == len(contents)


@pytest.mark.parametrize("name", ENGINES)
def test_a_config_is_what_its_name_says_and_has_no_precision(name):
    content = yaml.safe_load(CONFIGS[name].read_text())
    # What the ZeRO-3 engine saves is not what it computes in.
    found = [key for key in keys_of(content) if any(word in key for word in PRECISION)]
    assert found == []
    config = load_config_from_file(str(CONFIGS[name]))
    assert (config.distributed_type.value, config.mixed_precision) == (ENGINES[name], None)
    args = launched(CONFIGS[name], 1 if name == "single_gpu" else 2)
    assert args.mixed_precision == "no"
    assert (args.multi_gpu, args.use_fsdp, args.use_deepspeed) == (
        ENGINES[name] == "MULTI_GPU", ENGINES[name] == "FSDP", ENGINES[name] == "DEEPSPEED"
    )  # fmt: skip
    assert args.zero_stage == {"zero2": 2, "zero3": 3}.get(name)
    assert name != "fsdp2" or int(args.fsdp_version) == 2


@pytest.mark.parametrize("name", ENGINES)
def test_a_config_begins_with_its_command(name):
    first = CONFIGS[name].read_text().splitlines()[0]
    assert first.startswith("# safe-trainers ")
    assert f" --accelerate_config {name}" in first


def test_configs_are_found_by_name_and_by_file(tmp_path):
    assert find_config("zero3") == CONFIGS["zero3"]
    own = tmp_path / "own.yaml"
    own.write_text("distributed_type: MULTI_GPU\nnum_processes: 4\n")
    assert find_config(str(own)) == own
    assert read_config(own, None, {})[:2] == ("MULTI_GPU", 4)
    assert read_config(own, 2, {})[:2] == ("MULTI_GPU", 2)
    with pytest.raises(RecipeError, match=r"there is no config zero4; did you mean 'zero[23]'\?"):
        find_config("zero4")


@pytest.mark.parametrize(
    ("text", "processes", "message"),
    [
        ("a: [", None, "own.yaml is not YAML"),
        ("[]", None, "own.yaml is not an accelerate config: distributed_type is missing"),
        ("distributed_type: MULTI_GPU", None, "this machine has no GPU. Write: --num_processes 2"),
        ("distributed_type: MULTI_GPU", 1, "is for several processes, but 1 was requested"),
        ("distributed_type: NO", 2, "runs one process, but 2 were requested. Write: --accelerate_config ddp"),
        ("distributed_type: 'NO'", 2, "runs one process, but 2 were requested. Write: --accelerate_config ddp"),
        (
            "distributed_type: FSDP\nnum_processes: many",
            None,
            "must be an integer from 1, got many. Write: --num_processes 2",
        ),
    ],
)
def test_a_config_that_cannot_be_launched_is_refused(text, processes, message, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    own = tmp_path / "own.yaml"
    own.write_text(text)
    with pytest.raises(RecipeError) as caught:
        read_config(own, processes, {})
    assert message in str(caught.value)


def test_a_precision_in_a_file_of_ones_own_is_not_used(tmp_path, capsys):
    own = tmp_path / "own.yaml"
    own.write_text("distributed_type: MULTI_GPU\nmixed_precision: bf16\nnum_processes: 2\n")
    assert read_config(own, None, {})[:2] == ("MULTI_GPU", 2)
    assert "mixed_precision: bf16 of" in capsys.readouterr().err
    assert launched(own, 2).mixed_precision == "no"
