"""hf: the Trainer of Hugging Face transformers, which owns the loop.

precision: 'full', or autocast to 'bf16'.
Source: https://huggingface.co/docs/transformers/trainer
"""

from __future__ import annotations

import tempfile
from typing import Any, Literal

from torch import Tensor, nn

from samestep.engine import Checks, Engine, Layout, Needs, Numerics, State
from samestep.job import Job
from samestep.message import message
from samestep.rank.process_group import process_group
from samestep.rank.step import explain_ddp_error
from samestep.training import Run
from samestep.world import World


def layout(world: World, precision: str = "full") -> Layout:
    return Layout(replicas=world.size, buffers="rank0")  # the Trainer lets DDP search for parameters without a gradient


def numerics(precision: str = "full") -> Numerics:
    return Numerics() if precision == "full" else Numerics("bfloat16", lossy=True, rounds="passes")


def train(job: Job, world: World, run: Run, *, precision: Literal["full", "bf16"] = "full") -> State:
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    module = job.model().to(world.device)
    optimizer = job.optimizer.build(module)
    scheduler = job.lr_scheduler(optimizer)

    class Scheduler:
        """What the Trainer steps after each optimizer step; the job's scheduler may wait for an epoch's end."""

        def step(self) -> None:
            if job.moves_lr(trainer.batch):
                scheduler.step()

        def get_last_lr(self) -> list[float]:
            return [group["lr"] for group in optimizer.param_groups]

    class JobTrainer(Trainer):
        def get_train_dataloader(self) -> Any:
            """Yields the batches as they are: run.batches() has shared out the rows, and has moved them."""
            for batch in run.batches():
                yield {"batch": batch}
            self.control.should_training_stop = True

        def compute_loss(self, model: nn.Module, inputs: Any, *_: Any, **__: Any) -> Tensor:
            self.batch = inputs["batch"]
            with self.accelerator.autocast():
                self.loss = run.loss(model, self.batch)
            return self.loss * run.schedule.micro_batches  # by which the Trainer divides

    class Steps(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            # DDP is there by now. When it is made it gives all ranks rank 0's buffers, which a checkpoint's come after.
            run.register(module, optimizer, scheduler=scheduler)

        def on_step_end(self, *_: Any, **__: Any) -> None:
            run.step(trainer.loss)

    with process_group(world):
        arguments = TrainingArguments(
            output_dir=tempfile.gettempdir(),  # where it writes nothing
            max_steps=run.steps * max(1, len(job.phases)) + 1,  # the batches end before, and with them the training
            gradient_accumulation_steps=run.schedule.micro_batches,
            max_grad_norm=job.clip_norm or 0.0,  # its default is 1.0
            bf16=precision == "bf16",
            use_cpu=world.device == "cpu",
            ddp_find_unused_parameters=True if job.phases else None,  # a phase leaves the others' parameters out
            save_strategy="no",
            logging_strategy="no",
            logging_nan_inf_filter=False,
            report_to="none",
            disable_tqdm=True,
            log_level="error",
        )
        both: Any = (optimizer, Scheduler())
        trainer = JobTrainer(module, arguments, optimizers=both, callbacks=[Steps()])
        trainer.remove_callback(PrinterCallback)
        trainer.model_accepts_loss_kwargs = False  # else it may leave out that division for a forward with **kwargs
        trainer.train()
        return dict(module.state_dict())


ENGINE = Engine(
    purpose="Hugging Face's Trainer, which owns the loop",
    train=train,
    layout=layout,
    needs=Needs(
        packages=("transformers", "accelerate"),
        preloads=("transformers.trainer",),
        no_threads=message("accelerate_has_one_rank_a_process"),
    ),
    numerics=numerics,
    checks=Checks(explain=explain_ddp_error),
)
