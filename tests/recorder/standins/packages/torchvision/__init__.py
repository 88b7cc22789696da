"""A stand-in for torchvision: its names, with small random data and small models. Nothing is read or downloaded."""

from . import datasets as datasets
from . import models as models
from . import transforms as transforms
