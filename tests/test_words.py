"""Sentences in the package, the recipes and the pages use plain technical English: some phrases are banned."""

import bisect
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest


ROOT = Path(__file__).parent.parent

FILES = (
    "safe_trainers/**/*.py",
    "safe_trainers/**/*.toml",
    "README.md",
    "CONTRIBUTING.md",
    "docs/*.md",
    "recipes/**/*.yaml",
    "recipes/README.md",
    "configs/*.yaml",
    "pyproject.toml",
    "Makefile",
)

BANNED = (
    # words
    (r"\bpictures?\b", "image", "the picture to write"),
    (r"\btexts\b", "strings", "# one entry for all texts of a row"),
    (r"\bwhole numbers?\b", "integer", "it takes a whole number of steps"),
    (r"\bmend(s|ed|ing)?\b", "fix", "no precision mends that"),
    (r"\banew\b", "again", "compute it anew"),
    (r"\bunfit\b", "not valid, or not supported", "an unfit value"),
    (r"\btold\b", "passed, printed, distinguished", "the number of processes that it was told"),
    (r"\bcaptures? ", "records", "it captures a batch"),
    (r"\bsettlements?\b", "boundaries, or placement", "a settlement of two dtypes"),
    (r"\bcensus\b", "inventory", "the census of a model"),
    (r"\bwants?\b", "expects, requires", "where accelerate wants one"),
    (r"\bspeaks?\b", "prints, reports", "only the first process speaks"),
    (r"\bnobody('s)?\b", "no user, no process", "a traceback is nobody's news"),
    # negations
    (r"(?<!\b[Tt]here )\b(is|are|was|were) no [a-z]+(?<! longer)\b", "is not a", "tests/x is no run"),
    (r"\bis none (of|that)\b", "is not one of", "this is none of the names"),
    (r"\bwhere there (is|are) none\b", "if there is none", "`None` where there is none"),
    (r"\bno numbers?\b", "NaN, or not a number", "the gradient is no number"),
    (r"\b(holds|has|names) no dtype\b", "is not a dtype; expected one of ...", "'fp12' names no dtype"),
    (r"\bis no key any ?more\b", "was renamed to ...", "max_prompt_length is no key any more"),
    (r"\bleft undone\b", "not run", "what a failure left undone"),
    # phrases
    (r"\bwhat (it|they|the run|layers|each part) computes? in\b", "its compute dtype", "it shows what it computes in"),
    (r"\bright in precision\b", "trains at the right precision", "trainers that are right in precision"),
    (r"\bis whole or it is not there\b", "checkpoints are atomic", "a checkpoint is whole or it is not there"),
    (r"\bgo(es)? on from\b", "resume from", "go on from a checkpoint"),
    (
        r"\bmove and wait\b",
        "take half the bandwidth and half the memory",
        "tensors move and wait in half the bytes",
    ),
    (r"\bholds? themselves\b", "its YAML aliases are recursive", "its aliases hold themselves"),
    (r"\bfloat16 ends at\b", "the largest float16 is 65,504", "float16 ends at 65,504"),
    (r"\btakes a whole\b", "must be an integer, got ...", "it takes a whole one"),
    (r"\bhas to be\b", "must be", "it has to be float32"),
    (r"\bsays so\b", "requires it", "if the policy says so"),
    (
        r"\bsay(s|ing)? (what|whether|which|where|why|how) (a|an|the|it|this|each)\b",
        "shows, prints, returns",
        "says which the sampler is",
    ),
    (r"\b(came|comes) of (it|each|one|loading|that)\b", "result", "what came of each"),
    (r"\bmay not be meant\b", "warnings", "2 if something may not be meant"),
    (r"\bwithout a word\b", "silently", "changes numbers without a word"),
    (r"\bof (its|their) own accord\b", "by default", "prints of its own accord"),
    (r"\bbehind (its|the \w+'s|the) back\b", "silently", "decides behind the recipe's back"),
    (r"\bon the spot\b", "at run time", "models made on the spot"),
    (r"\ball the same\b", "also", "computes in bf16 all the same"),
    (r"\bin (its|their) own words\b", "with its message", "refused in their own words"),
    (r"\bmake(s)? it so\b", "sets it", "the line that makes it so"),
    (r"\botherwise than\b", "differs from", "what is otherwise than in stock TRL"),
    (r"\bof its own kind\b", "another", "an optimizer of its own kind"),
)
"""Regular expressions, the words to write instead, and an example that each of them finds."""

EXEMPT = {
    "safe_trainers/tiny/grammar.py": (
        'QUESTION = "what is in the picture?"',
        "number of on only or picture please say see shape",
    ),
}
"""Parts of lines that are data: the strings of the tiny task decide its committed results."""


def find(pattern: str, root: Path) -> Iterator[str]:
    """Yields `file:line: text` of each banned phrase below `root`, also if the phrase continues on the next line."""
    for path in sorted({path for files in FILES for path in root.glob(files) if path.is_file()}):
        name = path.relative_to(root).as_posix()
        lines = path.read_text(encoding="utf-8").splitlines()
        words = [line.strip(" \t#\"'") for line in lines]
        ends = list(itertools.accumulate(len(line) + 1 for line in words))
        for match in re.finditer(pattern, " ".join(words)):
            index = bisect.bisect_right(ends, match.start())
            if not any(part in lines[index] for part in EXEMPT.get(name, ())):
                yield f"{name}:{index + 1}: {lines[index].strip()}"


def plant(root: Path, files: str, text: str) -> str:
    """Writes a file that a glob finds, and returns its name."""
    name = files.replace("**", "deep/er").replace("*", "planted")
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)
    return name


@pytest.mark.parametrize(("pattern", "instead", "_"), BANNED, ids=[example for *_, example in BANNED])
def test_a_banned_phrase_is_not_used(pattern, instead, _):
    found = list(find(pattern, ROOT))
    assert not found, "\n".join([f"write instead: {instead}", *found])


@pytest.mark.parametrize(("pattern", "_", "example"), BANNED, ids=[example for *_, example in BANNED])
def test_a_planted_phrase_is_found(pattern, _, example, tmp_path):
    first, last = example.rsplit(" ", 1)
    plant(tmp_path, "docs/*.md", f"one\n{example}\n")
    plant(tmp_path, "safe_trainers/**/*.py", f"    # {first}\n    # {last}\n")
    found = list(find(pattern, tmp_path))
    assert found[0] == f"docs/planted.md:2: {example}"
    assert len(found) == 2  # the second is on two lines, if the phrase has two words


@pytest.mark.parametrize("files", FILES)
def test_every_glob_is_scanned(files, tmp_path):
    assert list(ROOT.glob(files))
    name = plant(tmp_path, files, "a picture")
    (tmp_path / "elsewhere.md").write_text("a picture")
    assert list(find(r"\bpicture\b", tmp_path)) == [f"{name}:1: a picture"]


def test_what_is_not_banned_passes(tmp_path):
    plant(
        tmp_path, "docs/*.md", "there\nis no file; there are no files; it is no longer there; the message says where\n"
    )
    assert not [found for pattern, *_ in BANNED for found in find(pattern, tmp_path)]


def test_only_data_is_exempt(tmp_path):
    (name,) = EXEMPT
    source = (ROOT / name).read_text()
    assert all(source.count(part) == 1 for part in EXEMPT[name])
    path = tmp_path / name
    path.parent.mkdir(parents=True)
    path.write_text(f"{source}# a picture\n")
    assert list(find(r"\bpictures?\b", tmp_path)) == [f"{name}:{len(source.splitlines()) + 1}: # a picture"]
