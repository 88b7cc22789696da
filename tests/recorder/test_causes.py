"""`samestep check` names a cause where it was tried and explains what differs: what only looks like it is not named."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from planting import Edit, with_patches
from recorder.plant import checked, text_of
from samestep.records.findings import CheckResults, Finding

sys.path.insert(0, str(Path(__file__).parents[1] / "twins"))

from corpus.faults.by_hand import FAULTS, LAYERS
from corpus.healthy import ranks_of
from corpus.twin import Fault, Healthy
from corpus.twin import text_of as text_of_twin

GRADIENT = "replayed gradient"
PENALTY = "0.001 * sum(p.square().sum() for p in model.parameters())"


def found(results: CheckResults, question: str) -> Finding:
    return next(finding for finding in results.findings if finding.question == question)


# The mean over the tokens of all ranks, and a penalty that is the same on each rank; and the mean over its own ones.
OF_OWN_TOKENS = (
    "            tokens = kept.sum()\n            dist.all_reduce(tokens)\n"
    "            tokens = tokens / dist.get_world_size()\n"
)
IGNORED = (
    "            labels = (tokens_in * 3 % 20).masked_fill(kept == 0, -100)\n"
    f"            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + {PENALTY}\n"
)
MEAN = "            loss = (losses * kept.flatten()).sum() / tokens\n"
PENALISED = MEAN.replace("tokens\n", f"tokens + {PENALTY}\n")


@pytest.mark.check
@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (Edit(MEAN, PENALISED), ""),
        (Edit(OF_OWN_TOKENS + MEAN, IGNORED), "mean_of_rank_means"),
        (Edit(OF_OWN_TOKENS + MEAN, f"            tokens = kept.sum()\n{PENALISED}"), "mean_of_rank_means"),
    ],
    ids=["all tokens", "ignored targets", "own tokens"],
)
def test_a_mean_of_means_is_named_beside_a_penalty(change: Edit, cause: str, tmp_path: Path) -> None:
    results = checked(text_of("tokens", change), tmp_path, "--steps", "3")
    gradient = found(results, GRADIENT)
    assert gradient.answer == ("differs" if cause else "right"), gradient
    assert not cause or gradient.message.id == cause, gradient


LOSS = "loss = F.cross_entropy(model(rows), targets)"
STANDARDISED = '''
class Standardised(nn.Linear):
    """A linear layer whose weights are standardised over its outputs."""

    def forward(self, x):
        return F.linear(x, self.weight / self.weight.std(0), self.bias)


def main('''


@pytest.mark.check
@pytest.mark.parametrize(
    ("loss", "answer", "cause"),
    [
        ("F.cross_entropy(logits, targets) + 0.1 * logits.square().mean()", "right", ""),
        ("F.cross_entropy(logits, targets) + 0.1 * logits.square().sum()", "differs", "loss_of_same_outputs_apart"),
        ("F.cross_entropy(logits / logits.std(-2), targets)", "unknown", "loss_normalises_own_rows"),
    ],
    ids=["mean", "sum over rows", "over its own rows"],
)
def test_a_deviation_of_weights_in_the_model_hides_no_mistake_of_the_loss(
    loss: str, answer: str, cause: str, tmp_path: Path
) -> None:
    model = Edit("\ndef main(", STANDARDISED), Edit("nn.Linear(8, 16)", "Standardised(8, 16)")
    text = text_of("ddp", *model, Edit(LOSS, f"logits = model(rows)\n            loss = {loss}"))
    gradient = found(checked(text, tmp_path, "--steps", "3"), GRADIENT)
    assert gradient.answer == answer and (not cause or gradient.message.id == cause), gradient


@pytest.mark.check
def test_a_loss_that_each_rank_divides_by_its_own_value_is_no_mean_of_means(tmp_path: Path) -> None:
    """The ranks have as many rows; nor is it a matter of what DDP gathers, though all losses are one."""
    divided = f"{LOSS}\n            loss = loss / loss.detach()"
    gradient = found(checked(text_of("ddp", Edit(LOSS, divided)), tmp_path, "--steps", "3"), GRADIENT)
    assert (gradient.answer, gradient.message.id) == ("differs", "loss_depends_on_ranks"), gradient


@pytest.mark.check
def test_a_penalty_on_the_weights_is_no_sum_over_rows(tmp_path: Path) -> None:
    """What differs is another term of the loss."""
    loss = f"F.cross_entropy(logits, targets) + 0.1 * logits.square().mean() / dist.get_world_size() + {PENALTY}"
    text = text_of("ddp", Edit(LOSS, f"logits = model(rows)\n            loss = {loss}"))
    gradient = found(checked(text, tmp_path, "--steps", "3"), GRADIENT)
    assert gradient.message.id == "loss_of_same_outputs_apart", gradient
    assert gradient.message.fields["weight"] is None


STEP = "            optimizer.step()\n"


@pytest.mark.check
@pytest.mark.parametrize(
    ("limit", "answer", "said"),
    [
        ("float('inf')", "right", "nothing_is_clipped"),
        ("2000.0", "unknown", "no_step_reached_the_limit"),
    ],
)
def test_a_norm_that_is_measured_is_no_clipping(limit: str, answer: str, said: str, tmp_path: Path) -> None:
    clipped = f"            nn.utils.clip_grad_norm_(module.parameters(), {limit})\n{STEP}"
    clipping = found(checked(text_of("pipeline", Edit(STEP, clipped)), tmp_path, "--steps", "3"), "clipping")
    assert (clipping.answer, clipping.message.id) == (answer, said), clipping


LOGGED = """            logged = [torch.zeros(1) for _ in range(dist.get_world_size(TENSOR))]
            dist.all_gather(logged, loss.view(1), group=TENSOR)
            loss.backward()
"""


def planted(kind: str, arguments: str = "") -> Fault:
    return next(f for f in FAULTS if (f.script, f.kind) == (LAYERS, kind) and arguments in f.arguments)


@pytest.mark.check
@pytest.mark.parametrize(
    "twin",
    [Healthy(LAYERS, ""), planted("gradient_incomplete_along_axis")],
    ids=["right", "reduction left out"],
)
def test_a_gather_that_logs_cuts_no_gradient(twin: Healthy | Fault, tmp_path: Path) -> None:
    text = with_patches(text_of_twin(twin), Edit("            loss.backward()\n", LOGGED))
    results = checked(text, tmp_path, "--steps", "3", nproc=ranks_of(twin))
    gradient = found(results, GRADIENT)
    assert isinstance(twin, Fault) == (gradient.answer == "differs"), gradient
    assert not isinstance(twin, Fault) or gradient.message.id == twin.kind, gradient


@pytest.mark.check
def test_own_clipping_by_the_norm_of_pieces_is_named_first(tmp_path: Path) -> None:
    """What follows, weights that come apart, and what it looks like, a loss of another weight, are no findings."""
    fault = planted("clipped_by_local_norms", "--clip 0.3")
    results = checked(
        text_of_twin(fault), tmp_path, "--steps", "3", nproc=ranks_of(fault), script_arguments=fault.arguments.split()
    )
    assert [f.message.id for f in results.findings if f.answer == "differs"] == [fault.kind], results.findings
    weight = next((f.message.id for f in results.findings if f.question == "loss weight"), "")
    assert weight in ("", "scaled_by_own_code")
