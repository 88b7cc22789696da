"""Faults of what both sides have: a job's Recipe, and its Stream. The reference builds and reads by itself."""

from __future__ import annotations

from mutations.faults.fault import Fault

PHASES, STREAM = "job/phases.py", "data/stream.py"
BUILT = "        return self.cls(parameters, **self.settings)\n"
READ = "            self._next += 1\n        if self.to_its_end"


def _without(setting: str) -> str:
    return f"        return self.cls(parameters, **{{k: v for k, v in self.settings.items() if k != {setting!r}}})\n"


FAULTS = (
    Fault(
        "an optimizer built without its weight decay",
        PHASES,
        BUILT,
        _without("weight_decay"),
        ("loss",),
        "setting_of_optimizer_left_out",
        ("conv",),
        "a weight decay",
    ),
    Fault(
        "an optimizer built without its betas",
        PHASES,
        BUILT,
        _without("betas"),
        ("loss",),
        "setting_of_optimizer_left_out",
        ("transformer",),
        "betas",
    ),
    Fault(
        "an optimizer built without its momentum",
        PHASES,
        BUILT,
        _without("momentum"),
        ("loss",),
        "setting_of_optimizer_left_out",
    ),
    Fault(
        "an optimizer built with another rate",
        PHASES,
        BUILT,
        '        return self.cls(parameters, **(dict(self.settings) | {"lr": 0.02}))\n',
        ("learning rate",),
        "learning_rate_of_another_size",
    ),
    Fault(
        "an optimizer built without its groups",
        PHASES,
        "        parameters = self.groups(model) if self.groups else model.parameters()\n",
        "        parameters = model.parameters()\n",
        ("parameter groups",),
        "parameter_groups_missing",
        ("tied",),
        "parameter groups",
    ),
    Fault(
        "a stream that reads its first row twice",
        STREAM,
        READ,
        "            self._next += 1\n"
        "            if self._next == 1:\n"
        "                self._rows = iter(self.dataset)\n"
        "        if self.to_its_end",
        ("tensors received",),
        "row_read_in_place_of_another",
        ("stream",),
        "a stream",
    ),
)
