"""The options of each command, on the command line and in Python: one dataclass per command, which makes a Setup."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from samestep.commands.machine_options import MachineOptions, MeshOption, Threads
from samestep.commands.options import Names, Options, Typed, names, pairs
from samestep.commands.setup import Resume, Setup, second_size_refused
from samestep.commands.training_options import ScoreOptions, TrainOptions
from samestep.engine import DEFAULT
from samestep.errors import UserError, nearest_name
from samestep.launch import THREADS
from samestep.message import message
from samestep.records.collectives import BACKENDS, COLLECTIVES, DTYPES, find
from samestep.records.inspection import Values
from samestep.world.mesh import Mesh, parse_mesh

PROCESSES, NONE = "processes", "none"
Target = str | Path | Callable[..., Any]

Job = Annotated[
    Target,
    Typed(str, "digits", words="a function that returns a Job, the path of a file, or the name of a built-in job"),
    Argument(metavar="[JOB]", help="A built-in job (digits), file.py:function or package.module:function."),
]
Engines = Annotated[
    Names,
    Typed(str, "", words="the name of an engine, or a list of names"),
    Option("--engines", "--engine", help="Engines, separated by commas; all of them by default."),
]
Engine = Annotated[str, Option("--engine", "--engines", help="The engine that trains.")]
Set = Annotated[
    Values | None,
    Typed(list[str], [], pairs),
    Option("--set", metavar="KEY=VALUE", help="A setting of the job; repeatable."),
]
SetEngine = Annotated[
    Values | None,
    Typed(list[str], [], pairs),
    Option("--set-engine", metavar="KEY=VALUE", help="A setting of the engines that have it, or of one: ENGINE.KEY."),
]
Out = Annotated[
    str | Path | None,
    Typed(Path | None),
    Option(help="Folder for the results; by default a dated one under runs/."),
]
Launchers = Annotated[
    Names,
    Typed(str, "", words="the name of a launcher, or a list of names"),
    Option("--launchers", "--launcher", help="Launchers, separated by commas, or all; by default each engine's first."),
]
Launcher = Annotated[
    str,
    Option("--launcher", "--launchers", help="The launcher that starts the ranks; by default the engine's first."),
]
Device = Annotated[str, Option(help="auto, cpu, cuda, or a list such as cuda:0,cuda:1.")]


@dataclass(frozen=True, kw_only=True)
class LaunchOptions(Options):
    """The options of every command that starts ranks.

    nproc: ranks on each machine. out: the folder for the results. deadline_s: seconds after which a launch is ended.
    stall_s: seconds without progress after which the rank that hangs is named and the launch ended; 0: never.
    """

    nproc: Annotated[
        int | None,
        Option(help="Ranks on each machine (for dataparallel: devices); by default one for each GPU, or 2 on a CPU."),
    ] = None
    out: Out = None
    device: Device = "auto"
    deadline_s: Annotated[
        float | None,
        Option(
            "--deadline",
            help="Seconds after which a launch is ended; each rank's stack is written to its folder.",
            min=1,
        ),
    ] = None
    stall_s: Annotated[
        float | None,
        Option(
            "--stall",
            help="Seconds without progress after which the rank that hangs is named and the launch ended; 0: never. "
            "By default 10 median steps, at least 60.",
            min=0,
        ),
    ] = None
    machines: MachineOptions = MachineOptions()  # noqa: RUF009 - frozen

    def _setup(
        self,
        job: str,
        engines: tuple[str, ...],
        settings: Values | None,
        engine_settings: Values | None,
        launchers: tuple[str, ...],
    ) -> Setup:
        return Setup(
            job=job,
            settings=texts(settings),
            engines=engines,
            engine_settings=texts(engine_settings),
            launchers=launchers,
            nproc=self.nproc,
            device=self.device,
            out=Path(self.out) if self.out else None,
            deadline_s=self.deadline_s,
            stall_s=self.stall_s,
            machines=self.machines,
        )


@dataclass(frozen=True)
class ProofOptions(LaunchOptions):
    """The options of every proof. engines: empty: all of them. steps: of each training of the proof. mesh: how the
    ranks are arranged. quick: compare the first gradient and SGD's steps alone."""

    job: Job = "digits"
    engines: Engines = ()
    _: KW_ONLY
    settings: Set = None
    engine_settings: SetEngine = None
    launchers: Launchers = ()
    mesh: MeshOption = ""
    steps: Annotated[
        int | None,
        Option(help="Optimizer steps of each training of the proof; by default 8, or 4 if a step takes long.", min=4),
    ] = None
    quick: Annotated[
        bool,
        Option("--quick", help="Compare the first gradient and SGD's steps alone; the answer says what is left out."),
    ] = False

    def setup(self, job: str) -> Setup:
        """Returns the setup. job: as workers load it."""
        engines, launchers = names(self.engines, "--engines"), names(self.launchers, "--launchers")
        engines = () if "all" in engines else engines
        setup = self._setup(job, engines, self.settings, self.engine_settings, launchers)
        return replace(setup, steps=self.steps, proves=True, mesh=parse_mesh(self.mesh), quick=self.quick)


@dataclass(frozen=True)
class VerifyOptions(ProofOptions):
    """The options of `samestep verify`.

    resume: interrupt each training of the proof, and continue it in a second launch from its checkpoint, on
    resume_nproc ranks of resume_engine; each of these options asks for it. ranks_as: 'processes', or 'threads' of one
    process. also: another number of ranks that is proven, too; None: a small prime, but with quick or resume none;
    'none'.
    """

    _: KW_ONLY
    ranks_as: Annotated[
        str,
        Option(
            "--as", metavar="processes|threads", help="What the ranks are; 64 threads fit on two cores, or share GPUs."
        ),
    ] = PROCESSES
    also: Annotated[
        int | str | None,
        Typed(str, "", lambda text, _: int(text) if text.isdecimal() else text or None, words="a number, or 'none'"),
        Option(metavar="N|none", help="So many ranks are proven, too; by default 5."),
    ] = None
    resume: Annotated[
        bool, Option("--resume", help="Interrupt each training, and continue it from its checkpoint by another launch.")
    ] = False
    resume_nproc: Annotated[
        int | None, Option(help="Ranks that continue it, on each machine; by default as before.")
    ] = None
    resume_engine: Annotated[str, Option(help="The engine that continues it; by default the one that began it.")] = ""

    def setup(self, job: str) -> Setup:
        """Returns the setup. job: as workers load it."""
        resumes = self.resume or self.resume_nproc is not None or self.resume_engine
        resume = Resume(self.resume_nproc, self.resume_engine) if resumes else None
        setup = replace(super().setup(job), resume=resume, also=self._second_size(bool(resumes)))
        return replace(setup, as_threads=self._as_threads(bool(resumes)))

    def _second_size(self, resumes: bool) -> int | None:
        """Returns Setup.also. Raises UserError for another word than a number and 'none', and for what goes without."""
        if self.also == NONE:
            return 0
        several = self.machines.nnodes not in (None, 1) or self.machines.hosts
        if self.also is None:
            return 0 if self.quick or resumes or several else None
        if isinstance(self.also, str) or self.also == self.nproc:
            is_first = self.also == self.nproc
            raise second_size_refused(self.also, "second_size_is_the_first" if is_first else "second_size_is_no_number")
        if option := next((flag for flag, given in {"--resume": resumes, "--nnodes": several}.items() if given), None):
            raise UserError(message("second_size_does_not_go_with", option=option))
        if self.also == 0:
            raise UserError(message("rank_number_too_small", flag="--also", ranks=0))
        return self.also

    def _as_threads(self, resumes: bool) -> bool:
        """Returns whether the ranks are threads. Raises UserError for another word than the two, and for what threads
        lack."""
        if self.ranks_as not in (PROCESSES, THREADS):
            hint = nearest_name(self.ranks_as, [PROCESSES, THREADS])
            raise UserError(message("option_has_no_such_value", flag="--as", value=self.ranks_as, hint=hint))
        several = self.machines.nnodes not in (None, 1) or self.machines.hosts
        unfit = {"--launcher": self.launchers, "--resume": resumes, "--nnodes": several}
        if self.ranks_as == THREADS and (option := next((flag for flag, given in unfit.items() if given), None)):
            raise UserError(message("threads_do_not_take_option", option=option))
        return self.ranks_as == THREADS


@dataclass(frozen=True)
class CompareOptions(ProofOptions):
    """The options of `samestep compare`. rounds: measured launches of each engine. Of each, warmup_steps are discarded
    and measured_steps count."""

    _: KW_ONLY
    rounds: Annotated[int, Option(help="Measured launches of each engine, interleaved.", min=1)] = 5
    measured_steps: Annotated[int, Option(help="Steps measured in each launch.", min=2)] = 100
    warmup_steps: Annotated[int, Option(help="Warm-up steps before the measured ones.", min=1)] = 20

    def setup(self, job: str) -> Setup:
        """Returns the setup. job: as workers load it."""
        setup = replace(super().setup(job), rounds=self.rounds)
        return replace(setup, measured_steps=self.measured_steps, warmup_steps=self.warmup_steps)


@dataclass(frozen=True)
class EngineOptions(Options):
    """One job on one engine."""

    job: Job = "digits"
    engine: Engine = DEFAULT
    _: KW_ONLY
    settings: Set = None
    engine_settings: SetEngine = None

    def one_engine(self) -> tuple[str, ...]:
        """Returns the engine's name. Raises UserError where there is none, or several."""
        engines = names(self.engine, "--engine")
        if len(engines) != 1 or "all" in engines:
            raise UserError(message("training_has_one_engine", engines=self.engine))
        return engines


@dataclass(frozen=True)
class RunOptions(TrainOptions, EngineOptions, LaunchOptions):
    """The options of `samestep run`."""

    _: KW_ONLY
    launcher: Launcher = ""

    def setup(self, job: str) -> Setup:
        """Returns the setup. job: as workers load it. Raises UserError for several engines or launchers."""
        launcher = one_launcher(self.launcher)
        setup = self._setup(job, self.one_engine(), self.settings, self.engine_settings, launcher)
        return replace(setup, mesh=parse_mesh(self.mesh))


@dataclass(frozen=True)
class SlurmOptions(TrainOptions, EngineOptions):
    """The options of `samestep slurm`."""

    _: KW_ONLY
    out: Out = None
    nodes: Annotated[int, Option(help="The number of machines.", min=1)] = 1
    gpus_per_node: Annotated[int, Option(help="GPUs on each machine, one for each rank; 0: train on CPUs.", min=0)] = 0
    nproc: Annotated[
        int | None, Option(help="Ranks on each machine; by default one for each GPU, or 2 on CPUs.", min=1)
    ] = None
    time: Annotated[str, Option(help="The job's time limit, as Slurm writes it.")] = "1:00:00"
    sbatch: Annotated[
        Sequence[str],
        Typed(list[str], []),
        Option(metavar="OPTION", help="A further option for sbatch, as in --sbatch=--partition=gpu; repeatable."),
    ] = ()
    threads: Threads = None

    def setup(self, job: str) -> Setup:
        """Returns the setup of the training that the batch script starts."""
        mesh = parse_mesh(self.mesh)
        return Setup(
            job=job,
            settings=texts(self.settings),
            engines=self.one_engine(),
            engine_settings=texts(self.engine_settings),
            nproc=self.nproc or self.gpus_per_node or (mesh.size // self.nodes if mesh else 2) or 1,
            mesh=mesh,
            out=Path(self.out) if self.out else None,
            machines=MachineOptions(nnodes=self.nodes, threads=self.threads),
        )


@dataclass(frozen=True)
class EjectOptions(EngineOptions):
    """The options of `samestep eject`."""

    _: KW_ONLY
    nproc: Annotated[
        int | None, Option(help="Ranks in the script's launch line; by default those of --mesh, or 2.", min=1)
    ] = None
    mesh: MeshOption = ""
    to: Annotated[
        str | Path | None,
        Typed(Path | None),
        Option(help="File to write, beside those that it needs; without it the script alone goes to stdout."),
    ] = None


@dataclass(frozen=True)
class EvaluateOptions(ScoreOptions, LaunchOptions):
    """The options of `samestep evaluate`."""

    NOT_TYPED = ("max_restarts",)  # an evaluation is not restarted

    job: Job = "digits"
    _: KW_ONLY
    settings: Set = None
    launcher: Launcher = ""
    mesh: MeshOption = ""

    def setup(self, job: str) -> Setup:
        """Returns the setup. job: as workers load it. Of the mesh only the number of ranks counts: each rank evaluates
        rows of its own with the whole model."""
        mesh = parse_mesh(self.mesh)
        if mesh and self.nproc:
            mesh.check_ranks(self.nproc, self.machines.max_nnodes or 1)
        setup = self._setup(job, (DEFAULT,), self.settings, None, one_launcher(self.launcher))
        return replace(setup, mesh=Mesh(data=mesh.size) if mesh else None)


def one_launcher(given: str) -> tuple[str, ...]:
    """Parses --launcher. Raises UserError for several."""
    launchers = names(given, "--launcher")
    if len(launchers) > 1 or "all" in launchers:
        raise UserError(message("one_launcher_starts_the_ranks", launchers=given))
    return launchers


def texts(given: Values | None) -> dict[str, str]:
    """Returns values as texts, as --set takes them."""
    return {name: str(value) for name, value in (given or {}).items()}


# Steps that `samestep check` records by default, and up to how many it goes on until the second epoch has begun.
STEPS, MOST_STEPS = 8, 40
CHECK_LAUNCHERS = ("torchrun", "fork")


@dataclass(frozen=True, kw_only=True)
class CheckOptions(Options):
    """The options of `samestep check`. nproc: ranks. steps: optimizer steps to record, after which the script is ended.
    replay: whether to replay them in one process. allow_unknown: exit with 0 where nothing is wrong, though a part that
    a proof needs could not be judged. fix: whether to try patches on a copy. module: whether the script is a module's
    name. meant: what its ranks do otherwise on purpose. as_cpu: whether CPUs compute what the script computes on GPUs;
    None: where it finds no GPU. against: a git revision with which the steps are compared, in place of a replay;
    packages, against_nproc, against_command: of the other side. out, deadline_s, stall_s: as of the other commands."""

    nproc: Annotated[int, Option(help="Ranks, all on this machine.", min=1)] = 2
    steps: Annotated[
        int | None,
        Option(
            help=f"Optimizer steps to record; by default {STEPS}, or up to {MOST_STEPS} with a second epoch.",
            min=1,
        ),
    ] = None
    replay: Annotated[
        bool, Option("--replay/--no-replay", help="Replay the steps in one process, and compare; on by default.")
    ] = True
    allow_unknown: Annotated[
        bool, Option("--allow-unknown", help="Exit with 0, not 3, if only a part that a proof needs cannot be judged.")
    ] = False
    fix: Annotated[
        bool,
        Option("--fix", help="Try the patches on a copy of the script, and check it; your files stay."),
    ] = False
    meant: Annotated[
        str,
        Option(
            metavar="local_sgd|own_experts",
            help="What the ranks do apart on purpose; see docs/check.md.",
        ),
    ] = ""
    against: Annotated[
        str | None,
        Option(
            metavar="REV[:SCRIPT]",
            help="Compare the steps with those of a git revision; SCRIPT: its path there.",
        ),
    ] = None
    against_nproc: Annotated[int | None, Option(help="Compare with the steps of so many ranks.", min=1)] = None
    against_command: Annotated[
        str | None,
        Option(
            metavar="'SCRIPT ARGUMENTS'",
            help="Compare with this, in place of what is typed: other arguments, -m MODULE, or a command.",
        ),
    ] = None
    packages: Annotated[
        Sequence[str],
        Typed(list[str], []),
        Option(
            "--with",
            metavar="PACKAGE==VERSION",
            help="Compare with another version of a package, in an environment of its own; repeatable.",
        ),
    ] = ()
    module: Annotated[bool, Option("-m", help="SCRIPT is a module's name, as for python -m.")] = False
    as_cpu: Annotated[
        bool | None,
        Option("--as-cpu/--no-as-cpu", help="Use CPUs for GPUs; by itself where none is."),
    ] = None
    out: Annotated[Path | None, Option(help="Folder for the records; by default a dated one under runs/.")] = None
    launcher: Annotated[str, Option(help="torchrun; or fork, which imports torch once for all ranks (CPU only).")] = (
        CHECK_LAUNCHERS[0]
    )
    deadline_s: Annotated[
        float | None, Option("--deadline", help="Seconds after which the script is ended, recorded or not.", min=1)
    ] = None
    stall_s: Annotated[
        float | None,
        Option("--stall", help="Seconds without progress after which the rank that hangs is named; 0: never.", min=0),
    ] = None

    @property
    def compares(self) -> bool:
        """Whether the steps are compared with those of another side."""
        options = (self.against, self.against_nproc, self.against_command)
        return bool(self.packages) or any(option is not None for option in options)


@dataclass(frozen=True, kw_only=True)
class MonitorOptions(Options):
    """The options of `samestep monitor`. out: the folder for its files. interval: seconds between two samples. stall_s:
    seconds without progress after which a hang is named; 0: never. end_hung: whether the command is ended then. as_cpu:
    whether CPUs compute what the ranks compute on GPUs."""

    out: Annotated[Path | None, Option(help="A new folder for usage.csv; by default a dated one under runs/.")] = None
    as_cpu: Annotated[bool, Option("--as-cpu", help="Use CPUs for the GPUs that the command's ranks name.")] = False
    interval: Annotated[
        float,
        Option(help="Seconds from one sample to the next; more where a sample would take 1 % of a core.", min=0.05),
    ] = 1.0
    stall_s: Annotated[
        float | None,
        Option(
            "--stall",
            help="Seconds without progress after which the rank that hangs is named; 0: never. By default ten steps, "
            "at least 60 s.",
            min=0,
        ),
    ] = None
    end_hung: Annotated[
        bool, Option("--end-hung", help="End the command when it hangs, with exit code 1; else it is left running.")
    ] = False


@dataclass(frozen=True)
class DoctorOptions(Options):
    """The options of `samestep doctor`. job: its file must be the same on all machines; '': not compared. out: the
    folder whose disk is looked at; None: runs/. quick: leaves out the probes that need torch."""

    NOT_TYPED = ("max_restarts", "threads", "interface")  # options of a training alone

    job: Annotated[str, Argument(metavar="[JOB]", help="A job whose file must be the same on all machines.")] = ""
    _: KW_ONLY
    nproc: Annotated[
        int | None, Option(help="Ranks on each machine; by default one for each GPU, or 2 on a CPU.", min=1)
    ] = None
    out: Out = None
    device: Device = "auto"
    launcher: Launcher = ""
    quick: Annotated[
        bool,
        Option("--quick", help="Skip the probes that import torch: its build, engine packages, a trial process group."),
    ] = False
    machines: MachineOptions = MachineOptions()  # noqa: RUF009 - frozen

    def setup(self) -> Setup:
        """Returns the setup of a training with these options."""
        return Setup(
            job=self.job or "digits",
            launchers=one_launcher(self.launcher),
            nproc=self.nproc,
            device=self.device,
            out=Path(self.out) if self.out else None,
            machines=self.machines,
        )


UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "kb": 10**3, "mb": 10**6, "gb": 10**9}
STEP = 4  # the factor from one measured size to the next
SHOWN_RANKS = 3  # whose values --show prints


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
                hint = nearest_name(name, list(DTYPES))
                raise UserError(message("option_has_no_such_value", flag="--dtype", value=name, hint=hint))
        return given or ("float32", *(name for name in DTYPES if name != "float32"))

    def check_backend(self) -> None:
        """Raises UserError for a backend that there is not, and one that the device does not fit."""
        if self.backend and self.backend not in BACKENDS:
            hint = nearest_name(self.backend, list(BACKENDS))
            raise UserError(message("option_has_no_such_value", flag="--backend", value=self.backend, hint=hint))
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
