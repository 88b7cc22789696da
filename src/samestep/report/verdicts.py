"""Says what verify and compare have found: the headline, each verdict, what differs, the conditions, the notes.

Everything is a message of report/sentences/verdicts.toml; the functions that return text put it into a sentence.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from samestep.message import Message, as_said, message
from samestep.records.results import CompareResults, Divergence, EngineResult, Inexactness, SecondProof, Summary
from samestep.report.language import text
from samestep.report.numbers import MISSING, amount, difference, factor

TRAININGS = {
    "gradient": "training_one_step",
    "sgd": "training_under_sgd",
    "user": "training_under_own_optimizer",
    "late": "training_of_late_epochs",
    "life": "training_of_life",
}
VERDICTS = {
    "same": "verdict_same",
    "approximate": "verdict_approximate",
    "differs": "verdict_differs",
    "failed": "verdict_failed",
    "refused": "verdict_refused",
    "unavailable": "verdict_unavailable",
}
QUANTITIES = {
    "precision": "quantity_precision",
    "initial weights": "quantity_initial_weights",
    "rows": "quantity_rows",
    "indices": "quantity_indices",
    "tensors received": "quantity_tensors_received",
    "weight": "quantity_weight",
    "loss": "quantity_loss",
    "learning rate": "quantity_learning_rate",
    "optimizer steps": "quantity_optimizer_steps",
    "parameter groups": "quantity_parameter_groups",
    "first gradient": "quantity_first_gradient",
    "parameter": "quantity_parameter",
    "buffer": "quantity_buffer",
    "names of the weights": "quantity_names_of_weights",
    "replicas": "quantity_replicas",
    "every index once": "quantity_every_index_once",
    "evaluation rows": "quantity_evaluation_rows",
    "evaluation": "quantity_evaluation",
    "best evaluation": "quantity_best_evaluation",
    "saved weights": "quantity_saved_weights",
    "averaged weights": "quantity_averaged_weights",
    "predictions": "quantity_predictions",
    "resumed step": "quantity_resumed_step",
    "resumed state": "quantity_resumed_state",
}
ILL_CONDITIONED = "tensors_ill_conditioned"  # the proof's note of the tensors that it could not compare
TRIED = {"fault_gives_what_was_found", "several_faults_give_what_was_found"}
SHOWN_DIGITS = 2  # of a ratio, as numbers.factor shows them: 2.00 is not more than 2
MOST_LEFT = 9.99  # of a difference: what a fault leaves beyond it is no figure to compare


# Rows


def comparable_rows(results: CompareResults) -> list[EngineResult]:
    """Returns the rows whose speed may be compared: proven, and measured."""
    return [row for row in results.engines if row.proven and row.samples_per_second]


def speed(row: EngineResult) -> Summary:
    """Returns the samples/s of one of the `comparable_rows`."""
    assert row.samples_per_second is not None
    return row.samples_per_second


def title(row: EngineResult) -> str:
    """'ddp compress=fp16': the engine, with those of its settings that were changed. 'ddp 2 -> fsdp 3': another one has
    continued its training."""
    name = " ".join([row.engine, *(f"{key}={value}" for key, value in row.settings.items())])
    continued = row.continued_by
    return f"{name} {row.replicas} -> {continued.engine} {continued.replicas}" if continued else name


def label(row: EngineResult) -> str:
    """'ddp (torchrun)'"""
    return f"{title(row)} ({row.launcher})" if row.launcher else title(row)


def titles(some: Sequence[EngineResult], rows: Sequence[EngineResult]) -> Message:
    """'ddp and fsdp'; with the launcher where `some` has not all rows of an engine."""
    names = [title(row) if all(r in some for r in rows if r.engine == row.engine) else label(row) for row in some]
    names = list(dict.fromkeys(names))
    return as_said(names[0]) if len(names) == 1 else message("names_and", names=names[:-1], last=names[-1])


# Verdicts


def verdict(row: EngineResult) -> Message:
    """'same step (bitwise)', 'approximate', 'differs at step 3: loss of rank 1', 'failed', 'refused', 'unavailable'."""
    divergence = row.first_divergence
    if row.verdict == "differs" and divergence is not None:
        return message("differs_in", **_moment(divergence), what=place(divergence))
    if second := proven_second(row):
        return message("verdict_on_two_sizes", verdict=_word(row), ranks=row.ranks, second=second.ranks)
    return _word(row)


def _word(row: EngineResult) -> Message:
    return message("verdict_same_bitwise") if row.bitwise else Message(VERDICTS[row.verdict])


def proven_second(row: EngineResult) -> SecondProof | None:
    """The second number of ranks on which a proven row is proven, too; None for one without."""
    return row.second if row.proven and row.second and row.second.verdict == "same" else None


def _moment(divergence: Divergence) -> dict[str, int | None]:
    """Where a divergence is: its step, in the whole schedule and with its epoch where the training begins late in it;
    and the second number of ranks, if it is there."""
    late = divergence.schedule_step is not None
    step = divergence.schedule_step if late else divergence.step
    return {"ranks": divergence.ranks, "epoch": divergence.epoch, "step": step}


def verdict_text(row: EngineResult) -> str:
    """Returns the sentence of `verdict`."""
    return text(verdict(row))


def short_verdict(row: EngineResult) -> str:
    """The verdict in a few words: 'differs at step 3'."""
    if row.verdict == "differs" and row.first_divergence is not None:
        return text(message("differs_at_step", **_moment(row.first_divergence)))
    return text(_word(row))


def ranks_of(row: EngineResult) -> str:
    """'2, 5': the numbers of ranks on which a row is proven."""
    second = proven_second(row)
    return ", ".join(str(ranks) for ranks in (row.ranks, second and second.ranks) if ranks) if row.proven else MISSING


def place(divergence: Divergence) -> Message:
    """The first thing that differed: 'loss of rank 1', 'first gradient of conv1.weight'."""
    name = quantity(divergence)
    if divergence.tensor is not None:
        return message("quantity_of_tensor", quantity=name, tensor=divergence.tensor, rank=divergence.rank)
    return name if divergence.rank is None else message("quantity_of_rank", quantity=name, rank=divergence.rank)


def quantity(divergence: Divergence) -> Message:
    """The kind of thing that differed: 'loss', 'first gradient'."""
    known = QUANTITIES.get(divergence.quantity)
    return Message(known) if known else as_said(divergence.quantity)


def value(shown_value: Any) -> str:
    """Returns an expected or found value with all its digits: the difference may be in the last one."""
    is_list = isinstance(shown_value, list | tuple)
    return ", ".join(map(str, shown_value)) if is_list else str(shown_value)


def ill_conditioned(row: EngineResult, results: CompareResults) -> Message | None:
    """'7 of 18 tensors not compared at the end, …', from the proof's list of their names; None where there are none."""
    names = {name for note in row.notes for name in _tensors(note)}
    return message("tensors_not_compared", count=len(names), tensors=results.tensors) if names else None


def folded(note: Message, row: EngineResult, results: CompareResults) -> tuple[str, list[str]]:
    """Returns (summary, what is behind it) of one note; a note that is short has nothing behind it."""
    names = _tensors(note)
    return (str(ill_conditioned(row, results)), names) if names else (str(note), [])


def _tensors(note: Message) -> list[str]:
    return [*note.fields["sgd"], *note.fields["user"]] if note.id == ILL_CONDITIONED else []


def numerics(inexactness: Inexactness) -> Message:
    """How far an inexact engine's training is from the exact one."""
    bound, loss_gap = inexactness.bound, inexactness.loss_gap
    return message(
        "inexact_by_design",
        distance=difference(inexactness.distance),
        bound=None if bound is None else difference(bound),
        loss_gap=MISSING if loss_gap is None else format(loss_gap, ".2%"),
        skipped=inexactness.skipped_steps or None,
    )


# The headline


def headline(results: CompareResults) -> str:
    """Returns one sentence: what was proven, then what differs or failed, then what is fastest."""
    rows = results.engines
    clauses = [*_proofs(rows)]
    answer = results.same_as_one_process
    # The yes is about the reference: beside an engine that is not proven it would be read as an acquittal.
    clauses += [one_process_clause(results)] if answer and not (answer.same and _unproven(results)) else []
    differing = [row for row in rows if row.verdict == "differs"]
    clauses += [message("engine_and_verdict", engine=titles([row], rows), verdict=verdict(row)) for row in differing]
    failed = [row for row in rows if row.verdict == "failed"]
    if failed:
        clauses.append(message("engines_failed", engines=titles(failed, rows)))
    compared = comparable_rows(results)
    if compared:
        clauses += _fastest(compared, rows)
    return sentence(_clauses(clauses or [message("no_engine_proven")]))


def _clauses(clauses: Sequence[Message]) -> Message:
    """Joins clauses by semicolons."""
    joined = clauses[0]
    for clause in clauses[1:]:
        joined = message("two_clauses", first=joined, second=clause)
    return joined


def _unproven(results: CompareResults) -> list[EngineResult]:
    """Returns the rows of engines that could run here, and whose training is not proven. Without those that refuse the
    job, unless no engine is proven: they train nothing."""
    trained = [row for row in results.engines if row.verdict not in ("unavailable", "refused")]
    if not any(row.proven for row in trained):
        return [row for row in results.engines if row.verdict != "unavailable"]
    return [row for row in trained if not row.proven]


def one_process_clause(results: CompareResults) -> Message:
    """Whether the job's training on several ranks is that of one process, which must have been compared."""
    compared, ranks = results.same_as_one_process, results.world_size
    assert compared is not None
    if compared.same:
        return message("job_trains_as_in_one_process", ranks=ranks)
    if compared.answer == "no, as expected":
        return message("job_differs_from_one_process_as_expected", ranks=ranks, why=compared.reason)
    if compared.answer == "not known":
        return message("job_against_one_process_not_known", ranks=ranks, why=compared.reason)
    return message("job_differs_from_one_process_by_mistake", ranks=ranks, why=compared.reason)


def _proofs(rows: Sequence[EngineResult]) -> Iterator[Message]:
    """Yields a clause or two for each number of replicas. One process is named only where nothing else was proven."""
    proven = [row for row in rows if row.proven]
    proven = [row for row in proven if row.replicas != 1] or proven
    for sizes in dict.fromkeys(map(_sizes, proven)):
        replicas, ranks, second = sizes
        process = message("one_process") if replicas == 1 else message("one_process_playing", ranks=replicas)
        same = [row for row in proven if _sizes(row) == sizes and row.verdict == "same"]
        close = [row for row in proven if _sizes(row) == sizes and row.verdict == "approximate"]
        bitwise = [row for row in same if row.bitwise and (row.second is None or not second or row.second.bitwise)]
        if same:
            how = message("bit_for_bit" if bitwise == same else "up_to_rounding")
            if bitwise and bitwise != same:
                how = message("some_bit_for_bit", engines=titles(bitwise, rows))
            engines = titles(same, rows)
            if second:
                fields = {"ranks": ranks, "second": second}
                yield message("engines_take_same_step_on_two_sizes", engines=engines, n=_count(same), how=how, **fields)
            else:
                yield message("engines_take_same_step", engines=engines, n=_count(same), process=process, how=how)
        if close and same:
            yield message("engines_approximate_it", engines=titles(close, rows), n=_count(close))
        elif close:
            yield message("engines_approximate_step", engines=titles(close, rows), n=_count(close), process=process)


def _sizes(row: EngineResult) -> tuple[int | None, int | None, int]:
    """The replicas and ranks of a row, and the second number of ranks on which it is proven; 0 where there is none."""
    second = proven_second(row)
    return row.replicas, row.ranks, second.ranks if second else 0


def _fastest(compared: Sequence[EngineResult], rows: Sequence[EngineResult]) -> Iterator[Message]:
    """Yields the exact engine with the highest median, with those whose intervals overlap its own: they may be as fast.

    An approximate engine does less work: it is the fastest only where no exact engine was measured, and is otherwise
    named after the fastest.
    """
    exact = [row for row in compared if row.verdict == "same"] or compared
    best = max(exact, key=lambda row: speed(row).median)
    is_single = best.replicas == 1
    tied = [row for row in exact if row is not best and speed(row).high >= speed(best).low]
    yield message(
        "fastest_here",
        engine=titles([best], rows),
        single=message("in_one_process") if is_single else None,
        speed=amount(speed(best).median),
        ratio=factor(best.ratio.median) if best.ratio and not is_single and not too_fast(best) else None,
        tied=titles(tied, rows) if tied else None,
    )
    for row in compared:
        if row not in exact and speed(row).median > speed(best).median:
            yield message("approximate_engine_reaches", engine=titles([row], rows), speed=amount(speed(row).median))


def _count(rows: Sequence[EngineResult]) -> int:
    return len({row.engine for row in rows})


# The notes


def notes(results: CompareResults) -> list[str]:
    """Returns what the table has no room for, one sentence each."""
    return [*conditions(results), *problems(results), *row_notes(results), *one_process(results)]


def too_fast(row: EngineResult) -> bool:
    """Whether a row is more times as fast as one process than it has ranks, in the whole interval of its launches."""
    speedup = None if row.ratio is None else round(row.ratio.low, SHOWN_DIGITS)
    return row.ranks is not None and speedup is not None and row.ranks > 1 and speedup > row.ranks


def speeds_that_cannot_be(results: CompareResults) -> list[Message]:
    """Returns what is wrong with each ratio that dividing the work among the ranks does not give."""
    return [
        message("faster_than_ranks_allow", engine=label(row), ratio=factor(row.ratio.median), ranks=row.ranks)
        for row in comparable_rows(results)
        if row.ratio and too_fast(row)
    ]


def conditions(results: CompareResults) -> list[str]:
    """Returns what all rows have in common: the batch, threads, loader workers, dtypes, and how it was measured."""
    proof = results.proof
    said = [
        message("step_of_every_engine", shares=shares_of(results)),
        message(
            "threads_and_workers",
            threads=results.threads_per_rank,
            workers=results.workers,
            itself=None if results.workers else message("rank_loads_its_own_data"),
        ),
        message(
            "proven_against_reference",
            dtype=proof.dtype,
            steps=proof.steps,
            fewer=fewer_rows(results),
            why=proof.float64_failed,
        ),
    ]
    said += left_out(results)
    if any(row.continued_by for row in results.engines):
        said.append(message("trainings_were_interrupted"))
    if results.measured:
        said += [
            message(
                "measured_in_turn",
                dtype=results.dtype,
                launches=results.repeats,
                warmup=results.warmup_steps,
                steps=results.measured_steps,
            ),
            message("median_over_launches"),
            message("ratio_is_paired"),
            *speeds_that_cannot_be(results),
            message("step_times_of_rank_0"),
            message("memory_and_startup"),
        ]
    return _sentences(said)


def left_out(results: CompareResults) -> list[Message]:
    """Returns what was compared on the second number of ranks, and what of the proof was left out."""
    seconds = [(row, row.second) for row in results.engines if row.second]
    compared = [second for _, second in seconds if second.verdict != "refused"]
    said: list[Message] = []
    for ranks, mesh, ranks_as in dict.fromkeys((second.ranks, second.mesh, second.ranks_as) for second in compared):
        how = message("ranks_as_threads" if ranks_as == "threads" else "ranks_as_processes")
        fields = {"ranks": ranks, "mesh": mesh or None, "how": how}
        said.append(message("second_size_compared", steps=results.proof.second_steps, **fields))
    for row, second in seconds:
        if row.proven and second.verdict == "refused":
            fields = {"ranks": second.ranks, "mesh": second.mesh or None, "why": second.reason}
            said.append(message("second_size_not_compared", engine=label(row), **fields))
    looked_at, every_row = results.proof.rows_looked_at, results.rows
    of_rows = (
        [message("rows_looked_at_of_all", looked_at=looked_at, rows=every_row)] if 0 < looked_at < every_row else []
    )
    if results.proof.quick:
        return [*said, *of_rows, message("quick_proof_leaves_out")]
    rows = [row for row in results.engines if row.proven]
    if not said and results.world_size > 1 and any(row.ranks == results.world_size for row in rows):
        option = None if results.measured or any(row.continued_by for row in rows) else "--also"
        said.append(message("one_number_of_ranks_compared", option=option))
    return [*said, *of_rows]


def fewer_rows(results: CompareResults) -> Message | None:
    """' of 32 samples …', where a step of the proof takes fewer than the job's."""
    rows = results.proof.rows
    return message("steps_of_fewer_rows", rows=rows) if 0 < rows < results.global_batch else None


def problems(results: CompareResults) -> list[str]:
    """Returns what is wrong with each engine that ran: why it failed or refuses, or what differs first."""
    said = []
    for row in results.engines:
        name, divergence = label(row), row.first_divergence
        if row.reason and row.verdict != "unavailable":
            said.append(message("engine_verdict_and_why", engine=name, verdict=verdict(row), why=row.reason))
        if divergence:
            values = {"expected": value(divergence.expected), "found": value(divergence.found)}
            said.append(message("engine_differs", engine=name, verdict=verdict(row), **values))
            if divergence.cause:
                known = "cause_for_engine" if was_tried(divergence.cause) else "figures_of_engine"
                said.append(Message(known, {"engine": name, "cause": divergence.cause}))
        said += [message("origin_for_engine", engine=name, origin=origin) for origin in origins(row)]
    return _sentences(said)


def was_tried(cause: Message) -> bool:
    """Whether a cause was tried, and gave what was found. Others are what the figures show by themselves."""
    inner = cause.fields.get("cause")
    return cause.id in TRIED or (isinstance(inner, Message) and was_tried(inner))


def origins(row: EngineResult) -> tuple[Message, ...]:
    """Returns where what is wrong with an engine arises, as far as it was found."""
    return row.origin.said if row.origin else ()


def trials(results: CompareResults) -> list[str]:
    """Returns a sentence for each fault that the reference has replayed for a difference, those first that leave the
    least of it unexplained; and for each part of a mesh on which it was proven again."""
    said = []
    for row in results.engines:
        tried = row.first_divergence.tried if row.first_divergence else ()
        for trial in sorted(tried, key=lambda trial: math.inf if trial.unexplained is None else trial.unexplained):
            left = None if trial.unexplained is None else f"{trial.unexplained:.2%}"
            if trial.unexplained is not None and trial.unexplained > MOST_LEFT:
                left = f"> {MOST_LEFT:.0%}"
            fault = message("fault_and_its_steps", fault=trial.cause, where=trial.where)
            said.append(message("fault_and_what_it_leaves", engine=label(row), fault=fault, left=left))
            if left is None:
                said[-1] = message("fault_could_not_be_tried", engine=label(row), fault=fault)
        for part in row.origin.trials if row.origin else ():
            fields = {"engine": label(row), "part": part.mesh or message("one_rank")}
            if part.differs is None:
                said.append(message("part_could_not_be_tried", why=part.why, **fields))
            else:
                said.append(message("part_is_wrong", **fields) if part.differs else message("part_is_right", **fields))
    return _sentences(said)


def row_notes(results: CompareResults) -> list[str]:
    """Returns what else there is to say about each row."""
    said = []
    for row in results.engines:
        row_messages = [*([numerics(row.numerics)] if row.numerics else []), *row.notes]
        if row.verdict == "unavailable" and row.reason:
            row_messages.insert(0, message("verdict_and_why", verdict=verdict(row), why=row.reason))
        said += [message("note_on_engine", engine=label(row), note=note) for note in row_messages]
    return _sentences(said)


def one_process(results: CompareResults) -> list[str]:
    """Returns whether the ranks together train what one process alone would. Empty where that was not compared."""
    compared, ranks = results.same_as_one_process, results.world_size
    if compared is None:
        return []
    if compared.same:
        fields = {"ranks": ranks, "steps": compared.steps or None, "compared": None, "tensors": None}
        if compared.compared < compared.tensors:
            fields |= {"compared": compared.compared, "tensors": compared.tensors}
        if unproven := _unproven(results):
            engines = titles(unproven, results.engines)
            return [str(message("reference_computes_what_one_process_does", engines=engines, **fields))]
        return [str(message("ranks_compute_what_one_process_does", **fields))]
    if compared.answer == "not known" and not compared.compared:
        said = [message("not_known_whether_ranks_compute_alike", ranks=ranks, why=compared.reason)]
    elif compared.answer == "no, as expected":
        said = [message("ranks_compute_otherwise_as_expected", ranks=ranks, why=compared.reason)]
    elif compared.answer == "not known":
        said = [message("ranks_compute_otherwise_why_not_known", ranks=ranks, why=compared.reason)]
    else:
        said = [message("ranks_compute_otherwise_by_mistake", ranks=ranks, why=compared.reason)]
    return _sentences([*said, *([message("what_helps", advice=compared.advice)] if compared.advice else [])])


def _sentences(said: Iterable[Message]) -> list[str]:
    return [sentence(found) for found in said]


def sentence(said: Message | str) -> str:
    """Returns a message's or another text with a full stop, unless it ends a sentence already."""
    line = text(said) if isinstance(said, Message) else said
    return line if line.endswith((".", "!", "?", "。", "！", "？")) else f"{line}{message('full_stop')}"


def shares(rows: int, ranks: int) -> Message:
    """'2 ranks x 32 = 64 samples'. The low ranks get the remainder: '1 rank x 22 + 2 ranks x 21 = 64 samples'."""
    share, more = divmod(rows, ranks)
    if more == 0:
        return message("even_shares", ranks=ranks, share=share, rows=rows)
    return message("uneven_shares", more=more, larger=share + 1, fewer=ranks - more, share=share, rows=rows)


def shares_of(results: CompareResults) -> Message:
    """Returns how a step's rows are shared out: among the replicas, where the ranks of all engines share theirs."""
    replicas = {row.replicas for row in results.engines if row.mesh}
    other_rows = [row for row in results.engines if not row.mesh and row.replicas != 1]
    if len(replicas) != 1 or other_rows or replicas == {results.world_size}:
        return shares(results.global_batch, results.world_size)
    (count,) = replicas
    assert count
    share = -(-results.global_batch // count)
    fields = {"replicas": count, "ranks": results.world_size // count, "share": share, "rows": results.global_batch}
    return message("shares_of_replicas", **fields)


# Below the terminal's table


def footer(results: CompareResults) -> list[str]:
    """Returns the lines below the terminal's table: what all engines have in common, what is wrong, and what is not
    available; one or two sentences each. The HTML report has the rest: intervals, bounds, notes."""
    proof = results.proof
    said = [
        message(
            "batch_and_threads",
            shares=shares_of(results),
            threads=results.threads_per_rank,
            workers=results.workers or None,
        ),
        message(
            "meaning_of_max_diff",
            dtype=proof.dtype,
            steps=proof.steps,
            fewer=fewer_rows(results),
            why=proof.float64_failed,
        ),
    ]
    if results.measured:
        said.append(
            message("meaning_of_speed", launches=results.repeats, steps=results.measured_steps, dtype=results.dtype)
        )
        said += speeds_that_cannot_be(results)
    lines = [*one_process(results), *_sentences([*left_out(results), *said]), *problems(results)]
    lines += _sentences(
        message("note_on_engine", engine=label(row), note=note)
        for row in results.engines
        if (note := ill_conditioned(row, results))
    )
    names = [title(row) for row in results.engines if row.notes or row.numerics]
    if names:
        lines.append(sentence(message("notes_in_the_report", engines=[*dict.fromkeys(names)])))
    return [*lines, *_unavailable(results)]


def _unavailable(results: CompareResults) -> list[str]:
    """Returns one line for all engines that cannot run here: what installs them, or why they cannot."""
    names: dict[str, list[str]] = {}
    running = {row.engine for row in results.engines if row.verdict != "unavailable"}
    for row in results.engines:
        if row.verdict == "unavailable":
            remedy = str(row.install or row.reason or verdict(row))
            # With its launcher, where the engine runs under another one.
            names.setdefault(remedy, []).append(label(row) if row.engine in running else title(row))
    groups = [
        message("engines_and_remedy", engines=[*dict.fromkeys(engines)], remedy=remedy)
        for remedy, engines in names.items()
    ]
    return [sentence(message("not_available_here", engines=_clauses(groups)))] if groups else []
