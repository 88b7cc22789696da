"""collectives: checks the values of torch.distributed's collectives on these machines, then measures them."""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from samestep import launch
from samestep.commands.command_options import CollectivesOptions
from samestep.commands.inspected_setup import InspectedSetup, check_devices, inspect_setup
from samestep.commands.machines import detect_launched_rank, is_first
from samestep.commands.needs import room_in
from samestep.commands.results_folder import launch_folder, prepare_on_each, recorded, remove_stale, words_of
from samestep.commands.run import check_options, ranks_in_folder
from samestep.errors import UserError, say
from samestep.launch import Command, rendezvous_address, supervise
from samestep.launch.command import command_for, rank_command
from samestep.launch.outer_launcher import LaunchedRank
from samestep.message import message
from samestep.proof.collective_values import judge_values
from samestep.records.collectives import PLAN, REDUCTIONS, CollectivePlan, CollectiveRank, CollectiveResults
from samestep.records.files import replace_text, write
from samestep.records.record import Record
from samestep.records.redaction import typed_command
from samestep.records.results import write_results
from samestep.records.runs import ResultsIdentity
from samestep.report.collective_page import collective_page
from samestep.report.figures.latency_bandwidth import curves
from samestep.version import __version__
from samestep.world.network import check_master

GROUP = "group"  # the kind of processes that the launchers start
SHOWN_DTYPE, SHOWN_ELEMENTS = "int64", 2
HELD = 2  # messages in a rank's memory: the one that it sends, and the one that it receives


def collectives(options: CollectivesOptions) -> CollectiveResults | None:
    """Checks and measures collectives. Returns the results, which are in the folder too; None on a machine without rank
    0, and on other ranks of an outer launcher."""
    launched = _launch(options)
    if launched is None:
        return None
    inspected, launcher, plan, record, out = launched
    results = _results(options, inspected, launcher, plan, record)
    write_results(results, out)
    replace_text(out / "report.html", collective_page(results))
    say(message("report_written", file=out / "report.html"))
    return results


def shown(options: CollectivesOptions) -> list[CollectiveRank] | None:
    """Calls the collective of --show once. Returns what each rank held; None as `collectives`."""
    with tempfile.TemporaryDirectory(prefix="samestep-") as folder:
        launched = _launch(replace(options, out=folder))
        return None if launched is None else launched[3].ranks[0].collectives


def _launch(options: CollectivesOptions) -> tuple[InspectedSetup, str, CollectivePlan, Record, Path] | None:
    options.check_backend()
    chosen, dtypes, sizes = options.chosen_collectives(), options.chosen_dtypes(), options.measured_sizes()
    setup = options.setup()
    rank = detect_launched_rank(os.environ, replace(setup, nproc=options.nproc))
    inspected = inspect_setup(setup, rank)
    if (rank.size if rank else inspected.nproc * inspected.machines.nnodes) == 1:
        raise UserError("--nproc 1: a collective needs at least two ranks; give --nproc 2 or more")
    launcher = rank.launcher if rank else _launcher(inspected, show=bool(options.show))
    device = inspected.inspection.devices[0]
    if options.backend == "nccl" and device == "cpu":
        raise UserError("--backend nccl needs GPUs, and torch sees none here; leave it out to use gloo")
    _check(inspected, launcher)
    if device == "cpu":
        _check_memory(sizes, rank.local_size if rank else inspected.nproc)
    plan = CollectivePlan(
        out="",
        started_at=time.time(),
        collectives=chosen,
        backend=options.backend or ("nccl" if device != "cpu" else "gloo"),
        dtypes=dtypes,
        reductions=REDUCTIONS,
        sizes=sizes,
        seconds=options.seconds,
    )
    if options.show:
        plan = replace(plan, dtypes=(SHOWN_DTYPE,), reductions=("sum",), groups=False, elements=SHOWN_ELEMENTS)
    out = _folder(inspected, plan, rank)
    folder = launch_folder(out, inspected, rank)
    plan = replace(plan, out=str(folder))
    write(folder / PLAN, plan)
    with recorded(
        out, words_of("collectives", options), writes=rank.rank == 0 if rank else is_first(inspected.machines)
    ):
        record = _run(inspected, launcher, rank, folder)
    if record.ranks[0].rank == 0:
        return inspected, launcher, plan, record, out
    if rank is None:
        say(message("ranks_of_this_machine_have_ended", folder=folder))
    return None


def _launcher(inspected: InspectedSetup, *, show: bool) -> str:
    """Returns the launcher of --launcher, or the default one: for a few small values on a CPU, the fastest to start."""
    named = inspected.setup.launchers
    if not named and show and inspected.machines == launch.Machines() and inspected.inspection.devices[0] == "cpu":
        return launch.FORK
    possible = launch.launchers_for(GROUP)
    launcher = named[0] if named else possible[0]
    if launcher not in (*possible, launch.FORK):
        raise UserError(f"--launcher {launcher} starts no process group; name one of {', '.join(possible)}")
    if why := launch.load(launcher).missing(inspected.machines, os.environ):
        raise UserError(message("launcher_cannot_be_used_here", launcher=launcher, why=why))
    return launcher


def _check(inspected: InspectedSetup, launcher: str) -> None:
    machines = inspected.machines
    check_devices(inspected.nproc, inspected.inspection)
    check_master(machines.master, machines.nnodes)
    rendezvous_address.check_port(machines)
    check_options(machines, launcher)


def _check_memory(sizes: tuple[int, ...], ranks: int) -> None:
    """Raises UserError for messages of `sizes` bytes that the memory of this machine cannot hold for its ranks."""
    needed, memory = HELD * max(sizes, default=0) * ranks, room_in(Path.cwd()).memory
    if needed > memory:
        raise UserError(
            f"--sizes: {ranks} ranks hold {needed / 2**30:.4g} GiB of a message of {max(sizes) / 2**30:.4g} GiB, and "
            f"this machine has {memory / 2**30:.4g} GiB of memory; give smaller sizes"
        )


def _folder(inspected: InspectedSetup, plan: CollectivePlan, rank: LaunchedRank | None) -> Path:
    calls = f"{plan.backend} {' '.join(plan.collectives)}, {' '.join(plan.dtypes)}, {plan.sizes} bytes"
    identity = ResultsIdentity(
        "collectives", "collectives", __version__, inspected.nproc, inspected.machines.nnodes, training=calls
    )
    return prepare_on_each(inspected.setup.out, identity, inspected, rank)


def _command(inspected: InspectedSetup, launcher: str, rank: LaunchedRank | None, folder: Path) -> Command:
    devices, machines = inspected.inspection.devices, inspected.machines
    if rank:
        return rank_command(folder / PLAN, rank, devices, machines)
    return command_for(folder / PLAN, launcher, inspected.nproc, devices, machines)


def _run(inspected: InspectedSetup, launcher: str, rank: LaunchedRank | None, folder: Path) -> Record:
    """Runs the launch and returns its record."""
    remove_stale(folder)
    machines = inspected.machines
    return supervise.run(
        _command(inspected, launcher, rank, folder),
        folder,
        1 if rank else ranks_in_folder(inspected, inspected.size),
        deadline_s=inspected.setup.deadline_s,
        machines=machines,
        stall_s=0,  # a collective that does not end raises after --timeout
    )


def _results(
    options: CollectivesOptions, inspected: InspectedSetup, launcher: str, plan: CollectivePlan, record: Record
) -> CollectiveResults:
    first = record.ranks[0]
    ranks = first.collectives
    checked, wrong, unsupported = judge_values(ranks, plan.backend)
    return CollectiveResults(
        samestep=__version__,
        command=typed_command(),
        started=datetime.fromtimestamp(plan.started_at).isoformat(timespec="seconds"),
        backend=plan.backend,
        device=first.world.device,
        launcher=launcher,
        world_size=first.world.size,
        machines=inspected.machines.nnodes,
        machine=first.machine,
        checked=checked,
        wrong=wrong,
        unsupported=unsupported,
        curves=curves(ranks, plan.dtypes[0]),
        unmeasured=ranks[0].unmeasured,
        failed=failed(ranks[0], plan.dtypes[0]),
    )


def failed(rank: CollectiveRank, dtype: str) -> list[str]:
    """Returns the collectives that the backend has for this dtype, and that could not be measured all the same."""
    possible = {call.case.collective for call in rank.held if call.case.dtype in (dtype, "") and not call.error}
    return sorted(possible & rank.unmeasured.keys())
