"""The judge of a replay, on records that are made up: what it calls another step, and what it leaves unknown. It needs
no torch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from proof.script.test_script import NAMES, SIZE, STEPS, judged
from samestep.proof.script.replay import replayed
from samestep.records.arrays import write_arrays
from samestep.records.files import read
from samestep.records.record import Record
from samestep.records.replay import Distance, Replayed
from samestep.records.script import ClipSeen, Finding, ScriptRecord, StepSeen


@dataclass
class Case:
    """A recording and its replay. factor: of the replay's gradients, from step `since` on. clipped: the norms, on the
    ranks and in the replay, by which they are multiplied after that. rate: the last optimizer's in the replay. turned:
    whether the replay's gradients have their elements in another order, from step `since` on. targets: of rank 1."""

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
    found: Replayed = field(default_factory=lambda: Replayed("", micro=1, distances={"a.bias": Distance(1.0, 0.0)}))

    def judge(self) -> dict[str, Finding]:
        """Returns question -> its answer."""
        for name in ("ranks", "replay"):
            (self.folder / name).mkdir(parents=True)
        judged(self.folder / "ranks", "mean")
        ranks = [read(ScriptRecord, self.folder / "ranks" / f"rank{rank}.json") for rank in range(SIZE)]
        clips = [ClipSeen(1, 4, 4, 0.5)] if self.clipped else []
        steps = [
            replace(each, dtypes=[self.dtype], schedules=list(self.schedules), clips=clips, calls=self.calls)
            for each in ranks[0].steps
        ]
        steps = [
            replace(each, optimizer=number % self.optimizers, rates=[0.1 + number % self.optimizers])
            for number, each in enumerate(steps)
        ]
        ranks = [replace(rank, steps=steps, libraries=list(self.libraries)) for rank in ranks]
        ranks[1] = replace(ranks[1], steps=[self._with_targets(step) for step in ranks[1].steps])
        last = self.optimizers - 1
        mine = [replace(step, rates=[self.rate]) if step.optimizer == last else step for step in steps]
        one = replace(ranks[0], steps=mine)
        for step in range(STEPS):
            self._write(step)
        return {
            each.question: each
            for each in replayed(self.found, ranks, one, Record(self.folder / "ranks"), Record(self.folder / "replay"))
        }

    def _with_targets(self, step: StepSeen) -> StepSeen:
        losses = [[replace(term, count=self.targets) for term in micro.losses] for micro in step.micro]
        return replace(step, micro=[replace(micro, losses=of) for micro, of in zip(step.micro, losses)])

    def _write(self, step: int) -> None:
        """Writes the replay's arrays, made of the ranks'; those of ranks that clip get what was taken after it."""
        ranks = Record(self.folder / "ranks")
        factor = self.factor if step >= self.since else 1.0
        taken = {name: ranks.arrays(f"step{step}")[f"taken {name}"] for name in NAMES}
        here, there = self.clipped or (1.0, 1.0)
        order = -1 if self.turned and step >= self.since else 1
        arrays = {f"taken {name}": array[::order] * factor * there for name, array in taken.items()}
        if self.clipped:
            arrays |= {f"unclipped {name}": array * factor for name, array in taken.items()}
            for rank in range(SIZE):
                theirs = ranks.arrays(f"step{step}", rank)
                theirs |= {f"unclipped {name}": taken[name] for name in NAMES}
                theirs |= {f"taken {name}": taken[name] * here for name in NAMES}
                write_arrays(self.folder / "ranks" / f"rank{rank}.step{step}.npz", theirs)
        write_arrays(self.folder / "replay" / f"rank0.step{step}.npz", arrays)


GRADIENT, RATE, WEIGHTS, MICRO = "replayed gradient", "replayed rate", "replayed weights", "replayed micro-batches"


def test_the_same_steps_are_right(tmp_path: Path) -> None:
    assert {name: each.answer for name, each in Case(tmp_path).judge().items()} == {
        GRADIENT: "right",
        RATE: "right",
        WEIGHTS: "right",
    }


@pytest.mark.parametrize(
    ("factor", "since", "dtype", "cause"),
    [
        (0.5, 0, "float32", "2 times that of one process on the same rows"),
        (2.0, 0, "float32", "1/2 times that of one process on the same rows"),
        (1.25, 0, "float32", "0.8 times that of one process on the same rows: the loss is scaled"),
        (1.001, 0, "float32", "the loss is scaled"),
        (1.001, 1, "float32", ""),  # weights that are a rounding away have another gradient
        (1.1, 1, "float32", "the loss is scaled"),
        (1.001, 0, "bfloat16", ""),
        (1.001, 0, "float16", ""),
        (1.1, 0, "bfloat16", "the loss is scaled"),
    ],
)
def test_a_gradient_of_another_scale_is_named(
    factor: float, since: int, dtype: str, cause: str, tmp_path: Path
) -> None:
    found = Case(tmp_path, factor, since, dtype).judge()[GRADIENT]
    assert found.answer == ("differs" if cause else "right"), found
    assert cause in found.sentence
    assert not cause or (found.divergence and found.divergence.step == since)


@pytest.mark.parametrize(
    ("since", "targets", "cause"),
    [
        (0, 3, "though each rank has as many rows and targets"),
        (2, 3, "the step itself"),  # as momentum that depends on the ranks
        (0, 5, "the rank's own number of them"),
        (2, 5, "the rank's own number of them"),
    ],
)
def test_another_gradient_is_no_mean_of_means_where_the_ranks_have_as_many_targets(
    since: int, targets: int, cause: str, tmp_path: Path
) -> None:
    found = Case(tmp_path, turned=True, since=since, targets=targets).judge()[GRADIENT]
    assert found.divergence and found.divergence.step == since
    assert cause in found.sentence


def test_an_accumulation_that_is_not_divided_is_named_where_one_process_accumulates_more(tmp_path: Path) -> None:
    """Of several optimizers the weights of the losses are not judged."""
    in_turn = Replayed("", micro=2, distances={"a.bias": Distance(1.0, 0.0)}, feed="in turn")
    assert "are not divided by their number" in Case(tmp_path, 2.0, found=in_turn).judge()[GRADIENT].sentence


@pytest.mark.parametrize(("calls", "answer"), [(1, "differs"), (3, "right")])
def test_the_gradient_of_a_closures_last_call_is_one_inside_of_the_step(
    calls: int, answer: str, tmp_path: Path
) -> None:
    assert Case(tmp_path / "near", 1.001, calls=calls).judge()[GRADIENT].answer == answer
    far = Case(tmp_path / "far", 1.1, calls=calls).judge()
    assert far[GRADIENT].answer == ("differs" if calls == 1 else "unknown")  # a line search multiplies rounding


@pytest.mark.parametrize(("there", "answer"), [(0.5, "right"), (0.25, "differs")])
def test_clipping_by_another_norm_is_named(there: float, answer: str, tmp_path: Path) -> None:
    found = Case(tmp_path, clipped=(0.5, there)).judge()[GRADIENT]
    assert found.answer == answer
    assert answer == "right" or "clipping depends on the number of ranks" in found.sentence


@pytest.mark.parametrize(
    ("libraries", "schedules", "base", "answer", "says"),
    [
        ((), (), [], "differs", "0.1 on 2, 0.2 on one"),
        ((), (1,), [[0.2]], "differs", "0.1 on 2, 0.2 on one"),
        ((), (1,), [[0.1]], "unknown", "its length is counted in batches of a rank"),
        (("accelerate",), (1,), [[0.1]], "unknown", "Accelerate advances its prepared schedules once for each process"),
    ],
)
def test_a_rate_that_depends_on_the_ranks_is_named(
    libraries: tuple[str, ...],
    schedules: tuple[int, ...],
    base: list[list[float]],
    answer: str,
    says: str,
    tmp_path: Path,
) -> None:
    recorded = [[0.1]] if base else []
    seen = Replayed("", micro=1, distances={}, base_rates=base, recorded_base_rates=recorded)
    found = Case(tmp_path, rate=0.2, libraries=libraries, schedules=schedules, found=seen).judge()[RATE]
    assert found.answer == answer and says in found.sentence


def test_a_rate_of_one_of_several_optimizers_is_named(tmp_path: Path) -> None:
    found = Case(tmp_path, rate=2.2, optimizers=2).judge()[RATE]
    assert found.answer == "differs" and found.divergence and found.divergence.step == 1
    assert "1.1 on 2, 2.2 on one" in found.sentence


@pytest.mark.parametrize(
    ("off", "moved", "answer"),
    [(0.9e-4, 1.0, "right"), (1.1e-4, 1.0, "differs"), (0.0, 0.0, "unknown"), (1.0, float("nan"), "unknown")],
)
def test_weights_that_end_elsewhere_are_named(off: float, moved: float, answer: str, tmp_path: Path) -> None:
    seen = Replayed("", micro=1, distances={"a.bias": Distance(moved, off), "b.bias": Distance(0.0, 0.0)})
    found = Case(tmp_path, found=seen).judge()[WEIGHTS]
    assert found.answer == answer
    assert answer != "differs" or (found.divergence and found.divergence.tensor == "a.bias")


def test_why_there_is_no_replay_is_said_and_other_micro_batches_are_named(tmp_path: Path) -> None:
    assert Case(tmp_path / "a", found=Replayed("too long")).judge()["replay"].sentence == "not replayed: too long"
    later = Case(tmp_path / "c", found=Replayed("other rows at step 1", micro=1)).judge()
    assert [each.sentence for each in later.values()] == ["not replayed: other rows at step 1"]
    found = Case(tmp_path / "b", found=Replayed("another number", micro=3)).judge()[MICRO]
    assert found.answer == "differs" and "1 on each of 2, and 3 in one process" in found.sentence
