"""Jobs as public scripts write them: containers without a forward, tied weights, models that return dicts, LoRA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset
from torchmetrics import Metric

from samestep import Batch, Job, Recipe

TOKENS, WIDTH, LENGTH, ROWS = 13, 8, 5, 29
TEXTS = torch.randint(TOKENS, (ROWS + 12, LENGTH + 1), generator=torch.Generator().manual_seed(0))
X = torch.randn(ROWS + 12, WIDTH, generator=torch.Generator().manual_seed(1))
Y = (X.sum(1) > 0).long()


def _job(network: Callable[[], nn.Module], **changed: Any) -> Job:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return network()

    usual: dict[str, Any] = {
        "criterion": lambda output, batch: F.cross_entropy(output, batch.targets),
        "optimizer": Recipe(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        "train": TensorDataset(X[:ROWS], Y[:ROWS]),
        "evaluation": TensorDataset(X[ROWS:], Y[ROWS:]),
        "metrics": {"accuracy": lambda output, batch: output.argmax(1) == batch.targets},
        "global_batch": 8,
    }
    return Job(model=model, **(usual | changed))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.inner = nn.ModuleDict({"up": nn.Linear(WIDTH, 16), "down": nn.Linear(16, WIDTH)})

    def forward(self, hidden: Tensor) -> Tensor:
        normal = self.norm(hidden)
        hidden = hidden + self.attention(normal, normal, normal, need_weights=False)[0]
        return hidden + self.inner["down"](F.gelu(self.inner["up"](hidden)))  # type: ignore[no-any-return]


class NanoGPT(nn.Module):
    """nanoGPT's containers: a ModuleDict that holds a ModuleList."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(TOKENS, WIDTH),
                "wpe": nn.Embedding(LENGTH, WIDTH),
                "h": nn.ModuleList([Block() for _ in range(2)]),
                "ln_f": nn.LayerNorm(WIDTH),
            }
        )
        self.lm_head = nn.Linear(WIDTH, TOKENS, bias=False)
        if tied:
            self.transformer.wte.weight = self.lm_head.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.transformer.wte(tokens) + self.transformer.wpe(torch.arange(tokens.shape[1]))
        for block in self.transformer.h:
            hidden = block(hidden)
        return self.lm_head(self.transformer.ln_f(hidden))  # type: ignore[no-any-return]


class ReadsWeights(NanoGPT):
    """Reads the weights of embeddings, in its forward and in a method that this calls."""

    def __init__(self) -> None:
        super().__init__(tied=False)
        del self.lm_head

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.transformer.wte(tokens) + self.transformer.wpe.weight[: tokens.shape[1]]
        for block in self.transformer.h:
            hidden = block(hidden)
        return self.head(self.transformer.ln_f(hidden))

    def head(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.transformer.wte.weight)


def _of_texts(network: Callable[[], nn.Module]) -> Job:
    return _job(
        network,
        train=TensorDataset(TEXTS[:ROWS, :-1], TEXTS[:ROWS, 1:]),
        evaluation=TensorDataset(TEXTS[ROWS:, :-1], TEXTS[ROWS:, 1:]),
        criterion=lambda output, batch: F.cross_entropy(output.flatten(0, 1), batch.targets.flatten()),
        metrics={},
    )


def nanogpt() -> Job:
    return _of_texts(lambda: NanoGPT(tied=True))


def reads_weights() -> Job:
    return _of_texts(ReadsWeights)


class Peeks(nn.Module):
    """Calls a part of a block by itself, in a way that no reading of its source tells."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.output = nn.ModuleList([Block() for _ in range(2)]), nn.Linear(WIDTH, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = inputs[:, None]
        for block in self.blocks:
            hidden = block(block.norm(hidden))
        return self.output(hidden[:, 0])  # type: ignore[no-any-return]


def peeks() -> Job:
    return _job(Peeks)


class Twice(nn.Module):
    """A siamese network: one tower for two inputs, and one block at two depths."""

    def __init__(self) -> None:
        super().__init__()
        block = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.tower, self.output = nn.Sequential(block, nn.Linear(4, 4), block), nn.Linear(4, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.output(self.tower(inputs[:, :4]) - self.tower(inputs[:, 4:]))  # type: ignore[no-any-return]


def twice() -> Job:
    return _job(Twice)


class Named(Dataset[Any]):
    """Rows that are dicts, as those of Hugging Face are."""

    def __init__(self, first: int, last: int) -> None:
        self.rows = range(first, last)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": X[self.rows[index]], "labels": Y[self.rows[index]]}


class Right(Metric):
    """A metric of the user's own, whose update reads the batch."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("right", torch.tensor(0.0), "sum")
        self.add_state("rows", torch.tensor(0.0), "sum")

    def update(self, output: Any, batch: Batch) -> None:
        self.right += (output["logits"].argmax(1) == batch.data["labels"]).sum()
        self.rows += batch.micro_batch.rows

    def compute(self) -> Tensor:
        return self.right / self.rows


class Answers(nn.Module):
    """Takes the batch's names, and returns a dict with the loss in it, as models of Hugging Face do."""

    def __init__(self, kind: Callable[..., Any]) -> None:
        super().__init__()
        self.hidden, self.output, self.kind = nn.Linear(WIDTH, 8), nn.Linear(8, 2), kind

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        logits = self.output(torch.tanh(self.hidden(x)))
        return self.kind(loss=F.cross_entropy(logits, labels), logits=logits)


def _of_names(kind: Callable[..., Any]) -> Job:
    return _job(
        lambda: Answers(kind),
        train=Named(0, ROWS),
        evaluation=Named(ROWS, len(X)),
        forward=lambda model, batch: model(**batch.data),
        criterion=lambda output, batch: output["loss"],
        metrics={"right": Right()},
    )


def returns_a_dict() -> Job:
    return _of_names(dict)


def returns_a_model_output() -> Job:
    from transformers.modeling_outputs import SequenceClassifierOutput

    return _of_names(SequenceClassifierOutput)


class LoRA(nn.Module):
    """A frozen layer, and two small ones that train, in one module."""

    def __init__(self, of: nn.Linear) -> None:
        super().__init__()
        self.of = of.requires_grad_(False)
        self.down, self.up = nn.Linear(of.in_features, 2, bias=False), nn.Linear(2, of.out_features, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.of(inputs) + self.up(self.down(inputs))  # type: ignore[no-any-return]


class Adapted(nn.Module):
    """Frozen layers around and inside of the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 8).requires_grad_(False)
        self.norm = nn.LayerNorm(8).requires_grad_(False)
        self.blocks, self.output = nn.ModuleList([LoRA(nn.Linear(8, 8)) for _ in range(2)]), nn.Linear(8, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.norm(self.first(inputs))
        for block in self.blocks:
            hidden = torch.tanh(block(hidden))
        return self.output(hidden)  # type: ignore[no-any-return]


def lora() -> Job:
    return _job(Adapted)


def _trained(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": [p for p in model.parameters() if p.requires_grad]}]


def lora_trained_alone() -> Job:
    return _job(Adapted, optimizer=Recipe(torch.optim.AdamW, {"lr": 1e-2}, _trained), clip_norm=0.1, micro_batch=2)


class Routed(nn.Module):
    """An expert for some rows alone: it has no gradient where a batch holds none of them."""

    def __init__(self) -> None:
        super().__init__()
        self.usual, self.expert, self.output = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 8), nn.Linear(8, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden, rare = self.usual(inputs), inputs[:, 0] > 0.3
        if rare.any():
            hidden = hidden + rare[:, None] * self.expert(inputs)
        return self.output(hidden)  # type: ignore[no-any-return]


def routed() -> Job:
    return _job(Routed)


OPTIMIZERS = {"Muon": {"lr": 1e-2, "weight_decay": 0.0}}


def optimizer(name: str) -> Job:
    cls = getattr(torch.optim, name)
    return _job(
        lambda: nn.Sequential(
            nn.Linear(WIDTH, 6, bias=name != "Muon"), nn.Tanh(), nn.Linear(6, 2, bias=name != "Muon")
        ),
        optimizer=Recipe(cls, OPTIMIZERS.get(name, {"lr": 1e-2})),
    )


class Graph(nn.Module):
    """A buffer that is sparse, as a GCN's adjacency is."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 2)
        self.register_buffer("adjacency", torch.eye(WIDTH).to_sparse())

    def forward(self, inputs: Tensor) -> Tensor:
        return self.linear((self.adjacency @ inputs.T).T)  # type: ignore[no-any-return]


def sparse_buffer() -> Job:
    return _job(Graph)


class GraphOfTwo(Graph):
    """The same, as two buffers."""

    def __init__(self) -> None:
        super().__init__()
        sparse = self.adjacency.coalesce()
        del self.adjacency
        self.register_buffer("indices", sparse.indices())
        self.register_buffer("values", sparse.values())

    @property
    def adjacency(self) -> Tensor:
        return torch.sparse_coo_tensor(self.indices, self.values, (WIDTH, WIDTH))


def sparse_buffer_of_two() -> Job:
    return _job(GraphOfTwo)


def sparse_rows() -> Job:
    def collate(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        return torch.stack([x for x, _ in samples]).to_sparse(), torch.stack([y for _, y in samples])

    return _job(lambda: nn.Linear(WIDTH, 2), collate=collate)
