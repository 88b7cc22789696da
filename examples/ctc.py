"""A sequence recogniser with CTC, as DeepSpeech-like and CRNN scripts: inputs and texts of unequal lengths.

`F.ctc_loss` divides each row by its own length and then takes the mean over rows: a criterion as it is.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from samestep import Batch, Job, Recipe

LETTERS, BANDS = 8, 6


class Spoken(Dataset[tuple[Tensor, Tensor]]):
    """Row n: a text of 2 to 6 letters, and three noisy frames for each of them."""

    def __init__(self, rows: int, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        sounds = torch.randn(LETTERS, BANDS, generator=torch.Generator().manual_seed(0))
        lengths = torch.randint(2, 7, (rows,), generator=draw).tolist()
        self.texts = [torch.randint(1, LETTERS, (length,), generator=draw) for length in lengths]
        clear = [sounds[text].repeat_interleave(3, 0) for text in self.texts]
        self.frames = [frames + 0.3 * torch.randn(frames.shape, generator=draw) for frames in clear]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.frames[index], self.texts[index]


class Recogniser(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(BANDS, width, 3, padding=1)
        self.rnn, self.head = nn.GRU(width, width, batch_first=True), nn.Linear(width, LETTERS)

    def forward(self, frames: Tensor) -> Tensor:
        x = F.relu(self.conv(frames.transpose(1, 2))).transpose(1, 2)
        return self.head(self.rnn(x)[0]).log_softmax(-1)


def padded(samples: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    frames, texts = zip(*samples)
    return {
        "frames": pad_sequence(frames, batch_first=True),
        "texts": pad_sequence(texts, batch_first=True),
        "frame_lengths": torch.tensor([len(each) for each in frames]),
        "text_lengths": torch.tensor([len(each) for each in texts]),
    }


def ctc(output: Tensor, batch: Batch) -> Tensor:
    data = batch.data
    return F.ctc_loss(output.transpose(0, 1), data["texts"], data["frame_lengths"], data["text_lengths"])


def job(rows: int = 200, batch_size: int = 16, lr: float = 3e-3, epochs: int = 10) -> Job:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return Recogniser(16)

    return Job(
        model=model,
        forward=lambda network, batch: network(batch.data["frames"]),
        criterion=ctc,
        optimizer=Recipe(torch.optim.AdamW, {"lr": lr}),
        train=Spoken(rows, 1),
        evaluation=Spoken(rows // 5, 2),
        collate=padded,
        global_batch=batch_size,
        epochs=epochs,
        clip_norm=5.0,
    )
