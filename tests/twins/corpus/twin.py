"""What a twin is: a healthy script, or one with a fault that is planted by a change of its text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from planting import with_patches

SCRIPTS = Path(__file__).parents[1] / "scripts"
# What a fault does against the healthy twin: it changes the trained weights or the metric that is printed; two ranks do
# the same work, or it depends on chance; it costs something else; or the training ends by an error, early, or never.
Harm = Literal["weights", "metric", "repeated work", "cost", "ends"]


@dataclass(frozen=True)
class Healthy:
    """A script with the arguments of one variant."""

    script: str
    arguments: str = ""

    @property
    def name(self) -> str:
        return f"{self.script} {self.arguments}".strip()


@dataclass(frozen=True)
class Fault:
    """A fault of a script. old is replaced by new, and stands once.

    kind: the id that a finding of it should have. line: the text of the faulty line, which stands once in the faulty
    script. questions, words: where the finding has no such id, the questions whose answer may tell the fault, and an
    expression that matches a sentence which names it. why: what harm it does.
    """

    script: str
    kind: str
    old: str
    new: str
    line: str
    questions: tuple[str, ...]
    words: str
    why: str
    harm: Harm = "weights"
    arguments: str = ""

    @property
    def name(self) -> str:
        return f"{self.script} {self.arguments}".strip() + f": {self.kind}"


Twin = Healthy | Fault


def file_of(script: str) -> Path:
    """Returns the path of a script below SCRIPTS; it runs in the folder where it lies."""
    return Path(f"{script}.py")


def text_of(twin: Twin) -> str:
    """Returns the script, with the fault if there is one. Raises ValueError where the fault does not apply."""
    text = (SCRIPTS / file_of(twin.script)).read_text()
    return text if isinstance(twin, Healthy) else with_patches(text, twin)


def line_of(fault: Fault) -> int:
    """Returns the number of the faulty line. Raises ValueError where its text does not stand once."""
    numbers = [n for n, line in enumerate(text_of(fault).splitlines(), 1) if line.strip() == fault.line.strip()]
    if len(numbers) != 1:
        raise ValueError(f"'{fault.name}': its line stands {len(numbers)} times: {fault.line}")
    return numbers[0]
