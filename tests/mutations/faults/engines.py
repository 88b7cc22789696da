"""Faults that the libraries of engines make easy."""

from __future__ import annotations

from mutations.faults.fault import Fault

FAULTS = (
    Fault(
        "fabric: model and optimizer set up in one call, the model sharded",
        "engines/fabric.py",
        "        model = fabric.setup_module(module)\n"
        "        optimizer = job.optimizer.build(module)\n"
        "        scheduler = job.lr_scheduler(optimizer)\n"
        "        stepper = fabric.setup_optimizers(optimizer)\n",
        "        optimizer = job.optimizer.build(module)\n"
        "        scheduler = job.lr_scheduler(optimizer)\n"
        "        model, stepper = fabric.setup(module, optimizer)\n",
        ("first gradient",),
        "optimizer_holds_other_parameters|optimizer_trains_a_parameter_of_no_model",
        engine="fabric",
        settings={"strategy": "model_parallel"},
    ),
    Fault(
        "horovod: the optimizer's state broadcast before its first step",
        "engines/horovod.py",
        "    hvd.broadcast_parameters(state, root_rank=0)\n",
        "    hvd.broadcast_parameters(state, root_rank=0)\n    hvd.broadcast_optimizer_state(optimizer, root_rank=0)\n",
        ("initial weights", "parameter", "loss"),
        "weights_moved_before_first_batch",
        engine="horovod",
    ),
    Fault(
        "horovod: gradients summed",
        "engines/horovod.py",
        "        backward_passes_per_step=run.schedule.micro_batches,\n",
        "        backward_passes_per_step=run.schedule.micro_batches,\n        op=hvd.Sum,\n",
        ("first gradient",),
        "gradients_summed_instead_of_averaged",
        engine="horovod",
    ),
    Fault(
        "horovod: clipping before the reduction has ended",
        "engines/horovod.py",
        "            optimizer.synchronize()\n"
        "            if job.clip_norm is not None:\n"
        "                clip_grad_norm_(model.parameters(), job.clip_norm)\n"
        "        return loss\n\n"
        "    for batch in run.batches():\n"
        "        loss = backward(batch)\n"
        "        if batch.completes_step:\n"
        "            with optimizer.skip_synchronize():\n"
        "                optimizer.step(*run.closure(backward))\n",
        "            if job.clip_norm is not None:\n"
        "                clip_grad_norm_(model.parameters(), job.clip_norm)\n"
        "        return loss\n\n"
        "    for batch in run.batches():\n"
        "        loss = backward(batch)\n"
        "        if batch.completes_step:\n"
        "            optimizer.step()\n",
        ("loss",),
        "clipped_before_the_reduction|clipping_left_out|update_wrong_at_one_step cause_unknown",
        ("tied",),
        "clipping",
        engine="horovod",
    ),
    Fault(
        "accelerate: the scheduler prepared",
        "engines/accelerate.py",
        "scheduler = job.lr_scheduler(optimizer)",
        "scheduler = accelerator.prepare(job.lr_scheduler(optimizer))",
        ("learning rate",),
        "scheduler_steps_once_for_each_rank|scheduler_steps_at_other_times",
        ("conv", "transformer"),
        "a scheduler",
        engine="accelerate",
    ),
    Fault(
        "lightning: the loss not multiplied by the micro-batches",
        "engines/lightning.py",
        "run.loss(self.model, batch) * run.schedule.micro_batches",
        "run.loss(self.model, batch)",
        ("first gradient",),
        "loss_scaled_by_another_factor",
        ("transformer",),
        "micro-batches",
        engine="lightning",
    ),
    Fault(
        "hf: the loss not multiplied by the micro-batches",
        "engines/hf.py",
        "return self.loss * run.schedule.micro_batches",
        "return self.loss",
        ("first gradient",),
        "loss_scaled_by_another_factor",
        ("transformer",),
        "micro-batches",
        engine="hf",
    ),
    Fault(
        "hf: max_grad_norm left at its default",
        "engines/hf.py",
        "            max_grad_norm=job.clip_norm or 0.0,  # its default is 1.0\n",
        "",
        ("first gradient",),
        "gradients_clipped_unasked|gradients_clipped_to_a_norm",
        ("conv", "tied"),
        "a first gradient whose norm is above 1",
        engine="hf",
    ),
    Fault(
        "hf: the scheduler stepped after every step",
        "engines/hf.py",
        "if job.moves_lr(trainer.batch):",
        "if trainer.batch:",
        ("learning rate",),
        "scheduler_steps_each_step|scheduler_steps_once_for_each_micro_batch",
        ("transformer",),
        "a scheduler by epoch",
        engine="hf",
    ),
    Fault(
        "fairscale: zero_grad of the optimizer",
        "engines/fairscale.py",
        "model.zero_grad()",
        "optimizer.zero_grad()",
        ("loss",),
        "gradients_not_cleared",
        engine="fairscale",
    ),
    Fault(
        "split: activations detached on their way",
        "engines/split.py",
        "return moved(args, device), moved(kwargs, device)",
        "return mapped_tensors(Tensor.detach, moved(args, device)), kwargs",
        ("first gradient",),
        "gradients_of_some_tensors_wrong",
        engine="split",
    ),
    Fault(
        "split: no backward pass but of the last micro-batch in flight",
        "engines/split.py",
        "for loss_in_flight in waiting:",
        "for loss_in_flight in waiting[-1:]:",
        ("first gradient",),
        "gradient_of_last_micro_batch_alone",
        ("transformer",),
        "micro-batches",
        engine="split",
        settings={"in_flight": "8"},
    ),
    Fault(
        "fsdp: the optimizer built before sharding",
        "engines/fsdp.py",
        "        shard(model)\n        optimizer = job.optimizer.build(model)",
        "        optimizer = job.optimizer.build(model)\n        shard(model)",
        ("first gradient",),
        "optimizer_holds_other_parameters|optimizer_trains_a_parameter_of_no_model",
        engine="fsdp",
        settings={"wrap": "root"},
    ),
    Fault(
        "fsdp: gradients never reduced",
        "engines/fsdp.py",
        "model.set_requires_gradient_sync(batch.completes_step)",
        "model.set_requires_gradient_sync(False)",
        ("first gradient",),
        "optimizer_holds_other_parameters|optimizer_trains_a_parameter_of_no_model",
        engine="fsdp",
    ),
    Fault(
        "zero: parameter groups ignored",
        "engines/zero.py",
        "recipe.groups(module) if recipe.groups else module.parameters()",
        "module.parameters()",
        ("parameter groups",),
        "parameter_groups_missing",
        ("tied",),
        "parameter groups",
        engine="zero",
    ),
    Fault(
        "amp: scaled gradients clipped",
        "engines/amp.py",
        "                scaler.unscale_(optimizer)\n",
        "",
        ("loss",),
        "clipping_left_out|gradients_clipped_to_a_norm|cause_unknown",
        ("tied",),
        "clipping",
        engine="amp",
        settings={"precision": "fp16"},
    ),
    Fault(
        "deepspeed: gradient_clipping left out of the config",
        "engines/deepspeed.py",
        '                "gradient_clipping": job.clip_norm or 0.0,  # its default is 1.0\n',
        "",
        ("first gradient",),
        "gradients_clipped_unasked|gradients_clipped_to_a_norm",
        ("conv", "tied"),
        "a first gradient whose norm is above 1",
        engine="deepspeed",
    ),
    Fault(
        "deepspeed: the loss not multiplied by the micro-batches",
        "engines/deepspeed.py",
        "engine.backward(loss * micro_batches)",
        "engine.backward(loss)",
        ("first gradient",),
        "loss_scaled_by_another_factor",
        ("transformer",),
        "micro-batches",
        engine="deepspeed",
    ),
    Fault(
        "fsdp: BatchNorm among the checkpointed units",
        "engines/fsdp.py",
        " and not batch_norms(unit)",
        "",
        ("buffer",),
        "batches_counted_repeatedly",
        ("conv",),
        "BatchNorm",
        engine="fsdp",
        settings={"checkpoint": "true"},
    ),
)
