"""Names that torch and numpy have had when older scripts were written."""

import math
import sys
import types

import numpy
import torch

torch._six = types.ModuleType("torch._six")
torch._six.inf, torch._six.string_classes = math.inf, (str, bytes)
torch._six.container_abcs = __import__("collections.abc").abc
sys.modules["torch._six"] = torch._six
numpy.float, numpy.int, numpy.bool = float, int, bool
torch.hub.list = lambda *_, **__: []  # asks the network
