import numpy
import torch


class Mixup:
    """Mixes each row with the row at the other end of the batch, and their labels, by a share that numpy draws."""

    def __init__(self, mixup_alpha=1.0, label_smoothing=0.1, num_classes=1000, **_):
        self.alpha, self.smoothing, self.classes = mixup_alpha, label_smoothing, num_classes

    def labels(self, targets):
        off = self.smoothing / self.classes
        return torch.full((len(targets), self.classes), off).scatter_(1, targets[:, None], 1 - self.smoothing + off)

    def __call__(self, rows, targets):
        share = float(numpy.random.beta(self.alpha, self.alpha))
        targets = self.labels(targets)
        return rows * share + rows.flip(0) * (1 - share), targets * share + targets.flip(0) * (1 - share)
