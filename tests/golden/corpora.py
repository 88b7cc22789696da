"""Every corpus that has answers, as cases with names: what is run of each, and what was said of it."""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from threading import Lock

import museum.run
from corpus import FAULTS as TWIN_FAULTS
from corpus import HEALTHY as HEALTHY_TWINS
from corpus.healthy import ranks_of
from corpus.twin import Fault as TwinFault

import odd_jobs
import twins
from against import plant as against
from against.changes import CHANGES, Change
from budget import budget
from fork_servers import fork_servers
from golden.found import (
    TENTH,
    Found,
    at_step,
    drawn,
    found_of_check,
    found_of_failure,
    found_of_one_process,
    found_of_verdict,
)
from mutations import record
from mutations.faults import Fault, causes, users
from mutations.test_divided_models import FAULTS as OF_DIVIDED_MODELS
from mutations.test_divided_models import HEALTHY as DIVIDED_MODELS
from mutations.test_divided_models import SIZE
from planting import Edit, plant_in_files
from ranks import Ranks
from recorder import plant as planted_scripts
from recorder import public
from recorder.public_scripts import CASES as PUBLIC
from recorder.public_scripts.case import Case as PublicScript
from reference.test_one_process import ANSWERS
from reference.test_one_process import JOBS as SEPARABLE
from resume import plant as resume
from resume.faults import FAULTS as RESUME_FAULTS
from samestep.records.files import from_json, read
from samestep.records.findings import CheckResults, DiffResults
from samestep.records.results import CompareResults
from samestep.records.runs import COMMAND, CommandRecord
from user_command import Ended, ended

DEADLINE_IMPORTS = 80


@dataclass(frozen=True)
class Case:
    """name: by which it is drawn and kept. group: of which at least one is drawn. lacks: what it needs to run here."""

    name: str
    group: str
    run: Callable[[], Found]
    lacks: str = ""


@dataclass(frozen=True)
class Corpus:
    """Cases that run under the same servers. ready: starts these for the cases that are asked for. share: is drawn."""

    cases: list[Case]
    ready: Callable[[Sequence[Case]], AbstractContextManager[object]] = lambda cases: fork_servers()
    share: float = TENTH

    def drawn(self) -> set[str]:
        return drawn({case.name: case.group for case in self.cases}, self.share)


def name_of(*words: str) -> str:
    """Returns a name without blanks, so that several of them can be typed in one word list."""
    return re.sub(r"[^\w/=.,+@-]+", "_", "/".join(filter(None, words)))


def found_of(case: str, done: Ended, folder: Path, users: Path | None = None) -> Found:
    """Returns what a command of a script has said. users: the folder of the user's files, if it is another one."""
    folders = [folder, *([users] if users else [])]
    if done.code is not None and done.output.startswith("{"):
        results = json.loads(done.output)
        kind = DiffResults if "first" in results else CheckResults
        return found_of_check(case, done.code, from_json(kind, results), folders)
    files = {path.name for place in folders for path in place.rglob("*.py")}
    records = [read(CommandRecord, path) for path in sorted(folder.rglob(COMMAND))]
    reason = next((record.reason for record in records if record.reason), None)
    return found_of_failure(case, done.code, reason, done.error, files)


def typed(
    case: str, write: Callable[[Path], tuple[Sequence[str], Path]], environment: Mapping[str, str] | None = None
) -> Found:
    """Types a command in a folder of its own. write: fills the folder; returns the words, and where they are typed."""
    with tempfile.TemporaryDirectory(prefix="samestep-golden-") as name:
        folder = Path(name).resolve()
        words, cwd = write(folder)
        done = ended(words, folder, cwd=cwd, limit_s=budget(DEADLINE_IMPORTS), environment=environment)
        return found_of(case, done, folder)


def of_twins() -> Iterator[Case]:
    def write(twin: twins.Twin, folder: Path) -> tuple[Sequence[str], Path]:
        script = twins.planted(twin, folder)
        return twins.words_of(twin, script, folder / "record", ranks_of(twin)), script.parent

    for twin in (*HEALTHY_TWINS, *TWIN_FAULTS):
        faulty = isinstance(twin, TwinFault)
        group = f"twins {twin.questions[0]}" if faulty and twin.questions else f"twins, faulty: {faulty}"
        case = name_of("twins", twin.name)
        yield Case(case, group, partial(typed, case, partial(write, twin)))


def of_planted_scripts() -> Iterator[Case]:
    def write(text: str, folder: Path) -> tuple[Sequence[str], Path]:
        return planted_scripts.words_of(text, folder), folder

    for script in planted_scripts.HEALTHY:
        case, text = name_of("scripts", script), planted_scripts.text_of(script)
        yield Case(case, "scripts", partial(typed, case, partial(write, text)), lacks_library(text))
    for fault in planted_scripts.ALL:
        case = name_of("scripts", fault.script, fault.name)
        text = planted_scripts.text_of(fault.script, fault)
        run = partial(typed, case, partial(write, text))
        yield Case(case, f"scripts {fault.question}", run, lacks_library(text))


def lacks_library(text: str) -> str:
    """Returns which module that a script imports is not installed; '' where all are."""
    absent = [name for name in re.findall(r"^(?:import|from) (\w+)", text, re.M) if find_spec(name) is None]
    return f"{absent[0]} is not installed" if absent else ""


def of_changes() -> Iterator[Case]:
    def write(changed: Change, folder: Path) -> tuple[Sequence[str], Path]:
        return against.words_of(changed, folder / "project"), folder / "project"

    for changed in CHANGES:
        group = f"against {changed.questions[0]}" if changed.questions else "against"
        case = name_of("against", changed.name)
        yield Case(case, group, partial(typed, case, partial(write, changed)))


def of_exhibits() -> Iterator[Case]:
    def run(case: str, exhibit: museum.run.Exhibit, version: str) -> Found:
        with tempfile.TemporaryDirectory(prefix="samestep-golden-") as name:
            folder = Path(name).resolve()
            done = museum.run.ended(exhibit, version, folder)
            if exhibit.command == "verify" and done.stdout.startswith("{"):
                (verdict,) = from_json(CompareResults, json.loads(done.stdout)).engines
                return found_of_verdict(case, done.returncode, verdict)
            return found_of(case, Ended(done.returncode, done.stdout, done.stderr), folder, exhibit.folder)

    for exhibit in museum.run.exhibits():
        for version in ("wrong", "right"):
            case = name_of("museum", exhibit.name, version)
            group = f"museum {version}"
            yield Case(case, group, partial(run, case, exhibit, version), museum.run.lacks(exhibit))


def of_plantings() -> Iterator[Case]:
    def run(case: str, fault: Fault, job: str, size: int) -> Found:
        try:
            code, verdict, error = record.verified(fault, job, size)
        except subprocess.TimeoutExpired:
            return found_of_failure(case, None, None, "", ())
        return found_of_verdict(case, code, verdict) if verdict else found_of_failure(case, code, None, error, ())

    divided = [(fault, fault.jobs[0], SIZE) for fault in (*OF_DIVIDED_MODELS, *DIVIDED_MODELS)]
    for fault, job, size in (*record.plantings([2, 3], [], 1), *divided):
        case = name_of("plantings", fault.name, fault.mesh)
        yield Case(case, f"plantings {kind_of(fault)}", partial(run, case, fault, job, size))


def kind_of(fault: Fault) -> str:
    if fault.mesh:
        return "divided"
    if fault in causes.FAULTS:
        return "causes"
    return "users" if fault in users.FAULTS else Path(fault.file).parts[0]


def of_resumes() -> Corpus:
    """Faults of a resume: proven on ranks that are kept, as no command plays both sides of one."""
    lock, references = Lock(), list[resume.References]()

    def run(case: str, fault: resume.ResumeFault) -> Found:
        with lock:  # one rank plays all references
            row = resume.plant(fault, references[0])
        first = at_step(f"{row['training']}: {row['quantity']}", row["step"]) if "quantity" in row else ""
        return Found(case, row["verdict"], None, first, [" ".join(["cause", *row["ids"]])] if first else [])

    def ready(cases: Sequence[Case]) -> AbstractContextManager[object]:
        stack = ExitStack()
        references.append(resume.References(stack.enter_context(Ranks(1))))
        return stack

    cases = []
    for fault in RESUME_FAULTS:
        case = name_of("resume", fault.name)
        cases.append(Case(case, f"resume {fault.file}", partial(run, case, fault)))
    return Corpus(cases, ready)


def of_one_process() -> Iterator[Case]:
    def run(case: str, job: str) -> Found:
        with tempfile.TemporaryDirectory(prefix="samestep-golden-") as name:
            folder = Path(name).resolve()
            words = ["verify", job, "--engine", "ddp", "--nproc", "2", "--also", "none", "--json"]
            done = ended(
                [*words, "--out", str(folder / "out")],
                folder,
                cwd=folder,
                limit_s=budget(DEADLINE_IMPORTS),
                environment={"PYTHONPATH": record.with_tests()},
            )
            if done.code is None or not done.output.startswith("{"):
                return found_of(case, done, folder)
            return found_of_one_process(case, done.code, from_json(CompareResults, json.loads(done.output)))

    for name, (answer, _) in ANSWERS.items():
        case = name_of("one_process", "separable", name)
        yield Case(case, f"one process {answer}", partial(run, case, f"{SEPARABLE}:{name}"))
    for target, job in odd_jobs.odd_jobs():
        case = name_of("one_process", target.rpartition(":")[2])
        yield Case(case, f"one process {odd_jobs.expected_of(job)[0]}", partial(run, case, target))


def of_public_scripts(checkouts: Path | None) -> Iterator[Corpus]:
    def run(case: str, script: PublicScript, edits: Sequence[Edit]) -> Found:
        def write(folder: Path) -> tuple[Sequence[str], Path]:
            assert checkouts
            public.taken(script, checkouts, folder)
            plant_in_files(folder, edits, script.script)
            return public.words_of(script, folder, folder / "out"), folder / script.cwd

        return typed(case, write, public.environment_of(script))

    for kind in dict.fromkeys((script.before, bool(script.packages)) for script in PUBLIC):
        cases = []
        for script in (script for script in PUBLIC if (script.before, bool(script.packages)) == kind):
            is_here = checkouts and (checkouts / script.repo.replace("/", "+")).exists()
            lacks = "" if is_here else f"needs --checkouts with {script.repo}"
            for name, fault, edits in public.plays(script):
                case = name_of("public", script.name, name or "as it is")
                group = f"public {fault.question}" if fault else "public"
                cases.append(Case(case, group, partial(run, case, script, edits), lacks))
        yield Corpus(cases, lambda cases, kind=kind: public.server(*kind))


def corpora(checkouts: Path | None) -> list[Corpus]:
    """Returns all of them. checkouts: the folder of the public scripts' repositories."""

    def exhibits_ready(cases: Sequence[Case]) -> AbstractContextManager[object]:
        names = {case.name.split("/")[1] for case in cases}
        return museum.run.commands_ready([each for each in museum.run.exhibits() if each.name in names])

    return [
        Corpus([*of_twins(), *of_planted_scripts(), *of_changes(), *of_one_process()]),
        Corpus([*of_exhibits()], exhibits_ready),
        of_resumes(),
        # A planting has its own package, which no server has imported: it takes three times as long as another case.
        Corpus([*of_plantings()], lambda cases: nullcontext(), share=TENTH / 2),
        *of_public_scripts(checkouts),
    ]
