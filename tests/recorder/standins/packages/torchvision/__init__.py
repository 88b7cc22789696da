"""A stand-in for torchvision: its names, with small random data and small models. Nothing is read or downloaded."""

import PIL.Image as PIL_IMAGE  # noqa: F401, as torchvision does: scripts rely on it

from . import datasets as datasets
from . import models as models
from . import ops as ops
from . import transforms as transforms
from . import utils as utils
