"""The versions of TRL and transformers that this release supports, checked when the trainers are imported."""

from importlib.metadata import version

from packaging.version import Version

from .errors import UnsupportedVersionError


SUPPORTED = {"trl": ("0.29", "2"), "transformers": ("4.57", "6")}
"""Package: first supported version, first unsupported version."""


def check_versions(installed: dict[str, str] | None = None) -> None:
    """Refuses an unsupported combination, before anything of TRL is imported.

    Args:
        installed: Version by package; by default those that are installed.

    Raises:
        UnsupportedVersionError: With the range, and the line that installs a supported version.
    """
    installed = installed if installed is not None else {package: version(package) for package in SUPPORTED}
    wrong = [
        f"{package} {installed[package]} is installed; safe-trainers supports {first} <= {package} < {end}. "
        f'Run: pip install "{package}>={first},<{end}"'
        for package, (first, end) in SUPPORTED.items()
        # A pre-release counts as its release: 2.0.dev0 has lost what 2.0 has lost.
        if not Version(first).release <= Version(installed[package]).release < Version(end).release
    ]
    if wrong:
        raise UnsupportedVersionError("\n".join(wrong))
