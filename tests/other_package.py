"""A package of somebody else's, installed as pip does it, that brings samestep something by an entry point."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from budget import budget

SETUP = """
from setuptools import setup
setup(name="samestep-tiny", version="1.0", py_modules={modules}, entry_points={{{group!r}: {points}}})
"""


def installed(folder: Path, group: str, modules: Mapping[str, str], points: Mapping[str, str]) -> str:
    """The PYTHONPATH that finds it. modules: their texts, by name. points: the module of each name in `group`."""
    package, target = folder / "package", folder / "installed"
    package.mkdir()
    for name, text in modules.items():
        (package / f"{name}.py").write_text(text)
    lines = [f"{name} = {module}" for name, module in points.items()]
    (package / "setup.py").write_text(SETUP.format(modules=[*modules], group=group, points=lines))
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", str(target)]
    line = [sys.executable, "-m", "pip", "install", *options, str(package)]
    subprocess.run(line, check=True, timeout=budget())
    return os.pathsep.join([str(target), str(Path(__file__).parents[1] / "src")])
