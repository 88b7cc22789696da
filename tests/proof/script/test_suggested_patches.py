"""The lines to write instead: each mender on a script of a few lines; of what it does not know it says nothing."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import PurePath
from typing import Any

import pytest

from samestep.message import message
from samestep.proof.script.sites import sites_of
from samestep.proof.script.source import Source
from samestep.proof.script.suggested_patches import MENDERS, Patch, patch_of
from samestep.records.call_site import Call, CallRecord, CallSite
from samestep.records.findings import Finding, Question
from samestep.records.results import Divergence
from samestep.records.script import PassRecord, ScriptRecord

HEAD = "import torch\n"
FILE = "/w/train.py"
QUESTIONS: dict[str, Question] = {
    "loss": "loss weight",
    "gradients": "loss weight",
    "clip": "clipping",
    "rate_": "replayed rate",
    "schedule": "schedule",
    "ranks_write": "saves",
}
CALLS: dict[str, Call] = {  # what is written -> the call that the recorder would have noted
    r"\bDDP\(": "wrapper",
    r"DataLoader\(": "loader",
    r"DistributedSampler\(": "sampler",
    r"in (enumerate\()?loader": "iteration",
    r"set_epoch\(": "set_epoch",
    r"\bmodel(\.module)?\(": "forward",
    r"backward\(": "backward",
    r"clip_grad": "clip",
    r"(optimizer|scaler)\.(step|step\(optimizer)\(?\)?": "optimizer step",
    r"scheduler\.step\(": "scheduler step",
    r"zero_grad\(": "zero_grad",
    r"all_reduce\(": "collective",
    r"torch\.save": "save",
    r"manual_seed": "seed",
    r"SGD\(": "optimizer",
    r"LR\(": "scheduler",
    r"Net\(\)": "model",
}
LOOP = """for epoch in range(3):
    for i, (x, y) in enumerate(loader):
        loss = loss_of(model(x), y)
        {}
"""


def record_of(text: str) -> ScriptRecord:
    """A rank's record of a script, as though each of its lines had been called once."""
    calls = []
    for number, line in enumerate(text.splitlines(), 1):
        for pattern, call in CALLS.items():
            if re.search(pattern, line):
                loader = 1 if "val" in line else 0
                number_of = loader if call in ("loader", "sampler", "iteration") else -1
                calls.append(
                    CallRecord(
                        call,
                        "all_reduce" if call == "collective" else "",
                        [CallSite(FILE, number, "<module>")],
                        number_of,
                    )
                )
    record = PassRecord(0, 8, 2, [], [], [], 1)
    return ScriptRecord(0, 2, {}, [], [record], "steps", [], 0.0, [], calls=calls)


def patch_for(identity: str, text: str, **fields: Any) -> Patch | None:
    """The patch of a finding with this id, of a script."""
    question = next((question for start, question in QUESTIONS.items() if identity.startswith(start)), "rows")
    finding = Finding(question, "differs", message(identity, **fields))
    return patch_of(finding, [record_of(text)], {FILE: Source(text)})


def patched(identity: str, text: str, **fields: Any) -> str:
    """The lines that a patch adds, and those that it removes with a - before them; '' without a patch."""
    patch = patch_for(identity, HEAD + text, **fields)
    lines = patch.diff(PurePath("/w")).splitlines()[2:] if patch else []
    changed = [line for line in lines if line[0] in "+-"]
    return "\n".join(line[1:].strip() if line[0] == "+" else f"-{line[1:].strip()}" for line in changed)


@pytest.mark.parametrize(
    ("identity", "text", "added"),
    [
        (
            "rows_not_shared_out",
            "loader = DataLoader(data, batch_size=4, shuffle=True)\n" + LOOP.format("loss.backward()"),
            "loader = DataLoader(data, batch_size=4, sampler=torch.utils.data.distributed.DistributedSampler(data, "
            "shuffle=True))\nloader.sampler.set_epoch(epoch)",
        ),
        (
            "rows_not_shared_out",
            "sampler = DistributedSampler(data)\nloader = DataLoader(data, shuffle=True)\n",
            "loader = DataLoader(data, sampler=sampler)",
        ),
        ("rows_not_shared_out", "loader = DataLoader(data, batch_sampler=batches)\n", ""),
        (
            "set_epoch_never_called",
            "sampler = DistributedSampler(data)\nloader = DataLoader(data, sampler=sampler)\n" + LOOP.format("pass"),
            "sampler.set_epoch(epoch)",
        ),
        (
            "set_epoch_never_called",
            "def load(epoch):\n    sampler = DistributedSampler(data)\n    return DataLoader(data, sampler=sampler)\n",
            "sampler.set_epoch(epoch)",
        ),
        (
            "set_epoch_given_the_same_number",
            "for epoch in range(3):\n    sampler.set_epoch(0)\n    for x in loader:\n        pass\n",
            "sampler.set_epoch(epoch)",
        ),
        (
            "samplers_do_not_share_one_order",
            "sampler = DistributedSampler(data, seed=rank)\n",
            "sampler = DistributedSampler(data, seed=0)",
        ),
        (
            "ranks_train_the_same_rows",
            "sampler = DistributedSampler(data, num_replicas=2, rank=0)\n",
            "sampler = DistributedSampler(data, num_replicas=2, rank=torch.distributed.get_rank())",
        ),
        (
            "loss_not_divided_by_accumulation",
            LOOP.format("loss.backward()\n        if (i + 1) % args.steps == 0:\n            optimizer.step()"),
            "(loss / args.steps).backward()",
        ),
        (
            "loss_not_divided_by_accumulation",
            LOOP.format("for micro in range(count):\n            scaler.scale(loss).backward()"),
            "scaler.scale(loss / count).backward()",
        ),
        ("loss_not_divided_by_accumulation", "accelerator.backward(a + b)\n", "accelerator.backward((a + b) / 4)"),
        ("loss_divided_by_ranks", "(loss / world).backward()\n", "loss.backward()"),
        ("loss_multiplied_by_ranks", "f(x * dist.get_world_size()).backward()\n", "f(x).backward()"),
        ("gradients_divided_by_ranks_again", "p.grad /= world * world\nloss.backward()\n", "p.grad /= world"),
        (
            "gradients_summed_over_ranks",
            "for p in model.parameters():\n    dist.all_reduce(p.grad)\n",
            "p.grad /= torch.distributed.get_world_size()",
        ),
        (
            "gradients_summed_over_ranks",
            "for p in model.parameters():\n    dist.all_reduce(p.grad, dist.ReduceOp.SUM, replicas)\n"
            "dist.all_reduce(loss)\n",
            "p.grad /= torch.distributed.get_world_size(replicas)",
        ),
        (
            "gradients_summed_over_ranks",
            "grads = [p.grad for p in model.parameters()]\nfor g in grads:\n    dist.all_reduce(g)\n",
            "g /= torch.distributed.get_world_size()",
        ),
        (
            "gradients_summed_over_ranks",
            "works = [(p, dist.all_reduce(p.grad, async_op=True, group=replicas)) for p in model.parameters()]\n"
            "for p, work in works:\n    work.wait()\n",
            "p.grad /= torch.distributed.get_world_size(replicas)",
        ),
        # What is printed is no gradient.
        ("gradients_summed_over_ranks", "dist.all_reduce(loss)\n", ""),
        ("gradients_summed_over_ranks", "size = sum(p.grad.norm() for p in ps)\ndist.all_reduce(size)\n", ""),
        ("gradients_summed_over_ranks", "self.total = p.grad\ndist.all_reduce(self.loss)\n", ""),
        # Which of the two?
        ("gradients_summed_over_ranks", "dist.all_reduce(a.grad, group=x)\ndist.all_reduce(b.grad, group=x)\n", ""),
        ("gradients_never_cleared", LOOP.format("loss.backward()\n        optimizer.step()"), "optimizer.zero_grad()"),
        ("gradients_never_cleared", "loss.backward()\nscaler.step(optimizer)\n", "optimizer.zero_grad()"),
        ("ranks_never_reduce_gradients", "loss = model.module(x).mean()\n", "loss = model(x).mean()"),
        (
            "clipped_while_scaled",
            "clip_grad_norm_(parameters, 1.0)\nscaler.step(optimizer)\n",
            "scaler.unscale_(optimizer)",
        ),
        (
            "clipped_in_parts",
            "for p in model.parameters():\n    clip_grad_norm_(p, 1.0)\n",
            "clip_grad_norm_(model.parameters(), 1.0)",
        ),
        ("clipping_depends_on_ranks", "clip_grad_norm_(p, 1.0 / world)\n", "clip_grad_norm_(p, 1.0)"),
        ("rate_depends_on_ranks", "rate = 0.1 * world\noptimizer = SGD(parameters, lr=rate)\n", "rate = 0.1"),
        ("schedule_advances_once_per_rank", "for _ in range(world):\n    scheduler.step()\n", "scheduler.step()"),
        ("rates_differ_between_ranks", "if rank == 0:\n    scheduler.step()\n", "scheduler.step()"),
        (
            "ranks_draw_the_same_random_numbers",
            "torch.manual_seed(1)\nmodel = DDP(net)\ntorch.manual_seed(7)\n",
            "torch.manual_seed(7 + torch.distributed.get_rank())",
        ),
        (
            "ranks_draw_the_same_random_numbers",
            "torch.manual_seed(1)\nmodel = DDP(net)\n",
            "torch.manual_seed(torch.initial_seed() + torch.distributed.get_rank())",
        ),
        # How a batch is shared out is right, whatever else is wrong.
        ("gradient_multiplied_by_the_ranks", "batch_size = batch_size // dist.get_world_size()\n", ""),
        (
            "ranks_begin_with_different_weights",
            "model = Net()\noptimizer = SGD(model.parameters())\n",
            "for tensor in model.state_dict().values():\ntorch.distributed.broadcast(tensor, 0)",
        ),
        (
            "evaluated_rows_counted_twice",
            "val_loader = DataLoader(val, sampler=DistributedSampler(val))\n",
            "val_loader = DataLoader(torch.utils.data.Subset(val, range(torch.distributed.get_rank(), len(val), "
            "torch.distributed.get_world_size())), shuffle=False)",
        ),
        (
            "rows_evaluated_by_no_rank",
            "val_loader = DataLoader(val, drop_last=True)\n",
            "val_loader = DataLoader(val, drop_last=False)",
        ),
        (
            "ranks_write_one_file",
            "x = 1\ntorch.save(x, path)\n",
            "if torch.distributed.get_rank() == 0:\ntorch.save(x, path)",
        ),
        (
            "reduced_before_last_micro_batch",
            "with nullcontext() if i % n == 0 else model.no_sync():\n    loss.backward()\n",
            "with nullcontext() if (i + 1) % n == 0 else model.no_sync():",
        ),
        (
            "reference_follows_policy",
            "import copy\npolicy = Net()\nreference = policy\n",
            "reference = copy.deepcopy(policy).eval().requires_grad_(False)",
        ),
        ("gradient_of_no_known_mistake", "loss.backward()\n", ""),
    ],
)
def test_the_lines_to_write_instead(identity: str, text: str, added: str) -> None:
    lines = patched(identity, text, micro_batches=4).splitlines()
    assert "\n".join(line for line in lines if not line.startswith("-")) == added


@pytest.mark.parametrize(
    ("identity", "text", "order"),
    [
        ("gradients_removed_before_the_step", ["loss.backward()", "o.zero_grad()", "optimizer.step()"], [0, 2, 1]),
        ("gradients_removed_before_the_step", ["optimizer.step()", "loss.backward()", "o.zero_grad()"], [1, 0, 2]),
        ("clipped_after_each_micro_batch", ["optimizer.step()", "clip_grad_norm_(p, 1)", "x = 1"], [1, 0, 2]),
        ("schedule_advances_each_micro_batch", ["scheduler.step()", "x = 1", "optimizer.step()"], [1, 2, 0]),
    ],
)
def test_lines_that_move(identity: str, text: list[str], order: list[int]) -> None:
    patch = patch_for(identity, HEAD + "\n".join(text) + "\n")
    assert patch and patch.text.splitlines()[1:] == [text[number] for number in order]


def test_what_is_no_python_or_lies_elsewhere_is_left() -> None:
    assert patched("gradients_never_cleared", "optimizer.step(\n") == ""
    assert patched("gradients_never_cleared", "optimizer.step()\noptimizer.step()\n") == ""  # which of the two?
    assert patch_for("ranks_write_one_file", "x = 1\ntorch.save(x, 'a')\n") is None  # torch has no name there
    patch = patch_for("gradients_never_cleared", "from torch import optim\noptimizer.step()\n")
    assert patch and patch.text.endswith("optimizer.zero_grad()\n")


def test_bytes_and_ends_of_lines_are_kept() -> None:
    assert 'f("é", loss).backward()' in patched("loss_divided_by_ranks", 'f("é", loss / world).backward()\n')
    patch = patch_for("loss_divided_by_ranks", "import torch\r\n(loss / world).backward()\r\n")
    assert patch and patch.text == "import torch\r\nloss.backward()\r\n"


def test_there_are_twenty_kinds() -> None:
    assert len({*MENDERS}) >= 30 and len({*MENDERS.values()}) >= 20


def test_the_line_of_a_rate_is_where_the_number_of_ranks_flows_in() -> None:
    text = "world = dist.get_world_size()\nbase = 0.1 * world\nfor group in groups:\n    group['lr'] = base\n"
    source = Source(text)
    divergence = Divergence("script", 0, "learning rate", None, 0, 0.1, 0.2, message("rate_depends_on_ranks"))
    finding = replace(Finding("replayed rate", "differs", message("rate_depends_on_ranks")), divergence=divergence)
    sites = sites_of(finding, [record_of(text)], {FILE: source})
    assert [site.line for site in sites][:2] == [2, 4]
