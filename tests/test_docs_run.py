"""Every block of Python in the pages runs, top to bottom, as a reader would type it.

Only names of the hub are replaced, by small local models and data of the same columns.
"""

import json
import re
from pathlib import Path

import datasets
import pytest
from peft import LoraConfig

from safe_trainers import SafeGRPOConfig, SafeGRPOTrainer, tiny


ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [page for page in PAGES if re.search(r"^```python\n", page.read_text(), re.M)]


def answerable(family, folder):
    """A saved tiny model that samples no image markers, which a model that knows nothing would."""
    tiny.save(family, folder)
    settings = folder / "generation_config.json"
    banned = tiny.generation_kwargs(tiny.build_processor(family))
    settings.write_text(json.dumps({**json.loads(settings.read_text()), **banned, "max_length": None}))
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
def given(tmp_path):
    """What the pages use without making it: a model, a dataset, a reward and arguments of the reader's own."""
    model = answerable("text", tmp_path / "text")
    dataset = datasets.Dataset.from_dict({"prompt": ["what is it?"] * 16})
    args = SafeGRPOConfig("runs/own", max_steps=1, max_completion_length=4, report_to=[])
    trainer = SafeGRPOTrainer(model, reward_funcs=length, args=args, train_dataset=dataset, peft_config=LoraConfig())
    return {"model": model, "dataset": dataset, "reward": length, "args": args, "trainer": trainer}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_python_of_a_page_runs(page, hub, given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = dict(given)
    for block in re.finditer(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S):
        code = block[1]
        for name, local in hub.items():
            code = code.replace(name, local)
        line = page.read_text()[: block.start(1)].count("\n")
        exec(compile("\n" * line + code, str(page), "exec"), names)
