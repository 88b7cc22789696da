"""Faults of pipeline parallelism, planted on two replicas of two stages each."""

from __future__ import annotations

from dataclasses import replace

from mutations.faults.fault import Fault
from mutations.faults.tensor import REPLICAS

PIPELINE, STAGES = "engines/pipeline.py", "parallel/pipeline_stages.py"
SHARDS = "parallel/sharded_stages.py"
JOBS, MESH, SHARDED = ("deep",), "data=2,stage=2", "stage=2,shard=2"
GRADIENT, LOSS = ("first gradient",), ("loss",)
AVERAGE = (
    "                unsharded = [parameter for parameter in model.parameters() if not is_shard(parameter)]\n"
    '                for axis in ("data", "shard"):  # FSDP has averaged those of shards\n'
    "                    average_gradients(unsharded, ranks[axis].get_group())\n"
)
CLIP = (
    "                if job.clip_norm is not None:\n"
    "                    counted, device = divided.owned(), world.device\n"
    "                    clip_divided_norm(model.parameters(), job.clip_norm, counted=counted, group=stages,"
    " device=device)\n"
)
STEP = "                optimizer.step()\n"


def fault(name: str, file: str, old: str, new: str, named: tuple[str, ...], cause: str = "", mesh: str = MESH) -> Fault:
    return Fault(f"pipeline: {name}", file, old, new, named, cause, JOBS, engine="pipeline", mesh=mesh)


FAULTS = (
    fault("the loss divided by the micro-batches twice", STAGES, "scale_grads=False", "scale_grads=True", GRADIENT),
    fault(
        "the loss never divided by the micro-batches",
        STAGES,
        "return (loss * batch.micro_batch.share).float()",
        "return loss.float()",
        GRADIENT,
    ),
    fault(
        "the gradient of the last micro-batch alone",
        STAGES,
        "return (loss * batch.micro_batch.share).float()",
        "return (loss * batch.micro_batch.share * batch.completes_step).float()",
        GRADIENT,
    ),
    fault(
        "the copies of a tied weight not summed",
        PIPELINE,
        "                sum_copies(divided, copies)\n",
        "",
        GRADIENT,
    ),
    fault(
        "the copies of a tied weight averaged",
        PIPELINE,
        "            dist.all_reduce(block_of(parameter.grad), group=group)\n",
        "            dist.all_reduce(block_of(parameter.grad), group=group)\n"
        "            parameter.grad /= group.size()\n",
        GRADIENT,
    ),
    fault(
        "each stage clips by its own norm",
        REPLICAS,
        "    dist.all_reduce(squared, group=group)\n",
        "",
        (*LOSS, "replicas"),
    ),
    fault(
        "a tied weight counted twice in the norm",
        PIPELINE,
        "counted, device = divided.owned(), world.device",
        "counted, device = [p for p in model.parameters() if not p.is_meta], world.device",
        LOSS,
    ),
    fault(
        "the norm of the last stage left out",
        REPLICAS,
        "    dist.all_reduce(squared, group=group)\n",
        "    dist.broadcast(squared, group=group, group_src=0)\n",
        LOSS,
    ),
    fault("the replicas' gradients never averaged", PIPELINE, AVERAGE, "", GRADIENT),
    fault("the replicas' gradients summed", REPLICAS, "            gradient /= replicas.size()\n", "", GRADIENT),
    fault("clipped before the average", PIPELINE, AVERAGE + CLIP, CLIP + AVERAGE, LOSS),
    fault(
        "a stage that does not step",
        PIPELINE,
        STEP,
        '                if ranks["stage"].get_local_rank() == 0:\n                    optimizer.step()\n',
        (*GRADIENT, "optimizer steps", "learning rate", "learning rates"),
    ),
    fault(
        "a stage of the second replica leaves out its last update",
        PIPELINE,
        STEP,
        '                if world.replica and ranks["stage"].get_local_rank() and run.count.done == run.steps - 1:\n'
        "                    optimizer.zero_grad()\n" + STEP,
        ("replicas",),
    ),
    fault("gradients not set to zero", PIPELINE, "                optimizer.zero_grad()\n", "", LOSS),
    fault(
        "the labels of another micro-batch",
        STAGES,
        "        batch = self.batches[int(number)]\n",
        "        wrong = {2: 3, 3: 2} if self.sends is None else {}  # of these, one has as many rows as the other\n"
        "        batch = self.batches[wrong.get(int(number), int(number))]\n",
        LOSS,
    ),
    fault(
        "each stage draws its random numbers anew",
        STAGES,
        "            if self.draws:\n                generator.set_state(received[-1].cpu())\n",
        "",
        LOSS,
    ),
    fault(
        "the losses of a rank that has none",
        STAGES,
        "group_src=self.divided.rank_of[last]",
        "group_src=0",
        LOSS,
    ),
    fault(
        "a stage's buffers from another replica",
        PIPELINE,
        STEP,
        STEP + "                for buffer in model.buffers():\n"
        "                    if not buffer.is_meta:\n"
        "                        dist.broadcast(buffer, group=ranks['data'].get_group(), group_src=1)\n",
        ("buffer",),
    ),
    fault(
        "rows without weight change a stage's buffers",
        "training.py",
        "            if micro_batch.rows == 0:\n",
        "            if micro_batch.rows < 0:\n",
        ("buffer",),
    ),
    fault(
        "evaluated and saved with the first stage's weights alone",
        "rank/shards.py",
        "            tensor_bytes.copy_(piece)\n",
        "            tensor_bytes.copy_(piece if owner == rank else 0 * piece)\n",
        ("initial weights", "first gradient", "weights"),
    ),
    fault(
        "the learning rate of the first stage alone moves",
        PIPELINE,
        "                if job.moves_lr(batch):\n",
        '                if job.moves_lr(batch) and ranks["stage"].get_local_rank() == 0:\n',
        ("learning rate",),
    ),
    fault(
        "a step shared out among as many replicas as ranks",
        "training.py",
        "schedule_of(job, world.replicas)",
        "schedule_of(job, world.size)",
        ("rows", "indices"),
    ),
    fault(
        "fewer micro-batches than the engine says",
        "training.py",
        "fewest=micro_batches)",
        "fewest=micro_batches - 1)",
        ("rows", "indices", "failed"),
    ),
    *(
        fault(f"sharded: {name}", file, old, new, named, mesh=SHARDED)
        for name, file, old, new, named in (
            (
                "the gradients of shards summed",
                SHARDS,
                "ignored_params={*stage_parameters})\n",
                "ignored_params={*stage_parameters})\n            module.set_gradient_divide_factor(1.0)\n",
                GRADIENT,
            ),
            (
                "the norm of a rank's own shards",
                REPLICAS,
                "get_total_norm(gradients)",
                "get_total_norm([block_of(gradient) for gradient in gradients])",
                (*LOSS, "replicas"),
            ),
            (
                "the copies of a tied weight not summed",
                PIPELINE,
                "                sum_copies(divided, copies)\n",
                "",
                GRADIENT,
            ),
            (
                "sharded over the stages",
                PIPELINE,
                'else ranks["shard"]',
                'else ranks["stage"]',
                (*GRADIENT, "failed", "initial weights"),
            ),
            (
                "evaluated and saved with a rank's own shards",
                "rank/shards.py",
                "(held.full_tensor() if is_shard(held) else held)",
                "(held.to_local() if is_shard(held) else held)",
                (*GRADIENT, "failed", "initial weights"),
            ),
        )
    ),
    replace(
        fault(
            "sharded: what stays whole is not averaged",
            PIPELINE,
            'for axis in ("data", "shard"):',
            'for axis in ("data",):',
            (*GRADIENT, "replicas"),
            mesh=SHARDED,
        ),
        settings={"schedule": "ZBVZeroBubble"},  # the tied weight is of two stages of one rank
    ),
)
