# ruff: noqa: E501
"""Fresh odd jobs: what users write. Each docstring begins with the right answer to whether N ranks train the job as one
process does: "yes", "as expected", "no" or "not known"; the sentence after it says why."""

from __future__ import annotations

import copy
import random
import sys
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

sys.path.insert(0, "tests")  # the command runs this file by itself

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset, TensorDataset, default_collate

from one_process_jobs.parts import WORDS, X, Y, make, mean_loss, mlp, odd
from samestep import Batch, Job, Recipe


def _random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


ROWS = 64
VIEW_1 = X + 0.1 * torch.randn(X.shape, generator=_random(10))
VIEW_2 = X + 0.1 * torch.randn(X.shape, generator=_random(11))
TARGET = X[:, :4].sum(1) + 0.3 * torch.randn(ROWS, generator=_random(12))
IMAGES = torch.randn(ROWS, 1, 8, 8, generator=_random(13))
MASKS = (IMAGES + 0.5 * torch.randn(IMAGES.shape, generator=_random(14)) > 0.7).float()
SERIES = torch.randn(ROWS, 12, 5, generator=_random(15))
SGD = Recipe(torch.optim.SGD, {"lr": 0.05, "momentum": 0.9})
LONG = [
    torch.randint(2, 40, (int(n),), generator=_random(100 + i))
    for i, n in enumerate(torch.randint(2, 31, (ROWS,), generator=_random(16)))
]


class Rows(Dataset[Any]):
    """A dataset of dicts, tuples or whatever `read` returns for an index."""

    def __init__(self, read: Callable[[int], Any], length: int = ROWS) -> None:
        self.read, self.length = read, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.read(int(index))


# ------------------------------------------------------------------------------------------------------------- yes


class Speech(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(5, 16, 3, padding=1)
        self.head = nn.Linear(16, 7)

    def forward(self, series: Tensor) -> Tensor:
        hidden = torch.relu(self.conv(series.transpose(1, 2))).transpose(1, 2)
        return self.head(hidden).log_softmax(-1)


@odd
def ctc_speech() -> Job:
    """yes (CTC with reduction "mean" on transcripts of unequal length)
    Torch divides each row's loss by that row's target length and then takes the mean over the rows."""
    lengths = torch.randint(1, 5, (ROWS,), generator=_random(20))
    labels = torch.randint(1, 7, (ROWS, 4), generator=_random(21))

    def criterion(output: Tensor, batch: Batch) -> Tensor:
        log_probs = output.transpose(0, 1)
        frames = torch.full((log_probs.shape[1],), log_probs.shape[0], dtype=torch.long)
        return F.ctc_loss(log_probs, batch.data["labels"], frames, batch.data["lengths"], blank=0, zero_infinity=True)

    return make(
        Speech,
        criterion,
        train=Rows(lambda i: {"series": SERIES[i], "labels": labels[i], "lengths": lengths[i]}),
        forward=lambda model, batch: model(batch.data["series"]),
    )


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(12, 16), nn.Softplus(), nn.Linear(16, 16), nn.Softplus(), nn.Linear(16, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).squeeze(-1)


def _r1(reduce: Callable[[Tensor], Tensor]) -> Job:
    def forward(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        x = batch.inputs.detach().clone().requires_grad_()
        logits = model(x)
        (gradient,) = torch.autograd.grad(reduce(logits), x, create_graph=True)
        return logits, gradient.square().sum(1)

    def criterion(output: tuple[Tensor, Tensor], batch: Batch) -> Tensor:
        logits, penalty = output
        return F.binary_cross_entropy_with_logits(logits, batch.targets) + 5.0 * penalty.mean()

    return make(Critic, criterion, forward=forward, train=TensorDataset(X, (Y == 0).float()))


@odd
def r1_of_sum() -> Job:
    """yes (R1 gradient penalty of a discriminator, by the gradient of logits.sum())
    The gradient of the sum at a row's input is that row's own gradient, and the penalty is the mean over rows."""
    return _r1(lambda logits: logits.sum())


class Segmenter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 1, 3, padding=1)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class DiceBCE(nn.Module):
    def __init__(self, smooth: float = 1.0) -> None:
        super().__init__()
        self.smooth = smooth

    def forward(self, logits: Tensor, masks: Tensor) -> Tensor:
        p, t = logits.sigmoid().flatten(1), masks.flatten(1)
        dice = (2 * (p * t).sum(1) + self.smooth) / (p.sum(1) + t.sum(1) + self.smooth)
        return (1 - dice).mean() + F.binary_cross_entropy_with_logits(logits, masks)


@odd
def dice_by_image() -> Job:
    """yes (soft dice of each image + BCE over all pixels)
    Dice's ratio is taken within a row, and all rows have the same number of pixels."""
    loss = DiceBCE()
    return make(Segmenter, lambda output, batch: loss(output, batch.targets), train=TensorDataset(IMAGES, MASKS))


class TiedBert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(21, 8)
        self.mix = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.decoder = nn.Linear(8, 21)
        self.decoder.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        return self.decoder(self.mix(self.embedding(words)))


@odd
def three_masked_words() -> Job:
    """yes (masked language model with ignore_index, tied weights; each text has exactly three masked words)
    The mean over masked words is the mean over rows, because all rows have as many masked words."""

    def read(index: int) -> tuple[Tensor, Tensor]:
        places = torch.randperm(9, generator=_random(1000 + index))[:3]
        masked = torch.zeros(9, dtype=torch.bool)
        masked[places] = True
        return torch.where(masked, 1, WORDS[index]), torch.where(masked, WORDS[index], -100)

    def criterion(output: Tensor, batch: Batch) -> Tensor:
        return F.cross_entropy(output.reshape(-1, 21), batch.targets.reshape(-1), ignore_index=-100)

    return make(TiedBert, criterion, train=Rows(read))


class TwoHeads(nn.Module):
    """Kendall, Gal and Cipolla: learned log variances weigh the losses of two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 16), nn.ReLU())
        self.classes, self.value = nn.Linear(16, 3), nn.Linear(16, 1)
        self.log_vars = nn.Parameter(torch.zeros(2))

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        hidden = self.body(batch["features"])
        cls = F.cross_entropy(self.classes(hidden), batch["label"])
        reg = F.mse_loss(self.value(hidden).squeeze(1), batch["value"])
        loss = (-self.log_vars[0]).exp() * cls + 0.5 * (-self.log_vars[1]).exp() * reg + 0.5 * self.log_vars.sum()
        return {"loss": loss, "cls": cls.detach(), "reg": reg.detach()}


@odd
def uncertainty_weights() -> Job:
    """yes (two heads weighed by learned uncertainties, the loss computed in forward)
    For given weights the loss is linear in the two means, so that means of equal parts average to it."""
    return make(
        TwoHeads,
        lambda output, batch: output["loss"],
        forward=lambda model, batch: model(batch.data),
        train=Rows(lambda i: {"features": X[i], "label": Y[i], "value": TARGET[i]}),
    )


class Annealed(nn.Module):
    """Anneals its bottleneck's penalty; `count` says by how much a forward pass of `n` rows moves the schedule."""

    def __init__(self, count: Callable[[int], int], total: int) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(12, 6), nn.Linear(6, 12)
        self.count, self.total = count, total
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.training:
            self.seen += self.count(len(x))
        code = torch.tanh(self.encode(x))
        beta = (self.seen.float() / self.total).clamp(max=1.0)
        return self.decode(code), code, beta


def _annealed(output: tuple[Tensor, Tensor, Tensor], batch: Batch) -> Tensor:
    made, code, beta = output
    return F.mse_loss(made, batch.inputs) + beta * code.square().sum(1).mean()


@odd
def anneal_by_steps() -> Job:
    """yes (a buffer counts the forward passes and anneals a penalty)
    Each rank counts one pass a step, as one process does, whatever its rows are."""
    return make(lambda: Annealed(lambda rows: 1, 5), _annealed)


class Byol(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Sequential(nn.Linear(12, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 8))
        self.predictor = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    @torch.no_grad()
    def move_target(self, tau: float = 0.9) -> None:
        for slow, fast in zip(self.target.parameters(), self.online.parameters()):
            slow.mul_(tau).add_(fast.detach(), alpha=1 - tau)

    def forward(self, one: Tensor, two: Tensor) -> Tensor:
        if self.training:
            self.move_target()
        p1, p2 = self.predictor(self.online(one)), self.predictor(self.online(two))
        with torch.no_grad():
            z1, z2 = self.target(one), self.target(two)
        return 2 - F.cosine_similarity(p1, z2) - F.cosine_similarity(p2, z1)


@odd
def byol() -> Job:
    """yes (BYOL: two views of the same row, a target network that is an EMA of the weights)
    A row is compared with itself alone, and the target follows weights that all ranks share."""
    return make(
        Byol,
        lambda output, batch: output.mean(),
        forward=lambda model, batch: model(batch.inputs, batch.targets),
        train=TensorDataset(VIEW_1, VIEW_2),
    )


class GraphNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.message, self.last = nn.Linear(5, 16), nn.Linear(16, 16), nn.Linear(16, 2)

    def forward(self, graphs: dict[str, Tensor]) -> Tensor:
        hidden = torch.relu(self.first(graphs["nodes"]))
        source, sink = graphs["edges"]
        hidden = hidden + torch.zeros_like(hidden).index_add(0, sink, self.message(hidden)[source])
        many = len(graphs["label"])
        total = hidden.new_zeros(many, 16).index_add(0, graphs["graph"], hidden)
        nodes = torch.bincount(graphs["graph"], minlength=many).unsqueeze(1)
        return self.last(total / nodes)


def _graph(index: int) -> tuple[Tensor, Tensor, Tensor]:
    nodes = 3 + index % 6
    features = torch.randn(nodes, 5, generator=_random(2000 + index))
    edges = torch.randint(0, nodes, (2, 2 * nodes), generator=_random(3000 + index))
    return features, edges, (features.sum() > 0).long()


def _collate_graphs(samples: list[Any]) -> dict[str, Tensor]:
    """As PyTorch Geometric's: one large graph without edges between the small ones."""
    offsets = np.cumsum([0] + [len(nodes) for nodes, _, _ in samples[:-1]])
    return {
        "nodes": torch.cat([nodes for nodes, _, _ in samples]),
        "edges": torch.cat([edges + int(offset) for (_, edges, _), offset in zip(samples, offsets)], 1),
        "graph": torch.cat([torch.full((len(nodes),), i) for i, (nodes, _, _) in enumerate(samples)]),
        "label": torch.stack([label for _, _, label in samples]),
    }


@odd
def graphs_by_readout() -> Job:
    """yes (graphs of unequal size in one disconnected graph, pooled by the mean of each one's nodes)
    The readout has one row a graph, no edge joins two graphs, and the loss is the mean over graphs."""
    return make(
        GraphNet,
        lambda output, batch: F.cross_entropy(output, batch.data["label"]),
        forward=lambda model, batch: model(batch.data),
        train=Rows(_graph),
        collate=_collate_graphs,
    )


@odd
def earth_mover() -> Job:
    """yes (NIMA's earth mover's distance between distributions of scores: cumsum and sqrt within a row)
    Nonlinear functions are taken of each row by itself, before the mean over rows."""
    scores = torch.rand(ROWS, 3, generator=_random(22))
    scores = scores / scores.sum(1, keepdim=True)

    def criterion(output: Tensor, batch: Batch) -> Tensor:
        difference = output.softmax(1).cumsum(1) - batch.targets.cumsum(1)
        return torch.sqrt(difference.square().mean(1) + 1e-8).mean()

    return make(mlp(), criterion, train=TensorDataset(X, scores))


class Proxies(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 8))
        self.proxies = nn.Parameter(torch.randn(3, 8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        proxies = F.normalize(self.proxies, dim=1)
        return -torch.cdist(F.normalize(self.body(x), dim=1), proxies).square(), proxies


@odd
def proxy_nca() -> Job:
    """yes (Proxy-NCA: a softmax over distances to learned proxies, which are kept apart by a penalty)
    Rows are compared with weights and not with rows; the penalty depends on weights alone and is alike on each rank."""

    def criterion(output: tuple[Tensor, Tensor], batch: Batch) -> Tensor:
        distances, proxies = output
        gram = proxies @ proxies.T
        apart = (gram - torch.eye(3, device=gram.device)).square().sum()
        return F.cross_entropy(3.0 * distances, batch.targets) + 0.1 * apart

    return make(Proxies, criterion)


@dataclass
class Visits:
    x: Tensor
    label: Tensor
    weight: Tensor


@odd
def weighted_visits() -> Job:
    """yes (a dataclass as batch; importance weights come with the rows, class weights and label smoothing besides)
    The weighted losses are divided by the number of rows and not by the sum of weights."""
    importance = 0.2 + 3 * torch.rand(ROWS, generator=_random(23))
    classes = torch.tensor([0.5, 1.0, 4.0])

    def criterion(output: Tensor, batch: Batch) -> Tensor:
        visits = batch.data
        losses = F.cross_entropy(output, visits.label, reduction="none", label_smoothing=0.1)
        return (visits.weight * classes.to(losses.device)[visits.label] * losses).sum() / len(losses)

    return make(
        mlp(),
        criterion,
        train=Rows(lambda i: (X[i], Y[i], importance[i])),
        collate=lambda samples: Visits(*(torch.stack(each) for each in zip(*samples))),
        forward=lambda model, batch: model(batch.data.x),
    )


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 8, padding_idx=0)
        self.lstm = nn.LSTM(8, 8, batch_first=True, bidirectional=True)
        self.head = nn.Linear(16, 2)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(
            self.embedding(batch["words"]), batch["lengths"].cpu(), batch_first=True
        )
        _, (hidden, _) = self.lstm(packed)
        return self.head(torch.cat([hidden[0], hidden[1]], 1))


def _sorted_texts(samples: list[tuple[Tensor, int]]) -> dict[str, Tensor]:
    samples = sorted(samples, key=lambda sample: len(sample[0]), reverse=True)
    return {
        "words": nn.utils.rnn.pad_sequence([words for words, _ in samples], batch_first=True),
        "lengths": torch.tensor([len(words) for words, _ in samples]),
        "label": torch.tensor([label for _, label in samples]),
    }


@odd
def packed_texts() -> Job:
    """yes (a bidirectional LSTM on packed texts that collate sorts by length)
    Packing hides the padding, labels are sorted with their texts, and the loss is a mean over texts."""
    return make(
        Reader,
        lambda output, batch: F.cross_entropy(output, batch.data["label"]),
        forward=lambda model, batch: model(batch.data),
        train=Rows(lambda i: (LONG[i], int(LONG[i][0] > 20))),
        collate=_sorted_texts,
    )


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return -ctx.scale * gradient, None


class Dann(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 16), nn.ReLU())
        self.classes, self.domain = nn.Linear(16, 3), nn.Linear(16, 2)
        self.body[0].weight.register_hook(lambda gradient: 0.5 * gradient)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(x)
        return self.classes(hidden), self.domain(Reverse.apply(hidden, 0.3))


Visit = namedtuple("Visit", ["x", "label", "domain"])


@odd
def domain_adversarial() -> Job:
    """yes (DANN with gradient reversal, a hook that halves a gradient, a named tuple as batch)
    Reversal and hook are linear in the gradient; rows without label count as 0 in a mean over all rows."""

    def criterion(output: tuple[Tensor, Tensor], batch: Batch) -> Tensor:
        classes, domain = output
        labelled = (batch.data.domain == 0).float()
        losses = F.cross_entropy(classes, batch.data.label, reduction="none") * labelled
        return losses.mean() + F.cross_entropy(domain, batch.data.domain)

    return make(
        Dann,
        criterion,
        train=Rows(lambda i: Visit(X[i], Y[i], int(i % 3 == 0))),
        forward=lambda model, batch: model(batch.data.x),
    )


@odd
def spectral_hinge() -> Job:
    """yes (a discriminator with spectral norm and a hinge loss)
    The power iteration depends on the weights and on the number of forward passes, which are alike on each rank."""

    def network() -> nn.Module:
        spectral = nn.utils.parametrizations.spectral_norm
        return nn.Sequential(spectral(nn.Linear(12, 16)), nn.LeakyReLU(0.2), spectral(nn.Linear(16, 1)), nn.Flatten(0))

    def criterion(output: Tensor, batch: Batch) -> Tensor:
        return F.relu(1 - batch.targets * output).mean()

    return make(network, criterion, train=TensorDataset(X, torch.where(Y == 0, 1.0, -1.0)))


class Spectral(nn.Module):
    """A layer of a Fourier neural operator; the complex weights are kept as pairs of real ones."""

    def __init__(self, width: int, modes: int) -> None:
        super().__init__()
        self.modes = modes
        self.weight = nn.Parameter(torch.randn(width, width, modes, 2) / width)
        self.skip = nn.Conv1d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x)
        kept = torch.einsum("bim,iom->bom", spectrum[..., : self.modes], torch.view_as_complex(self.weight))
        spectrum = F.pad(kept, (0, spectrum.shape[-1] - self.modes))
        return F.gelu(torch.fft.irfft(spectrum, n=x.shape[-1]) + self.skip(x))


class Operator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lift, self.drop = nn.Conv1d(1, 6, 1), nn.Conv1d(6, 1, 1)
        self.layers = nn.ModuleList([Spectral(6, 4), Spectral(6, 4)])

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.lift(x.unsqueeze(1))
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=False)
        return self.drop(hidden).squeeze(1)


@odd
def fourier_operator() -> Job:
    """yes (a Fourier neural operator with complex numbers, checkpointing, and the relative L2 error of each row)
    The transform goes along a row, and each row's error is divided by that row's norm before the mean over rows."""

    def criterion(output: Tensor, batch: Batch) -> Tensor:
        return ((output - batch.targets).norm(dim=1) / batch.targets.norm(dim=1)).mean()

    return make(Operator, criterion, train=TensorDataset(X, X.cumsum(1)))


class FineTuned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2)
        )
        self.head = nn.Linear(32, 3)
        norm = self.features[1]
        norm.running_mean.copy_(0.1 * torch.randn(8))
        norm.running_var.copy_(0.5 + torch.rand(8))

    def train(self, mode: bool = True) -> FineTuned:
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).flatten(1))


@odd
def frozen_batchnorm() -> Job:
    """yes (fine-tuning with BatchNorm that stays in eval mode; its scale and shift are trained)
    It normalises with the statistics of the pretraining, which are constants, and does not update them."""
    return make(FineTuned, train=TensorDataset(IMAGES, Y))


class Augmented(Dataset[Any]):
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = IMAGES[index]
        if random.random() < 0.5:
            image = image.flip(-1)
        image = torch.roll(image, int(np.random.randint(-1, 2)), 1)
        return image + 0.05 * torch.randn(image.shape), Y[index]


# ----------------------------------------------------------------------------------------------------- as expected


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, padding=1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(8) for _ in range(3)])
        self.convs = nn.ModuleList([nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in range(2)])
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.norms[0](self.stem(x)))
        inner = torch.relu(self.norms[1](self.convs[0](hidden)))
        hidden = torch.relu(hidden + self.norms[2](self.convs[1](inner)))
        return self.head(hidden.mean((2, 3)))


@odd
def small_resnet() -> Job:
    """as expected (a residual block with BatchNorm, on augmented images)
    BatchNorm normalises over a rank's own rows; the dataset's draws are keyed by the row and change nothing."""
    return make(Residual, train=Augmented(), optimizer=SGD)


@odd
def r_drop() -> Job:
    """as expected (R-Drop: the rows twice in one forward pass, KL between the two dropout masks' outputs)
    A row is compared with itself alone; only the masks depend on the ranks."""

    def criterion(output: Tensor, batch: Batch) -> Tensor:
        one, two = output.chunk(2)
        p, q = one.log_softmax(1), two.log_softmax(1)
        kl = F.kl_div(p, q, log_target=True, reduction="batchmean") + F.kl_div(
            q, p, log_target=True, reduction="batchmean"
        )
        return 0.5 * (F.cross_entropy(one, batch.targets) + F.cross_entropy(two, batch.targets)) + 0.5 * kl

    return make(
        mlp(nn.Dropout(0.3)), criterion, forward=lambda model, batch: model(torch.cat([batch.inputs, batch.inputs]))
    )


@odd
def mixup() -> Job:
    """as expected (mixup in forward, as in its authors' script)
    One lambda and one permutation are drawn on each rank, which mixes its own rows."""

    def forward(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        x = batch.inputs
        if not model.training:
            return model(x), torch.arange(len(x)), torch.ones(())
        share = torch.distributions.Beta(0.4, 0.4).sample().to(x.device)
        other = torch.randperm(len(x)).to(x.device)
        return model(share * x + (1 - share) * x[other]), other, share

    def criterion(output: tuple[Tensor, Tensor, Tensor], batch: Batch) -> Tensor:
        logits, other, share = output
        return share * F.cross_entropy(logits, batch.targets) + (1 - share) * F.cross_entropy(
            logits, batch.targets[other]
        )

    return make(mlp(), criterion, forward=forward)


def _cutmix(samples: list[Any]) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    images, labels = default_collate(samples)
    share = float(np.random.beta(1.0, 1.0))
    size = int(8 * (1 - share) ** 0.5)
    top, left = random.randint(0, 8 - size), random.randint(0, 8 - size)
    other = torch.randperm(len(images))
    images = images.clone()
    images[:, :, top : top + size, left : left + size] = images[other][:, :, top : top + size, left : left + size]
    kept = torch.full((len(images),), 1 - size * size / 64)
    return images, (labels, labels[other], kept)


@odd
def cutmix() -> Job:
    """as expected (CutMix in collate)
    The rectangle and the partners are drawn for the rows that a rank has."""

    def criterion(output: Tensor, batch: Batch) -> Tensor:
        label, other, kept = batch.targets
        one, two = (F.cross_entropy(output, each, reduction="none") for each in (label, other))
        return (kept * one + (1 - kept) * two).mean()

    def network() -> nn.Module:
        return nn.Sequential(nn.Conv2d(1, 8, 3, 2), nn.GELU(), nn.Flatten(), nn.Linear(72, 3))

    return make(network, criterion, train=TensorDataset(IMAGES, Y), collate=_cutmix)


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Embedding(50, 16)
        self.first, self.last = nn.Linear(12, 16), nn.Linear(16, 12)
        self.register_buffer("alphas", torch.cumprod(1 - torch.linspace(1e-4, 0.1, 50), 0))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        steps = torch.randint(0, 50, (len(x),), device=x.device)
        noise = torch.randn_like(x)
        alpha = self.alphas[steps].unsqueeze(1)
        noisy = alpha.sqrt() * x + (1 - alpha).sqrt() * noise
        return self.last(F.silu(self.first(noisy) + self.time(steps))), noise


@odd
def ddpm() -> Job:
    """as expected (a diffusion model: a time and a noise are drawn for each row in forward)
    Only the random numbers depend on the ranks; the loss is a mean over rows."""
    return make(Denoiser, lambda output, batch: F.mse_loss(*output))


class Vae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.mean, self.log_var = nn.Linear(64, 24), nn.Linear(24, 4), nn.Linear(24, 4)
        self.decode = nn.Sequential(nn.Linear(4, 24), nn.ReLU(), nn.Linear(24, 64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = torch.relu(self.encode(x.flatten(1)))
        mean, log_var = self.mean(hidden), self.log_var(hidden)
        code = mean + torch.randn_like(mean) * (0.5 * log_var).exp()
        return self.decode(code), mean, log_var


@odd
def vae_mean_of_rows() -> Job:
    """as expected (a VAE: BCE and KL summed over a row's pixels and codes, then the mean over rows)
    Only the reparametrisation's noise depends on the ranks."""

    def criterion(output: tuple[Tensor, Tensor, Tensor], batch: Batch) -> Tensor:
        made, mean, log_var = output
        bce = F.binary_cross_entropy_with_logits(made, batch.targets.flatten(1), reduction="none").sum(1)
        kl = -0.5 * (1 + log_var - mean.square() - log_var.exp()).sum(1)
        return (bce + kl).mean()

    return make(Vae, criterion, train=TensorDataset(MASKS, MASKS))


def _multiscale(samples: list[Any]) -> tuple[Tensor, Tensor]:
    signals, labels = default_collate(samples)
    length = random.choice([6, 8, 10, 12])
    start = random.randint(0, 12 - length)
    return signals[:, None, start : start + length], labels


@odd
def multiscale() -> Job:
    """as expected (multi-scale training: collate draws one length for all rows of the batch)
    Each rank draws its own length; given the crop, a row's loss is its own."""

    def network() -> nn.Module:
        return nn.Sequential(
            nn.Conv1d(1, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool1d(3), nn.Flatten(), nn.Linear(24, 3)
        )

    return make(network, collate=_multiscale)


class SkipGram(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.centre, self.context = nn.Embedding(21, 8), nn.Embedding(21, 8)

    def forward(self, centre: Tensor, context: Tensor) -> Tensor:
        negatives = torch.randint(0, 21, (len(centre), 5), device=centre.device)
        vector = self.centre(centre)
        positive = F.logsigmoid((vector * self.context(context)).sum(1))
        negative = F.logsigmoid(-torch.bmm(self.context(negatives), vector.unsqueeze(2)).squeeze(2)).sum(1)
        return -(positive + negative)


@odd
def skip_gram() -> Job:
    """as expected (word2vec with negative samples that forward draws from the vocabulary)
    Negatives are random words and not other rows' words; the loss is a mean over rows."""
    return make(
        SkipGram,
        lambda output, batch: output.mean(),
        forward=lambda model, batch: model(batch.inputs, batch.targets),
        train=TensorDataset(WORDS[:, 3], WORDS[:, 4]),
    )


# -------------------------------------------------------------------------------------------------------------- no


@odd
def r1_of_mean() -> Job:
    """no (R1 gradient penalty by the gradient of logits.mean())
    The gradient of the mean at a row's input is divided by the number of the rank's rows: the penalty grows by N squared."""
    return _r1(lambda logits: logits.mean())


@odd
def broadcast_mse() -> Job:
    """no (MSE of an output of shape (n, 1) and targets of shape (n,), which broadcast to (n, n))
    Each row's prediction is compared with the targets of all rows that stand beside it."""
    return make(
        lambda: nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 1)),
        lambda output, batch: F.mse_loss(output, batch.targets),
        train=TensorDataset(X, TARGET),
    )


class SequenceFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(21, 8)
        self.place = nn.Parameter(0.1 * torch.randn(9, 8))
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)
        self.head = nn.Linear(8, 2)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(words) + self.place).mean(1))


@odd
def forgot_batch_first() -> Job:
    """no (a transformer layer without batch_first that is given rows first)
    Attention goes over the rows of the batch, at each place of the text, and not over a text's words."""
    return make(SequenceFirst, train=TensorDataset(WORDS, (WORDS[:, 0] > 10).long()))


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 8, padding_idx=0)
        self.head = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.embedding(words).mean(1))


@odd
def padded_mean_pool() -> Job:
    """no (the mean over a padded text's embeddings, padding counted)
    The divisor is the length of the longest text in the rank's part, though padding adds zeros."""

    def collate(samples: list[Any]) -> tuple[Tensor, Tensor]:
        words, labels = zip(*samples)
        return nn.utils.rnn.pad_sequence(list(words), batch_first=True), torch.tensor(labels)

    return make(Bag, train=Rows(lambda i: (LONG[i], int(LONG[i][0] > 20))), collate=collate)


@odd
def information_maximisation() -> Job:
    """no (SHOT: each row's entropy is lowered, the entropy of the mean prediction is raised)
    The entropy of a mean over a rank's rows is not linear in the rows."""

    def criterion(output: Tensor, batch: Batch) -> Tensor:
        p = output.softmax(1)
        certain = -(p * (p + 1e-6).log()).sum(1).mean()
        mean = p.mean(0)
        diverse = -(mean * (mean + 1e-6).log()).sum()
        return 0.3 * F.cross_entropy(output, batch.targets) + certain - diverse

    return make(mlp(), criterion)


class CoxLoss(nn.Module):
    def forward(self, risk: Tensor, time: Tensor, event: Tensor) -> Tensor:
        order = time.argsort(descending=True)
        risk, event = risk[order], event[order]
        likelihood = risk - torch.logcumsumexp(risk, 0)
        return -(likelihood * event).sum() / event.sum().clamp(min=1)


@odd
def cox_survival() -> Job:
    """no (DeepSurv: Cox's partial likelihood)
    A patient's risk set is the rows of the rank's part that lived longer, and the divisor counts its events."""
    loss = CoxLoss()
    time = torch.rand(ROWS, generator=_random(30)) * torch.exp(-0.3 * TARGET)
    event = (torch.rand(ROWS, generator=_random(31)) < 0.7).float()
    return make(
        lambda: nn.Sequential(nn.Linear(12, 16), nn.SELU(), nn.Linear(16, 1), nn.Flatten(0)),
        lambda output, batch: loss(output, batch.data["time"], batch.data["event"]),
        forward=lambda model, batch: model(batch.data["x"]),
        train=Rows(lambda i: {"x": X[i], "time": time[i], "event": event[i]}),
    )


@odd
def batch_hard_triplets() -> Job:
    """no (batch-hard triplet loss on embeddings)
    Each anchor's hardest positive and negative are sought among the rows of the rank's part."""

    def criterion(output: Tensor, batch: Batch) -> Tensor:
        distance = torch.cdist(output, output)
        same = batch.targets[:, None] == batch.targets[None, :]
        positive = (distance * same).max(1).values
        negative = (distance + distance.detach().max(1, keepdim=True).values * same).min(1).values
        return F.relu(positive - negative + 0.3).mean()

    return make(lambda: nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 8)), criterion)


class FocalLoss(nn.Module):
    def __init__(self, alpha: float = 0.25, gamma: float = 2.0) -> None:
        super().__init__()
        self.alpha, self.gamma = alpha, gamma

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        ce = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
        p = logits.sigmoid()
        right = p * targets + (1 - p) * (1 - targets)
        alpha = self.alpha * targets + (1 - self.alpha) * (1 - targets)
        return (alpha * (1 - right) ** self.gamma * ce).sum() / targets.sum().clamp(min=1)


@odd
def retinanet_focal() -> Job:
    """no (RetinaNet's focal loss over anchors, divided by the number of positive anchors)
    Images have unequal numbers of positives, so that the ranks' divisors differ, and a mean of ratios is another ratio."""
    loss = FocalLoss()
    anchors = (torch.rand(ROWS, 10, generator=_random(32)) < 0.4 * torch.rand(ROWS, 1, generator=_random(33))).float()
    return make(
        lambda: nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 10)),
        lambda output, batch: loss(output, batch.targets),
        train=TensorDataset(X, anchors),
    )


class Switch(nn.Module):
    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(12, 8), nn.Linear(8, 3)
        self.router = nn.Linear(8, experts, bias=False)
        self.up = nn.Parameter(0.3 * torch.randn(experts, 8, 16))
        self.down = nn.Parameter(0.3 * torch.randn(experts, 16, 8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.relu(self.first(x))
        p = self.router(hidden).softmax(1)
        gate, chosen = p.max(1)
        inner = torch.relu(torch.einsum("bi,bio->bo", hidden, self.up[chosen]))
        made = torch.einsum("bi,bio->bo", inner, self.down[chosen])
        share = F.one_hot(chosen, p.shape[1]).float().mean(0)
        balance = p.shape[1] * (share * p.mean(0)).sum()
        return self.last(hidden + gate.unsqueeze(1) * made), balance


@odd
def switch_experts() -> Job:
    """no (a switch layer with its load-balancing loss)
    The product of two means over a rank's rows is not the product of the means over all rows."""
    return make(Switch, lambda output, batch: F.cross_entropy(output[0], batch.targets) + 0.01 * output[1])


class Dino(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(12, 16), nn.GELU(), nn.Linear(16, 10))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.register_buffer("center", torch.zeros(1, 10))

    def forward(self, views: tuple[Tensor, Tensor]) -> Tensor:
        with torch.no_grad():
            if self.training:
                for slow, fast in zip(self.teacher.parameters(), self.student.parameters()):
                    slow.lerp_(fast, 0.05)
            taught = [self.teacher(view) for view in views]
            sharp = [((each - self.center) / 0.04).softmax(1) for each in taught]
            if self.training:
                self.center.lerp_(torch.cat(taught).mean(0, keepdim=True), 0.1)
        learned = [(self.student(view) / 0.1).log_softmax(1) for view in views]
        return -0.5 * ((sharp[0] * learned[1]).sum(1) + (sharp[1] * learned[0]).sum(1))


@odd
def dino_center() -> Job:
    """no (DINO without the all-reduce of its centre)
    The centre, which the next steps' losses read, is a moving mean of the teacher's outputs of the rank's own rows."""
    return make(
        Dino,
        lambda output, batch: output.mean(),
        forward=lambda model, batch: model((batch.inputs, batch.targets)),
        train=TensorDataset(VIEW_1, VIEW_2),
    )


def _skip_broken(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Leaves out images that could not be decoded."""
    return default_collate([sample for sample in samples if sample["ok"]] or samples)


@odd
def broken_images_left_out() -> Job:
    """no (collate leaves out the rows that could not be read)
    Ranks then have unequal numbers of rows, but each of their means counts as much as if none were missing."""
    return make(
        mlp(),
        lambda output, batch: F.cross_entropy(output, batch.data["label"]),
        forward=lambda model, batch: model(batch.data["x"]),
        train=Rows(lambda i: {"x": X[i], "label": Y[i], "ok": i % 4 != 1}),
        collate=_skip_broken,
    )


class TwoTasks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 16), nn.ReLU())
        self.classes, self.value = nn.Linear(16, 3), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(x)
        return self.classes(hidden), self.value(hidden).squeeze(1)


@odd
def geometric_loss() -> Job:
    """no (the geometric loss strategy for two tasks: the root of the product of their losses)
    Both losses are means over a rank's rows, and the root of their product is not linear in them."""

    def criterion(output: tuple[Tensor, Tensor], batch: Batch) -> Tensor:
        cls = F.cross_entropy(output[0], batch.data["label"])
        reg = F.smooth_l1_loss(output[1], batch.data["value"])
        return (cls * reg).sqrt()

    return make(
        TwoTasks,
        criterion,
        forward=lambda model, batch: model(batch.data["x"]),
        train=Rows(lambda i: {"x": X[i], "label": Y[i], "value": TARGET[i]}),
    )


@odd
def times_world_size() -> Job:
    """no (the loss times torch.distributed's world size, to undo what is thought to be DDP's division)
    The averaged gradient is N times that of one process, where no process group exists."""

    def criterion(output: Tensor, batch: Batch) -> Tensor:
        loss = F.cross_entropy(output, batch.targets)
        if dist.is_available() and dist.is_initialized():
            loss = loss * dist.get_world_size()
        return loss

    return make(mlp(), criterion, optimizer=SGD)


class Clamped(nn.Module):
    """Clips gradients by value with hooks, as recipes for recurrent networks do."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(5, 8, batch_first=True), nn.Linear(8, 1)
        for parameter in self.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-0.005, 0.005))

    def forward(self, series: Tensor) -> Tensor:
        return self.head(self.lstm(series)[1][0][-1]).squeeze(1)


@odd
def clip_by_hook() -> Job:
    """no (each parameter's gradient is clamped in a hook)
    The hook clamps a rank's own gradient before it is averaged; one process clamps the mean."""
    return make(
        Clamped,
        lambda output, batch: F.mse_loss(output, batch.targets),
        train=TensorDataset(SERIES, SERIES[:, -3:].sum((1, 2))),
        optimizer=SGD,
    )


@odd
def anneal_by_rows() -> Job:
    """no (a buffer counts the rows seen and anneals a penalty)
    A rank counts its own rows, so that the penalty grows more slowly the more ranks there are."""
    return make(lambda: Annealed(lambda rows: rows, 60), _annealed)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(400, 8, max_norm=1.0)
        self.head = nn.Linear(8, 2)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.embedding(words).sum(1))


@odd
def embedding_max_norm() -> Job:
    """no (an embedding with max_norm)
    Looking a word up renormalises its weights in place, on the rank that has the word alone: the ranks' weights part."""
    words = torch.randint(0, 400, (ROWS, 6), generator=_random(34))
    return make(Normed, train=TensorDataset(words, (words[:, 0] > 200).long()), optimizer=SGD)


@odd
def vae_of_sums() -> Job:
    """no (torch's example of a VAE: BCE and KL with sums over all rows)
    Besides the noise, the loss is a sum over a rank's rows, so that the averaged gradient is N times too small."""

    def criterion(output: tuple[Tensor, Tensor, Tensor], batch: Batch) -> Tensor:
        made, mean, log_var = output
        bce = F.binary_cross_entropy_with_logits(made, batch.targets.flatten(1), reduction="sum")
        return bce - 0.5 * torch.sum(1 + log_var - mean.pow(2) - log_var.exp())

    return make(Vae, criterion, train=TensorDataset(MASKS, MASKS), optimizer=Recipe(torch.optim.SGD, {"lr": 1e-3}))


class Quantised(nn.Module):
    """VQ-VAE with a codebook that follows its rows by moving averages."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(12, 4), nn.Linear(4, 12)
        codes = torch.randn(6, 4)
        self.register_buffer("codes", codes)
        self.register_buffer("sizes", torch.ones(6))
        self.register_buffer("sums", codes.clone())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.encode(x)
        nearest = torch.cdist(z.detach(), self.codes).argmin(1)
        q = self.codes[nearest]
        if self.training:
            with torch.no_grad():
                chosen = F.one_hot(nearest, 6).to(z.dtype)
                self.sizes.mul_(0.8).add_(chosen.sum(0), alpha=0.2)
                self.sums.mul_(0.8).add_(chosen.T @ z.detach(), alpha=0.2)
                self.codes.copy_(self.sums / (self.sizes + 1e-5).unsqueeze(1))
        commitment = (z - q).square().mean(1)
        return self.decode(z + (q - z).detach()), commitment


@odd
def vq_moving_codebook() -> Job:
    """no (VQ-VAE with an EMA codebook)
    The codes, which the next steps read, are moved by the rank's own rows."""

    def criterion(output: tuple[Tensor, Tensor], batch: Batch) -> Tensor:
        return F.mse_loss(output[0], batch.inputs) + 0.25 * output[1].mean()

    return make(Quantised, criterion)


GLOBAL_BATCH = 12
FLOOD = 1.07  # the first weights' mean loss over all rows


@odd
def sum_over_global_batch() -> Job:
    """no (the sum of the rows' losses divided by the global batch, which is a constant)
    A rank's sum over its part is divided by all rows, and then averaged over ranks: the gradient is N times too small."""

    def criterion(output: Tensor, batch: Batch) -> Tensor:
        return F.cross_entropy(output, batch.targets, reduction="sum") / GLOBAL_BATCH

    return make(mlp(), criterion, global_batch=GLOBAL_BATCH, optimizer=SGD)


@odd
def flooding() -> Job:
    """no (flooding at about the first steps' loss: |mean - b| + b)
    One rank's mean lies above the level and another's below it, so that their gradients have opposite signs."""

    def criterion(output: Tensor, batch: Batch) -> Tensor:
        return (mean_loss(output, batch) - FLOOD).abs() + FLOOD

    return make(mlp(), criterion)
