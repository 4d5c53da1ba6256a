"""The public surface, what importing it costs, and the versions it is for."""

import os
import subprocess
import sys

import pytest

import safe_trainers
from safe_trainers.core.errors import UnsupportedVersionError
from safe_trainers.core.versions import check_versions


def test_the_public_names():
    assert sorted(safe_trainers.__all__) == dir(safe_trainers)
    for name in safe_trainers.__all__:
        assert getattr(safe_trainers, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'SafeGRPOTrianer'"):
        safe_trainers.SafeGRPOTrianer  # noqa: B018


def _modules_after(code: str) -> set[str]:
    script = f"{code}\nimport sys\nprint(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(out.stdout.split())


def test_importing_the_package_imports_neither_torch_nor_trl():
    loaded = _modules_after("import safe_trainers; safe_trainers.parse_dtype('bf16'); safe_trainers.PrecisionError")
    assert not {"torch", "trl", "transformers", "peft"} & loaded
    # The same check sees torch where it is imported.
    assert "torch" in _modules_after("import safe_trainers; safe_trainers.take_inventory")


@pytest.mark.parametrize(
    ("trl", "transformers"), [("0.29.0", "4.57.0"), ("0.29.1", "4.57.6"), ("1.16.0", "5.23.0"), ("1.99", "5.99.9")]
)
def test_supported_versions(trl, transformers):
    assert check_versions({"trl": trl, "transformers": transformers}) is None


@pytest.mark.parametrize(
    ("trl", "transformers", "message"),
    [
        (
            "0.28.0",
            "4.57.0",
            'trl 0.28.0 is installed; safe-trainers supports 0.29 <= trl < 2. Run: pip install "trl>=0.29,<2"',
        ),
        ("2.0.0.dev0", "5.0.0", "trl 2.0.0.dev0 is installed"),
        ("1.0", "4.56.2", 'pip install "transformers>=4.57,<6"'),
        ("1.0", "6.0", "transformers 6.0 is installed"),
    ],
)
def test_unsupported_versions_are_refused_with_the_range(trl, transformers, message):
    with pytest.raises(UnsupportedVersionError) as caught:
        check_versions({"trl": trl, "transformers": transformers})
    assert message in str(caught.value)


def test_an_unsupported_version_is_refused_when_the_trainers_are_imported():
    code = (
        "import importlib.metadata as m; real = m.version\n"
        "m.version = lambda name: '0.12.0' if name == 'trl' else real(name)\n"
        "import safe_trainers\n"
        "try: safe_trainers.SafeGRPOTrainer\n"
        "except safe_trainers.UnsupportedVersionError as error: print('refused:', error)\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.startswith("refused: trl 0.12.0 is installed; safe-trainers supports 0.29 <= trl < 2.")


@pytest.mark.parametrize(
    ("name", "trl", "first"),
    [
        ("SafeKTOTrainer", "1.7.0", "1.8"),
        ("SafeKTOConfig", "0.29.1", "1.8"),
        ("SafeDistillationTrainer", "1.9.2", "1.10"),
    ],
)
def test_a_trainer_that_is_not_stable_yet_is_one_clear_error(name, trl, first):
    code = (
        f"import importlib.metadata as m; real = m.version; m.version = lambda n: {trl!r} if n == 'trl' else real(n)\n"
        "import safe_trainers\n"
        f"assert {name!r} not in safe_trainers.__all__ and 'SafeDPOTrainer' in safe_trainers.__all__\n"
        f"try: safe_trainers.{name}\n"
        "except safe_trainers.UnsupportedVersionError as error: print('refused:', error)\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.startswith(f"refused: {name} needs trl>={first}, in which ")
    assert f'trl {trl} is installed. Run: pip install "trl>={first},<2"' in out.stdout


def broken_vllm(folder):
    """A folder for PYTHONPATH with a vLLM whose import fails, as beside another build of torch. vLLM is a stand-in."""
    package, metadata = folder / "vllm", folder / "vllm-0.31.0.dist-info"
    package.mkdir()
    metadata.mkdir()
    (package / "__init__.py").write_text("raise ImportError('libcudart.so.12: cannot open shared object file')\n")
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.31.0\n")
    return folder


@pytest.mark.parametrize("line", ["from safe_trainers import SafeGRPOTrainer", "from trl import GRPOTrainer"])
def test_a_vllm_that_cannot_be_imported_is_one_clear_error(line, tmp_path):
    paths = os.pathsep.join([str(broken_vllm(tmp_path)), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "-c", line], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    if "trl import" in line:
        assert last == "libcudart.so.12: cannot open shared object file"  # stock does not say what to do
        return
    assert last.startswith("safe_trainers.core.errors.UnsupportedVersionError: vllm 0.31.0 is installed but cannot be")
    assert "ImportError: libcudart.so.12" in last
    assert "Run: pip uninstall vllm, or install the vLLM release that was built for torch 2." in last
