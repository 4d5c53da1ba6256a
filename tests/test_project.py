"""What holds for the project's files as text: rules over the syntax tree, pins, the commands of the README."""

import ast
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "safe_trainers"
SOURCES = sorted(path for path in PACKAGE.rglob("*.py"))
MAX_LINES = 500
ENGINES = {"vllm", "deepspeed"}  # each chooses its own torch, so neither is pinned

# A finding: line number and what is wrong there.
Finding = tuple[int, str]


# --- rules: each takes a file's text and name, and yields findings ---------------------------------------------------


def find_dynamic_code(text: str, _: str) -> Iterator[Finding]:
    """Yields calls of `exec` and `eval`, and every mention of them under another name or in `builtins`."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Name) and node.id in {"exec", "eval"}:
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and node.attr in {"exec", "eval"} and root_name(node) == "builtins":
            yield node.lineno, f"builtins.{node.attr}"
        elif isinstance(node, ast.ImportFrom) and node.module == "builtins":
            yield node.lineno, "import from builtins"


def find_source_reading(text: str, _: str) -> Iterator[Finding]:
    """Yields uses of `inspect.getsource` and its relatives: upstream's wording is not an interface."""
    names = {"getsource", "getsourcelines", "findsource"}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and node.attr in names:
            yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom) and node.module == "inspect":
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name in names)


def find_asserts(text: str, _: str) -> Iterator[Finding]:
    """Yields assert statements: `python -O` removes them, and their messages are nobody's."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Assert):
            yield node.lineno, "assert"


def find_silent_excepts(text: str, _: str) -> Iterator[Finding]:
    """Yields handlers that do nothing (`pass`, `...`, a string), and `contextlib.suppress`, which is the same."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ExceptHandler):
            if all(
                isinstance(line, ast.Pass) or (isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant))
                for line in node.body
            ):
                yield node.lineno, "except that does nothing"
        elif (isinstance(node, ast.Name) and node.id == "suppress") or (
            isinstance(node, ast.Attribute) and node.attr == "suppress" and root_name(node) == "contextlib"
        ):
            yield node.lineno, "contextlib.suppress"


def find_foreign_writes(text: str, name: str) -> Iterator[Finding]:
    """Yields writes to attributes of imported modules and classes that are not ours.

    Covers every kind of assignment, `del`, `setattr`, `delattr`, `__dict__` and `vars()`. It follows names, not
    values: a class that was first bound to another name is not seen.

    Args:
        text: the file.
        name: its file name; trl_patches.py is the one module that may.
    """
    if name == "trl_patches.py":
        return
    tree = ast.parse(text)
    foreign = foreign_names(tree)
    for node in ast.walk(tree):
        target: ast.expr | None = None
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            target = node.value
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            target = namespace_owner(node.value)
        elif isinstance(node, ast.Call):
            function = node.func
            writes = ast.unparse(function).split(".")[-1] in {"setattr", "delattr", "__setattr__", "__delattr__"}
            if writes and node.args:
                target = node.args[0]  # of `setattr(x, ...)` and of `type.__setattr__(x, ...)`
            elif isinstance(function, ast.Attribute) and function.attr in {"update", "setdefault", "pop"}:
                target = namespace_owner(function.value)
        if target is not None and root_name(target) in foreign:
            yield node.lineno, ast.unparse(node)


def find_length(text: str, _: str) -> Iterator[Finding]:
    """Yields a finding for a file that has grown past what can be read at once."""
    lines = len(text.splitlines())
    if lines > MAX_LINES:
        yield lines, f"{lines} lines, more than {MAX_LINES}"


def find_placeholders(text: str, _: str) -> Iterator[Finding]:
    """Yields notes on what is not written yet."""
    for number, line in enumerate(text.splitlines(), start=1):
        for word in re.findall(r"\b(?:TODO|FIXME)\b", line):
            yield number, word


def root_name(node: ast.expr) -> str | None:
    """Returns the name that an expression starts from: `a` of `a.b[0].c`; for what a call returned, None.

    A call returns an object of its own, which may be written to. The exceptions return what is foreign itself:
    `vars(a)` and `getattr(a, ...)` start from `a`, and `import_module(...)` from `import_module`.
    """
    while True:
        if isinstance(node, ast.Attribute | ast.Subscript):
            node = node.value
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in {"getattr", "vars"} and node.args:
                node = node.args[0]
            elif called.split(".")[-1] in {"import_module", "__import__"}:
                return "import_module"
            else:
                return None
        else:
            return node.id if isinstance(node, ast.Name) else None


def namespace_owner(node: ast.expr) -> ast.expr | None:
    """Returns `a` when the expression is `a.__dict__` or `vars(a)`."""
    if isinstance(node, ast.Attribute) and node.attr == "__dict__":
        return node.value
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "vars" and node.args:
        return node.args[0]
    return None


def foreign_names(tree: ast.AST) -> set[str]:
    """Returns the names a file binds by importing from other packages, anywhere in it."""
    names = {"import_module"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] != "safe_trainers":
                    names.add(alias.asname or alias.name.split(".")[0])
        elif (
            isinstance(node, ast.ImportFrom) and node.level == 0 and not f"{node.module}.".startswith("safe_trainers.")
        ):
            names.update(alias.asname or alias.name for alias in node.names)
    return names


# name: (rule, snippets it must find, snippets it must let pass)
RULES: dict[str, tuple[Callable[[str, str], Iterable[Finding]], list[str], list[str]]] = {
    "no dynamic code": (
        find_dynamic_code,
        ["exec('x = 1')", "y = eval('1')", "import builtins\nbuiltins.exec('')", "run = exec\nrun('')"],
        ["model.eval()", "exec_time = 1", "from builtins_like import x"],
    ),
    "no reading of sources": (
        find_source_reading,
        [
            "import inspect\ninspect.getsource(f)",
            "from inspect import getsource",
            "import inspect as i\ni.findsource(f)",
        ],
        ["import inspect\ninspect.signature(f)", "from inspect import signature"],
    ),
    "no asserts": (
        find_asserts,
        ["assert x", "def f():\n    assert x, 'y'"],
        ["x = 'assert y'", "self.assert_dtypes()"],
    ),
    "no silent except": (
        find_silent_excepts,
        [
            "try:\n    f()\nexcept ValueError:\n    pass",
            "try:\n    f()\nexcept ValueError:\n    'it is fine'\n    ...",
            "import contextlib\nwith contextlib.suppress(ValueError):\n    f()",
            "from contextlib import suppress\nwith suppress(ValueError):\n    f()",
        ],
        ["try:\n    f()\nexcept ValueError:\n    x = None", "try:\n    f()\nexcept ValueError:\n    raise KeyError"],
    ),
    "no writes to foreign modules": (
        find_foreign_writes,
        [
            "import trl\ntrl.GRPOTrainer = None",
            "import torch\ntorch.backends.cuda.matmul.allow_tf32 = True",
            "import torch.nn as nn\nnn.Linear.forward = f",
            "from trl import GRPOTrainer\nGRPOTrainer._generate = f",
            "from trl import GRPOTrainer as Stock\nsetattr(Stock, '_generate', f)",
            "from trl import GRPOTrainer\ntype.__setattr__(GRPOTrainer, '_generate', f)",
            "from trl import GRPOTrainer\nGRPOTrainer.count += 1",
            "from trl import GRPOTrainer\nGRPOTrainer.count: int = 1",
            "from trl import GRPOTrainer\nx, GRPOTrainer.count = 1, 2",
            "from trl import GRPOTrainer\nfor GRPOTrainer.count in range(3):\n    f()",
            "from trl import GRPOTrainer\nwith f() as GRPOTrainer.context:\n    f()",
            "from trl import GRPOTrainer\ndel GRPOTrainer.count",
            "import trl\ntrl.__dict__['GRPOTrainer'] = None",
            "import trl\nvars(trl)['GRPOTrainer'] = None",
            "import trl\nvars(trl).update(GRPOTrainer=None)",
            "import trl\ngetattr(trl, 'trainer').GRPOTrainer = None",
            "import importlib\nimportlib.import_module('trl').GRPOTrainer = None",
            "def f():\n    import trl\n    trl.GRPOTrainer = None",
        ],
        [
            "import torch\nself.model.weight = torch.nn.Parameter(x)",
            "import torch\nx = torch.float16",
            "import torch\ntorch.nn.Linear(2, 2).weight.requires_grad = False",
            "import os\nos.environ['X'] = '1'",
            "import safe_trainers.trainer.mixin\nsafe_trainers.trainer.mixin.x = 1",
            "from .mixin import PrecisionMixin\nPrecisionMixin.x = 1",
            "setattr(model, 'x', 1)",
        ],
    ),
    "no file too long": (find_length, ["x = 1\n" * (MAX_LINES + 1)], ["x = 1\n" * MAX_LINES]),
    "no placeholders": (find_placeholders, ["# TODO later", "x = 1  # FIXME"], ["todo_list = 1", "METHODOLOGY = 1"]),
}


def test_there_are_sources() -> None:
    assert PACKAGE / "__init__.py" in SOURCES


@pytest.mark.parametrize("rule", RULES)
def test_package_keeps_the_rule(rule: str) -> None:
    check = RULES[rule][0]
    findings = [
        f"{path.relative_to(ROOT)}:{line}: {what}"
        for path in SOURCES
        for line, what in check(path.read_text(encoding="utf-8"), path.name)
    ]
    assert not findings, f"{rule}:\n" + "\n".join(findings)


@pytest.mark.parametrize(("rule", "snippet"), [(rule, snippet) for rule in RULES for snippet in RULES[rule][1]])
def test_rule_finds(rule: str, snippet: str) -> None:
    assert list(RULES[rule][0](snippet, "module.py"))


@pytest.mark.parametrize(("rule", "snippet"), [(rule, snippet) for rule in RULES for snippet in RULES[rule][2]])
def test_rule_lets_pass(rule: str, snippet: str) -> None:
    assert not list(RULES[rule][0](snippet, "module.py"))


def test_only_trl_patches_may_write_to_foreign_modules() -> None:
    snippet = "import trl\ntrl.GRPOTrainer = None"
    assert list(find_foreign_writes(snippet, "module.py"))
    assert not list(find_foreign_writes(snippet, "trl_patches.py"))


# --- dependencies ----------------------------------------------------------------------------------------------------


def read_pyproject() -> dict[str, Any]:
    """Returns pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def direct_dependencies(pyproject: dict[str, Any]) -> list[Requirement]:
    """Returns every requirement of the project and its extras, without the extras' references to each other."""
    project = pyproject["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    requirements = [Requirement(line) for lines in lists for line in lines]
    return [requirement for requirement in requirements if requirement.name != project["name"]]


def parse_pins(text: str) -> list[Requirement]:
    """Returns the requirements of a constraints file, comments left out."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return [Requirement(line) for line in lines if line]


def find_pin_errors(requirements: list[Requirement], pins: list[Requirement]) -> list[str]:
    """Returns a line for each requirement without exactly one exact pin inside its range."""
    errors = []
    for requirement in requirements:
        name = canonicalize_name(requirement.name)
        if name in ENGINES:
            continue
        found = [pin for pin in pins if canonicalize_name(pin.name) == name]
        if len(found) != 1:
            errors.append(f"{name}: {len(found)} pins in constraints.txt, not 1")
            continue
        (specifier,) = found[0].specifier
        if specifier.operator != "==" or "*" in specifier.version:
            errors.append(f"{name}: {specifier} is no exact version")
        elif not requirement.specifier.contains(specifier.version):
            errors.append(f"{name}: {specifier.version} is outside {requirement.specifier} of pyproject.toml")
    return errors


def test_every_direct_dependency_is_pinned_once_in_its_range() -> None:
    pins = parse_pins((ROOT / "constraints.txt").read_text(encoding="utf-8"))
    assert not find_pin_errors(direct_dependencies(read_pyproject()), pins)


def test_every_pin_belongs_to_a_direct_dependency() -> None:
    pins = parse_pins((ROOT / "constraints.txt").read_text(encoding="utf-8"))
    names = {canonicalize_name(requirement.name) for requirement in direct_dependencies(read_pyproject())}
    assert {canonicalize_name(pin.name) for pin in pins} == names - ENGINES


@pytest.mark.parametrize(
    ("constraints", "error"),
    [
        ("", "trl: 0 pins in constraints.txt, not 1"),
        ("trl==1.0\nTRL==1.1", "trl: 2 pins in constraints.txt, not 1"),
        ("trl>=1.0", "trl: >=1.0 is no exact version"),
        ("trl==1.*", "trl: ==1.* is no exact version"),
        ("trl==2.0", "trl: 2.0 is outside"),
        ("# trl==1.0", "trl: 0 pins in constraints.txt, not 1"),
    ],
)
def test_wrong_pin_is_found(constraints: str, error: str) -> None:
    (found,) = find_pin_errors([Requirement("trl>=0.29,<2")], parse_pins(constraints))
    assert found.startswith(error)


def test_right_pin_passes() -> None:
    assert (
        find_pin_errors([Requirement("types-PyYAML>=6"), Requirement("vllm")], parse_pins("types_pyyaml==6.0 # x"))
        == []
    )


def has_torchvision(requirements: list[Requirement]) -> bool:
    """Says whether torchvision is required: one of another torch breaks `from trl import GRPOTrainer`."""
    return any(canonicalize_name(requirement.name) == "torchvision" for requirement in requirements)


def test_torchvision_is_no_dependency() -> None:
    assert not has_torchvision(direct_dependencies(read_pyproject()))
    assert not has_torchvision(parse_pins((ROOT / "constraints.txt").read_text(encoding="utf-8")))


def test_torchvision_would_be_found() -> None:
    extra = {"project": {"name": "x", "dependencies": [], "optional-dependencies": {"vlm": ["Torchvision>=0.21"]}}}
    assert has_torchvision(direct_dependencies(extra))


def test_torch_of_the_makefile_is_the_pinned_one() -> None:
    (pin,) = [pin for pin in parse_pins((ROOT / "constraints.txt").read_text(encoding="utf-8")) if pin.name == "torch"]
    assert f" {pin}\n" in (ROOT / "Makefile").read_text(encoding="utf-8")


# --- commands --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["make demo", "make test"])
def test_readme_names_the_command(command: str) -> None:
    assert re.search(rf"\b{command}\b", (ROOT / "README.md").read_text(encoding="utf-8"))


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_make_targets_that_are_named_exist(document: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    named = set(re.findall(r"`make ([a-z-]+)", (ROOT / document).read_text(encoding="utf-8")))
    assert named - targets == set()


def missing_imports(source: str) -> list[str]:
    """Modules that a benchmark imports, in functions too, and that a process of its own cannot find."""
    tests = ROOT / "tests"
    own = [str(folder) for folder in (ROOT / "benchmarks", tests, tests / "real_vllm")]
    path = [*own, *(p for p in sys.path if not Path(p).is_relative_to(tests))]
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
    tops = {name.partition(".")[0] for name in names} - set(sys.builtin_module_names)
    return sorted(top for top in tops if PathFinder.find_spec(top, path) is None)


@pytest.mark.parametrize("file", sorted((ROOT / "benchmarks").glob("*.py")), ids=lambda file: file.name)
def test_benchmarks_import_what_exists(file: Path) -> None:
    assert missing_imports(file.read_text()) == []


def test_a_missing_import_is_found() -> None:
    assert missing_imports("import sys\ndef f():\n    from test_weight_sync import x") == ["test_weight_sync"]
