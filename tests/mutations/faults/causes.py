"""Faults whose cause shows in no single figure: the reference replays the training with each candidate."""

from __future__ import annotations

from mutations.faults.fault import BACKWARD, DDP, RUN, STEP, Fault

UPDATED = "                optimizer.step(*run.closure(backward))\n"
CLEARED = "                optimizer.zero_grad()\n"
SYNCHRONISED = "nullcontext() if batch.completes_step else model.no_sync()"
MOVED = "                if job.moves_lr(batch):\n                    scheduler.step()\n"
STEPPED = UPDATED + CLEARED + MOVED
NOW = "batch.micro_batch.step"
EPOCH_ENDS = "batch.completes_epoch"
CLIPPED = (
    "            if batch.completes_step and job.clip_norm is not None:\n"
    "                clip_grad_norm_(model.parameters(), job.clip_norm)\n"
)
SWAPPING = "            for parameter, average in zip(self._tensors(), self._averages):\n"
ATTACHED = "        return replace(batch, state=self._of_micro.get(batch.micro_batch.micro))\n"
AVERAGED = "            self.ema.update()\n"
LOOP = "        for batch in run.batches():\n            loss = backward(batch)\n"
RETURNED = "        return module.state_dict()\n"
WEIGHTS, PHASES = "rank/weights.py", "job/phases.py"
BUILT = "        return self.cls(parameters, **self.settings)\n"
CONV, TIED, TRANSFORMER, AVERAGE, CARRYING = ("conv",), ("tied",), ("transformer",), ("warming",), ("carrying",)
LOSS, GRADIENT, RATE, PARAMETER = ("loss",), ("first gradient",), ("learning rate",), ("parameter",)
LOSS_OR_PARAMETER = ("loss", "parameter")


def _gradients(change: str, when: str = "batch.completes_step") -> str:
    """BACKWARD, then a change of each gradient, where it is complete."""
    return (
        f"{BACKWARD}                for p in module.parameters() if {when} else ():\n"
        f"                    p.grad = {change}\n"
    )


def _clipped(how: str) -> str:
    return f"            if batch.completes_step and job.clip_norm is not None:\n                {how}\n"


FAULTS = (
    Fault(
        "no_sync at an epoch's last step",
        DDP,
        SYNCHRONISED,
        f"nullcontext() if batch.completes_step and not {EPOCH_ENDS} else model.no_sync()",
        LOSS,
        "gradients_never_reduced at_last_steps_of_epochs",
        (*AVERAGE, *TIED),
    ),
    Fault(
        "no_sync at one step",
        DDP,
        SYNCHRONISED,
        f"nullcontext() if batch.completes_step and {NOW} != 2 else model.no_sync()",
        LOSS,
        "gradients_never_reduced at_one_step",
        AVERAGE,
    ),
    Fault(
        "zero_grad left out at one step",
        DDP,
        CLEARED,
        f"                optimizer.zero_grad() if {NOW} != 1 else None\n",
        LOSS,
        "gradients_not_cleared at_one_step",
        (*AVERAGE, *TIED),
    ),
    Fault(
        "zero_grad left out at an epoch's end",
        DDP,
        CLEARED,
        f"                optimizer.zero_grad() if not {EPOCH_ENDS} else None\n",
        LOSS,
        "gradients_not_cleared at_first_steps_of_epochs",
        (*AVERAGE, *TRANSFORMER),
    ),
    Fault(
        "gradients rounded to float32",
        DDP,
        BACKWARD,
        _gradients("p.grad.float().to(p.dtype)"),
        GRADIENT,
        "gradients_rounded",
        (*AVERAGE, *TIED),
    ),
    Fault(
        "gradients rounded to float32 from a step on",
        DDP,
        BACKWARD,
        _gradients("p.grad.float().to(p.dtype)", f"batch.completes_step and {NOW} > 1"),
        LOSS,
        "gradients_rounded from_step_on",
        AVERAGE,
    ),
    Fault(
        "a gradient times 1.001",
        DDP,
        BACKWARD,
        "                (loss * 1.001).backward()\n",
        GRADIENT,
        "loss_scaled_by_another_factor",
        (*AVERAGE, *CONV),
    ),
    Fault(
        "the scheduler before the optimizer",
        DDP,
        STEPPED,
        MOVED + UPDATED + CLEARED,
        RATE,
        "scheduler_before_optimizer",
        (*AVERAGE, *CONV),
    ),
    Fault(
        "the scheduler stepped in each phase",
        DDP,
        "if job.moves_lr(batch):",
        "if batch.completes_step:",
        RATE,
        "scheduler_steps_once_for_each_phase",
        ("phases",),
    ),
    Fault(
        "the scheduler left out at an epoch's end",
        DDP,
        "if job.moves_lr(batch):",
        f"if job.moves_lr(batch) and not {EPOCH_ENDS}:",
        RATE,
        "scheduler_not_stepped at_last_steps_of_epochs",
        AVERAGE,
    ),
    Fault(
        "the average updated twice",
        RUN,
        AVERAGED,
        AVERAGED + AVERAGED,
        PARAMETER,
        "averaged_weights_updated_twice",
        AVERAGE,
    ),
    Fault(
        "the average not updated at an epoch's end",
        RUN,
        "        if self.ema and not self.left_out:\n",
        "        if self.ema and not self.left_out and self.count.done % self.schedule.steps_per_epoch:\n",
        PARAMETER,
        "averaged_weights_not_updated at_last_steps_of_epochs",
        AVERAGE,
    ),
    Fault(
        "an average of another decay",
        WEIGHTS,
        "1 - self.decay)",
        "self.decay)",
        PARAMETER,
        "average_of_another_decay",
        AVERAGE,
    ),
    Fault(
        "the weights themselves instead of their average",
        RUN,
        "            self.ema.swap()\n",
        "",
        PARAMETER,
        "weights_not_averaged",
        AVERAGE,
    ),
    Fault(
        "evaluation mode left on after an epoch",
        DDP,
        LOOP,
        LOOP + f"            if {EPOCH_ENDS}:\n                module.eval()\n",
        LOSS,
        "evaluation_mode_left_on from_epoch_on",
        (*CONV, *TRANSFORMER),
    ),
    Fault(
        "evaluation mode left on after the first step",
        DDP,
        LOOP,
        LOOP + "            module.eval()\n",
        LOSS,
        "evaluation_mode_left_on at_every_step_but_the_first",
        CONV,
    ),
    Fault(
        "momentum lost at an epoch's turn",
        DDP,
        MOVED,
        MOVED + f"                if {EPOCH_ENDS}:\n                    optimizer.state.clear()\n",
        LOSS,
        "state_of_optimizer_forgotten at_first_steps_of_epochs",
        (*AVERAGE, *CONV),
    ),
    Fault(
        "the optimizer's state lost at every step",
        DDP,
        MOVED,
        MOVED + "                optimizer.state.clear()\n",
        LOSS,
        "state_of_optimizer_forgotten",
        AVERAGE,
    ),
    Fault(
        "a closure that does not clear the gradients",
        STEP,
        "        model.zero_grad()\n",
        "",
        LOSS_OR_PARAMETER,
        "gradients_not_cleared in_later_calls_of_closure",
        ("closure",),
    ),
    Fault(
        "an optimizer step left out",
        DDP,
        UPDATED,
        f"                optimizer.step(*run.closure(backward)) if {NOW} != 2 else None\n",
        ("loss", "learning rate", "optimizer steps"),
        "optimizer_step_left_out",
        AVERAGE,
    ),
    Fault(
        "each parameter clipped",
        DDP,
        CLIPPED,
        _clipped("[clip_grad_norm_([p], job.clip_norm) for p in model.parameters()]"),
        LOSS,
        "each_parameter_clipped",
        TIED,
    ),
    Fault(
        "clipped by the largest element",
        DDP,
        CLIPPED,
        _clipped('clip_grad_norm_(model.parameters(), job.clip_norm, norm_type=float("inf"))'),
        LOSS,
        "gradients_clipped_by_another_norm",
        TIED,
    ),
    Fault(
        "clipped where nothing is",
        DDP,
        CLIPPED,
        "            if batch.completes_step:\n                clip_grad_norm_(model.parameters(), 0.05)\n",
        GRADIENT,
        "loss_scaled_by_another_factor|gradients_clipped_unasked",
        AVERAGE,
    ),
    Fault(
        "the ranks' means weigh alike",
        RUN,
        "return loss if share == 1.0 else loss * share",
        "return loss",
        (*LOSS_OR_PARAMETER, "first gradient"),
        "averaged_per_rank_instead_of_per_row",
        (*AVERAGE, *CONV),
    ),
    Fault(
        "dropout masks of rank 0 on every rank",
        STEP,
        "micro_batch.micro, replica))",
        "micro_batch.micro, 0))",
        LOSS,
        "random_numbers_of_rank_0",
        (*CONV, *TRANSFORMER),
    ),
    Fault(
        "an optimizer without its weight decay",
        PHASES,
        BUILT,
        "        return self.cls(parameters, **{k: v for k, v in self.settings.items() if k != 'weight_decay'})\n",
        LOSS,
        "setting_of_optimizer_left_out",
        CONV,
    ),
    Fault(
        "an average that leaves out vectors",
        WEIGHTS,
        "            if parameter.requires_grad  # the phase's that has stepped\n",
        "            if parameter.requires_grad and parameter.dim() > 1\n",
        PARAMETER,
        "averages_of_tensors_not_updated",
        AVERAGE,
    ),
    Fault(
        "vectors themselves instead of their average",
        WEIGHTS,
        SWAPPING,
        SWAPPING + "                if parameter.dim() < 2:\n                    continue\n",
        PARAMETER,
        "weights_of_tensors_not_averaged",
        AVERAGE,
    ),
    Fault(
        "the carried state lost at one step",
        STEP,
        ATTACHED,
        ATTACHED.replace("))", ") if batch.micro_batch.step != 2 else None)"),
        LOSS,
        "carried_state_not_passed_on at_one_step",
        CARRYING,
    ),
    Fault(
        "the carried state kept over epochs",
        STEP,
        "        if batch.micro_batch.epoch != self._epoch:\n",
        "        if self._epoch < 0:\n",
        LOSS,
        "carried_state_kept_over_epochs",
        CARRYING,
    ),
)
