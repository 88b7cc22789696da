"""The faults: each a patch of a real file of samestep, the quantities that rightly name it, and words of its cause.

`old` must stand in the file, once; a patch that does not apply fails. `jobs`: where the fault can act at all.
`needs`: what a job must have for it, said so that nobody wonders why the others are left out.
`engine`, `settings`: what is proven with the patch in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

ALL = ("conv", "tied", "transformer")


@dataclass(frozen=True)
class Fault:
    name: str
    file: str
    old: str
    new: str
    named: tuple[str, ...]
    cause: str
    jobs: tuple[str, ...] = ALL
    needs: str = ""
    engine: str = "ddp"
    settings: Mapping[str, str] = field(default_factory=dict)


DDP, RUN, SCHEDULE = "engines/ddp.py", "training.py", "data/schedule.py"
LOADER, EVALUATE = "data/loader.py", "rank/evaluate.py"
WRAPPED = "        optimizer = job.optimizer.build(module)\n"
BACKWARD = "                loss.backward()\n"
COMPLETED = "            if batch.completes_step:\n"

FAULTS = (
    Fault(
        "gradient summed, not averaged",
        DDP,
        BACKWARD,
        "                (loss * world.size).backward()\n",
        ("first gradient",),
        "summed over the ranks",
    ),
    Fault(
        "gradient averaged twice",
        DDP,
        BACKWARD,
        "                (loss / world.size).backward()\n",
        ("first gradient",),
        "averaged twice",
    ),
    Fault(
        "gradients never reduced",
        DDP,
        "with nullcontext() if batch.completes_step else model.no_sync():",
        "with model.no_sync():",
        ("first gradient",),
        "never reduced",
    ),
    Fault(
        "one parameter left out of synchronisation",
        DDP,
        "        model: Any = DistributedDataParallel(",
        "        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(\n"
        "            module, [list(dict(module.named_parameters()))[-1]])\n"
        "        model: Any = DistributedDataParallel(",
        ("first gradient",),
        "left out of the reduction",
    ),
    Fault(
        "fp16-compressed gradients",
        DDP,
        WRAPPED,
        "        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks\n"
        "        model.register_comm_hook(None, default_hooks.fp16_compress_hook)\n" + WRAPPED,
        ("first gradient",),
        "lower precision",
    ),
    Fault(
        "different initial weights per rank",
        DDP,
        WRAPPED,
        "        for p in module.parameters():\n            p.data.add_(world.rank * 1e-3)\n" + WRAPPED,
        ("initial weights",),
        "rank 1 starts",
    ),
    Fault(
        "a step with zero gradients before the first",
        DDP,
        "        run.register(module, optimizer, scheduler=scheduler)\n",
        "        for p in module.parameters():\n            p.grad = torch.zeros_like(p)\n"
        "        optimizer.step()\n        optimizer.zero_grad()\n"
        "        run.register(module, optimizer, scheduler=scheduler)\n",
        ("initial weights", "parameter", "loss"),
        "moved them",
        ("conv", "tied"),
        "weight decay or an optimizer whose first step is special",
    ),
    Fault(
        "input normalised twice in the engine",
        DDP,
        "                loss = run.loss(trained, batch)\n",
        "                batch.data[0].sub_(0.13).div_(0.31)\n                loss = run.loss(trained, batch)\n",
        ("tensors received",),
        "normalised",
        ("conv",),
        "floating inputs",
    ),
    Fault(
        "input normalised again inside the model",
        DDP,
        WRAPPED,
        "        module.register_forward_pre_hook(lambda m, a: ((a[0] - 0.13) / 0.31,))\n" + WRAPPED,
        ("loss",),
        "another input",
        ("conv",),
        "floating inputs",
    ),
    Fault(
        "training in evaluation mode",
        DDP,
        WRAPPED,
        "        module.eval()\n" + WRAPPED,
        ("loss",),
        "mode (eval)",
        ("conv", "transformer"),
        "dropout or BatchNorm",
    ),
    Fault(
        "another learning rate",
        DDP,
        WRAPPED,
        WRAPPED + '        for group in optimizer.param_groups:\n            group["lr"] *= world.size\n',
        ("learning rate",),
        "multiplied by",
    ),
    Fault(
        "scheduler stepped N times",
        DDP,
        "                    scheduler.step()\n",
        "                    for _ in range(world.size):\n                        scheduler.step()\n",
        ("learning rate",),
        "scheduler step",
        ("conv", "transformer"),
        "a scheduler",
    ),
    Fault(
        "scheduler stepped at every step instead of every epoch",
        DDP,
        "if job.moves_lr(batch):",
        "if batch.completes_step:",
        ("learning rate",),
        "scheduler steps at other times",
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
        "clipped before the reduction",
        ("tied",),
        "clipping",
    ),
    Fault(
        "clipping left out",
        DDP,
        "if batch.completes_step and job.clip_norm is not None:",
        "if False:",
        ("loss",),
        "not at all",
        ("tied",),
        "clipping",
    ),
    Fault(
        "parameter groups ignored",
        DDP,
        WRAPPED,
        "        optimizer = job.optimizer.cls(module.parameters(), **job.optimizer.settings)\n",
        ("parameter groups",),
        "parameter groups",
        ("tied",),
        "parameter groups",
    ),
    Fault(
        "two optimizer steps for one batch",
        DDP,
        "                optimizer.step(*run.closure(backward))\n",
        "                optimizer.step()\n                optimizer.step()\n",
        ("optimizer steps", "loss", "first gradient", "learning rate"),
        "taken twice",
    ),
    Fault(
        "gradients not cleared",
        DDP,
        "                optimizer.zero_grad()\n",
        "",
        ("loss",),
        "not cleared",
    ),
    Fault(
        "buffers from the wrong rank",
        DDP,
        "        return module.state_dict()\n",
        "        for buffer in module.buffers():\n"
        "            torch.distributed.broadcast(buffer, src=world.size - 1)\n"
        "        return module.state_dict()\n",
        ("buffer",),
        "rank 0's",
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
        "own optimizer",
        ("tied", "transformer"),
        "Adam",
    ),
    Fault(
        "last batch averaged per rank",
        RUN,
        "return loss if share == 1.0 else loss * share",
        "return loss if share else loss * 0",
        ("loss", "first gradient"),
        "row",
    ),
    Fault(
        "dropout equal on all ranks",
        RUN,
        "first = self.world.rank * len(self._streams)",
        "first = 0",
        ("loss",),
        "another rank's dropout",
        ("conv", "transformer"),
        "dropout",
    ),
    Fault(
        "dropout equal at all steps",
        RUN,
        '"replica", part.step, part.micro',
        '"replica", 0, part.micro',
        ("loss",),
        "same dropout mask again",
        ("conv", "transformer"),
        "dropout",
    ),
    Fault(
        "every rank the same rows",
        SCHEDULE,
        "        first = sum(per_rank[:rank])\n",
        "        first = 0\n",
        ("indices",),
        "does not know its rank",
    ),
    Fault(
        "shuffle not changing by epoch",
        SCHEDULE,
        'key(seed, "order", epoch)',
        'key(seed, "order", 0)',
        ("indices",),
        "set_epoch",
    ),
    Fault(
        "last batch padded so that all ranks get as many",
        SCHEDULE,
        "        per_rank = cut(len(whole), self.world_size)\n",
        "        whole = np.resize(whole, -(-len(whole) // self.world_size) * self.world_size)\n"
        "        per_rank = cut(len(whole), self.world_size)\n",
        ("rows", "indices"),
        "padded",
    ),
    Fault(
        "last incomplete batch dropped",
        SCHEDULE,
        'if rest and self.last == "keep"',
        "if False",
        ("rows", "indices"),
        "dropped",
    ),
    Fault(
        "rows fetched in another order than planned",
        LOADER,
        "tensor.index_select(0, indices)",
        "tensor.index_select(0, indices.flip(0))",
        ("tensors received",),
        "their values are not",
    ),
    Fault(
        "padded evaluation",
        EVALUATE,
        "    per_rank = cut(len(chunks), world.size)\n",
        "    chunks += chunks[: world.size - len(chunks) % world.size]\n    per_rank = cut(len(chunks), world.size)\n",
        ("evaluation rows",),
        "padded",
    ),
    Fault(
        "metric of rank 0 only",
        EVALUATE,
        "        dist.all_reduce(table)  #",
        "        dist.broadcast(table, src=0)  #",
        ("evaluation rows",),
        "one rank's counts",
    ),
    Fault(
        "mean of the ranks' means",
        EVALUATE,
        "        dist.all_reduce(table)  #",
        "        mine = table.sum(0) / max(float(table[:, 0].sum()), 1.0)\n"
        "        mine *= length / min(world.size, len(chunks))\n"
        "        table.zero_()\n"
        "        table[world.rank % len(table)] = mine\n"
        "        dist.all_reduce(table)  #",
        ("evaluation",),
        "ranks' means",
    ),
    Fault(
        "evaluation in training mode",
        EVALUATE,
        "    model.eval()\n",
        "    model.train()\n",
        ("evaluation",),
        "another mode",
        ("conv", "transformer"),
        "dropout or BatchNorm",
    ),
    Fault(
        "each rank evaluates with its own buffers",
        EVALUATE,
        "    if world.rank == 0:\n        model.load_state_dict(state)\n    if world.size > 1:",
        "    model.load_state_dict(state)\n    if False:",
        ("evaluation",),
        "other buffers",
        ("conv",),
        "buffers",
    ),
    Fault(
        "augmentation keyed by the place in the batch",
        LOADER,
        "for each in zip(samples, indices, again)",
        "for each in zip(samples, range(len(indices)), again)",
        ("tensors received",),
        "not keyed by the sample",
        ("sentences",),
        "an augmentation",
    ),
    Fault(
        "augmentation alike in every epoch",
        LOADER,
        '(self.seed, "augment", self.epoch, index, *again)',
        '(self.seed, "augment", 0, index, *again)',
        ("tensors received",),
        "does not know the epoch",
        ("sentences",),
        "an augmentation",
    ),
    Fault(
        "an order of its own shuffled",
        SCHEDULE,
        "self.order(epoch)[start:end] if self.shuffle else np.arange(start, end)",
        "_order(self.length, self.seed, epoch)[start:end]",
        ("indices",),
        "another seed or sampler",
        ("stream",),
        "rows in the dataset's order",
    ),
    Fault(
        "a stream that is not told its epoch",
        LOADER,
        "            self.set_epoch(epoch)\n",
        "            self.set_epoch(0)\n",
        ("tensors received",),
        "the epoch",
        ("stream",),
        "a stream",
    ),
    Fault(
        "a stream one row late",
        "data/stream.py",
        "            self._rows, self._next = iter(self.dataset), 0\n",
        "            self._rows, self._next = iter(self.dataset), 0\n            next(self._rows)\n",
        ("tensors received",),
        "their values are not",
        ("stream",),
        "a stream",
    ),
    Fault(
        "the rows' weights ignored",
        SCHEDULE,
        "if self.weight is None else",
        "if True else",
        ("weight",),
        "their weights in the mean are not",
        ("sentences",),
        "weights",
    ),
    Fault(
        "the evaluation's weights ignored",
        EVALUATE,
        "if job.evaluation_weight else len(chunk)",
        "if False else len(chunk)",
        ("evaluation rows",),
        "their weights in the evaluation's loss",
        ("sentences",),
        "weights",
    ),
    Fault(
        "the evaluation's loss divided by the rows, not their weights",
        EVALUATE,
        '{"loss": self.weight}',
        '{"loss": float(self.rows)}',
        ("evaluation",),
        "the weights are right and the metric is not",
        ("sentences",),
        "weights",
    ),
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
        "the optimizer holds other parameters than the model",
        engine="fabric",
        settings={"strategy": "model_parallel"},
    ),
    Fault(
        "horovod: the optimizer's state broadcast before its first step",
        "engines/horovod.py",
        "    hvd.broadcast_parameters(state, root_rank=0)\n",
        "    hvd.broadcast_parameters(state, root_rank=0)\n    hvd.broadcast_optimizer_state(optimizer, root_rank=0)\n",
        ("initial weights", "parameter", "loss"),
        "moved them",
        engine="horovod",
    ),
    Fault(
        "horovod: gradients summed",
        "engines/horovod.py",
        "        backward_passes_per_step=run.schedule.micro_batches,\n",
        "        backward_passes_per_step=run.schedule.micro_batches,\n        op=hvd.Sum,\n",
        ("first gradient",),
        "summed over the ranks",
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
        "clipped before the reduction",
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
        "scheduler step",
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
        "times the right one: the loss is scaled by another factor",
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
        "times the right one: the loss is scaled by another factor",
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
        "clipped",
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
        "scheduler steps at other times",
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
        "gradients are not cleared",
        engine="fairscale",
    ),
    Fault(
        "split: activations detached on their way",
        "engines/split.py",
        "return moved(args, device), moved(kwargs, device)",
        "return tree_map_only(Tensor, Tensor.detach, moved(args, device)), kwargs",
        ("first gradient",),
        "wrong alone, the others are right",
        engine="split",
    ),
    Fault(
        "split: no backward pass but of the last micro-batch in flight",
        "engines/split.py",
        "for each in waiting:",
        "for each in waiting[-1:]:",
        ("first gradient",),
        "the last micro-batch's alone",
        ("transformer",),
        "micro-batches",
        engine="split",
        settings={"in_flight": "8"},
    ),
    Fault(
        "fsdp: the optimizer built before sharding",
        "engines/fsdp.py",
        "        fully_shard(model, **options)\n        optimizer = job.optimizer.build(model)",
        "        optimizer = job.optimizer.build(model)\n        fully_shard(model, **options)",
        ("first gradient",),
        "the optimizer holds other parameters than the model",
        engine="fsdp",
        settings={"wrap": "root"},
    ),
    Fault(
        "fsdp: gradients never reduced",
        "engines/fsdp.py",
        "model.set_requires_gradient_sync(batch.completes_step)",
        "model.set_requires_gradient_sync(False)",
        ("first gradient",),
        "the weights do not move",
        engine="fsdp",
    ),
    Fault(
        "zero: parameter groups ignored",
        "engines/zero.py",
        "recipe.groups(module) if recipe.groups else module.parameters()",
        "module.parameters()",
        ("parameter groups",),
        "parameter groups",
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
        "by another norm",
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
        "clipped",
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
        "times the right one: the loss is scaled by another factor",
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
        "counted twice",
        ("conv",),
        "BatchNorm",
        engine="fsdp",
        settings={"checkpoint": "true"},
    ),
    Fault(
        "ddp: gradients compressed to fp16 and summed",
        "engines/ddp.py",
        'model.register_comm_hook(None, getattr(default_hooks, compress + "_compress_hook"))',
        "\n"
        "            def summed(_, bucket):\n"
        "                sent = dist.all_reduce(bucket.buffer().half(), async_op=True).get_future()\n"
        "                return sent.then(lambda done: bucket.buffer().copy_(done.value()[0]))\n\n"
        "            model.register_comm_hook(None, summed)",
        ("first gradient", "loss"),
        "summed over the ranks",
        settings={"compress": "fp16"},
    ),
    Fault(
        "amp: no autocast",
        "engines/amp.py",
        "with torch.autocast(device, DTYPES[precision]):",
        "with nullcontext():",
        ("precision",),
        "not in force",
        engine="amp",
    ),
    Fault(
        "ddp: the compressing hook never registered",
        DDP,
        'elif compress != "none":',
        'elif compress == "never":',
        ("precision",),
        "not in force",
        settings={"compress": "fp16"},
    ),
    Fault(
        "fsdp: asked for bf16, sharded in float32",
        "engines/fsdp.py",
        "lower = MixedPrecisionPolicy(torch.bfloat16, torch.float32)",
        "pass",
        ("precision",),
        "not in force",
        engine="fsdp",
        settings={"precision": "bf16"},
    ),
    Fault(
        "ddp: PowerSGD's hook only sums",
        DDP,
        "            model.register_comm_hook(PowerSGDState(None, start_powerSGD_iter=EXACT), powerSGD_hook)",
        "            def summed(state, bucket):\n"
        "                return powerSGD_hook(state, bucket).then(lambda done: done.value() * world.size)\n\n"
        "            model.register_comm_hook(PowerSGDState(None, start_powerSGD_iter=EXACT), summed)",
        ("first gradient",),
        "summed over the ranks",
        settings={"compress": "powersgd"},
    ),
    Fault(
        "only the last micro-batch runs backward",
        DDP,
        BACKWARD,
        "                loss.backward() if batch.completes_step else None\n",
        ("first gradient",),
        "the last micro-batch's alone",
        ("transformer",),
        "micro-batches",
    ),
    Fault(
        "no_sync on the last micro-batch instead of the others",
        DDP,
        "nullcontext() if batch.completes_step else model.no_sync()",
        "model.no_sync() if batch.completes_step else nullcontext()",
        ("first gradient",),
        "no_sync is the wrong way round",
        ("transformer",),
        "micro-batches",
    ),
    Fault(
        "every micro-batch weighs alike",
        SCHEDULE,
        "share=weight * self.world_size / total",
        "share=1.0 / self.micro_batches if rows else 0.0",
        ("first gradient",),
        "weighs as much as one of more rows",
        ("transformer",),
        "micro-batches",
    ),
    Fault(
        "order frozen from the third epoch on",
        SCHEDULE,
        'key(seed, "order", epoch)',
        'key(seed, "order", min(epoch, 2))',
        ("indices",),
        "a later epoch",
    ),
    Fault(
        "a rank other than 0 leaves out its last update",
        DDP,
        "                optimizer.step(*run.closure(backward))\n",
        "                kept = [p.detach().clone() for p in module.parameters()]\n"
        "                optimizer.step(*run.closure(backward))\n"
        "                if world.rank and batch.part.step == run.steps - 1:\n"
        "                    for p, before in zip(module.parameters(), kept):\n"
        "                        p.data.copy_(before)\n",
        ("replicas",),
        "left its last update out",
    ),
)
