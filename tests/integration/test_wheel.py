"""What is installed from the wheel works in an empty folder, away from the checkout."""

import os
import re
import subprocess
import sys
import zipfile

import pytest
from release_check import KINDS, SHORT, WRITTEN, CheckError, build, check_contents, check_metadata


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory):
    """A freshly built wheel and sdist, by kind."""
    return build(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def installed(artifacts, tmp_path_factory):
    """The folder that the wheel was installed into; its dependencies are this environment's."""
    folder = tmp_path_factory.mktemp("site")
    command = [
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--target",
        str(folder),
        str(artifacts["wheel"]),
    ]
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def program(installed, tmp_path):
    """Runs the installed program in an empty folder."""

    def run(*arguments):
        environment = {**os.environ, "PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"}
        return subprocess.run(
            [sys.executable, "-m", "safe_trainers.cli", *arguments],
            cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip

    return run


def test_the_program_is_the_installed_one(installed, program, tmp_path):
    code = "import safe_trainers; print(safe_trainers.__file__)"
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    out = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True,
                         check=True)  # fmt: skip
    assert out.stdout.startswith(str(installed))
    assert (installed / "safe_trainers" / "py.typed").is_file()


def test_a_recipe_is_found_copied_validated_and_trained(program, tmp_path):
    listed = program("list")
    assert listed.returncode == 0, listed.stderr
    assert "grpo/tiny_vlm_bf16" in listed.stdout
    copied = program("copy", "grpo/tiny_vlm_bf16.yaml")
    assert copied.returncode == 0, copied.stderr
    assert (tmp_path / "tiny_vlm_bf16.yaml").is_file()
    validated = program("validate", "tiny_vlm_bf16.yaml", "--task", "grpo")
    assert validated.returncode == 0, validated.stdout + validated.stderr
    trained = program("grpo", "--config", "tiny_vlm_bf16.yaml", *SHORT, "--output_dir", "run")
    assert trained.returncode == 0, trained.stdout + trained.stderr
    assert (tmp_path / "run" / "plot.png").is_file()
    assert all((tmp_path / "run" / name).is_file() for name in WRITTEN)


@pytest.mark.parametrize("kind", KINDS)
def test_what_would_be_released_is_whole(artifacts, kind):
    assert int(check_contents(artifacts[kind], kind).split()[0]) > 100
    assert "safe-trainers" in check_metadata(artifacts[kind], kind)


def changed(wheel, folder, change):
    """A copy of a wheel, each of its files as `change` gives it back: name and bytes, or `None`."""
    copy = folder / wheel.name
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(copy, "w") as new:
        for name in old.namelist():
            kept = change(name, old.read(name))
            if kept is not None:
                new.writestr(*kept)
    return copy


@pytest.mark.parametrize(("lost", "message"), [
    ("py.typed", "not in it: safe_trainers/py.typed"),
    ("licenses/LICENSE", "the licence is not in .dist-info/licenses"),
    ("configs/fsdp2.yaml", "not in it: safe_trainers/_data/configs/fsdp2.yaml"),
    ("recipes/sft/tiny_vlm_bf16.yaml", "not in it: safe_trainers/_data/recipes/sft/tiny_vlm_bf16.yaml"),
])  # fmt: skip
def test_a_wheel_without_one_of_its_files_is_found(artifacts, tmp_path, lost, message):
    wheel = changed(artifacts["wheel"], tmp_path, lambda name, data: None if name.endswith(lost) else (name, data))
    with pytest.raises(CheckError, match=re.escape(message)):
        check_contents(wheel, "wheel")


def test_a_wheel_with_more_than_the_package_is_found(artifacts, tmp_path):
    wheel = changed(
        artifacts["wheel"], tmp_path, lambda name, data: (name.replace("safe_trainers/cli/", "tests/"), data)
    )
    with pytest.raises(CheckError, match="not in it: safe_trainers/cli/"):
        check_contents(wheel, "wheel")
    with zipfile.ZipFile(copied := tmp_path / "again.whl", "w") as new, zipfile.ZipFile(artifacts["wheel"]) as old:
        for name in old.namelist():
            new.writestr(name, old.read(name))
        new.writestr("tests/conftest.py", "")
    with pytest.raises(CheckError, match=r"not to be in it: tests/conftest\.py"):
        check_contents(copied.rename(tmp_path / artifacts["wheel"].name), "wheel")


@pytest.mark.parametrize(("old", "new", "message"), [
    ("License-Expression: Apache-2.0", "License-Expression: MIT", "License-Expression is 'MIT'"),
    ("Requires-Python: >=3.11", "Requires-Python: >=3.9", "Requires-Python is '>=3.9'"),
    ("Classifier: Typing :: Typed\n", "", "Classifier: ['Typing :: Typed']"),
    ("Provides-Extra: vllm\n", "", "Provides-Extra: ['vllm']"),
    ("Requires-Dist: rich>=13.9\n", "", "Requires-Dist lacks rich>=13.9"),
    ("\nVersion: ", "\nVersion: 9", "Version is '9"),
])  # fmt: skip
def test_metadata_that_says_something_else_is_found(artifacts, tmp_path, old, new, message):
    def change(name, data):
        return name, data.replace(old.encode(), new.encode(), 1) if name.endswith("METADATA") else data

    with pytest.raises(CheckError, match=re.escape(message)):
        check_metadata(changed(artifacts["wheel"], tmp_path, change), "wheel")
