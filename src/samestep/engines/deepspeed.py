"""deepspeed: DeepSpeed's ZeRO. stage 1 shards the optimizer's state, 2 also gradients, 3 also parameters.

precision: 'bf16': the model and its inputs are bfloat16, the weights that the optimizer steps float32.
Source: https://www.deepspeed.ai/getting-started/
"""

from __future__ import annotations

import os
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map_only

from samestep.engine import Checks, Engine, Layout, Needs, Numerics, State
from samestep.errors import Refused, UserError
from samestep.job import Job
from samestep.message import message
from samestep.rank.checkpoint_state import Fragment
from samestep.rank.process_group import process_group
from samestep.training import Run
from samestep.world import World

NOT_IN_DEEPSPEED = {
    "Adafactor": message("optimizer_needs_whole_tensors"),
    "Adagrad": message("deepspeed_builds_another_optimizer"),
    "Muon": message("optimizer_needs_whole_matrices"),
}


def layout(world: World, **settings: Any) -> Layout:
    # DeepSpeed does not synchronise buffers. It replaces a missing gradient by zeros, and weight decay then changes the
    # parameter. Its broadcast of the first weights fails for a parameter without dimensions.
    return Layout(
        replicas=world.size,
        buffers="local",
        every_gradient=True,
        no_scalars=True,
        no_optimizers=NOT_IN_DEEPSPEED,
        no_phases=True,
    )


def numerics(stage: int = 1, precision: str = "full") -> Numerics:
    if precision != "full":
        return Numerics("bfloat16", lossy=True, without={"precision": "full"}, widest="float32")
    # Its master weights are float32, even of a float64 model; stage 3 does not accept float64.
    return Numerics(rounds_to="float32", widest="float32" if stage == 3 else "float64")


def check(model: nn.Module, *, precision: str = "full", **settings: Any) -> None:
    """Raises UserError for BatchNorm in bfloat16: DeepSpeed leaves its statistics float32, and torch takes no other
    weights beside these."""
    normed = [name for name, module in model.named_modules() if isinstance(module, _BatchNorm)]
    if normed and precision == "bf16":
        raise UserError(message("deepspeed_bf16_and_batchnorm", modules=normed))


def train(
    job: Job,
    world: World,
    run: Run,
    *,
    stage: Literal[1, 2, 3] = 1,
    precision: Literal["full", "bf16"] = "full",
) -> State:
    if stage == 3 and job.ema:
        raise Refused(message("deepspeed_stage_3_averages_no_weights"))
    os.environ.setdefault("DS_ACCELERATOR", world.device.partition(":")[0])
    import deepspeed

    with process_group(world):
        module = job.model().to(world.device)
        optimizer = job.optimizer.build(module)
        scheduler = job.lr_scheduler(optimizer)

        def state() -> State:
            with deepspeed.zero.GatheredParameters(list(module.parameters()), enabled=stage == 3):
                exact = float32_weights(module) if precision == "bf16" else {}
                return {name: tensor.detach().clone() for name, tensor in (module.state_dict() | exact).items()}

        run.register(module, optimizer, scheduler=scheduler, state=state)
        if precision == "bf16":
            module.register_forward_pre_hook(lower, with_kwargs=True)
        micro_batches = run.schedule.micro_batches
        engine, *_ = deepspeed.initialize(
            model=module,
            optimizer=optimizer,  # no loader: run.batches() has shared out the rows
            dist_init_required=False,
            config={
                "train_micro_batch_size_per_gpu": 1,  # for its log alone; our rows are what run.batches() gives
                "gradient_accumulation_steps": micro_batches,
                "gradient_clipping": job.clip_norm or 0.0,  # its default is 1.0
                "zero_optimization": {"stage": stage},
                "bf16": {"enabled": precision == "bf16"},
                "zero_allow_untested_optimizer": True,
            },
        )
        for batch in run.batches():
            loss = run.loss(engine, batch)
            engine.backward(loss * micro_batches)  # it divides by their number
            engine.step()  # the optimizer's step at the last micro-batch, and zero_grad
            if batch.completes_step:
                if job.moves_lr(batch):
                    scheduler.step()
                run.step(loss)
        return state()


def fragments(model: Any, world: World) -> list[Fragment]:
    """Returns this rank's fragments of the parameters: those of ZeRO's optimizer are flat, and float32."""
    zero, module, stage, fragments = model.optimizer, model.module, model.zero_optimization_stage(), []
    for name, trained in (
        (name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad
    ):
        parameter: Any = trained
        if stage == 3:
            group, offset, length = zero.grad_position[zero.get_param_id(parameter)]
            size, start = parameter.ds_numel, world.rank * length  # the last fragments are padded
            flat, length = zero.fp32_partitioned_groups_flat[group], max(0, min(length, size - start))
        elif parameter._hp_mapping is None:
            continue  # other ranks have it
        else:
            mapping = parameter._hp_mapping
            flat, size = zero.single_partition_of_fp32_groups[mapping.param_group_index], parameter.numel()
            offset, start, length = (
                mapping.hp_fragment_address.start,
                mapping.lp_fragment_address.start,
                mapping.lp_fragment_address.numel,
            )
        if length:
            fragments.append(Fragment(name, size, flat, offset, start, length))
    return fragments


def float32_weights(module: nn.Module) -> State:
    """Returns the weights that the optimizer steps, on every rank; all must call it."""
    from deepspeed.utils import safe_get_full_fp32_param

    weights = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        exact = safe_get_full_fp32_param(parameter) if parameter.requires_grad else None
        weights[name] = parameter.float() if exact is None else exact
    return weights


def lower(module: Any, args: Any, kwargs: Any) -> Any:
    """A forward pre-hook: makes the floating-point tensors that a module is called with bfloat16, which DeepSpeed does
    not."""
    return tree_map_only(torch.Tensor, lambda t: t.bfloat16() if t.is_floating_point() else t, (args, kwargs))


ENGINE = Engine(
    purpose="ZeRO stages 1, 2 and 3",
    train=train,
    layout=layout,
    needs=Needs(
        packages=("deepspeed",),
        preloads=("deepspeed",),
        no_threads=message("deepspeed_has_one_group_a_process"),
    ),
    numerics=numerics,
    checks=Checks(settings=check, cannot_skip=message("deepspeed_updates_from_gradients_of_its_own")),
    fragments=fragments,
)
