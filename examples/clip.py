"""Two encoders and a contrastive loss, as CLIP and open_clip train them: each image against all texts of the batch.

The criterion compares a row with the other rows that it is given. On N ranks these would be one rank's rows, not the
batch's: `gather_outputs=True` gathers all ranks' features, as open_clip does.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from samestep import Job, Recipe
from samestep.jobs.digits import read


class CLIP(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, width))
        self.text = nn.Sequential(nn.Embedding(10, 32), nn.Linear(32, width))
        self.logit_scale = nn.Parameter(torch.full((1,), 2.65))  # of shape [1]: fsdp takes no scalars

    def forward(self, images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        image, text = F.normalize(self.image(images), dim=1), F.normalize(self.text(texts), dim=1)
        return image, text, self.logit_scale.exp()


def contrastive(output: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    image, text, scale = output
    logits = scale * image @ text.T
    own = torch.arange(len(logits), device=logits.device)
    return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2


def job(batch_size: int = 64, lr: float = 1e-3, epochs: int = 10) -> Job:
    scans = read()

    def model() -> nn.Module:
        torch.manual_seed(0)
        return CLIP()

    return Job(
        model=model,
        forward=lambda clip, batch: clip(batch.inputs, batch.targets),
        criterion=lambda output, batch: contrastive(output),
        gather_outputs=True,
        optimizer=Recipe(torch.optim.AdamW, {"lr": lr, "weight_decay": 0.2}),
        train=TensorDataset(scans[:, :-1].float() / 16, scans[:, -1]),
        global_batch=batch_size,
        epochs=epochs,
    )
