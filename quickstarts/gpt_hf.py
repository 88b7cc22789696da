"""Trains a GPT-2 on a text with Hugging Face's Trainer and gradient accumulation, one process for each GPU.

    torchrun --nproc-per-node 2 gpt_hf.py --text TEXT

TEXT is any text, as tiny Shakespeare. A token is a byte. Every --save-every steps it prints a line and adds a
folder to checkpoints, from whose last the same command continues, in the middle of an epoch too. --evaluate prints the
loss of that one on the last tenth of the text, which is the same on any number of processes.
"""

import argparse
import os

import numpy as np
import torch
from torch.nn import functional as F
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, PrinterCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint


class Text(Dataset):
    """Rows of `length` bytes of a file: of its first nine tenths, or of the last one."""

    def __init__(self, path, length, held_out=False):
        text = np.fromfile(path, np.uint8)
        cut = len(text) * 9 // 10
        self.text, self.length = torch.from_numpy(text[cut:] if held_out else text[:cut]).long(), length

    def __len__(self):
        return (len(self.text) - 1) // self.length

    def __getitem__(self, row):
        window = self.text[row * self.length : (row + 1) * self.length + 1]
        return {"input_ids": window[:-1], "labels": window[:-1]}  # the model shifts the labels itself


class TextTrainer(Trainer):
    def get_eval_dataloader(self, eval_dataset=None):
        self.args.dataloader_drop_last = False  # it would drop rows of the evaluation, too
        loader = super().get_eval_dataloader(eval_dataset)
        self.args.dataloader_drop_last = True
        return loader


class Printer(TrainerCallback):
    def on_evaluate(self, args, state, control, metrics, **_):
        if state.is_world_process_zero:
            print(f"step {state.global_step}: loss {metrics['eval_mean_loss']:.6f}", flush=True)


def losses_of_rows(logits, labels):
    """Returns the mean loss of each row, so that not all logits have to be gathered."""
    losses = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="none")
    return losses.double().view(len(labels), -1).mean(1)


def mean_loss(prediction):
    """Returns the mean over all rows, which the Trainer has gathered without those that it repeated."""
    # Not the Trainer's own eval_loss: a mean of the batches' means, in which repeated rows count.
    return {"mean_loss": prediction.predictions.mean()}


def parse_arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--text", required=True)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch-size", type=int, default=64, help="rows of one step, over all processes")
    parser.add_argument("--accumulate", type=int, default=2, help="forwards of one step, on each process")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--save-every", type=int, default=100)
    parser.add_argument("--checkpoint", default="checkpoints", help="a folder")
    parser.add_argument("--evaluate", action="store_true", help="only evaluate the checkpoint")
    return parser.parse_args()


def main():
    args = parse_arguments()
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    # The batch size is that of all processes together: with more of them the training stays the same.
    rows = args.batch_size // (world_size * args.accumulate)  # of one forward
    if rows * world_size * args.accumulate != args.batch_size:
        raise SystemExit(f"--batch-size {args.batch_size} does not divide by {world_size} processes and --accumulate")
    train_set, held_out = Text(args.text, args.length), Text(args.text, args.length, held_out=True)
    settings = TrainingArguments(
        output_dir=args.checkpoint,
        max_steps=args.steps,
        per_device_train_batch_size=rows,  # of one process, and of one micro-batch
        per_device_eval_batch_size=rows,
        gradient_accumulation_steps=args.accumulate,
        dataloader_drop_last=True,  # an incomplete batch would weigh its rows more
        max_grad_norm=1.0,
        use_cpu=not torch.cuda.is_available(),
        eval_strategy="steps",
        eval_steps=args.save_every,
        save_strategy="steps",
        save_steps=args.save_every,
        save_total_limit=2,
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=0,
    )
    torch.manual_seed(0)  # the same weights on all processes
    sizes = {"n_positions": args.length, "n_layer": args.layers, "n_head": 4, "n_embd": args.width}
    # Without dropout, whose masks a resumed training, and another number of processes, would draw differently.
    config = GPT2Config(vocab_size=256, **sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    # By optimizer steps: not by micro-batches, and not multiplied by the processes.
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, args.steps, cycle_momentum=False)
    trainer = TextTrainer(
        model,
        settings,
        train_dataset=train_set,
        eval_dataset=held_out,
        optimizers=(optimizer, scheduler),
        compute_metrics=mean_loss,
        preprocess_logits_for_metrics=losses_of_rows,
        callbacks=[Printer()],
    )
    trainer.remove_callback(PrinterCallback)
    checkpoint = get_last_checkpoint(args.checkpoint) if os.path.isdir(args.checkpoint) else None
    if args.evaluate:
        trainer._load_from_checkpoint(checkpoint)
        trainer.evaluate()
    else:
        trainer.train(resume_from_checkpoint=checkpoint)


if __name__ == "__main__":
    main()
