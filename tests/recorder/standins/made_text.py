"""Lets Lightning's demos.WikiText2 be a few thousand made rows instead of a download."""

import lightning.pytorch.demos as demos
import torch


class WikiText2(torch.utils.data.Dataset):
    vocab_size, rows, length = 48, 4160, 8

    def __init__(self, *_, **__):
        self.tokens = torch.randint(0, 48, (self.rows * self.length + 1,), generator=torch.Generator().manual_seed(3))

    def __len__(self):
        return self.rows

    def __getitem__(self, index):
        at = index * self.length
        return self.tokens[at : at + self.length], self.tokens[at + 1 : at + self.length + 1]


demos.WikiText2 = WikiText2
