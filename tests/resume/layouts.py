"""One training carried through layouts, by real commands: one process, then fsdp over tensor parallel layers on four
ranks, then a pipeline of two stages, then one process again. Is it the training of one process without an interruption?

    python tests/resume/layouts.py [--out FOLDER]

Each link continues the checkpoint of the link before it, takes three steps and writes its own. It is compared with the
checkpoint of the uninterrupted training after as many steps: every weight, average of the weights and state of the
optimizer, the parameter groups' rates and the scheduler. Then the links run once more with each fault in the package.
Exit 0 where nothing differs by more than 1e-12, and every fault is caught at its link.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from command import samestep
from mutations.plant import patched
from planting import FileFault
from samestep.launch.fork_client import SOCKETS
from samestep.rank.checkpoint_files import Saved, Stored

JOB = f"{Path(__file__).parent}/jobs_layouts.py:carried"
LINKS = {
    "single": ("--engine", "single"),
    "fsdp shard=2,tensor=2": ("--engine", "fsdp", "--mesh", "shard=2,tensor=2"),
    "pipeline stage=2": ("--engine", "pipeline", "--mesh", "stage=2"),
    "single again": ("--engine", "single"),
}
STEPS = 3
BOUND = 1e-12
DEADLINE_IMPORTS = 30  # of torch, for one command


@dataclass(frozen=True)
class LayoutFault(FileFault):
    """A fault of a checkpoint that changes its layout. part: of the state, which differs first; link: where it does."""

    link: str
    part: str


STATE, FILES = "rank/checkpoint_state.py", "rank/checkpoint_files.py"
FAULTS = [
    LayoutFault(
        "a part of a split weight gets the optimizer's state of the first part",
        STATE,
        "block = stored_block(saved, value, parameter, order)",
        "block = saved.tensor(value, (0,) * len(offset), shape)",
        "fsdp shard=2,tensor=2",
        "exp_avg",
    ),
    LayoutFault(
        "a part of a split weight gets the average of the first part",
        STATE,
        'average.copy_(stored_block(saved, saved.state["ema"][name], parameter, orders.get(name)))',
        "shape, offset = place_of(parameter); "
        'average.copy_(saved.tensor(saved.state["ema"][name], (0,) * len(offset), shape))',
        "fsdp shard=2,tensor=2",
        "averages",
    ),
    LayoutFault(
        "the optimizer's state of whole weights begins anew",
        STATE,
        "            if state is not None and not parameter.is_meta:",
        "            if state is not None and not parameter.is_meta and is_shard(parameter):",
        "pipeline stage=2",
        "exp_avg",
    ),
]


@dataclass(frozen=True)
class Link:
    """A link of the chain: what continued the training up to which step, and how far its checkpoint is from that of the
    uninterrupted training.

    differences: part of the state -> the largest difference of any of its numbers. at: part -> where that is. trained:
    part -> the largest change of any of its numbers since the link before. failed: what the command said otherwise.
    """

    name: str
    command: str
    step: int
    differences: Mapping[str, float]
    at: Mapping[str, str]
    trained: Mapping[str, float]
    failed: str = ""

    @property
    def differing(self) -> list[str]:
        """The parts of the state that differ."""
        return [part for part, difference in self.differences.items() if not difference <= BOUND]

    @property
    def is_same(self) -> bool:
        return not self.failed and not self.differing


def uninterrupted(folder: Path) -> Path:
    """Trains all steps in one process. Returns the folder of its results, which has the checkpoint of each link."""
    ended = samestep(*command(LINKS["single"], len(LINKS) * STEPS), "--keep", str(len(LINKS)), out=folder / "whole")
    assert ended.returncode == 0, ended.stderr
    return folder / "whole"


def chain(folder: Path, whole: Path, source: Path | None = None) -> list[Link]:
    """Trains through all links, up to the first that differs. source: where their package is; None: this one."""
    # Not the tests' fork servers, which have imported the package as it is: this folder has none.
    environment = {"PYTHONPATH": str(source), SOCKETS: str(source)} if source else {}
    links: list[Link] = []
    for number, (name, engine) in enumerate(LINKS.items(), 1):
        step, before, out = number * STEPS, folder / f"link{number - 1}", folder / f"link{number}"
        words = [*command(engine, step), *(["--resume", str(before)] if links else [])]
        ended = samestep(*words, out=out, env=environment, imports=DEADLINE_IMPORTS)
        typed = shlex.join(["samestep", *words, "--out", str(out)])
        typed = typed.replace(f"{folder}/", "").replace(JOB, "tests/resume/jobs_layouts.py:carried")
        if ended.returncode:
            return [*links, Link(name, typed, step, {}, {}, {}, ended.stderr.strip()[-2000:])]
        numbers = state_of(out, step)
        trained = distances(numbers, state_of(before, step - STEPS))[0] if links else {}
        links.append(Link(name, typed, step, *distances(numbers, state_of(whole, step)), trained))
        if not links[-1].is_same:
            break
    return links


def command(engine: Sequence[str], steps: int) -> list[str]:
    return ["run", JOB, *engine, "--set", f"steps={steps}", "--checkpoint-every", f"{STEPS}steps"]


def planted(fault: LayoutFault, whole: Path) -> list[Link]:
    """Trains through the links with a fault in their package."""
    with tempfile.TemporaryDirectory(prefix="samestep-layouts-") as folder:
        return chain(Path(folder), whole, patched(fault, Path(folder) / "planted"))


def state_of(run: Path, step: int) -> dict[str, dict[str, torch.Tensor]]:
    """Returns what a checkpoint holds: part -> name -> its numbers, in float64."""
    saved = Saved(run / "checkpoints" / f"step-{step}")
    state = saved.state
    parts = {"weights": state["model"], "averages": state["ema"], "scheduler": state["scheduler"]}
    parts |= {"groups": state["groups"]}
    for name, values in state["optimizer"].items():
        for key, value in values.items():
            parts.setdefault(key, {})[name] = value
    return {part: dict(_numbers(saved, part, tree)) for part, tree in parts.items()}


def _numbers(saved: Saved, name: str, tree: Any) -> list[tuple[str, torch.Tensor]]:
    if isinstance(tree, Stored):
        return [(name, saved.tensor(tree).double())]
    if isinstance(tree, dict | list | tuple):
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        return [pair for key, value in items for pair in _numbers(saved, f"{name}.{key}", value)]
    return [(name, torch.tensor(float(tree), dtype=torch.float64))] if isinstance(tree, int | float) else []


def distances(
    numbers: Mapping[str, Mapping[str, torch.Tensor]], expected: Mapping[str, Mapping[str, torch.Tensor]]
) -> tuple[dict[str, float], dict[str, str]]:
    """Returns part -> the largest difference of its numbers, and where that is. What one of both lacks is infinite."""
    differences, at = {}, {}
    for part in sorted(expected.keys() | numbers.keys()):
        here, there = numbers.get(part, {}), expected.get(part, {})
        of_part = {
            name: float((here[name] - there[name]).abs().max())
            if name in here and name in there and here[name].shape == there[name].shape
            else float("inf")
            for name in sorted(here.keys() | there.keys())
        }
        if of_part:
            at[part] = max(of_part, key=lambda name: of_part[name])
            differences[part] = of_part[at[part]]
    return differences, at


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="keep the differences in this folder, in layouts.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="samestep-layouts-") as folder:
        whole = uninterrupted(Path(folder))
        links = chain(Path(folder), whole)
        for link in links:
            most = max(link.differences.values(), default=float("nan"))
            print(f"{link.name}, up to step {link.step}: {link.failed or f'the largest difference is {most:.2g}'}")
        rows = {fault.name: planted(fault, whole) for fault in FAULTS}
    healthy, caught = len(links) == len(LINKS) and all(link.is_same for link in links), []
    for fault in FAULTS:
        last = rows[fault.name][-1]
        caught.append(last.name == fault.link and fault.part in last.differing)
        print(f"{fault.name}: {last.name}: {last.failed or last.differing}")
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        found = {"healthy": links} | rows
        content = {name: [asdict(link) for link in chained] for name, chained in found.items()}
        (options.out / "layouts.json").write_text(json.dumps(content, indent=1) + "\n")
    return 0 if healthy and all(caught) else 1


if __name__ == "__main__":
    raise SystemExit(main())
