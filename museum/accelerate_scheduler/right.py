"""An engine: Accelerate with a schedule that is counted in steps, and not prepared."""

from accelerate import Accelerator

from samestep.engine import Engine, Layout, Needs
from samestep.rank.process_group import process_group


def layout(world):
    return Layout(replicas=world.size)


def train(job, world, run):
    with process_group(world):
        accelerator = Accelerator(cpu=True)
        module = job.model()
        optimizer = job.optimizer.build(module)
        schedule = job.lr_scheduler(optimizer)
        model, stepper = accelerator.prepare(module, optimizer)
        run.register(module, optimizer, scheduler=schedule)
        for batch in run.batches():
            loss = run.loss(model, batch)
            accelerator.backward(loss)
            stepper.step()
            stepper.zero_grad()
            schedule.step()
            run.step(loss)
        return module.state_dict()


ENGINE = Engine(purpose="Accelerate by hand", train=train, layout=layout, needs=Needs(packages=("accelerate",)))
