"""An engine: DDP, whose optimizer keeps what the checkpoint holds."""

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
            optimizer.step()
            optimizer.zero_grad()
            run.step(loss)
        return module.state_dict()


ENGINE = Engine(purpose="DDP by hand", train=train, layout=layout)
