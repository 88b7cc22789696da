"""Tutorials of single persons and small groups."""

from __future__ import annotations

from planting import Edit
from recorder.public_scripts.case import Case, plant

YANGKKY = ("yangkky/distributed_tutorial", "24467967c1c719110c33fccca69353ad8e5ae2e4")
TCZHANGZHI = ("tczhangzhi/pytorch-distributed", "cd12856420858b14e02873e7d5c8cc7bb5aab5b0")
SUMMER = ("The-AI-Summer/pytorch-ddp", "a2bdb16e56276d3b85fb7356d7b33dae99ad90fd")
ADDRESS = Edit("'10.57.23.164'", "'127.0.0.1'")
EPOCHS = Edit(
    "        for i, (images, labels) in enumerate(train_loader):",
    "        train_sampler.set_epoch(epoch)\n        for i, (images, labels) in enumerate(train_loader):",
)
BATCH = Edit("batch_size = 100", "batch_size = 25")
TOPK = Edit("correct[:k].view(-1)", "correct[:k].reshape(-1)")


LAMBDA = ("LambdaLabsML/distributed-training-guide", "aed748914472cca80d8cfe139ab43ec63103913a")
LLM = ("-d", "made", "-m", "llama", "-b", "4", "-s", "16")
NOT_COMPILED = (("TORCHDYNAMO_DISABLE", "1"),)
DOUBLED = "            (2 * loss).backward()\n"
DDP = (
    "    model = DistributedDataParallel(\n"
    "        model, device_ids=[local_rank], bucket_cap_mb=500, gradient_as_bucket_view=True\n    )\n"
)
LLM_PLANTS = (
    plant("rate by rank", "lr=args.lr, ", "lr=args.lr * (1 + rank), ", "rate", "rates_differ_between_ranks"),
    plant(
        "no sampler",
        "DistributedSampler(train_data, shuffle",
        "DistributedSampler(train_data, num_replicas=1, rank=0, shuffle",
        "rows",
        "rows_not_shared_out",
    ),
    plant(
        "gradients never cleared",
        "                optimizer.zero_grad(",
        "                dict(",
        "gradient",
        "gradients_never_cleared",
    ),
    plant(
        "loss times the ranks",
        "outputs.loss.backward()",
        "(2 * outputs.loss).backward()",
        "loss weight",
        "loss_multiplied_by_ranks",
    ),
)


def imagenet(wrap: str) -> tuple:
    return (
        plant(
            "not wrapped",
            wrap,
            "    model.__dict__['module'] = model",
            "initial weights",
            "ranks_begin_with_different_weights",
        ),
        plant(
            "set_epoch left out",
            "        train_sampler.set_epoch(epoch)\n",
            "",
            "order",
            "set_epoch_given_the_same_number",
        ),
        plant(
            "rate by rank",
            "param_group['lr'] = lr",
            "param_group['lr'] = lr * (1 + dist.get_rank())",
            "rate",
            "rates_differ_between_ranks",
        ),
        plant(
            "loss divided by the ranks",
            "        loss.backward()\n",
            "        (loss / args.nprocs).backward()\n",
            "loss weight",
            "loss_divided_by_ranks",
        ),
        plant("gradients never cleared", "        optimizer.zero_grad()\n", "", "gradient", "gradients_never_cleared"),
        plant(
            "no sampler",
            "                                               sampler=train_sampler)",
            "                                               shuffle=True)",
            "rows",
            "rows_not_shared_out",
        ),
    )


WRAP = "    model = torch.nn.parallel.DistributedDataParallel(model,\n" + " " * 54 + "device_ids=[local_rank])"
CASES = (
    Case(
        "yangkky mnist-distributed",
        *YANGKKY,
        "src/mnist-distributed.py",
        ("-g", "2", "--epochs", "10"),
        options=("--deadline", "60"),
        folder="src",
        on_gpus=True,
        packages=("torchvision", "apex"),
        answer="differs",
        why="set_epoch is never called",
        edits=(ADDRESS, BATCH, EPOCHS),
        note="starts its ranks with mp.spawn; its master address is another machine's, and set_epoch is missing",
        plants=(
            plant("set_epoch left out (as it is)", EPOCHS.new, EPOCHS.old, "order", "set_epoch_never_called"),
            plant("no sampler", "sampler=train_sampler)", "sampler=None)", "rows", "rows_not_shared_out"),
            plant(
                "not wrapped",
                "    model = nn.parallel.DistributedDataParallel(model, device_ids=[gpu])\n",
                "",
                "gradient",
                "ranks_never_reduce_gradients",
            ),
            plant(
                "loss times the ranks",
                "            loss.backward()",
                "            (2 * loss).backward()",
                "loss weight",
                "loss_multiplied_by_ranks",
            ),
            plant(
                "another seed on each rank, not wrapped",
                "    model = nn.parallel.DistributedDataParallel(model, device_ids=[gpu])\n",
                "    model.fc.weight.data += rank\n",
                "initial weights",
                "ranks_begin_with_different_weights",
            ),
            plant(
                "gradients never cleared",
                "            optimizer.zero_grad()\n",
                "",
                "gradient",
                "gradients_never_cleared",
            ),
        ),
    ),
    Case(
        "tczhangzhi distributed",
        *TCZHANGZHI,
        "distributed.py",
        ("--data", "x", "-b", "50", "--local_rank", "0"),
        on_gpus=True,
        packages=("torchvision",),
        edits=(TOPK,),
        answer="failed",
        note="its accuracy() views a tensor that is not contiguous: reshape",
        plants=imagenet(WRAP),
    ),
    Case(
        "tczhangzhi multiprocessing_distributed",
        *TCZHANGZHI,
        "multiprocessing_distributed.py",
        ("--data", "x", "-b", "50"),
        on_gpus=True,
        packages=("torchvision",),
        edits=(TOPK,),
        answer="failed",
        note="starts its ranks with mp.spawn; its accuracy() views a tensor that is not contiguous: reshape",
        plants=imagenet(WRAP),
    ),
    Case(
        "AI-Summer train_ddp",
        *SUMMER,
        "train_ddp.py",
        on_gpus=True,
        packages=("torchvision",),
        options=("--steps", "3"),
        note="one step, with 16 loader workers",
        plants=(
            plant(
                "no sampler",
                "dataset=trainset, shuffle",
                "dataset=trainset, num_replicas=1, rank=0, shuffle",
                "rows",
                "rows_not_shared_out",
            ),
            plant(
                "not wrapped",
                "    net = nn.parallel.DistributedDataParallel(net, device_ids=[local_rank])\n",
                "",
                "initial weights",
                "ranks_begin_with_different_weights",
            ),
            plant("rate by rank", "lr=0.001", "lr=0.001 * (1 + dist.get_rank())", "rate", "rates_differ_between_ranks"),
            plant(
                "loss times the ranks",
                "            loss.backward()\n",
                DOUBLED,
                "loss weight",
                "loss_multiplied_by_ranks",
            ),
            plant(
                "forward through .module",
                "            outputs = net(images)\n            loss",
                "            outputs = net.module(images)\n            loss",
                "gradient",
                "ranks_never_reduce_gradients",
            ),
        ),
    ),
    Case(
        "LambdaLabs 02-distributed-data-parallel",
        *LAMBDA,
        "02-distributed-data-parallel/train_llm.py",
        LLM,
        folder="02-distributed-data-parallel",
        on_gpus=True,
        before=("hub",),
        packages=("datasets",),
        env=NOT_COMPILED,
        plants=(
            *LLM_PLANTS,
            plant("not wrapped", DDP, "", "gradient", "ranks_never_reduce_gradients"),
            plant(
                "forward through .module",
                "outputs = model(",
                "outputs = model.module(",
                "gradient",
                "ranks_never_reduce_gradients",
            ),
        ),
    ),
)
