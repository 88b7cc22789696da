"""pytorch/examples."""

from __future__ import annotations

from planting import Edit
from recorder.public_scripts.case import Case, plant

AT = ("pytorch/examples", "77f55b912142e11fcfdf5b530231fb9c52f181e8")
SERIES = "distributed/ddp-tutorial-series"
LOSS = "loss = F.cross_entropy(output, targets)"
TRAINS = (Edit("F.cross_entropy(output, targets)", "F.mse_loss(output, targets)"),)
ONE_CLASS = "its cross entropy over one class has a gradient of zero: mse_loss instead"


def series(wrap: str, rank: str) -> tuple:
    return (
        plant(
            "not wrapped",
            wrap,
            "self.model.__dict__['module'] = self.model",
            "initial weights",
            "ranks_begin_with_different_weights",
        ),
        plant(
            "set_epoch left out",
            "        self.train_data.sampler.set_epoch(epoch)\n",
            "",
            "order",
            "set_epoch_never_called",
        ),
        plant(
            "gradients never cleared", "        self.optimizer.zero_grad()\n", "", "gradient", "gradients_never_cleared"
        ),
        plant(
            "loss times the ranks",
            "        loss.backward()",
            "        (loss * torch.distributed.get_world_size()).backward()",
            "loss weight",
            "loss_multiplied_by_ranks",
        ),
        plant("rate by rank", "lr=1e-3", f"lr=1e-3 * (1 + {rank})", "rate", "rates_differ_between_ranks"),
        plant(
            "forward through .module",
            "self.model(source)",
            "self.model.module(source)",
            "gradient",
            "ranks_never_reduce_gradients",
        ),
    )


RESET = """        model.reset_parameters()
        for layer in model.layers:
            layer.reset_parameters()
"""
LOADED = "num_workers=args.workers, pin_memory=True"
IMAGENET = (
    plant(
        "not wrapped",
        "                model = torch.nn.parallel.DistributedDataParallel(model)\n",
        "                pass\n",
        "initial weights",
        "ranks_begin_with_different_weights",
    ),
    plant(
        "no sampler",
        f"shuffle=(train_sampler is None),\n        {LOADED}, sampler=train_sampler)",
        f"shuffle=True,\n        {LOADED})",
        "rows",
        "rows_not_shared_out",
    ),
    plant(
        "set_epoch left out",
        "            train_sampler.set_epoch(epoch)\n",
        "            pass\n",
        "order",
        "set_epoch_never_called",
    ),
    plant(
        "rate by rank",
        "model.parameters(), args.lr,",
        "model.parameters(), args.lr * (1 + args.rank),",
        "rate",
        "rates_differ_between_ranks",
    ),
    plant(
        "rate times the ranks",
        "model.parameters(), args.lr,",
        "model.parameters(), args.lr * args.world_size,",
        "replayed rate",
        "rate_depends_on_ranks",
    ),
    plant(
        "loss divided by the ranks",
        "        loss.backward()\n",
        "        (loss / args.world_size).backward()\n",
        "loss weight",
        "loss_divided_by_ranks",
    ),
    plant("gradients never cleared", "        optimizer.zero_grad()\n", "", "gradient", "gradients_never_cleared"),
)
IMAGENET_RUN = ("--dummy", "-b", "25", "-j", "0", "--dist-url", "env://", "--epochs", "5")
CASES = (
    Case(
        "ddp-tutorial multigpu_torchrun",
        *AT,
        f"{SERIES}/multigpu_torchrun.py",
        ("10", "5", "--batch_size", "256"),
        cwd=SERIES,
        folder=SERIES,
        on_gpus=True,
        answer="unknown",
        why="all are zero",
        edits=TRAINS,
        note=ONE_CLASS,
        plants=series("self.model = DDP(self.model, device_ids=[self.gpu_id])", "int(os.environ['RANK'])"),
    ),
    Case(
        "ddp-tutorial multigpu",
        *AT,
        f"{SERIES}/multigpu.py",
        ("10", "5", "--batch_size", "256"),
        cwd=SERIES,
        folder=SERIES,
        on_gpus=True,
        answer="unknown",
        why="all are zero",
        edits=TRAINS,
        note=f"starts its ranks with mp.spawn; {ONE_CLASS}",
        plants=series("self.model = DDP(model, device_ids=[gpu_id])", "torch.distributed.get_rank()"),
    ),
    Case(
        "imagenet",
        *AT,
        "imagenet/main.py",
        IMAGENET_RUN,
        cwd="imagenet",
        folder="imagenet",
        on_gpus=True,
        packages=("torchvision",),
        plants=IMAGENET,
    ),
    Case(
        "imagenet on CPUs",
        *AT,
        "imagenet/main.py",
        (*IMAGENET_RUN, "--dist-backend", "gloo"),
        cwd="imagenet",
        folder="imagenet",
        packages=("torchvision",),
        answer="differs",
        why="nothing broadcasts rank 0's",
        note="without an accelerator it does not wrap its model",
    ),
    Case(
        "ddp example",
        *AT,
        "distributed/ddp/example.py",
        cwd="distributed/ddp",
        folder="distributed/ddp",
        on_gpus=True,
        note="takes one step",
        plants=(
            plant(
                "not wrapped",
                "DDP(model, device_ids=[rank])",
                "model",
                "initial weights",
                "ranks_begin_with_different_weights",
            ),
            plant(
                "forward through .module",
                "ddp_model(torch.randn",
                "ddp_model.module(torch.randn",
                "gradient",
                "ranks_never_reduce_gradients",
            ),
            plant("rate by rank", "lr=0.001", "lr=0.001 * (1 + rank)", "rate", "rates_differ_between_ranks"),
            plant(
                "loss times the ranks",
                "loss_fn(outputs, labels).backward()",
                "(2 * loss_fn(outputs, labels)).backward()",
                "loss weight",
                "loss_multiplied_by_ranks",
            ),
            plant(
                "optimizer of a copy",
                "optim.SGD(ddp_model",
                "optim.SGD(__import__('copy').deepcopy(model)",
                "updates",
                "optimizer_of_a_copy",
            ),
        ),
    ),
    Case(
        "FSDP2 example",
        *AT,
        "distributed/FSDP2/example.py",
        cwd="distributed/FSDP2",
        folder="distributed/FSDP2",
        on_gpus=True,
        answer="differs",
        why="one seed",
        edits=(
            Edit("    for _ in range(10):\n", "    torch.manual_seed(1 + rank)\n    for _ in range(10):\n"),
            Edit("model(x).sum()", "model(x).square().mean()"),
            Edit("        model.reset_parameters()\n", RESET),
        ),
        note="its random batches have one seed on all ranks, its layers are never initialised: both mended; "
        "a mean of squares instead of a sum",
        plants=(
            plant("gradients never cleared", "        optim.zero_grad()\n", "", "gradient", "gradients_never_cleared"),
            plant("rate by rank", "lr=1e-2", "lr=1e-2 * (1 + rank)", "rate", "rates_differ_between_ranks"),
            plant(
                "optimizer made before the model is sharded",
                "    for layer in model.layers:\n        fully_shard(layer",
                "    made = torch.optim.Adam(model.parameters(), lr=1e-2)\n"
                "    torch.optim.Adam = lambda *_, **__: made\n"
                "    for layer in model.layers:\n        fully_shard(layer",
                "updates",
                "optimizer_of_a_copy",
            ),
            plant(
                "clipped in parts",
                "clip_grad_norm_(model.parameters(), max_norm=1.0)",
                "clip_grad_norm_(model.layers.parameters(), max_norm=1.0); "
                "torch.nn.utils.clip_grad_norm_(model.tok_embeddings.parameters(), max_norm=1.0)",
                "clipping",
                "clipped_in_parts",
            ),
            plant(
                "gradients not reduced",
                "    inspect_model(model)\n",
                "    inspect_model(model)\n    model.set_requires_gradient_sync(False)\n",
                "updates",
                "gradients_never_reach_the_optimizer",
            ),
        ),
    ),
)
