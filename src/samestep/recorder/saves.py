"""Records which files a rank writes with torch.save."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch

from samestep.records.beside_steps import SaveSeen


class Saves:
    """The files that this process writes with torch.save, from `attach` on."""

    def __init__(self) -> None:
        self._step_of: dict[str, int] = {}  # file -> the steps before it was first written

    def attach(self, steps_done: Callable[[], int]) -> None:
        """Records calls of torch.save. steps_done: returns the optimizer steps taken so far."""
        save = torch.save

        @functools.wraps(save)
        def new_save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
            if isinstance(f, str | os.PathLike):  # a file object has no name to go by
                self._step_of.setdefault(os.path.realpath(os.fspath(f)), steps_done())
            save(obj, f, *args, **kwargs)

        torch.save = new_save

    def seen(self) -> list[SaveSeen]:
        """Returns each file once."""
        return [SaveSeen(file, step) for file, step in self._step_of.items()]
