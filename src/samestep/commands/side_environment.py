"""Where one side of a comparison finds its Python, and the packages that it imports."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from importlib.metadata import distributions
from pathlib import Path
from urllib.parse import unquote, urlparse

from samestep.errors import UserError
from samestep.message import Message, message
from samestep.world.imports import PACKAGE, module_arguments

REQUIREMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(\[[A-Za-z0-9,._-]+\])?==[A-Za-z0-9][A-Za-z0-9.!+_-]*")
INSTALL_S = 1800
LONGEST = 300  # the most characters of pip's output


def check_requirements(requirements: Sequence[str]) -> None:
    """Raises UserError for what is not PACKAGE==VERSION."""
    for requirement in requirements:
        if not REQUIREMENT.fullmatch(requirement):
            raise UserError(message("no_package_with_version", requirement=requirement[:80]))


def versions_of(requirements: Sequence[str]) -> list[Message]:
    """Returns which versions of packages the two sides have, as notes."""
    notes = []
    for requirement in requirements:
        name, _, version = requirement.partition("==")
        try:
            installed = metadata.version(name.partition("[")[0])
            notes.append(message("package_of_both_sides", package=name, first=version, second=installed))
        except metadata.PackageNotFoundError:
            notes.append(message("package_of_one_side", package=name, version=version))
    return notes


def environment_with(requirements: Sequence[str], folder: Path) -> str:
    """Makes an environment with these packages, and with all that this Python has beside them; returns its Python.

    Raises UserError with what pip says where it fails.
    """
    try:
        made = _run([sys.executable, *module_arguments("venv"), "--system-site-packages", str(folder)])
        if made is not None:
            raise UserError(message("environment_not_made", why=made))
        python = str(folder / "bin" / "python")
        # An environment that is made inside of another one sees the packages of the Python below both.
        (places,) = (folder / "lib").glob("python*/site-packages")
        lines = [f"import site; site.addsitedir({entry!r})" for entry in sys.path if entry.endswith("-packages")]
        (places / "samestep_below.pth").write_text("".join(f"{line}\n" for line in lines))
        options = ("--no-input", "--disable-pip-version-check", "--no-cache-dir", "--quiet")
        failed = _run([python, *module_arguments("pip"), "install", *options, "--", *requirements])
    except subprocess.TimeoutExpired:
        failed = f"no end after {INSTALL_S} s"
    if failed is not None:
        raise UserError(message("packages_not_installed", packages=" ".join(requirements), why=failed))
    return python


def _run(command: Sequence[str]) -> str | None:
    """Returns the last line that a command says where it fails; None where it does not."""
    # pip and venv are run in a folder in which no file hides a module of theirs.
    done = subprocess.run(
        command, cwd="/", stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=INSTALL_S
    )
    if done.returncode == 0:
        return None
    lines = [line.strip() for line in f"{done.stdout}\n{done.stderr}".splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines or [f"exit code {done.returncode}"])[-1][:LONGEST]


def paths_of_copy(top: Path, copy: Path) -> list[str]:
    """Returns the folders of a copy that stand for those of `top` from which this Python imports: of PYTHONPATH, and of
    packages that are installed from there (pip install -e)."""
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    # The first entry is the folder of the command, or the working directory.
    found = [Path(entry) for entry in (*given, *sys.path[1:]) if entry]
    for root in _editable_folders():
        found += [root, root / "src"]
    inside = [path.resolve() for path in found if path.is_dir() and path.resolve().is_relative_to(top.resolve())]
    # samestep itself is that of this process on both sides.
    inside = [path for path in inside if not Path(PACKAGE).is_relative_to(path)]
    return [str(copy / path.relative_to(top.resolve())) for path in dict.fromkeys(inside)]


def _editable_folders() -> Iterator[Path]:
    for distribution in distributions():
        with suppress(OSError, ValueError, AttributeError):
            facts = json.loads(distribution.read_text("direct_url.json") or "{}")
            if facts.get("dir_info", {}).get("editable"):
                yield Path(unquote(urlparse(facts["url"]).path))


@contextmanager
def inside(folder: Path, variables: Mapping[str, str]) -> Iterator[None]:
    """Makes a folder the working directory, and sets variables of the environment, during the block."""
    current_folder, before = Path.cwd(), {name: os.environ.get(name) for name in variables}
    os.chdir(folder)
    os.environ |= variables
    try:
        yield
    finally:
        os.chdir(current_folder)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
