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
from recorder.plant import text_of

LOOP = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import samestep

torch.manual_seed(0)
rows = torch.randn(24, 4)
loader = DataLoader(TensorDataset(rows, rows.sum(1, keepdim=True)), batch_size=4, shuffle=True)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
before = nn.Module.__call__, torch.autograd.backward
watched = samestep.watch(model, optimizer, loader, steps=3)
taken = 0
for number, (x, y) in enumerate([*loader, *loader]):
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    if number % 2:
        optimizer.step()
        optimizer.zero_grad()
        taken += 1
assert taken == 6 and before == (nn.Module.__call__, torch.autograd.backward)
held = [module for name, module in [*sys.modules.items()] if name.startswith("torch")]
held += [kind for module in held for kind in [*vars(module).values()] if isinstance(kind, type)]
found = [(name, value) for each in held for name, value in vars(each).copy().items()]
functions = [(name, value) for name, value in found if type(value) is type(lambda: 0)]
left = [name for name, value in functions if "/samestep/recorder/" in value.__code__.co_filename]
assert not left, left  # of ours in torch
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


def test_one_process_is_watched_and_goes_on(tmp_path: Path) -> None:
    found = said(LOOP.replace("loss.backward()", "(loss / 2).backward()"), tmp_path, 1)
    assert "nothing wrong" in found and "found right" in found


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
    text = text_of("ddp").replace("model(rows)", f"model{padding}(rows)")
    text = text.replace(WATCHED, f"    watched = samestep.watch(model, optimizer, loader, steps=4)\n{WATCHED}")
    # In one piece: both ranks print to one pipe.
    text = text.replace("    dist.destroy", "    print(f'found {watched.results().answer}')\n    dist.destroy")
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
