"""The packages that engines need: those installed must import, and be of a version that samestep works with."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from samestep.world.checks import Finding, LaunchInfo, fail, ok, on_each, warn
from samestep.world.checks.versions import version_of

GROUP = "environment"
IN_WORKER = True
ENGINES = Path(__file__).parents[2] / "engines"


@dataclass(frozen=True)
class Package:
    """An installed package that an engine needs.

    needed: the versions that samestep's extra asks for, as in '>=1.0'. fits: whether `version` is one. error: why it
    does not import; '' where it does.
    """

    name: str
    version: str
    needed: str
    fits: bool
    error: str


@dataclass(frozen=True)
class Facts:
    """The packages of the engines, on one machine. packages: those that are installed."""

    packages: tuple[Package, ...]


def probe(info: LaunchInfo) -> Facts:
    return Facts(tuple(_package(name) for name in needs(ENGINES) if version_of(name)))


def needs(engines: Path) -> list[str]:
    """Returns what the NEEDS of the engines in a folder name, sorted, without importing them: that imports torch."""
    packages: set[str] = set()
    for file in engines.glob("*.py"):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            if any(isinstance(target, ast.Name) and target.id == "NEEDS" for target in targets):
                packages |= set(ast.literal_eval(node.value))  # type: ignore[attr-defined]
    return sorted(packages)


def _package(name: str) -> Package:
    needed, fits = _needed(name), True
    if needed:
        from packaging.specifiers import SpecifierSet

        fits = SpecifierSet(needed).contains(version_of(name), prereleases=True)
    error = ""
    try:
        importlib.import_module(name)
    except (Exception, SystemExit) as raised:
        words = (str(raised).strip().splitlines() or [""])[0]
        error = f"{type(raised).__name__}: {words}"[:300]
    return Package(name, version_of(name), needed, fits, error)


def _needed(name: str) -> str:
    """Returns the versions of a package that samestep's extras ask for."""
    try:
        entries = requires("samestep") or []
    except PackageNotFoundError:
        return ""
    for entry in entries:
        if (match := re.match(rf"{name}\s*\(?([<>=!~][^;)]*)", entry)) and "extra ==" in entry:
            return match[1].strip()
    return ""


def judge(facts: Mapping[str, Facts]) -> list[Finding]:
    return on_each(facts, _judge)


def _judge(seen: Facts) -> list[Finding]:
    findings = []
    for each in seen.packages:
        fix = f"pip install --upgrade '{each.name}{each.needed}'"
        if each.error:
            findings += fail(f"{each.name} {each.version} is installed and does not import: {each.error}", fix)
        elif not each.fits:
            findings += warn(f"{each.name} is {each.version}, and samestep needs {each.needed}", fix)
    named = ", ".join(f"{each.name} {each.version}" for each in seen.packages)
    return findings or ok(f"these import: {named}" if named else "no engine's package is installed besides torch")
