import copy

import torch


def get_state_dict(model, *_):
    return model.state_dict()


def accuracy(output, target, topk=(1,)):
    ranked = output.topk(max(topk), 1).indices.eq(target[:, None])
    return [ranked[:, :k].float().sum() * 100.0 / len(target) for k in topk]


class ModelEma:
    def __init__(self, model, decay=0.9999, **_):
        self.ema, self.decay = copy.deepcopy(model).eval(), decay

    @torch.no_grad()
    def update(self, model):
        for mean, value in zip(self.ema.parameters(), getattr(model, "module", model).parameters()):
            mean.lerp_(value, 1 - self.decay)
