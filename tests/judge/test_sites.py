"""The lines that a finding names: each id on a script of a few lines, as though each of its calls had been recorded."""

from __future__ import annotations

from dataclasses import replace

import pytest

from judge.test_suggested_patches import FILE, record_of
from samestep.judge.sites import sites_of
from samestep.judge.source import Source
from samestep.judge.source_search import decisions_by_rank
from samestep.message import message
from samestep.records.findings import Finding, Question

CRITERION = """class Criterion(nn.Module):
    def forward(self, outputs, targets):
        boxes = torch.tensor(float(len(targets)))
        boxes = torch.clamp(boxes, min=1)
        return (outputs - targets).abs().sum() / boxes
criterion = Criterion()
for x, y in loader:
    loss = criterion(model(x), y)
    loss.backward()
"""
MOMENTS = """def moments(x):
    sums = torch.stack([x.sum(0), x.square().sum(0)])
    return sums[0] / len(x), sums[1] / len(x)
for x, y in loader:
    mean, square = moments(x)
    loss = F.mse_loss(model((x - mean) / square.sqrt()), y)
    loss.backward()
"""
CONTRAST = """for x, y in loader:
    image, text = model(x, y)
    all_text = text
    labels = torch.arange(len(image))
    loss = F.cross_entropy(image @ all_text.T, labels)
    loss.backward()
"""
GATHER = """class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        parts = [x, x]
        dist.all_reduce(parts)
        return parts
    @staticmethod
    def backward(ctx, *grads):
        return grads[rank]
"""
CENTRE = """def update(self, output):
    centre = output.sum(0)
    dist.all_reduce(centre)
    centre = centre / len(output)
    self.centre = self.centre * 0.9 + centre * 0.1
"""
LEFT_OUT = """for p in parameters:
    if p.ndim == 2:
        dist.all_reduce(p.grad)
"""
COPIED = """grads = torch.cat([p.grad.view(-1) for p in parameters])
for p in parameters:
    p.grad.copy_(grads / world)
"""
SKIPS = """for i, (x, y) in enumerate(loader):
    if rank == 1 and i % 4 == 1:
        continue
    loss = F.mse_loss(model(x), y)
    loss.backward()
"""
NO_SYNC = """for x, y in loader:
    with model.no_sync():
        loss = F.mse_loss(model(x), y)
        loss.backward()
"""
MODE = """net.train(rank == 1)
for x, y in loader:
    loss = F.mse_loss(model(x), y)
    loss.backward()
"""
EPOCHS = """sampler = DistributedSampler(data)
for epoch in range(3):
    sampler.set_epoch(epoch + rank)
"""
UNAWAITED = """handle = dist.all_reduce(p.grad, async_op=True)
p.grad /= world
handle.wait()
"""


@pytest.mark.parametrize(
    ("identity", "question", "text", "line"),
    [
        ("mean_of_rank_means_or_a_term", "replayed gradient", CRITERION, 4),
        ("rows_normalised_by_own_rank", "replayed gradient", MOMENTS, 2),
        ("negatives_of_own_rank", "replayed gradient", CONTRAST, 3),
        ("loss_depends_on_ranks", "replayed gradient", CONTRAST, 4),
        ("loss_depends_on_ranks", "replayed gradient", MODE, 1),
        ("later_gradients_apart", "replayed gradient", CENTRE, 4),
        ("parameters_left_out_of_reduction", "gradient", LEFT_OUT, 2),
        ("gradients_divided_and_never_reduced", "gradient", COPIED, 1),
        ("ranks_never_reduce_gradients", "gradient", NO_SYNC, 2),
        ("ranks_accumulate_different_numbers", "loss weight", SKIPS, 2),
        ("micro_batch_skipped_on_some_ranks", "loss weight", SKIPS, 2),
        ("samplers_do_not_share_one_order", "rows", EPOCHS, 3),
        ("asynchronous_reduction_not_awaited", "gradient", UNAWAITED, 2),
    ],
)
def test_the_faulty_line_is_among_the_first(identity: str, question: Question, text: str, line: int) -> None:
    sites = sites_of(Finding(question, "differs", message(identity)), [record_of(text)], {FILE: Source(text)})
    assert line in [site.line for site in sites][:3]


def test_the_end_of_backward_is_a_line_of_a_gather() -> None:
    record = record_of(GATHER)
    calls = [replace(call, name="all_gather") for call in record.calls]
    finding = Finding("replayed gradient", "differs", message("gathered_gradient_incomplete"))
    sites = sites_of(finding, [replace(record, calls=calls)], {FILE: Source(GATHER)})
    assert [site.line for site in sites][:2] == [9, 5]


def test_what_one_rank_alone_calls_is_a_line_of_all() -> None:
    text = "for x in loader:\n    optimizer.step()\n    if rank == 0:\n        scheduler.step()\n"
    on_rank_0 = record_of(text)
    rank_1 = replace(on_rank_0, rank=1, calls=[call for call in on_rank_0.calls if call.call != "scheduler step"])
    finding = Finding("rate", "differs", message("rates_differ_between_ranks"))
    sites = sites_of(finding, [rank_1, on_rank_0], {FILE: Source(text)})
    assert [site.line for site in sites][:2] == [3, 4]


def test_a_rank_that_leaves_a_function_early_is_a_line() -> None:
    source = Source("def advance():\n    if rank != 0:\n        return\n    scheduler.step()\n")
    assert decisions_by_rank(source, 4) == [2]


def test_a_name_is_looked_up_in_its_function_and_then_around_it() -> None:
    text = "count = world\ndef other():\n    count = 1\ndef f(x):\n    loss = x / count\n    loss.backward()\n"
    source = Source(text)
    assert source.divisors(6) == [1]
    assert source.into(6) == [5, 1]
