"""Functions of pictures of PIL that transforms of scripts are made of."""

from . import InterpolationMode as InterpolationMode
from . import tensor as to_tensor


def pil_to_tensor(row):
    return (to_tensor(row) * 255).byte()


def get_image_size(row):
    return [*row.size]


def get_dimensions(row):
    return [len(row.getbands()), row.height, row.width]


def crop(row, top, left, height, width):
    return row.crop((left, top, left + width, top + height))


def resize(row, size, interpolation=None, **_):
    return row.resize((size, size) if isinstance(size, int) else (size[1], size[0]))


def resized_crop(row, top, left, height, width, size, interpolation=None, **_):
    return resize(crop(row, top, left, height, width), size)


def hflip(row):
    return row.transpose(0)


def center_crop(row, _):
    return row


def pad(row, *_, **__):
    return row


def normalize(row, mean, std, **_):
    return (row - mean) / std
