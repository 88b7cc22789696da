"""An engine's loop as the text of a script: its file's own lines, without what a job and its settings do not use."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from samestep.errors import UserError
from samestep.tasks.eject.literal import literal
from samestep.tasks.eject.names import mentioned

Edit = tuple[int, int, str]  # what stands in place of source[start:end]

ANNOTATED = re.compile(r"^(\s*\w+): Any = ", re.MULTILINE)
KEYWORD = re.compile(r"^\s+\w+=(\w+),$")  # a line that hands a setting on
HEADER = "def train(job, world):"
MICRO_BATCHES = "run.schedule.micro_batches"
RENAMED = (
    ("run.batches()", "batches(job, world)"),
    ("run.loss(", "loss_of(job, world, "),
    ("job.lr_scheduler(optimizer)", "job.scheduler.make(optimizer)"),
    ("  # type: ignore[no-untyped-def]", ""),
)


class Loop:
    """An engine's loop for one job and its settings. Raises the engine's own UserError where it refuses them."""

    def __init__(self, engine: Any, job: Any, settings: Mapping[str, Any], micro_batches: int) -> None:
        self.engine = engine
        self.source = inspect.getsource(engine)
        self.lines = self.source.split("\n")
        self.starts = [0]
        for line in self.lines:
            self.starts.append(self.starts[-1] + len(line) + 1)
        self.tree = ast.parse(self.source)
        self.job, self.settings, self.micro_batches = job, settings, micro_batches
        parameters = inspect.signature(engine.train).parameters
        self.defaults = {key: parameters[key].default for key in settings}
        self.stepped = False  # whether the statement at hand runs on the last micro-batch of a step alone

    def text(self) -> str:
        """train() and what it needs of its file."""
        parts = {node.name: node for node in self.tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        body = self._statements(parts["train"].body, 0, certain=True)
        loop = _without_unused(self._renamed("\n".join([HEADER, *body])), self.source)
        helpers = {name: self._renamed(self._whole(node)) for name, node in parts.items() if name != "train"}
        constants = {
            _target(node): self._whole(node) for node in self.tree.body if isinstance(node, ast.Assign | ast.AnnAssign)
        }
        wanted = mentioned(loop) | {"close"}
        while more := {n for w in wanted for n in mentioned(helpers.get(w, constants.get(w, "")))} - wanted:
            wanted |= more
        head = "\n".join(text for name, text in constants.items() if name in wanted)
        return (head and head + "\n\n\n") + "\n\n\n".join(
            [loop, *(text for name, text in helpers.items() if name in wanted)]
        )

    def _whole(self, node: ast.stmt) -> str:
        return "\n".join(self.lines[_first(node) - 1 : node.end_lineno])

    def _statements(self, statements: Sequence[ast.stmt], dedent: int, *, certain: bool = False) -> list[str]:
        """The lines of `statements`. certain: they run in every training, so that a refusal there is eject's own."""
        out: list[str] = []
        above: ast.stmt | None = None
        for node in statements:
            if isinstance(node, ast.Raise) and (refusal := self._refusal(node)):
                if certain:
                    raise refusal
                continue  # what it waits for is known where the script runs, and the library then says it itself
            if self._unused(node) or self._settled(node):
                continue
            before = len(out)
            alone = isinstance(above, ast.FunctionDef | ast.ClassDef)  # what stood below it may be left out
            if out and (alone or not self.lines[_first(node) - 2 - len(self._comments(node))].strip()):
                out.append("")
            above = node
            if isinstance(node, ast.If) and (known := self._known(node.test)) is not None:
                out += self._body(node, dedent + 4, certain) if known else self._otherwise(node, dedent, certain)
            elif isinstance(node, ast.With) and self._plain(node):
                out += self._statements(node.body, dedent + 4, certain=certain)
            elif isinstance(node, ast.With | ast.For | ast.If | ast.FunctionDef | ast.ClassDef):
                inner = self._body(node, dedent, certain and isinstance(node, ast.With))
                other = self._else(node, dedent) if isinstance(node, ast.If) else []
                if not inner and not other:
                    del out[before:]
                    continue
                header = [line for line in self._simple(node, node.body[0].lineno - 1) if not _comment(line)]
                out += self._dedented(self._comments(node) + header, dedent)
                out += inner or [" " * (node.col_offset - dedent + 4) + "pass"]
                out += other
            else:
                out += self._dedented(self._comments(node) + self._simple(node), dedent)
        return out

    def _body(self, node: Any, dedent: int, certain: bool) -> list[str]:
        outer = self.stepped
        self.stepped = outer or (isinstance(node, ast.If) and ast.unparse(node.test) == "batch.completes_step")
        lines = self._statements(node.body, dedent, certain=certain)
        self.stepped = outer
        return lines

    def _simple(self, node: ast.stmt, last: int | None = None) -> list[str]:
        """A statement's lines (to `last`), with what is known put in, and settings left at their default left out."""
        first, end = _first(node), last or node.end_lineno or node.lineno
        left = {key for key, value in self.settings.items() if value == self.defaults[key]}
        dropped = [
            (self.starts[number - 1], self.starts[number], "")
            for number in range(first, end + 1)
            if (match := KEYWORD.match(self.lines[number - 1])) and match[1] in left
        ]
        known = [e for e in self._edits(node, within=last is None) if not any(d[0] <= e[0] < d[1] for d in dropped)]
        text = self._replaced(self.starts[first - 1], self.starts[end], dropped + known)
        return text.removesuffix("\n").split("\n") if text else []

    def _replaced(self, start: int, end: int, edits: Sequence[Edit]) -> str:
        out = self.source[start:end]
        for begin, stop, text in sorted(edits, reverse=True):
            if start <= begin and stop <= end:
                out = out[: begin - start] + text + out[stop - start :]
        return out

    def _edits(self, node: ast.AST, within: bool = True) -> Iterator[Edit]:
        """What is known inside a node, the outermost expressions. within: in the statements that it holds, too."""
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.JoinedStr) or (isinstance(child, ast.stmt) and not within):
                continue  # Python before 3.12 does not tell where an f-string's expressions are
            if isinstance(child, ast.expr) and (text := self._value(child)) is not None:
                yield (*self._span(child), text)
            else:
                yield from self._edits(child, within)

    def _span(self, node: ast.expr) -> tuple[int, int]:
        def at(line: int, column: int) -> int:  # ast counts columns in bytes
            return self.starts[line - 1] + len(self.lines[line - 1].encode()[:column].decode())

        return at(node.lineno, node.col_offset), at(node.end_lineno or node.lineno, node.end_col_offset or 0)

    def _text(self, node: ast.expr) -> str:
        value = self._value(node)
        return value if value is not None else self._replaced(*self._span(node), list(self._edits(node)))

    def _value(self, node: ast.expr) -> str | None:
        """The text that a known expression becomes; None where it stays."""
        text = ast.unparse(node)
        if text == "job.moves_lr(batch)":
            known = self._known(node)
            when = "batch.completes_epoch" if known is None and self.job.scheduler.every == "epoch" else None
            return when or ("batch.completes_step" if known is None else str(known))
        if text == MICRO_BATCHES:
            return str(self.micro_batches)
        if self.micro_batches == 1 and text == "batch.completes_step":
            return "True"
        if isinstance(node, ast.IfExp) and (known := self._known(node.test)) is not None:
            return self._text(node.body if known else node.orelse)
        if isinstance(node, ast.BinOp) and self.micro_batches == 1 and text.endswith(f" * {MICRO_BATCHES}"):
            return self._text(node.left)
        if isinstance(node, ast.BoolOp):
            rest = [v for v in node.values if self._known(v) is not isinstance(node.op, ast.And)]
            if 0 < len(rest) < len(node.values):
                sign = " and " if isinstance(node.op, ast.And) else " or "
                loose = (ast.IfExp, ast.Lambda, ast.NamedExpr) + (ast.BoolOp,) * (len(rest) > 1)
                return sign.join(f"({self._text(v)})" if isinstance(v, loose) else self._text(v) for v in rest)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in self.settings:
            return literal(self.settings[node.id])
        return None

    def _otherwise(self, node: ast.If, dedent: int, certain: bool) -> list[str]:
        """What an `if` that is never true leaves: its elif's own if, or its else."""
        if not _elif(node):
            return self._statements(node.orelse, dedent + 4, certain=certain)
        lines = self._statements(node.orelse, dedent, certain=certain)
        at = next((number for number, line in enumerate(lines) if not _comment(line)), 0)
        return [re.sub(r"^( *)elif ", r"\1if ", line) if number == at else line for number, line in enumerate(lines)]

    def _else(self, node: ast.If, dedent: int) -> list[str]:
        """The elif and else of an `if` that the training decides."""
        body = node.orelse
        if _elif(node):
            nested: Any = node.orelse[0]
            known = self._known(nested.test)
            if known is None:
                return self._statements([nested], dedent)  # its own line says elif
            if not known:
                return self._else(nested, dedent)
            body = nested.body
        inner = self._statements(body, dedent)
        return self._dedented([" " * node.col_offset + "else:"], dedent) + inner if inner else []

    def _comments(self, node: ast.stmt) -> list[str]:
        above: list[str] = []
        number = _first(node) - 2
        while number >= 0 and _comment(self.lines[number]):
            above.insert(0, self.lines[number])
            number -= 1
        return above

    def _dedented(self, lines: list[str], by: int) -> list[str]:
        return [line[by:] if line[:by].isspace() or not by else line for line in lines]

    def _refusal(self, node: ast.Raise) -> UserError | None:
        """The sentence with which an engine's file refuses its settings."""
        call = node.exc
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name)):
            return None
        kind = getattr(self.engine, call.func.id, None)
        if not (isinstance(kind, type) and issubclass(kind, UserError)):
            return None
        known = {**vars(self.engine), **self.settings, "job": self.job}
        try:
            return kind(*(eval(ast.unparse(argument), known) for argument in call.args))
        except NameError:  # a sentence that names what is known on the ranks alone
            return kind(f"its engine refuses this: {ast.unparse(call)}")

    def _unused(self, node: ast.stmt) -> bool:
        """Observation, and the scheduler of a job that has none."""
        text = ast.unparse(node)
        whole = not isinstance(node, ast.For | ast.With | ast.If | ast.FunctionDef | ast.ClassDef)
        scheduler = whole and self.job.scheduler is None and "job.lr_scheduler(" in text
        return scheduler or text.startswith(("run.begin(", "run.step("))

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
        if text == "batch.completes_step" and (self.micro_batches == 1 or self.stepped):
            return True
        if text == "job.moves_lr(batch)":
            if self.job.scheduler is None:
                return False
            by_step = self.job.scheduler.every == "step"
            return True if by_step and (self.micro_batches == 1 or self.stepped) else None
        text = text.replace(MICRO_BATCHES, str(self.micro_batches))
        if not mentioned(text) <= {*self.settings, "job"} or isinstance(test, ast.Call):
            return None
        return bool(eval(text, {"job": self.job, **self.settings}))

    def _plain(self, node: ast.With) -> bool:
        """A block that this script does not need: main opens the group; one micro-batch has nothing to hold back."""
        text = ast.unparse(node.items[0].context_expr)
        return text == "process_group(world)" or (
            self.micro_batches == 1 and ("if batch.completes_step else" in text or "not batch.completes_step" in text)
        )

    def _renamed(self, text: str) -> str:
        for old, new in RENAMED:
            text = text.replace(old, new)
        parameters = r"job.optimizer.groups(\1)" if self.job.optimizer.groups is not None else r"\1.parameters()"
        built = rf"job.optimizer.cls({parameters}, **job.optimizer.settings)"
        return ANNOTATED.sub(r"\1 = ", re.sub(r"job\.optimizer\.build\(([\w.]+)\)", built, text))


def _without_unused(text: str, source: str) -> str:
    """Without imports inside it, and values noted, for what is left out of `source`."""
    for line in re.findall(r"^ +(?:(?:from \S+ )?import \w+|\w+ = .*[^\n(\[{])$", text, re.MULTILINE):
        name = line.rpartition(" ")[2] if "import " in line else line.split()[0]
        rest = text.replace(line + "\n", "", 1)
        if not _times(name, rest) and _times(name, source) > 1 and _parses(rest):
            return _without_unused(rest, source)
    return text


def _times(name: str, text: str) -> int:
    return len(re.findall(rf"(?<!\.)\b{name}\b", re.sub("#.*", "", text)))


def _parses(text: str) -> bool:
    """Whether it is Python still, and not a block without its only statement."""
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def _first(node: ast.stmt) -> int:
    """The line where a statement starts, which is its first decorator's."""
    first: int = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])
    return first


def _elif(node: ast.If) -> bool:
    return len(node.orelse) == 1 and isinstance(node.orelse[0], ast.If) and node.orelse[0].col_offset == node.col_offset


def _target(node: ast.Assign | ast.AnnAssign) -> str:
    target = node.targets[0] if isinstance(node, ast.Assign) else node.target
    return target.id if isinstance(target, ast.Name) else ""


def _comment(line: str) -> bool:
    return line.strip().startswith("#")
