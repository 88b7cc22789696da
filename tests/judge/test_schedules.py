"""Rates and schedules for which the source is needed: what is a multiple of the ranks, and what outlasts a training."""

from __future__ import annotations

from dataclasses import replace

import pytest

from samestep.judge.rate_factors import RateFactors
from samestep.judge.schedules import with_schedules
from samestep.judge.source import Source
from samestep.message import Message, message
from samestep.records.call_site import Call, CallRecord, CallSite
from samestep.records.findings import Finding
from samestep.records.script import LoopRecord, MicroBatchRecord, ScheduleRecord, ScriptRecord, StepRecord

SETS = "for group in optimizer.param_groups:\n    group['lr'] = {}\n"
WARM_UP = "def get_lr(it, top=0.1):\n    if it < 10:\n        return top * (it + 1) / 10\n    return top\n"


@pytest.mark.parametrize(
    "rate",
    [
        "0.01 * world * min(1, it / 10)",
        "get_lr(it) * dist.get_world_size()",
        "get_lr(it, 0.1 * world)",
        "base",
        "args.lr",
        "group['initial_lr'] * min(1, it / 10)",
        "0.1 * world * 0.5 * (1 + math.cos(math.pi * (step - 5) / 20))",
        "0.1 * world * 0.5 ** (epoch // 10)",
    ],
)
def test_a_rate_times_the_ranks_is_read_in_its_factors(rate: str) -> None:
    text = "base = 0.1 * world_size\nargs.lr *= world_size\noptimizer = SGD(parameters, lr=0.1 * world)\n"
    factors = RateFactors({"train.py": Source(WARM_UP + text + SETS.format(rate))})
    assert factors.times_ranks()


@pytest.mark.parametrize(
    "rate",
    [
        "get_lr(it)",
        "get_lr(it * world)",
        "args.blr * args.batch_size * world / 256",
        "args.blr * eff_batch_size / 256",
        "0.1 * it * world / 1000",
        "0.1 * min(1, it / (10 / world))",
        "0.1 * it / warmup",
        "0.1 * world / world_size",
        "cosine(0.1, total)[it]",
    ],
)
def test_ranks_in_a_count_of_steps_or_rows_are_no_factor_of_the_rate(rate: str) -> None:
    text = "warmup = 10 / world\ntotal = 100 * world\neff_batch_size = args.batch_size * world\n"
    assert not RateFactors({"train.py": Source(WARM_UP + text + SETS.format(rate))}).times_ranks()


@pytest.mark.parametrize(
    ("function", "is_multiple"),
    [
        ("lambda s: world * min(1.0, (s + 1) / 6)", True),
        ("lr_lambda=lambda s: world * 0.5 ** (s // 10)", True),
        ("scaled", True),
        ("lambda s: min(1.0, s * world / 600)", False),
        ("lambda s: s * world / 600", False),
        ("lambda s: 1 - (s * world) / total_steps", False),
        ("lambda s: 0.9**s", False),
    ],
)
def test_what_a_lambda_multiplies_the_rate_by_is_read_too(function: str, is_multiple: bool) -> None:
    text = "def scaled(s):\n    return world_size * min(1.0, s / 6)\n"
    factors = RateFactors({"train.py": Source(f"{text}schedule = LambdaLR(optimizer, {function})\n")})
    assert bool(factors.times_ranks()) is is_multiple


def test_a_share_of_a_ranks_own_loader_is_no_count_of_all_ranks() -> None:
    text = "def adjust(epoch):\n    group['lr'] = 0.1 * epoch\nadjust({})\n"
    for time, count in (
        ("(step / len(loader) + epoch) * world", 1),
        ("step / len(loader) + epoch", 0),
        ("step * world / (len(data) // batch_size)", 0),
        ("step * batch_size * world / len(data)", 0),
    ):
        assert len(RateFactors({"train.py": Source(text.format(time))}).time_of_ranks()) == count


TEXT = """schedule = CosineAnnealingLR(optimizer, T_max=32)
for epoch in range(4):
    for x, y in loader:
        loss.backward()
        optimizer.step()
        schedule.step()
"""
LINES: dict[Call, int] = {"scheduler": 1, "backward": 4, "optimizer step": 5, "scheduler step": 6}


def told(
    text: str, length: int = 32, begin: int = 0, early: bool = False, micro_batches: int = 1, epochs: int | None = 4
) -> list[str]:
    """Returns the ids that are said of a schedule of a length, and loops of 4 and 8 rounds."""
    stripped = [line.strip() for line in text.splitlines()]
    sought = {call: TEXT.splitlines()[line - 1].strip() for call, line in LINES.items()}
    lines = {call: stripped.index(line) + 1 for call, line in sought.items() if line in stripped}
    first = 0 if early else 1
    calls = [
        CallRecord(call, "", [CallSite("train.py", line, "<module>")], 0, first, first + 7, 8)
        for call, line in lines.items()
    ]
    batches = [MicroBatchRecord([])] * micro_batches
    stepped = "scheduler step" in lines
    steps = [
        StepRecord(0, batches, [0.1], [begin + (step + early) * stepped], [], 0, None, {}, []) for step in range(8)
    ]
    around = [LoopRecord("train.py", 3, 8), LoopRecord("train.py", 2, epochs)]
    rank = ScriptRecord(0, 2, {}, steps, [], "steps", [], 0.0, [], calls=calls, loops=around)
    rank = replace(rank, schedules=[ScheduleRecord(0, length)])
    sources = {"train.py": Source(text)}
    said = message("no_schedule")
    return [
        finding.message.id for finding in with_schedules([Finding("schedule", "right", said)], [rank] * 2, sources)
    ][1:]


def test_a_schedule_as_long_as_its_training_is_right() -> None:
    assert told(TEXT) == [] and told(TEXT, 40) == [] and told(TEXT, 16) == []
    assert told(TEXT, 64, begin=33) == []  # which was begun before


def test_a_schedule_that_outlasts_its_training_is_named() -> None:
    longer = ["schedule_longer_than_training"]
    assert told(TEXT, 64) == longer
    assert told(TEXT, 32, micro_batches=4) == longer
    assert told(TEXT.replace("        schedule.step()", "    schedule.step()"), 32) == longer
    assert told(TEXT + "for x, y in loader:\n    schedule.step()\n", 64) == []  # and goes on elsewhere
    assert told(TEXT, 64, epochs=None) == []


def test_a_schedule_that_is_not_stepped_or_too_early_is_named() -> None:
    never = TEXT.replace("        schedule.step()\n", "")
    assert told(never) == ["schedule_never_stepped"]
    assert told(never + "save(schedule.state_dict())\n") == ["schedule_never_stepped"]
    assert told(never + "train(schedule)\n") == [] and told(never + "schedule.step()\n") == []
    assert told(TEXT, early=True) == ["schedule_stepped_before_optimizer"]


def unknown(rate: float, ahead: bool | None = None) -> Finding:
    said: Message = message("schedule_depends_on_ranks", rate=rate, step=1, one_process=0.1, why="", ahead=ahead)
    return Finding("replayed rate", "unknown", said)


@pytest.mark.parametrize(
    ("rate", "found", "said"),
    [
        ("0.1 * world * min(1, it / 10)", unknown(0.2), "rate_depends_on_ranks"),
        ("0.1 * world * min(1, it / 10)", unknown(0.3), "schedule_depends_on_ranks"),
        ("0.1 * min(1, it / 10)", unknown(0.2), "schedule_depends_on_ranks"),
        ("get_lr((epoch + it / len(loader)) * world)", unknown(0.2, ahead=True), "schedule_shorter_by_the_ranks"),
        ("get_lr((epoch + it / len(loader)) * world)", unknown(0.2), "schedule_depends_on_ranks"),
        ("0.1 * world", Finding("rate", "right", message("rates_are_the_same")), "rate_written_times_ranks"),
        ("0.1", Finding("rate", "right", message("rates_are_the_same")), "rates_are_the_same"),
    ],
)
def test_the_source_tells_a_rate_from_a_schedule(rate: str, found: Finding, said: str) -> None:
    step = StepRecord(0, [], [0.2], [], [], 0, None, {}, [])
    rank = ScriptRecord(0, 2, {}, [step], [], "steps", [], 0.0, [])
    findings = with_schedules([found], [rank] * 2, {"train.py": Source(SETS.format(rate))})
    assert findings[-1].message.id == said
    assert said.startswith("schedule_depends") or not findings[-1].sites or findings[-1].sites[0].line == 2


def test_a_rate_that_a_setting_scales_is_left_alone() -> None:
    step = StepRecord(0, [], [0.2], [], [], 0, None, {}, [])
    rank = ScriptRecord(0, 2, {}, [step], [], "steps", [], 0.0, [])
    text = "lr = 0.1\nif args.scale_lr:\n    lr *= world\n" + SETS.format("lr")
    found = with_schedules(
        [Finding("rate", "right", message("rates_are_the_same"))], [rank] * 2, {"a.py": Source(text)}
    )
    assert len(found) == 1


@pytest.mark.parametrize(
    ("time", "rates", "found"),
    [
        ("it * accumulation", [0.1, 0.3, 0.2, 0.1, 0.2, 0.3], True),
        ("it", [0.1, 0.3, 0.2, 0.1, 0.2, 0.3], False),
        ("it * accumulation", [0.1, 0.3, 0.25, 0.2, 0.15, 0.1], False),
        ("it * accumulation", [0.3, 0.25, 0.2, 0.3, 0.25, 0.2], False),
    ],
)
def test_a_schedule_by_hand_that_counts_micro_batches_turns_too_early(
    time: str, rates: list[float], found: bool
) -> None:
    text = f"for it in range(12):\n    group['lr'] = get_lr({time})\n    for micro_step in range(accumulation):\n"
    text += "        loss.backward()\n    optimizer.step()\n"
    steps = [StepRecord(0, [MicroBatchRecord([])] * 2, [rate], [], [], 0, None, {}, []) for rate in rates]
    calls = [CallRecord("backward", "", [CallSite("a.py", 4, "<module>")])]
    rank = ScriptRecord(0, 2, {}, steps, [], "steps", [], 0.0, [], calls=calls)
    same = Finding("rate", "right", message("rates_are_the_same"))
    said = [finding.message.id for finding in with_schedules([same], [rank] * 2, {"a.py": Source(text)})]
    assert said[1:] == ["rate_counts_micro_batches"] * found


def test_a_rate_of_an_optimizer_is_read_where_nothing_is_replayed() -> None:
    step = StepRecord(0, [], [0.2], [], [], 0, None, {}, [])
    calls = [CallRecord("optimizer", "SGD", [CallSite("a.py", 2, "<module>")], 0)]
    rank = ScriptRecord(0, 2, {}, [step], [], "steps", [], 0.0, [], calls=calls)
    text = "rate = 0.1 * dist.get_world_size()\noptimizer = torch.optim.SGD(model.parameters(), lr=rate)\n"
    same = Finding("rate", "right", message("rates_are_the_same"))
    (_, found) = with_schedules([same], [rank] * 2, {"a.py": Source(text)})
    assert found.message.id == "rate_written_times_ranks" and found.sites[0].line == 1
