"""Takes the checkpoints of one training, and continues it from one."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from samestep.data.schedule import Schedule
from samestep.errors import UserError
from samestep.job import Job
from samestep.rank.carry import CarriedState
from samestep.rank.checkpoint_files import Saved, foreign
from samestep.rank.checkpoint_state import TrainingState, check_parts
from samestep.rank.checkpoints import Checkpoints
from samestep.rank.ema import Ema
from samestep.rank.fragments import Fragment
from samestep.rank.weights import StateDict
from samestep.records.files import from_json, replace_by
from samestep.world import World


@dataclass(frozen=True)
class Position:
    """How far a training is. skipped: of the steps done. last: after how many patience has ended it; None: not yet."""

    done: int = 0
    skipped: int = 0
    last: int | None = None


class Saving:
    """One training's state and its checkpoints."""

    def __init__(self, job: Job, world: World, checkpoints: Checkpoints) -> None:
        self.job, self.world, self.checkpoints = job, world, checkpoints
        self._saved: Saved | None = None  # the one from which the training continues
        self._evaluator: Any = None
        self._taken = -1

    def begin(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        parts: Mapping[str, Any],
        carried: CarriedState | None,
        state: Callable[[], StateDict] | None,
        schedule: Schedule,
    ) -> Position:
        """Registers what is saved, and loads the checkpoint from which the training continues. Returns its position.

        parts: name -> what else has a state dict; None: the training has no such part. state: as Run.register's.
        """
        others = {name: part for name, part in parts.items() if part is not None}
        self._evaluator = others.get("evaluations")
        self._state = TrainingState(self.world, model, optimizer, others, carried, state, recipe=_recipe(self.job))
        saved = self.checkpoints.load()
        if saved is None:
            return Position()
        check_parts(saved)
        position = from_json(Position, saved.state["position"], f"the position in {saved.folder}")
        if position.done != saved.manifest.step:
            raise UserError(foreign(saved.folder, f"its state is that of step {position.done}"))
        self._state.load(saved, in_epoch=position.done % schedule.steps_per_epoch != 0)
        if self.world.rank == 0 and self._evaluator is not None:
            for file in self._evaluator.files():
                with saved.open(file.name) as content:
                    replace_by(file, partial(shutil.copyfileobj, content))
        if self.checkpoints.other_evaluation and self._evaluator is not None:
            self._evaluator.forget_best()
        self._saved, self._taken = saved, position.done
        return position

    def begin_fragments(self, fragments: Sequence[Fragment]) -> None:
        """Registers the fragments of an optimizer's flat parameters, and loads their state."""
        self._state.load_fragments(self._saved, fragments)

    def load_ema(self, ema: Ema) -> None:
        """Gives the averages of the weights what is in the checkpoint from which the training continues."""
        if self._saved is not None:
            self._state.load_ema(self._saved, ema)

    def save(self, position: Position, ema: Ema | None) -> None:
        """Takes a checkpoint, unless that of this step is taken."""
        if position.done == self._taken:
            return
        self._taken, self._saved = position.done, None  # which is loaded: its files can go
        tree = self._state.tree(ema)
        if self.world.rank == 0:
            tree["position"] = asdict(position)
            if self.checkpoints.identity:
                tree["identity"] = self.checkpoints.identity.tree()
        self.checkpoints.take(position.done, tree, self._evaluator.files() if self._evaluator is not None else ())


def _recipe(job: Job) -> list[str]:
    """Returns the names of the classes of the job's optimizers."""
    recipes = [phase.optimizer for phase in job.phases] or [job.optimizer]
    return [recipe.cls.__qualname__ for recipe in recipes]
