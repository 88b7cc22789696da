"""Transforms of tensors. Those that would change a size leave it; the random ones draw from torch's generator."""

import numpy
import torch


def tensor(row):
    """Returns a picture of PIL as a tensor, as ToTensor does; a tensor as it is."""
    if isinstance(row, torch.Tensor):
        return row
    return torch.from_numpy(numpy.array(row)).permute(2, 0, 1).float() / 255


class Compose:
    def __init__(self, transforms):
        self.transforms = transforms

    def __call__(self, row):
        for each in self.transforms:
            row = each(row)
        return row


class Same:
    def __init__(self, *_, **__): ...

    def __call__(self, row):
        return row


class ToTensor(Same):
    def __call__(self, row):
        return tensor(row)


class Resize(Same): ...


class CenterCrop(Same): ...


class RandomHorizontalFlip(Same):
    def __call__(self, row):
        return tensor(row).flip(-1) if torch.rand(()) < 0.5 else row


class RandomCrop(Same):
    def __call__(self, row):
        return tensor(row).roll(int(torch.randint(0, 4, ())), -1)


class RandomResizedCrop(RandomCrop): ...


class Normalize:
    def __init__(self, mean, std, inplace=False):
        self.mean, self.std = (torch.tensor(each).view(-1, 1, 1) for each in (mean, std))

    def __call__(self, row):
        return (row - self.mean) / self.std
