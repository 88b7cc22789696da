"""Starts the launches of a proof, judges their records, and has the reference tell what explains a difference."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from samestep.commands import other_machines
from samestep.commands.axis_trials import SECONDS_OF_ONE, with_origin
from samestep.commands.engine_rows import Row
from samestep.commands.inspected_setup import InspectedSetup
from samestep.commands.launch_ahead import ShowPhase
from samestep.commands.progress import TimeLeft
from samestep.errors import TrainingFailed, UserError
from samestep.launch import THREADS, Machines, supervise
from samestep.launch.command import command_for, shared_devices
from samestep.proof.hypotheses import with_tried_cause
from samestep.proof.judge import judge_by_draws
from samestep.proof.trace import Expectation
from samestep.records.files import read, write
from samestep.records.inspection import EngineFacts
from samestep.records.launch_files import OF_A_LAUNCH
from samestep.records.plan import LayoutPlan, Plan, ReferencePlan
from samestep.records.record import Progress, Record
from samestep.records.results import Verdict
from samestep.world.regular_files import fresh_folder, remove_file

VERDICT = "verdict.json"  # in the folder of a launch that is proven


@dataclass(frozen=True)
class ProofLaunches:
    """The launches of a command, with their records in its folder. show_phase: shows what a launch does."""

    inspected: InspectedSetup
    folder: Path
    show_phase: ShowPhase

    def play(self, name: str, layouts: tuple[LayoutPlan, ...]) -> Record:
        """Has the reference play layouts in one process. Returns its record, in the folder `name`."""
        folder, setup, proof = self.folder / name, self.inspected.setup, self.inspected.job.proof
        identity = (str(folder), time.time(), setup.job, setup.settings)
        plan = ReferencePlan(
            *identity,
            layouts=layouts,
            steps=proof.steps,
            replicas=self.inspected.size,
            rows=proof.rows,
            extremes=proof.extremes,
            noise_runs=1 if proof.costly or setup.quick else 2,
            threads=setup.machines.threads or (0 if proof.costly else 1),
        )
        return self.play_plan(plan)

    def play_plan(self, plan: ReferencePlan) -> Record:
        """Has the reference do what a plan says, in one process."""
        return self.start("process", None, plan)

    def start(self, launcher: str, facts: EngineFacts | None, plan: Plan | ReferencePlan) -> Record:
        """Runs one launch, unless its record is complete already. Returns the record.

        facts: of the engine; None: of the reference, which is one process.
        """
        inspected, root = self.inspected, self.folder
        folder, size, devices = Path(plan.out), 1, inspected.inspection.devices
        if facts:
            size, devices = facts.processes, facts.devices
        if Record(folder).complete(size) and trains_the_same(folder, plan):
            return Record(folder)
        fresh_folder(root, folder, OF_A_LAUNCH)
        write(folder / "plan.json", plan)
        is_reference = isinstance(plan, ReferencePlan)
        machines = Machines() if launcher == "process" else inspected.machines  # one process needs one machine
        nproc = size // machines.nnodes
        flags: tuple[str, ...] = ("--reference",) if is_reference else ()
        as_threads = launcher == THREADS
        if as_threads:
            launcher, flags, devices = "process", ("--threads", str(size)), shared_devices(devices, size)
        command = command_for(folder / "plan.json", launcher, nproc, devices, machines, flags)
        if is_reference and devices[0] == "cpu":
            command = replace(command, fork="reference")
        elif as_threads and devices[0] == "cpu":
            command = replace(command, fork="ranks")
        if facts:
            command = replace(command, preloads=facts.preloads)
        if machines.nnodes > 1 and not machines.single_launch:
            relative = str(folder.relative_to(root))
            other_machines.publish(
                inspected, root, other_machines.Launch(relative, launcher, nproc, size, devices, time.time())
            )

        left = TimeLeft()

        def watch(progress: Progress) -> None:
            done = progress.done
            time_left = left.after(done, progress.steps, time.monotonic()) if is_reference and done is not None else ""
            self.show_phase(progress.activity + (f", {time_left} left" if time_left else ""))
            if inspected.machines.nnodes > 1:
                other_machines.publish(inspected, root)

        return supervise.run(
            command,
            folder,
            size,
            deadline_s=inspected.setup.deadline_s,
            stall_s=inspected.setup.stall_s,
            watch=watch,
            machines=machines,
            samples_usage=bool(inspected.setup.rounds) and not is_reference,
            as_threads=as_threads,
        )

    def judged(self, reference: Record, judge_by: Callable[[Record], Verdict], folders: Sequence[Path]) -> Verdict:
        """Returns the verdict on the launch in the first of `folders`, or the one that was given before.

        Deletes the weights of launches that are proven, which have served their purpose.
        reference, judge_by: as of judge_by_draws.
        """
        path = folders[0] / VERDICT
        if path.exists():
            return read(Verdict, path)
        try:
            verdict = judge_by_draws(reference, judge_by, self.play_plan)
        except (UserError, TrainingFailed):  # there are no more draws, and the difference stands
            verdict = judge_by(reference)
        if verdict.proven:
            write(path, verdict)
            for weights in (file for folder in folders for file in folder.glob("rank*.npz")):
                remove_file(weights)
        return verdict

    def explained(self, verdict: Verdict, expectations: Mapping[str, Expectation | None], record: Record) -> Verdict:
        """Returns a verdict with the cause of its difference, which the reference tries in one more process.

        expectations: as of with_tried_cause.
        """
        try:
            return with_tried_cause(verdict, expectations, record, f"{record.folder}-causes", self.play_plan)
        except (UserError, TrainingFailed):  # the difference stands, with what its figures alone say
            return verdict

    def with_origin(self, row: Row, plan: Plan) -> Verdict:
        """Returns a row's verdict with the axes of its mesh along which it is wrong, found by more of its launches."""
        assert row.verdict
        setup = self.inspected.setup
        bounded = replace(setup, deadline_s=min(setup.deadline_s or SECONDS_OF_ONE, SECONDS_OF_ONE))
        launches = replace(self, inspected=replace(self.inspected, setup=bounded))

        def start(part: Plan | ReferencePlan, facts: EngineFacts | None) -> Record:
            return launches.start(row.launcher if facts else "process", facts, part)

        return with_origin(self.inspected, row.verdict, plan, start)


def trains_the_same(folder: Path, plan: Plan | ReferencePlan) -> bool:
    """Returns whether the launch whose record lies in `folder` has trained what `plan` asks for: one that was launched
    ahead of an interrupted reference may have had another learning rate."""
    return isinstance(plan, ReferencePlan) or read(Plan, folder / "plan.json").trainings == plan.trainings
