"""The life of a run, as the reference lives it: other first weights, evaluations, and the best of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from samestep.job import Job
from samestep.records.plan import INIT
from samestep.records.training_record import EvaluationRecord
from samestep.reference.evaluation import evaluate, predictions
from samestep.reference.first_gradient import thinned

State = Mapping[str, Tensor]  # name -> tensor


@dataclass
class Life:
    """What a run of `job` does besides its steps."""

    job: Job
    """The job that is trained."""

    every: int
    """Steps between two evaluations."""

    stop: int
    """Steps before the restart."""

    steps: int
    """Steps of the whole run."""

    device: str
    """The device on which the reference computes."""

    like: Life | None = None
    """The run without noise, whose best evaluation this run takes. None: this is the run without noise."""

    before: EvaluationRecord | None = None
    """The evaluation of the weights that the run begins with. None: there is none, as in a run with noise."""

    evaluations: list[EvaluationRecord] = field(default_factory=list)
    """Each evaluation, in order."""

    at_step: list[int] = field(default_factory=list)
    """How many steps had been done before each evaluation."""

    best: tuple[str, str] | None = None
    """The metric, and 'min' or 'max', by which the best weights are saved before the restart. None: the last are
    saved."""

    best_after: tuple[str, str] | None = None
    """The metric, and 'min' or 'max', by which the best weights are saved after the restart. None: the last are
    saved."""

    best_at: int = -1
    """The index of the best evaluation. -1: there is none."""

    saved: State = field(default_factory=dict)
    """The weights that the run saves, by name."""

    samples: list[State] = field(default_factory=list)
    """Samples of the weights at each evaluation. Empty in a run with noise."""

    raw: State = field(default_factory=dict)
    """The model's last weights, by name, where `saved` holds averages. Empty elsewhere."""

    buffers: list[State] = field(default_factory=list)
    """The last buffers of each replica."""

    parameters: list[str] = field(default_factory=list)
    """The names of the model's parameters, of tied ones the first."""

    outputs: State = field(default_factory=dict)
    """The outputs of the evaluation's rows, by the weights that are saved. Empty: they cannot be compared."""

    _states: dict[int, State] = field(default_factory=dict)
    """The index of an evaluation -> its weights, of the evaluations that may be the best."""

    def begin(self, model: nn.Module) -> None:
        """Gives the model the weights that --init has: its own, and the buffers of its state, each times INIT."""
        state = model.state_dict()
        scaled = {n: t * INIT for n, t in state.items() if isinstance(t, Tensor) and t.is_floating_point()}
        model.load_state_dict({**state, **scaled})
        if self.like is None:
            self.before = evaluate(self.job, _tensors(model.state_dict()), self.device, twice=False)

    def evaluates(self, done: int) -> bool:
        """Whether the training evaluates after `done` steps, before its end."""
        return done < self.steps and done % self.every == 0

    def after(self, done: int, state: Callable[[], State]) -> None:
        """Evaluates after `done` steps, where that is due. state: returns the weights as they are evaluated."""
        if not (self.evaluates(done) or done == self.steps) or self.job.evaluation is None:
            return
        weights, number = state(), len(self.evaluations)
        result = evaluate(self.job, weights, self.device, twice=self.like is None and done in (self.every, self.steps))
        assert result
        self.evaluations.append(result)
        self.at_step.append(done)
        if self.like is None:
            self.samples.append({name: thinned(tensor).clone() for name, tensor in weights.items()})
        if number in ((1, 2) if self.like is None else (self.like.best_at,)):
            self._states[number] = {name: tensor.clone() for name, tensor in weights.items()}

    def end(self, state: State, model: nn.Module, buffers: list[State]) -> None:
        """Decides which weights are saved. state: the last ones, as they are evaluated. buffers: of each replica."""
        if self.like is None:
            self._choose()
        else:
            self.best, self.best_after, self.best_at = self.like.best, self.like.best_after, self.like.best_at
        weights = self._states.get(self.best_at, state) if self.best else state
        self.parameters = [name for name, _ in model.named_parameters()]
        trained = _trained(model) if self.job.save == "trainable" else {*weights}
        self.saved = {name: tensor for name, tensor in weights.items() if name in trained}
        self.buffers = buffers
        if self.job.ema:
            self.raw = {name: p.detach().clone() for name, p in model.named_parameters()}
        outputs = None
        if self.job.evaluation is not None and (self.like is None or self.like.outputs):
            # The file has the trained part alone: the job builds the rest, which is not that of --init.
            built = _tensors(self.job.model().state_dict()) if self.job.save == "trainable" else {}
            outputs = predictions(self.job, {**built, **self.saved}, self.device, twice=self.like is None)
        self.outputs = {} if outputs is None else {"outputs": outputs}
        self._states.clear()

    def _choose(self) -> None:
        """Chooses the metric and the directions: neither the first evaluation nor the last is to be the best one, so
        that a file which holds the weights of another evaluation shows."""
        unsteady = {name for result in self.evaluations for name in result.unsteady}
        names = [name for name in (self.evaluations[0].sums if self.evaluations else ()) if name not in unsteady]
        if not names:
            return
        values = [result.mean(names[0]) for result in self.evaluations]
        improving, opposite = ("min", "max") if values[1] < values[0] else ("max", "min")
        for direction in (opposite, improving):
            self.best_at = 1
            for number in (2, 3):
                gain = values[number] - values[self.best_at]
                if (gain < 0) if direction == "min" else (gain > 0):
                    self.best_at = number
            self.best, self.best_after = (names[0], improving), (names[0], direction)
            if self.best_at != len(values) - 1:
                return

    def tensors(self) -> dict[str, State]:
        """Returns kind -> tensors: what a run's files hold, besides its last weights."""
        of_replicas = {f".buffers{replica}": buffers for replica, buffers in enumerate(self.buffers)}
        return {".saved": self.saved, ".raw": self.raw, ".outputs": self.outputs, **of_replicas}


def _tensors(state: Mapping[str, object]) -> State:
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def _trained(model: nn.Module) -> set[str]:
    """The trained parameters, and the buffers beside them in their modules: what Job(save='trainable') saves."""
    names = set()
    for prefix, module in model.named_modules(remove_duplicate=False):
        beside = {**module._parameters, **module._buffers}
        if any(p is not None and p.requires_grad for p in module._parameters.values()):
            still = {name for name, p in module._parameters.items() if p is not None and not p.requires_grad}
            names |= {f"{prefix}.{name}".lstrip(".") for name in beside.keys() - still}
    return names
