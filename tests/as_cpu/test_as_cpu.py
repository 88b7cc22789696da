"""Scripts that name GPUs, on a machine without: computed on CPUs, judged as others, and refused in one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from command import samestep
from lane_marks import CHECK
from planting import Edit, with_patches
from samestep.records.files import from_json
from samestep.records.findings import CheckResults, question_of
from samestep.records.script import ON_CPUS

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has GPUs")
SCRIPT = Path(__file__).parent / "scripts" / "cuda_names.py"
SCALED = "scaler.scale(loss)"
WRAPPED = "model = DistributedDataParallel(torch.compile(model), device_ids=[local_rank], output_device=local_rank)"
FAULTS = [
    (Edit(SCALED, "scaler.scale(loss * dist.get_world_size())"), "loss weight", "loss_multiplied_by_ranks"),
    (Edit(WRAPPED, "model = torch.compile(model)"), "gradient", "ranks_never_reduce_gradients"),
    (Edit("convert_sync_batchnorm(Net())", "convert_sync_batchnorm(Net(), ALONE)"), "", "statistics_of_each_rank"),
]
ALONE = Edit(
    "torch.manual_seed(1)\n",
    "torch.manual_seed(1)\nALONE = [dist.new_group([rank], backend='nccl') for rank in (0, 1)][local_rank]\n",
)


def checked(text: str, folder: Path, *options: str) -> CheckResults:
    (folder / "train.py").write_text(text)
    words = ["check", "--json", "--launcher", "fork", "--out", str(folder / "out"), *options, "train.py"]
    done = samestep(*words, cwd=folder)
    assert done.stdout, done.stderr
    return from_json(CheckResults, json.loads(done.stdout))


def test_a_script_that_names_gpus_is_right_on_cpus(tmp_path: Path) -> None:
    results = checked(SCRIPT.read_text(), tmp_path)
    assert results.answer == "right", results.findings
    note = next(note for note in results.notes if note.id == ON_CPUS)
    parts = {part.id for part in note.fields["parts"]}
    expected = {"gloo_for_nccl", "autocast_is_off", "nothing_is_compiled", "synchronised_norm_on_cpus"}
    assert parts == expected | {"package_for_cpus"}


@pytest.mark.parametrize(
    ("fault", "question", "cause"), [pytest.param(*fault, id=fault[2], marks=CHECK) for fault in FAULTS]
)
def test_a_fault_of_it_is_named(fault: Edit, question: str, cause: str, tmp_path: Path) -> None:
    patches = [ALONE, fault] if "ALONE" in fault.new else [fault]
    results = checked(with_patches(SCRIPT.read_text(), *patches), tmp_path, "--as-cpu")
    assert question_of(results) == question, results.findings
    assert cause in {finding.message.id for finding in results.findings} | {note.id for note in results.notes}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("torch.cuda.CUDAGraph()", "torch.cuda.CUDAGraph"),
        ("torch.cuda.cudart()", "torch.cuda.cudart"),
        ("from flash_attn import flash_attn_varlen_func", "flash_attn.flash_attn_varlen_func"),
    ],
)
def test_what_no_cpu_computes_is_named(line: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(f"import torch\n{line}\n")
    done = samestep("check", "--nproc", "1", "--as-cpu", "--launcher", "fork", "train.py", cwd=tmp_path)
    assert done.returncode == 2 and f"the script uses {said}," in done.stderr, done.stderr


def test_the_scripts_own_error_is_said_where_cpus_are_not_wanted(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import sys\nimport torch\nif not torch.cuda.is_available():\n    sys.exit(3)\n")
    done = samestep("check", "--nproc", "1", "--no-as-cpu", "--launcher", "fork", "train.py", cwd=tmp_path)
    assert done.returncode == 1 and "--as-cpu computes it on CPUs" in done.stderr, done.stderr


@CHECK
def test_a_monitored_command_computes_on_cpus_where_that_is_asked(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.read_text())
    command = ["torchrun", "--standalone", "--nproc-per-node", "2", "train.py"]
    done = samestep("monitor", "--as-cpu", "--out", "out", "--", *command, cwd=tmp_path)
    assert done.returncode == 0 and "ms" in done.stdout, done.stderr


def test_data_parallel_is_one_process(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import torch\ntorch.nn.DataParallel(torch.nn.Linear(2, 2))\n")
    done = samestep("check", "--nproc", "2", "--as-cpu", "--launcher", "fork", "train.py", cwd=tmp_path)
    assert done.returncode == 2 and "--nproc 1" in done.stderr, done.stderr
