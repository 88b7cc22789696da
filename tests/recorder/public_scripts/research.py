"""Larger trainers: timm, open_clip, nanochat, cleanrl and denoising-diffusion-pytorch."""

from __future__ import annotations

import json
import pickle
import random
import sys
from pathlib import Path

from planting import Edit
from recorder.public_scripts.case import Case, Plant, plant, usual, words

SIZE, WORDS = 32, "the cat sat on a mat and ran"
PACKAGES = Path(__file__).parents[1] / "standins" / "packages"


def pictures(folder: Path, number: int, size: int = SIZE) -> list[Path]:
    """Makes random pictures in a new folder."""
    from PIL import Image

    folder.mkdir(parents=True)
    draw = random.Random(str(folder.name))
    paths = [folder / f"{index}.png" for index in range(number)]
    for path in paths:
        Image.frombytes("RGB", (size, size), draw.randbytes(3 * size * size)).save(path)
    return paths


def of_classes(folder: Path) -> None:
    for split in ("train", "validation"):
        for name in ("cat", "dog"):
            pictures(folder / "data" / split / name, 50)


def captioned(folder: Path) -> None:
    draw = random.Random(1)
    lines = [f"{path}\t{' '.join(draw.choices(WORDS.split(), k=4))}" for path in pictures(folder / "src" / "pics", 80)]
    (folder / "src" / "rows.csv").write_text("\n".join(["filepath\ttitle", *lines]))
    text = {"context_length": 8, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 2}
    vision = {"image_size": SIZE, "layers": 2, "width": 16, "head_width": 8, "patch_size": 8}
    model = {"embed_dim": 16, "vision_cfg": vision, "text_cfg": text}
    (folder / "src" / "open_clip" / "model_configs" / "tiny.json").write_text(json.dumps(model))


def documents(folder: Path) -> None:
    """Makes nanochat's folder: parquet files, of which the last is for validation, and a tokenizer."""
    import torch

    sys.path.append(str(PACKAGES))
    import tiktoken

    draw, data = random.Random(1), folder / "base" / "base_data_climbmix"
    data.mkdir(parents=True)
    for number in range(2):
        groups = [
            {"text": [" ".join(draw.choices(WORDS.split(), k=draw.randint(3, 12))) for _ in range(600)]}
            for _ in range(8)
        ]
        (data / f"shard_{number:05d}.parquet").write_text(json.dumps(groups))
    target = folder / "base" / "tokenizer"
    target.mkdir()
    (target / "tokenizer.pkl").write_bytes(pickle.dumps(tiktoken.Encoding()))
    torch.save(torch.ones(64, dtype=torch.int64), target / "token_bytes.pt")


def readme(folder: Path) -> None:
    pictures(folder / "pictures", 128, 16)
    (folder / "train.py").write_text(README)


README = """from denoising_diffusion_pytorch import Unet, GaussianDiffusion, Trainer

model = Unet(
    dim = 8,
    dim_mults = (1, 2),
    attn_dim_head = 8,
    attn_heads = 2
)

diffusion = GaussianDiffusion(
    model,
    image_size = 16,
    timesteps = 1000,           # number of steps
    sampling_timesteps = 250    # number of sampling timesteps
)

trainer = Trainer(
    diffusion,
    'pictures',
    train_batch_size = 8,
    train_lr = 8e-5,
    train_num_steps = 700000,         # total training steps
    gradient_accumulate_every = 2,    # gradient accumulation steps
    ema_decay = 0.995,                # exponential moving average decay
    calculate_fid = False
)

trainer.train()
"""
DIFFUSION = "denoising_diffusion_pytorch/denoising_diffusion_pytorch.py"
TIMM = Case(
    "timm train",
    "huggingface/pytorch-image-models",
    "aa4b5850c1543fa488abf260f18390eda46cf85d",
    "train.py",
    (
        *words("--data-dir data --model test_vit --num-classes 2 --img-size 32 -b 10 --epochs 5 --workers 1"),
        *words("--no-aug --no-prefetcher --device cpu --grad-accum-steps 1 --warmup-epochs 0 --log-interval 1"),
    ),
    parts=("train.py", "timm"),
    on_gpus=True,
    packages=("torchvision",),
    prepare=of_classes,
    plants=(
        usual(
            "gradients never cleared",
            "        num_updates += 1\n        optimizer.zero_grad()\n",
            "        num_updates += 1\n",
        ),
        usual(
            "loss times the ranks",
            "                _loss.backward(create_graph=second_order)",
            "                (_loss * args.world_size).backward(create_graph=second_order)",
        ),
        usual(
            "set_epoch left out",
            "        loader.sampler.set_epoch(epoch)\n",
            "        pass\n",
        ),
        usual(
            "no sampler",
            "                sampler = torch.utils.data.distributed.DistributedSampler(dataset)\n",
            "                sampler = torch.utils.data.RandomSampler(dataset)\n",
            "timm/data/loader.py",
        ),
    ),
)
CLIP = Case(
    "open_clip",
    "mlfoundations/open_clip",
    "89fb801f1e6087880e951fc8354b8a2077b79c6d",
    "src/open_clip_train/main.py",
    (
        *words("--train-data rows.csv --dataset-type csv --model tiny --batch-size 10 --epochs 5 --workers 0"),
        *words("--precision fp32 --warmup 2 --device cpu --local-loss --gather-with-grad --logs logs"),
    ),
    cwd="src",
    parts=("src",),
    on_gpus=True,
    packages=("torchvision", "pandas", "webdataset", "braceexpand", "ftfy"),
    module="open_clip_train.main",
    prepare=captioned,
)
NANOCHAT = Case(
    "nanochat base_train",
    "karpathy/nanochat",
    "92d63d4e8bb4df75c3b71618f31ddde2378b2bcd",
    "scripts/base_train.py",
    (
        *words("--depth 2 --aspect-ratio 16 --head-dim 16 --max-seq-len 16 --device-batch-size 4"),
        *words("--total-batch-size 256 --num-iterations 20 --eval-tokens 256 --core-metric-every -1"),
        *words("--sample-every -1 --window-pattern L --warmup-steps 2"),
    ),
    module="scripts.base_train",
    parts=("nanochat", "scripts", "tasks"),
    on_gpus=True,
    packages=("tiktoken", "rustbpe", "wandb", "pyarrow"),
    env=(("NANOCHAT_BASE_DIR", "base"), ("TORCHDYNAMO_DISABLE", "1"), ("NANOCHAT_DTYPE", "float32")),
    prepare=documents,
    plants=(
        usual(
            "accumulation not divided",
            "        loss = loss / grad_accum_steps # each",
            "        loss = loss / 1 # each",
        ),
        usual("gradients never cleared", "    model.zero_grad(set_to_none=True)\n", ""),
        usual(
            "rate by rank",
            '        group["lr"] = group["initial_lr"] * lrm\n',
            '        group["lr"] = group["initial_lr"] * lrm * (1 + ddp_rank)\n',
        ),
        plant(
            "the same documents on each rank",
            "                rg_idx = ddp_rank\n",
            "                rg_idx = 0\n",
            "rows",
            "ranks_train_the_same_rows",
            "nanochat/dataloader.py",
        ),
    ),
)
CLEANRL = Case(
    "cleanrl ppo_atari_multigpu",
    "vwxyzjn/cleanrl",
    "fe8d8a03c41a7ef5b523e2e354bd01c363e786bb",
    "cleanrl/ppo_atari_multigpu.py",
    words("--local-num-envs 2 --num-steps 8 --num-minibatches 2 --update-epochs 2 --total-timesteps 4000"),
    cwd="cleanrl",
    parts=("cleanrl/ppo_atari_multigpu.py",),
    packages=("gymnasium", "tyro", "cleanrl_utils"),
    plants=(
        usual("gradients never cleared", "                optimizer.zero_grad()\n", ""),
        Plant(
            "one seed on all ranks",
            (
                Edit("    args.seed += local_rank\n", ""),
                Edit("torch.manual_seed(args.seed - local_rank)", "torch.manual_seed(args.seed)"),
            ),
            "rows",
            "ranks_train_the_same_rows",
        ),
        plant(
            "added up, not divided",
            "view_as(param.grad.data) / args.world_size",
            "view_as(param.grad.data) / 1",
            "loss weight",
            "gradients_summed_over_ranks",
        ),
        usual("rate by rank", 'param_groups[0]["lr"] = lrnow', 'param_groups[0]["lr"] = lrnow * (1 + local_rank)'),
        plant(
            "weights by another seed",
            "torch.manual_seed(args.seed - local_rank)",
            "torch.manual_seed(args.seed)",
            "initial weights",
            "ranks_begin_with_different_weights",
        ),
    ),
)
DENOISING = Case(
    "denoising-diffusion-pytorch Trainer",
    "lucidrains/denoising-diffusion-pytorch",
    "faed4db28e724735323fa91c70aa9b28a6e1cbac",
    "train.py",
    parts=("denoising_diffusion_pytorch",),
    packages=("torchvision", "ema_pytorch"),
    env=(("ACCELERATE_USE_CPU", "true"),),
    prepare=readme,
    note="the README's lines with small numbers",
    plants=(
        usual("gradients never cleared", "                self.opt.zero_grad()\n", "", DIFFUSION),
        usual("no sampler", "        dl = self.accelerator.prepare(dl)\n", "", DIFFUSION),
        usual(
            "accumulation not divided",
            "                        loss = loss / self.gradient_accumulate_every\n",
            "",
            DIFFUSION,
        ),
        usual(
            "not wrapped",
            "        self.model, self.opt = self.accelerator.prepare(self.model, self.opt)\n",
            "        self.opt = self.accelerator.prepare(self.opt)\n",
            DIFFUSION,
        ),
        usual(
            "rate by rank",
            "lr = train_lr, betas",
            "lr = train_lr * (1 + self.accelerator.process_index), betas",
            DIFFUSION,
        ),
    ),
)
CASES = (TIMM, CLIP, NANOCHAT, CLEANRL, DENOISING)
