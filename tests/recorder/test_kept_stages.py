"""What a rank keeps of a model that torch's tracer has cut into stages, and which of its weights the chain trains."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import fx, nn

from samestep.rank.hooks import Hooks
from samestep.recorder.pipeline_replay import Chain
from samestep.recorder.pipelines import SCHEDULES, STAGE, TRACER, KeptStages, Pipelines, TracedStages, weights_of
from samestep.records.divided_models import StageRecord
from samestep.world import World


class Pipe:
    """A model in two stages, as torch's tracer makes it."""

    def __init__(self) -> None:
        self.split_gm = fx.symbolic_trace(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)))
        self.num_stages, self.replicated_params = 2, list[Any]()

    def get_stage_module(self, stage_idx: int) -> nn.Module:
        return self.split_gm.get_submodule(str(stage_idx))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_lets_go_of_the_traced_model_at_the_first_step(
    rank: int, tmp_path: Path, hooks: Hooks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one with the last stage has a copy."""

    def schedule(*args: Any) -> None:
        raise NotImplementedError

    of_schedule = type("Schedule", (), {"_check_inputs": schedule, "_maybe_compute_loss": schedule})
    of_stage, of_pipe = type("Stage", (), {"forward_one_chunk": schedule}), type("Pipe", (Pipe,), {})
    monkeypatch.setitem(sys.modules, SCHEDULES, SimpleNamespace(_PipelineSchedule=of_schedule))  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, STAGE, SimpleNamespace(_PipelineStageBase=of_stage))  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, TRACER, SimpleNamespace(Pipe=of_pipe))  # type: ignore[arg-type]
    world = World(rank=rank, size=2)
    pipelines = Pipelines(tmp_path, world, keep=True, steps_done=lambda: 0, note=lambda call: None)
    pipelines._patch(hooks)
    pipe = of_pipe()
    module = pipe.get_stage_module(rank)
    assert pipelines._pipe is pipe
    pipelines._keep_modules([SimpleNamespace(stage_index=rank, submod=module)])
    assert pipelines.kept.traced and pipelines._pipe is None
    assert (pipelines.traced is not None) == (rank == 1)


@pytest.mark.parametrize("frozen", [(), ("stage 0: bias",), ("stage 1: weight", "stage 1: bias")])
def test_what_a_rank_has_frozen_of_its_stage_is_no_weight_of_the_chain(frozen: tuple[str, ...], tmp_path: Path) -> None:
    graph = Pipe().split_gm
    kept = []
    for rank in range(2):
        weights = weights_of({rank: graph.get_submodule(str(rank))})
        trained = {name: weight.detach() for name, weight in weights.items() if name not in frozen}
        kept.append(KeptStages([StageRecord(rank, 2, 1, "GPipe", [0, 1])], traced=True, weights=[trained]))
    chain = Chain(kept, None, tmp_path, TracedStages(graph, []))
    assert [*chain.weights] == [name for of_rank in kept for name in of_rank.weights[0]]
    assert len(chain.weights) == 4 - len(frozen)
