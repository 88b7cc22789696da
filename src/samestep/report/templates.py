"""The templates of the HTML pages: one file each, no network, no script; all names and texts are escaped."""

from __future__ import annotations

from jinja2 import Environment, PackageLoader, StrictUndefined, Template


def template(name: str) -> Template:
    """Returns the template of a page, a file in this folder."""
    environment = Environment(
        loader=PackageLoader("samestep.report", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name)
