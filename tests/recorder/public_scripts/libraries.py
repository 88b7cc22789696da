"""Examples of Lightning, Horovod and DeepSpeed."""

from __future__ import annotations

from planting import Edit
from recorder.public_scripts.case import Case, plant

LIGHTNING = ("Lightning-AI/pytorch-lightning", "7f0c3436cd3f6ad3753125672024fc415cbcb414")
HOROVOD = ("horovod/horovod", "2626dc87a3a8eb8fb7d2216198ce45bce0f9e65a")
DEEPSPEED = ("microsoft/DeepSpeedExamples", "83757d9c937daabd1089a08051061706cb73900d")
FABRIC_RUN = (("LT_CLI_USED", "1"), ("LT_ACCELERATOR", "cpu"), ("LT_DEVICES", "2"), ("LT_STRATEGY", "ddp"))
CLEARED = plant("gradients never cleared", "optimizer.zero_grad()\n", "pass\n", "gradient", "gradients_never_cleared")
FABRIC = (
    CLEARED,
    plant(
        "loss divided by the ranks",
        "fabric.backward(loss)",
        "fabric.backward(loss / fabric.world_size)",
        "loss weight",
        "loss_divided_by_ranks",
    ),
    plant(
        "model not set up",
        "model, optimizer = fabric.setup(model, optimizer)",
        "optimizer = fabric.setup_optimizers(optimizer)",
        "gradient",
        "ranks_never_reduce_gradients",
    ),
)
TWO = Edit("L.Trainer(", 'L.Trainer(devices=2, accelerator="cpu", ')
EPOCH_SET = Edit(
    "        running_loss = 0.0\n        for i",
    "        running_loss = 0.0\n        trainloader.data_sampler.set_epoch(epoch)\n        for i",
)
ONE_RATE = Edit("lr_scaler = hvd.size() if", "lr_scaler = 1 if")
HVD = "    hvd.broadcast_parameters(model.state_dict(), root_rank=0)\n"


def deepspeed(stage: int) -> Case:
    return Case(
        f"DeepSpeed cifar, stage {stage}",
        *DEEPSPEED,
        "training/cifar/cifar10_deepspeed.py",
        ("--dtype", "fp32", "--stage", str(stage)),
        folder="training/cifar",
        before=("deepspeed",),
        packages=("torchvision",),
        options=("--steps", "18"),
        answer="differs",
        why="set_epoch is never called",
        edits=(EPOCH_SET,),
        note="nothing sets its sampler's epoch: set by hand",
        plants=(
            plant(
                "divided by the ranks, too",
                "backward(loss)",
                "backward(loss / 2)",
                "loss weight",
                "loss_divided_by_ranks",
            ),
            plant(
                "loss times the ranks",
                "backward(loss)",
                "backward(2 * loss)",
                "loss weight",
                "loss_multiplied_by_ranks",
            ),
            plant(
                "loader not DeepSpeed's",
                "    for epoch in range(args.epochs):  # loop",
                "    own = trainloader\n    trainloader = torch.utils.data.DataLoader(trainset, 8, shuffle=True)\n"
                "    trainloader.data_sampler = own.data_sampler\n    for epoch in range(args.epochs):  # loop",
                "rows",
                "rows_not_shared_out",
            ),
            plant(
                "rate by rank",
                "    ds_config = get_ds_config(args)\n",
                "    ds_config = get_ds_config(args)\n    ds_config['scheduler']['params']['warmup_max_lr'] *= "
                "1 + _local_rank\n",
                "rate",
                "rates_differ_between_ranks",
            ),
        ),
    )


CASES = (
    Case(
        "Fabric image_classifier",
        *LIGHTNING,
        "examples/fabric/image_classifier/train_fabric.py",
        ("--batch-size", "25"),
        folder="examples/fabric",
        before=("lightning",),
        packages=("torchvision",),
        env=FABRIC_RUN,
        plants=(
            *FABRIC,
            plant(
                "loader not set up",
                "    train_loader, test_loader = fabric.setup_dataloaders(train_loader, test_loader)\n",
                "",
                "rows",
                "rows_not_shared_out",
            ),
            plant(
                "rate by rank",
                "lr=hparams.lr)",
                "lr=hparams.lr * (1 + fabric.global_rank))",
                "rate",
                "rates_differ_between_ranks",
            ),
            plant(
                "schedule advanced at each batch, twice",
                "            optimizer.step()\n",
                "            optimizer.step()\n            scheduler.step()\n            scheduler.step()\n",
                "schedule",
                "schedule_advances_once_per_rank",
            ),
        ),
    ),
    Case(
        "Fabric language_model",
        *LIGHTNING,
        "examples/fabric/language_model/train.py",
        folder="examples/fabric",
        before=("made_text",),
        env=FABRIC_RUN,
        plants=(
            *FABRIC,
            plant(
                "loader not set up",
                "    train_dataloader, val_dataloader = fabric.setup_dataloaders(train_dataloader, val_dataloader)\n",
                "",
                "rows",
                "rows_not_shared_out",
            ),
            plant(
                "rate by rank", "lr=0.1)", "lr=0.1 * (1 + fabric.global_rank))", "rate", "rates_differ_between_ranks"
            ),
        ),
    ),
    Case(
        "Lightning transformer",
        *LIGHTNING,
        "examples/pytorch/basics/transformer.py",
        folder="examples/pytorch/basics",
        before=("made_text",),
        answer="differs",
        edits=(TWO,),
        note="its Trainer takes one device on a CPU: devices=2",
        plants=(
            plant(
                "no sampler of Lightning's",
                TWO.new,
                TWO.new + "use_distributed_sampler=False, ",
                "rows",
                "rows_not_shared_out",
            ),
            plant("rate by rank", "lr=0.1)", "lr=0.1 * (1 + self.global_rank))", "rate", "rates_differ_between_ranks"),
            plant(
                "loss divided by the ranks",
                '        loss = F.nll_loss(output, target.view(-1))\n        self.log("train',
                '        loss = F.nll_loss(output, target.view(-1)) / 2\n        self.log("train',
                "loss weight",
                "loss_divided_by_ranks",
            ),
            plant(
                "gradients never cleared",
                "    def configure_optimizers(self):\n",
                "    def optimizer_zero_grad(self, *_):\n        pass\n\n    def configure_optimizers(self):\n",
                "gradient",
                "gradients_never_cleared",
            ),
        ),
    ),
    Case(
        "Horovod pytorch_mnist",
        *HOROVOD,
        "examples/pytorch/pytorch_mnist.py",
        ("--no-cuda", "--batch-size", "25"),
        folder="examples/pytorch",
        packages=("torchvision",),
        command=("horovodrun", "-np", "2", "--gloo", "python"),
        answer="differs",
        why="a rate that grows with the batch",
        edits=(ONE_RATE,),
        note="multiplies its rate by the ranks on purpose: not multiplied",
        plants=(
            plant(
                "gradients never cleared",
                "            optimizer.zero_grad()\n            output = model(data)\n",
                "            output = model(data)\n",
                "gradient",
                "gradients_never_cleared",
            ),
            plant(
                "set_epoch left out",
                "        # Horovod: set epoch to sampler for shuffling.\n        train_sampler"
                ".set_epoch(epoch)\n        for batch_idx, (data, target) in enumerate(train_loader):\n            "
                "if args.cuda:\n                data, target = data.cuda(), target.cuda()\n            "
                "optimizer.zero_grad()\n            output",
                "        for batch_idx, (data, target) in enumerate("
                "train_loader):\n            optimizer.zero_grad()\n            output",
                "order",
                "set_epoch_never_called",
            ),
            plant(
                "another seed on each rank, weights not broadcast",
                HVD,
                "    model.fc2.bias.data += hvd.rank()\n",
                "initial weights",
                "ranks_begin_with_different_weights",
            ),
            plant(
                "no sampler",
                "batch_size=args.batch_size, sampler=train_sampler,",
                "batch_size=args.batch_size,",
                "rows",
                "rows_not_shared_out",
            ),
            plant(
                "loss times the ranks",
                "            loss.backward()\n",
                "            (2 * loss).backward()\n",
                "loss weight",
                "loss_multiplied_by_ranks",
            ),
        ),
    ),
    deepspeed(1),
    deepspeed(3),
)
