"""The options of `samestep collectives`, and how sizes are written."""

from __future__ import annotations

import re
from dataclasses import KW_ONLY, dataclass, replace
from typing import Annotated

from typer import Option

from samestep.commands.command_options import Launcher, LaunchOptions, one_launcher
from samestep.commands.options import Names, Typed, names
from samestep.commands.setup import Setup
from samestep.errors import UserError, nearest
from samestep.records.collective_table import BACKENDS, COLLECTIVES, DTYPES, find

UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "kb": 10**3, "mb": 10**6, "gb": 10**9}
STEP = 4  # from one measured size to the next
SHOWN_RANKS = 3  # of --show


@dataclass(frozen=True)
class CollectivesOptions(LaunchOptions):
    """The options of `samestep collectives`.

    op: collectives; none: all. sizes: of the measured messages, as FIRST:LAST or a list; 0: none. dtype: those that are
    checked, the first one is measured; none: all, and float32. backend: of torch.distributed. show: the collective
    whose values are printed. seconds: of the measurement of one size.
    """

    NOT_TYPED = ("max_restarts", "stall_s")  # nothing is restarted; a collective that hangs raises after --timeout

    _: KW_ONLY
    op: Annotated[
        Names,
        Typed(str, "", names, words="the name of a collective, or a list of names"),
        Option("--op", "--ops", help="Collectives, separated by commas; all of them by default."),
    ] = ()
    show: Annotated[
        str, Option(metavar="OP", help="Print what each rank holds before and after one collective, and its code.")
    ] = ""
    sizes: Annotated[
        str, Option(help="Message sizes: FIRST:LAST in steps of 4, or a list such as 4KiB,1MiB; 0: check values alone.")
    ] = "1KiB:16MiB"
    dtype: Annotated[
        Names,
        Typed(str, "", names, words="the name of a dtype, or a list of names"),
        Option("--dtype", "--dtypes", help="Dtypes to check, and to measure the first one; all, and float32."),
    ] = ()
    backend: Annotated[str, Option(help="gloo, nccl or mpi; by default nccl on GPUs, gloo on a CPU.")] = ""
    seconds: Annotated[float, Option(help="Seconds for each collective and size.", min=0)] = 0.25
    launcher: Launcher = ""

    def setup(self) -> Setup:
        """Returns the setup of the launch. Raises UserError for several launchers."""
        launchers = one_launcher(self.launcher)
        setup = self._setup("", (), None, None, launchers)
        if self.backend in ("gloo", "mpi") and self.device == "auto":
            setup = replace(setup, device="cpu")
        return replace(setup, nproc=SHOWN_RANKS) if self.show and self.is_alone and not launchers else setup

    @property
    def is_alone(self) -> bool:
        """Whether neither ranks nor machines are named."""
        return self.nproc is None and self.machines.nnodes is None and not self.machines.hosts

    def chosen_collectives(self) -> tuple[str, ...]:
        """Returns the names of --show or --op. Raises UserError for a name that is none."""
        given = (self.show,) if self.show else names(self.op, "--op")
        return tuple(find(name).name for name in given) or tuple(COLLECTIVES)

    def chosen_dtypes(self) -> tuple[str, ...]:
        """Returns the dtypes to check, the one to measure first. Raises UserError for a name that is none."""
        given = names(self.dtype, "--dtype")
        for name in given:
            if name not in DTYPES:
                raise UserError(f"--dtype {name}: {nearest(name, list(DTYPES))}")
        return given or ("float32", *(name for name in DTYPES if name != "float32"))

    def check_backend(self) -> None:
        """Raises UserError for a backend that there is not, and one that the device does not fit."""
        if self.backend and self.backend not in BACKENDS:
            raise UserError(f"--backend {self.backend}: {nearest(self.backend, list(BACKENDS))}")
        if self.backend in ("gloo", "mpi") and self.device not in ("auto", "cpu"):
            raise UserError(f"--backend {self.backend} is tried with tensors on the CPU; leave --device out")

    def measured_sizes(self) -> tuple[int, ...]:
        """Returns the sizes of --sizes in bytes, ascending. Raises UserError for a text that is none."""
        if self.show or self.sizes.strip() == "0":
            return ()
        first, colon, last = self.sizes.partition(":")
        if not colon:
            return tuple(sorted({size_of(text) for text in names(self.sizes, "--sizes")}))
        size, end = size_of(first), size_of(last)
        if size > end:
            raise UserError(f"--sizes {self.sizes}: the first is larger than the last; write the small one first")
        sizes = []
        while size < end:
            sizes.append(size)
            size *= STEP
        return (*sizes, end)


def size_of(text: str) -> int:
    """Returns the bytes of '64', '1KiB' or '2MB'. Raises UserError for other texts."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    size = round(float(match[1]) * UNITS[match[2]]) if match and match[2] in UNITS else 0
    if size < 1:
        raise UserError(f"--sizes {text!r}: write a size as in 64, 1KiB or 16MiB, and a range as in 1KiB:16MiB")
    return size
