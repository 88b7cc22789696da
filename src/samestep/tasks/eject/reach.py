"""What a script of a job on an engine can reach: what is known of its job, and what nothing in it uses.

Known are the fields that no call in the job's own files gives, which have their defaults whatever the settings are, and
the value of --set. Of the other fields it is assumed that they are given or left out as in the job that has been built:
the script checks what is assumed, as an option of it may change that.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from samestep.engine import Layout
from samestep.job import Job, counts_by_itself
from samestep.job.fields import JobFields
from samestep.tasks.eject import runtime
from samestep.tasks.eject.prune import PRESENT, SIMPLE, UNKNOWN, Known
from samestep.tasks.eject.source import Source, Statement, is_ours

RUNTIME = runtime.__name__
# The fields that say what a step does; the others are numbers and functions, of any value.
STRUCTURE = {"evaluation", "metrics", "collate", "augment", "weight", "evaluation_weight", "scheduler", "max_steps"}
STRUCTURE |= {"ema", "micro_batch", "gather_outputs", "clip_norm", "last", "order", "shuffle", "sync_batchnorm"}
STRUCTURE |= {"phases", "carry_state", "evaluation_collate", "batch_weight"}
CLOSURE = "an optimizer whose step needs a closure"
NO_DERIVATIVES = {"torch", "torchvision", "torchmetrics", "transformers", "numpy", "sklearn", "PIL", "samestep"}
# Classes whose fields a script leaves out where nothing reads them; of others, the methods that nothing calls.
VALUES = {"Job", "Recipe", "LRSchedule", "MicroBatch", "Batch", "World", "Run", "Schedule"}
SHAKEN = ("samestep.job.", "samestep.data.schedule", "samestep.rank.stage_plan", f"{RUNTIME}.")
RETURNS_NONE = re.compile(r"return None\b|return$|: None$|None if\b|else None", re.MULTILINE)  # a criterion may
OWN_CLASSES = {"Recipe": 3, "LRSchedule": 3}  # and how many arguments they take


@dataclass(frozen=True)
class Given:
    """What the calls in the job's own files give. names: the keywords of all of them. by_place: class of samestep's ->
    the most arguments that a call gives it by their place. is_known: False where a call unpacks what it gives."""

    names: frozenset[str]
    by_place: Mapping[str, int]
    is_known: bool

    def fields(self) -> set[str]:
        """Returns the job's fields that some call gives."""
        names = [job_field.name for job_field in dataclasses.fields(JobFields)]
        return {*names[: self.by_place.get("Job", 0)], *self.names.intersection(names)} if self.is_known else {*names}


def given_in(sources: Iterable[Source]) -> Given:
    """Returns what the calls in these files give."""
    names: set[str] = set()
    by_place: dict[str, int] = {}
    is_known = True
    for source in sources:
        local = {name: origin[1] for name, origin in source.links.items() if origin[0].startswith("samestep")}
        called: set[int] = set()
        for node in ast.walk(source.tree):
            if not isinstance(node, ast.Call):
                continue
            names |= {keyword.arg for keyword in node.keywords if keyword.arg}
            name = local.get(node.func.id, "") if isinstance(node.func, ast.Name) else ""
            if name in ("Job", *OWN_CLASSES):
                called.add(id(node.func))
                by_place[name] = max(by_place.get(name, 0), len(node.args))
                unpacked = [argument for argument in node.args if isinstance(argument, ast.Starred)]
                is_known &= not unpacked and all(keyword.arg for keyword in node.keywords)
        annotations = {id(inner) for outer in ast.walk(source.tree) for inner in _annotations(outer)}
        for node in ast.walk(source.tree):  # a class that is used otherwise, as by inheritance, may be given anything
            if isinstance(node, ast.Name) and local.get(node.id) in ("Job", *OWN_CLASSES):
                is_known &= id(node) in called or id(node) in annotations
    return Given(frozenset(names), by_place, is_known)


def _annotations(node: ast.AST) -> Iterable[ast.AST]:
    for name in ("annotation", "returns"):
        if (annotation := getattr(node, name, None)) is not None:
            yield from ast.walk(annotation)


@dataclass(frozen=True)
class Reach:
    """What is known of a script. values: expression -> its value. assumed: those of `job.FIELD` that an option of the
    script might change. plain_rows: the data are pairs of plain tensors. plain_evaluation: it has a loss, and metrics
    of rows. fields: of the job, that its files give."""

    values: Mapping[str, Any]
    assumed: Mapping[str, Any]
    plain_rows: bool
    plain_evaluation: bool
    parts: frozenset[str]
    fields: frozenset[str]
    given: Given
    parameters: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    unused: frozenset[str] = frozenset()
    texts: Mapping[str, str] = field(default_factory=dict)

    def known(self, module: str, members: Mapping[str, Collection[str]]) -> Known:
        """Returns what is known of the code of a module of samestep's."""
        values = dict(self.values)
        is_engine = module.startswith("samestep.engines.") or not is_ours(module)  # or of another package
        is_loop = is_engine or module.startswith(RUNTIME)
        if module == "samestep.job.fields":
            values = {name.replace("job.", "self.", 1): value for name, value in values.items() if name[:4] == "job."}
        elif module.startswith("samestep.job"):
            values = {name: value for name, value in values.items() if name == "self.groups"}
        else:
            values |= {f"self.{name}": value for name, value in values.items() if name.startswith("job.")}
        parameters = self.parameters if is_loop else {}
        return Known(
            values,
            parameters,
            members=members if module.startswith(SHAKEN) else {},
            defaults=_library_defaults(module) if is_engine else {},
            unused=self.unused,
            texts=self.texts if is_loop else {},
        )


def _library_defaults(module: str) -> dict[str, dict[str, Any]]:
    """Returns class that a module imports from torch -> the defaults of its arguments."""
    defaults = {}
    for name, value in vars(sys.modules[module]).items():
        if inspect.isclass(value) and value.__module__.startswith("torch."):
            parameters = inspect.signature(value.__init__).parameters.values()
            defaults[name] = {parameter.name: parameter.default for parameter in parameters}
    return defaults


def special_parts(job: Job, size: int) -> set[str]:
    """Returns the parts of a job on `size` ranks that take more in a step than forward, backward and an update."""
    parts = {
        "ema": job.ema,
        "carry_state": job.carry_state,
        "gather_outputs": job.gather_outputs and size > 1,
        "phases": job.phases,
        "batch_weight": job.batch_weight,
        "a scheduler with every='evaluation'": job.scheduler and job.scheduler.every == "evaluation",
        CLOSURE: job.optimizer and job.optimizer.needs_closure,
    }
    return {name for name, has in parts.items() if has}


def reach_of(
    job: Job | None,
    sources: Mapping[str, Source],
    general: Mapping[str, Any],
    *,
    parts: set[str] | None,
    layout: Layout,
    kind: str,
    has_options: bool,
) -> Reach:
    """Returns what is known of the script. job: None where it could not be built. general: the values of --set that
    every job has. parts: the job's special ones; None where they are not known."""
    given = given_in(sources.values())
    fields = given.fields()
    values, assumed = _job_values(job, fields, general)
    if job is not None and has_options:
        assumed = {name: value for name, value in assumed.items() if not _is_literal(name, sources)}
    else:
        assumed = {}
    groups = job.optimizer.groups if job is not None and job.optimizer else None
    if given.is_known and groups is None and "groups" not in given.names and given.by_place.get("Recipe", 0) < 3:
        values["self.groups"] = values["recipe.groups"] = None
    is_tensors = job is not None and _are_tensors(job)
    plain = [values.get(f"job.{name}", UNKNOWN) for name in ("order", "weight", "phases")]
    plain_schedule = parts == set() and not any(value is UNKNOWN or value for value in plain)
    plain_schedule &= values.get("job.shuffle") is True or is_tensors
    modules = {node.partition(".")[0] for source in sources.values() for node in _imported(source.tree)}
    unfamiliar = modules - NO_DERIVATIVES - {*sys.stdlib_module_names} - {name.partition(".")[0] for name in sources}
    values |= {
        "ONE_DEVICE": kind != "one",
        "PLAIN_SCHEDULE": plain_schedule,
        "PLAIN_STEP": parts == set(),
        "LONE_BATCHNORM": layout.lone_batchnorm,
        "COUNTS": job is None or any(counts_by_itself(metric) for metric in job.metrics.values()),
        "DERIVES": bool(unfamiliar) or any("grad" in source.text for source in sources.values()),
        "REPEATS": values.get("job.order", UNKNOWN) is not None,
    }
    if job is None and values.get("job.metrics") == ():
        values["COUNTS"] = False
    values |= _loop_values(job, values, parts, layout)
    reads_data = any("data" in _attributes(source.tree) for source in sources.values())
    returns_none = any(RETURNS_NONE.search(source.text) for source in sources.values())
    plain = [values.get(f"job.{name}", UNKNOWN) for name in ("evaluation_weight", "carry_state")]
    has_loss = not returns_none and not any(value is UNKNOWN or value for value in plain)
    texts: dict[str, str] = {}
    unused: set[str] = set()
    if values.get("job.scheduler", UNKNOWN) is None:
        unused.add("job.lr_scheduler(optimizer)")
    elif values.get("job.scheduler") is PRESENT and values.get("job.scheduler.every") in ("step", "epoch"):
        texts["job.lr_scheduler($)"] = "job.scheduler.make($)"
    if "self.groups" in values:
        texts["job.optimizer.build($)"] = "job.optimizer.cls($.parameters(), **job.optimizer.settings)"
    if "forward" not in fields and parts == set():
        texts |= {
            "self.job.forward(model, batch)": "model(batch.inputs)",
            "job.forward(model, batch)": "model(batch.inputs)",
        }
    return Reach(
        values=values,
        assumed=assumed,
        plain_rows=is_tensors and parts == set() and layout.micro_batches == 1 and not reads_data,
        plain_evaluation=not values["COUNTS"] and not values["DERIVES"] and has_loss,
        parts=frozenset(parts or ()),
        fields=frozenset({*fields, *general}),
        given=given,
        unused=frozenset(unused),
        texts=texts,
    )


def _job_values(job: Job | None, fields: set[str], general: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the values of the fields that say what a step does, and those of them that are assumed."""
    values: dict[str, Any] = {}
    assumed: dict[str, Any] = {}
    for job_field in dataclasses.fields(JobFields):
        name, value = job_field.name, job_field.default
        if name not in STRUCTURE:
            continue
        if name in general:
            value = general[name]
        elif name in fields:
            if job is None:
                continue
            value = getattr(job, name)
            assumed[name] = value
        elif name == "metrics":
            value = ()
        if isinstance(value, Mapping | list | tuple) and not value:
            value = ()
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        values[f"job.{name}"] = value if (type(value) in SIMPLE and not is_number) or value == () else PRESENT
    return values, {name: values[f"job.{name}"] for name in assumed}


def _loop_values(job: Job | None, values: Mapping[str, Any], parts: set[str] | None, layout: Layout) -> dict[str, Any]:
    """Returns what is known of the calls and the attributes that engines' loops use."""
    loop: dict[str, Any] = {}
    if values.get("job.phases") == ():
        loop["batch.micro_batch.phase"] = 0
    if values.get("job.micro_batch", UNKNOWN) is None and layout.micro_batches == 1:
        loop |= {"batch.completes_step": True, "self.micro_batches": 1}
        loop |= {"run.schedule.micro_batches": 1, "self.schedule.micro_batches": 1}
    every = job.scheduler.every if job is not None and job.scheduler else None
    if values.get("job.scheduler", UNKNOWN) is None:
        loop["job.moves_lr(batch)"] = False
    elif every is not None:
        loop["job.scheduler.every"] = every
        if every == "step" and loop.get("batch.completes_step") and "batch.micro_batch.phase" in loop:
            loop["job.moves_lr(batch)"] = True
    if parts is not None and CLOSURE not in parts:
        loop["run.closure(backward)"] = ()
    return loop


def _is_literal(name: str, sources: Mapping[str, Source]) -> bool:
    """Whether every call that gives this field gives it a constant, a display, a function or an object of a class."""
    for source in sources.values():
        for node in ast.walk(source.tree):
            if isinstance(node, ast.keyword) and node.arg == name:
                made = (
                    isinstance(node.value, ast.Call) and ast.unparse(node.value.func).rpartition(".")[2][:1].isupper()
                )
                if not made and not isinstance(node.value, ast.Constant | ast.Lambda | ast.Dict | ast.List | ast.Tuple):
                    return False
    return True


def _are_tensors(job: Job) -> bool:
    """Whether the rows of a job are those of a TensorDataset, as they are."""
    from torch.utils.data import TensorDataset

    changed = (job.augment, job.collate, job.evaluation_collate)
    datasets = [job.train, *([job.evaluation] if job.evaluation is not None else [])]
    if any(changed) or not all(type(dataset) is TensorDataset for dataset in datasets):
        return False
    return all(len(dataset.tensors) == 2 for dataset in datasets)  # type: ignore[attr-defined]


def _attributes(tree: ast.AST) -> set[str]:
    return {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


def _imported(tree: ast.AST) -> Iterable[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


def unused_members(
    statements: Mapping[str, Collection[Statement]], sources: Mapping[str, Source], reach: Reach
) -> dict[str, set[str]]:
    """Returns class -> its fields and methods that nothing in the script reads. statements: of each source."""
    read: set[str] = set()
    of_job: set[str] = set()  # what is read of the job
    classes: list[ast.ClassDef] = []
    for module, of_module in statements.items():
        of_class = [statement.node for statement in of_module if isinstance(statement.node, ast.ClassDef)]
        classes += of_class if module.startswith(SHAKEN) else []
        property_reads = {  # a property is not used because one of its name, which it reads, is
            id(inner): member.name
            for node in of_class
            for member in node.body
            if isinstance(member, ast.FunctionDef)
            for inner in ast.walk(member)
        }
        for node in (inner for statement in of_module for inner in ast.walk(statement.node)):
            if isinstance(node, ast.Attribute) and property_reads.get(id(node)) != node.attr:
                read.add(node.attr)
                owner = ast.unparse(node.value)
                if sources[module].whole or owner.endswith("job") or module == "samestep.job.fields":
                    of_job.add(node.attr)
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
                texts = {str(argument.value) for argument in node.args if isinstance(argument, ast.Constant)}
                read, of_job = read | texts, of_job | texts
    unused: dict[str, set[str]] = {}
    for node in classes:
        members = unused.setdefault(node.name, set())
        names = [statement.name for statement in node.body if isinstance(statement, ast.FunctionDef)]
        if node.name in VALUES:
            targets = [statement.target for statement in node.body if isinstance(statement, ast.AnnAssign)]
            fields = [target.id for target in targets if isinstance(target, ast.Name)]
            by_place = fields[: reach.given.by_place.get(node.name, 0)] if reach.given.is_known else fields
            given = reach.fields if node.name == "Job" else {*by_place, *reach.given.names} & {*fields}
            names += [name for name in fields if node.name not in ("Job", *OWN_CLASSES) or name not in given]
        used = of_job if node.name == "Job" else read
        members |= {name for name in names if name not in used and not name.startswith("__")}
    return unused


def settable(function: Any, fixed: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    """Returns the job's settings that a command line can give: name -> the type's name, and the default. fixed: the
    values of --set, which are the script's defaults."""
    from typing import get_type_hints

    from samestep.tasks.inspect.load import innermost

    hints = get_type_hints(innermost(function))
    settings: dict[str, tuple[str, Any]] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        default = fixed.get(name, parameter.default)
        kind = hints.get(name, type(default))
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY) and kind in (int, float, str):
            settings[name] = kind.__name__, default
    return settings
