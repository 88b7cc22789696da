"""Source text in, source text out: leaving out what a job and its settings do not use, comments kept."""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Imports = dict[tuple[str, str], str]  # (module, name) -> the name in use; name '' for a plain import

ANNOTATED = re.compile(r"^(\s*\w+): Any = ", re.MULTILINE)
KEYWORD = re.compile(r"^\s+\w+=(\w+),$")  # a line that hands a setting on
HEADER = "def train(job, world):"
RENAMED = (
    ("run.batches()", "batches(job, world)"),
    ("run.loss(", "loss_of(job, world, "),
)


class Specialised:
    """An engine's loop for one job and its settings."""

    def __init__(self, engine: Any, job: Any, settings: Mapping[str, Any], micro_batches: int) -> None:
        self.source = inspect.getsource(engine)
        self.lines = self.source.splitlines()
        self.tree = ast.parse(self.source)
        self.job, self.settings, self.micro_batches = job, settings, micro_batches
        parameters = inspect.signature(engine.train).parameters
        self.defaults = {key: parameters[key].default for key in settings}

    def text(self) -> str:
        """train() and what it needs of its file."""
        parts = {node.name: node for node in self.tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        train = parts["train"]
        loop = _without_unused(self._renamed("\n".join([HEADER, *self._statements(train.body, 0)])))
        wanted = used_names(loop)
        constants = [
            "\n".join(self.lines[node.lineno - 1 : node.end_lineno])
            for node in self.tree.body
            if isinstance(node, ast.Assign | ast.AnnAssign) and _target(node) in wanted
        ]
        names = [name for name in parts if name in wanted or name == "close"]
        helpers = [
            self._renamed(self._whole(parts[name])) for name in names if name not in ("train", "numerics", "layout")
        ]
        head = "\n".join(constants) + "\n\n\n" if constants else ""
        return head + "\n\n\n".join([loop, *helpers])

    def _whole(self, node: ast.AST) -> str:
        return "\n".join(self.lines[node.lineno - 1 : node.end_lineno])  # type: ignore[attr-defined]

    def _statements(self, statements: Sequence[ast.stmt], dedent: int) -> list[str]:
        out: list[str] = []
        for node in statements:
            if self._unused(node) or self._settled(node):
                continue
            before = len(out)
            if out and not self.lines[node.lineno - 2 - len(self._comments(node))].strip():
                out.append("")
            if isinstance(node, ast.If) and (known := self._known(node.test)) is not None:
                out += self._statements(node.body, dedent + 4) if known else self._otherwise(node, dedent)
            elif isinstance(node, ast.With) and self._plain(node):
                out += self._statements(node.body, dedent + 4)
            elif isinstance(node, ast.With | ast.For | ast.If | ast.FunctionDef | ast.ClassDef):
                inner = self._statements(node.body, dedent)
                if not inner:
                    del out[before:]
                    continue
                first = node.body[0].lineno
                header = self._simple(node, first - 1)
                out += self._dedented(self._comments(node) + [line for line in header if not _comment(line)], dedent)
                out += inner
                if isinstance(node, ast.If) and node.orelse:
                    out += self._dedented([" " * node.col_offset + "else:"], dedent)
                    out += self._statements(node.orelse, dedent)
            else:
                lines = self._comments(node) + self._simple(node)
                out += self._dedented(lines, dedent)
        return out

    def _simple(self, node: ast.stmt, last: int | None = None) -> list[str]:
        """A statement's lines (to `last`), with what is known put in, and settings left at their default left out."""
        first, last = node.lineno, last or node.end_lineno or node.lineno
        lines = self.lines[first - 1 : last]
        known = [(n, text) for n in ast.walk(node) if isinstance(n, ast.expr) and (text := self._value(n)) is not None]
        for n, text in sorted(known, key=lambda pair: (pair[0].lineno, pair[0].col_offset), reverse=True):
            inside = any(outer is not n and n in ast.walk(outer) for outer, _ in known)
            if n.lineno == n.end_lineno and n.lineno <= last and not inside:
                row = n.lineno - first
                lines[row] = lines[row][: n.col_offset] + text + lines[row][n.end_col_offset :]
        left = {key for key, value in self.settings.items() if value == self.defaults[key]}
        dropped = [
            (match := KEYWORD.match(line)) is not None and match[1] in left for line in self.lines[first - 1 : last]
        ]
        return [line for line, drop in zip(lines, dropped) if not drop]

    def _value(self, node: ast.expr) -> str | None:
        """The text that a known expression becomes; None where it stays."""
        if isinstance(node, ast.IfExp) and (known := self._known(node.test)) is not None:
            chosen = ast.get_source_segment(self.source, node.body if known else node.orelse)
            for name, value in self.settings.items():
                chosen = re.sub(rf"\b{name}\b", _quoted(value), chosen or "")
            return chosen
        if self.micro_batches == 1 and ast.unparse(node) == "batch.completes_step":
            return "True"
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in self.settings:
            return _quoted(self.settings[node.id])
        return None

    def _otherwise(self, node: ast.If, dedent: int) -> list[str]:
        """What an `if` that is never true leaves: its elif's own if, or its else."""
        if (
            len(node.orelse) == 1
            and isinstance(node.orelse[0], ast.If)
            and node.orelse[0].col_offset == node.col_offset
        ):
            return self._statements(node.orelse, dedent)
        return self._statements(node.orelse, dedent + 4)

    def _comments(self, node: ast.stmt) -> list[str]:
        above: list[str] = []
        number = node.lineno - 2
        while number >= 0 and _comment(self.lines[number]):
            above.insert(0, self.lines[number])
            number -= 1
        return above

    def _dedented(self, lines: list[str], by: int) -> list[str]:
        return [line[by:] if line[:by].isspace() or not by else line for line in lines]

    def _unused(self, node: ast.stmt) -> bool:
        """Observation, and what a job without a scheduler does not need."""
        text = ast.unparse(node)
        if text.startswith(("run.begin(", "run.step(")):
            return True
        bare = self.job.scheduler is None and not isinstance(node, ast.For | ast.With | ast.FunctionDef | ast.ClassDef)
        if bare and isinstance(node, ast.If):
            return "moves_lr" in ast.unparse(node.test)
        return bare and "job.lr_scheduler(" in text

    def _settled(self, node: ast.stmt) -> bool:
        """Whether this names a condition on the settings, which is then known wherever the name stands."""
        if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Compare)):
            return False
        value = self._known(node.value)
        if value is not None:
            self.settings = {**self.settings, _target(node): value}
            self.defaults[_target(node)] = None
        return value is not None

    def _known(self, test: ast.expr) -> bool | None:
        """The value of a condition that this job and these settings decide; None where the training decides."""
        text = ast.unparse(test)
        if isinstance(test, ast.BoolOp):
            decides = isinstance(test.op, ast.Or)  # True decides an 'or', False an 'and'
            if decides in map(self._known, test.values):
                return decides
        if text == "job.moves_lr(batch)" and self.job.scheduler and self.job.scheduler.every == "step":
            return True  # it stands where the optimizer has stepped
        if text == "batch.completes_step" and self.micro_batches == 1:
            return True
        names = {node.id for node in ast.walk(test) if isinstance(node, ast.Name)}
        if not names <= {*self.settings, "job"} or isinstance(test, ast.Call):
            return None
        return bool(eval(text, {"job": self.job, **self.settings}))

    def _plain(self, node: ast.With) -> bool:
        """A block that this script does not need: main opens the group; one micro-batch has nothing to hold back."""
        text = ast.unparse(node.items[0].context_expr)
        return text == "process_group(world)" or (
            self.micro_batches == 1 and ("if batch.completes_step else" in text or "not batch.completes_step" in text)
        )

    def _renamed(self, text: str) -> str:
        for old, new in reversed(RENAMED):
            text = text.replace(old, new)
        text = (
            text.replace(" * run.schedule.micro_batches" if self.micro_batches == 1 else "", "")
            .replace("run.schedule.micro_batches", str(self.micro_batches))
            .replace("  # type: ignore[no-untyped-def]", "")
        )
        groups = self.job.optimizer.groups is not None
        text = re.sub(
            r"job\.optimizer\.build\(([\w.]+)\)",
            r"job.optimizer.cls(job.optimizer.groups(\1), **job.optimizer.settings)"
            if groups
            else r"job.optimizer.cls(\1.parameters(), **job.optimizer.settings)",
            text,
        )
        when = "batch.completes_epoch" if self.job.scheduler and self.job.scheduler.every == "epoch" else "True"
        text = text.replace(
            "job.moves_lr(batch) and " if when == "True" else "job.moves_lr(batch)", "" if when == "True" else when
        )
        text = text.replace("job.lr_scheduler(optimizer)", "job.scheduler.make(optimizer)")
        return ANNOTATED.sub(r"\1 = ", text)


def _without_unused(text: str) -> str:
    """Without imports inside it of names that stand nowhere else."""
    for line in re.findall(r"^ +(?:from \S+ )?import \w+$", text, re.MULTILINE):
        name = line.rpartition(" ")[2]
        if len(re.findall(rf"\b{name}\b", text.replace(line, ""))) == 0:
            text = text.replace(line + "\n", "")
    return text


def _target(node: ast.Assign | ast.AnnAssign) -> str:
    target = node.targets[0] if isinstance(node, ast.Assign) else node.target
    return target.id if isinstance(target, ast.Name) else ""


def _comment(line: str) -> bool:
    return line.strip().startswith("#")


def _quoted(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def used_names(text: str) -> set[str]:
    """Every name that a text mentions."""
    return {node.id for node in ast.walk(ast.parse(textwrap.dedent(text))) if isinstance(node, ast.Name)}


def imports_of(text: str) -> Imports:
    """What a module imports at its top, without samestep's own and what serves its types alone."""
    found: Imports = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.Import):
            found |= {(alias.name, ""): alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.module.startswith("samestep"):
            found |= {(node.module, alias.name): alias.asname or alias.name for alias in node.names}
    return found


def without_imports(text: str) -> str:
    """A module's text without its docstring and its imports at the top."""
    lines = text.splitlines()
    drop: set[int] = set()
    for number, node in enumerate(ast.parse(text).body):
        docstring = number == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if docstring or isinstance(node, ast.Import | ast.ImportFrom):
            drop |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return "\n".join(line for number, line in enumerate(lines, 1) if number not in drop).strip() + "\n"


def merged(imports: Sequence[Imports], used: set[str]) -> str:
    """The import lines of several modules as one block, as ruff sorts them, those that are not used left out."""
    every: Imports = {}
    for of_module in imports:
        every |= {
            key: name for key, name in of_module.items() if name.partition(".")[0] in used or key[0] == "__future__"
        }
    sections: list[list[str]] = [[], [], []]
    for module in sorted({module for module, _ in every}, key=str.lower):
        section = 0 if module == "__future__" else 1 if module.partition(".")[0] in sys.stdlib_module_names else 2
        sections[section] += _lines(module, every)
    ordered = ["\n".join(sorted(lines, key=lambda line: line.startswith("from"))) for lines in sections if lines]
    return "\n\n".join(ordered)


def _lines(module: str, every: Imports) -> Iterator[str]:
    if (module, "") in every:
        name = every[module, ""]
        yield f"import {module}" + (f" as {name}" if name != module else "")
    names = sorted((name for of, name in every if of == module and name), key=_by_type)
    if names:
        renamed = {name: every[module, name] for name in names if every[module, name] != name}
        plain = [name for name in names if name not in renamed]
        if plain:
            yield f"from {module} import {', '.join(plain)}"
        yield from (f"from {module} import {name} as {other}" for name, other in renamed.items())


def _by_type(name: str) -> tuple[int, str]:
    """Constants, then classes, then functions, as ruff orders them."""
    return (0 if name.isupper() and len(name) > 1 else 1 if name[:1].isupper() else 2, name)
