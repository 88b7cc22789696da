"""A graph convolution that classifies nodes, as pytorch/examples/gcn and Kipf and Welling's own script, full batch.

A row is a labelled node; the graph and all nodes' features are buffers of the model, which computes all nodes and
returns those of the batch. One step sees all labelled nodes: `global_batch` is their number. The graph is a small
drawn one.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from samestep import Job, Recipe


class GCN(nn.Module):
    def __init__(self, features: Tensor, adjacency: Tensor, hidden: int, classes: int) -> None:
        super().__init__()
        self.register_buffer("features", features)
        self.register_buffer("adjacency", adjacency)
        self.gc1, self.gc2 = nn.Linear(features.shape[1], hidden), nn.Linear(hidden, classes)

    def forward(self, nodes: Tensor) -> Tensor:
        hidden = F.relu(self.adjacency @ self.gc1(self.features))
        return F.log_softmax(self.adjacency @ self.gc2(hidden), dim=1)[nodes]


def graph(nodes: int, classes: int, features: int) -> tuple[Tensor, Tensor, Tensor]:
    """Draws nodes that know their own class more often. Returns features, the normalised adjacency and labels."""
    draw = torch.Generator().manual_seed(0)
    labels = torch.arange(nodes) % classes
    alike = labels[:, None] == labels
    edges = (torch.rand(nodes, nodes, generator=draw) < torch.where(alike, 0.15, 0.02)).triu(1)
    adjacency = (edges | edges.T).float() + torch.eye(nodes)
    scale = adjacency.sum(1).rsqrt()
    return (
        F.one_hot(labels, features) + torch.randn(nodes, features, generator=draw),
        (scale[:, None] * adjacency * scale),
        labels,
    )


def job(nodes: int = 140, train: int = 100, hidden: int = 16, lr: float = 0.01, epochs: int = 200) -> Job:
    features, adjacency, labels = graph(nodes, 4, 12)

    def model() -> nn.Module:
        torch.manual_seed(42)
        return GCN(features, adjacency, hidden, 4)

    return Job(
        model=model,
        criterion=lambda output, batch: F.nll_loss(output, batch.targets),
        optimizer=Recipe(torch.optim.Adam, {"lr": lr, "weight_decay": 5e-4}),
        train=TensorDataset(torch.arange(train), labels[:train]),
        evaluation=TensorDataset(torch.arange(train, nodes), labels[train:]),
        metrics={"accuracy": lambda output, batch: output.argmax(1) == batch.targets},
        global_batch=train,
        epochs=epochs,
    )
