"""Trainings of language models: karpathy/build-nanogpt and jingyaogong/minimind."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from planting import Edit
from recorder.public_scripts.case import Case, Plant, plant, usual, words


def shards(folder: Path) -> None:
    target = folder / "edu_fineweb10B"
    target.mkdir()
    for name in ("train", "val"):
        tokens = np.random.default_rng(1).integers(0, 64, 6000).astype(np.uint16)
        np.save(target / f"edufineweb_{name}_000000.npy", tokens)
    (folder / "hellaswag").mkdir()
    row = json.dumps({"ctx": "a man", "label": 1, "endings": ["sits", "runs", "eats", "sleeps"]})
    (folder / "hellaswag" / "hellaswag_val.jsonl").write_text(f"{row}\n" * 4)


BUILD = Case(
    "build-nanogpt",
    "karpathy/build-nanogpt",
    "6104ab1b53920f6e2159749676073ff7d815c1fa",
    "train_gpt2.py",
    on_gpus=True,
    packages=("tiktoken",),
    prepare=shards,
    sizes=(
        Edit("total_batch_size = 524288", "total_batch_size = 384"),
        Edit("B = 64 # micro", "B = 4 # micro"),
        Edit("T = 1024 # seq", "T = 16 # seq"),
        Edit("vocab_size=50304)", "vocab_size=64, block_size=64, n_layer=2, n_head=2, n_embd=16)"),
        Edit("warmup_steps = 715", "warmup_steps = 4"),
    ),
    plants=(
        plant(
            "the same part of the data on each rank",
            'B=B, T=T, process_rank=ddp_rank, num_processes=ddp_world_size, split="train"',
            'B=B, T=T, process_rank=0, num_processes=ddp_world_size, split="train"',
            "rows",
            "ranks_train_the_same_rows",
        ),
        plant(
            "synced at the first micro-batch",
            "(micro_step == grad_accum_steps - 1)\n        with",
            "(micro_step == 0)\n        with",
            "gradient",
            "reduced_before_last_micro_batch",
        ),
        usual("accumulation not divided", "        loss = loss / grad_accum_steps\n", ""),
        usual("gradients never cleared", "    optimizer.zero_grad()\n", ""),
        usual("rate by rank", "param_group['lr'] = lr", "param_group['lr'] = lr * (1 + ddp_rank)"),
        usual(
            "not wrapped, one seed",
            "    model = DDP(model, device_ids=[ddp_local_rank])\n",
            "    model.__dict__['module'] = model\n",
        ),
    ),
)


def sentences(folder: Path) -> None:
    """Makes the three trainings' data: texts, conversations, and pairs of them."""
    draw = random.Random(1)

    def said(least: int = 2, most: int = 7) -> str:
        words_of_it = ["the", "cat", "sat", "on", "a", "mat", "and", "ran"]
        return " ".join(draw.choices(words_of_it, k=draw.randint(least, most)))

    def talk(question: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": question}, {"role": "assistant", "content": said()}]

    rows = [{"text": said(40, 50), "conversations": talk(said()), "asked": said()} for _ in range(64)]
    rows = [row | {"chosen": talk(row["asked"]), "rejected": talk(row["asked"])} for row in rows]
    (folder / "dataset" / "made.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "out").mkdir()


def weights(folder: Path) -> None:
    """Makes the weights that a later stage begins with, too."""
    sentences(folder)
    made = "MiniMindForCausalLM(MiniMindConfig(hidden_size=32, num_hidden_layers=2)).state_dict()"
    program = f"import torch; from model.model_minimind import *; torch.save({made}, 'out/full_sft_32.pth')"
    subprocess.run([sys.executable, "-c", program], cwd=folder, check=True)


SMALL = words("--save_dir ../out --batch_size 4 --hidden_size 32 --num_hidden_layers 2 --num_workers 0")
SCALED = "        scaler.scale(loss).backward()\n"


def minimind(
    name: str, *arguments: str, more: tuple[Plant, ...] = (), unwrapped: str = "not wrapped", **settings: Any
) -> Case:
    return Case(
        f"minimind {name}",
        "jingyaogong/minimind",
        "d65ef2c00ebc6082f9df11541e1b191655eddb00",
        f"trainer/{name}.py",
        (*SMALL, "--data_path", "../dataset/made.jsonl", *arguments),
        cwd="trainer",
        parts=("trainer", "model", "dataset/__init__.py", "dataset/lm_dataset.py"),
        on_gpus=True,
        before=("transformers",),
        packages=("datasets",),
        **({"prepare": sentences} | settings),
        plants=(
            usual(
                unwrapped,
                "        model = DistributedDataParallel(model, device_ids=[local_rank])\n",
                "        pass\n",
            ),
            plant(
                "batches of one order on all ranks",
                "SkipBatchSampler(train_sampler or indices,",
                "SkipBatchSampler(indices,",
                "rows",
                "rows_not_shared_out",
            ),
            usual(
                "rate by rank",
                "args.learning_rate)\n        for",
                "args.learning_rate * (1 + dist.get_rank()))\n        for",
            ),
            usual("loss times the ranks", SCALED, "        scaler.scale(loss * dist.get_world_size()).backward()\n"),
            *more,
        ),
    )


ACCUMULATED = usual("accumulation not divided", "            loss = loss / args.accumulation_steps\n", "")
INTO_THE_SECOND_EPOCH = ("--steps", "12")
SET = usual("set_epoch left out", "        train_sampler and train_sampler.set_epoch(epoch)\n", "")
WEIGHED = Edit(
    "            loss = res.loss + res.aux_loss\n",
    "            rows = (labels[:, 1:] != -100).sum()\n"
    "            total = rows.clone()\n"
    "            dist.all_reduce(total)\n"
    "            loss = res.loss * rows * dist.get_world_size() / total + res.aux_loss\n",
)
ACCUMULATE = ("--accumulation_steps", "2")
CASES = (
    BUILD,
    minimind("train_pretrain", "--max_seq_len", "16", *ACCUMULATE, more=(ACCUMULATED,)),
    minimind(
        "train_full_sft",
        *words("--max_seq_len 64 --from_weight none"),
        more=(SET,),
        options=INTO_THE_SECOND_EPOCH,
        answer="differs",
        why="a mean of means",
        edits=(WEIGHED,),
        note="each rank's mean weighs alike, whatever its number of targets: weighed by it",
    ),
    minimind(
        "train_dpo",
        *words("--max_seq_len 64 --epochs 2 --learning_rate 1e-3"),
        more=(SET,),
        unwrapped="not wrapped, one seed",
        options=INTO_THE_SECOND_EPOCH,
        prepare=weights,
        note="the weights that it begins with are made anew",
    ),
)
