"""Runs a foreign test suite, written against TRL's trainers, with the safe ones in their place.

    python tests/compat/swap.py PATH [pytest arguments]

`PATH` is a test module, a folder of them or a node id. The modules below the folder of each path see TRL through a
view of their own: what they import from `trl` or look up in it is what TRL has, but for its trainers. In place of a
stable one they see the drop-in class, in place of an experimental one a class made of it with the two lines. So it
does not matter how they name a trainer: `from trl import GRPOTrainer`, at the top or inside a function,
`trl.GRPOTrainer`, `trl.trainer.grpo_trainer.GRPOTrainer`, as the base of a class or the parameter of a test.
TRL itself is left as it is, and every other module, the safe trainers and their bases among them, sees the true one.

Not swapped: what a module asks `importlib`, `sys.modules`, `vars` or a string (`patch("trl.GRPOTrainer")`) for.

At the end stands how many trainers were swapped, by class. A run in which no safe trainer was built fails, whatever
its tests said: it has shown nothing.
"""

import builtins
import functools
import importlib.abc
import os
import sys
from collections import Counter
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


NOT_FOREIGN = ("trl", "safe_trainers")
"""Packages that never get the view, wherever they lie."""
FAILED = 1


def safe_class(value: Any) -> type | None:
    """The safe trainer that takes the place of a class of TRL, `None` for anything that has none."""
    if not isinstance(value, type) or value.__module__.partition(".")[0] != "trl":
        return None
    return _safe_class(value) if value.__name__.endswith("Trainer") else None


@functools.cache
def _safe_class(value: type) -> type | None:
    from transformers import Trainer

    import safe_trainers

    if not issubclass(value, Trainer):
        return None
    name = f"Safe{value.__name__}"
    drop_in: Any = getattr(safe_trainers, name) if name in safe_trainers.__all__ else None
    if drop_in is not None and issubclass(drop_in, value):
        return drop_in
    return type(name, (safe_trainers.PrecisionMixin, value, safe_trainers.PrecisionBase), {})


class View(ModuleType):
    """A module of TRL as foreign tests see it: read and written through to the true one, but for the trainers."""

    def __init__(self, module: ModuleType, swap: "Swap", reader: str) -> None:
        object.__getattribute__(self, "__dict__").update(_module=module, _swap=swap, _reader=reader)

    def __getattribute__(self, name: str) -> Any:
        # Not `__getattr__`: a module has `__name__`, `__doc__` and others of its own, which would be the view's.
        # `__dict__` is the true one, where those who write to a module look what to put back.
        own = object.__getattribute__(self, "__dict__")
        module, value = own["_module"], getattr(own["_module"], name)
        if isinstance(value, type) and value.__module__ != module.__name__ and not hasattr(module, "__path__"):
            return value  # what a module of TRL has imported for itself; a test that patches it means that class
        return own["_swap"].see(value, own["_reader"])

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(object.__getattribute__(self, "__dict__")["_module"], name, value)

    def __delattr__(self, name: str) -> None:
        delattr(object.__getattribute__(self, "__dict__")["_module"], name)

    def __dir__(self) -> list[str]:
        return dir(object.__getattribute__(self, "__dict__")["_module"])


class Loader(importlib.abc.Loader):
    """Another loader, which gives its module an `import` statement that sees views of TRL."""

    def __init__(self, loader: Any, swap: "Swap") -> None:
        self._loader, self._swap = loader, swap

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._loader.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__builtins__"] = {**vars(builtins), "__import__": self._swap.importer(module.__name__)}
        self._loader.exec_module(module)


class Swap(importlib.abc.MetaPathFinder):
    """A plugin for pytest, and the finder of the modules whose imports it answers.

    Args:
        roots: Folders; the modules below them are foreign.
    """

    def __init__(self, roots: Sequence[Path]) -> None:
        self._roots = [root.resolve() for root in roots]
        self._undo = pytest.MonkeyPatch()
        self.readers: dict[str, set[str]] = {}
        self.built: Counter[str] = Counter()

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Finds a module as the other finders do, and wraps the loader of one that is foreign."""
        if name.partition(".")[0] in NOT_FOREIGN:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None and self._is_foreign(spec.origin):
                    spec.loader = Loader(spec.loader, self)
                return spec
        return None

    def _is_foreign(self, origin: str | None) -> bool:
        if origin is None or not origin.endswith(".py"):
            return False
        file = Path(origin).resolve()
        return "site-packages" not in file.parts and any(file.is_relative_to(root) for root in self._roots)

    def importer(self, reader: str) -> Any:
        """The `__import__` of one foreign module.

        Args:
            reader: Name of the module.
        """

        def view(*args: Any, **kwargs: Any) -> Any:
            return self.see(builtins.__import__(*args, **kwargs), reader)

        return view

    def see(self, value: Any, reader: str) -> Any:
        """What a foreign module gets for a value: a view of TRL's modules, a safe trainer for TRL's, else itself."""
        if isinstance(value, ModuleType):
            ours = value.__name__.partition(".")[0] == "trl" and not isinstance(value, View)
            return View(value, self, reader) if ours else value
        safe = safe_class(value)
        if safe is None:
            return value
        if not self.readers:
            self._count_trainers()
        self.readers.setdefault(value.__name__, set()).add(reader)
        return safe

    def _count_trainers(self) -> None:
        from safe_trainers import PrecisionMixin
        from safe_trainers.core.trl import trl_bases

        original = PrecisionMixin.__init__

        @functools.wraps(original)
        def init(trainer: Any, *args: Any, **kwargs: Any) -> None:
            original(trainer, *args, **kwargs)
            self.built[trl_bases(type(trainer))[0].__name__] += 1

        self._undo.setattr(PrecisionMixin, "__init__", init)

    @pytest.hookimpl(tryfirst=True)
    def pytest_load_initial_conftests(self) -> None:
        """In front of the finder that rewrites assertions, which is there by now; no conftest has been imported."""
        sys.meta_path.insert(0, self)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fails a run that built no safe trainer."""
        if not self.built and session.exitstatus == pytest.ExitCode.OK and not session.config.option.collectonly:
            session.exitstatus = FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Says what was swapped."""
        terminalreporter.section("swapped")
        for line in self.summary():
            terminalreporter.line(line)

    def summary(self) -> list[str]:
        """Lines for the end of the run."""
        lines = [
            f"{name} -> Safe{name}: seen by {len(self.readers[name])} module(s), {self.built[name]} built"
            for name in sorted(self.readers)
        ]
        lines.append(f"{len(self.readers)} classes swapped, {sum(self.built.values())} safe trainers built")
        if not self.built:
            lines.append("FAILED: no safe trainer was built, so that the run says nothing about them")
        return lines

    def pytest_unconfigure(self) -> None:
        """Takes everything back."""
        self._undo.undo()
        if self in sys.meta_path:
            sys.meta_path.remove(self)


def roots_of(arguments: Sequence[str]) -> list[Path]:
    """The folders that hold what is run.

    Args:
        arguments: Arguments for pytest.

    Returns:
        For each that names something that exists: the folder, or the folder of the file.
    """
    paths = [Path(argument.partition("::")[0]) for argument in arguments if not argument.startswith("-")]
    return [path if path.is_dir() else path.parent for path in paths if path.exists()]


def main(arguments: Sequence[str]) -> int:
    """Runs pytest.

    Args:
        arguments: The path, and further arguments for pytest.

    Returns:
        pytest's exit status; 1 where it would be 0 and no safe trainer was built.
    """
    roots = roots_of(arguments)
    if not roots:
        print(f"usage: python {os.path.relpath(__file__)} PATH [pytest arguments]", file=sys.stderr)
        print("PATH has to exist, and none of these does: " + " ".join(arguments), file=sys.stderr)
        return int(pytest.ExitCode.USAGE_ERROR)
    # Trainers are counted in this process.
    return int(pytest.main(["-p", "no:xdist", *arguments], plugins=[Swap(roots)]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
