"""Whether what would be released works: wheel and sdist, each installed into an empty environment.

    python tests/release_check.py [--only wheel|sdist] [--keep FOLDER]

Builds both, the wheel from the sdist, and looks into them: metadata, licence, typed marker, recipes and configs, and
nothing else. Installs each into a virtual environment of its own, outside of the checkout, with the pinned versions of
`constraints.txt`, torch first; runs a recipe without any extra, then with `[all]` the embedded recipe and a part of
the suite. The tests are those of the sdist, away from its sources: they, too, import what is installed, or fail.

Needs the package index and some minutes. The exit status is 0 if every check passed; the table says which did not.
"""

import argparse
import email.message
import email.parser
import functools
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import venv
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from rich.console import Console
from rich.markup import escape
from rich.table import Table


ROOT = Path(__file__).parent.parent
NAME = "safe-trainers"
WHEEL, SDIST = "wheel", "sdist"
KINDS = (WHEEL, SDIST)
SMOKE = (
    "core/test_dtypes.py", "test_config.py", "policy/test_resolve.py", "model/test_inventory.py",
    "trainer/test_trl_patches.py", "media/test_media.py",
    "integration/test_cells.py",
)  # fmt: skip
"""The part of the suite that runs against what was installed: decisions, and stock beside safe in real trainers."""
RECIPE = "grpo/tiny_vlm_bf16"
SHORT = (
    "--max_steps", "1", "--warm_up_steps", "1", "--dataset_size", "64", "--evaluation_size", "8",
    "--per_device_train_batch_size", "8", "--logging_steps", "1",
)  # fmt: skip
"""Overrides with which the embedded recipe takes seconds."""
WRITTEN = ("adapter_model.safetensors", "adapter_config.json", "log.json")
"""What a run of the recipe leaves, besides the plot."""
IN_SDIST = ("PKG-INFO", "LICENSE", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile", "constraints.txt",
            "pyproject.toml", "tests/conftest.py", "docs/how-it-works.md", "benchmarks/matrix.py")  # fmt: skip
_LITTER = re.compile(r"(^|/)(__pycache__|\.git|\.venv|\.hypothesis|\.pytest_cache|runs|_build)(/|$)|\.py[co]$")


class CheckError(Exception):
    """A check that did not pass, in words."""


@dataclass
class Outcome:
    """What came of one check.

    Attributes:
        check: Its name.
        kind: `"wheel"`, `"sdist"`, or `""` for both at once.
        error: Why it did not pass, `None` where it did.
        detail: What it found.
        seconds: How long it took.
    """

    check: str
    kind: str
    error: str | None = None
    detail: str = ""
    seconds: float = 0.0


@dataclass
class Checks:
    """The checks so far."""

    outcomes: list[Outcome] = field(default_factory=list)

    def run(self, check: str, kind: str, work: Callable[[], str]) -> bool:
        """Runs one check and notes what came of it.

        Args:
            check: Its name.
            kind: What it is about.
            work: The check; returns what it found.

        Returns:
            Whether it passed.
        """
        started, outcome = time.monotonic(), Outcome(check, kind)
        try:
            outcome.detail = work()
        except (CheckError, OSError, KeyError, ValueError) as error:
            outcome.error = f"{type(error).__name__}: {error}" if not isinstance(error, CheckError) else str(error)
        outcome.seconds = time.monotonic() - started
        self.outcomes.append(outcome)
        state = "passed" if outcome.error is None else "FAILED"
        print(f"{state}  {kind:<6} {check} ({outcome.seconds:.0f} s)", flush=True)
        return outcome.error is None

    @property
    def passed(self) -> bool:
        """Whether all of them passed."""
        return bool(self.outcomes) and all(outcome.error is None for outcome in self.outcomes)


def run(command: Sequence[str], cwd: Path, environment: Mapping[str, str] | None = None) -> str:
    """Runs a command to its end.

    Args:
        command: The program and its arguments.
        cwd: Where.
        environment: Its environment, by default this process's.

    Returns:
        What it wrote to stdout.

    Raises:
        CheckError: With the end of what it wrote, if its exit status is not 0.
    """
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-25:])
        raise CheckError(f"exit status {done.returncode} of {' '.join(map(str, command))}\n{tail}")
    return done.stdout


def build(folder: Path, kind: str = "") -> dict[str, Path]:
    """Builds with the build backend that is installed, without a network.

    Args:
        folder: Where to.
        kind: `"wheel"` for a wheel of the checkout alone; by default an sdist, and a wheel of that sdist.

    Returns:
        The file of each kind.

    Raises:
        CheckError: If it cannot be built, or not exactly one file came of it.
    """
    which = ["--wheel"] if kind == WHEEL else []
    run([sys.executable, "-m", "build", "--no-isolation", *which, "--outdir", str(folder), str(ROOT)], ROOT)
    found: dict[str, Path] = {}
    for name, pattern in {WHEEL: "*.whl", SDIST: "*.tar.gz"}.items():
        files = sorted(folder.glob(pattern))
        if len(files) > 1 or (not files and name in (kind or name)):
            raise CheckError(f"{len(files)} files {pattern} in {folder}")
        if files:
            found[name] = files[0]
    return found


def names_in(artifact: Path) -> list[str]:
    """The names of the files in a wheel, or below the one folder of an sdist."""
    if artifact.suffix == ".whl":
        with zipfile.ZipFile(artifact) as wheel:
            return sorted(name for name in wheel.namelist() if not name.endswith("/"))
    with tarfile.open(artifact) as sdist:
        members = [member.name for member in sdist.getmembers() if member.isfile()]
    (top,) = {name.partition("/")[0] for name in members}
    return sorted(name.removeprefix(f"{top}/") for name in members)


def text_in(artifact: Path, ending: str) -> str:
    """The text of the one file of a wheel or an sdist whose name ends so."""
    if artifact.suffix == ".whl":
        with zipfile.ZipFile(artifact) as wheel:
            (name,) = (name for name in wheel.namelist() if name.endswith(ending))
            return wheel.read(name).decode()
    with tarfile.open(artifact) as sdist:
        (member,) = (m for m in sdist.getmembers() if m.name.endswith(ending) and m.name.count("/") == 1)
        file = sdist.extractfile(member)
        if file is None:
            raise CheckError(f"{member.name} is no file")
        return file.read().decode()


def packaged_data() -> list[str]:
    """Recipes and configs of the checkout, as an installed package holds them."""
    return sorted(
        f"safe_trainers/_data/{path.relative_to(ROOT)}"
        for folder in ("recipes", "configs")
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    )


def sources() -> list[str]:
    """The files of the package in the checkout."""
    found = (ROOT / "safe_trainers").rglob("*")
    return sorted(str(p.relative_to(ROOT)) for p in found if p.is_file() and "__pycache__" not in p.parts)


def check_contents(artifact: Path, kind: str) -> str:
    """What is to be in it is in it, and nothing else.

    Raises:
        CheckError: With what is missing, or too much.
    """
    names = set(names_in(artifact))
    if kind == WHEEL:
        info = {name for name in names if ".dist-info/" in name}
        if not any(name.endswith(".dist-info/licenses/LICENSE") for name in info):
            raise CheckError("the licence is not in .dist-info/licenses")
        wanted = {*sources(), *packaged_data()}
        extra = names - info - wanted
        if not artifact.name.endswith("-py3-none-any.whl"):
            raise CheckError(f"{artifact.name} is not for every platform")
    else:
        data = (name.removeprefix("safe_trainers/_data/") for name in packaged_data())
        wanted, extra = {*IN_SDIST, *sources(), *data}, set()
        wanted |= {f"tests/{name}" for name in SMOKE}
    if missing := wanted - names:
        raise CheckError(f"not in it: {', '.join(sorted(missing)[:5])}")
    if "safe_trainers/py.typed" not in names:
        raise CheckError("safe_trainers/py.typed is not in it")
    extra |= {name for name in names if _LITTER.search(name)}
    if extra:
        raise CheckError(f"not to be in it: {', '.join(sorted(extra)[:5])}")
    return f"{len(names)} files"


def check_metadata(artifact: Path, kind: str) -> str:
    """Its metadata is what `pyproject.toml` says.

    Raises:
        CheckError: With each field that is not.
    """
    text = text_in(artifact, ".dist-info/METADATA" if kind == WHEEL else "/PKG-INFO")
    found = email.parser.Parser().parsestr(text)
    problems = list(compare_metadata(found, tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))))
    if problems:
        raise CheckError("; ".join(problems))
    return f"{found['Name']} {found['Version']}, {found['License-Expression']}, Python {found['Requires-Python']}"


def compare_metadata(found: email.message.Message, pyproject: Mapping[str, object]) -> Iterator[str]:
    """Compares metadata with what it was made from.

    Args:
        found: `METADATA` or `PKG-INFO`.
        pyproject: The content of `pyproject.toml`.

    Yields:
        A line for each field that differs.
    """
    project = pyproject["project"]
    if not isinstance(project, Mapping):
        raise CheckError("pyproject.toml has no table [project]")
    match = re.search(r'__version__ = "(.+)"', (ROOT / "safe_trainers/core/versions.py").read_text(encoding="utf-8"))
    single = {
        "Name": project["name"],
        "Version": match and match[1],
        "Summary": project["description"],
        "License-Expression": project["license"],
        "License-File": "LICENSE",
        "Requires-Python": project["requires-python"],
        "Description-Content-Type": "text/markdown",
    }
    for key, wanted in single.items():
        if found[key] != wanted:
            yield f"{key} is {found[key]!r}, and should be {wanted!r}"
    extras = project["optional-dependencies"]
    several = {
        "Classifier": project["classifiers"],
        "Provides-Extra": list(extras),
    }
    for key, values in several.items():
        if set(found.get_all(key, [])) != set(values):
            yield f"{key}: {sorted(set(found.get_all(key, [])) ^ set(values))} in one of the two only"
    stated = {_plain(line) for line in found.get_all("Requires-Dist", [])}
    wanted_all = {_plain(line) for line in project["dependencies"]}
    # An extra that names this package's own extras may be written out by the build backend, or left as it is.
    for extra, lines in extras.items():
        wanted_all |= {_plain(f"{line}; extra == '{extra}'") for line in lines if Requirement(line).name != NAME}
    if missing := wanted_all - stated:
        yield f"Requires-Dist lacks {', '.join(sorted(missing)[:4])}"
    first = (ROOT / "README.md").read_text(encoding="utf-8").strip().splitlines()[0]
    if first not in str(found.get_payload() or found["Description"]):
        yield "the description is not the README"


def _plain(line: str) -> str:
    """A requirement in one spelling."""
    needed = Requirement(line)
    marker = f"; {needed.marker}" if needed.marker else ""
    return f"{canonicalize_name(needed.name)}{needed.specifier}{marker}".replace("'", '"')


class Environment:
    """An empty virtual environment outside of the checkout, and what is done in it.

    Args:
        folder: Where it is made; what runs, runs in `work` below it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.work = folder / "venv", folder / "work"
        self.work.mkdir(parents=True)
        venv.create(self.folder, with_pip=True)
        self.bin = self.folder / "bin"
        kept = ("PATH", "HOME", "LANG", "TMPDIR", "SSL_CERT_FILE")
        self.variables = {name: value for name, value in os.environ.items() if name in kept or name[:4] == "PIP_"}
        self.variables |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VIRTUAL_ENV": str(self.folder)}
        self.variables["PATH"] = f"{self.bin}{os.pathsep}{self.variables.get('PATH', '')}"

    def run(self, program: str, *arguments: str) -> str:
        """Runs a program of the environment, in its folder and without the variables of the caller."""
        return run([str(self.bin / program), *arguments], self.work, self.variables)

    def install(self, *requirements: str) -> None:
        """Installs with the pinned versions."""
        pins = str(ROOT / "constraints.txt")
        self.run("python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", pins, *requirements)


def pin_of(name: str) -> str:
    """The line of `constraints.txt` about a package."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    (line,) = (line for line in lines if line.startswith(f"{name}=="))
    return line


def install(place: Environment, artifact: Path) -> str:
    """Installs torch alone, so that nothing else chooses another build of it, and then the artifact without extras."""
    place.install(pin_of("torch"))
    place.install(str(artifact))
    place.run("python", "-m", "pip", "check")
    found: list[dict[str, str]] = json.loads(place.run("python", "-m", "pip", "list", "--format", "json"))
    if [entry for entry in found if entry["name"] == NAME and "editable_project_location" in entry]:
        raise CheckError("it was installed in editable form")
    return f"{len(found)} packages"


def check_place(place: Environment) -> str:
    """What is imported is what was installed, by its metadata too.

    Raises:
        CheckError: If it is anything else.
    """
    code = (
        "import json, safe_trainers; from importlib.metadata import metadata, entry_points;"
        f"print(json.dumps([safe_trainers.__file__, safe_trainers.__version__, metadata('{NAME}')['Version'],"
        f"[e.value for e in entry_points(group='console_scripts') if e.name == '{NAME}']]))"
    )
    file, version, stated, programs = json.loads(place.run("python", "-c", code))
    if not Path(file).resolve().is_relative_to(place.folder.resolve()):
        raise CheckError(f"safe_trainers is {file}, and not in {place.folder}")
    if version != stated or not programs:
        raise CheckError(f"version {version}, metadata {stated}, programs {programs}")
    return f"safe_trainers {version} in {Path(file).parent.relative_to(place.folder.resolve())}"


def check_recipe(place: Environment, overrides: Sequence[str], plot: bool, learns: bool = False) -> str:
    """Lists, copies, validates and trains the embedded recipe, as a user would.

    Args:
        place: Where it is installed.
        overrides: Options after the recipe.
        plot: Whether the run can draw.
        learns: Whether the run is long enough to learn something.

    Returns:
        The score before and after.

    Raises:
        CheckError: If a command fails, or the run leaves less than it should.
    """
    listed = place.run(NAME, "list")
    if f"{RECIPE}.yaml" not in listed:
        raise CheckError(f"`{NAME} list` does not list {RECIPE}")
    file = place.work / f"{Path(RECIPE).name}.yaml"
    file.unlink(missing_ok=True)
    place.run(NAME, "copy", RECIPE)
    place.run(NAME, "validate", file.name)
    out = place.work / f"run_{len(list(place.work.glob('run_*')))}"
    place.run(NAME, "grpo", "--config", file.name, *overrides, "--output_dir", out.name)
    wanted = [*WRITTEN, *(["plot.png"] if plot else [])]
    if missing := [name for name in wanted if not (out / name).is_file()]:
        raise CheckError(f"the run left no {', '.join(missing)}")
    score = json.loads((out / "log.json").read_text(encoding="utf-8"))["score"]
    found = f"{score['name']} {score['before']:.2f} -> {score['after']:.2f}"
    if learns and not score["after"] > score["before"]:
        raise CheckError(f"it has not learnt: {found}")
    return found


WHERE = """
from pathlib import Path
import sys
import safe_trainers


def test_the_installed_package_is_tested():
    assert Path(safe_trainers.__file__).resolve().is_relative_to(Path(sys.prefix).resolve())
"""


def check_suite(place: Environment, sdist: Path) -> str:
    """The smoke part of the suite, from the sdist's tests, without the sources beside them.

    Raises:
        CheckError: If a test fails, or fewer ran than should.
    """
    with tarfile.open(sdist) as archive:
        archive.extractall(place.work, filter="data")
    (unpacked,) = place.work.glob("safe_trainers-*")
    for part in ("tests", "benchmarks", "pyproject.toml"):  # what tests import or are configured by; not the package
        (unpacked / part).rename(place.work / part)
    (place.work / "tests" / "test_where.py").write_text(WHERE, encoding="utf-8")
    files = [f"tests/{name}" for name in (*SMOKE, "test_where.py")]
    said = place.run("python", "-m", "pytest", "-q", "--no-header", "--show-capture=no", "--tb=short", *files)
    last = said.strip().splitlines()[-1]
    passed = re.search(r"(\d+) passed", last)
    if passed is None or int(passed[1]) < 100:
        raise CheckError(last)
    return last.strip("= ")


def examine(checks: Checks, artifact: Path, kind: str, sdist: Path, folder: Path) -> None:
    """All checks of one artifact in an environment; those after the first only once it is installed.

    Args:
        checks: Where they are noted.
        artifact: The file.
        kind: `"wheel"` or `"sdist"`.
        sdist: The sdist, whose tests are run.
        folder: An empty folder outside of the checkout.
    """
    place = Environment(folder)
    if not checks.run("install, empty environment", kind, lambda: install(place, artifact)):
        return
    checks.run("imported from there", kind, lambda: check_place(place))
    checks.run("recipe, short, no extras", kind, lambda: check_recipe(place, SHORT, plot=False))

    def extras() -> str:
        place.install(f"{artifact}[all]", "pytest", "pytest-timeout", "hypothesis")
        place.run("python", "-m", "pip", "check")
        return "[all] and pytest"

    if checks.run("install extras", kind, extras):
        full = kind == WHEEL  # the sdist's wheel is the same but for its way here
        what = "recipe, whole" if full else "recipe, short, plot"
        checks.run(what, kind, lambda: check_recipe(place, () if full else SHORT, plot=True, learns=full))
        checks.run("smoke part of the suite", kind, lambda: check_suite(place, sdist))


def main() -> int:
    """Builds, checks, and prints the table.

    Returns:
        0 if every check passed, else 1.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=KINDS, help="one of the two")
    parser.add_argument("--keep", type=Path, help="a new folder for artifacts and environments, which stays")
    options = parser.parse_args()
    checks, built = Checks(), dict[str, Path]()
    with tempfile.TemporaryDirectory(prefix="release-check-") as scratch:
        folder = (options.keep or Path(scratch)).resolve()
        folder.mkdir(parents=True, exist_ok=True)

        def make() -> str:
            built.update(build(folder / "dist"))
            return ", ".join(file.name for file in built.values())

        if checks.run("build", "", make):
            kinds = [options.only] if options.only else KINDS
            for kind in kinds:  # at once, while the checkout is what it was built from
                checks.run("contents", kind, functools.partial(check_contents, built[kind], kind))
                checks.run("metadata", kind, functools.partial(check_metadata, built[kind], kind))
            for kind in kinds:
                examine(checks, built[kind], kind, built[SDIST], folder / kind)
    table = Table("artifact", "check", "result", "seconds", "found", title=f"{NAME}: release check")
    for outcome in checks.outcomes:
        state = "passed" if outcome.error is None else "FAILED"
        found = outcome.detail if outcome.error is None else outcome.error.splitlines()[0]
        table.add_row(outcome.kind, outcome.check, state, f"{outcome.seconds:.0f}", escape(found))
    Console(width=140).print(table)
    for outcome in checks.outcomes:
        if outcome.error is not None:
            print(f"\n{outcome.kind} {outcome.check}\n{outcome.error}", file=sys.stderr)
    return 0 if checks.passed else 1


if __name__ == "__main__":
    sys.exit(main())
