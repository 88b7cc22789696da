"""The judge of a replay, on records that are made up: what it calls another step, and what it leaves unknown. It needs
no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from judge.test_script import NAMES, SIZE, STEPS, judged
from samestep.judge.against_one_process import falls_from_a_multiple, is_ahead, is_stretched, judge_replay
from samestep.judge.gradient_comparison import grown_rounding
from samestep.message import message
from samestep.records.files import read
from samestep.records.findings import Finding
from samestep.records.record import Record
from samestep.records.script import ClipRecord, ScriptRecord, StepRecord
from samestep.records.script_plan import Distance, ReplayRecord
from samestep.records.tensor_files import write_arrays


@dataclass
class Case:
    """A recording and its replay. factor: of the replay's gradients, from step `since` on. clipped: the norms, on the
    ranks and in the replay, by which they are multiplied after that. rate: the last optimizer's in the replay. turned:
    whether the replay's gradients have their elements in another order, from step `since` on. targets: of rank 1.
    part: by how much one element of the replay's gradients is another, of the ranks' greatest one. shares: by how much
    each rank's own gradient weighs in the replay's."""

    folder: Path
    factor: float = 1.0
    since: int = 0
    dtype: str = "float32"
    calls: int = 0
    rate: float = 0.1
    optimizers: int = 1
    schedules: tuple[int, ...] = ()
    libraries: tuple[str, ...] = ()
    clipped: tuple[float, float] | None = None
    turned: bool = False
    targets: int = 3
    part: float = 0.0
    shares: tuple[float, ...] = ()
    found: ReplayRecord = field(
        default_factory=lambda: ReplayRecord(micro_batches=1, distances={"a.bias": Distance(1.0, 0.0)})
    )

    def judge(self) -> dict[str, Finding]:
        """Returns question -> its answer."""
        for name in ("ranks", "replay"):
            (self.folder / name).mkdir(parents=True)
        judged(self.folder / "ranks", "mean")
        ranks = [read(ScriptRecord, self.folder / "ranks" / f"rank{rank}.json") for rank in range(SIZE)]
        clips = [ClipRecord(1, 4, 4, 0.5)] if self.clipped else []
        steps = [
            replace(step, dtypes=[self.dtype], schedules=list(self.schedules), clips=clips, calls=self.calls)
            for step in ranks[0].steps
        ]
        steps = [
            replace(step, optimizer=number % self.optimizers, rates=[0.1 + number % self.optimizers])
            for number, step in enumerate(steps)
        ]
        ranks = [replace(rank, steps=steps, libraries=list(self.libraries)) for rank in ranks]
        ranks[1] = replace(ranks[1], steps=[self._with_targets(step) for step in ranks[1].steps])
        last = self.optimizers - 1
        mine = [replace(step, rates=[self.rate]) if step.optimizer == last else step for step in steps]
        one = replace(ranks[0], steps=mine)
        for step in range(STEPS):
            self._write(step)
        folders = Record(self.folder / "ranks"), Record(self.folder / "replay")
        return {finding.question: finding for finding in judge_replay(self.found, ranks, one, *folders)}

    def _with_targets(self, step: StepRecord) -> StepRecord:
        losses = [[replace(term, count=self.targets) for term in batch.losses] for batch in step.micro_batches]
        batches = [replace(batch, losses=terms) for batch, terms in zip(step.micro_batches, losses)]
        return replace(step, micro_batches=batches)

    def _write(self, step: int) -> None:
        """Writes the replay's arrays, made of the ranks'; those of ranks that clip get what was taken after it."""
        ranks = Record(self.folder / "ranks")
        factor = self.factor if step >= self.since else 1.0
        taken = {name: ranks.arrays(f"step{step}")[f"taken {name}"] for name in NAMES}
        on_ranks, in_replay = self.clipped or (1.0, 1.0)
        order = -1 if self.turned and step >= self.since else 1
        arrays = {f"taken {name}": array[::order] * factor * in_replay for name, array in taken.items()}
        if self.shares:
            own = [ranks.arrays(f"step{step}", rank) for rank in range(SIZE)]
            for name in NAMES:
                parts = [share * of_rank[f"local 0 {name}"] for share, of_rank in zip(self.shares, own, strict=True)]
                arrays[f"taken {name}"] = sum(parts)
        if self.part:
            arrays[f"taken {NAMES[0]}"][0] += self.part * max(abs(array).max() for array in taken.values())
        if self.clipped:
            arrays |= {f"unclipped {name}": array * factor for name, array in taken.items()}
            for rank in range(SIZE):
                recorded = ranks.arrays(f"step{step}", rank)
                recorded |= {f"unclipped {name}": taken[name] for name in NAMES}
                recorded |= {f"taken {name}": taken[name] * on_ranks for name in NAMES}
                write_arrays(self.folder / "ranks" / f"rank{rank}.step{step}.npz", recorded)
        write_arrays(self.folder / "replay" / f"rank0.step{step}.npz", arrays)


GRADIENT, RATE, WEIGHTS, MICRO = "replayed gradient", "replayed rate", "replayed weights", "replayed micro-batches"


def test_the_same_steps_are_right(tmp_path: Path) -> None:
    assert {name: finding.answer for name, finding in Case(tmp_path).judge().items()} == {
        GRADIENT: "right",
        RATE: "right",
        WEIGHTS: "right",
    }


@pytest.mark.parametrize(
    ("factor", "since", "dtype", "cause"),
    [
        (0.5, 0, "float32", "gradient_multiplied_by_the_ranks"),
        (2.0, 0, "float32", "gradient_divided_by_the_ranks"),
        (1.25, 0, "float32", "loss_is_scaled"),
        (1.001, 0, "float32", "loss_is_scaled"),
        (1.001, 1, "float32", ""),  # weights that are a rounding away have another gradient
        (1.1, 1, "float32", "loss_is_scaled"),
        (1.001, 0, "bfloat16", ""),
        (1.001, 0, "float16", ""),
        (1.1, 0, "bfloat16", "loss_is_scaled"),
    ],
)
def test_a_gradient_of_another_scale_is_named(
    factor: float, since: int, dtype: str, cause: str, tmp_path: Path
) -> None:
    found = Case(tmp_path, factor, since, dtype).judge()[GRADIENT]
    assert (found.answer, found.message.id) == ("differs" if cause else "right", cause or "gradient_of_one_process")
    assert cause != "loss_is_scaled" or found.message.fields["factor"] == pytest.approx(1 / factor)
    assert not cause or (found.divergence and found.divergence.step == since)


def test_a_part_of_the_gradient_that_differs_little_is_no_factor(tmp_path: Path) -> None:
    found = Case(tmp_path, part=1e-3).judge()[GRADIENT]
    assert (found.answer, found.message.id) == ("differs", "loss_depends_on_ranks")


@pytest.mark.parametrize(
    ("shares", "targets", "cause"),
    [
        ((0.375, 0.625), 5, "mean_of_rank_means"),
        ((0.5, 0.75), 5, "mean_of_rank_means_or_a_term"),  # more than one together
        ((1.5, -0.5), 5, "mean_of_rank_means_or_a_term"),  # no mean
        # Each divides by something else of its rows: a root of their mean.
        ((0.375, 0.625), 3, "loss_depends_on_ranks"),
        ((0.375, 0.625), 0, "mean_of_rank_means_or_a_term"),  # it is not known how many
        ((0.44, 0.56), 5, "mean_of_rank_means_or_a_term"),
    ],
)
@pytest.mark.parametrize("part", [0.0, 0.1])
def test_a_mean_of_means_is_named_where_other_weights_of_the_ranks_give_one_process(
    shares: tuple[float, float], targets: int, cause: str, part: float, tmp_path: Path
) -> None:
    """Not where something else is in the gradient, too."""
    found = Case(tmp_path, shares=shares, part=part, targets=targets).judge()[GRADIENT]
    unexplained = "loss_depends_on_ranks" if targets == 3 else "mean_of_rank_means_or_a_term"
    assert (found.answer, found.message.id) == ("differs", unexplained if part else cause)
    assert found.message.fields.get("shares", list(shares)) == pytest.approx(shares)


@pytest.mark.parametrize(
    ("since", "targets", "cause"),
    [
        (0, 3, "loss_depends_on_ranks"),
        (2, 3, "later_gradients_apart"),  # as momentum that depends on the ranks
        (0, 5, "mean_of_rank_means_or_a_term"),
        (2, 5, "mean_of_rank_means_or_a_term"),
    ],
)
def test_another_gradient_is_no_mean_of_means_where_the_ranks_have_as_many_targets(
    since: int, targets: int, cause: str, tmp_path: Path
) -> None:
    found = Case(tmp_path, turned=True, since=since, targets=targets).judge()[GRADIENT]
    assert found.divergence and found.divergence.step == since
    assert found.message.id == cause


def test_an_accumulation_that_is_not_divided_is_named_where_one_process_accumulates_more(tmp_path: Path) -> None:
    """Of several optimizers the weights of the losses are not judged."""
    in_turn = ReplayRecord(micro_batches=2, distances={"a.bias": Distance(1.0, 0.0)}, feed="in turn")
    found = Case(tmp_path, 2.0, found=in_turn).judge()[GRADIENT]
    assert found.message == message("accumulation_not_divided_in_one_process", ranks=2)


@pytest.mark.parametrize(("calls", "answer"), [(1, "differs"), (3, "right")])
def test_the_gradient_of_a_closures_last_call_is_one_inside_of_the_step(
    calls: int, answer: str, tmp_path: Path
) -> None:
    assert Case(tmp_path / "near", 1.001, calls=calls).judge()[GRADIENT].answer == answer
    far = Case(tmp_path / "far", 1.1, calls=calls).judge()
    assert far[GRADIENT].answer == ("differs" if calls == 1 else "unknown")  # a line search multiplies rounding


@pytest.mark.parametrize(("in_replay", "answer"), [(0.5, "right"), (0.25, "differs")])
def test_clipping_by_another_norm_is_named(in_replay: float, answer: str, tmp_path: Path) -> None:
    found = Case(tmp_path, clipped=(0.5, in_replay)).judge()[GRADIENT]
    assert found.answer == answer
    assert answer == "right" or found.message.id == "clipping_depends_on_ranks"


@pytest.mark.parametrize(
    ("libraries", "schedules", "base", "answer", "why"),
    [
        ((), (), [], "differs", ""),
        ((), (1,), [[0.2]], "differs", ""),
        ((), (1,), [[0.1]], "unknown", "schedule_counts_batches_of_a_rank"),
        (("accelerate",), (1,), [[0.1]], "unknown", "accelerate_advances_for_each_process"),
    ],
)
def test_a_rate_that_depends_on_the_ranks_is_named(
    libraries: tuple[str, ...],
    schedules: tuple[int, ...],
    base: list[list[float]],
    answer: str,
    why: str,
    tmp_path: Path,
) -> None:
    recorded = [[0.1]] if base else []
    seen = ReplayRecord(micro_batches=1, distances={}, base_rates=base, recorded_base_rates=recorded)
    found = Case(tmp_path, rate=0.2, libraries=libraries, schedules=schedules, found=seen).judge()[RATE]
    assert found.answer == answer
    if why:
        assert found.message.fields["why"].id == why
    else:
        assert found.message == message("rate_depends_on_ranks", rate=0.1, ranks=2, one_process=0.2, told=None)


def test_a_schedule_that_is_longer_by_the_ranks_is_told_from_others() -> None:
    one_process = [[0.1 * (1 + math.cos(math.pi * step / 16))] for step in range(8)]
    longer = [[0.1 * (1 + math.cos(math.pi * step / 32))] for step in range(8)]
    assert is_stretched(longer, one_process, size=2)
    assert not is_stretched(one_process, longer, size=2)  # shorter, as where samples over ranks are counted
    assert not is_stretched(longer, one_process, size=3)
    constant = [[0.1]] * 8
    assert not is_stretched(constant, constant, size=2)
    # A warm-up may be longer on more ranks on purpose.
    assert not is_stretched([[step / 32] for step in range(8)], [[step / 16] for step in range(8)], size=2)


def cosine(base: float, total: float, low: float = 0.0) -> list[list[float]]:
    return [[low + 0.5 * (base - low) * (1 + math.cos(math.pi * step / total))] for step in range(8)]


def test_a_rate_that_only_falls_begins_at_what_it_is_made_of() -> None:
    assert falls_from_a_multiple(cosine(0.2, 16, low=0.001), cosine(0.1, 16, low=0.001), size=2)
    assert falls_from_a_multiple([[0.2]] * 8, [[0.1]] * 8, size=2)
    assert not falls_from_a_multiple(cosine(0.1, 16), cosine(0.1, 32), size=2)
    assert not falls_from_a_multiple(cosine(0.14, 16), cosine(0.1, 16), size=2)
    warm_up = [[step / 16] for step in range(1, 9)]
    assert not falls_from_a_multiple(warm_up, [[rate / 2 for rate in rates] for rates in warm_up], size=2)


def test_a_schedule_that_runs_ahead_has_turned() -> None:
    def rates(speed: int) -> list[list[float]]:
        return [[min(speed * step / 4, 1.0, 2.0 - speed * step / 8)] for step in range(8)]

    assert is_ahead(rates(2), rates(1), size=2)
    assert not is_ahead(rates(1), rates(1), size=2) and not is_ahead(rates(2), rates(1), size=3)
    assert not is_ahead([[step / 8] for step in range(8)], [[step / 16] for step in range(8)], size=2)


def test_a_rate_of_one_of_several_optimizers_is_named(tmp_path: Path) -> None:
    found = Case(tmp_path, rate=2.2, optimizers=2).judge()[RATE]
    assert found.answer == "differs" and found.divergence and found.divergence.step == 1
    assert found.message == message("rate_depends_on_ranks", rate=1.1, ranks=2, one_process=2.2, told=None)


@pytest.mark.parametrize(
    ("off", "moved", "answer"),
    [(0.9e-4, 1.0, "right"), (1.1e-4, 1.0, "differs"), (0.0, 0.0, "unknown"), (1.0, float("nan"), "unknown")],
)
def test_weights_that_end_elsewhere_are_named(off: float, moved: float, answer: str, tmp_path: Path) -> None:
    seen = ReplayRecord(micro_batches=1, distances={"a.bias": Distance(moved, off), "b.bias": Distance(0.0, 0.0)})
    found = Case(tmp_path, found=seen).judge()[WEIGHTS]
    assert found.answer == answer
    assert answer != "differs" or (found.divergence and found.divergence.tensor == "a.bias")


def test_why_there_is_no_replay_is_said_and_other_micro_batches_are_named(tmp_path: Path) -> None:
    why = message("replay_reads_other_rows")
    said = message("not_replayed", why=why)
    assert Case(tmp_path / "a", found=ReplayRecord(why)).judge()["replay"].message == said
    later = Case(tmp_path / "c", found=ReplayRecord(why, micro_batches=1)).judge()
    assert [finding.message for finding in later.values()] == [said]
    found = Case(tmp_path / "b", found=ReplayRecord(why, micro_batches=3)).judge()[MICRO]
    figures = {"micro_batches": 1, "ranks": 2, "replayed": 3, "together": 2}
    assert (found.answer, found.message) == ("differs", message("accumulation_depends_on_ranks", **figures))


@pytest.mark.parametrize(
    ("apart", "found"),
    [
        ([2e-9, 2e-9, 2e-9, 2e-7, 1.4e-4, 2e-2], True),  # a transformer at a high rate
        ([2e-9, 2e-9, 2e-2], False),
        ([2e-9, 2e-9, 1e-3, 2e-2], False),
        ([1e-5, 1e-4, 1e-3, 2e-2], False),
    ],
)
def test_rounding_that_grows_is_no_mistake(apart: list[float], found: bool) -> None:
    assert bool(grown_rounding(apart, step=len(apart) - 1)) is found
