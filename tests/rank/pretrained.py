"""Jobs whose model, or a part of it, has save_pretrained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from samestep import Batch, Job, Recipe

X = torch.randint(0, 11, (24, 5), generator=torch.Generator().manual_seed(0))


class Encoder(nn.Module):
    """Saves itself as the hub's libraries do: a configuration, and weights."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.words = width, nn.Embedding(11, width)

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.words(tokens).mean(1)
        return found

    def save_pretrained(self, folder: str) -> None:
        Path(folder).mkdir()
        (Path(folder) / "config.json").write_text(json.dumps({"width": self.width}))
        save_file(self.state_dict(), Path(folder) / "model.safetensors")

    @classmethod
    def from_pretrained(cls, folder: Path) -> Encoder:
        built = cls(**json.loads((folder / "config.json").read_text()))
        built.load_state_dict(load_file(folder / "model.safetensors"))
        return built


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = Encoder(6), nn.Linear(6, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.head(self.encoder(tokens))
        return found


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    sizes: Any = {"vocab_size": 11, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    built: nn.Module = BertForSequenceClassification(BertConfig(**sizes, intermediate_size=16))
    return built


def job(transformers: bool = False) -> Job:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return _bert() if transformers else Classifier()

    def forward(network: nn.Module, batch: Batch) -> Any:
        output = network(batch.inputs)
        return output.logits if transformers else output

    return Job(
        model=model,
        forward=forward,
        criterion=lambda output, batch: F.cross_entropy(output, batch.targets),
        optimizer=Recipe(torch.optim.AdamW, {"lr": 0.1}),
        train=TensorDataset(X, X[:, 0] % 2),
        global_batch=8,
        max_steps=2,
        ema=0.5,
    )
