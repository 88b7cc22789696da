"""The weights, their averages, buffers and carried state, and what evaluations have found."""

from __future__ import annotations

from resume.faults.fault import SAVING, STATE, ResumeFault

FAULTS = (
    ResumeFault(
        "best metric forgotten",
        "rank/evaluate.py",
        '        self.curve, self.best_at, self.ended = state["curve"], state["best_at"], state["ended"]\n',
        '        self.curve, self.ended = state["curve"], state["ended"]\n',
        ("resumed state",),
        "evaluations_not_restored",
    ),
    ResumeFault(
        "patience counts anew",
        "rank/evaluate.py",
        '        self.curve, self.best_at, self.ended = state["curve"], state["best_at"], state["ended"]\n',
        "        self.curve, self.best_at = [], -1\n",
        ("resumed state",),
        "evaluations_not_restored",
    ),
    ResumeFault(
        "EMA restarted from the weights",
        SAVING,
        "            self._state.load_ema(self._saved, ema)\n",
        "            pass\n",
        ("resumed state",),
        "average_of_weights_lost",
    ),
    ResumeFault(
        "EMA saved instead of the weights",
        STATE,
        '            "model": {name: piece_of(p, orders.get(name)) for name, p in self._given(parameters).items()},\n',
        '            "model": {n: a.clone() for n, a, _ in ema.named(self.model)} | (\n'
        "                {n: p for n, p in parameters.items() if not p.requires_grad})\n"
        "            if ema else self._given(parameters),\n",
        ("resumed state",),
        "weights_not_those_of_checkpoint",
        trainparity="model",
    ),
    ResumeFault(
        "buffers lost",
        STATE,
        '            copy_block(saved, of_replica["buffers"][name], buffer)\n',
        "            pass\n",
        ("resumed state",),
        "buffer_not_the_ranks_own",
        job="stateful",
        trainparity="model",
    ),
    ResumeFault(
        "rank 0's buffers given to all",
        STATE,
        '        of_replica = state["ranks"][str(self.world.replica) if as_many else "0"]\n',
        '        of_replica = state["ranks"]["0"]\n',
        ("resumed state",),
        "buffer_not_the_ranks_own",
        job="stateful",
        first=("fsdp", 2),
        then=("fsdp", 2),
    ),
    ResumeFault(
        "the state that rows carry lost",
        STATE,
        "        if self.carried and as_many:\n",
        "        if False:\n",
        ("resumed state",),
        "carried_state_lost",
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
        "tied_weight_loaded_apart",
        job="drawn",
        settings={"arch": "tied", "rows": "29"},
    ),
    ResumeFault(
        "weights loaded on rank 0 only",
        STATE,
        '            copy_block(saved, state["model"][name], parameter, orders.get(name))\n',
        "            if self.world.rank == 0:\n"
        '                copy_block(saved, state["model"][name], parameter, orders.get(name))\n',
        ("resumed state",),
        "weights_not_those_of_checkpoint",
        first=("fsdp", 2),
        then=("fsdp", 2),
        trainparity="model",
    ),
)
