"""Each script in `upstream/` shows one fault without this package, and its result is committed."""

import ast
import json
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest


ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tools"))
try:
    from upstream_page import RESULT, runner, upstream_page
finally:
    sys.path.remove(str(ROOT / "tools"))

RUN = runner()
SCRIPTS = [pytest.param(file, id=file.stem) for file in RUN.scripts()]
QUICK = (
    "accelerate_fsdp2_reduces_in_half",
    "accelerate_fused_optimizer_skips",
    "accelerate_keeps_the_first_autocast",
    "transformers_static_cache",
)


@pytest.mark.parametrize("file", SCRIPTS)
def test_a_script_stands_alone(file):
    source = file.read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 60
    imported = {
        name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module])
    }
    roots = {name.partition(".")[0] for name in imported}
    assert "safe_trainers" not in roots
    assert not roots & {other.stem for other in RUN.scripts()}


@pytest.mark.parametrize("file", SCRIPTS)
def test_a_script_names_its_thread_and_what_can_go(file):
    about = RUN.described(file)
    assert about["thread"].startswith("https://github.com/")
    assert about["question"]
    assert about["fault"].endswith(".")
    assert about["mechanisms"]
    assert [name for name in about["mechanisms"] if not (ROOT / name).is_file()] == []


def test_the_results_are_those_of_the_scripts():
    results = json.loads(RESULT.read_text(encoding="utf-8"))["scripts"]
    assert list(results) == [file.stem for file in RUN.scripts()]
    assert {result["verdict"] for result in results.values()} <= {"FAULT", "FIXED"}
    assert upstream_page() == (ROOT / "docs" / "upstream.md").read_text(encoding="utf-8")


def test_the_page_shows_the_verdicts_of_other_releases(tmp_path, monkeypatch):
    pairs = {"trl-1.4": {"upstream": {"transformers_static_cache": "FIXED"}}, "newest": {}}
    (tmp_path / "compat.json").write_text(json.dumps({"pairs": pairs}))
    monkeypatch.setattr("upstream_page.COMPAT", tmp_path / "compat.json")
    page = upstream_page()
    assert "| script | trl-1.4 |" in page
    assert "| transformers_static_cache | FIXED |" in page
    assert "| transformers_media_dtype | not run |" in page


def test_results_go_to_the_file_that_is_asked_for(tmp_path, monkeypatch, capsys):
    before = RESULT.read_bytes()
    monkeypatch.setattr(sys, "argv", ["run.py", QUICK[0], "--out", str(tmp_path / "here.json")])
    assert RUN.main() == 0
    assert list(json.loads((tmp_path / "here.json").read_text())["scripts"]) == [QUICK[0]]
    assert RESULT.read_bytes() == before
    monkeypatch.setattr(sys, "argv", ["run.py", "unknown"])
    with pytest.raises(SystemExit):
        RUN.main()
    assert "no script has the name unknown" in capsys.readouterr().err


@pytest.mark.parametrize("name", QUICK)
def test_a_quick_script_still_prints_its_fault(name):
    result = RUN.run(ROOT / "upstream" / f"{name}.py")
    assert result["verdict"] == "FAULT", result
    assert float(result["number"]) > 0


@pytest.mark.slow
@pytest.mark.parametrize("file", SCRIPTS)
def test_every_script_runs(file):
    needs = RUN.described(file).get("needs")
    if needs is not None and find_spec(needs) is None:
        pytest.skip(f"{needs} is not installed")
    result = RUN.run(file)
    if result["verdict"] == "NOT RUN":
        pytest.skip(result["remark"])
    assert result["verdict"] in {"FAULT", "FIXED"}


def test_a_script_that_fails_is_an_error_and_not_a_verdict(tmp_path):
    (tmp_path / "broken.py").write_text(
        '"""A fault."""\nprint("FAULT is not printed like this")\nraise SystemExit(3)\n'
    )
    assert RUN.run(tmp_path / "broken.py") == {"verdict": "ERROR", "remark": "exit status 3"}
    (tmp_path / "silent.py").write_text('"""A fault."""\nprint("hello")\n')
    assert RUN.run(tmp_path / "silent.py")["verdict"] == "ERROR"
    (tmp_path / "fixed.py").write_text('"""A fault."""\nprint("noise")\nprint("FIXED 0 (no more)")\n')
    assert RUN.run(tmp_path / "fixed.py") == {"verdict": "FIXED", "number": "0", "remark": "no more"}
    (tmp_path / "needy.py").write_text('"""A fault."""\nNEEDS = "not_a_package"\n')
    assert RUN.run(tmp_path / "needy.py")["verdict"] == "NOT RUN"


def test_a_script_says_that_this_machine_cannot_show_its_fault(tmp_path):
    (tmp_path / "elsewhere.py").write_text('"""A fault."""\nprint("NOT RUN (this CPU has no units)")\n')
    assert RUN.run(tmp_path / "elsewhere.py") == {"verdict": "NOT RUN", "remark": "this CPU has no units"}
