"""Every block of code in the pages runs, top to bottom, as a reader would type it.

Only names of the hub are replaced, by small local models and data of the same columns; training commands are
cut short.
"""

import json
import re
import shlex
import tomllib
from pathlib import Path

import datasets
import pytest
from peft import LoraConfig

from safe_trainers import SafeGRPOConfig, SafeGRPOTrainer, tiny
from safe_trainers.cli.main import COMMANDS, main


ROOT = Path(__file__).parent.parent
ALL = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "recipes/README.md",
    ROOT / "configs/README.md",
]
PAGES = [page for page in ALL if re.search(r"^```python\n", page.read_text(), re.M)]
SHELL = {
    page: [
        line.partition("  #")[0].strip()
        for language, block in re.findall(r"^```(\S*)\n(.*?)^```$", page.read_text(), re.M | re.S)
        for line in block.splitlines()
        if language in ("", "bash", "console") and re.match(r"(safe-trainers|make|git|pip) ", line)
    ]
    for page in ALL
}
SHORT = [
    *("--max_steps", "1", "--warm_up_steps", "1", "--dataset_size", "64", "--evaluation_size", "8"),
    *("--per_device_train_batch_size", "8", "--logging_steps", "1", "--progress", "false", "--output_dir", "short"),
]


def answerable(family, folder):
    """A saved tiny model that samples no image markers and comes to an end, which one that knows nothing would not."""
    tiny.save(family, folder)
    settings = folder / "generation_config.json"
    banned = tiny.generation_kwargs(tiny.build_processor(family))
    ends = {"exponential_decay_length_penalty": [4, 3.0], "max_length": None}
    settings.write_text(json.dumps({**json.loads(settings.read_text()), **banned, **ends}))
    return str(folder)


@pytest.fixture
def hub(tmp_path):
    """Names of the hub, and what is there instead."""
    data = tmp_path / "data"
    data.mkdir()
    tiny.prompt_dataset(2, seed=0).to_parquet(data / "train.parquet")
    return {
        "Qwen/Qwen2.5-VL-3B-Instruct": answerable("qwen2_5_vl", tmp_path / "model"),
        "lmms-lab/multimodal-open-r1-8k-verified": str(data),
    }


def length(completions, **_):
    return [float(len(completion)) for completion in completions]


@pytest.fixture
def given(tmp_path, monkeypatch):
    """What the pages use without making it: a model, a dataset, a reward and arguments of the reader's own."""
    monkeypatch.chdir(tmp_path)
    model = answerable("text", tmp_path / "text")
    dataset = datasets.Dataset.from_dict({"prompt": ["what is it?"] * 16})
    args = SafeGRPOConfig("runs/own", max_steps=1, max_completion_length=4, report_to=[])
    trainer = SafeGRPOTrainer(model, reward_funcs=length, args=args, train_dataset=dataset, peft_config=LoraConfig())
    return {"model": model, "dataset": dataset, "reward": length, "args": args, "trainer": trainer}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_python_of_a_page_runs(page, hub, given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names, before, ran = dict(given), set(given), 0
    for block in re.finditer(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S):
        code = block[1]
        for name, local in hub.items():
            code = code.replace(name, local)
        line = page.read_text()[: block.start(1)].count("\n")
        exec(compile("\n" * line + code, str(page), "exec"), names)
        ran += 1
    assert ran == sum(line.strip() == "```python" for line in page.read_text().splitlines())
    assert set(names) - before - {"__builtins__"}, "no block has made anything"


def test_there_are_commands_in_the_pages():
    assert sum(map(len, SHELL.values())) >= 10


@pytest.mark.parametrize("page", [page for page, lines in SHELL.items() if lines],
                         ids=lambda page: page.relative_to(ROOT).as_posix())  # fmt: skip
def test_the_commands_of_a_page_work_one_after_the_other(page, tmp_path, monkeypatch):
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    monkeypatch.chdir(tmp_path)
    targets = re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.M)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for line in SHELL[page]:
        program, *arguments = shlex.split(line)
        if program == "make":
            assert arguments[0] in targets
        elif program in ("git", "pip"):  # they reach for a network: what they install has to exist
            assert {name for group in re.findall(r"\[(.+?)\]", line) for name in group.split(",")} <= set(extras)
        else:
            short = SHORT if COMMANDS[arguments[0]].takes_recipe_keys else []
            assert main([*arguments, *short]) == 0, line
