"""Trainings of small GPTs: karpathy/nanoGPT, and minGPT-ddp of pytorch/examples."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np

from planting import Edit
from recorder.public_scripts.case import Case, plant
from recorder.public_scripts.pytorch import AT


def tokens(folder: Path) -> None:
    target = folder / "data" / "made"
    target.mkdir(parents=True)
    for name in ("train", "val"):
        np.random.default_rng(1).integers(0, 64, 4000).astype(np.uint16).tofile(target / f"{name}.bin")


def text(folder: Path) -> None:
    draw = random.Random(1)
    target = folder / MINGPT / "data"
    target.mkdir(exist_ok=True)
    (target / "input.txt").write_text("".join(draw.choices("abcdefgh \n", k=700)))


NANO = ("compile=False", "dataset=made", "batch_size=4", "block_size=16", "n_layer=2", "n_head=2", "n_embd=16")
NANO += ("gradient_accumulation_steps=6", "eval_iters=1", "warmup_iters=2", "lr_decay_iters=20", "max_iters=20")
SMALL = ("trainer_config.batch_size=16", "trainer_config.data_loader_workers=0", "trainer_config.max_epochs=4")
SMALL += ("data_config.path=data/input.txt", "data_config.block_size=16", "gpt_config.n_layer=2")
SMALL += ("gpt_config.n_head=2", "gpt_config.n_embd=16", "data_config.truncate=0.2")
MINGPT = "distributed/minGPT-ddp/mingpt"
TRAINER = f"{MINGPT}/trainer.py"
SPLIT = Edit("len(dataset) - train_len])", "len(dataset) - train_len], torch.Generator().manual_seed(1))")
SCALED = "self.scaler.scale(loss).backward()\n"
UNSCALED = Edit(SCALED, f"{SCALED}                self.scaler.unscale_(self.optimizer)\n", TRAINER)
CASES = (
    Case(
        "nanoGPT",
        "karpathy/nanoGPT",
        "3adf61e154c3fe3fca428ad6bc3818b27a3b8291",
        "train.py",
        tuple(f"--{each}" for each in (*NANO, "dtype=float32")),
        on_gpus=True,
        prepare=tokens,
        plants=(
            plant("one seed on all ranks", "1337 + seed_offset", "1337", "rows", "ranks_train_the_same_rows"),
            plant(
                "synced at the first micro-batch",
                "(micro_step == gradient_accumulation_steps - 1)",
                "(micro_step == 0)",
                "gradient",
                "reduced_before_last_micro_batch",
            ),
            plant(
                "never synced",
                "(micro_step == gradient_accumulation_steps - 1)",
                "False",
                "gradient",
                "ranks_never_reduce_gradients",
            ),
            plant(
                "accumulation not divided",
                "loss = loss / gradient_accumulation_steps",
                "loss = loss / 1",
                "loss weight",
                "loss_not_divided_by_accumulation",
            ),
            plant(
                "not wrapped",
                "    model = DDP(model, device_ids=[ddp_local_rank])",
                "    model.__dict__['module'] = model",
                "initial weights",
                "ranks_begin_with_different_weights",
            ),
            plant(
                "clipped at each micro-batch",
                "        scaler.scale(loss).backward()\n",
                "        scaler.scale(loss).backward()\n"
                "        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)\n",
                "gradient",
                "clipped_before_last_micro_batch",
            ),
            plant(
                "gradients never cleared",
                "    optimizer.zero_grad(set_to_none=True)\n",
                "",
                "gradient",
                "gradients_never_cleared",
            ),
            plant(
                "rate times the ranks",
                "        param_group['lr'] = lr\n",
                "        param_group['lr'] = lr * ddp_world_size\n",
                "replayed rate",
                "rate_depends_on_ranks",
            ),
            plant(
                "rate by rank",
                "    lr = get_lr(iter_num) if",
                "    lr = get_lr(iter_num + seed_offset) if",
                "rate",
                "rates_differ_between_ranks",
            ),
        ),
    ),
    Case(
        "minGPT-ddp",
        *AT,
        f"{MINGPT}/main.py",
        SMALL,
        cwd=MINGPT,
        folder=MINGPT,
        on_gpus=True,
        packages=("hydra", "omegaconf", "boto3"),
        prepare=text,
        answer="differs",
        edits=(SPLIT, UNSCALED),
        note="each rank splits the data by its own random numbers, and clips scaled gradients: both mended",
        plants=(
            plant(
                "split by own random numbers (as it is)", SPLIT.new, SPLIT.old, "rows", "datasets_of_the_ranks_overlap"
            ),
            plant(
                "clipped while scaled (as it is)",
                UNSCALED.new,
                UNSCALED.old,
                "clipping",
                "clipped_while_scaled",
                TRAINER,
            ),
            plant(
                "not wrapped",
                "        self.model = DDP(self.model, device_ids=[self.local_rank])\n",
                "",
                "initial weights",
                "ranks_begin_with_different_weights",
                TRAINER,
            ),
            plant(
                "set_epoch left out",
                "            dataloader.sampler.set_epoch(epoch)\n",
                "            pass\n",
                "order",
                "set_epoch_never_called",
                TRAINER,
            ),
            plant(
                "gradients never cleared",
                "            self.optimizer.zero_grad(set_to_none=True)\n",
                "",
                "gradient",
                "gradients_never_cleared",
                TRAINER,
            ),
            plant(
                "rate by rank",
                "    data_cfg = DataConfig(",
                "    opt_cfg.learning_rate *= 1 + int(os.environ['RANK'])\n    data_cfg = DataConfig(",
                "rate",
                "rates_differ_between_ranks",
            ),
        ),
    ),
)
