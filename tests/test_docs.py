"""The pages agree with the code and the results, and are written for readers."""

import ast
import json
import re
import subprocess
import sys
from collections import Counter
from dataclasses import fields
from pathlib import Path

import build_docs
import config_page
import fragments
import pytest
import record_messages
import refusals_page

import safe_trainers
from safe_trainers import REFUSALS, WARNINGS
from safe_trainers.explain.known_errors import upstream_entries
from safe_trainers.explain.log_reader import explain
from safe_trainers.explain.metrics import metrics
from safe_trainers.policy.settings import PrecisionSettings


ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "recipes/README.md",
    ROOT / "configs/README.md",
    *sorted(DOCS.glob("*.md")),
]
REFERENCE = {
    "api", "architecture", "bench_results", "bench_rules", "changelog", "cli", "config", "contributing",
    "cost_tables", "curves", "engines", "errors", "experts", "families", "fp16_rl", "growth", "matrix",
    "metric_runs", "metrics", "mismatch", "recipes", "refusals", "sampler", "tiny_task", "tune_results", "trainers",
    "upstream", "versions", *refusals_page.ERRORS,
}  # fmt: skip
"""Pages that are looked things up in; all others are read."""
READ = [page for page in DOCS.glob("*.md") if page.stem not in REFERENCE]


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.M | re.S)


def prose(page):
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)


def name_of(page):
    return page.relative_to(ROOT).as_posix()


# ---- generated pages ----


@pytest.mark.parametrize("name", build_docs.PAGES)
def test_a_page_that_is_made_is_up_to_date(name):
    assert (DOCS / f"{name}.md").read_text() == build_docs.PAGES[name](), "run: make docs"


@pytest.mark.parametrize("name", build_docs.FIGURES)
def test_a_figure_is_up_to_date(name, tmp_path):
    build_docs.FIGURES[name](tmp_path / name)
    assert (DOCS / name).read_text() == (tmp_path / name).read_text(), "run: make docs"


@pytest.mark.parametrize("page", fragments.PARTS)
def test_the_tables_in_a_page_are_up_to_date(page):
    """Among them: what was measured, in README and index, and the precision of each device."""
    assert (ROOT / page).read_text() == fragments.filled(page), "run: make docs"


def test_the_page_of_the_embedded_task_is_made_from_its_results(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import tiny_task

    assert (DOCS / "tiny_task.md").read_text() == tiny_task.page(json.loads(tiny_task.RESULT.read_text()))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_provenance_is_at_the_foot(page):
    lines = page.read_text().rstrip().splitlines()
    made = [number for number, line in enumerate(lines) if re.search(r"\b(Made|Generated) (from|by)\b", line)]
    assert all(number >= len(lines) - 8 for number in made), f"{page.name}:{made[0] + 1}" if made else ""


def test_every_page_is_in_the_sidebar():
    index = (DOCS / "index.md").read_text()
    listed = [name for block in re.findall(r"```\{toctree\}\n(.*?)```", index, re.S) for name in block.split()]
    assert sorted(name for name in listed if (DOCS / f"{name}.md").exists()) == sorted(
        page.stem for page in DOCS.glob("*.md") if page.stem != "index"
    )
    assert re.findall(r":caption: (.+)", index)[:5] == [
        "Start", "Do", "When something is wrong", "Understand", "Reference"
    ]  # fmt: skip


# ---- blocks and links ----


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_python_in_the_pages_is_python_and_imports_what_exists(page):
    for block in blocks(page, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module == "safe_trainers":
                for alias in node.names:
                    assert alias.name in [*safe_trainers.__all__, "tiny"]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_between_the_pages_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_link_is_a_link_and_has_a_title(page):
    text = re.sub(r"`[^`]*`", "", prose(page))
    assert re.findall(r"(?<!\]\()(?<!<)https?://\S+\.\S+", text) == []
    assert re.findall(r"\[[^\]]*\.md\]\((?!CONTRIBUTING|CHANGELOG)[^)]*\)", text) == []


def test_the_changelog_is_a_page_of_the_site():
    assert "../CHANGELOG.md" in (DOCS / "changelog.md").read_text()
    assert "[changelog](changelog.md)" in (DOCS / "migration.md").read_text()
    assert all("keepachangelog" not in page.read_text() for page in PAGES)


def test_code_that_names_a_page_names_one_that_exists():
    """In the package, the tests, the tools, the benchmarks and the recipes."""
    files = [path for folder in ("safe_trainers", "tests", "tools", "benchmarks", "recipes", "configs")
             for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".yaml", ".toml", ".md")]  # fmt: skip
    for path in [*files, ROOT / "Makefile", ROOT / "CONTRIBUTING.md"]:
        for name in re.findall(r"\bdocs/([a-z_-]+\.(?:md|svg|png))", path.read_text(encoding="utf-8")):
            assert (DOCS / name).exists() or name == "planted.md", f"{path} names docs/{name}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_code_fits_the_page(page):
    """Lines that people copy have at most 96 columns, which fit a screen of 1280 pixels."""
    lines = [line for language in ("python", "console", "bash", "diff", "yaml") for block in blocks(page, language)
             for line in block.splitlines()]  # fmt: skip
    assert [line for line in lines if len(line) > 96] == []


# ---- words ----


@pytest.mark.parametrize("page", READ, ids=lambda page: page.name)
def test_a_page_that_is_read_is_short(page):
    assert len(prose(page).split()) <= 1000


def test_the_readme_is_short_and_shows_commands_that_work():
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) <= 500
    screen = "\n".join(text.splitlines()[:40])
    for part in (
        "Input type (float) and bias type",
        "unscale FP16 gradients",
        "+from safe_trainers",
        "make demo",
        "make test",
    ):
        assert part in screen
    assert "**Status, November 2026:** CPUs, and a part [on GPUs]" in " ".join(text.split())
    assert "\n...\n" not in text  # an output is shown whole, or not at all


def test_index_and_readme_say_the_same_to_begin_with():
    index, readme = ((ROOT / name).read_text() for name in ("docs/index.md", "README.md"))
    for symptom in re.findall(r"^- `(.+?)`", readme, re.M)[:2]:
        assert symptom in index
    assert re.search(r"```diff\n.*?```", readme, re.S)[0] in index


# ---- reference ----


def test_every_public_name_is_in_the_reference():
    text = (DOCS / "api.md").read_text()
    assert [name for name in safe_trainers.__all__ if not re.search(rf"safe_trainers\.{name}\b", text)] == []


def test_every_setting_says_whether_it_changes_numbers():
    assert set(config_page.CHANGES) == set(config_page.PAGES) == {field.name for field in fields(PrecisionSettings)}
    assert set(config_page.described()) == set(config_page.CHANGES)


def test_every_metric_is_a_heading():
    text = (DOCS / "metrics.md").read_text()
    for metric in metrics().values():
        assert f"\n### precision/{metric.name}\n" in text


def test_the_page_of_commands_has_no_unfilled_text():
    text = (DOCS / "cli.md").read_text()
    assert "%(" not in text
    assert "overrides the file" not in text.partition("## demo")[2].partition("\n## ")[0]
    assert text.count("| `--config FILE` |") == 1


@pytest.mark.parametrize("finding", sorted({*REFUSALS, *WARNINGS}))
def test_a_refusal_has_a_recorded_message_that_its_template_makes(finding):
    recorded = record_messages.read()
    assert finding in recorded, "run: python tools/record_messages.py"
    message = recorded[finding]
    assert message["moment"] in refusals_page.MOMENTS
    made_by = [own[finding] for own in (REFUSALS, WARNINGS) if finding in own]
    for part in ("why", "fix"):
        patterns = [refusals_page.fixed_parts(getattr(one, part)) for one in made_by]
        # A fix that is only code is printed without its backticks.
        texts = (message[part], f"`{message[part]}`")
        assert any(re.fullmatch(pattern, text, re.S) for pattern in patterns for text in texts), part
    path, _, name = message["test"].partition("[")[0].partition("::")
    assert f"def {name.split('::')[-1]}(" in (ROOT / path).read_text()


def test_the_page_of_refusals_has_no_placeholders():
    text = (DOCS / "refusals.md").read_text()
    assert re.findall(r"`[^`\n]*\*\w+\*[^`\n]*`", text) == []
    assert re.findall(r"fix: \*?\w+\*?$", text, re.M) == []
    for finding in (*REFUSALS, *WARNINGS):
        assert f"[{finding}]\n" in text


@pytest.mark.slow
def test_the_recorded_messages_are_those_of_the_tests():
    done = subprocess.run([sys.executable, str(ROOT / "tools/record_messages.py"), "--check"], cwd=ROOT,
                          capture_output=True, text=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:]


CRASHES = [
    *sorted({row["stock"]["message"] for row in map(json.loads, (ROOT / "benchmarks/results/matrix.jsonl").read_text()
                                                    .splitlines()[1:]) if "message" in row["stock"]}),
    "RuntimeError: attempting to assign a gradient with dtype 'c10::BFloat16' to a tensor with dtype 'float'",
    "ValueError: Could not find the transformer layer class LlamaDecoderLayer in the model.",
]  # fmt: skip


@pytest.mark.parametrize("message", CRASHES, ids=lambda message: message[:50])
def test_every_crash_that_the_pages_show_is_explained(message):
    assert explain(message).found


def test_errors_are_headed_by_their_messages():
    text = "".join((DOCS / f"{page}.md").read_text() for page in refusals_page.ERRORS)
    headings = re.findall(r"^### (.+)$", text, re.M)
    assert len(headings) == len(upstream_entries())
    assert all(heading.startswith("`") for heading in headings)
    assert "tRL" not in text


# ---- results ----


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


def test_no_pair_of_versions_failed_and_no_safe_cell_is_wrong():
    measured = json.loads((ROOT / "benchmarks/results/compat.json").read_text())
    assert measured["pairs"].keys() >= {"trl-0.29", "trl-1.4", "trl-1.9", "newest", "torch-2.15"}
    cores = [pair["core"] for pair in measured["pairs"].values() if "core" in pair]
    slices = [pair["slice"] for pair in measured["pairs"].values() if "slice" in pair]
    assert cores
    for core in cores:
        assert core["passed"] > 1000
        assert core["failures"] == []
        assert all(core["skips"])  # each says what upstream lacks
    assert slices
    assert not any({"wrong", "crashed"} & part["safe"].keys() or part["problems"] for part in slices)


def test_the_hardware_table_is_what_the_policy_does():
    from devices import A100, CPU, MI300, MPS, T4, V100

    shown = fragments.hardware()
    expected = {"bfloat16": (A100, MI300), "float16": (T4, V100), "float32": (CPU, MPS)}
    for dtype, devices in expected.items():
        assert {device.preferred[0] for device in devices} == {dtype}
    for row in (
        r"A100.*bf16 autocast",
        r"AMD.*bf16 autocast",
        r"T4, V100.*fp16 autocast with loss scaling",
        r"CPU \| fp32",
    ):
        assert re.search(row, shown)


# ---- diagrams and the site ----


def test_the_diagram_of_the_packages_shows_all_of_them():
    import architecture_page

    made = (DOCS / "architecture.svg").read_text()
    assert all(f">{name}</text>" in made for group in architecture_page.layers() for name in group)


def test_the_time_line_has_the_steps_of_construction_in_their_order():
    import diagrams

    steps = diagrams.steps_of_construction()
    assert set(steps) == set(diagrams.STEPS)
    drawn = (DOCS / "timeline.svg").read_text()
    places = [drawn.index(f">{line}</text>") for name in steps for line in diagrams.STEPS[name].split("\n")[:1]]
    assert places == sorted(places)


@pytest.mark.parametrize("name", build_docs.FIGURES)
def test_a_figure_follows_light_and_dark_themes(name):
    drawn = (DOCS / name).read_text()
    assert "currentColor" in drawn
    assert not re.search(r"(fill|stroke)[:=]\s*\"?#(000000|000|ffffff|fff)\b(?!\">\d)", drawn)
    assert not list(DOCS.glob("*.png"))


def test_every_figure_has_a_caption_and_a_description():
    for page in DOCS.glob("*.md"):
        text = page.read_text()
        assert text.count(":file: ") == text.count("<figcaption>") == text.count('aria-label="')
        assert "![" not in text


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """The site, built with every warning as an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-W", "ignore", "-m", "sphinx", "-W", "--keep-going", "-q", str(DOCS), str(folder)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    assert ": WARNING:" not in built.stderr
    return folder


def test_the_site_has_its_description_icon_and_version(site):
    page = (site / "index.html").read_text()
    assert '<meta content="Drop-in replacements' in page or 'name="description"' in page
    assert "favicon.svg" in page
    assert safe_trainers.__version__ in page
    assert "copybutton" in page


def test_options_are_copied_as_they_are_written(site):
    assert "--dry-run" in (site / "cli.html").read_text()
    assert "–dry" not in (site / "cli.html").read_text()
