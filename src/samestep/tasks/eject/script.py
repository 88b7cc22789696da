"""The texts of a script and of its runtime module."""

from __future__ import annotations

import inspect
import keyword
import shlex
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from samestep.engine import Engine
from samestep.tasks.eject.import_lines import Import, Imports, block
from samestep.tasks.eject.join import Joined
from samestep.tasks.eject.literals import literal

ANNOTATIONS: Imports = {"annotations": Import("__future__", "annotations", "annotations")}
HEAD = '''"""{says} Start it with

    {launch}

It trains, saves weights.pt and evaluates them, each row once.{more}
"""
'''
RUNTIME_HEAD = '''"""What scripts of {engine} need of samestep: the run around the engine's loop, and what jobs import.

These are samestep's own lines, under the files that they are of; those of tasks/eject/runtime/ are for scripts alone.
"""
'''
MEANT = """# Where the job's files import from samestep, they find the names of this module.
for name in ({names}):
    sys.modules[name] = {runtime}
"""


@dataclass(frozen=True)
class Call:
    """What the end of a script does.

    module, function: of the job. given: the arguments of the job's function that are no options. options: name -> its
    type's name, and the default. general: the values of --set that every job has. settings: of the engine.
    start: further arguments of the start, as text. checkpoint: the file that it is saved to, by default; '': it takes
    no --checkpoint. is_ray: whether it takes the number of ranks.
    """

    module: str
    function: str
    given: Mapping[str, Any]
    options: Mapping[str, tuple[str, Any]]
    general: Mapping[str, Any]
    settings: Mapping[str, Any]
    start: Mapping[str, str] = field(default_factory=dict)
    checkpoint: str = ""
    is_ray: bool = False

    def lines(self) -> str:
        """Returns the end of the script, which reads its options, builds the job and starts."""
        lines = [self._import_line(), ""]
        started = dict(self.start)
        for name, (kind, default) in self.options.items():
            needs = "required=True" if default is inspect.Parameter.empty else f"default={literal(default)}"
            lines.append(f'parser.add_argument("--{name.replace("_", "-")}", type={kind}, {needs})')
        if self.checkpoint:
            lines.append(self._own_option("--", "checkpoint", f"default={literal(self.checkpoint)}", started))
        if self.is_ray:
            lines.append(self._own_option("", "ranks", "type=int", started))
        if len(lines) > 2:
            lines[2:2] = ["parser = argparse.ArgumentParser()"]
            lines.append("options = vars(parser.parse_args())")
        # Before the job takes the other options.
        popped = {name: text for name, text in started.items() if text.startswith("options.pop(")}
        lines += [f"{name} = {text}" for name, text in popped.items()]
        started |= {name: name for name in popped}
        arguments = [*(["**options"] if self.options else []), *_arguments(self.given)]
        built = f"job({', '.join(arguments)})"
        if self.general:
            built = f"replace({', '.join([built, *_arguments(self.general)])})"
        trained = f"partial({', '.join(['train', *_arguments(self.settings)])})" if self.settings else "train"
        lines.append(f"start({', '.join([built, trained, *(f'{key}={text}' for key, text in started.items())])})")
        body = "".join(f"    {line}\n" if line else "\n" for line in lines)
        return f'def main() -> None:\n{body}\n\nif __name__ == "__main__":\n    main()\n'

    def _import_line(self) -> str:
        names = self.module.split(".")
        if all(name.isidentifier() and not keyword.iskeyword(name) for name in (*names, self.function)):
            renamed = "" if self.function == "job" else " as job"
            return f"from {self.module} import {self.function}{renamed}"
        return f'job = importlib.import_module("{self.module}").{self.function}'

    def _own_option(self, dashes: str, name: str, kind: str, started: dict[str, str]) -> str:
        """Adds an option of the script's own to what the start is given. Returns the line that declares it."""
        called = name if name not in self.options else f"{name}_of_script"
        started[name] = f'options.pop("{called}")'
        # argparse names what has no dashes as it is written.
        declared = called.replace("_", "-") if dashes else called
        return f'parser.add_argument("{dashes}{declared}", {kind})'


def unlike_the_defaults(engine: Engine, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the engine's settings that its loop has not by itself."""
    parameters = inspect.signature(engine.train).parameters
    return {key: value for key, value in settings.items() if value != parameters[key].default}


def _arguments(values: Mapping[str, Any]) -> list[str]:
    return [f"{key}={literal(value)}" for key, value in values.items()]


def runtime_text(joined: Joined, engine: str) -> str:
    """Returns the runtime module of a script."""
    modules = joined.order(in_script=False)
    joined.check(modules)
    imports = block(ANNOTATIONS | joined.outside(modules))
    sections = "\n\n\n".join(map(joined.text, modules))
    return f"{RUNTIME_HEAD.format(engine=engine)}\n{imports}\n\n{sections}\n"


def script_text(joined: Joined, call: Call, head: str, *, runtime: str, meant: list[str]) -> str:
    """Returns the script. runtime: its runtime module. meant: the modules of samestep for which that stands."""
    modules = joined.order(in_script=True)
    joined.check(modules)
    last = call.lines()
    imports = ANNOTATIONS | joined.outside(modules) | joined.from_runtime(modules, runtime)
    imports |= {name: Import(name, "", name) for name in ("sys", runtime)}
    for needed, text in (
        (Import("argparse", "", "argparse"), "argparse."),
        (Import("functools", "partial", "partial"), "partial("),
        (Import("importlib", "", "importlib"), "importlib."),
        (Import("pathlib", "Path", "Path"), "Path("),
        (Import("dataclasses", "replace", "replace"), "replace("),
        (Import(runtime, "Mesh", "Mesh"), "Mesh("),
        (Import(runtime, "start", "start"), "start("),
    ):
        if text in last:
            joined.check_free(needed.bound, modules)
            imports[needed.bound] = needed
    for name in ("main", "job", "name"):
        joined.check_free(name, modules)
    names = MEANT.format(names=", ".join(map(literal, meant)) + ("," if len(meant) == 1 else ""), runtime=runtime)
    sections = [joined.text(module) for module in modules]
    return "\n\n\n".join([f"{head}\n{block(imports)}\n\n{names}".rstrip(), *sections, last])


def head_of(title: str, launch: str, size: int, file: str, *, beside: list[str], more: str) -> str:
    """Returns the docstring at the head of a script."""
    files = " and ".join([", ".join(beside[:-1]), beside[-1]] if beside[1:] else beside)
    says = f"{title}, without samestep, which wrote it. It needs {files} beside it."
    return HEAD.format(
        says=textwrap.fill(says, 106, initial_indent="   ").strip(),
        launch=launch.format(size=size, file=shlex.quote(file)),
        more=more,
    )
