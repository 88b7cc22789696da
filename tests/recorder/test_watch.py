"""samestep.watch: records in the process that calls it, prints the answers, and lets the training go on unpatched."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import samestep
from budget import budget
from planting import Edit
from recorder.plant import text_of

LOOP = """
import random
import sys
from multiprocessing.process import BaseProcess
import torch
import torch.distributed.tensor
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import samestep

torch.manual_seed(0)
rows = torch.randn(24, 4)
loader = DataLoader(TensorDataset(rows, rows.sum(1, keepdim=True)), batch_size=4, shuffle=True)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
owners = [module for name, module in [*sys.modules.items()] if name.startswith("torch")]
owners += {kind for module in owners for kind in [*vars(module).values()] if isinstance(kind, type)}
owners += [random, model, loader, optimizer, torch.Tensor, *BaseProcess.__mro__]
before = [dict(vars(owner)) for owner in owners], [*sys.meta_path]
watched = samestep.watch(model, optimizer, loader, steps=3)
taken = 0
for number, (x, y) in enumerate([*loader, *loader]):
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    if number % 2:
        optimizer.step()
        optimizer.zero_grad()
        taken += 1
assert taken == 6 and before[1] == sys.meta_path
for owner, attributes in zip(owners, before[0]):
    now = vars(owner)
    changed = [name for name, value in attributes.items() if callable(value) and now.get(name) is not value]
    added = [name for name in now if name not in attributes and callable(now[name]) and not isinstance(now[name], type)]
    assert not changed and not added, (owner, changed, added)
del owners, owner, before, attributes, now
print("weights", model.weight.tolist(), "end")
print("found", watched.results().answer)
"""
WATCHED = "    for epoch in range(5):\n"


def said(text: str, folder: Path, ranks: int) -> str:
    file = folder / "train.py"
    file.write_text(text)
    line = [sys.executable, str(file)]
    if ranks > 1:
        line = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", str(file)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=budget(), cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return " ".join(done.stdout.split())


@pytest.mark.check
def test_one_process_is_watched_and_goes_on(tmp_path: Path) -> None:
    text = LOOP.replace("loss.backward()", "(loss / 2).backward()")
    found = said(text, tmp_path, 1)
    assert "nothing wrong" in found and "found right" in found
    begin, end = text.index("watched = "), text.index("taken = 0")
    plain = said(text[:begin] + text[end:].rpartition("print")[0], tmp_path, 1)
    assert plain.startswith("weights") and plain in found


def test_a_model_is_freed_after_it_was_watched(tmp_path: Path) -> None:
    """A model that is kept keeps its process group, whose threads abort now and then while the interpreter ends."""
    text = (
        LOOP
        + "import gc, weakref\nkept = weakref.ref(model)\ndel model, optimizer\ngc.collect()\nprint('kept', kept())"
    )
    assert "kept None" in said(text, tmp_path, 1)


def test_a_fault_is_named_where_it_is_watched(tmp_path: Path) -> None:
    found = said(LOOP, tmp_path, 1)
    assert "divided by 2" in found and "found differs" in found


@pytest.mark.check
@pytest.mark.parametrize(("padding", "answer"), [("", "right"), (".module", "differs")])
def test_two_ranks(padding: str, answer: str, tmp_path: Path) -> None:
    watched = Edit(WATCHED, f"    watched = samestep.watch(model, optimizer, loader, steps=4)\n{WATCHED}")
    # In one piece: both ranks print to one pipe.
    printed = Edit("    dist.destroy", "    print(f'found {watched.results().answer}')\n    dist.destroy")
    text = text_of("ddp", Edit("model(rows)", f"model{padding}(rows)"), watched, printed)
    found = said("import samestep\n" + text, tmp_path, 2)
    assert found.count(f"found {answer}") == 2


def test_a_mistake_is_one_sentence() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(samestep.UserError, match=r"model .*SGD"):
        samestep.watch(optimizer, model)  # type: ignore[arg-type]
    with pytest.raises(samestep.UserError, match="of type int"):
        samestep.watch(model, optimizer, 3)
    with pytest.raises(samestep.UserError, match="at least 1"):
        samestep.watch(model, optimizer, steps=0)
