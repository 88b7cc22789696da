"""A stand-in for tyro: --name value of a dataclass's fields."""

import dataclasses
import sys


def cli(kind):
    words = sys.argv[1:]
    given = {name.removeprefix("--").replace("-", "_"): value for name, value in zip(words[::2], words[1::2])}
    kinds = {field.name: type(field.default) for field in dataclasses.fields(kind)}
    return kind(**{name: kinds[name](value) for name, value in given.items()})
