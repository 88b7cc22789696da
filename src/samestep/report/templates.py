"""The templates of the HTML pages: one file each, no network, no script; all names and texts are escaped."""

from __future__ import annotations

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from samestep.errors import LONGEST_MESSAGE, printable
from samestep.message import Message


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
    return environment.get_template(name)
