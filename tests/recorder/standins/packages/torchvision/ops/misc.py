from torch import nn


class FrozenBatchNorm2d(nn.BatchNorm2d): ...
