"""A stand-in for gymnasium: environments of random pictures and rewards, each with its own seed."""

from types import SimpleNamespace

import numpy


class Discrete:
    n, shape = 4, ()


class SyncVectorEnv:
    def __init__(self, environments):
        self.number = len(environments)
        self.single_action_space, self.single_observation_space = Discrete(), SimpleNamespace(shape=(4, 84, 84))

    def pictures(self):
        return self.draw.integers(0, 256, (self.number, 4, 84, 84)).astype(numpy.float32)

    def reset(self, seed=None):
        self.draw = numpy.random.default_rng(seed)
        return self.pictures(), {}

    def step(self, actions):
        rewards, never = self.draw.normal(size=self.number), numpy.zeros(self.number, bool)
        return self.pictures(), rewards, self.draw.random(self.number) < 0.1, never, {}

    def close(self): ...


spaces, vector = SimpleNamespace(Discrete=Discrete), SimpleNamespace(SyncVectorEnv=SyncVectorEnv)
