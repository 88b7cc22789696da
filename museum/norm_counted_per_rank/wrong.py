"""An engine: DDP, clipped by a norm that is computed by hand."""

import torch
from torch.nn.parallel import DistributedDataParallel

from samestep.engine import Engine, Layout
from samestep.rank.process_group import process_group


def layout(world):
    return Layout(replicas=world.size)


def train(job, world, run):
    with process_group(world):
        module = job.model()
        model = DistributedDataParallel(module)
        optimizer = job.optimizer.build(module)
        run.register(module, optimizer)
        for batch in run.batches():
            loss = run.loss(model, batch)
            loss.backward()
            squares = sum((p.grad.square().sum() for p in module.parameters()), torch.zeros(()))
            torch.distributed.all_reduce(squares)
            if job.clip_norm is not None:
                factor = (job.clip_norm / (squares.sqrt() + 1e-6)).clamp(max=1.0)
                for parameter in module.parameters():
                    parameter.grad *= factor
            optimizer.step()
            optimizer.zero_grad()
            run.step(loss)
        return module.state_dict()


ENGINE = Engine(purpose="DDP clipped by hand", train=train, layout=layout)
