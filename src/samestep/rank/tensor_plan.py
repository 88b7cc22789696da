"""How tensor parallel ranks divide a model: which layers are split by columns, which by rows.

A plan is what Job(parallel=…) says, a Hugging Face model's own tp_plan, or what is found in the model: pairs of Linear
layers between which each part of the columns needs that part alone, as in elementwise operations and attention heads.
All are tried in one process before any rank starts: the parts' outputs must add up to the whole layer's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from samestep.data.schedule import cut
from samestep.errors import Refused, UserError, nearest_name
from samestep.job import Job
from samestep.job.walk import leaves_of
from samestep.message import Message, message
from samestep.rank.plan_trial import first_rows, is_close, without_compiling

COLWISE, ROWWISE, GATHERED = "colwise", "rowwise", "colwise_gather"
STYLES = (COLWISE, ROWWISE, GATHERED)
SPLIT, RANDOM, WHOLE = "split", "random", "whole"  # what is found of a pair of layers
OTHER_RANKS = (2, 3)  # that show whether a pair can be split at all
ROWS = 2  # of the batch on which a plan is tried: the fewest that BatchNorm accepts
CLOSE = 1e-3  # relative: what is not split rightly is off by as much as it is large
SEED = 11  # of the weights with which a plan is tried: a layer of zeros would hide how it is split
_close = partial(is_close, tolerance=CLOSE)

# The styles of a Hugging Face model's tp_plan that these are; layers of its other styles stay whole.
THEIR_STYLES = {
    "colwise": COLWISE,
    "rowwise": ROWWISE,
    "embedding_rowwise": ROWWISE,
    "colwise_rep": GATHERED,
    "colwise_gather_output": GATHERED,
}

Plan = Mapping[str, str]  # the name of a layer -> one of STYLES


@dataclass
class Division:
    """A plan, and what stays whole though it could be split. random: layers before which random numbers are drawn, of
    which each rank would draw the same ones for another part."""

    plan: dict[str, str]
    random: list[str] = field(default_factory=list)

    def said(self, model: nn.Module, ranks: int) -> Message:
        """Returns how `ranks` ranks divide the model, for the user to read."""
        layers = dict(model.named_modules())
        split = sum(parameter.numel() for name in self.plan for parameter in layers[name].parameters())
        total = sum(parameter.numel() for parameter in model.parameters())
        styles = dict.fromkeys(f"{_pattern(name)} {style}" for name, style in self.plan.items())
        random = [*dict.fromkeys(map(_pattern, self.random))]
        linear = [name for name, layer in layers.items() if isinstance(layer, nn.Linear) and name not in self.plan]
        whole = [pattern for pattern in dict.fromkeys(map(_pattern, linear)) if pattern not in random]
        return message(
            "tensor_ranks_divide_the_model",
            ranks=ranks,
            plan=", ".join(styles),
            split=split,
            total=total,
            random=random or None,
            whole=whole or None,
        )


def _pattern(name: str) -> str:
    """Returns 'blocks.*.feed.0' of 'blocks.3.feed.0', as Job(parallel=…) takes it."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name, count=1)


def division_of(job: Job, ranks: int, device: str = "cpu") -> Division:
    """Returns how `ranks` ranks divide the job's model. Raises Refused, or UserError for a mistake in Job.parallel,
    where they cannot."""
    with torch.random.fork_rng():
        trial = Trial(job, device)
    if job.parallel is not None:
        return Division(_given(job.parallel, trial, ranks))
    plan = _declared(trial, ranks)
    return Division(plan) if plan and trial.wrong_part(plan, ranks) is None else _found(trial, ranks)


def _declared(trial: Trial, ranks: int) -> dict[str, str]:
    """Returns what a Hugging Face model in the job's model says of itself, without tied layers and sizes that the ranks
    do not divide."""
    plan: dict[str, str] = {}
    layers = dict(trial.model.named_modules())
    for prefix, module in layers.items():
        declared = getattr(module, "tp_plan", None)
        for pattern, style in declared.items() if isinstance(declared, Mapping) else ():
            asked = f"{prefix}.{pattern}" if prefix else pattern
            for name in (name for name in layers if fnmatchcase(name, asked) and style in THEIR_STYLES):
                layer = layers[name]
                if isinstance(layer, nn.Linear | nn.Embedding) and not trial.shares_weights(layer):
                    plan[name] = THEIR_STYLES[style]
    return {name: style for name, style in plan.items() if _size(layers[name], style) % ranks == 0}


def _given(parallel: Mapping[str, str], trial: Trial, ranks: int) -> dict[str, str]:
    layers = {name: layer for name, layer in trial.model.named_modules() if isinstance(layer, nn.Linear | nn.Embedding)}
    plan: dict[str, str] = {}
    for pattern, style in parallel.items():
        if style == "stage":  # of a pipeline
            continue
        if style not in STYLES:
            raise UserError(message("parallel_has_no_such_style", layer=pattern, style=style, styles=[*STYLES]))
        matching = [name for name in layers if fnmatchcase(name, pattern)]
        if not matching:
            hint = nearest_name(pattern, [*layers])
            raise UserError(message("parallel_names_no_layer", layer=pattern, hint=hint))
        for name in matching:
            if isinstance(layers[name], nn.Embedding) and style != ROWWISE:
                raise UserError(message("embedding_is_split_rowwise", layer=name, style=style))
            plan[name] = style
    for name in plan:
        _check_size(name, layers[name], plan[name], ranks)
        if trial.shares_weights(layers[name]):
            raise Refused(message("tied_layer_is_not_split", layer=name))
    if wrong := trial.wrong_part(plan, ranks):
        trial.model.eval()
        if trial.wrong_part(plan, ranks) is None:
            raise Refused(message("random_numbers_inside_of_split_layers", layer=wrong, ranks=ranks))
        raise Refused(message("parts_of_split_layers_do_not_add_up", layer=wrong, ranks=ranks))
    return plan


def _size(layer: Any, style: str) -> int:
    """Returns the size along which a Linear layer or an Embedding is split."""
    size: int = layer.weight.shape[1 if style == ROWWISE and isinstance(layer, nn.Linear) else 0]
    return size


def _check_size(name: str, layer: nn.Linear | nn.Embedding, style: str, ranks: int) -> None:
    if (size := _size(layer, style)) % ranks:
        raise Refused(message("layer_does_not_divide", layer=name, size=size, ranks=ranks))


def _found(trial: Trial, ranks: int, *, alike: bool = True) -> Division:
    """Finds the pairs of Linear layers that can be split, in the order of the forward pass; where there is none, the
    single layers, whose outputs are gathered. alike: what is so in one block is so in all of a list, until the plan is
    tried as a whole: each block by itself takes as many times as long."""
    division, judged = Division({}), dict[str, str]()
    for columns, rows in trial.candidates():
        if any(name in division.plan for name in (*columns, rows)):
            continue
        pair = {**dict.fromkeys(columns, COLWISE), rows: ROWWISE}
        pattern = " ".join(map(_pattern, pair)) if alike else rows
        if pattern not in judged:
            judged[pattern] = _judged(trial, pair, ranks)
        if judged[pattern] == SPLIT:
            for name in pair:
                _check_size(name, trial.linear[name], pair[name], ranks)
            division.plan |= pair
        elif judged[pattern] == RANDOM:
            division.random.append(rows)
    if alike and division.plan and trial.wrong_part(division.plan, ranks):
        return _found(trial, ranks, alike=False)
    if not division.plan:
        division.plan = {name: GATHERED for name, layer in trial.linear.items() if layer.out_features % ranks == 0}
    if not division.plan:
        sizes = [f"{name}: {layer.out_features}" for name, layer in trial.linear.items()]
        raise Refused(message("no_layer_can_be_split", ranks=ranks, layers=sizes))
    return division


def _judged(trial: Trial, pair: Plan, ranks: int) -> str:
    """Returns SPLIT for a pair of layers that can be split, RANDOM for one that could without random numbers, else
    WHOLE. Raises Refused for one that other numbers of ranks can split."""
    if trial.wrong_part(pair, ranks) is None:
        return SPLIT
    if number := next((n for n in OTHER_RANKS if n != ranks and trial.wrong_part(pair, n) is None), 0):
        raise Refused(message("layer_splits_over_other_ranks", layer=next(iter(pair)), ranks=ranks, others=number))
    trial.model.eval()
    without_random = trial.wrong_part(pair, ranks) is None
    trial.model.train()
    return RANDOM if without_random else WHOLE


class Trial:
    """A model with random weights in its Linear layers, and a few rows, on which plans are tried.

    linear: the Linear layers that forward calls once, in its order.
    """

    def __init__(self, job: Job, device: str) -> None:
        self.model = job.model().to(device).train()
        self._batch = first_rows(job, ROWS, device)
        self._job = job.of_phases()[0]
        generator = torch.Generator().manual_seed(SEED)
        for layer in self.model.modules():
            if isinstance(layer, nn.Linear):
                for parameter in layer.parameters(recurse=False):
                    drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                    parameter.data.copy_(drawn / layer.in_features**0.5)
        self._called: list[tuple[str, Any]] = []  # (the name of a Linear layer, its input), in their order
        with ExitStack() as hooks:
            for name, layer in self.model.named_modules():
                if type(layer) is nn.Linear:
                    hook = layer.register_forward_pre_hook(self._note(name))
                    hooks.callback(hook.remove)
            self._forward()
        names = [name for name, _ in self._called]
        layers = dict(self.model.named_modules())
        self.linear: dict[str, nn.Linear] = {
            name: layers[name] for name in names if names.count(name) == 1 and not self.shares_weights(layers[name])
        }

    def _note(self, name: str) -> Callable[[nn.Module, Any], None]:
        return lambda layer, inputs: self._called.append((name, inputs[0] if inputs else None))

    def _forward(self) -> Any:
        """Computes the output and the loss, which may read what a layer has left beside its output."""
        with torch.random.fork_rng(), torch.no_grad(), without_compiling():
            torch.manual_seed(SEED)
            output = self._job.forward(self.model, self._batch)
            return output, self._job.criterion(output, self._batch)

    def shares_weights(self, layer: nn.Module) -> bool:
        """Returns whether another module has one of the layer's parameters, too (tied weights)."""
        held = {id(parameter) for parameter in layer.parameters(recurse=False)}
        holders = (module for module in self.model.modules() if module is not layer)
        return any(id(parameter) in held for module in holders for parameter in module.parameters(recurse=False))

    def candidates(self) -> Iterator[tuple[tuple[str, ...], str]]:
        """Yields (layers to split by columns, the layer after them, to split by rows): the Linear layer that is called
        before it, and those that read the same input, as attention's query, key and value do."""
        for number in range(1, len(self._called)):
            name, (before, read) = self._called[number][0], self._called[number - 1]
            together = [before]
            for earlier, also_read in self._called[: number - 1][::-1]:
                if also_read is not read or read is None:
                    break
                together.insert(0, earlier)
            if all(layer in self.linear for layer in (*together, name)):
                yield tuple(together), name

    def wrong_part(self, plan: Plan, ranks: int) -> str | None:
        """Computes the forward pass of each rank in turn, with its part of the layers. Returns the layer after which
        the parts do not add up to the whole, or the last one where the model's output differs; None: all is right."""
        layers = dict(self.model.named_modules())
        joined = [name for name, style in plan.items() if style != COLWISE and isinstance(layers[name], nn.Linear)]
        with self._outputs(joined) as outputs:
            whole = leaves_of(self._forward())
        whole_outputs, sums = dict(outputs), dict[str, Tensor]()
        last = [*plan][-1] if plan else ""
        for rank in range(ranks):
            with ExitStack() as parts:
                for name, style in plan.items():
                    if isinstance(layers[name], nn.Linear):
                        parts.enter_context(_narrowed(layers[name], style, rank, ranks))
                outputs = parts.enter_context(self._outputs(joined, instead=whole_outputs))
                try:
                    output = leaves_of(self._forward())
                except Exception:  # a shape that does not fit, wherever it shows
                    return next((name for name in joined if name not in outputs), last)
            for name in joined:
                if name not in outputs:
                    return name
                if plan[name] == ROWWISE:
                    sums[name] = sums[name] + outputs[name] if name in sums else outputs[name]
            if not all(map(_close, whole, output)):
                return last
        return next((name for name, total in sums.items() if not _close(whole_outputs[name], total)), None)

    @contextmanager
    def _outputs(
        self, names: Sequence[str], instead: Mapping[str, Tensor] | None = None
    ) -> Iterator[dict[str, Tensor]]:
        """Takes the outputs of layers while the block runs. instead: what the layers then return in their place."""
        layers, outputs = dict(self.model.named_modules()), dict[str, Tensor]()

        def take(name: str) -> Callable[[nn.Module, Any, Tensor], Tensor]:
            def hook(layer: nn.Module, inputs: Any, output: Tensor) -> Tensor:
                outputs[name] = output
                return output if instead is None else instead[name]

            return hook

        with ExitStack() as hooks:
            for name in names:
                hooks.callback(layers[name].register_forward_hook(take(name)).remove)
            yield outputs


@contextmanager
def _narrowed(layer: nn.Linear, style: str, rank: int, ranks: int) -> Iterator[None]:
    """Leaves a Linear layer with one rank's part while the block runs; the bias of rows is rank 0's alone."""
    whole = dict(layer._parameters)
    dim = 1 if style == ROWWISE else 0
    sizes = cut(layer.weight.shape[dim], ranks)
    first, size = sum(sizes[:rank]), sizes[rank]
    parts = {"weight": layer.weight.detach().narrow(dim, first, size)}
    if layer.bias is not None:
        bias = layer.bias.detach()
        parts["bias"] = bias * (rank == 0) if style == ROWWISE else bias.narrow(0, first, size)
    layer._parameters.update({name: nn.Parameter(part, requires_grad=False) for name, part in parts.items()})
    try:
        yield
    finally:
        layer._parameters.update(whole)
