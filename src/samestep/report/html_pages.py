"""What the HTML pages are made with: their templates, one file each, and matplotlib.

No network, no script; all names and texts are escaped.
"""

from __future__ import annotations

import os
from importlib import import_module

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from samestep.errors import LONGEST_MESSAGE, printable
from samestep.message import Message, message
from samestep.report.language import language

FILE = "matplotlibrc"


def import_matplotlib() -> None:
    """Imports matplotlib without the settings of the current folder, where its file `matplotlibrc` would come first.

    In a folder that came from elsewhere it could have texts drawn by LaTeX, or be a named pipe, for which the import
    would wait for ever.
    """
    folder = os.open(".", os.O_RDONLY | os.O_CLOEXEC) if os.path.lexists(FILE) else None
    try:
        if folder is not None:
            os.chdir(os.path.dirname(__file__))
        import_module("matplotlib")
    finally:
        if folder is not None:
            os.fchdir(folder)
            os.close(folder)


def _shown(value: object) -> object:
    """Returns a value as the page shows it: of a text, what acts is an escape. Markup is our own."""
    value = str(value) if isinstance(value, Message) else value
    is_text = isinstance(value, str) and not isinstance(value, Markup)
    return printable(value, LONGEST_MESSAGE, lines=True) if is_text else value


def template(name: str) -> Template:
    """Returns the template of a page, a file in this folder."""
    environment = Environment(
        loader=PackageLoader("samestep.report", ""),
        autoescape=True,
        finalize=_shown,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {"message": message, "language": language()}
    return environment.get_template(name)
