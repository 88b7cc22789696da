"""Faults of tensor parallelism, planted on two replicas of two ranks each."""

from __future__ import annotations

from mutations.faults.fault import Fault

TENSOR, SPLIT, REPLICAS = "engines/tensor.py", "parallel/tensor_parallel.py", "parallel/replica_gradients.py"
JOBS, MESH = ("heads",), "data=2,tensor=2"
GRADIENT, LOSS = ("first gradient",), ("loss",)
AVERAGE = '                average_gradients(model.parameters(), ranks["data"].get_group())\n'
COLUMNS = "        return ColwiseParallel(input_layouts=outside)\n"
ROWS = "    return RowwiseParallel(output_layouts=outside)\n"
SPLITTING = '            sequence = split_layers(model, job, ranks["tensor"], sequence_parallel=sequence_parallel)\n'
SPLITTING += (
    "            if loss_parallel:\n"
    '                split_output(model, job, ranks["tensor"])\n'
    "                entered.enter_context(losses_in_parallel())\n"
)
BUILDING = "        optimizer = job.optimizer.build(model)  # after splitting: of the parts\n"
UNREDUCED = (  # for COLUMNS
    "        split = ColwiseParallel()\n\n"
    "        def unreduced(_asked, _desired, _module, inputs, ranks):\n"
    "            given = DTensor.from_local(inputs[0], ranks, [Replicate()], run_check=False)\n"
    "            if given.requires_grad:\n"
    "                given.register_hook(\n"
    "                    lambda g: DTensor.from_local(g.to_local(), ranks, [Replicate()], run_check=False)\n"
    "                )\n"
    "            return given\n\n"
    "        split._prepare_input_fn = unreduced\n"
    "        return split\n"
)


FUSED = ("sequences",)  # whose query, key and value are one layer
ORDER = "rank/row_order.py"
PUT_IN_ORDER = "        parameter.data = parameter.data[order.to(parameter.device)]\n"


def fault(
    name: str, file: str, old: str, new: str, named: tuple[str, ...], cause: str = "", jobs: tuple[str, ...] = JOBS
) -> Fault:
    return Fault(f"tensor: {name}", file, old, new, named, cause, jobs, engine="tensor", mesh=MESH)


HEALTHY_FUSED = Fault(
    "tensor: nothing, query, key and value in one layer",
    TENSOR,
    "from torch import nn\n",
    "from torch import nn\n",
    (),
    "",
    FUSED,
    engine="tensor",
    mesh=MESH,
)
FAULTS_FUSED = (
    fault(
        "query, key and value split as one output",
        SPLIT,
        "            order_rows(layer, OUTPUTS[style], ranks.size())  # of its outputs each rank has a part\n",
        "            pass\n",
        (*GRADIENT, *LOSS),
        jobs=FUSED,
    ),
    fault(
        "the rows of other heads' keys",
        SPLIT,
        "        split_layer(layer,",
        "            heads = layer.out_features // OUTPUTS[style] // ranks.size()\n"
        "            wrong = [*range(heads), *range(heads, 2 * heads), *range(2 * heads, 3 * heads)]\n"
        "            wrong[heads : 2 * heads] = range(4 * heads, 5 * heads)\n"
        "            wrong += [*range(3 * heads, 4 * heads), *range(heads, 2 * heads), *range(5 * heads, 6 * heads)]\n"
        "            for parameter in layer.parameters():\n"
        "                parameter.data = parameter.data[torch.tensor(wrong)]\n"
        "        split_layer(layer,",
        ("initial weights",),
        jobs=FUSED,
    ),
    fault(
        "keys and values change places",
        ORDER,
        PUT_IN_ORDER,
        PUT_IN_ORDER
        + "        parts = parameter.data.unflatten(0, (ranks, outputs, -1))\n"
        + "        parameter.data = parts[:, [0, 2, 1]].flatten(0, 2)\n",
        ("initial weights",),
        jobs=FUSED,
    ),
    fault(
        "a bias in the order of the model beside a weight in that of the ranks",
        ORDER,
        PUT_IN_ORDER,
        "        if parameter is layer.weight:\n    " + PUT_IN_ORDER,
        ("initial weights",),
        jobs=FUSED,
    ),
    fault(
        "whole weights leave in the order of the ranks",
        ORDER,
        "            ordered[name] = tensor[order.argsort().to(tensor.device)]\n",
        "            ordered[name] = tensor\n",
        ("initial weights",),
        jobs=FUSED,
    ),
    fault(
        "whole weights are ordered once more",
        ORDER,
        "tensor[order.argsort().to(tensor.device)]",
        "tensor[order.to(tensor.device)]",
        ("initial weights",),
        jobs=FUSED,
    ),
)
CHUNKS = "parallel/sequence_parallel.py"
SUM = "                    sequence.sum_gradients()\n"
ADD_UP = "                dist.all_reduce(block_of(gradient), group=self._mesh.get_group())\n"
SPLIT_CHUNK = "self._placed(tensor, Replicate()).redistribute(placements=[Shard(dim)]).to_local()"
JOIN_CHUNKS = "redistribute(placements=[Replicate()]).to_local()"


def of_chunks(name: str, file: str, old: str, new: str, named: tuple[str, ...]) -> Fault:
    return Fault(
        f"tensor: sequence parallel: {name}",
        file,
        old,
        new,
        named,
        "",
        FUSED,
        engine="tensor",
        settings={"sequence_parallel": "true"},
        mesh=MESH,
    )


HEALTHY_CHUNKS = of_chunks("nothing", TENSOR, "from torch import nn\n", "from torch import nn\n", ())
FAULTS_OF_CHUNKS = (
    of_chunks("the gradients of norms are not added up", TENSOR, SUM, " " * 20 + "pass\n", GRADIENT),
    of_chunks(
        "the gradients of norms are averaged over the tensor ranks",
        CHUNKS,
        ADD_UP,
        ADD_UP + "                gradient /= self.chunks.ranks\n",
        GRADIENT,
    ),
    of_chunks(
        "the gradients of norms are added up over all ranks",
        CHUNKS,
        "block_of(gradient), group=self._mesh.get_group())",
        "block_of(gradient))",
        GRADIENT,
    ),
    of_chunks(
        "the gradients of norms are added up after each micro-batch",
        TENSOR,
        "            if batch.completes_step:\n                if sequence:\n" + SUM,
        "            if sequence:\n                sequence.sum_gradients()\n            if batch.completes_step:\n",
        GRADIENT,
    ),
    of_chunks(
        "a temporary copy of the gradients is added up",
        CHUNKS,
        "block_of(gradient), group",
        "block_of(gradient).clone(), group",
        GRADIENT,
    ),
    of_chunks(
        "what is before the blocks has the gradient of one chunk",
        CHUNKS,
        SPLIT_CHUNK,
        "self.chunks.take(tensor, dim, self.rank)",
        GRADIENT,
    ),
    of_chunks(
        "the gradient of what is joined is added up, though all ranks have it",
        CHUNKS,
        JOIN_CHUNKS,
        "redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])",
        GRADIENT,
    ),
    of_chunks(
        "a rank's chunk of the dropout's mask is the first rank's",
        CHUNKS,
        "self.chunks, self.rank, self._mesh = plan.chunks, mesh.get_local_rank(), mesh",
        "self.chunks, self.rank, self._mesh = plan.chunks, 0, mesh",
        LOSS,
    ),
    of_chunks(
        "the parts of rows are averaged where they become chunks",
        SPLIT,
        "    return RowwiseParallel(output_layouts=outside)\n",
        "    layer.register_forward_hook(lambda *given: given[2] / 2)\n"
        "    return RowwiseParallel(output_layouts=outside)\n",
        LOSS,
    ),
    of_chunks(
        "what layers by columns read is not gathered, but taken for that of all positions",
        SPLIT,
        "        return ColwiseParallel(input_layouts=outside)\n",
        "        return ColwiseParallel()\n",
        ("failed", *LOSS),
    ),
)
LOGITS = "parallel/loss_parallel.py"
CROSS_ENTROPY = "    loss: Any = cross_entropy(*arguments, **named)\n"
GIVEN = "    given = SIGNATURE.bind(*arguments, **named).arguments\n"
LOSS_OF_GIVEN = "    loss: Any = cross_entropy(**given)\n"


def of_logits(name: str, file: str, old: str, new: str, named: tuple[str, ...]) -> Fault:
    return Fault(
        f"tensor: loss parallel: {name}",
        file,
        old,
        new,
        named,
        "",
        FUSED,
        engine="tensor",
        settings={"loss_parallel": "true"},
        mesh=MESH,
    )


HEALTHY_LOGITS = of_logits("nothing", TENSOR, "from torch import nn\n", "from torch import nn\n", ())
FAULTS_OF_LOGITS = (
    of_logits(
        "the loss is divided by the tensor ranks",
        LOGITS,
        "    return loss.full_tensor()",
        "    return loss.full_tensor() / logits.device_mesh.size()",
        LOSS,
    ),
    of_logits(
        "the gradient is divided by the tensor ranks",
        LOGITS,
        "    return loss.full_tensor()",
        "    ranks = logits.device_mesh.size()\n"
        "    loss = loss.full_tensor()\n"
        "    return loss.detach() + (loss - loss.detach()) / ranks",
        GRADIENT,
    ),
    of_logits(
        "each part of the vocabulary is padded, and the padding counts",
        LOGITS,
        CROSS_ENTROPY,
        GIVEN + "    part, target = logits.to_local(), given['target']\n"
        "    padded = F.pad(part, (0, 1))\n"
        "    given['input'] = DTensor.from_local(padded, logits.device_mesh, logits.placements, run_check=False)\n"
        "    given['target'] = torch.where(target < 0, target, target + target // part.shape[-1])\n" + LOSS_OF_GIVEN,
        LOSS,
    ),
    of_logits(
        "targets that the loss leaves out count",
        LOGITS,
        CROSS_ENTROPY,
        GIVEN + "    given['target'] = given['target'].clamp(min=0)\n" + LOSS_OF_GIVEN,
        LOSS,
    ),
    of_logits(
        "an embedding that shares the output layer's weight no longer does",
        SPLIT,
        "        embedding.weight = layer.weight\n",
        "",
        GRADIENT,
    ),
    of_logits(
        "the gradient of what the output layer reads is of one part of the vocabulary",
        SPLIT,
        "ColwiseParallel(output_layouts=Shard(-1), use_local_output=False))\n",
        "ColwiseParallel(output_layouts=Shard(-1), use_local_output=False))\n"
        "    layer._forward_pre_hooks.clear()\n\n"
        "    def unreduced(layer, inputs):\n"
        "        given = DTensor.from_local(inputs[0], ranks, [Replicate()], run_check=False)\n"
        "        if given.requires_grad:\n"
        "            given.register_hook(\n"
        "                lambda g: DTensor.from_local(g.to_local(), ranks, [Replicate()], run_check=False)\n"
        "            )\n"
        "        return given\n\n"
        "    layer.register_forward_pre_hook(unreduced)\n",
        GRADIENT,
    ),
)
FAULTS = (
    *FAULTS_FUSED,
    *FAULTS_OF_CHUNKS,
    *FAULTS_OF_LOGITS,
    fault(
        "the gradient of what is before a split layer is not reduced over the tensor ranks",
        SPLIT,
        COLUMNS,
        UNREDUCED,
        GRADIENT,
    ),
    fault("the replicas' gradients never averaged", TENSOR, AVERAGE, "", GRADIENT),
    fault("the replicas' gradients summed", REPLICAS, "            gradient /= replicas.size()\n", "", GRADIENT),
    fault(
        "gradients averaged over all ranks, which have other parts",
        REPLICAS,
        "dist.all_reduce(gradient, group=replicas)\n            gradient /= replicas.size()\n",
        "dist.all_reduce(gradient)\n            gradient /= dist.get_world_size()\n",
        GRADIENT,
    ),
    fault(
        "the gradients of split layers left out of the average",
        REPLICAS,
        "        if parameter.grad is not None:\n            gradient = block_of",
        "        if not isinstance(parameter.grad, dist.tensor.DTensor | None):\n            gradient = block_of",
        GRADIENT,
    ),
    fault(
        "the gradients of whole layers left out of the average",
        REPLICAS,
        "        if parameter.grad is not None:\n            gradient = block_of",
        '        if hasattr(parameter.grad, "full_tensor"):\n            gradient = block_of',
        GRADIENT,
    ),
    fault(
        "no backward pass but of the last micro-batch",
        TENSOR,
        "            loss.backward()\n",
        "            if batch.completes_step:\n                loss.backward()\n",
        GRADIENT,
    ),
    fault(
        "clipped before the average",
        TENSOR,
        AVERAGE
        + "                if job.clip_norm is not None:\n"
        + "                    clip_whole_norm(model.parameters(), job.clip_norm)\n",
        "                if job.clip_norm is not None:\n"
        "                    clip_whole_norm(model.parameters(), job.clip_norm)\n" + AVERAGE,
        LOSS,
    ),
    fault(
        "the norm of whole layers counted once a tensor rank",
        SPLIT,
        "norm.full_tensor() if isinstance(norm, DTensor) else norm)",
        "norm.full_tensor() if isinstance(norm, DTensor) else norm * 2**0.5)",
        LOSS,
    ),
    fault(
        "each rank clips by the norm of its own parts",
        SPLIT,
        "get_total_norm([parameter.grad for",
        "get_total_norm([getattr(parameter.grad, '_local_tensor', parameter.grad) for",
        (*LOSS, "replicas"),
    ),
    fault(
        "split layers are not clipped",
        SPLIT,
        "        for group in of_mesh.values():\n            clip_grads",
        "        for group in [of_mesh[None]]:\n            clip_grads",
        LOSS,
    ),
    fault(
        "the optimizer built before splitting",
        TENSOR,
        SPLITTING + BUILDING,
        "            optimizer = job.optimizer.build(model)\n" + SPLITTING,
        GRADIENT,
    ),
    fault(
        "the parts of an output averaged, not added up",
        SPLIT,
        ROWS,
        "    layer.register_forward_hook(lambda *given: given[2] / 2)\n" + ROWS,
        LOSS,
    ),
    fault(
        "a replica other than the first leaves out its last update of split layers",
        TENSOR,
        "                optimizer.step()\n",
        "                if world.replica and run.count.done == run.steps - 1:\n"
        "                    for parameter in model.parameters():\n"
        '                        if hasattr(parameter.grad, "full_tensor"):\n'
        "                            parameter.grad = None\n"
        "                optimizer.step()\n",
        ("replicas",),
    ),
    fault(
        "rows shared out by ranks instead of replicas",
        "data/loader.py",
        "    micro_batches = schedule.micro_batches_of(world.replica, steps, from_batch)\n",
        "    micro_batches = schedule.micro_batches_of(world.rank % schedule.world_size, steps, from_batch)\n",
        ("failed",),  # the ranks of a replica add up parts of other rows, of which some have more
    ),
    fault(
        "a step shared out among as many replicas as ranks",
        "training.py",
        "schedule_of(job, world.replicas)",
        "schedule_of(job, world.size)",
        ("rows", "indices"),
    ),
    fault(
        "dropout by ranks instead of replicas",
        "rank/step.py",
        "first = self._world.replica * len",
        "first = self._world.rank * len",
        LOSS,
    ),
    fault(
        "dropout equal on all replicas",
        "rank/step.py",
        "first = self._world.replica * len",
        "first = 0 * len",
        LOSS,
    ),
)
