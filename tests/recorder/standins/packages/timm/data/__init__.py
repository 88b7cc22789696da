from torchvision import transforms

from .mixup import Mixup as Mixup


def create_transform(input_size, mean, std, **_):
    """Returns the transforms of a training; the first is the crop."""
    steps = [transforms.RandomResizedCrop(input_size), transforms.RandomHorizontalFlip(), transforms.ToTensor()]
    return transforms.Compose([*steps, transforms.Normalize(mean, std)])
