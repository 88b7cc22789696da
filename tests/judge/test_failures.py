"""The lines that a failed check names: where the ranks were, and what led them there."""

import pytest

from samestep.commands.failed_check import innermost
from samestep.judge.failures import lines_of
from samestep.judge.source import Source
from samestep.message import as_said, message
from samestep.records.call_site import CallRecord, CallSite

FILE = "/home/u/train.py"
TEXT = """model = DDP(Net(width + rank))
for epoch in range(9):
    for inputs, targets in loader:
        if rank == 1 and skip:
            continue
        loss = model(inputs)
        loss.backward()
        optimizer.step()
    dist.all_reduce(counts)
    if loss < best:
        bad = 0
    if bad > 3:
        break
"""


def call(kind, line, name=""):
    return CallRecord(kind, name, [CallSite(FILE, line)])


CALLS = [call("wrapper", 1), call("backward", 7), call("optimizer step", 8), call("collective", 9, "all_reduce")]


@pytest.mark.parametrize(
    ("why", "line"),
    [
        (message("rank_received_data_of_another_size", rank=1), 4),
        (message("ranks_left_behind", rank=0), 4),
        (message("ranks_end_at_different_steps", rank=1), 13),
        (message("ranks_end_at_different_steps", rank=1), 10),
        (message("rank_failed", rank=0, why=message("some_parameters_have_no_gradient")), 1),
        (message("rank_failed", rank=0, why=as_said("AssertionError: step, but _scale is None.")), 7),
        (message("rank_failed", rank=0, why=as_said("[1]: [3] appears not to match sizes of the same param")), 1),
    ],
)  # fmt: skip
def test_a_failure_names_the_line_that_leads_to_it(why, line):
    place = CallSite(FILE, 9)
    sites = lines_of(why, CALLS, [place], {FILE: Source(TEXT)})
    assert sites[0].line == 9, sites
    assert line in [site.line for site in sites], sites


def test_an_error_of_the_script_names_only_where_it_was_raised():
    sites = lines_of(as_said("KeyError: 'a'"), CALLS, [CallSite(FILE, 6)], {FILE: Source(TEXT)})
    assert [(site.line, site.code) for site in sites] == [(6, "loss = model(inputs)")]


def test_the_innermost_line_is_of_the_last_exception_that_passed_through_the_script():
    library = '  File "/usr/lib/python3/site-packages/torch/nn/x.py", line 3, in forward\n    raise\n'
    cause = f'Traceback (most recent call last):\n  File "{FILE}", line 6, in <module>\n    x\n{library}E: a\n'
    after = f"\nThe above exception was the direct cause of the following exception:\n\nTraceback:\n{library}E: b\n"
    assert innermost(cause + after) == CallSite(FILE, 6, "<module>")
    assert innermost(library) is None
