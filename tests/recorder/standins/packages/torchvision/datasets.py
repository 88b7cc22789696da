"""Datasets of random pictures, the same in every process; `transform` is applied as torchvision does."""

import numpy
import torch
from PIL import Image

ROWS = 200


class Pictures(torch.utils.data.Dataset):
    shape, classes_of, many = (3, 32, 32), 10, ROWS

    def __init__(self, root=None, train=True, download=False, transform=None, target_transform=None, split="train"):
        generator = torch.Generator().manual_seed(1 if train and split == "train" else 2)
        self.data = torch.rand(self.many, *self.shape, generator=generator)
        self.targets = torch.randint(0, self.classes_of, (self.many,), generator=generator).tolist()
        self.transform, self.classes = transform, [str(each) for each in range(self.classes_of)]

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        row = self.data[index]
        return self.transform(row) if self.transform else row, self.targets[index]


class CIFAR10(Pictures): ...


class CIFAR100(Pictures):
    classes_of = 100


class MNIST(Pictures):
    shape = (1, 28, 28)


class FashionMNIST(MNIST): ...


class ImageFolder(Pictures):
    """Its rows are pictures of PIL, as transforms of scripts may use PIL's functions."""

    shape = (3, 16, 16)

    def __init__(self, root, transform=None):
        super().__init__(train="train" in str(root), transform=transform)

    def __getitem__(self, index):
        row = Image.fromarray((self.data[index] * 255).byte().permute(1, 2, 0).numpy().astype(numpy.uint8))
        return self.transform(row) if self.transform else row, self.targets[index]


class FakeData(Pictures):
    def __init__(self, size=1000, image_size=(3, 16, 16), num_classes=10, transform=None):
        self.shape, self.classes_of, self.many = image_size, num_classes, min(size, ROWS)
        super().__init__(transform=transform)


class KMNIST(MNIST): ...
