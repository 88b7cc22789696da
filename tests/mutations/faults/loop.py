"""Faults of the training loop: gradients, weights, schedulers, clipping, the optimizer, buffers."""

from __future__ import annotations

from mutations.faults.fault import BACKWARD, COMPLETED, DDP, WRAPPED, Fault

FAULTS = (
    Fault(
        "gradient summed, not averaged",
        DDP,
        BACKWARD,
        "                (loss * world.size).backward()\n",
        ("first gradient",),
        "gradients_summed_instead_of_averaged",
    ),
    Fault(
        "gradient averaged twice",
        DDP,
        BACKWARD,
        "                (loss / world.size).backward()\n",
        ("first gradient",),
        "gradients_averaged_twice",
    ),
    Fault(
        "gradients never reduced",
        DDP,
        "with nullcontext() if batch.completes_step else model.no_sync():",
        "with model.no_sync():",
        ("first gradient",),
        "gradients_never_reduced",
    ),
    Fault(
        "one parameter left out of synchronisation",
        DDP,
        "        model: Any = DistributedDataParallel(",
        "        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(\n"
        "            module, [list(dict(module.named_parameters()))[-1]])\n"
        "        model: Any = DistributedDataParallel(",
        ("first gradient",),
        "gradients_left_out_of_reduction",
    ),
    Fault(
        "fp16-compressed gradients",
        DDP,
        WRAPPED,
        "        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks\n"
        "        model.register_comm_hook(None, default_hooks.fp16_compress_hook)\n" + WRAPPED,
        ("first gradient",),
        "gradients_rounded|gradients_rounded_before_the_reduction|gradients_rounded_on_their_way",
    ),
    Fault(
        "different initial weights per rank",
        DDP,
        WRAPPED,
        "        for p in module.parameters():\n            p.data.add_(world.rank * 1e-3)\n" + WRAPPED,
        ("initial weights",),
        "ranks_start_from_different_weights",
    ),
    Fault(
        "a step with zero gradients before the first",
        DDP,
        "        run.register(module, optimizer, scheduler=scheduler)\n",
        "        for p in module.parameters():\n            p.grad = torch.zeros_like(p)\n"
        "        optimizer.step()\n        optimizer.zero_grad()\n"
        "        run.register(module, optimizer, scheduler=scheduler)\n",
        ("initial weights", "parameter", "loss"),
        "weights_moved_before_first_batch",
        ("conv", "tied"),
        "weight decay or an optimizer whose first step is special",
    ),
    Fault(
        "input normalised twice in the engine",
        DDP,
        "                loss = run.loss(trained, batch)\n",
        "                batch.data[0].sub_(0.13).div_(0.31)\n                loss = run.loss(trained, batch)\n",
        ("tensors received",),
        "values_of_right_rows_differ",
        ("conv",),
        "floating inputs",
    ),
    Fault(
        "input normalised again inside the model",
        DDP,
        WRAPPED,
        "        module.register_forward_pre_hook(lambda m, a: ((a[0] - 0.13) / 0.31,))\n" + WRAPPED,
        ("loss",),
        "first_loss_differs",
        ("conv",),
        "floating inputs",
    ),
    Fault(
        "training in evaluation mode",
        DDP,
        WRAPPED,
        "        module.eval()\n" + WRAPPED,
        ("loss",),
        "evaluation_mode_left_on",
        ("conv", "transformer"),
        "dropout or BatchNorm",
    ),
    Fault(
        "another learning rate",
        DDP,
        WRAPPED,
        WRAPPED + '        for group in optimizer.param_groups:\n            group["lr"] *= world.size\n',
        ("learning rate",),
        "learning_rate_multiplied_by_ranks",
    ),
    Fault(
        "scheduler stepped N times",
        DDP,
        "                    scheduler.step()\n",
        "                    for _ in range(world.size):\n                        scheduler.step()\n",
        ("learning rate",),
        "scheduler_steps_once_for_each_rank|scheduler_steps_at_other_times",
        ("conv", "transformer"),
        "a scheduler",
    ),
    Fault(
        "scheduler stepped at every step instead of every epoch",
        DDP,
        "if job.moves_lr(batch):",
        "if batch.completes_step:",
        ("learning rate",),
        "scheduler_steps_each_step",
        ("transformer",),
        "a scheduler by epoch",
    ),
    Fault(
        "clipping before the reduction",
        DDP,
        "            with nullcontext() if batch.completes_step else model.no_sync():\n"
        "                loss = run.loss(trained, batch)\n"
        "                loss.backward()\n"
        "            if batch.completes_step and job.clip_norm is not None:\n"
        "                clip_grad_norm_(model.parameters(), job.clip_norm)\n",
        "            with model.no_sync():\n"
        "                loss = run.loss(trained, batch)\n"
        "                loss.backward()\n" + COMPLETED + "                if job.clip_norm is not None:\n"
        "                    clip_grad_norm_(model.parameters(), job.clip_norm)\n"
        "                for p in module.parameters():\n"
        "                    torch.distributed.all_reduce(p.grad)\n"
        "                    p.grad /= world.size\n",
        ("loss",),
        "clipped_before_the_reduction",
        ("tied",),
        "clipping",
    ),
    Fault(
        "clipping left out",
        DDP,
        "if batch.completes_step and job.clip_norm is not None:",
        "if False:",
        ("loss",),
        "clipping_left_out",
        ("tied",),
        "clipping",
    ),
    Fault(
        "parameter groups ignored",
        DDP,
        WRAPPED,
        "        optimizer = job.optimizer.cls(module.parameters(), **job.optimizer.settings)\n",
        ("parameter groups",),
        "parameter_groups_missing",
        ("tied",),
        "parameter groups",
    ),
    Fault(
        "two optimizer steps for one batch",
        DDP,
        "                optimizer.step(*run.closure(backward))\n",
        "                optimizer.step()\n                optimizer.step()\n",
        ("optimizer steps", "loss", "first gradient", "learning rate"),
        "optimizer_step_taken_twice",
    ),
    Fault(
        "gradients not cleared",
        DDP,
        "                optimizer.zero_grad()\n",
        "",
        ("loss",),
        "gradients_not_cleared",
    ),
    Fault(
        "buffers from the wrong rank",
        DDP,
        "        return module.state_dict()\n",
        "        for buffer in module.buffers():\n"
        "            torch.distributed.broadcast(buffer, src=world.size - 1)\n"
        "        return module.state_dict()\n",
        ("buffer",),
        "buffers_of_another_rank",
        ("conv",),
        "buffers",
    ),
    Fault(
        "optimizer's own settings dropped",
        DDP,
        WRAPPED,
        WRAPPED + "        for group in optimizer.param_groups:\n            if 'betas' in group:\n"
        "                group['betas'] = (0.5, 0.9)\n",
        ("parameter", "loss"),
        "own_optimizer_differs",
        ("tied", "transformer"),
        "Adam",
    ),
)
