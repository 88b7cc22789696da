"""How tensor parallel ranks divide a model: which layers are split by columns, which by rows.

A plan is what Job(parallel=…) says, a Hugging Face model's own tp_plan, or what is found in the model: pairs of Linear
layers between which each part of the columns needs that part alone, as in elementwise operations and attention heads.
A layer may compute several outputs at once, as query, key and value, of each of which a rank has a part.
All are tried in one process before any rank starts: the parts' outputs must add up to the whole layer's. A layer
that torch does not split as it is, such as one whose weight is read outside of its own forward, stays whole.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from samestep.bounds import DIVIDED_APART
from samestep.data.schedule import cut
from samestep.errors import Refused, UserError, nearest_name
from samestep.job import Batch, Job
from samestep.job.walk import leaves_of
from samestep.message import Message, message
from samestep.parallel.plan_trial import Trial, evaluating, is_close, tried, with_random_weights
from samestep.parallel.recorded_forward import RecordedForward
from samestep.rank.row_order import order_of_ranks
from samestep.rank.threaded_group import alike_on_ranks

COLWISE, ROWWISE, GATHERED = "colwise", "rowwise", "colwise_gather"
OUTPUTS = {COLWISE: 1, "colwise_3": 3, "colwise_2": 2}  # how many a layer computes at once, each split by columns
STYLES = (*OUTPUTS, ROWWISE, GATHERED)
PARAMETERS = {nn.Linear: {"weight", "bias"}, nn.Embedding: {"weight"}}  # of the layers that torch splits
# Operations that give the same for a part of a weight as for the full weight.
ALIKE = {getattr(Tensor, name).__get__ for name in ("device", "dtype", "is_leaf", "layout", "ndim", "requires_grad")}
ALIKE |= {Tensor.dim, Tensor.is_floating_point, torch.is_floating_point}
SPLIT, RANDOM, WHOLE = "split", "random", "whole"  # what a trial finds of a pair of layers
OTHER_RANKS = (2, 3)  # the numbers of ranks that show whether a pair can be split at all
ROWS = 2  # of the batch on which a plan is tried: the fewest that BatchNorm accepts
SEED = 11  # of the weights with which a plan is tried: a layer of zeros would hide how it is split
_close = partial(is_close, tolerance=DIVIDED_APART)

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
    which each rank would draw the same ones for another part. unfit: layer -> why torch does not split it. changed:
    layers whose output is changed in place."""

    plan: dict[str, str]
    random: list[str] = field(default_factory=list)
    unfit: Mapping[str, Message] = field(default_factory=dict)
    changed: frozenset[str] = frozenset()

    def said(self, model: nn.Module, ranks: int, *, chunks: Sequence[str] | None = None, output: str = "") -> Message:
        """Returns how `ranks` ranks divide the model, for the user to read. chunks: in which of its modules they have
        a chunk of the positions each. output: the layer whose outputs, the logits, they have in parts."""
        layers = dict(model.named_modules())
        names = dict.fromkeys([*self.plan, *([output] if output else [])])
        split = sum(parameter.numel() for name in names for parameter in layers[name].parameters())
        total = sum(parameter.numel() for parameter in model.parameters())
        patterns = {name: _pattern(name) or type(layer).__name__ for name, layer in layers.items()}
        styles = dict.fromkeys(f"{patterns[name]} {style}" for name, style in self.plan.items())
        random = [*dict.fromkeys(patterns[name] for name in self.random)]
        linear = [name for name, layer in layers.items() if isinstance(layer, nn.Linear) and name not in names]
        whole_layers = dict.fromkeys(
            patterns[name] for name in linear if name not in self.unfit and patterns[name] not in random
        )
        unfit = dict[str, tuple[Message, dict[str, None]]]()
        for name in linear:
            if why := self.unfit.get(name):
                unfit.setdefault(why.id, (why, {}))[1][patterns[name]] = None
        return message(
            "tensor_ranks_divide_the_model",
            ranks=ranks,
            plan=", ".join(styles),
            split=split,
            total=total,
            random=random or None,
            whole=[*whole_layers] or None,
            chunks=chunks,
            output=output or None,
            unfit=[message("layers_stay_whole", layers=[*names], why=why) for why, names in unfit.values()] or None,
        )


def _pattern(name: str) -> str:
    """Returns 'blocks.*.feed.0' of 'blocks.3.feed.0', as Job(parallel=…) takes it."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name, count=1)


@alike_on_ranks
def division_of(job: Job, ranks: int, device: str = "cpu") -> Division:
    """Returns how `ranks` ranks divide the job's model. Raises Refused, or UserError for a mistake in Job.parallel,
    where they cannot."""
    with torch.random.fork_rng():
        trial = tried(job, ROWS, device, partial(TensorTrial, job, device))
    if styles := {layer: style for layer, style in (job.parallel or {}).items() if style in STYLES}:
        return Division(_given(styles, trial, ranks), changed=trial.changed)
    plan = _declared(trial, ranks)
    if plan and trial.wrong_part(plan, ranks) is None:
        return Division(plan, unfit=trial.unfit, changed=trial.changed)
    return _found(trial, ranks)


def _declared(trial: TensorTrial, ranks: int) -> dict[str, str]:
    """Returns what a Hugging Face model in the job's model says of itself, without layers that torch does not split and
    sizes that the ranks do not divide."""
    plan: dict[str, str] = {}
    for prefix, module in trial.model.named_modules():
        declared = getattr(module, "tp_plan", None)
        for pattern, style in declared.items() if isinstance(declared, Mapping) else ():
            asked = f"{prefix}.{pattern}" if prefix else pattern
            for name in (name for name in trial.layers if fnmatchcase(name, asked) and style in THEIR_STYLES):
                if name not in trial.unfit:
                    plan[name] = THEIR_STYLES[style]
    return {name: style for name, style in plan.items() if _size(trial.layers[name], style) % ranks == 0}


def _given(parallel: Mapping[str, str], trial: TensorTrial, ranks: int) -> dict[str, str]:
    layers = trial.layers
    plan: dict[str, str] = {}
    for pattern, style in parallel.items():
        matching = [name for name in layers if fnmatchcase(name, pattern)]
        if not matching:
            hint = nearest_name(pattern, [*layers])
            raise UserError(message("parallel_names_no_layer", layer=pattern, hint=hint))
        for name in matching:
            if isinstance(layers[name], nn.Embedding) and style != ROWWISE:
                raise UserError(message("embedding_is_split_rowwise", layer=name, style=style))
            plan[name] = style
    for name in plan:
        if why := trial.unfit.get(name):
            raise Refused(message("layer_is_not_split", layer=name, why=why))
        _check_size(name, layers[name], plan[name], ranks)
    if wrong := trial.wrong_part(plan, ranks):
        with evaluating(trial.model):
            without_random = trial.wrong_part(plan, ranks) is None
        if without_random:
            raise Refused(message("random_numbers_inside_of_split_layers", layer=wrong, ranks=ranks))
        raise Refused(message("parts_of_split_layers_do_not_add_up", layer=wrong, ranks=ranks))
    return plan


def _size(layer: Any, style: str) -> int:
    """Returns the size along which a Linear layer or an Embedding is split."""
    size: int = layer.weight.shape[1 if style == ROWWISE and isinstance(layer, nn.Linear) else 0]
    return size


def _check_size(name: str, layer: nn.Module, style: str, ranks: int) -> None:
    if (size := _size(layer, style)) % (ranks * OUTPUTS.get(style, 1)):
        raise Refused(message("layer_does_not_divide", layer=name, size=size, ranks=ranks))


def _found(trial: TensorTrial, ranks: int, *, alike: bool = True) -> Division:
    """Finds the pairs of Linear layers that can be split, in the order of the forward pass; where there is none, the
    single layers, whose outputs are gathered. alike: what is so in one block is so in all of a list, until the plan is
    tried as a whole: each block by itself takes as many times as long."""
    division = Division({}, unfit=trial.unfit, changed=trial.changed)
    judged, pairs = dict[str, tuple[str, str]](), list[dict[str, str]]()
    for columns, rows in trial.candidates():
        if any(name in pair for name in (*columns, rows) for pair in pairs):
            continue
        pattern = " ".join(map(_pattern, [*columns, rows])) if alike else rows
        if pattern not in judged:
            judged[pattern] = _judged(trial, columns, rows, ranks)
        found, style = judged[pattern]
        if found == SPLIT:
            pair = {**dict.fromkeys(columns, style), rows: ROWWISE}
            for name in pair:
                _check_size(name, trial.linear[name], pair[name], ranks)
            pairs.append(pair)
        elif found == RANDOM:
            division.random.append(rows)
    pairs = pairs or [{name: GATHERED} for name, layer in trial.linear.items() if layer.out_features % ranks == 0]
    division.plan = {name: style for pair in pairs for name, style in pair.items()}
    while division.plan and (wrong := trial.wrong_part(division.plan, ranks)) is not None:
        if alike and ROWWISE in division.plan.values():
            return _found(trial, ranks, alike=False)
        pairs = [pair for pair in pairs if wrong not in pair]
        division.plan = {name: style for pair in pairs for name, style in pair.items()}
    if not division.plan:
        sizes = [f"{name or type(layer).__name__}: {layer.out_features}" for name, layer in trial.linear.items()]
        unfit = {name: why for name, why in trial.unfit.items() if isinstance(trial.layers[name], nn.Linear)}
        why = message("layers_stay_whole", layers=[*unfit], why=next(iter(unfit.values()))) if unfit else None
        raise Refused(message("no_layer_can_be_split", ranks=ranks, layers=sizes, unfit=why))
    return division


def _judged(trial: TensorTrial, columns: Sequence[str], rows: str, ranks: int) -> tuple[str, str]:
    """Returns SPLIT for layers that can be split, RANDOM for those that could without random numbers, else WHOLE; and
    the style of `columns`. Raises Refused for those that other numbers of ranks can split."""
    pairs = {style: {**dict.fromkeys(columns, style), rows: ROWWISE} for style in OUTPUTS}
    styles = [style for style, outputs in OUTPUTS.items() if outputs == 1 or _divides(trial, columns, outputs * ranks)]
    if style := next((style for style in styles if trial.wrong_part(pairs[style], ranks) is None), ""):
        return SPLIT, style
    if number := next((n for n in OTHER_RANKS if n != ranks and trial.wrong_part(pairs[COLWISE], n) is None), 0):
        raise Refused(message("layer_splits_over_other_ranks", layer=columns[0], ranks=ranks, others=number))
    with evaluating(trial.model):
        style = next((style for style in styles if trial.wrong_part(pairs[style], ranks) is None), "")
    return (RANDOM, style) if style else (WHOLE, COLWISE)


def _divides(trial: TensorTrial, layers: Sequence[str], parts: int) -> bool:
    return all(trial.linear[name].out_features % parts == 0 for name in layers)


class TensorTrial(Trial):
    """A model with random weights in its Linear layers, and a few rows, on which plans are tried.

    layers: its Linear layers and Embeddings. unfit: those that torch does not split -> why. linear: the Linear layers
    that forward calls once, and torch splits, in its order. changed: the layers whose output is changed in place.
    """

    def __init__(self, job: Job, device: str, batch: Batch) -> None:
        super().__init__(job, device, batch, seed=SEED)
        modules = self.model.named_modules()
        self.layers = {name: layer for name, layer in modules if isinstance(layer, nn.Linear | nn.Embedding)}
        holders = Counter(id(p) for module in self.model.modules() for p in module.parameters(recurse=False))
        self.unfit: dict[str, Message] = {}
        for name, layer in self.layers.items():
            if any(holders[id(parameter)] > 1 for parameter in layer.parameters(recurse=False)):
                self.unfit[name] = message("weight_is_tied")
            elif why := why_not_split(layer):
                self.unfit[name] = why
        self._record = RecordedForward(self.layers, device)
        with_random_weights(self._recorded, self.model, self._draw_weights)
        calls = self._record.calls
        for call in calls:
            if not call.rebuilt(call.arguments)[0]:
                self.unfit.setdefault(call.name, message("layer_is_called_by_keyword"))
        changed = [call.name for call in calls if any(leaf._version > call.version for leaf in call.output[:1])]
        self.changed = frozenset(changed)
        for read in self._record.reads:
            owner = read.tensor.rpartition(".")[0]
            if read.operation not in ALIKE and owner not in [call.name for call in read.inside[-1:]]:
                self.unfit.setdefault(owner, message("weight_is_read_outside_of_its_layer"))
        names = [call.name for call in calls]
        self.unfit |= {name: message("layer_is_not_called") for name in self.layers if name not in names}
        linear = [name for name in names if names.count(name) == 1 and name not in self.unfit]
        self.linear = {name: layer for name in linear if isinstance(layer := self.layers[name], nn.Linear)}

    def _recorded(self) -> None:
        with self._record:
            self.forward()

    def _draw_weights(self) -> None:
        generator = torch.Generator().manual_seed(SEED)
        linear = [layer for layer in self.layers.values() if isinstance(layer, nn.Linear)]
        for layer in linear:
            for parameter in layer.parameters(recurse=False):
                drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.data.copy_(drawn / layer.in_features**0.5)

    def candidates(self) -> Iterator[tuple[tuple[str, ...], str]]:
        """Yields (layers to split by columns, the layer after them, to split by rows): the Linear layer that is called
        before it, and those that read the same input, as attention's query, key and value do."""
        calls = [call for call in self._record.calls if isinstance(call.module, nn.Linear)]
        called = [(call.name, next(iter(call.arguments), None)) for call in calls]
        for number in range(1, len(called)):
            name, (before, read) = called[number][0], called[number - 1]
            together = [before]
            for earlier, also_read in called[: number - 1][::-1]:
                if also_read is not read or read is None:
                    break
                together.insert(0, earlier)
            if all(layer in self.linear for layer in (*together, name)):
                yield tuple(together), name

    def wrong_part(self, plan: Plan, ranks: int) -> str | None:
        """Computes the forward pass of each rank in turn, with its part of the layers. Returns the layer after which
        the parts do not add up to the whole, or the last one where the model's output differs; None: all is right."""
        joined = [
            name for name, style in plan.items() if style not in OUTPUTS and isinstance(self.layers[name], nn.Linear)
        ]
        with self.outputs_of(joined) as outputs:
            expected = leaves_of(self.forward())
        whole_outputs, sums = dict(outputs), dict[str, list[Tensor]]()
        last = [*plan][-1] if plan else ""
        for rank in range(ranks):
            with ExitStack() as parts:
                for name, style in plan.items():
                    if isinstance(layer := self.layers[name], nn.Linear):
                        parts.enter_context(narrowed(layer, style, rank, ranks))
                outputs = parts.enter_context(self.outputs_of(joined, instead=whole_outputs))
                try:
                    output = leaves_of(self.forward())
                except Exception:  # a shape that does not fit, wherever it shows
                    return next((name for name in joined if name not in outputs), last)
            for name in joined:
                if len(outputs.get(name, ())) != len(whole_outputs.get(name, ())):
                    return name
                if plan[name] == ROWWISE:
                    of_rank = outputs.get(name, [])
                    sums[name] = [*map(torch.add, sums[name], of_rank)] if name in sums else of_rank
            if not all(map(_close, expected, output)):
                return last
        return next((name for name, total in sums.items() if not all(map(_close, whole_outputs[name], total))), None)

    @contextmanager
    def outputs_of(
        self, names: Sequence[str], instead: Mapping[str, Sequence[Tensor]] | None = None
    ) -> Iterator[dict[str, list[Tensor]]]:
        """Takes the outputs of layers, of each call, while the block runs. instead: what the layers then return in
        their place."""
        outputs = dict[str, list[Tensor]]()

        def take(name: str) -> Callable[[nn.Module, Any, Tensor], Tensor]:
            def hook(layer: nn.Module, inputs: Any, output: Tensor) -> Tensor:
                outputs.setdefault(name, []).append(output.clone())  # the next module may change it in place
                return output if instead is None else instead[name][len(outputs[name]) - 1].clone()

            return hook

        with ExitStack() as hooks:
            for name in names:
                hooks.callback(self.layers[name].register_forward_hook(take(name)).remove)
            yield outputs


def why_not_split(layer: nn.Linear | nn.Embedding) -> Message | None:
    """Returns why torch does not split a layer, whatever its model does with it; None where it does."""
    kind: Any = nn.Linear if isinstance(layer, nn.Linear) else nn.Embedding
    is_plain = type(layer).forward is kind.forward and "forward" not in vars(layer)
    if not is_plain or layer._parameters.keys() != PARAMETERS[kind] or layer._buffers or layer._modules:
        return message("weight_is_computed_in_forward")
    hooks = [value for name, value in vars(layer).items() if name.endswith("_hooks") and "state_dict" not in name]
    for parameter in layer.parameters(recurse=False):
        hooks += [parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None)]
    if any(hooks):
        return message("layer_has_hooks")
    if isinstance(layer, nn.Embedding) and layer.max_norm is not None:
        return message("embedding_has_max_norm")
    return None


@contextmanager
def narrowed(layer: nn.Linear, style: str, rank: int, ranks: int) -> Iterator[None]:
    """Leaves a Linear layer with one rank's part while the block runs; the bias of rows is rank 0's alone."""
    parameters = dict(layer._parameters)
    dim = 1 if style == ROWWISE else 0
    sizes = cut(layer.weight.shape[dim], ranks)
    first, size = sum(sizes[:rank]), sizes[rank]
    indices = torch.arange(first, first + size)
    if OUTPUTS.get(style, 1) > 1:
        indices = order_of_ranks(layer.out_features, OUTPUTS[style], ranks)[indices]
    indices = indices.to(layer.weight.device)
    parts = {"weight": layer.weight.detach().index_select(dim, indices)}
    if layer.bias is not None:
        bias = layer.bias.detach()
        parts["bias"] = bias * (rank == 0) if style == ROWWISE else bias[indices]
    layer._parameters.update({name: nn.Parameter(part, requires_grad=False) for name, part in parts.items()})
    try:
        yield
    finally:
        layer._parameters.update(parameters)
