"""A stand-in for ema_pytorch: a moving average of a model's weights."""

import copy

import torch


class EMA(torch.nn.Module):
    def __init__(self, model, beta=0.995, update_every=10):
        super().__init__()
        self.online_model, self.ema_model, self.beta, self.every, self.step = (
            [model],
            copy.deepcopy(model),
            beta,
            update_every,
            0,
        )
        self.ema_model.requires_grad_(False)

    @torch.no_grad()
    def update(self):
        self.step += 1
        if self.step % self.every == 0:
            for mean, value in zip(self.ema_model.parameters(), self.online_model[0].parameters()):
                mean.lerp_(value, 1 - self.beta)
