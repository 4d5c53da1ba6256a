"""The pages say what the code does."""

import ast
import importlib.util
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import safe_trainers


ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.M | re.S)


@pytest.mark.parametrize("name", ["architecture", "refusals", "metrics", "cli", "mismatch", "errors", "growth"])
def test_pages_that_are_made_are_up_to_date(name, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    spec = importlib.util.spec_from_file_location("build_docs", ROOT / "tools" / "build_docs.py")
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    made = getattr(build, f"{name}_page")()
    assert (ROOT / "docs" / f"{name}.md").read_text() == made, "run: make docs"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_python_in_the_pages_is_python_and_imports_what_exists(page):
    for block in blocks(page, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module == "safe_trainers":
                for alias in node.names:
                    assert alias.name in safe_trainers.__all__


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_between_the_pages_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_diagram_of_the_packages_is_that_of_their_imports(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    import architecture_page

    architecture_page.draw(tmp_path / "architecture.svg")
    made = (tmp_path / "architecture.svg").read_text()
    assert (ROOT / "docs" / "architecture.svg").read_text() == made, "run: make docs"
    assert all(f">{name}</text>" in made for group in architecture_page.layers() for name in group)


def test_the_page_and_the_pictures_of_what_was_measured_are_made_from_it(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    import evidence_page

    assert (ROOT / "docs" / "evidence.md").read_text() == evidence_page.page(), "run: make evidence"
    evidence_page.draw(tmp_path / "matrix.svg")
    evidence_page.cost_section.draw(tmp_path / "cost.svg")
    for name in ("matrix.svg", "cost.svg"):
        assert (ROOT / "docs" / name).read_text() == (tmp_path / name).read_text(), "run: make evidence"


def test_the_committed_matrix_has_no_safe_cell_that_is_not_right():
    """The rules of the benchmark, on what it measured: nothing crashed, nothing wrong, refusals that are bounded."""
    rows = [json.loads(line) for line in (ROOT / "benchmarks/results/matrix.jsonl").read_text().splitlines()[1:]]
    assert len(rows) > 200
    assert {row["safe"]["outcome"] for row in rows} <= {"trained", "refused"}
    for row in rows:
        if row["safe"]["outcome"] == "refused":
            assert set(row["safe"]["ids"]) <= {"mixed-weights-cannot-meet", "media-cast-to-packed-dtype"}
            assert row["followed"]["outcome"] == "trained"
            assert row["stock"]["outcome"] != "trained"
    assert Counter(row["stock"]["outcome"] for row in rows)["trained"] < len(rows) / 2


def test_the_page_of_versions_is_made_from_its_results(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    import versions_page

    assert (ROOT / "docs" / "versions.md").read_text() == versions_page.page(), "run: make docs"


def test_no_pair_of_versions_failed_and_no_safe_cell_is_wrong():
    measured = json.loads((ROOT / "benchmarks/results/compat.json").read_text())
    assert len(measured["pairs"]) == 4
    cores = [pair["core"] for pair in measured["pairs"].values() if "core" in pair]
    slices = [pair["slice"] for pair in measured["pairs"].values() if "slice" in pair]
    assert cores
    for core in cores:
        assert core["passed"] > 1000
        assert core["failures"] == []
        assert all(core["skips"])  # each says what upstream lacks
    assert slices
    assert not any({"wrong", "crashed"} & part["safe"].keys() or part["problems"] for part in slices)


def test_the_site_is_built_without_a_warning(tmp_path):
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", str(ROOT / "docs"), str(tmp_path)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (built.returncode, built.stderr) == (0, "")
    assert (tmp_path / "guide.html").is_file()


def test_the_first_screen_of_the_readme():
    lines = (ROOT / "README.md").read_text().splitlines()
    first_screen = "\n".join(lines[:32])
    (code,) = re.findall(r"^```python\n(.*?)^```", first_screen, re.M | re.S)
    assert 8 <= len(code.splitlines()) <= 11
    for part in ("SafeGRPOTrainer", "make demo", "make test", "| hardware | policy", "| why |"):
        assert part in first_screen


def test_the_policy_table_of_the_readme_is_what_the_policy_does():
    from devices import A100, CPU, MI300, MPS, T4, V100

    table = (ROOT / "README.md").read_text()
    expected = {"bfloat16": (A100, MI300), "float16": (T4, V100), "float32": (CPU, MPS)}
    for dtype, devices in expected.items():
        assert {device.preferred[0] for device in devices} == {dtype}
    assert re.search(r"Ampere.*AMD.*\| bf16 autocast", table)
    assert re.search(r"Turing, Volta \(T4, V100\) \| fp16 autocast, loss scaling", table)
    assert re.search(r"\| CPU \| fp32 \|", table)
    assert re.search(r"\| Apple MPS \| fp32 \|", table)
