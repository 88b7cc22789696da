"""What eject refuses, in one sentence: jobs that no script could hold, and scripts that could not run."""

from __future__ import annotations

from pathlib import Path

import pytest
from written import BEGIN, END, IMPORT, LOSS, ROWS, SEED, Changes, write

from ranks import engine_facts
from samestep.errors import UserError
from samestep.tasks.eject import eject
from samestep.tasks.eject.imports import Import, block
from samestep.tasks.eject.literal import literal
from samestep.tasks.eject.names import check, check_once

CUT = "\ndef cut(x):\n    return x\n"
WRAPPED = "return cut(F.cross_entropy(output, batch.targets))"
REFUSED: dict[str, tuple[Changes, str]] = {
    "samestep itself": (
        [(IMPORT, "import torch\nimport samestep as ss\n")],
        "`import samestep as ss`.*write `from samestep import Job",
    ),
    "samestep in a function": ([(SEED, f"from samestep import Batch; {SEED}")], "`from samestep import B.*file's top"),
    "more of samestep": (
        [(END, "from samestep.jobs.digits import job as other\n")],
        "from samestep.jobs.digits import job as other`",
    ),
    "a version": ([(END, "from samestep import __version__\n")], "import __version__`"),
    "a relative import": ([(END, "if 0:\n    from .conf import LR\n")], "`from .conf import LR`.*package"),
    "a star": ([(IMPORT, "import torch\nfrom math import *\n")], r"`from math import \*`"),
    "a function's name": ([(END, CUT), (LOSS, WRAPPED)], "rename `cut`"),
    "a decorated function's name": ([(END, "\n@id" + CUT)], "rename `cut`"),
    "a value's name": ([(BEGIN, "\ntrain = SAMPLES =")], "rename `train`"),
    "two names": ([(BEGIN, "\ntrain = main = SAMPLES =")], "rename `main` and `train`"),
    "a name of Python's": ([(BEGIN, "\nenumerate = SAMPLES =")], "rename `enumerate`"),
    "an import's name": (
        [(IMPORT, "import torch\nfrom math import sin as default_collate\n")],
        "rename `default_collate`",
    ),
    "another name for samestep's": (
        [("import Job, Recipe", "import Job, Job as Recipe, Recipe as R"), ("Recipe(t", "R(t")],
        "rename `Recipe`",
    ),
    "a name by global": ([(SEED, f"global key; key = 1; {SEED}"), (END, "model()\n")], "rename `key`"),
    "the job's name": ([(END, "def main(): return job()\nasked = main\n")], "rename `main`"),
    "two mains": ([(END, "if __name__ == '__main__':\n    pass\nelse:\n    x = 1\n")], "else"),
}


def _eject(target: str, engine: str = "single", chosen: dict[str, str] | None = None, **texts: str) -> str:
    return eject(target, texts, engine, engine_facts(engine, 2, chosen)["settings"], 2, "script.py")


@pytest.mark.parametrize("case", REFUSED)
def test_a_job_that_no_script_can_hold(case: str, tmp_path: Path) -> None:
    changes, says = REFUSED[case]
    target = write(tmp_path, changes)
    with pytest.raises(UserError, match=says):
        _eject(target)


def test_a_function_that_is_asked_for_stays(tmp_path: Path) -> None:
    target = write(tmp_path, [(END, "\n\ndef main():\n    return job()\n")])
    with pytest.raises(UserError, match="rename `main`"):
        _eject(f"{target}:main")


SAME_THING = {
    "a module": "import torch.nn as nn\n",
    "a function": "from torch.utils.data import default_collate\nfrom torch.nn.utils import clip_grad_norm_\n",
    "a module in a module": "import torch.distributed\nimport torch.utils.data\n",
}


@pytest.mark.parametrize("case", SAME_THING)
def test_an_import_that_the_script_has_too(case: str, tmp_path: Path) -> None:
    script = _eject(write(tmp_path, [("from torch import nn\n", SAME_THING[case] + "import torch.nn as nn\n")]), "fsdp")
    for name in ("nn", "default_collate", "clip_grad_norm_"):
        assert script.count(f"import {name}\n") + script.count(f" as {name}\n") <= 1


@pytest.mark.parametrize(
    ("setting", "text"),
    [("float", "inf"), ("float", "nan"), ("float", "-inf"), ("str", 'a"b'), ("Path", "a/b"), ("list[float]", "[1,2]")],
)
def test_a_setting_that_is_no_plain_number(setting: str, text: str, tmp_path: Path) -> None:
    value = {"float": float, "str": str, "Path": Path}.get(setting, str)(text)
    if setting == "list[float]":
        assert literal([1.0, float("inf")]) == '[1.0, float("inf")]'
        return
    target = write(
        tmp_path, [(IMPORT, "import torch\nfrom pathlib import Path\n"), ("job()", f"job(x: {setting} = None)")]
    )
    script = _eject(target, x=text)
    call = next(line for line in script.splitlines() if "state = train(job(" in line)
    found = eval(call.partition("job(x=")[2].partition("), world")[0], {"Path": Path})
    assert repr(found) == repr(value)
    assert "import Path\n" in script


def test_a_setting_that_has_no_text() -> None:
    with pytest.raises(UserError, match=r"cannot hold the setting.*a object"):
        literal(object())


@pytest.mark.parametrize(
    ("chosen", "micro_batch", "says"),
    [
        ({"order": "rank", "compress": "fp16"}, "", "DDP takes one"),
        ({"static_graph": "true"}, ", micro_batch=2", "static_graph does not work with accumulation"),
    ],
)
def test_settings_that_the_engine_refuses(chosen: dict[str, str], micro_batch: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=says):
        _eject(write(tmp_path, [(ROWS, ROWS + micro_batch)]), "ddp", chosen)


@pytest.mark.parametrize(
    ("chosen", "line"),
    [
        ({"static_graph": "true"}, "        static_graph=True,\n"),
        (
            {"compress": "bf16"},
            '    model.register_comm_hook(None, getattr(default_hooks, "bf16" + "_compress_hook"))\n',
        ),
        ({"compile": "true"}, "    trained = torch.compile(model)\n"),
        ({"bucket_mb": "0.5"}, "        bucket_cap_mb=0.5,\n"),
    ],
)
def test_settings_that_it_takes(chosen: dict[str, str], line: str, tmp_path: Path) -> None:
    script = _eject(write(tmp_path, []), "ddp", chosen)
    assert line in script
    assert "Refused" not in script


def test_its_head_says_what_is_fixed(tmp_path: Path) -> None:
    head = _eject(write(tmp_path, [(ROWS, "global_batch=8, micro_batch=2")]), "ddp").split('"""')[1]
    assert "does not evaluate" in head
    assert "2 micro-batches: micro_batch=2 on 2 ranks." in head


def test_one_process_is_one_rank(tmp_path: Path) -> None:
    assert "cut(mine, 4)" in _eject(write(tmp_path, [(ROWS, "global_batch=8, micro_batch=2")]), "single")


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("def f():\n    return lost + [x for x in ()]\n", "would use `lost`, which"),
        ("class A:\n    b: Lost = 1\n    c = b, lost\n", "would use `lost`, which"),
        ("x = = 1\n", "would not compile: .* in `x = = 1`"),
    ],
)
def test_a_script_that_could_not_run(script: str, says: str) -> None:
    with pytest.raises(UserError, match=f"the script of it {says}"):
        check(script, "", "it")


def test_a_name_that_the_job_lacks_itself(tmp_path: Path) -> None:
    assert "sometimes" in _eject(write(tmp_path, [(END, "def other():\n    return sometimes\n")]))


def test_a_name_twice_in_what_surrounds_the_job() -> None:
    with pytest.raises(UserError, match="would define `cut` twice"):
        check_once("def cut(): ...\ndef key(): ...\ndef cut(): ...\n", "it")


def test_imports_stand_as_ruff_sorts_them() -> None:
    lines = [
        Import("torch", "", "th"),
        Import("torch", "", "torch"),
        Import("os", "path", "p"),
        Import("os", "sep", "sep"),
    ]
    text = block({line.bound: line for line in lines})
    assert text == "from os import sep\nfrom os import path as p\n\nimport torch\nimport torch as th"
