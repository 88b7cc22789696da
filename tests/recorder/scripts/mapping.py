"""A table of columns as Hugging Face's datasets has it: rows are mappings of lists, a collate function pads them."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


class Table:
    """Columns; a row, or the rows of a list, is a mapping of the columns' values."""

    def __init__(self, columns: dict[str, list]) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns["labels"])

    def __getitem__(self, index: int) -> dict[str, list]:
        return {name: values[index] for name, values in self.columns.items()}

    def __getitems__(self, indices: list[int]) -> list[dict[str, list]]:
        return [self[index] for index in indices]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 16, padding_idx=0), nn.Linear(16, 2)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.embed(input_ids).sum(1))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def padded(rows: list[dict[str, list]]) -> dict[str, torch.Tensor]:
    longest = 9
    ids = [row["input_ids"] + [0] * (longest - len(row["input_ids"])) for row in rows]
    return {"input_ids": torch.tensor(ids), "labels": torch.tensor([row["labels"] for row in rows])}


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(9)
    ids = [[1 + (row * 7 + place * 5) % 31 for place in range(3 + row % 6)] for row in range(64)]
    data = Table({"input_ids": ids, "labels": [row % 2 for row in range(64)]})
    sampler = DistributedSampler(data, seed=2)
    loader = DataLoader(data, batch_size=8, sampler=sampler, collate_fn=padded)
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for epoch in range(5):
        sampler.set_epoch(epoch)
        for batch in loader:
            loss = model(**batch)["loss"]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


main()
