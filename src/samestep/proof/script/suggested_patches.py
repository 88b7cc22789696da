"""The lines to write instead: for a finding whose mending is certain, a change of the user's source text.

A table has a function for the id of each such finding. It changes the statements of the lines that were recorded, and
nothing where these are not as it expects. What comes out is checked by `samestep check --fix`, in a copy.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from samestep.proof.script.edits import Draft, argument_of, call_in, is_of_gradients, is_ranks, keyword
from samestep.proof.script.findings import Ranks
from samestep.proof.script.sites import (
    OF_GRADIENTS,
    OF_WEIGHTS,
    Context,
    Place,
    Sources,
    called,
    calling,
    context_of,
    evaluated,
    sites_of,
    written,
)
from samestep.proof.script.source import RANK, Source
from samestep.proof.script.source_search import aliases, calls
from samestep.records.call_site import Call, CallSite
from samestep.records.findings import Finding

SHARED_OUT = re.compile(r"batch|workers|accum|shard|chunk|samples|rows", re.IGNORECASE)
RANK_NOW, RANKS_NOW = "torch.distributed.get_rank()", "torch.distributed.get_world_size()"
TORCH = re.compile(r"(?<![\w.])torch\.\w")
SAMPLER, SUBSET = "torch.utils.data.distributed.DistributedSampler", "torch.utils.data.Subset"


@dataclass(frozen=True)
class Patch:
    """A change of one of the user's files. text: what it holds afterwards."""

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
    mend = MENDERS.get(finding.message.id)
    if mend is None:
        return None
    script = Script(context_of(finding, ranks, sources), finding.sites or sites_of(finding, ranks, sources))
    if script.draft is None:
        return None
    mend(script)
    before, text = script.draft.source.text, script.draft.result()
    if text and len(TORCH.findall(text)) > len(TORCH.findall(before)) and "torch" not in script.draft.source.imports:
        return None  # the file has torch under no name
    return Patch(script.file, before, text) if text else None


class Script:
    """The file in which a finding arises, as a draft. sites: of the finding."""

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


Mender = Callable[[Script], None]


# Rows


def share_rows(script: Script) -> None:
    """Gives the loader a DistributedSampler, which set_epoch shuffles anew in each epoch."""
    statement = script.first("loader")
    call = call_in(statement, "DataLoader")
    if statement is None or call is None or not call.args or keyword(call, "batch_sampler"):
        return
    shuffle, sampler = keyword(call, "shuffle"), keyword(call, "sampler")
    data = script.edits.code(call.args[0])
    drawn = script.edits.code(shuffle.value) if shuffle else "False"
    made = _sampler_of(script, data) or f"{SAMPLER}({data}, shuffle={drawn})"
    place = sampler or shuffle
    if place:
        script.edits.replace(place, f"sampler={made}")
    else:
        script.edits.replace(call.args[0], f"{data}, sampler={made}")
    if sampler and shuffle:
        return
    loader = script.name_of(statement)
    if drawn == "True" and loader and "set_epoch" not in script.source.text:
        _set_epoch(script, f"{loader}.sampler")


def _sampler_of(script: Script, data: str) -> str:
    """Returns the name of a DistributedSampler of a dataset that the script makes already; '' where it has none."""
    for statement in script.source.statements:
        call = call_in(statement, "DistributedSampler") if isinstance(statement, ast.Assign) else None
        if call and call.args and script.edits.code(call.args[0]) == data and not keyword(call, "rank"):
            return script.name_of(statement)
    return ""


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
    sampler = name if call_in(statement, "DistributedSampler") else f"{name}.sampler"
    parameter = script.source.parameter(statement.lineno, "epoch")
    if parameter:
        script.edits.insert_after(statement, f"{sampler}.set_epoch({parameter})")
    else:
        _set_epoch(script, sampler)


def _set_epoch(script: Script, sampler: str) -> None:
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
        if isinstance(target, ast.Name) and (isinstance(call.args[0], ast.Constant) or _mentions_rank(given)):
            script.edits.replace(call.args[0], target.id)


def _mentions_rank(code: str) -> bool:
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
    elif _mentions_rank(ast.unparse(script.only("set_epoch") or ast.Pass())):
        pass_the_epoch(script)


# Losses and gradients


def divide_by_accumulation(script: Script) -> None:
    """Divides the loss that is given to backward() by the number of micro-batches."""
    statement = script.only("backward")
    loss = _loss_of(statement)
    if statement is None or loss is None:
        return
    count = script.source.micro_batches(statement.lineno) or str(
        script.context.finding.message.fields.get("micro_batches", "")
    )
    if count:
        code = script.edits.code(loss)
        divided = f"{code} / {count}" if isinstance(loss, ast.Name) else f"({code}) / {count}"
        is_object = _is_object(statement, loss)
        script.edits.replace(loss, f"({divided})" if is_object else divided)


def _loss_of(statement: ast.stmt | None) -> ast.expr | None:
    """Returns the loss in `loss.backward()`, `scaler.scale(loss).backward()` or `accelerator.backward(loss)`."""
    call = call_in(statement, "backward")
    if call is None or not isinstance(call.func, ast.Attribute):
        return None
    if call.args:
        return call.args[0]
    scaled = call.func.value
    if isinstance(scaled, ast.Call) and ast.unparse(scaled.func).endswith(".scale") and len(scaled.args) == 1:
        return scaled.args[0]
    return scaled


def _is_object(statement: ast.stmt, loss: ast.expr) -> bool:
    """Whether a loss is what backward() is called of, and has no brackets yet."""
    return any(isinstance(node, ast.Attribute) and node.value is loss for node in ast.walk(statement)) and isinstance(
        loss, ast.Name
    )


def drop_the_ranks(script: Script) -> None:
    """Takes the number of ranks out of a product or a quotient, where it stands in one of the finding's lines."""
    for statement in script.shared():
        # What a rank reads of the batch, or which loader workers it has, is shared out rightly there.
        if not SHARED_OUT.search(ast.unparse(statement)) and script.edits.without_ranks(statement):
            return


def _clip(script: Script) -> ast.stmt | None:
    """Returns the statement that clips: by torch's function, or by the script's own that says so in its name."""
    if script.statements("clip"):
        return script.only("clip")
    calls = [node for node in script.statements(calling(OF_GRADIENTS)) if "clip" in ast.unparse(node).partition("(")[0]]
    return calls[0] if len(calls) == 1 else None


def divide_gradients_by_ranks(script: Script) -> None:
    """Divides gradients that are added up over the ranks by their number."""
    calls = [(statement, call) for statement in script.shared() if (call := call_in(statement, "all_reduce"))]
    # What is added up to be printed is no gradient.
    of_gradients = [
        (statement, call, tensor)
        for statement, call in calls
        if (tensor := argument_of(call, "tensor", 0)) and is_of_gradients(tensor, statement, script.source)
    ]
    # Along one of several axes they may rightly be added up.
    if len(of_gradients) != 1:
        return
    ((statement, call, tensor),) = of_gradients
    group, is_async = argument_of(call, "group", 2), argument_of(call, "async_op", 3)
    reduced = script.edits.code(tensor)
    ranks = RANKS_NOW.replace("()", f"({script.edits.code(group) if group else ''})")
    if is_async and ast.unparse(is_async) != "False":
        _divide_after_wait(script, reduced, ranks)
    elif isinstance(statement, ast.Expr):
        script.edits.insert_after(statement, f"{reduced} /= {ranks}")


def _divide_after_wait(script: Script, reduced: str, ranks: str) -> None:
    for line in calls(script.source, "wait"):
        statement = script.source.statement(line)
        loops = [script.source.loop_at(number) for number in script.source.loops(line)]
        if statement and loops and isinstance(loops[0], ast.For) and isinstance(statement, ast.Expr):
            names = {node.id for node in ast.walk(loops[0].target) if isinstance(node, ast.Name)}
            if reduced.partition(".")[0] in names and script.source.parent(statement) is loops[0]:
                script.edits.insert_after(statement, f"{reduced} /= {ranks}")
                return


def clear_gradients(script: Script) -> None:
    """Clears the gradients after each step."""
    statement = script.only("optimizer step")
    if statement and (optimizer := _optimizer_of(statement)):
        script.edits.insert_after(statement, f"{optimizer}.zero_grad()")


def _optimizer_of(statement: ast.stmt) -> str:
    """Returns the optimizer in `optimizer.step()` or `scaler.step(optimizer)`."""
    call = call_in(statement, "step")
    if call is None or not isinstance(call.func, ast.Attribute):
        return ""
    stepped = call.args[0] if len(call.args) == 1 else call.func.value
    return ast.unparse(stepped) if isinstance(stepped, ast.Name | ast.Attribute) else ""


def clear_after_the_step(script: Script) -> None:
    """Moves zero_grad() behind the step; or, where the step comes before backward(), the step behind that."""
    step, clear, backward = (script.only(call) for call in ("optimizer step", "zero_grad", "backward"))
    if step is None or clear is None or backward is None:
        return
    beside = script.source.block(backward)
    if step in beside and step.lineno < backward.lineno:
        clip = [statement for statement in script.statements("clip") if statement in beside]
        _move(script, step, after=max([backward, *clip], key=lambda statement: statement.lineno))
    elif clear.lineno != step.lineno:
        _move(script, clear, after=step)


def _move(
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


def forward_through_the_wrapper(script: Script) -> None:
    """Calls the wrapper in place of what it wraps."""
    statement = script.only("forward")
    calls = [
        node
        for node in ast.walk(statement or ast.Pass())
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "module"
    ]
    if len(calls) == 1 and isinstance(calls[0].func, ast.Attribute):
        script.edits.replace(calls[0].func, script.edits.code(calls[0].func.value))


def reduce_at_the_last_micro_batch(script: Script) -> None:
    """Lets the wrapper reduce at the last micro-batch in place of the first one."""
    for statement in script.shared():
        for node in ast.walk(_items(statement) if hasattr(statement, "body") else statement):
            match node:
                case ast.Compare(ast.BinOp(ast.Name() as number, ast.Mod()), [ast.Eq()], [ast.Constant(0)]):
                    script.edits.replace(number, f"({number.id} + 1)")
                    return
                case ast.Compare(ast.Name(), [ast.Eq()], [ast.Constant(0) as zero]):
                    if count := script.source.micro_batches(statement.lineno):
                        script.edits.replace(zero, f"{count} - 1")
                    return


def _items(statement: ast.stmt) -> ast.AST:
    items: list[Any] = [item.context_expr for item in getattr(statement, "items", [])]
    return ast.Tuple(items, ast.Load())


# Clipping


def unscale_before_clipping(script: Script) -> None:
    """Divides the gradients by the scaler's factor before they are clipped."""
    clip, step = script.only("clip"), script.only("optimizer step")
    call = call_in(step, "step")
    if clip and call and len(call.args) == 1 and isinstance(call.func, ast.Attribute):
        scaler, optimizer = ast.unparse(call.func.value), ast.unparse(call.args[0])
        script.edits.insert_before(clip, f"{scaler}.unscale_({optimizer})")


def clip_before_the_step(script: Script) -> None:
    """Moves the clipping right before the step."""
    clip, step = _clip(script), script.only("optimizer step")
    if clip and step:
        _move(script, clip, before=step)


def clip_all_together(script: Script) -> None:
    """Clips all parameters together in place of a loop that clips each."""
    clip = script.only("clip")
    loop = script.source.parent(clip) if clip else None
    call = call_in(clip, "clip_grad_norm_")
    if call and isinstance(loop, ast.For) and len(loop.body) == 1 and call.args:
        clipped = script.edits.code(call)
        first = script.edits.code(call.args[0])
        if first == script.edits.code(loop.target):
            script.edits.replace(loop, clipped.replace(f"({first},", f"({script.edits.code(loop.iter)},", 1))


# Rates and schedules


def advance_once(script: Script) -> None:
    """Advances the schedule once in place of a loop over the ranks."""
    statement = script.only("scheduler step")
    loop = script.source.parent(statement) if statement else None
    if isinstance(loop, ast.For) and len(loop.body) == 1 and any(is_ranks(node) for node in ast.walk(loop.iter)):
        script.edits.unwrap(loop)


def advance_after_the_step(script: Script) -> None:
    """Advances the schedule with the optimizer's step."""
    statement, step = script.only("scheduler step"), script.only("optimizer step")
    if statement and step:
        _move(script, statement, after=step)


def on_all_ranks(script: Script) -> None:
    """Does on all ranks what stands under a condition on the rank."""
    for statement in [*script.statements("scheduler step"), *script.shared()]:
        condition = statement if isinstance(statement, ast.If) else script.source.parent(statement)
        if _unwrap_test_of_rank(script, condition):
            return


def _unwrap_test_of_rank(script: Script, condition: ast.AST | None) -> bool:
    """Puts what stands under a condition on the rank in its place. Returns whether it was one."""
    if not isinstance(condition, ast.If) or condition.orelse or not _is_test_of_rank(condition.test):
        return False
    script.edits.unwrap(condition)
    return True


def _is_test_of_rank(test: ast.expr) -> bool:
    """Whether a condition asks for nothing but the rank."""
    names = [node.id for node in ast.walk(test) if isinstance(node, ast.Name)]
    calls = [node for node in ast.walk(test) if isinstance(node, ast.Call)]
    ranks = [name for name in names if RANK.fullmatch(name)]
    return (bool(ranks) and len(ranks) == len(names)) or (
        len(calls) == 1 and ast.unparse(calls[0].func).endswith("get_rank")
    )


# What is beside the steps


def average_after_the_step(script: Script) -> None:
    """Moves the update of a moving average behind the optimizer's step."""
    step, update = script.only("optimizer step"), _update(script)
    if step and update:
        _move(script, update, after=step)


def average_on_all_ranks(script: Script) -> None:
    """Updates a moving average on all ranks in place of one."""
    if update := _update(script):
        _unwrap_test_of_rank(script, script.source.parent(update))


def _update(script: Script) -> ast.stmt | None:
    """Returns the statement that updates a moving average in the training loop, or in the forward; None for several."""
    changes = [*script.statements(calling(OF_WEIGHTS)), *script.statements(OF_WEIGHTS)]
    loops = {line for statement in script.statements("backward") for line in script.source.loops(statement.lineno)}
    inside = [statement for statement in changes if loops.intersection(script.source.loops(statement.lineno))]
    inside = inside or [node for node in changes if script.source.function(node.lineno) == "forward"]
    return inside[0] if len(inside) == 1 else None


def seed_by_rank(script: Script) -> None:
    """Seeds each rank otherwise once the model is made and wrapped: all ranks begin with the same weights."""
    wrapper, seeds = script.first("wrapper"), script.statements("seed")
    if wrapper is None or not seeds:
        return
    call = call_in(seeds[-1], "manual_seed")
    if call and len(call.args) == 1 and seeds[-1].lineno > wrapper.lineno:
        script.edits.replace(call.args[0], f"{script.edits.code(call.args[0])} + {RANK_NOW}")
    else:
        script.edits.insert_after(wrapper, f"torch.manual_seed(torch.initial_seed() + {RANK_NOW})")


def broadcast_weights(script: Script) -> None:
    """Sends rank 0's weights to all ranks once the model is made."""
    statement = script.first("model")
    name = script.name_of(statement)
    wrappers = ("DDP", "DistributedDataParallel", "FSDP")
    if statement and name and not any(call_in(statement, wrapper) for wrapper in wrappers):
        script.edits.insert_after(
            statement,
            f"for tensor in {name}.state_dict().values():",
            "    torch.distributed.broadcast(tensor, 0)",
        )


def evaluate_each_row_once(script: Script) -> None:
    """Shares an evaluation out without padding."""
    call = call_in(script.only(evaluated("loader")), "DataLoader")
    sampler = keyword(call, "sampler") if call else None
    if call and call.args and sampler and not keyword(call, "shuffle"):
        data = script.edits.code(call.args[0])
        script.edits.replace(call.args[0], f"{SUBSET}({data}, range({RANK_NOW}, len({data}), {RANKS_NOW}))")
        script.edits.replace(sampler, "shuffle=False")


def evaluate_the_last_batch(script: Script) -> None:
    """Keeps the last batch of an evaluation."""
    call = call_in(script.only(evaluated("loader")), "DataLoader")
    drop_last = keyword(call, "drop_last") if call else None
    if call and drop_last:
        script.edits.replace(drop_last.value, "False")


def save_on_rank_0(script: Script) -> None:
    """Lets rank 0 alone write a file."""
    statement = script.first("save")
    if isinstance(statement, ast.Expr) and script.edits.is_alone(statement):
        script.edits.indent(statement, f"if {RANK_NOW} == 0:")


def copy_the_reference(script: Script) -> None:
    """Makes a reference a frozen copy of the policy, in place of another name for it."""
    statement = script.only(written(aliases))
    if isinstance(statement, ast.Assign) and "copy" in script.source.imports:
        policy = script.edits.code(statement.value)
        script.edits.replace(statement.value, f"copy.deepcopy({policy}).eval().requires_grad_(False)")


MENDERS: Mapping[str, Mender] = {
    "rows_not_shared_out": share_rows,
    "set_epoch_never_called": call_set_epoch,
    "set_epoch_not_called_yet": call_set_epoch,
    "set_epoch_given_the_same_number": pass_the_epoch,
    "samplers_do_not_share_one_order": share_one_order,
    "ranks_train_the_same_rows": share_one_order,
    "loss_not_divided_by_accumulation": divide_by_accumulation,
    "loss_divided_by_ranks": drop_the_ranks,
    "loss_multiplied_by_ranks": drop_the_ranks,
    "gradient_divided_by_the_ranks": drop_the_ranks,
    "gradient_multiplied_by_the_ranks": drop_the_ranks,
    "gradients_divided_by_ranks_again": drop_the_ranks,
    "gradients_summed_over_ranks": divide_gradients_by_ranks,
    "gradients_never_cleared": clear_gradients,
    "gradients_removed_before_the_step": clear_after_the_step,
    "gradients_removed_between_micro_batches": clear_after_the_step,
    "ranks_never_reduce_gradients": forward_through_the_wrapper,
    "reduced_before_last_micro_batch": reduce_at_the_last_micro_batch,
    "clipped_while_scaled": unscale_before_clipping,
    "clipped_before_last_micro_batch": clip_before_the_step,
    "clipped_after_each_micro_batch": clip_before_the_step,
    "clipped_before_reduction": clip_before_the_step,
    "clipped_before_backward": clip_before_the_step,
    "clipped_in_parts": clip_all_together,
    "clipping_depends_on_ranks": drop_the_ranks,
    "rate_depends_on_ranks": drop_the_ranks,
    "schedule_advances_once_per_rank": advance_once,
    "schedule_advances_each_micro_batch": advance_after_the_step,
    "rates_differ_between_ranks": on_all_ranks,
    "average_updated_at_each_micro_batch": average_after_the_step,
    "average_updated_before_step": average_after_the_step,
    "frozen_weights_change_on_some_ranks": average_on_all_ranks,
    "ranks_draw_the_same_random_numbers": seed_by_rank,
    "ranks_begin_with_different_weights": broadcast_weights,
    "evaluated_rows_counted_twice": evaluate_each_row_once,
    "rows_evaluated_by_no_rank": evaluate_the_last_batch,
    "ranks_write_one_file": save_on_rank_0,
    "reference_follows_policy": copy_the_reference,
}
