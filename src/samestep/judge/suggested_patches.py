"""Makes the lines to write instead: for a finding whose mending is certain, a change of the user's source text.

The patch of a rule changes the statements of the lines that were recorded, and nothing where these are not as it
expects. `samestep check --fix` checks the patched script in a copy. The patches that several rules share are here.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

from samestep.judge.edits import Draft, call_in, keyword
from samestep.judge.findings import Ranks
from samestep.judge.places import OF_GRADIENTS, OF_WEIGHTS, Context, Place, Sources, called, calling
from samestep.judge.sites import context_of, sites_of
from samestep.judge.source import RANK, Source
from samestep.records.call_site import Call, CallSite
from samestep.records.findings import Finding
from samestep.rules import rule_of

SHARED_OUT = re.compile(r"batch|workers|accum|shard|chunk|samples|rows", re.IGNORECASE)
RANK_NOW, RANKS_NOW = "torch.distributed.get_rank()", "torch.distributed.get_world_size()"
TORCH = re.compile(r"(?<![\w.])torch\.\w")
SAMPLER, SUBSET = "torch.utils.data.distributed.DistributedSampler", "torch.utils.data.Subset"


@dataclass(frozen=True)
class Patch:
    """A change of one of the user's files. text: the text of the file afterwards."""

    file: str
    before: str
    text: str

    def diff(self, folder: PurePath) -> str:
        """Returns the change as a unified diff, in which the file is relative to a folder."""
        file = PurePath(self.file)
        name = str(file.relative_to(folder) if file.is_relative_to(folder) else file)
        before, after = self.before.splitlines(), self.text.splitlines()
        return "\n".join(difflib.unified_diff(before, after, name, name, n=1, lineterm=""))


def patch_of(finding: Finding, ranks: Ranks, sources: Sources) -> Patch | None:
    """Returns the change that mends a finding; None where none is certain."""
    rule = rule_of(finding.message.id)
    if rule is None or rule.patch is None:
        return None
    script = Script(context_of(finding, ranks, sources), finding.sites or sites_of(finding, ranks, sources))
    if script.draft is None:
        return None
    rule.patch(script)
    before, text = script.draft.source.text, script.draft.result()
    if text and len(TORCH.findall(text)) > len(TORCH.findall(before)) and "torch" not in script.draft.source.imports:
        return None  # the file does not import torch
    return Patch(script.file, before, text) if text else None


class Script:
    """The file in which a finding arises, as a draft. sites: the lines of the finding."""

    def __init__(self, context: Context, sites: Sequence[CallSite]) -> None:
        self.context, self.sites = context, sites
        self.file = sites[0].file if sites else ""
        source = context.sources.get(self.file)
        self.draft = Draft(source) if source else None

    @property
    def source(self) -> Source:
        assert self.draft
        return self.draft.source

    @property
    def edits(self) -> Draft:
        assert self.draft
        return self.draft

    def statements(self, place: Call | Place) -> list[ast.stmt]:
        """Returns the statements in this file of a place, or of a kind of call."""
        return self._at((called(place) if isinstance(place, str) else place)(self.context))

    def only(self, place: Call | Place) -> ast.stmt | None:
        """Returns the one statement of a place; None where there are several."""
        statements = self.statements(place)
        return statements[0] if len(statements) == 1 else None

    def first(self, place: Call | Place) -> ast.stmt | None:
        return next(iter(self.statements(place)), None)

    def shared(self) -> list[ast.stmt]:
        """Returns the statements of the finding's lines in this file."""
        return self._at(self.sites)

    def _at(self, sites: Sequence[CallSite]) -> list[ast.stmt]:
        statements = [self.source.statement(site.line) for site in sites if site.file == self.file]
        return list(dict.fromkeys(statement for statement in statements if statement is not None))

    def name_of(self, statement: ast.stmt | None) -> str:
        """Returns the name to which a statement assigns what it makes; '' where that is none."""
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            target = statement.targets[0]
            return ast.unparse(target) if isinstance(target, ast.Name | ast.Attribute) else ""
        return ""


# Rows


def call_set_epoch(script: Script) -> None:
    """Calls set_epoch at the begin of each epoch; where the sampler is made anew there, after that."""
    statement = script.first("sampler") or script.first("loader")
    if statement is None:
        return
    # A line may have several statements.
    of_line = [beside for beside in script.source.statements if beside.lineno == statement.lineno]
    statement = next((beside for beside in of_line if call_in(beside, "DistributedSampler")), statement)
    if not (name := script.name_of(statement)):
        return
    is_sampler = call_in(statement, "DistributedSampler") and not call_in(statement, "DataLoader")
    sampler = name if is_sampler else f"{name}.sampler"
    parameter = script.source.parameter(statement.lineno, "epoch")
    if parameter:
        script.edits.insert_after(statement, f"{sampler}.set_epoch({parameter})")
    else:
        insert_set_epoch(script, sampler)


def insert_set_epoch(script: Script, sampler: str) -> None:
    for site in called("iteration")(script.context)[:1]:
        loops = script.source.loops(site.line) if site.file == script.file else []
        loop = script.source.loop_at(loops[0]) if loops else None
        if isinstance(loop, ast.For) and isinstance(loop.target, ast.Name):
            script.edits.insert_first(loop, f"{sampler}.set_epoch({loop.target.id})")


def pass_the_epoch(script: Script) -> None:
    """Gives set_epoch the loop's number in place of a constant, or of one that is another on each rank."""
    statement = script.only("set_epoch")
    call = call_in(statement, "set_epoch")
    loops = [script.source.loop_at(line) for line in script.source.loops(statement.lineno)] if statement else []
    if call and len(call.args) == 1 and loops and isinstance(loops[-1], ast.For):
        target = loops[-1].target
        given = script.edits.code(call.args[0])
        if isinstance(target, ast.Name) and (isinstance(call.args[0], ast.Constant) or mentions_rank(given)):
            script.edits.replace(call.args[0], target.id)


def mentions_rank(code: str) -> bool:
    return any(RANK.fullmatch(word) for word in re.findall(r"\w+", code))


def share_one_order(script: Script) -> None:
    """Lets a DistributedSampler take its rank, its seed and its epoch as all others do."""
    call = call_in(script.first("sampler"), "DistributedSampler")
    if call is None:
        return
    rank, seed = keyword(call, "rank"), keyword(call, "seed")
    if rank and isinstance(rank.value, ast.Constant):
        script.edits.replace(rank.value, RANK_NOW)
    elif seed and RANK.search(script.edits.code(seed.value)):
        script.edits.replace(seed.value, "0")
    elif mentions_rank(ast.unparse(script.only("set_epoch") or ast.Pass())):
        pass_the_epoch(script)


# Losses and gradients


def drop_the_ranks(script: Script) -> None:
    """Takes the number of ranks out of a product or a quotient, where it stands in one of the finding's lines."""
    for statement in script.shared():
        # Such a name divides the batch or the workers by the ranks, which is right.
        if not SHARED_OUT.search(ast.unparse(statement)) and script.edits.without_ranks(statement):
            return


def clipping_statement(script: Script) -> ast.stmt | None:
    """Returns the statement that clips: by torch's function, or by the script's own that says so in its name."""
    if script.statements("clip"):
        return script.only("clip")
    calls = [node for node in script.statements(calling(OF_GRADIENTS)) if "clip" in ast.unparse(node).partition("(")[0]]
    return calls[0] if len(calls) == 1 else None


def clear_after_the_step(script: Script) -> None:
    """Moves zero_grad() behind the step; where the step comes before backward(), moves the step behind backward()."""
    step, clear, backward = (script.only(call) for call in ("optimizer step", "zero_grad", "backward"))
    if step is None or clear is None or backward is None:
        return
    beside = script.source.block(backward)
    if step in beside and step.lineno < backward.lineno:
        clip = [statement for statement in script.statements("clip") if statement in beside]
        move_statement(script, step, after=max([backward, *clip], key=lambda statement: statement.lineno))
    elif clear.lineno != step.lineno:
        move_statement(script, clear, after=step)


def move_statement(
    script: Script, statement: ast.stmt, *, after: ast.stmt | None = None, before: ast.stmt | None = None
) -> None:
    if not script.edits.is_alone(statement):
        return
    code = script.edits.code(statement)
    if "\n" in code:
        return
    script.edits.remove(statement)
    if after:
        script.edits.insert_after(after, code)
    if before:
        script.edits.insert_before(before, code)


# Clipping


def clip_before_the_step(script: Script) -> None:
    """Moves the clipping right before the step."""
    clip, step = clipping_statement(script), script.only("optimizer step")
    if clip and step:
        move_statement(script, clip, before=step)


# Rates and schedules


def unwrap_test_of_rank(script: Script, condition: ast.AST | None) -> bool:
    """Replaces a condition on the rank by its body. Returns whether the statement was such a condition."""
    if not isinstance(condition, ast.If) or condition.orelse or not is_test_of_rank(condition.test):
        return False
    script.edits.unwrap(condition)
    return True


def is_test_of_rank(test: ast.expr) -> bool:
    """Returns whether a condition asks for nothing but the rank."""
    names = [node.id for node in ast.walk(test) if isinstance(node, ast.Name)]
    calls = [node for node in ast.walk(test) if isinstance(node, ast.Call)]
    ranks = [name for name in names if RANK.fullmatch(name)]
    return (bool(ranks) and len(ranks) == len(names)) or (
        len(calls) == 1 and ast.unparse(calls[0].func).endswith("get_rank")
    )


# Beside the steps


def average_after_the_step(script: Script) -> None:
    """Moves the update of a moving average behind the optimizer's step."""
    step, update = script.only("optimizer step"), average_update(script)
    if step and update:
        move_statement(script, update, after=step)


def average_update(script: Script) -> ast.stmt | None:
    """Returns the statement that updates a moving average in the training loop, or in the forward; None for several."""
    changes = [*script.statements(calling(OF_WEIGHTS)), *script.statements(OF_WEIGHTS)]
    loops = {line for statement in script.statements("backward") for line in script.source.loops(statement.lineno)}
    inside = [statement for statement in changes if loops.intersection(script.source.loops(statement.lineno))]
    inside = inside or [node for node in changes if script.source.function(node.lineno) == "forward"]
    return inside[0] if len(inside) == 1 else None
