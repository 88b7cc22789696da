"""Job(phases=…): several optimizers take their steps in turn, the same under every engine."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from conformance import jobs_phases
from conformance.table import EXACT
from inspected_job import inspected_job
from lane_marks import in_turn, on_engines
from mutations.plant import patched
from planting import FileFault
from ranks import Ranks, engine_facts, prove, skip_unless_here
from samestep import Job, Phase, Recipe, reference
from samestep.commands.engine_rows import refusal
from samestep.data.loader import batches
from samestep.data.schedule import schedule_of
from samestep.engine import Layout
from samestep.errors import UserError
from samestep.job.phases import parameters_of
from samestep.message import Message
from samestep.rank.step import ActivePhase
from samestep.tasks.inspect.dry_run import dry_step
from samestep.world import World

JOBS = f"{Path(__file__).parent}/jobs_phases.py"
ENGINES = ["single", "split", *(name for name in EXACT if name != "deepspeed")]  # which refuses phases
FAST = {("gan", "ddp", 2), ("actor_critic", "ddp", 2), ("actor_critic", "zero", 2)}


def sizes_of(engine: str) -> tuple[int, ...]:
    return (1,) if engine in ("single", "split") else (2, 3) if engine in ("ddp", "fsdp") else (2,)


CASES = on_engines(("gan", "actor_critic", "contrastive"), ENGINES, sizes_of, FAST)


@pytest.mark.parametrize(("name", "engine", "size"), CASES)
def test_ranks_take_the_references_step(
    name: str, engine: str, size: int, ranks: Callable[..., Ranks], reference_rank: Ranks
) -> None:
    skip_unless_here(engine, size)
    verdict = prove(reference_rank, ranks(size, engine), f"{JOBS}:{name}", engine)
    assert verdict.verdict == "same", verdict


MIXED = """
                    for p in [p for group in groups for p in group["params"]]:
                        for other in [o for o in self.state if o.shape == p.shape]:
                            self.state[p] = self.state[other]
"""
IN_LOSS = "        self.micro_batch = micro_batch = batch.micro_batch\n"
FAULTS = [
    (
        "gan",
        "a step trains the other phase, too",
        "rank/step.py",
        "requires_grad_(number == phase)",
        "requires_grad_()",
    ),
    (
        "gan",
        "the phases in another order",
        "training.py",
        IN_LOSS,
        "        from dataclasses import replace\n\n        last = len(self.job.phases) - 1\n"
        "        batch = replace(batch, micro_batch=replace(batch.micro_batch, phase=last - batch.micro_batch.phase))\n"
        + IN_LOSS,
    ),
    (
        "gan",
        "gradients cleared once for all phases",
        "engines/ddp.py",
        "                optimizer.zero_grad()\n",
        "                if batch.micro_batch.phase == 0:\n                    optimizer.zero_grad()\n",
    ),
    (
        "contrastive",
        "the optimizers' states mixed",
        "job/phases.py",
        "optimizer.state = groups, self.state\n",
        "optimizer.state = groups, self.state" + MIXED,
    ),
    (
        "gan",
        "the criterion of the first phase in all",
        "training.py",
        "loss = job.criterion(output, batch)",
        "loss = self.job.of_phases()[0].criterion(output if micro_batch.phase == 0 else (output, output), batch)",
    ),
    (
        "gan",
        "the rate moves after each phase",
        "job/fields.py",
        "len(self.phases) - 1)  #",
        "batch.micro_batch.phase)  #",
    ),
    (
        "gan",
        "another micro-batch's rows",
        "data/loader.py",
        "before = loaded_batches[micro_batch.micro]",
        "before = loaded_batches[0]",
    ),
    ("actor_critic", "averages of all parameters", "rank/weights.py", "if parameter.requires_grad  #", "if True  #"),
]


@pytest.mark.parametrize(
    ("job", "name", "file", "old", "new"),
    [pytest.param(*fault, marks=in_turn(4, n) if n else (), id=fault[1]) for n, fault in enumerate(FAULTS)],
)
def test_a_planted_fault_is_caught(
    job: str, name: str, file: str, old: str, new: str, reference_rank: Ranks, tmp_path: Path
) -> None:
    source = patched(FileFault(name, file, old, new), tmp_path)
    with Ranks(2, source) as own:
        verdict = prove(reference_rank, own, f"{JOBS}:{job}", "ddp")
    assert verdict.verdict == "differs", verdict


def test_it_is_the_loop_of_two_optimizers() -> None:
    """Two epochs of a GAN in one process, as a script writes them."""

    def model() -> nn.Module:
        built = jobs_phases.gan().model().double()
        built.D[1].p = 0.0
        return built

    rows = TensorDataset(jobs_phases.X[:49].double())
    job = replace(jobs_phases.gan(), model=model, train=rows, shuffle=False)
    gan: Any = model()
    optimizers = [
        phase.optimizer.cls(net.parameters(), **phase.optimizer.settings)
        for phase, net in zip(job.phases, (gan.D, gan.G))
    ]
    for count in range(10):
        epoch, first = count // 5, count % 5 * 12
        noise, real = reference.fetch(job, list(range(first, min(first + 12, 49))), epoch, "cpu")
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = 1e-2 * 0.8**count
        gan.D.zero_grad()
        fake = gan.G(noise)
        (jobs_phases.judged(gan.D(real), 1.0) + jobs_phases.judged(gan.D(fake.detach()), 0.0)).backward()
        nn.utils.clip_grad_norm_(gan.D.parameters(), 0.5)
        optimizers[0].step()
        gan.G.zero_grad()
        jobs_phases.judged(gan.D(fake), 1.0).backward()
        nn.utils.clip_grad_norm_(gan.G.parameters(), 0.5)
        optimizers[1].step()
    for replicas in (1, 2):
        state = reference.play(job, Layout(replicas), 20).state
        assert max(float((state[name] - t).abs().max()) for name, t in gan.state_dict().items()) < 1e-12


def test_a_batch_is_loaded_once_for_all_phases() -> None:
    read: list[int] = []

    class Counted(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            read.append(index)
            return super().__getitem__(index)

    job = replace(jobs_phases.gan(), train=Counted(jobs_phases.X[:49]))
    schedule = schedule_of(job, 2)
    assert (schedule.steps_per_epoch, schedule.rows_of(10), schedule.rows_of(3)) == (10, 98, 36)
    assert schedule.smallest_micro_batch() == (1, 8, 0)
    assert schedule.without_rows() == (8, 0)
    seen = list(batches(job, World(size=2), schedule, 9))
    assert [(b.micro_batch.step, b.micro_batch.phase, b.micro_batch.micro) for b in seen[:4]] == [
        (0, 0, 0),
        (0, 0, 1),
        (1, 1, 0),
        (1, 1, 1),
    ]
    assert all(torch.equal(a.inputs, b.inputs) for a, b in zip(seen[:2], seen[2:4]))
    assert len(read) == 24 + 1 + 2  # of four batches a half each, the last row, and two that fill a micro-batch
    assert [b.completes_epoch for b in batches(job, World(size=2), schedule, 10)].index(True) == 19


def test_only_the_phase_that_has_the_turn_needs_gradients() -> None:
    job = jobs_phases.actor_critic()
    model = job.model()
    active, trained = ActivePhase(job.phases, model), [name for name, p in model.named_parameters() if p.requires_grad]
    active.activate(1)
    assert [name for name, p in model.named_parameters() if p.requires_grad] == ["act.weight", "act.bias"]
    active.end()
    assert [name for name, p in model.named_parameters() if p.requires_grad] == trained


def test_the_optimizers_states_can_be_loaded() -> None:
    job = jobs_phases.contrastive()
    models = [job.model(), job.model()]
    first, second = (job.optimizer.build(model) for model in models)
    for optimizer, model in ((first, models[0]), (first, models[0])):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    models[1].load_state_dict(models[0].state_dict())
    second.load_state_dict(copy.deepcopy(first.state_dict()))  # else they share Adam's count of steps
    for optimizer, model in ((first, models[0]), (second, models[1])):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    assert all(torch.equal(*pair) for pair in zip(models[0].parameters(), models[1].parameters()))


def test_the_dry_step_names_the_phase() -> None:
    job = jobs_phases.actor_critic()
    critic, actor = job.phases
    wrong = replace(job, phases=(critic, replace(actor, criterion=critic.criterion)))
    says = "^phase 'actor': the criterion's loss does not depend on any parameter that it trains"
    with pytest.raises(UserError, match=says):
        dry_step(wrong, schedule_of(wrong, 1), wrong.model(), "cpu")
    assert dry_step(job, schedule_of(job, 1), job.model(), "cpu").unused == []


SGD = Recipe(torch.optim.SGD, {"lr": 0.1})


@pytest.mark.parametrize(
    ("parameters", "says"),
    [
        (("D", "X"), "phase 'two' has no parameters to train; name one of the model's modules"),
        (("D", "G.0"), "G.1.weight is trained and belongs to no phase"),
        (("D", ("G", "D.3")), "D.3.weight belongs to the phases 'one' and 'two'"),
        ((lambda model: model.parameters(), "G"), "G.0.weight belongs to the phases 'one' and 'two'"),
    ],
)
def test_each_parameter_has_one_phase(parameters: tuple[Any, Any], says: str) -> None:
    phases = [Phase(n, p, lambda o, b: o.mean(), SGD) for n, p in zip(("one", "two"), parameters)]
    with pytest.raises(UserError, match=says):
        parameters_of(phases, jobs_phases.Gan())


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"phases": "two"}, "phases is 'two'; give a tuple of Phase"),
        ({"optimizer": SGD}, "optimizer and phases each say how the job is optimized; leave optimizer out"),
        ({"phases": [Phase("a", "D", lambda o, b: o, SGD)] * 2}, "the phases are called a, a; give each a name"),
        ({"phases": [Phase("a", "D", nn.MSELoss(), SGD)]}, r"phase 'a': criterion is nn.MSELoss\(\)"),
        ({"phases": [Phase("a", "D", lambda o, b: o, torch.optim.SGD)]}, "phase 'a': optimizer is the class SGD"),
        ({"phases": ()}, "optimizer is None; each engine builds"),
    ],
)
def test_phases_that_cannot_be_taken_are_refused(changed: dict[str, Any], says: str) -> None:
    given = {"model": jobs_phases.Gan, "phases": jobs_phases.gan().phases, "train": TensorDataset(jobs_phases.X)}
    with pytest.raises(UserError, match=says):
        Job(**given | {"global_batch": 4} | changed)


def test_who_takes_one_optimizer_says_so() -> None:
    facts = inspected_job(f"{JOBS}:gan", {}, 2, steps=None)
    assert facts.optimizer.phases == {"discriminator": "Adam", "generator": "RMSprop"}
    assert (facts.proof.steps, facts.data.steps_per_epoch) == (8, 10)
    assert refusal(engine_facts("ddp", 2), facts) is None
    why = {"engine": "deepspeed", "phases": ["discriminator", "generator"], "others": ["ddp", "zero"]}
    assert refusal(engine_facts("deepspeed", 2), facts, ["ddp", "zero"]) == Message("engine_takes_one_optimizer", why)
    muon = {"generator": "Muon"}
    unfit = refusal(engine_facts("fsdp", 2), replace(facts, optimizer=replace(facts.optimizer, phases=muon)))
    assert unfit and (unfit.id, unfit.fields["optimizer"]) == ("engine_cannot_take_optimizer", "Muon")
