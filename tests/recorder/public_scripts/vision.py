"""Trainings of pictures: self-supervised learning of facebookresearch, and Chinese tutorials."""

from __future__ import annotations

import random
from pathlib import Path

from planting import Edit
from recorder.public_scripts.case import Case, plant, usual, words

STANDS = {"on_gpus": True, "before": ("old_names",), "packages": ("torchvision", "timm", "tensorboardX")}
TORCHVISION = {"on_gpus": True, "packages": ("torchvision",)}
RANK = "torch.distributed.get_rank()"
# ConvNeXt's training is made after MAE's.
MAES_SAMPLER = (
    usual(
        "no sampler",
        "num_replicas=num_tasks, rank=global_rank, shuffle=True",
        "num_replicas=1, rank=0, shuffle=True",
    ),
    usual(
        "set_epoch left out",
        "            data_loader_train.sampler.set_epoch(epoch)\n",
        "            pass\n",
    ),
)
DINO = Case(
    "DINO",
    "facebookresearch/dino",
    "7c446df5b9f45747937fb0d72314eb9f7b66930a",
    "main_dino.py",
    words("--arch vit_tiny --patch_size 4 --out_dim 64 --batch_size_per_gpu 25 --local_crops_number 2")
    + words("--epochs 20 --num_workers 0 --data_path train --output_dir out --use_fp16 false"),
    **STANDS,
    sizes=(
        Edit("embed_dim=192, depth=12, num_heads=3", "embed_dim=16, depth=2, num_heads=2", "vision_transformer.py"),
        Edit("hidden_dim=2048, bottleneck_dim=256", "hidden_dim=32, bottleneck_dim=16", "vision_transformer.py"),
    ),
    plants=(
        usual(
            "not wrapped, one seed",
            "    student = nn.parallel.DistributedDataParallel(student, device_ids=[args.gpu])\n",
            "    student.__dict__['module'] = student\n",
        ),
        usual(
            "no sampler",
            "DistributedSampler(dataset, shuffle=True)",
            "DistributedSampler(dataset, num_replicas=1, rank=0, shuffle=True)",
        ),
        usual("set_epoch left out", "        data_loader.sampler.set_epoch(epoch)\n", ""),
        usual(
            "rate by rank",
            'param_group["lr"] = lr_schedule[it]',
            'param_group["lr"] = lr_schedule[it] * (1 + dist.get_rank())',
        ),
        usual("gradients never cleared", "        optimizer.zero_grad()\n", ""),
        plant(
            "loss times the ranks",
            "            loss.backward()\n",
            "            (loss * dist.get_world_size()).backward()\n",
            "replayed gradient",
            "loss_depends_on_ranks",
        ),
    ),
)
MAE = Case(
    "MAE",
    "facebookresearch/mae",
    "efb2a8062c206524e35e47d04501ed4f544c0ae8",
    "main_pretrain.py",
    words("--model mae_vit_base_patch16 --batch_size 10 --accum_iter 2 --epochs 20 --warmup_epochs 2")
    + words("--num_workers 0 --data_path data --output_dir out --log_dir out"),
    parts=("main_pretrain.py", "engine_pretrain.py", "models_mae.py", "util"),
    **STANDS,
    sizes=(
        Edit(
            "patch_size=16, embed_dim=768, depth=12, num_heads=12,\n"
            "        decoder_embed_dim=512, decoder_depth=8, decoder_num_heads=16,",
            "img_size=16, patch_size=4, embed_dim=16, depth=2, num_heads=2,\n"
            "        decoder_embed_dim=16, decoder_depth=2, decoder_num_heads=2,",
            "models_mae.py",
        ),
    ),
    plants=(
        usual(
            "not wrapped",
            "        model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[args.gpu], "
            "find_unused_parameters=True)\n",
            "        model.__dict__['module'] = model\n",
        ),
        *MAES_SAMPLER,
        usual(
            "rate by rank",
            "data_iter_step / len(data_loader) + epoch, args)",
            "data_iter_step / len(data_loader) + epoch + misc.get_rank(), args)",
            "engine_pretrain.py",
        ),
        usual("accumulation not divided", "        loss /= accum_iter\n", "", "engine_pretrain.py"),
        usual(
            "gradients never cleared",
            "            optimizer.zero_grad()\n\n        torch.cuda",
            "            pass\n\n        torch.cuda",
            "engine_pretrain.py",
        ),
    ),
)
SSL = words("data -a resnet50 -b 50 -j 0 --epochs 5 --dist-url tcp://localhost:10001")
SPAWNED = words("--multiprocessing-distributed --world-size 1 --rank 0")
SAMPLER = "pin_memory=True, sampler=train_sampler, drop_last=True"
MOCO = Case(
    "MoCo",
    "facebookresearch/moco",
    "3b42c2a12afd20da783501e87c3ea837c054397c",
    "main_moco.py",
    (*SSL, *SPAWNED, *words("--moco-k 100 --moco-dim 16 --mlp --aug-plus --cos")),
    parts=("main_moco.py", "moco"),
    **TORCHVISION,
    answer="failed",
    edits=(Edit("correct[:k].view(-1)", "correct[:k].reshape(-1)"),),
    note="starts its ranks with mp.spawn; its accuracy() views a tensor that is not contiguous: reshape",
    plants=(
        usual(
            "not wrapped",
            "            model = torch.nn.parallel.DistributedDataParallel(\n"
            "                model, device_ids=[args.gpu]\n            )\n",
            "",
        ),
        usual("set_epoch left out", "            train_sampler.set_epoch(epoch)\n", "            pass\n"),
        usual("no sampler", "        sampler=train_sampler,\n", "        sampler=None,\n"),
        usual("rate by rank", 'param_group["lr"] = lr', 'param_group["lr"] = lr * (1 + args.rank)'),
        usual("gradients never cleared", "        optimizer.zero_grad()\n", ""),
        usual(
            "loss divided by the ranks", "        loss.backward()\n", "        (loss / args.world_size).backward()\n"
        ),
    ),
)
SIMSIAM = Case(
    "SimSiam",
    "facebookresearch/simsiam",
    "a7bc1772896d0dad0806c51f0bb6f3b16d290468",
    "main_simsiam.py",
    (*SSL, *SPAWNED, *words("--dim 16 --pred-dim 8")),
    parts=("main_simsiam.py", "simsiam"),
    **TORCHVISION,
    note="starts its ranks with mp.spawn",
    plants=(
        usual(
            "not wrapped",
            "            model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[args.gpu])\n",
            "",
        ),
        usual("set_epoch left out", "            train_sampler.set_epoch(epoch)\n", "            pass\n"),
        usual("no sampler", SAMPLER, SAMPLER.replace("train_sampler", "None")),
        usual("gradients never cleared", "        optimizer.zero_grad()\n", ""),
        plant(
            "loss times the ranks",
            "        loss.backward()\n",
            "        (loss * args.world_size).backward()\n",
            "replayed gradient",
            "gradient_multiplied_by_the_ranks",
        ),
        usual("rate by rank", "init_lr = args.lr * args", "init_lr = (1 + args.rank) * args.lr * args"),
    ),
)
CONVNEXT = Case(
    "ConvNeXt",
    "facebookresearch/ConvNeXt",
    "048efcea897d999aed302f2639b6270aedf8d4c8",
    "main.py",
    words("--model convnext_tiny --data_set CIFAR --data_path x --input_size 32 --batch_size 10")
    + words("--update_freq 2 --epochs 5 --warmup_epochs 1 --num_workers 0 --model_ema true")
    + ("--drop_path", "0.1"),
    parts=("main.py", "engine.py", "datasets.py", "optim_factory.py", "utils.py", "models"),
    **STANDS,
    sizes=(
        Edit(
            "model = ConvNeXt(depths=[3, 3, 9, 3], dims=[96, 192, 384, 768], **kwargs)",
            "model = ConvNeXt(depths=[1, 1, 1, 1], dims=[16, 16, 16, 16], **kwargs)",
            "models/convnext.py",
        ),
    ),
    plants=(
        usual(
            "not wrapped",
            "        model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[args.gpu], "
            "find_unused_parameters=False)\n",
            "        model.__dict__['module'] = model\n",
        ),
        *MAES_SAMPLER,
        usual(
            "rate by rank",
            'lr_schedule_values[it] * param_group["lr_scale"]',
            'lr_schedule_values[it] * param_group["lr_scale"] * (1 + utils.get_rank())',
            "engine.py",
        ),
        usual(
            "accumulation not divided",
            "            loss /= update_freq\n            loss.backward()",
            "            loss.backward()",
            "engine.py",
        ),
        usual(
            "gradients never cleared",
            "                optimizer.step()\n                optimizer.zero_grad()\n",
            "                optimizer.step()\n",
            "engine.py",
        ),
    ),
)
PRACTICE = ("rickyang1114/DDP-practice", "852bdc0201ae89d9aa2e7905031cbb9e9f6e0abe")


def practice(script: str, note: str, rank: str) -> Case:
    wrap = "    model = nn.parallel.DistributedDataParallel(model,\n" + " " * 48 + "device_ids=[local_rank\n"
    return Case(
        f"DDP-practice {Path(script).stem}",
        *PRACTICE,
        script,
        ("-e", "5", "-b", "25"),
        **TORCHVISION,
        note=note,
        plants=(
            usual("not wrapped", wrap + " " * 60 + "])  ### 套 DDP\n", ""),
            usual("set_epoch left out", "        train_dloader.sampler.set_epoch(epoch)  ### 防止采样出 bug\n", ""),
            usual(
                "no sampler",
                "DistributedSampler(\n        train_dataset)",
                "DistributedSampler(\n        train_dataset, num_replicas=1, rank=0)",
            ),
            usual("gradients never cleared", "        optimizer.zero_grad()\n", ""),
            usual(
                "loss times the ranks",
                "scaler.scale(loss).backward()",
                "scaler.scale(loss * dist.get_world_size()).backward()",
            ),
            usual("rate by rank", "model.parameters(), 1e-4", f"model.parameters(), 1e-4 * (1 + {rank})"),
        ),
    )


ZHUANG = Case(
    "jia-zhuang ddp_train",
    "jia-zhuang/pytorch-multi-gpu-training",
    "9353b26c5b56bea8bbb0d404a1dc8f0e0fe08cfb",
    "ddp_train.py",
    ("--local_rank", "0"),
    **TORCHVISION,
    answer="failed",
    edits=(Edit("criterion(outputs, labels)", "criterion(outputs[0], labels)"),),
    note="two steps, with --local_rank as of torch.distributed.launch; its model returns a tuple, of which its loss "
    "takes the first",
    plants=(
        usual(
            "not wrapped, one seed",
            "model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[args.local_rank], "
            "output_device=args.local_rank, find_unused_parameters=True)\n",
            "",
        ),
        usual("no sampler", "train_dataset, sampler=train_sampler,", "train_dataset, shuffle=True,"),
        usual("gradients never cleared", "    optimizer.zero_grad()\n", ""),
        usual("rate by rank", "lr=0.1)", f"lr=0.1 * (1 + {RANK}))"),
        usual("loss times the ranks", "    loss.backward()\n", "    (2 * loss).backward()\n"),
    ),
)


def flowers(folder: Path) -> None:
    from PIL import Image

    draw = random.Random(1)
    for kind in ("daisy", "dandelion", "roses", "sunflowers", "tulips"):
        target = folder / LAUNCH / "flowers" / kind
        target.mkdir(parents=True)
        for number in range(40):
            Image.frombytes("RGB", (16, 16), draw.randbytes(768)).save(target / f"{number}.jpg")


LAUNCH = "pytorch_classification/train_multi_GPU"
LAUNCHED = ("train_multi_gpu_using_launch.py", "model.py", "my_dataset.py", "utils.py", "multi_train_utils")
MODEL = f"{LAUNCH}/model.py"
TRAINED = f"{LAUNCH}/multi_train_utils/train_eval_utils.py"
ONE_RATE = Edit("args.lr *= args.world_size", "args.lr *= 1")
WZMIAOMIAO = Case(
    "WZMIAOMIAO train_multi_gpu_using_launch",
    "WZMIAOMIAO/deep-learning-for-image-processing",
    "2ecf2eea2b97777bb18fe9ff458292fde5a92b7e",
    f"{LAUNCH}/train_multi_gpu_using_launch.py",
    words("--data-path flowers --epochs 5 --batch-size 20"),
    cwd=LAUNCH,
    parts=tuple(f"{LAUNCH}/{name}" for name in LAUNCHED),
    **TORCHVISION,
    prepare=flowers,
    sizes=(
        Edit("BasicBlock, [3, 4, 6, 3]", "BasicBlock, [1, 1, 1, 1]", MODEL),
        Edit("256, blocks_num[2]", "64, blocks_num[2]", MODEL),
        Edit("512, blocks_num[3]", "64, blocks_num[3]", MODEL),
        Edit("nn.Linear(512 * block", "nn.Linear(64 * block", MODEL),
    ),
    answer="differs",
    why="a rate that grows with the batch",
    edits=(ONE_RATE,),
    note="multiplies its rate by the ranks on purpose: not multiplied",
    plants=(
        usual("rate times the ranks", ONE_RATE.new, ONE_RATE.old),
        usual(
            "not wrapped, one seed",
            "    model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[args.gpu])\n",
            "    model.__dict__['module'] = model\n",
        ),
        usual("set_epoch left out", "        train_sampler.set_epoch(epoch)\n", ""),
        usual(
            "gradients never cleared",
            "        optimizer.step()\n        optimizer.zero_grad()\n",
            "        optimizer.step()\n",
            TRAINED,
        ),
        usual("loss times the ranks", "        loss.backward()\n", "        (2 * loss).backward()\n", TRAINED),
        usual(
            "no sampler",
            "train_sampler, batch_size, drop_last=True)",
            "torch.utils.data.RandomSampler(train_data_set), batch_size, drop_last=True)",
        ),
    ),
)
CASES = (
    DINO,
    MAE,
    MOCO,
    SIMSIAM,
    CONVNEXT,
    practice("ddp_main.py", "starts its ranks with mp.spawn", "local_rank"),
    practice("ddp_main_torchrun.py", "", "local_rank"),
    ZHUANG,
    WZMIAOMIAO,
)
