"""The faults of a resume: each a patch of a real file of samestep, what rightly names it, and words of its cause.

`first` begins the training and `then` continues it, both with the patch: (engine, ranks). `settings`: of the job.
`trainparity`: the component of TrainParity 0.1.0's reference faults that it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

STATE, CHECKPOINTS, FILES = "rank/checkpoint_state.py", "rank/checkpoints.py", "rank/checkpoint_files.py"
RUN, SAVING, SCHEDULE = "training.py", "rank/saving.py", "data/schedule.py"
PARTS = "            yield from self.step(rank, *divmod(step, self.steps_per_epoch))\n"
LOAD_OTHERS = '            if name != "scaler" or state.get(name):'
LOADED_OTHER = "                part.load_state_dict(saved.plain(state[name]))\n"
LOADED_STATE = "    tensor = saved.tensor(value).to("


@dataclass(frozen=True)
class ResumeFault:
    name: str
    file: str
    old: str
    new: str
    named: tuple[str, ...]
    cause: str
    job: str = "alike"
    settings: Mapping[str, str] = field(default_factory=dict)
    engine_settings: Mapping[str, str] = field(default_factory=dict)
    first: tuple[str, int] = ("ddp", 2)
    then: tuple[str, int] = ("ddp", 2)
    trainparity: str = ""


def parts_of(rows: str, epoch: str = "epoch") -> str:
    """The schedule's loop over steps, where a continued training reads the rows of other steps."""
    return (
        "            epoch, number = divmod(step, self.steps_per_epoch)\n"
        f"            for part in self.step(rank, {rows}):\n"
        f"                yield __import__('dataclasses').replace(part, epoch={epoch}, step=step)\n"
    )


FAULTS = (
    ResumeFault(
        "epoch 0's order replayed",
        SCHEDULE,
        PARTS,
        parts_of("0 if first else epoch, number"),
        ("rows", "indices"),
        "order of an earlier epoch is replayed",
    ),
    ResumeFault(
        "off by one batch: one left out",
        SCHEDULE,
        PARTS,
        parts_of("*divmod(step + bool(first), self.steps_per_epoch)"),
        ("rows", "indices"),
        "off by one batch",
        trainparity="data cursor",
    ),
    ResumeFault(
        "off by one batch: one trained twice",
        SCHEDULE,
        PARTS,
        parts_of("*divmod(step - bool(first), self.steps_per_epoch)"),
        ("rows", "indices"),
        "off by one batch",
        trainparity="data cursor",
    ),
    ResumeFault(
        "the position inside the epoch lost",
        SCHEDULE,
        PARTS,
        parts_of("*divmod(step - first % self.steps_per_epoch, self.steps_per_epoch)"),
        ("rows", "indices"),
        "the epoch begins again after the interruption",
    ),
    ResumeFault(
        "the workers' prefetched batches lost",
        RUN,
        "self.steps, first=self.first)",
        "self.steps, first=self.first + 2 * bool(self.first))",
        ("rows",),
        "prefetched batches were lost",
    ),
    ResumeFault(
        "augmentation of epoch 0 replayed",
        SCHEDULE,
        PARTS,
        parts_of("epoch, number", "0 if first else epoch"),
        ("tensors received",),
        "augmentation of epoch 0 is replayed",
        trainparity="Python and NumPy RNG",
    ),
    ResumeFault(
        "momentum lost",
        STATE,
        "                if state is not None:\n",
        "                if False:\n",
        ("resumed state",),
        "momentum_buffer of",
        settings={"optimizer": "sgd"},
        trainparity="optimizer",
    ),
    ResumeFault(
        "momentum filled with zeros",
        STATE,
        LOADED_STATE,
        "    tensor = (saved.tensor(value) * 0).to(",
        ("resumed state",),
        "began anew",
        settings={"optimizer": "sgd"},
        trainparity="optimizer",
    ),
    ResumeFault(
        "momentum filled with zeros on a rank that is new",
        STATE,
        "        block = saved.tensor(value, offset, shape).to(",
        "        block = (saved.tensor(value, offset, shape) * (not offset[0])).to(",
        ("resumed state",),
        "on the new number of ranks",
        first=("fsdp", 2),
        then=("fsdp", 3),
        trainparity="optimizer",
    ),
    ResumeFault(
        "Adam's step count lost",
        STATE,
        LOADED_STATE,
        '    tensor = (saved.tensor(value) * (key != "step")).to(',
        ("resumed state",),
        "step count",
        trainparity="logical step",
    ),
    ResumeFault(
        "rates of the parameter groups lost",
        STATE,
        "    for name, value in numbers.items():\n",
        '    for name, value in ((n, v) for n, v in numbers.items() if n != "lr"):\n',
        ("learning rate",),
        "the rate begins anew",
        trainparity="optimizer group",
    ),
    ResumeFault(
        "scheduler counted twice",
        STATE,
        LOADED_OTHER,
        LOADED_OTHER + '                if name == "scheduler":\n                    part.step()\n',
        ("resumed state",),
        "state of the scheduler",
        trainparity="scheduler",
    ),
    ResumeFault(
        "scheduler not restored",
        STATE,
        LOAD_OTHERS,
        '            if name != "scheduler":',
        ("resumed state",),
        "state of the scheduler",
        trainparity="scheduler",
    ),
    ResumeFault(
        "the scheduler of evaluations not restored",
        STATE,
        LOAD_OTHERS,
        '            if name != "evaluation_scheduler":',
        ("resumed state",),
        "state of the evaluation scheduler",
        job="stateful",
        trainparity="scheduler",
    ),
    ResumeFault(
        "the loss scaler not restored",
        STATE,
        LOAD_OTHERS,
        '            if name != "scaler":',
        ("resumed state",),
        "loss scaler was not restored",
        job="plain",
        engine_settings={"precision": "fp16"},
        first=("amp", 2),
        then=("amp", 2),
        trainparity="GradScaler",
    ),
    ResumeFault(
        "best metric forgotten",
        "rank/best_weights.py",
        '        self.curve, self.best_at, self.ended = state["curve"], state["best_at"], state["ended"]\n',
        '        self.curve, self.ended = state["curve"], state["ended"]\n',
        ("resumed state",),
        "the best one is forgotten",
    ),
    ResumeFault(
        "patience counts anew",
        "rank/best_weights.py",
        '        self.curve, self.best_at, self.ended = state["curve"], state["best_at"], state["ended"]\n',
        "        self.curve, self.best_at = [], -1\n",
        ("resumed state",),
        "patience counts anew",
    ),
    ResumeFault(
        "EMA restarted from the weights",
        SAVING,
        "            self._state.load_ema(self._saved, ema)\n",
        "            pass\n",
        ("resumed state",),
        "(EMA)",
    ),
    ResumeFault(
        "EMA saved instead of the weights",
        STATE,
        '            "model": self._given(parameters),\n',
        '            "model": {n: a.clone() for n, a, _ in ema.named(self.model)} | (\n'
        "                {n: p for n, p in parameters.items() if not p.requires_grad})\n"
        "            if ema else self._given(parameters),\n",
        ("resumed state",),
        "the weights of",
        trainparity="model",
    ),
    ResumeFault(
        "buffers lost",
        STATE,
        '            copy_block(saved, of_rank["buffers"][name], buffer)\n',
        "            pass\n",
        ("resumed state",),
        "the buffer",
        job="stateful",
        trainparity="model",
    ),
    ResumeFault(
        "rank 0's buffers given to all",
        STATE,
        '        of_rank = state["ranks"][rank if same_ranks else "0"]\n',
        '        of_rank = state["ranks"]["0"]\n',
        ("resumed state",),
        "the rank's own",
        job="stateful",
        first=("fsdp", 2),
        then=("fsdp", 2),
    ),
    ResumeFault(
        "the second phase's optimizer lost",
        STATE,
        "        for group in inner.param_groups:\n            for parameter in group",
        "        for group in inner.param_groups[:1]:\n            for parameter in group",
        ("resumed state",),
        "the optimizer's",
        job="gan",
        trainparity="optimizer",
    ),
    ResumeFault(
        "the state that rows carry lost",
        STATE,
        "        if self.carried and same_ranks:\n",
        "        if False:\n",
        ("resumed state",),
        "carry from step to step",
        job="lstm",
        trainparity="hidden module state",
    ),
    ResumeFault(
        "tied weights saved once and loaded apart",
        STATE,
        "        self._load_optimizer(saved)\n",
        "        self._load_optimizer(saved)\n"
        "        met = set()\n"
        "        for module in self.model.modules():\n"
        "            for name, parameter in list(module._parameters.items()):\n"
        "                if id(parameter) in met:\n"
        "                    module._parameters[name] = nn.Parameter(parameter.detach().clone())\n"
        "                met.add(id(parameter))\n",
        ("resumed state",),
        "loaded apart",
        job="drawn",
        settings={"arch": "tied", "rows": "29"},
    ),
    ResumeFault(
        "weights loaded on rank 0 only",
        STATE,
        '            copy_block(saved, state["model"][name], parameter)\n',
        '            copy_block(saved, state["model"][name], parameter) if rank == "0" else None\n',
        ("resumed state",),
        "the weights of",
        first=("fsdp", 2),
        then=("fsdp", 2),
        trainparity="model",
    ),
    ResumeFault(
        "random stream counted from the interruption",
        RUN,
        '"replica", part.step, part.micro',
        '"replica", part.step - self.first, part.micro',
        ("loss",),
        "random numbers",
        job="stateful",
        trainparity="CPU and CUDA RNG",
    ),
    ResumeFault(
        "weights rounded to float32 in the file",
        FILES,
        "    save_file({key: piece.block for key, piece in here.items()}, tensors)\n",
        "    save_file({k: p.block.float() if k.startswith('model') else p.block for k, p in here.items()}, tensors)\n",
        ("resumed state",),
        "rounded",
        trainparity="model",
    ),
    ResumeFault(
        "the checkpoint before the last loaded",
        FILES,
        "    for step in steps_in(folder):\n        try:\n            checked(",
        "    for step in steps_in(folder)[1:] or steps_in(folder):\n        try:\n            checked(",
        ("resumed step",),
        "an older checkpoint",
        trainparity="model",
    ),
    ResumeFault(
        "no checkpoint loaded",
        SAVING,
        "        if saved is None:\n",
        "        if True:\n",
        ("resumed step",),
        "began anew",
    ),
    ResumeFault(
        "the step count off by one",
        SAVING,
        '        position = Position(**saved.state["position"])\n',
        '        position = Position(**saved.state["position"])\n'
        "        position = Position(position.done - 1, position.skipped, position.last)\n",
        ("resumed step",),
        "off by 1",
        trainparity="logical step",
    ),
    ResumeFault(
        "ZeRO's state saved by rank 0 alone",
        STATE,
        "            return tree  # ZeRO: this rank's parameters\n",
        "            return tree if self.world.rank == 0 else {}\n",
        ("resumed state",),
        "the optimizer's",
        first=("zero", 2),
        then=("single", 1),
        trainparity="optimizer",
    ),
    ResumeFault(
        "parameter groups loaded in another order",
        STATE,
        'zip(self.optimizer.param_groups, saved.state["groups"], strict=True)',
        'zip(self.optimizer.param_groups, saved.state["groups"][::-1], strict=True)',
        ("learning rate", "loss"),
        "right until the interruption",
        job="drawn",
        settings={"optimizer": "groups", "every": "step", "rows": "29"},
        trainparity="optimizer group",
    ),
)
