"""Plants faults in public scripts that nobody here wrote, and looks what `samestep monitor` in front of them says.

    python benchmarks/monitored_scripts.py --repositories FOLDER [--upto 20] [--faults sleep,kill]
        [--scripts nanogpt] [--seconds 3600] [--out FOLDER]

FOLDER holds the repositories, as OWNER+NAME each; nothing is downloaded. A trial copies a script, makes it small and
train on CPUs (SCRIPTS has every edit), and inserts one line, which acts on rank 1, or on both as its kind needs, at a
step that is drawn. A hang is right when the rank and the planted line are named at most 10 seconds after the limit; any
other fault, when its sentence is said, and no other; a script without a fault, when nothing is said.

Prints the table. --out keeps a line of trials.jsonl for each trial, and the same command goes on from there.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from monitored_faults import USAGE, WITHIN_S

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from planting import Edit, plant_in_files, with_patches

STALL_S = 6.0
PLANTED = Path(__file__).with_name("planted.py")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@dataclass(frozen=True)
class Script:
    """A public script.

    folder: in the repositories; files: of it that are copied, the script first. edits: with which it trains on two CPU
    processes. step, row: where a line is inserted: the file, and the line before which. model: its name there. launch:
    after `python`; {steps} are trained or a few more. steps_of: what {steps} is divided by. rows: of a batch. workers:
    with which its loader has two. without: faults that it cannot have.
    """

    folder: str
    files: tuple[str, ...]
    edits: tuple[Edit, ...]
    step: tuple[str, str]
    row: tuple[str, str]
    model: str
    launch: tuple[str, ...]
    steps_of: int = 1
    rows: int = 32
    workers: Edit | None = None
    without: tuple[str, ...] = ()


NEED_A_LOADER = ("row", "worker", "slow_data", "loader_bound", "leak", "copy_on_write")
PIN, WORKER = "pin_memory=True,", "num_workers=2, persistent_workers=True,"
SCRIPTS = {
    "multigpu_torchrun": Script(
        folder="pytorch+examples/distributed/ddp-tutorial-series",
        files=("multigpu_torchrun.py", "datautils.py"),
        edits=(
            Edit('    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))\n', ""),
            Edit('backend="nccl"', 'backend="gloo"'),
            Edit("model.to(self.gpu_id)", "model"),
            Edit(", device_ids=[self.gpu_id]", ""),
            Edit("source.to(self.gpu_id)", "source"),
            Edit("targets.to(self.gpu_id)", "targets"),
        ),
        step=("multigpu_torchrun.py", "            self._run_batch(source, targets)"),
        row=("datautils.py", "        return self.data[index]"),
        model="self.model",
        launch=(*TORCHRUN, "multigpu_torchrun.py", "{steps}", "100"),
        steps_of=32,
        workers=Edit(PIN, f"{PIN} {WORKER}"),
    ),
    "multigpu_spawn": Script(
        folder="pytorch+examples/distributed/ddp-tutorial-series",
        files=("multigpu.py", "datautils.py"),
        edits=(
            Edit("    torch.cuda.set_device(rank)\n", ""),
            Edit('"12355"', "os.environ['PORT']"),
            Edit('backend="nccl"', 'backend="gloo"'),
            Edit("model.to(gpu_id)", "model"),
            Edit(", device_ids=[gpu_id]", ""),
            Edit("source.to(self.gpu_id)", "source"),
            Edit("targets.to(self.gpu_id)", "targets"),
            Edit("torch.cuda.device_count()", "2"),
        ),
        step=("multigpu.py", "            self._run_batch(source, targets)"),
        row=("datautils.py", "        return self.data[index]"),
        model="self.model",
        launch=("multigpu.py", "{steps}", "100"),
        steps_of=32,
        workers=Edit(PIN, f"{PIN} {WORKER}"),
        # A rank's loader workers do not know whose they are.
        without=("copy_on_write", "leak", "worker"),
    ),
    "mingpt_ddp": Script(
        folder="pytorch+examples/distributed/minGPT-ddp/mingpt",
        files=("main.py", "trainer.py", "model.py", "char_dataset.py", "gpt2_train_cfg.yaml", "data"),
        edits=(
            Edit("    acc = torch.accelerator.current_accelerator()\n", ""),
            Edit('    device: torch.device = torch.device(f"{acc}:{rank}")\n', ""),
            Edit("    backend = torch.distributed.get_default_backend_for_device(device)\n", ""),
            Edit("backend=backend", 'backend="gloo"'),
            Edit("    torch.accelerator.set_device_index(rank)\n", ""),
            Edit("has_gpu and gpu_count >= min_gpus", "True"),
            Edit("torch.accelerator.current_accelerator()", '"cpu"', "trainer.py"),
            Edit('torch.device(f"{self.acc}:{self.local_rank}")', 'torch.device("cpu")', "trainer.py"),
            Edit("model.to(self.local_rank)", "model", "trainer.py"),
            Edit(", device_ids=[self.local_rank]", "", "trainer.py"),
            Edit("source.to(self.local_rank)", "source", "trainer.py"),
            Edit("targets.to(self.local_rank)", "targets", "trainer.py"),
            Edit(
                "path: https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/",
                "path: data/",
                "gpt2_train_cfg.yaml",
            ),
            Edit("block_size: 128", "block_size: 16", "gpt2_train_cfg.yaml"),
            Edit("truncate: 0.05", "truncate: 0.001", "gpt2_train_cfg.yaml"),
            Edit("n_layer: 8", "n_layer: 1", "gpt2_train_cfg.yaml"),
            Edit("n_head: 8", "n_head: 2", "gpt2_train_cfg.yaml"),
            Edit("n_embd: 512", "n_embd: 32", "gpt2_train_cfg.yaml"),
            Edit("max_epochs: 10", "max_epochs: {steps}", "gpt2_train_cfg.yaml"),
            Edit("batch_size: 216", "batch_size: 16", "gpt2_train_cfg.yaml"),
            Edit("data_loader_workers: 4", "data_loader_workers: 0", "gpt2_train_cfg.yaml"),
            Edit("use_amp: True", "use_amp: False", "gpt2_train_cfg.yaml"),
        ),
        step=("trainer.py", "            batch_loss = self._run_batch(source, targets, train)"),
        row=("char_dataset.py", "        chunk = self.data[idx:idx + self.block_size + 1]"),
        model="self.model",
        launch=(*TORCHRUN, "main.py"),
        steps_of=32,
        rows=16,
        workers=Edit("num_workers=self.config.data_loader_workers,", WORKER, "trainer.py"),
    ),
    "nanogpt": Script(
        folder="karpathy+nanoGPT",
        files=("train.py", "model.py", "configurator.py"),
        edits=(
            Edit("    device = f'cuda:{ddp_local_rank}'\n", ""),
            Edit("    torch.cuda.set_device(device)\n", ""),
            Edit("device_ids=[ddp_local_rank]", ""),
        ),
        step=("train.py", "    for micro_step in range(gradient_accumulation_steps):"),
        row=("train.py", "    ix = torch.randint(len(data) - block_size, (batch_size,))"),
        model="model",
        launch=(
            *TORCHRUN,
            "train.py",
            *("--device=cpu", "--compile=False", "--backend=gloo", "--dtype=float32", "--dataset=text", "--n_layer=1"),
            *("--n_head=1", "--n_embd=16", "--block_size=16", "--batch_size=4", "--gradient_accumulation_steps=2"),
            *("--max_iters={steps}", "--eval_interval=100000", "--eval_iters=1", "--log_interval=50"),
        ),
        without=NEED_A_LOADER,
    ),
    "llms_from_scratch": Script(
        folder="rasbt+LLMs-from-scratch/appendix-A/01_main-chapter-code",
        files=("DDP-script-torchrun.py",),
        edits=(
            Edit('init_process_group(backend="nccl"', 'init_process_group(backend="gloo"'),
            Edit("    torch.cuda.set_device(rank)\n", ""),
            Edit("    # factor = 4", "    factor = 25"),
            Edit("    # X_train =", "    X_train ="),
            Edit("    # y_train =", "    y_train ="),
            Edit("    # X_test =", "    X_test ="),
            Edit("    # y_test =", "    y_test ="),
            Edit("    model.to(rank)\n", ""),
            Edit(", device_ids=[rank]", ""),
            Edit("features.to(rank), labels.to(rank)", "features, labels"),
            Edit("features.to(device), labels.to(device)", "features, labels"),
            Edit("num_epochs = 3", "num_epochs = {steps}"),
        ),
        step=("DDP-script-torchrun.py", "            logits = model(features)\n            loss"),
        row=("DDP-script-torchrun.py", "        one_x = self.features[index]"),
        model="model",
        launch=(*TORCHRUN, "DDP-script-torchrun.py"),
        steps_of=31,
        rows=2,
        workers=Edit(PIN, f"{PIN} {WORKER}"),
    ),
}


@dataclass(frozen=True)
class Fault:
    """code: the line that is inserted, at a step or where a row is read (of_row). begins, part: of the sentence that is
    right. hangs: whether it must be told in time, with the planted line. steps: that are trained, as some are seen
    only after a while. in_worker: whether the loader gets a worker. also: patterns of other sentences, that are true
    as well."""

    code: str
    begins: str
    part: str = ""
    of_row: bool = False
    hangs: bool = False
    steps: int = 40
    in_worker: bool = False
    also: tuple[str, ...] = ()

    def allows(self, said: str) -> bool:
        return any(re.match(pattern, said) for pattern in self.also)


MISMATCH = (
    "planted.due() and (planted.dist.broadcast(planted.ZEROS, 0) if planted.rank() == 1"
    " else planted.dist.all_gather([planted.ZEROS, planted.ZEROS.clone()], planted.ZEROS.clone()))"
)
WAITS = "rank 1 has not entered "
SLOW = "rank 1 is slow: "
OTHERS_USE = "the ranks wait "  # for processors: true on a machine that others use
# True where rows take long on both ranks: either may be the later one.
ROWS_ARE_SLOW = ("the training waits ", "rank [01] is slow: .* (for data|for a processor)", OTHERS_USE)
LONG, LONGER = 240, 2600  # steps; in the latter memory grows: a look at much of it takes long, and the next one waits
LEFT = "rank 1 ended first, by itself"
FAULTS = {
    "sleep": Fault("planted.now() and planted.time.sleep(10_000)", WAITS, "asleep", hangs=True),
    "branch": Fault("planted.now() and planted.dist.barrier()", "rank 1 has waited for ", "while rank 0 ", hangs=True),
    "mismatch": Fault(MISMATCH, "rank 1 has waited for ", "while rank 0 ", hangs=True),
    "row": Fault("planted.now_row() and planted.time.sleep(10_000)", WAITS, "asleep", of_row=True, hangs=True),
    "worker": Fault(
        "planted.now_row() and planted.LOCK.acquire() and planted.LOCK.acquire()",
        WAITS,
        "in its loader worker",
        True,
        True,
        in_worker=True,
    ),
    "batches": Fault("if planted.now(): break", LEFT),
    "exit": Fault("planted.now() and planted.sys.exit(0)", LEFT),
    "error": Fault("if planted.now(): raise ValueError('a wrong row')", "rank 1 failed first: ValueError: a wrong row"),
    "oom": Fault(
        "if planted.now(): raise planted.torch.OutOfMemoryError('out of memory')",
        "rank 1 failed first: OutOfMemoryError: out of memory",
    ),
    "kill": Fault("planted.now() and planted.os.kill(planted.os.getpid(), 9)", "rank 1 ended first, after "),
    "slow_compute": Fault("planted.spin()", SLOW, "it computes for ", steps=LONG),
    "slow_data": Fault(
        "planted.rank() == 1 and planted.time.sleep(planted.ROW_S)", SLOW, "for data, and", True, steps=LONG
    ),
    "slow_communication": Fault("planted.hook({model})", SLOW, "found it at planted.py:", steps=LONG),
    "loader_bound": Fault("planted.time.sleep(planted.ROW_S)", "the training waits ", "num_workers=", True, steps=LONG),
    "leak": Fault(
        "planted.keep()",
        "the memory of rank 1's loader workers",
        "keeps something",
        True,
        steps=LONGER,
        in_worker=True,
        also=ROWS_ARE_SLOW,
    ),
    "copy_on_write": Fault(
        "planted.read()",
        "the memory of rank 1's loader workers",
        "Python objects",
        True,
        steps=LONGER,
        in_worker=True,
        also=ROWS_ARE_SLOW,
    ),
    "none": Fault("", "", steps=LONG, also=(OTHERS_USE,)),
}


@dataclass(frozen=True)
class Trial:
    """step: at which it was planted. late_s: of a hang, from the limit to the sentence. said: about the ranks."""

    script: str
    fault: str
    step: int
    code: int
    said: list[str]
    line: str
    late_s: float | None
    seconds: float

    @property
    def is_right(self) -> bool:
        fault = FAULTS[self.fault]
        if not fault.begins:
            return self.code == 0 and all(fault.allows(said) for said in self.said)
        right = [said for said in self.said if said.startswith(fault.begins) and fault.part in said]
        if fault.hangs and (self.late_s is None or self.late_s > WITHIN_S or not right or self.line not in right[0]):
            return False
        return bool(right) and all(said in right or fault.allows(said) for said in self.said)


def plant(script: Script, name: str, folder: Path, repositories: Path, steps: str) -> str:
    """Copies a script, edits it, and inserts the line of a fault. Returns where that is, as FILE:LINE."""
    fault = FAULTS[name]
    for file in script.files:
        source = repositories / script.folder / file
        (shutil.copytree if source.is_dir() else shutil.copy)(source, folder / file)
    shutil.copy(PLANTED, folder)
    edits = [*script.edits, *([script.workers] if fault.in_worker and script.workers else [])]
    plant_in_files(folder, (replace(edit, new=edit.new.replace("{steps}", steps)) for edit in edits), script.files[0])
    if script.files[0] == "main.py":  # libraries that need no network, but that are not torch's
        for module in ("hydra", "omegaconf", "boto3"):
            text = f"from planted import {module}_of_planted as module\nglobals().update(vars(module))\n"
            (folder / f"{module}.py").write_text(text)
    if not fault.code:
        return ""
    file, anchor = script.row if fault.of_row else script.step
    indent = " " * (len(anchor) - len(anchor.lstrip()))
    planted = indent + fault.code.format(model=script.model)
    text = with_patches((folder / file).read_text(), Edit(anchor, f"{planted}\n{anchor}"))
    text = f"import planted\n{text}"
    (folder / file).write_text(text)
    return f"{file}:{1 + text.splitlines().index(planted)}"


def trial(script_name: str, name: str, repositories: Path, number: int) -> Trial:
    """Runs one training under the monitor to its end."""
    script, fault = SCRIPTS[script_name], FAULTS[name]
    at = random.Random(f"{script_name} {name} {number}").randint(4, 25)
    steps = str(-(-fault.steps // script.steps_of))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        line = plant(script, name, folder, repositories, steps)
        if script_name == "nanogpt":
            (folder / "data/text").mkdir(parents=True)
            for file in ("train.bin", "val.bin"):
                (folder / "data/text" / file).write_bytes(bytes(40_000))
        options = ["--stall", str(STALL_S), "--end-hung"] if fault.hangs else []
        launch = [word.replace("{steps}", steps) for word in script.launch]
        environment = {"FAULT": name, "AT": str(at), "ROWS": str(script.rows)}
        environment |= {"PORT": str(20_000 + os.getpid() % 10_000)}
        command = [sys.executable, "-m", "samestep", "monitor", "--out", "watched", *options, "--"]
        command += [sys.executable, *launch]
        began = time.time()
        done = subprocess.run(
            command, cwd=folder, env=os.environ | environment, capture_output=True, text=True, timeout=400
        )
        report, hung = folder / "watched" / "hang.txt", folder / "hung"
        both = report.exists() and hung.exists()
        late_s = report.stat().st_mtime - float(hung.read_text()) - STALL_S if both else None
    lines = [text.removeprefix("samestep: ") for text in done.stderr.splitlines() if text.startswith("samestep: ")]
    said = list(dict.fromkeys(text for text in lines if not USAGE.match(text)))
    if done.returncode and not said:
        said = ["(nothing of samestep's) " + "; ".join(done.stderr.splitlines()[-40:])[-1500:]]
    return Trial(script_name, name, at, done.returncode, said, line, late_s, round(time.time() - began, 1))


def table(trials: list[Trial]) -> None:
    for name, fault in FAULTS.items():
        own = [each for each in trials if each.fault == name]
        late = [each.late_s for each in own if each.late_s is not None]
        right = sum(each.is_right for each in own)
        late_text = f", at most {max(late):.1f} s after the limit" if late and fault.hangs else ""
        print(f"{name:20} {right} of {len(own)}{late_text}")
    for script in SCRIPTS:
        own = [each for each in trials if each.script == script]
        print(f"{script:20} {sum(each.is_right for each in own)} of {len(own)}")
    print(f"{sum(each.is_right for each in trials)} of {len(trials)} right")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repositories", type=Path, required=True)
    parser.add_argument("--upto", type=int, default=1)
    parser.add_argument("--faults", default=",".join(FAULTS))
    parser.add_argument("--scripts", default=",".join(SCRIPTS))
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no trial after so many")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    kept = options.out / "trials.jsonl" if options.out else None
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
    trials = [Trial(**json.loads(line)) for line in kept.read_text().splitlines()] if kept and kept.exists() else []
    until = time.monotonic() + options.seconds
    # Of each kind one script, then of each kind the next one: a record that is cut off has as many of each kind.
    names, scripts = options.faults.split(","), options.scripts.split(",")
    for number in range(options.upto):
        for turn in range(len(scripts)):
            for index, name in enumerate(names):
                script = scripts[(index + turn) % len(scripts)]
                had = sum(each.fault == name and each.script == script for each in trials)
                if had > number or name in SCRIPTS[script].without or time.monotonic() > until:
                    continue
                trials.append(trial(script, name, options.repositories, number))
                last = trials[-1]
                right = "" if last.is_right else "WRONG "
                print(f"{right}{script} {name}: {last.said} {last.late_s} {last.seconds}", flush=True)
                if kept:
                    with open(kept, "a") as file:
                        file.write(json.dumps(asdict(last)) + "\n")
    table(trials)
    sys.exit(not all(each.is_right for each in trials))


if __name__ == "__main__":
    main()
