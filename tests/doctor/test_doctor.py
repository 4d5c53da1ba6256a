"""`safe-trainers doctor`: what keeps a run from working is found, named, and has a line to write."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest

from safe_trainers.cli.main import main
from safe_trainers.doctor.diagnose import Machine, diagnose
from safe_trainers.doctor.launch import Launch, default_config, read_launch
from safe_trainers.doctor.probes import NEEDED, OPTIONAL, _devices, _quantise
from safe_trainers.doctor.run_probes import Outcome, probe
from safe_trainers.report.document import verdict_fix
from safe_trainers.report.render import to_json


CPU = {
    "device": "cpu",
    "name": "CPU",
    "free": None,
    "total": None,
    "bfloat16": "emulated",
    "float16": "neither autocast nor a loss scaler",
    "preferred": "float32",
    "why": "a CPU",
    "float32_error": 6e-7,
}
T4 = CPU | {"device": "cuda:0", "name": "Tesla T4 (compute capability 7.5)", "preferred": "float16"}
A100 = T4 | {"name": "A100 (compute capability 8.0)", "bfloat16": "native", "preferred": "bfloat16"}
VERSIONS = {name: version(name) for name in NEEDED} | dict.fromkeys(OPTIONAL)
WELL = Machine(
    VERSIONS,
    {
        name: Outcome(True, 1.0, {"devices": [A100, CPU], "threads": 1, "cuda": "13.0"} if name == "torch" else {})
        for name in NEEDED
    },
    {},
)


def with_devices(*devices, **changes):
    facts = {"devices": list(devices), "threads": 1, "cuda": None}
    return replace(WELL, outcomes=WELL.outcomes | {"torch": Outcome(True, 1.0, facts)}, **changes)


def judged(machine):
    return {(verdict.level, verdict.text): verdict_fix(verdict) for verdict in diagnose(machine).verdicts}


def only(machine, level):
    (found,) = [(text, fix) for (given, text), fix in judged(machine).items() if given == level]
    return found


# --- verdicts, on plain values ---------------------------------------------------------------------------------------


def test_a_machine_that_is_well():
    report = diagnose(WELL)
    assert report.exit_status == 0
    assert [verdict.level for verdict in report.verdicts] == ["ok"]
    assert json.loads(to_json(report))["tables"]["packages"][0]["package"] == "torch"


@pytest.mark.parametrize(
    ("package", "installed", "status", "fix"),
    [
        ("trl", "0.28.0", 2, 'pip install "trl>=0.29,<2"'),
        ("trl", "2.0.0.dev0", 2, 'pip install "trl>=0.29,<2"'),
        ("transformers", "4.56.1", 2, 'pip install "transformers>=4.57,<6"'),
        ("peft", None, 2, 'pip install "peft>=0.17"'),
        ("bitsandbytes", "0.45.0", 1, 'pip install "bitsandbytes>=0.46.1"'),
    ],
)
def test_versions_against_the_supported_range(package, installed, status, fix):
    machine = replace(WELL, versions=VERSIONS | {package: installed})
    assert diagnose(machine).exit_status == status
    text, said = only(machine, {1: "warning", 2: "error"}[status])
    assert package in text
    assert said == fix


def test_what_is_optional_may_be_missing():
    assert diagnose(replace(WELL, versions=VERSIONS | dict.fromkeys(OPTIONAL))).exit_status == 0


def test_emulated_bfloat16_does_not_count():
    text, fix = only(with_devices(T4, CPU), "note")
    assert "Tesla T4 (compute capability 7.5) has no bfloat16 arithmetic" in text
    assert "fp16: true" in fix
    report = diagnose(with_devices(T4, CPU))
    assert report.table("devices").rows[0][4] == "emulated"
    assert report.exit_status == 0


def test_a_machine_without_a_gpu():
    assert only(with_devices(CPU), "note") == ("torch finds no GPU", "write `use_cpu: true` in the recipe")
    text, fix = only(with_devices(CPU, nvidia=True), "warning")
    assert "torch is a CPU build" in text
    assert "pip install" in fix


def test_float32_that_is_none():
    text, _ = only(with_devices(A100 | {"float32_error": 8e-4}, CPU), "warning")
    assert "rounds float32 products: the relative error is 8e-04" in text


def test_the_devices_of_this_machine():
    found = _devices()
    assert found["devices"][-1]["device"] == "cpu"
    assert found["devices"][-1]["preferred"] == "float32"
    assert 1e-8 < found["devices"][-1]["float32_error"] < 1e-5
    assert diagnose(with_devices(*found["devices"])).exit_status == 0


def test_more_threads_than_processors():
    facts = {"devices": [A100, CPU], "threads": 8, "cuda": "13.0"}
    machine = replace(WELL, outcomes=WELL.outcomes | {"torch": Outcome(True, 1.0, facts)}, processors=2)
    assert only(machine, "warning") == ("torch uses 8 threads on 2 CPUs", "export OMP_NUM_THREADS=2")


@pytest.mark.parametrize(
    ("name", "value"),
    [("NVIDIA_TF32_OVERRIDE", "1"), ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "1"), ("ACCELERATE_MIXED_PRECISION", "bf16")],
)
def test_variables_that_change_numbers(name, value):
    text, fix = only(replace(WELL, environ={name: value}), "warning")
    assert text.startswith(f"{name}={value}: ")
    assert fix == f"unset {name}"
    assert diagnose(replace(WELL, environ={name: "0" if value == "1" else "no"})).exit_status == 0


def test_variables_that_change_none():
    assert diagnose(replace(WELL, environ={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})).exit_status == 0


# --- processes -------------------------------------------------------------------------------------------------------


def config(folder, text):
    file = Path(folder, "accelerate", "default_config.yaml")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return {"HF_HOME": str(folder)}


def test_accelerate_agrees_where_its_config_is(tmp_path):
    from accelerate.commands.config.config_args import default_yaml_config_file

    if "HF_HOME" not in os.environ:
        assert str(default_config(os.environ)) == default_yaml_config_file
    assert default_config({"HF_HOME": str(tmp_path)}) == tmp_path / "accelerate" / "default_config.yaml"


@pytest.mark.parametrize(
    "line",
    [
        ["python", "/bin/accelerate", "launch", "--cpu", "--num_processes", "2", "train.py", "--num_processes", "9"],
        ["/bin/accelerate-launch", "--num-processes=2", "--cpu", "train.py"],
        ["python", "-m", "accelerate.commands.launch", "--cpu", "--num_processes=2", "train.py"],
    ],
)
def test_processes_that_accelerate_does_not_start(line, tmp_path):
    launch = read_launch({"HF_HOME": str(tmp_path)}, [["bash"], line])
    assert (launch.asked, launch.by, launch.live, launch.cpu) == (2, "accelerate launch", True, True)
    text, fix = only(replace(WELL, launch=launch, processes=1), "error")
    assert text == "accelerate launch was started with 2 processes, but 1 is running"
    assert "torchrun --nproc_per_node 2" in fix
    assert diagnose(replace(WELL, launch=launch, processes=2)).exit_status == 0


def test_torchrun():
    environ = {"WORLD_SIZE": "4", "RANK": "0", "HF_HOME": "/nowhere"}
    launch = read_launch(environ, [["python", "/bin/torchrun", "--nproc_per_node=2", "--nnodes", "2", "train.py"]])
    assert (launch.asked, launch.world_size) == (4, 4)
    assert diagnose(replace(WELL, launch=replace(launch, cpu=True), processes=4)).exit_status == 0


def test_a_default_config_that_starts_one_of_two(tmp_path):
    environ = config(tmp_path, "use_cpu: true\nnum_processes: 2\ndistributed_type: MULTI_CPU\nmixed_precision: 'no'\n")
    text, fix = only(replace(WELL, launch=read_launch(environ, [])), "warning")
    assert "requests 2 processes on the CPU, but `accelerate launch` silently starts 1" in text
    assert "torchrun --nproc_per_node 2" in fix


def test_a_default_config_of_another_precision(tmp_path):
    launch = read_launch(config(tmp_path, "num_processes: 1\nmixed_precision: fp16\n"), [])
    text, fix = only(replace(WELL, launch=launch), "warning")
    assert "has mixed_precision: fp16" in text
    assert "mixed_precision: 'no'" in fix
    launch = read_launch(config(tmp_path, "num_processes: 1\nmixed_precision: 'no'\n"), [])
    assert diagnose(replace(WELL, launch=launch)).exit_status == 0


def test_more_processes_than_gpus(tmp_path):
    launch = read_launch(config(tmp_path, "num_processes: 8\ndistributed_type: MULTI_GPU\n"), [])
    text, fix = only(replace(WELL, launch=launch), "error")
    assert "requests 8 processes, but there are 1 GPUs" in text
    assert fix == "write `num_processes: 1` in the launch config"


@pytest.mark.parametrize("text", ["{", "- a\n- b\n", "\x00"])
def test_a_config_that_is_none(text, tmp_path):
    launch = read_launch(config(tmp_path, text), [])
    assert "default_config.yaml" in only(replace(WELL, launch=launch), "warning")[0]


def test_what_is_left_of_another_launch(tmp_path):
    launch = read_launch({"LOCAL_RANK": "1", "HF_HOME": str(tmp_path)}, [])
    text, fix = only(replace(WELL, launch=launch), "warning")
    assert "WORLD_SIZE is not" in text
    assert fix == str(Launch.LEFT_OVER)


def test_the_launcher_above_this_process_is_seen(tmp_path):
    script = tmp_path / "asks.py"
    script.write_text(
        "import os\nfrom safe_trainers.doctor.launch import read_launch\nl = read_launch(os.environ)\n"
        "print('asked', l.asked, l.live, l.world_size)\n"
    )
    launcher = Path(sys.executable).with_name("accelerate")
    command = [str(launcher), "launch", "--cpu", "--num_processes", "2", str(script)]
    environ = {name: value for name, value in os.environ.items() if name != "WORLD_SIZE"} | {"HF_HOME": str(tmp_path)}
    said = subprocess.run(command, capture_output=True, text=True, check=True, env=environ).stdout
    assert said.count("asked") == 1, "accelerate has learned to start two: the verdict can go"
    assert "asked 2 True 1" in said


# --- packages, as they really load -----------------------------------------------------------------------------------


def stand_in(folder, module, code, name=None):
    """A package of that name on a path of its own, which fails as a real one does that cannot be installed here."""
    (folder / module).mkdir(parents=True)
    (folder / module / "__init__.py").write_text(code)
    return str(folder)


@pytest.mark.parametrize(
    ("code", "said", "fix"),
    [
        ("import os\nos.abort()", "its process was ended by SIGABRT", "pip install --force-reinstall"),
        ("import ctypes\nctypes.string_at(0)", "its process was ended by SIGSEGV", "pip install --force-reinstall"),
        ("import os\nos._exit(3)", "its process ended with exit status 3", "pip install --force-reinstall"),
        ("import time\ntime.sleep(600)", "loading did not finish within 2 s", "safe-trainers doctor --timeout 180"),
        ("raise ImportError('libsomething.so.1: no such library')", "libsomething.so.1", "python -c"),
        (
            "raise ImportError('libcudart.so.13: cannot open shared object file: No such file or directory')",
            "built for another version of CUDA",
            "with a build for the CUDA version of torch",
        ),
        (
            "raise ImportError('/x/flash_attn_2_cuda.cpython-311.so: undefined symbol: _ZN3c104cuda9SetDeviceEa')",
            "flash-attn was compiled for another version of torch",
            "pip install flash-attn --no-build-isolation",
        ),
        ("", "has no attribute 'flash_attn_func'", "python -c"),
    ],
)
def test_a_package_that_does_not_load_is_found_and_named(code, said, fix, tmp_path, monkeypatch):
    # Stand-ins: flash-attn needs CUDA. Each fails as its builds are known to.
    monkeypatch.setenv("PYTHONPATH", stand_in(tmp_path, "flash_attn", code))
    outcomes = probe([["flash-attn"]], timeout=2 if "sleep" in code else 60)
    machine = replace(WELL, outcomes=WELL.outcomes | outcomes)
    text, written = only(machine, "warning")
    assert text.startswith("flash-attn does not load: ")
    assert said in text
    assert fix in written


def test_what_comes_after_one_that_fails_is_still_tried(tmp_path, monkeypatch):
    stand_in(tmp_path, "flash_attn", "import os\nos.abort()")
    monkeypatch.setenv("PYTHONPATH", stand_in(tmp_path, "deepspeed", "print('noise')"))
    outcomes = probe([["flash-attn", "deepspeed"]], timeout=60)
    assert [outcomes[name].loaded for name in ("flash-attn", "deepspeed")] == [False, True]


def test_a_torchvision_that_breaks_trl_is_named(tmp_path, monkeypatch):
    # A stand-in: the real one is several GB of CUDA packages. It fails as the real one does beside another torch.
    path = stand_in(tmp_path, "torchvision", 'raise RuntimeError("operator torchvision::nms does not exist")')
    metadata = tmp_path / "torchvision-0.28.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: torchvision\nVersion: 0.28.0\n")
    monkeypatch.setenv("PYTHONPATH", path)
    outcomes = probe([["trl"], ["torchvision"]], timeout=240)
    machine = replace(WELL, outcomes=WELL.outcomes | outcomes)
    assert diagnose(machine).exit_status == 2
    text, fix = only(machine, "error")
    assert text.startswith("trl, torchvision do not load: ")
    assert "torch was updated or replaced alone" in text
    assert fix.startswith("`pip install -U torch torchvision")


def test_a_trl_that_needs_requests(tmp_path, monkeypatch):
    # A stand-in for TRL up to 1.12 on a plain install: its import of `requests`, which is hidden from it.
    stand_in(tmp_path, "trl", "import requests\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "requests.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'requests'\", name='requests')\n"
    )
    machine = replace(WELL, outcomes=WELL.outcomes | probe([["trl"]], timeout=60))
    text, fix = only(machine, "error")
    assert text.startswith("trl does not load: ")
    assert "is not installed" in text
    assert fix == "pip install requests"


def test_bitsandbytes_really_packs_a_layer():
    errors = _quantise()
    assert 0.01 < errors["error of 4 bit"] < 0.2
    assert 0.0005 < errors["error of 8 bit"] < 0.05
    loaded = WELL.outcomes | {"bitsandbytes": Outcome(True, 1.0, errors)}
    assert diagnose(replace(WELL, outcomes=loaded)).exit_status == 0
    broken = WELL.outcomes | {"bitsandbytes": Outcome(True, 1.0, {"error of 4 bit": 0.7, "error of 8 bit": 0.003})}
    assert "wrong results" in only(replace(WELL, outcomes=broken), "error")[0]


@pytest.mark.slow
def test_the_command_here(capsys):
    assert main(["doctor", "--json"]) in (0, 1)
    made = json.loads(capsys.readouterr().out)
    loads = {row["package"]: row["loads"] for row in made["tables"]["packages"]}
    assert all(loads[name] for name in NEEDED)
    assert loads["bitsandbytes"]
    assert loads["vllm"] is None
    assert made["tables"]["devices"][-1]["device"] == "cpu"


@pytest.mark.slow
def test_processes_that_meet_are_counted(tmp_path):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node=2",
        "-m",
        "safe_trainers.cli",
        "doctor",
    ]
    environ = os.environ | {"HF_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    said = subprocess.run([*command, "--json"], capture_output=True, text=True, check=False, env=environ).stdout
    made = json.loads(said)
    assert made["facts"]["processes running"] == 2
    assert made["facts"]["processes asked for"] == 2


@pytest.mark.slow
def test_processes_that_do_not_meet(monkeypatch):
    environ = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29611"}
    for name, value in (environ | {"SAFE_TRAINERS_DOCTOR_WAIT": "3"}).items():
        monkeypatch.setenv(name, value)
    met = probe([["processes"]], 120, distributed=True)["processes"]
    assert not met.loaded
    machine = replace(WELL, launch=read_launch(environ, []), processes=None, meeting=met.said)
    text, fix = only(machine, "error")
    assert text.startswith("WORLD_SIZE is 2, but the processes did not connect to each other: ")
    assert fix == str(Launch.LEFT_OVER)


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "soon"])
def test_a_time_limit_is_a_number_above_0(seconds, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--timeout", seconds])
    assert ended.value.code == 2
    assert "--timeout must be a number above 0" in capsys.readouterr().err
