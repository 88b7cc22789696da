"""Faults of scripts on Accelerate, Lightning and transformers."""

from __future__ import annotations

from recorder.faults.fault import Fault

FAULTS = (
    Fault(
        "accelerate_loop",
        "loader not prepared",
        "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)",
        "model, optimizer = accelerator.prepare(model, optimizer)",
        "rows",
        "rows_not_shared_out",
    ),
    Fault(
        "accelerate_loop",
        "model not prepared",
        "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)",
        "optimizer, loader = accelerator.prepare(optimizer, loader)",
        "gradient",
        "ranks_never_reduce_gradients",
    ),
    Fault(
        "accelerate_loop",
        "divided by hand, too",
        "accelerator.backward(loss)",
        "accelerator.backward(loss / accelerator.gradient_accumulation_steps)",
        "loss weight",
        "losses_divided_by_accumulation_twice",
    ),
    Fault(
        "accelerate_loop",
        "clipped at each micro-batch",
        "                if accelerator.sync_gradients:\n    ",
        "                if True:\n    ",
        "gradient",
        "clipped_before_last_micro_batch",
    ),
    Fault(
        "accelerate_loop",
        "rank 1's weights decayed alone",
        "                optimizer.zero_grad()\n",
        "                optimizer.zero_grad()\n                if accelerator.process_index:\n"
        "                    next(model.parameters()).data.mul_(0.99)\n",
        "weights",
        "ranks_weights_drift_apart",
    ),
    Fault(
        "lightning_trainer",
        "no sampler of Lightning's",
        "        max_epochs=10,\n",
        "        max_epochs=10,\n        use_distributed_sampler=False,\n",
        "rows",
        "rows_not_shared_out",
    ),
    Fault(
        "lightning_trainer",
        "divided by hand, too",
        "mse_loss(self.net(x), y)",
        "mse_loss(self.net(x), y) / self.trainer.accumulate_grad_batches",
        "loss weight",
        "losses_divided_by_accumulation_twice",
    ),
    Fault(
        "lightning_trainer",
        "rate by rank",
        "lr=0.01",
        "lr=0.01 * (1 + self.global_rank)",
        "rate",
        "rates_differ_between_ranks",
    ),
    Fault(
        "lightning_trainer",
        "rank 1's weights decayed alone",
        "        x, y = batch\n",
        "        x, y = batch\n        if self.global_rank:\n            self.net[0].weight.data.mul_(0.99)\n",
        "weights",
        "ranks_weights_drift_apart",
    ),
    Fault(
        "lightning_trainer",
        "schedule advanced at each batch",
        "        return torch.optim.Adam(self.parameters(), lr=0.01)\n",
        "        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)\n"
        "        self.schedule = torch.optim.lr_scheduler.StepLR(optimizer, 100)\n        return optimizer\n\n"
        "    def on_train_batch_end(self, *_: object) -> None:\n        self.schedule.step()\n",
        "schedule",
        "schedule_advances_each_micro_batch",
    ),
    Fault(
        "hf_trainer",
        "loader not prepared",
        "        trainer.train()\n",
        "        loader = torch.utils.data.DataLoader(Rows(), 4, shuffle=True)\n"
        "        trainer.get_train_dataloader = lambda: loader\n        trainer.train()\n",
        "rows",
        "rows_not_shared_out",
    ),
    Fault(
        "hf_trainer",
        "divided by hand, too",
        "cross_entropy(logits, labels)",
        "cross_entropy(logits, labels) / int('3')",
        "loss weight",
        "losses_divided_by_accumulation_twice",
    ),
    Fault(
        "hf_trainer",
        "divided by the ranks, too",
        "cross_entropy(logits, labels)",
        "cross_entropy(logits, labels) / torch.distributed.get_world_size()",
        "loss weight",
        "loss_divided_by_ranks",
    ),
    Fault(
        "hf_trainer",
        "rate by rank",
        "learning_rate=0.01",
        "learning_rate=0.01 * (1 + int(os.environ['RANK']))",
        "rate",
        "rates_differ_between_ranks",
    ),
    Fault(
        "hf_trainer",
        "rank 1's weights decayed alone",
        "        logits = self.net(x)\n",
        "        if self.training and int(os.environ['RANK']):\n            self.net[0].weight.data.mul_(0.99)\n"
        "        logits = self.net(x)\n",
        "weights",
        "ranks_weights_drift_apart",
    ),
)
