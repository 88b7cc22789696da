"""eject(job, engine): one stand-alone script without samestep, joined from the files that are proven.

The job, the engine's loop and what both stand on are the files' own lines; reach.py says which of them this job on this
engine never reaches, and prune.py leaves these out. The run around them is runtime/. A test runs every script where
samestep cannot be imported, and finds samestep's own weights.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from samestep import engine as engines
from samestep.errors import UserError
from samestep.job import Job
from samestep.message import message
from samestep.tasks.eject import runtime
from samestep.tasks.eject.divided import Divided
from samestep.tasks.eject.join import Joined, Neighbours, Place, settled
from samestep.tasks.eject.literals import literal
from samestep.tasks.eject.prune import pruned
from samestep.tasks.eject.reach import CLOSURE, Reach, reach_of, settable, special_parts, unused_members
from samestep.tasks.eject.source import Import, Imports, Source, block, is_ours, origin
from samestep.tasks.inspect.load import GENERAL, build_by, find, general_settings, home, values_of
from samestep.world import World
from samestep.world.mesh import Mesh

RUNTIME = runtime.__name__
TRAINED = {"ema", "carry_state", "gather_outputs", CLOSURE}  # special parts that whole_run.py trains
# Engines with a checkpoint of another kind than one state dict of the model and one of the optimizer.
NOT_SAVED = {"deepspeed"}
CONSOLIDATED = {"zero", "fairscale"}
SHARDED = {("fsdp", ""), ("fabric", "model_parallel"), ("lightning", "model_parallel")}  # and their strategies
ON_MESHES = {"tensor", "fsdp", "pipeline"}  # those of which a script knows how the ranks divide the model
HEAD = '''"""{title}: one script that does not need samestep, which wrote it. Start it with

    {launch}

It trains, saves weights.pt and evaluates them, each row once.{saves}{beside}
"""
'''
# The positions of a script's rows are not divided, and the rows of a weight only by a plan.
WHOLE_SEQUENCES = {
    "split_layers(model, job, ranks['tensor'], sequence_parallel=False)": 'split_layers(model, job, ranks["tensor"])'
}
# Only stages of a pipeline need several micro-batches whatever the job says.
OF_ROWS = "math.ceil(math.ceil(self.job.global_batch / self.world_size) / self.job.micro_batch)"
ANY_MICRO_BATCHES = {f"max(FEWEST, {OF_ROWS})": OF_ROWS, "FEWEST": "1"}
WHOLE_ROWS = {
    "in_order_of_model(model, get_model_state_dict(model, options=whole))": "get_model_state_dict(model, options=whole)"
}
FUTURE = "from __future__ import annotations\n"
OTHER_JOB = "these options make a job with other parts: samestep eject --set … writes its script"
UNBUILT = "\nIt has all that a job may need: where it was written, the job's data were not there."
SAVES = " It continues from the checkpoint of an epoch."


def eject(
    target: str,
    texts: Mapping[str, str],
    name: str,
    settings: Mapping[str, Any],
    size: int,
    file: str,
    mesh: Mesh | None = None,
) -> str:
    """Returns the script that trains the job `target` (with --set's `texts`) on an engine.

    size: the ranks of its launch line. mesh: how they are arranged; None: each is a replica. The job is built, to see
    what its script needs; where its data are not here, the script has more. Raises UserError for a job that cannot be
    built for another reason, or that no script can hold.
    """
    _check_head(file)
    _check_head(target.rpartition("/")[2])
    function, engine = find(target), engines.load(name)
    launch = _launch_lines()
    if engine.needs.processes not in launch:
        raise UserError(
            f"{name} needs processes of the kind '{engine.needs.processes}', and scripts are written for "
            f"{', '.join(launch)} alone; choose another engine"
        )
    if engine.divides_model and name not in ON_MESHES:
        raise UserError(f"no script is written for {name}, whose ranks divide the model; choose another engine")
    axes = () if engine.needs.processes == "one" else engine.axes
    if unfit := [axis for axis in (mesh.sizes if mesh else ()) if axis not in axes]:
        raise UserError(message("engine_does_not_take_axis", engine=name, axis=unfit[0], axes=axes))
    mesh = mesh if name in ON_MESHES else None  # else all ranks are along `data`, as without one
    for setting in ("sequence_parallel", "loss_parallel", "offload"):
        if settings.get(setting):
            raise UserError(f"a script of {name} has no {setting}; leave it out")
    given = _given(function, texts, target)
    module, called = home(target, function)
    world = World(size=mesh.size, mesh=mesh) if mesh else World(size=2, devices=("cuda:0", "cuda:1"))
    layout = engine.layout(world, **settings)
    # How ranks divide the model is tried on the job; else a script is written without it.
    job = (
        build_by(function, target, texts)
        if mesh and (mesh.tensor > 1 or name == "pipeline")
        else _built(function, target, texts, is_own=not is_ours(module.__name__))
    )
    parts = _parts(module, job, given[1], size)
    _check_parts(parts or set(), name, layout, engine.needs.processes, mesh)
    if layout.lone_batchnorm and (given[1].get("sync_batchnorm") or given[0].get("sync_batchnorm")):
        raise UserError(f"SyncBatchNorm does not find the other ranks of {name}; leave sync_batchnorm out")
    near = Neighbours(module)
    inlined = {name: Source(importlib.import_module(name), True, is_ours) for name in near.own or {module.__name__}}
    divided = Divided.by_trial(job, mesh, engine, settings) if mesh else None
    # The ranks divide the model of this job, and may not divide that of another one.
    options = {} if mesh else settable(function, given[0])
    reach = reach_of(
        job, inlined, given[1], parts=parts, layout=layout, kind=engine.needs.processes, has_options=bool(options)
    )
    plan = ScriptPlan(engine, name, settings, reach, is_whole=parts != set(), divided=divided)
    joined = _joined([(module.__name__, called), *plan.roots()], module, near, plan)
    last = _last_lines(called, given, options, plan)
    imports = _imports(joined) | {"annotations": Import("__future__", "annotations", "annotations")}
    imports |= {"argparse": Import("argparse", "", "argparse")} if "argparse" in last else {}
    imports |= {"Path": Import("pathlib", "Path", "Path")} if "Path(" in last else {}
    imports |= {"replace": Import("dataclasses", "replace", "replace")} if given[1] else {}
    beside = near.files()
    head = HEAD.format(
        title=f"{target.rpartition('/')[2]} on {name}",
        launch=launch[engine.needs.processes].format(size=size, file=shlex.quote(file)),
        saves=(SAVES if plan.saves else "") + (UNBUILT if parts is None else ""),
        beside=f" It needs {' and '.join(beside)} beside it." if beside else "",
    )
    first, *sections = _sections(joined)
    script = "\n\n\n".join([f"{head}\n{block(imports)}\n\n{first}", *sections, last])
    _check_file(file, script)
    return script


class ScriptPlan:
    """Which of runtime/ a script has, and what is known of it. is_whole: its steps take more than a plain one's.
    divided: how its ranks divide the model; None: each has all of it."""

    def __init__(
        self,
        engine: engines.Engine,
        name: str,
        settings: Mapping[str, Any],
        reach: Reach,
        *,
        is_whole: bool,
        divided: Divided | None,
    ) -> None:
        self.divided = divided
        self.module = sys.modules[engine.train.__module__].__name__
        self.kind, self.reach = engine.needs.processes, reach
        self.close = "close" if engine.close else ""
        self.saves = not is_whole and name not in NOT_SAVED and divided is None
        is_sharded = (name, str(settings.get("strategy", ""))) in SHARDED
        self.run: Place = (f"{RUNTIME}.plain_run", "Run")
        if is_whole:
            self.run = (f"{RUNTIME}.whole_run", "WholeRun")
        texts = {setting: literal(value) for setting, value in settings.items()}
        simple = all(type(value) in (bool, int, float, str, type(None)) for value in settings.values())
        start = {"close": self.close or "None", "run": self.run[1]} | ({} if self.saves else {"checkpoint": '""'})
        self.settings = {} if simple else _unlike_the_defaults(engine, settings)
        values: dict[str, Any] = {"SAVES": self.saves, "CONSOLIDATES": name in CONSOLIDATED, "SHARDED": is_sharded}
        values |= divided.values if divided else {"world.mesh": None}
        values["FEWEST > 1"] = bool(divided and divided.stages)
        values |= dict(reach.values)
        one_each = {"world.rank // SHARING": "world.rank", "world.size // SHARING": "world.size"}
        written = {
            **reach.texts,
            **WHOLE_SEQUENCES,
            **({} if divided and divided.sharing > 1 else one_each | WHOLE_ROWS),
            **(divided.texts if divided else {}),
            **({} if divided and divided.stages else ANY_MICRO_BATCHES),
        }
        # `sequence`: the positions are not divided.
        parameters = {"train": {"sequence": "None", **(texts if simple else {})}, "start": start}
        unused = reach.unused | {"sequence = None"} | (set() if is_whole else {"run.begin_averages()"})
        self.reach = replace(reach, values=values, parameters=parameters, texts=written, unused=unused)
        world = f"{RUNTIME}.{'group' if self.kind == 'ray' else self.kind}", "World"
        self.stands_for: dict[Place, Place] = {
            ("samestep.job", "Job"): ("samestep.job.fields", "Job"),
            ("samestep.training", "Run"): (f"{RUNTIME}.plain_run", "Run"),
            ("samestep.job", "MicroBatch"): (f"{RUNTIME}.micro_batch", "MicroBatch"),
            ("samestep.job.batch", "MicroBatch"): (f"{RUNTIME}.micro_batch", "MicroBatch"),
            ("samestep.errors", "UserError"): (f"{RUNTIME}.script_errors", "UserError"),
            ("samestep.errors", "Refused"): (f"{RUNTIME}.script_errors", "Refused"),
            ("samestep.message", "message"): (f"{RUNTIME}.script_errors", "message"),
            ("samestep.world", "World"): world,
            (f"{RUNTIME}.world", "World"): world,
            ("samestep.rank.fsdp_units", "FSDPReads"): (f"{RUNTIME}.fsdp_reads", "FSDPReads"),
            ("samestep.rank.process_group", "device_mesh"): (f"{RUNTIME}.divided", "device_mesh"),
            ("samestep.rank.tensor_parallel", "split_layers"): (f"{RUNTIME}.divided", "split_layers"),
            ("samestep.rank.stage_plan", "ranks_of_stages"): (f"{RUNTIME}.stages", "ranks_of_stages"),
            ("samestep.rank.stage_plan", "stage_plan"): (f"{RUNTIME}.stages", "stage_plan"),
            ("samestep.rank.threaded_group", "alike_on_ranks"): (f"{RUNTIME}.stages", "alike_on_ranks"),
        }
        if reach.plain_rows:
            self.stands_for[f"{RUNTIME}.loaded_rows", "loaded"] = (f"{RUNTIME}.plain_rows", "loaded")
            self.stands_for["samestep.job", "Batch"] = (f"{RUNTIME}.plain_rows", "Batch")
        if not reach.plain_evaluation:
            self.stands_for[f"{RUNTIME}.plain_evaluation", "finish"] = (f"{RUNTIME}.whole_evaluation", "finish")

    def roots(self) -> list[Place]:
        """Returns what the script's last lines need, beside the job."""
        close = [(self.module, "close")] if self.close else []
        runs = [] if self.run[1] == "Run" else [self.run]
        return [(self.module, "train"), *close, *runs, (f"{RUNTIME}.{self.kind}", "start")]


def _joined(roots: list[Place], job: ModuleType, near: Neighbours, plan: ScriptPlan) -> Joined:
    """Joins the script's modules, and leaves out what nothing in them uses, until there is nothing more."""
    members: dict[str, set[str]] = {}
    while True:
        joined = settled(roots, job, near, plan.stands_for, partial(_rewritten, plan, members))
        unused = unused_members(joined.kept, joined.sources, plan.reach)
        more = {name: names - members.get(name, set()) for name, names in unused.items()}
        if not any(more.values()) and members.keys() >= unused.keys():
            return joined
        members = {name: names | members.get(name, set()) for name, names in unused.items()}


def _rewritten(plan: ScriptPlan, members: Mapping[str, set[str]], module: str, text: str) -> str:
    """Returns the text of one of samestep's modules as a script has it."""
    if module.startswith("samestep.jobs."):
        return text
    if module == "samestep.job.fields":  # whose class samestep's own Job extends by the checks of its values
        text = text.replace("JobFields", "Job").replace("train: Dataset", "train: Any")
        text = text.replace("evaluation: Dataset | None", "evaluation: Any")
        text = re.sub(r'("""A training job\.).*?"""', r'\1"""', text, flags=re.DOTALL)
        text = re.sub(r"  # type: ignore\[.*", "", text)
    elif module.startswith("samestep.engines."):
        text = text.replace("-> State:", "-> dict[str, Any]:")
        text = _imported_first(text)
    text = plan.divided.written(module, text) if plan.divided else text
    return pruned(text, plan.reach.known(module, members))


def _imported_first(text: str) -> str:
    """Returns an engine's text with what its loop imports of samestep, since it takes long, at the top."""
    lines = re.findall(r"^    from samestep\..*\n", text, flags=re.MULTILINE)
    for line in lines:
        text = text.replace(f"if TYPE_CHECKING:\n{line}", "").replace(line, "")
    return text.replace(FUTURE, FUTURE + "".join(line.partition("#")[0].strip() + "\n" for line in lines), 1)


def _built(function: Any, target: str, texts: Mapping[str, str], *, is_own: bool) -> Job | None:
    """Returns the job; None where its data are not here. is_own: it is no built-in job. Raises UserError where its
    function fails otherwise: so would the script."""
    try:
        return build_by(function, target, texts)
    except UserError as error:
        if is_own and not _lacks_a_file(error):
            raise
        return None


def _lacks_a_file(error: BaseException) -> bool:
    """Whether an error, or one that it was raised for, is of a file, a folder or a server that is not there."""
    inner = error.__cause__ or error.__context__
    return isinstance(error, OSError) or (inner is not None and _lacks_a_file(inner))


def _parts(module: ModuleType, job: Job | None, general: Mapping[str, Any], size: int) -> set[str] | None:
    """Returns the special parts of a job; None where they are not known."""
    if job is not None:
        return special_parts(job, size=size)
    if module.__name__.startswith("samestep."):  # which has them by a setting alone
        return {"gather_outputs"} if general.get("gather_outputs") else set()
    return None


def _check_parts(parts: set[str], name: str, layout: engines.Layout, kind: str, mesh: Mesh | None) -> None:
    """Raises UserError for a job that no script trains, or none of this engine, whose processes are of this kind."""
    if absent := parts - TRAINED:
        raise UserError(f"a script cannot train a job with {' and '.join(sorted(absent))}; train it with samestep")
    of_kind: frozenset[str] = getattr(importlib.import_module(f"{RUNTIME}.{kind}"), "UNSUPPORTED", frozenset())
    of_kind |= {"gather_outputs"} if mesh else frozenset()
    if absent := parts & (of_kind if layout.closures else of_kind | {CLOSURE}):
        raise UserError(
            f"a script of {name} cannot train a job with {' and '.join(sorted(absent))}; use another engine"
        )


def _launch_lines() -> dict[str, str]:
    """The kinds of processes that runtime/ can start, each with the line that starts a script of it."""
    modules = {m.name: importlib.import_module(f"{RUNTIME}.{m.name}") for m in pkgutil.iter_modules(runtime.__path__)}
    return {name: module.LAUNCH for name, module in modules.items() if hasattr(module, "LAUNCH")}


def _given(function: Any, texts: Mapping[str, str], target: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The values of --set: the job function's own, and those that every job has."""
    parameters = inspect.signature(function).parameters
    general = {key: text for key, text in texts.items() if key not in parameters and key in GENERAL}
    specific = {key: text for key, text in texts.items() if key not in general}
    the_job = message("the_job", job=target)
    values = values_of(function, specific, the_job, "--set", GENERAL)
    absent = [n for n, p in parameters.items() if p.default is inspect.Parameter.empty and n not in values]
    if absent:
        raise UserError(message("job_needs_a_setting", job=target, name=absent[0]))
    return values, values_of(general_settings, general, the_job, "--set")


def _unlike_the_defaults(engine: engines.Engine, settings: Mapping[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(engine.train).parameters
    return {key: value for key, value in settings.items() if value != parameters[key].default}


def _arguments(values: Mapping[str, Any]) -> list[str]:
    return [f"{key}={literal(value)}" for key, value in values.items()]


def _imports(joined: Joined) -> Imports:
    """The import lines of all sources, as one."""
    imports: Imports = {}
    for source in joined.order():
        imports |= joined.imports[source.name]
    return imports


def _sections(joined: Joined) -> list[str]:
    """Returns the parts of the script: each with where it comes from, what its file says of itself, and its lines."""
    sections = []
    is_begun = False
    for source in joined.order():
        aliases = [f"{local} = {original}" for local, original in joined.aliases[source.name].items()]
        text = "\n\n\n".join(part for part in ("\n".join(aliases), source.kept(joined.kept[source.name])) if part)
        if source.whole or source.name.startswith(("samestep.jobs.", "samestep.engines.")) or not is_ours(source.name):
            place = source.path.name if source.whole else f"{source.name.replace('.', '/')}.py"
            docstring = source.docstring or ""
            if not source.whole:
                docstring = docstring.partition("\n\n")[0]
            end = "\n" if "\n" in docstring or len(docstring) > 114 else ""
            sections.append(f"# {f' {place} ':-^118}" + (f'\n\n"""{docstring}{end}"""' if docstring else ""))
            is_begun = False
        elif not is_begun:
            sections.append(f"# {' What these need ':-^118}")
            is_begun = True
        sections += [text] if text else []
    return sections


def _last_lines(
    called: str,
    given: tuple[dict[str, Any], dict[str, Any]],
    options: Mapping[str, tuple[str, Any]],
    plan: ScriptPlan,
) -> str:
    """Returns the end of the script, which reads its options, builds the job and starts."""
    fixed = {name: value for name, value in given[0].items() if name not in options}
    lines = []
    for name, (kind, default) in options.items():
        needs = "required=True" if default is inspect.Parameter.empty else f"default={literal(default)}"
        lines.append(f'parser.add_argument("--{name.replace("_", "-")}", type={kind}, {needs})')
    arguments = [*(["**options"] if options else []), *_arguments(fixed)]
    started = ["train"]
    taken = {"--checkpoint": plan.saves, "ranks": plan.kind == "ray"}
    for flag, name, kind in (("--checkpoint", "checkpoint", 'default="checkpoint.pt"'), ("ranks", "ranks", "type=int")):
        if taken[flag]:
            name = name if name not in options else f"{name}_of_script"
            lines.append(f'parser.add_argument("{flag.replace(flag.lstrip("-"), name.replace("_", "-"))}", {kind})')
            started.append(f'{flag.lstrip("-")}=options.pop("{name}")')
    if lines:
        lines = ["parser = argparse.ArgumentParser()", *lines, "options = vars(parser.parse_args())"]
    if len(started) > 1:  # before the job takes the other options
        lines += [f"{text.partition('=')[0]} = {text.partition('=')[2]}" for text in started[1:]]
        started = ["train", *(f"{text.partition('=')[0]}={text.partition('=')[0]}" for text in started[1:])]
    built = f"{called}({', '.join(arguments)})"
    if given[1]:
        built = f"replace({', '.join([built, *_arguments(given[1])])})"
    if assumed := plan.reach.assumed:
        lines.append(f"job_of_options = {built}")
        built = "job_of_options"
        names = [f"{built}.{name}" if value else f"not {built}.{name}" for name, value in assumed.items()]
        lines.append(f"if not ({' and '.join(names)}):")
        lines.append(f'    raise SystemExit("{OTHER_JOB}")')
    lines.append(f"start({', '.join([built, *started, *_arguments(plan.settings)])})")
    return 'if __name__ == "__main__":\n' + "".join(f"    {line}\n" for line in lines)


def _check_head(name: str) -> None:
    """Raises UserError for a name that would end the docstring at the script's head."""
    if '"' in name or "\\" in name or not name.isprintable():
        raise UserError(f"the script's head cannot hold the name {name!r}; give one without quotes and line breaks")


def _check_file(file: str, script: str) -> None:
    """Raises UserError for a file's name that would hide a module from the script, which Python looks for beside it."""
    stem = Path(file).stem
    imported = {
        module.partition(".")[0]
        for node in ast.walk(ast.parse(script))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for module in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names])
    }
    installed = "site-packages" in str(origin(stem))  # the job may import it when it runs
    if stem in imported | sys.stdlib_module_names or installed:
        raise UserError(f"Python would import {file} as the package {stem}; give the script another name with --to")
