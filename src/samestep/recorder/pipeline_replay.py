"""Plays the stages of a pipeline as one model in one process: each micro-batch through all stages, and back.

The rank that holds the last stage plays it after the recording: it has the loss, and the script's classes. Each step
begins with the weights that the ranks had, so that a mistake in one step is not carried into the next.
"""

from __future__ import annotations

import math
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn

from samestep.job.foreign import is_a, parts_in
from samestep.message import message
from samestep.recorder.batches import joined
from samestep.recorder.losses import terms
from samestep.recorder.patches import unrecorded
from samestep.recorder.pipelines import KeptStages, Pipelines, ScheduleCall, TracedStages, parameters_of, weights_of
from samestep.recorder.random_numbers import set_random_states, torch_state
from samestep.recorder.window import compress
from samestep.records.files import write
from samestep.records.pipeline_replay import CHAIN, CHAIN_FOLDER, STAGES, PipelineReplayRecord, PipelineReplayStep
from samestep.records.script import LOCAL, STEP
from samestep.records.tensor_files import write_arrays
from samestep.world import World
from samestep.world.regular_files import make_folder

WAIT_S = 60.0  # seconds to wait for the files of the other ranks
Gradients = dict[str, Tensor]


class CannotPlay(Exception):
    """The stages cannot be played as a chain. why: what they lack."""

    def __init__(self, why: Any) -> None:
        super().__init__(why.id)
        self.why = why


def replay_pipeline(pipelines: Pipelines, folder: Path, world: World) -> None:
    """Plays the chain where this rank is the one to do it, and writes what it has computed into the folder."""
    stages = pipelines.records()
    if not any(stage.index == stage.stages - 1 and 0 in stage.ranks for stage in stages):
        return
    out = folder / CHAIN_FOLDER
    make_folder(out)
    with unrecorded():
        try:
            kept_stages, loss_fn = _read(folder, world.size), pipelines.schedule._loss_fn
            record = Chain(kept_stages, loss_fn, out, pipelines.traced).play()
        except CannotPlay as error:
            record = PipelineReplayRecord(error.why)
        except Exception as error:  # the stages are objects of the script
            said = str(error).strip().split("\n")[0][:300]
            record = PipelineReplayRecord(message("chain_fails", kind=type(error).__name__, error=said))
    write(out / CHAIN, record)


def _read(folder: Path, ranks: int) -> list[KeptStages]:
    """Reads what all ranks have kept, when they have written it."""
    paths = [folder / STAGES.format(rank) for rank in range(ranks)]
    until = time.monotonic() + WAIT_S
    while missing := [rank for rank, path in enumerate(paths) if not path.exists()]:
        if time.monotonic() > until:
            raise CannotPlay(message("rank_has_no_stage", rank=missing[0]))
        time.sleep(0.02)
    kept_stages = []
    for path in paths:
        with path.open("rb") as file:
            kept_stages.append(pickle.load(file))
    return kept_stages


class Chain:
    """The stages of a pipeline as one model. kept_stages: of each rank, also of all replicas. out: the folder to write
    to. traced: all stages, where torch's tracer has made them."""

    def __init__(self, kept_stages: Sequence[KeptStages], loss_fn: Any, out: Path, traced: TracedStages | None) -> None:
        self._kept, self._loss_fn, self._out, self._traced = kept_stages, loss_fn, out, traced
        if why := next((of_rank.why_not for of_rank in kept_stages if of_rank.why_not), None):
            raise CannotPlay(why)
        self.replicas = sorted({tuple(of_rank.stages[0].ranks) for of_rank in kept_stages})
        self.holders = [self._holders(replica) for replica in self.replicas]  # [replica][stage] -> rank
        ranks = dict.fromkeys(self.holders[0])
        loaded = {rank: self._modules(rank) for rank in ranks}
        self.modules: dict[int, nn.Module] = {i: m for modules in loaded.values() for i, m in modules.items()}
        self.names = {rank: weights_of(modules) for rank, modules in loaded.items()}
        self.weights = {name: weight for named in self.names.values() for name, weight in named.items()}
        self.ties = self._ties()
        self.weight: float | None = None  # the weight of the loss's term

    def _modules(self, rank: int) -> dict[int, nn.Module]:
        """Returns the modules of a rank's stages, by their numbers."""
        kept_stages = self._kept[rank]
        if not kept_stages.traced:
            modules: dict[int, nn.Module] = pickle.loads(kept_stages.modules)
            return modules
        if self._traced is None:
            raise CannotPlay(message("stages_are_traced_on_some_ranks"))
        graph, names = self._traced.graph, self._traced.stages
        modules = {stage.index: graph.get_submodule(names[stage.index]) for stage in kept_stages.stages}
        # Another rank may have frozen parameters of its stage after the model was traced.
        for name, parameter in parameters_of(modules).items() if kept_stages.weights else ():
            parameter.requires_grad_(name in kept_stages.weights[0])
        return modules

    def _holders(self, replica: Sequence[int]) -> list[int]:
        held = {stage.index: rank for rank in replica for stage in self._kept[rank].stages}
        count = self._kept[replica[0]].stages[0].stages
        if missing := [index for index in range(count) if index not in held]:
            raise CannotPlay(message("stage_is_held_by_no_rank", stage=missing[0], stages=count, ranks=[*replica]))
        return [held[index] for index in range(count)]

    def _ties(self) -> list[list[str]]:
        """Returns the names of a weight's copies in other stages: those that the tracer has made, or of an embedding
        parameters that begin with its values."""
        if self._traced:
            numbers = {stage: number for number, stage in enumerate(self._traced.stages)}
            return [[f"stage {numbers[stage]}: {n}" for stage, n in copy.items()] for copy in self._traced.copies]
        embeddings = {
            id(part.weight) for m in self.modules.values() for part in parts_in(m) if is_a(part, nn.Embedding)
        }
        start: Gradients = {name: w for rank in self.names for name, w in self._kept[rank].weights[0].items()}
        groups: list[list[str]] = []
        for name, weight in self.weights.items():
            if id(weight) not in embeddings or any(name in group for group in groups):
                continue
            stage, first = name.partition(":")[0], start[name]
            same = [n for n, w in start.items() if n.partition(":")[0] != stage and torch.equal(w, first)]
            if same and first.numel() > 1 and first.unique().numel() > 1:
                groups.append([name, *same])
        return groups

    def play(self) -> PipelineReplayRecord:
        counts = {
            min(len(of_rank.weights), of_rank.calls[-1].step + 1 if of_rank.calls else 0) for of_rank in self._kept
        }
        first = [call for call in self._kept[self.holders[0][0]].calls if call.step == 0]
        micro_batches = sum(len(call.kwargs) for call in first)
        reduction, whole_loss = self._reduction(len(first)) if first else ("mean", None)
        steps = []
        for step in range(min(counts)):
            columns, recorded, played = list[Gradients](), list[float](), list[float]()
            for replica in range(len(self.replicas)):
                self._load(replica, step)
                for number in range(len(self._calls(replica, 0, step))):
                    self._play_call(replica, step, number, columns, played)
                last = self._calls(replica, -1, step)
                recorded += [loss for call in last for loss in call.losses]
            if len(columns) != micro_batches * len(self.replicas):
                break
            arrays = {
                LOCAL.format(n, name): compress(g).numpy()
                for n, column in enumerate(columns)
                for name, g in column.items()
            }
            write_arrays(self._out / f"rank0.{STEP.format(step)}.npz", arrays)
            share = 1 / len(self.replicas) / (micro_batches if reduction == "mean" else 1)
            steps.append(PipelineReplayStep(recorded, played, *self._norms(columns, share)))
        return PipelineReplayRecord(
            replicas=[[*replica] for replica in self.replicas],
            stages=[[n for n in self.weights if n.startswith(f"stage {index}: ")] for index in sorted(self.modules)],
            micro_batches=micro_batches,
            reduction=reduction,
            ties=self.ties,
            whole_loss=whole_loss,
            weight=self.weight,
            steps=steps,
        )

    def _calls(self, replica: int, stage: int, step: int) -> list[ScheduleCall]:
        return [call for call in self._kept[self.holders[replica][stage]].calls if call.step == step]

    def _load(self, replica: int, step: int) -> None:
        """Loads the weights that the ranks of a replica had before a step."""
        with torch.no_grad():
            for rank in dict.fromkeys(self.holders[replica]):
                for name, weight in self._kept[rank].weights[step].items():
                    self.weights[name].copy_(weight)

    def _play_call(self, replica: int, step: int, number: int, columns: list[Gradients], played: list[float]) -> None:
        calls = [self._calls(replica, stage, step)[number] for stage in range(len(self.modules))]
        for micro_batch in range(len(calls[0].kwargs)):
            for weight in self.weights.values():
                weight.grad = None
            loss = self._loss(calls, micro_batch)
            if not played:
                of_loss = terms(loss)
                self.weight = of_loss[0].weight if len(of_loss) == 1 and of_loss[0].reduction != "unknown" else None
            loss.backward()
            played.append(float(loss.detach()))
            columns.append({n: w.grad.detach().clone() for n, w in self.weights.items() if w.grad is not None})

    def _loss(self, calls: Sequence[ScheduleCall], micro_batch: int) -> Tensor:
        """Plays one micro-batch through all stages."""
        if calls[-1].targets is None:
            raise CannotPlay(message("last_stage_has_no_target"))
        output = self._output(calls, micro_batch)
        loss: Tensor = self._loss_fn(output, calls[-1].targets[micro_batch], **calls[-1].loss_kwargs)
        return loss

    def _output(self, calls: Sequence[ScheduleCall], micro_batch: int) -> Any:
        """Returns what the last stage does of one micro-batch, with the random numbers that the ranks have drawn."""

        def draw(stage: int) -> None:
            if states := calls[stage].random_states.get((stage, micro_batch)):
                set_random_states(states)

        values: Any = calls[0].args[micro_batch]
        if self._traced:
            values = _as_tuple(StagesInterpreter(self._traced, draw).run_on(values, calls[0].kwargs[micro_batch]))
        else:
            for stage, call in enumerate(calls):
                draw(stage)
                values = _as_tuple(self.modules[stage](*values, **call.kwargs[micro_batch]))
        return values[0] if len(values) == 1 else values

    def _reduction(self, calls: int) -> tuple[Literal["mean", "sum"], float | None]:
        """Returns what the loss of a whole batch is of those of its micro-batches, and the former, as the mean over the
        first step's calls; None where that is another one for other reasons, too."""
        is_plain = not any(map(_sees_whole_batch, self.modules.values()))
        of_calls = [[self._calls(0, stage, 0)[number] for stage in range(len(self.modules))] for number in range(calls)]
        self._load(0, 0)
        parts, wholes = list[float](), list[float]()
        with torch.no_grad():
            before = torch_state()
            for of_call in of_calls:
                plain_calls = [_plain_call(call) for call in of_call]
                parts += [float(self._loss(plain_calls, m)) for m in range(len(of_call[0].kwargs))]
            try:
                wholes = [float(self._whole_loss(of_call)) for of_call in of_calls]
            except Exception:  # a batch that cannot be put together
                return "mean", None
            is_plain = is_plain and torch_state() == before
        mean, whole_loss, count = sum(parts) / len(parts), sum(wholes) / calls, len(parts) / calls
        factor = whole_loss / mean if mean else 1.0
        is_sum = count > 1 and factor > 0 and 2 * math.log(factor) > math.log(count)
        return ("sum" if is_sum else "mean"), whole_loss if is_plain else None

    def _whole_loss(self, calls: Sequence[ScheduleCall]) -> Tensor:
        """Returns the loss of a batch that is not cut; of a traced graph, whose sizes are a micro-batch's, of what it
        gives of them."""
        if self._traced is None:
            return self._loss([_whole_call(call) for call in calls], 0)
        plain_calls = [_plain_call(call) for call in calls]
        outputs = [self._output(plain_calls, number) for number in range(len(calls[0].kwargs))]
        loss: Tensor = self._loss_fn(joined(outputs), joined(calls[-1].targets or []), **calls[-1].loss_kwargs)
        return loss

    def _norms(self, columns: Sequence[Gradients], share: float) -> tuple[Mapping[str, float], float]:
        """Returns (parameter -> the norm of its mean gradient, the norm of all)."""
        sums = {
            name: torch.stack([column[name].double() for column in columns if name in column]).sum(0) * share
            for name in self.weights
            if any(name in column for column in columns)
        }
        once = {name: float(total.norm()) for name, total in sums.items()}
        norms = dict(once)
        for group in self.ties:
            total = float(sum(sums[name] for name in group if name in sums).norm())  # type: ignore[union-attr]
            for number, name in enumerate(group):
                norms[name], once[name] = total, 0.0 if number else total
        return norms, math.sqrt(sum(norm**2 for norm in once.values()))


class StagesInterpreter(fx.Interpreter):
    """Runs all stages that torch's tracer has made. before: called with a stage's number before it runs."""

    def __init__(self, traced: TracedStages, before: Callable[[int], None]) -> None:
        super().__init__(traced.graph)
        self._numbers = {name: number for number, name in enumerate(traced.stages)}
        self._before, self._graph = before, traced.graph.graph

    def run_on(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Returns what the last stage returns. kwargs: inputs that a schedule was given by their names."""
        places = [node for node in self._graph.nodes if node.op == "placeholder"][len(args) :]
        return self.run(*args, *(kwargs.get(place.target, next(iter(place.args), None)) for place in places))

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Runs a stage."""
        self._before(self._numbers[target])
        return super().call_module(target, args, kwargs)


def _as_tuple(returned: Any) -> tuple[Any, ...]:
    return tuple(returned) if is_a(returned, tuple | list) else (returned,)


def _sees_whole_batch(stage: nn.Module) -> bool:
    """Returns whether what a stage computes of a row depends on the others of its micro-batch."""
    if is_a(stage, fx.GraphModule):
        return any("batch_norm" in str(node.target) for node in stage.graph.nodes)
    return any(is_a(part, nn.modules.batchnorm._BatchNorm) for part in parts_in(stage))


def _plain_call(call: ScheduleCall) -> ScheduleCall:
    """Returns a call without its random numbers."""
    return ScheduleCall(call.step, call.args, call.kwargs, call.targets, call.loss_kwargs)


def _whole_call(call: ScheduleCall) -> ScheduleCall:
    """Returns a call whose micro-batches are put together to one."""
    targets = None if call.targets is None else [joined(call.targets)]
    return ScheduleCall(call.step, [joined(call.args)], [joined(call.kwargs)], targets, call.loss_kwargs)
