"""Judges the ranks that hold a pipeline's stages, along the stage axis and along the data axis.

pipeline_replay.py judges what the stages compute together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from samestep.judge.against_one_process import not_replayed
from samestep.judge.findings import Ranks, common_steps, differs, digest
from samestep.judge.layout import PipelineLayout
from samestep.judge.pipeline_replay import judge_pipeline_replay
from samestep.judge.rows import batch_apart
from samestep.message import message
from samestep.records.files import read
from samestep.records.findings import Finding
from samestep.records.pipeline_replay import CHAIN, CHAIN_FOLDER, PipelineReplayRecord
from samestep.records.record import Record

AXES = {"initial weights", "rows", "weights", "order"}  # questions that are asked along the data axis
OF_THE_CHAIN = {"gradient", "loss weight", "clipping"}


def pipeline_findings(
    ranks: Ranks,
    record: Record,
    layout: PipelineLayout,
    stages: Sequence[Ranks],
    of_stages: Callable[[Sequence[Ranks], Record], list[Finding]],
) -> list[Finding]:
    """Answers the questions about a pipeline.

    stages: the ranks that hold the same stages. of_stages: returns the answers of each stage's ranks by themselves.
    """
    along_stages = {f.question: f for check in CHECKS if (f := check(ranks, layout))}
    findings = [_with_axis(finding, layout) for finding in of_stages(stages, record)]
    path = record.folder / CHAIN_FOLDER / CHAIN
    if layout.missing or not path.exists():
        of_chain = [not_replayed(layout.missing or message("chain_was_not_played"))]
    else:
        chain, played = read(PipelineReplayRecord, path), Record(record.folder / CHAIN_FOLDER)
        of_chain = judge_pipeline_replay(chain, ranks, stages, record=record, played=played)
        findings = [finding for finding in findings if finding.question not in OF_THE_CHAIN]
    merged = []
    for finding in findings:
        stage_finding = along_stages.pop(finding.question, None)
        merged.append(stage_finding if stage_finding and finding.answer != "differs" else finding)
    order = {finding.question: number for number, finding in enumerate(merged)}
    place = order.get("order", -1) + 1
    return [*merged[:place], *of_chain, *merged[place:], *along_stages.values()]


def _with_axis(finding: Finding, layout: PipelineLayout) -> Finding:
    divergence = finding.divergence
    if divergence is None or finding.question not in AXES or len(layout.replicas) == 1:
        return finding
    return replace(finding, divergence=replace(divergence, quantity=f"{divergence.quantity} along data"))


# Along the stage axis


def _rows(ranks: Ranks, layout: PipelineLayout) -> Finding | None:
    """Finds ranks of one pipeline that read other rows: the last stage's targets are then not of the first's inputs."""
    ends = (layout.holders[0], layout.holders[-1])
    for replica in layout.replicas:
        pair = [next(number for number in replica if number in of_end) for of_end in ends]
        if apart := batch_apart(ranks[pair[0]], ranks[pair[1]]):
            batch, expected, found = apart
            cause = message("stages_read_other_rows", ranks=pair)
            return differs("rows", "rows along stage", cause, step=batch, rank=pair[1], expected=expected, found=found)
    return None


def _rates(ranks: Ranks, layout: PipelineLayout) -> Finding | None:
    """Finds stages that step at other rates. Ranks with several groups of parameters may have others."""
    for step in common_steps(ranks):
        rates = [{*rank.steps[step].rates} for rank in ranks]
        for rank, of_rank in zip(ranks, rates):
            if len(of_rank) == len(rates[0]) == 1 and of_rank != rates[0]:
                rate, first = next(iter(of_rank)), next(iter(rates[0]))
                cause = message("stages_step_at_other_rates", rate=rate, rank=rank.rank, first=first)
                return differs(
                    "rate", "learning rate along stage", cause, step=step, rank=rank.rank, expected=first, found=rate
                )
    return None


def _settings(ranks: Ranks, layout: PipelineLayout) -> Finding | None:
    """Finds stages whose optimizers have other settings, where each has one group of parameters."""
    groups = [rank.steps[0].settings for rank in ranks]
    if any(len(of_rank) != 1 for of_rank in groups):
        return None
    values: list[Mapping[str, object]] = [of_rank[0].values for of_rank in groups]
    for rank, of_rank in zip(ranks, values):
        for name in (name for name in values[0] if "lr" not in name and of_rank.get(name) != values[0][name]):
            fields = {"setting": name, "found": of_rank.get(name), "first": values[0][name], "rank": rank.rank}
            cause = message("stages_have_other_settings", **fields)
            return differs(
                "settings",
                f"{name} along stage",
                cause,
                step=0,
                rank=rank.rank,
                expected=fields["first"],
                found=fields["found"],
            )
    return None


def _initial_weights(ranks: Ranks, layout: PipelineLayout) -> Finding | None:
    return _other_models(ranks, layout) or _begin_alike(ranks, layout)


def _other_models(ranks: Ranks, layout: PipelineLayout) -> Finding | None:
    """Finds ranks that have cut their stages out of models with other weights, and train these weights."""
    for replica in layout.replicas:
        first = ranks[replica[0]].stages[0].model
        for rank in (ranks[number] for number in replica):
            model = rank.stages[0].model
            apart = [name for name, value in model.items() if first.get(name, value) != value]
            trains_it = {*rank.start.values()} <= {*model.values()}
            if apart and first.keys() == model.keys() and trains_it:
                cause = message("stages_of_other_models", rank=rank.rank, different=len(apart))
                return differs(
                    "initial weights",
                    "initial weights along stage",
                    cause,
                    rank=rank.rank,
                    tensor=apart[0],
                    expected=digest(first[apart[0]]),
                    found=digest(model[apart[0]]),
                )
    return None


def _begin_alike(ranks: Ranks, layout: PipelineLayout) -> Finding | None:
    """Finds stages whose layers begin as those of another stage do, where layers within a stage do not."""
    starts: dict[str, Mapping[str, int]] = {}
    for rank in ranks:
        for index in (stage.index for stage in rank.stages):
            prefix = f"stage {index}: "
            starts.setdefault(
                prefix, {n.removeprefix(prefix): d for n, d in rank.start.items() if n.startswith(prefix)}
            )
    prefixes = [*starts]
    for number, second in enumerate(prefixes):
        for first in prefixes[:number]:
            # Biases and norms are alike in all layers.
            same = [
                n for n, value in starts[second].items() if starts[first].get(n) == value and _is_drawn(value, starts)
            ]
            drawn = [n for n, value in starts[second].items() if n in starts[first] and _is_drawn(value, starts)]
            if len(same) > 1 and len(same) == len(drawn):
                numbers = [int(prefix.split()[1].rstrip(":")) for prefix in (first, second)]
                cause = message("stages_begin_alike", first=numbers[0], second=numbers[1], parameters=len(same))
                value = digest(starts[second][same[0]])
                return differs(
                    "initial weights",
                    "initial weights along stage",
                    cause,
                    rank=layout.holders[numbers[1]][0],
                    tensor=second + same[0],
                    expected=f"not {value}",
                    found=value,
                )
    return None


def _is_drawn(value: int, starts: Mapping[str, Mapping[str, int]]) -> bool:
    """Returns whether a parameter begins with random numbers: within each stage no other one begins with the same
    values."""
    return all(list(of_stage.values()).count(value) <= 1 for of_stage in starts.values())


CHECKS: Sequence[Callable[[Ranks, PipelineLayout], Finding | None]] = (_rows, _rates, _settings, _initial_weights)
