"""The lines to write instead: each mender on a script of a few lines; of what it does not know it says nothing."""

from __future__ import annotations

import ast
import difflib
import re
from dataclasses import replace
from pathlib import PurePath
from typing import Any

import pytest

from samestep.judge.sites import sites_of
from samestep.judge.source import Source
from samestep.judge.suggested_patches import Patch, patch_of
from samestep.message import message
from samestep.records.call_site import Call, CallRecord, CallSite
from samestep.records.findings import Finding, Question
from samestep.records.results import Divergence
from samestep.records.script import PassRecord, ScriptRecord
from samestep.rules import rule_ids, rule_of

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
    r"(all_reduce|all_gather|all_to_all_single|broadcast)\(": "collective",
    r"torch\.save": "save",
    r"manual_seed": "seed",
    r"(SGD|AdamW)\(": "optimizer",
    r"LR\(": "scheduler",
    r"Net\(\)": "model",
    r"PipelineStage\(": "pipeline stage",
    r"ScheduleGPipe\(": "pipeline schedule",
    r"schedule\.step\(": "pipeline step",
    r"evaluate\(": "evaluation",
    r"teacher\(": "frozen forward",
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
            if match := re.search(pattern, line):
                loader = 1 if "val" in line else 0
                number_of = loader if call in ("loader", "sampler", "iteration") else -1
                calls.append(
                    CallRecord(
                        call,
                        match[1] if call == "collective" else "",
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
            "sampler = DistributedSampler(data)\nloader = DataLoader(data, shuffle=True)\n",
            "loader = DataLoader(data, sampler=sampler)",
        ),
        ("rows_not_shared_out", "loader = DataLoader(data, batch_sampler=batches)\n", ""),
        (
            "set_epoch_never_called",
            "def load(epoch):\n    sampler = DistributedSampler(data)\n    return DataLoader(data, sampler=sampler)\n",
            "sampler.set_epoch(epoch)",
        ),
        (
            "loss_not_divided_by_accumulation",
            LOOP.format("for micro in range(count):\n            scaler.scale(loss).backward()"),
            "scaler.scale(loss / count).backward()",
        ),
        ("loss_not_divided_by_accumulation", "accelerator.backward(a + b)\n", "accelerator.backward((a + b) / 4)"),
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
        (
            "classes_numbered_by_each_rank",
            "numbers = {name: i for i, name in enumerate(set(names))}\n",
            "numbers = {name: i for i, name in enumerate(sorted(set(names)))}",
        ),
        ("classes_numbered_by_each_rank", "number = hash(name)\nnames = sorted(set(names))\n", ""),
        ("gradients_never_cleared", "loss.backward()\nscaler.step(optimizer)\n", "optimizer.zero_grad()"),
        (
            "ranks_draw_the_same_random_numbers",
            "torch.manual_seed(1)\nmodel = DDP(net)\n",
            "torch.manual_seed(torch.initial_seed() + torch.distributed.get_rank())",
        ),
        # How a batch is shared out is right, whatever else is wrong.
        ("gradient_multiplied_by_the_ranks", "batch_size = batch_size // dist.get_world_size()\n", ""),
        ("gradient_of_no_known_mistake", "loss.backward()\n", ""),
    ],
)
def test_the_lines_to_write_instead(identity: str, text: str, added: str) -> None:
    lines = patched(identity, text, micro_batches=4).splitlines()
    assert "\n".join(line for line in lines if not line.startswith("-")) == added


RULES = {identity: rule for identity in sorted(rule_ids()) if (rule := rule_of(identity)) and rule.broken}


@pytest.mark.parametrize("identity", [identity for identity, rule in RULES.items() if rule.patch])
def test_the_broken_lines_of_a_rule_become_the_right_ones(identity: str) -> None:
    rule = RULES[identity]
    patch = patch_for(identity, HEAD + rule.broken.lstrip("\n"), micro_batches=4)
    assert patch and patch.text == HEAD + rule.right.lstrip("\n")


@pytest.mark.parametrize("identity", [identity for identity, rule in RULES.items() if not rule.patch])
def test_the_right_lines_of_a_rule_change_what_it_points_at(identity: str) -> None:
    rule = RULES[identity]
    broken, right = rule.broken.splitlines(), rule.right.splitlines()
    ast.parse(rule.right)
    changes = difflib.SequenceMatcher(None, broken, right, autojunk=False).get_opcodes()
    # A finding may point at the line above what is to be changed, or below it.
    changed = {line for kind, start, end, *_ in changes if kind != "equal" for line in range(start, end + 2)}
    buffer = re.search(r"net\.\w+|$", rule.broken)
    said = message(identity, buffer=buffer[0] if buffer else "", embedding="embedding", head="head")
    finding = Finding("rows", "differs", said)
    sites = sites_of(finding, [record_of(rule.broken)], {FILE: Source(rule.broken)})
    assert changed and (not rule.lines or any(site.line in changed for site in sites)), [site.line for site in sites]


@pytest.mark.parametrize(
    ("identity", "text", "order"),
    [
        ("gradients_removed_before_the_step", ["optimizer.step()", "loss.backward()", "o.zero_grad()"], [1, 0, 2]),
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
    patches = [rule.patch for identity in rule_ids() if (rule := rule_of(identity)) and rule.patch]
    assert len(patches) >= 30 and len({*patches}) >= 20


def test_the_line_of_a_rate_is_where_the_number_of_ranks_flows_in() -> None:
    text = "world = dist.get_world_size()\nbase = 0.1 * world\nfor group in groups:\n    group['lr'] = base\n"
    source = Source(text)
    divergence = Divergence("script", 0, "learning rate", None, 0, 0.1, 0.2, message("rate_depends_on_ranks"))
    finding = replace(Finding("replayed rate", "differs", message("rate_depends_on_ranks")), divergence=divergence)
    sites = sites_of(finding, [record_of(text)], {FILE: source})
    assert [site.line for site in sites][:2] == [2, 4]
