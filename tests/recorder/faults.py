"""Faults, as text patches of the scripts beside this file: what each does, and what must be found and named."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """`new` for `old` in a script. question: whose answer is 'differs' first. cause: words of the cause."""

    script: str
    name: str
    old: str
    new: str
    question: str
    cause: str


HEALTHY = ("ddp", "accumulate", "by_hand", "accelerate_loop", "lightning_trainer", "hf_trainer", "fsdp2")
HEALTHY += ("tokens", "noisy", "fewer_ranks", "evaluates")
REDUCE = "                dist.all_reduce(parameter.grad)\n"
FAULTS = (
    Fault(
        "ddp",
        "rank 1 initialised by another seed, not wrapped",
        "    model = DistributedDataParallel(model)\n",
        "    for p in model.parameters():\n        p.data += dist.get_rank()\n",
        "initial weights",
        "common seed",
    ),
    Fault("ddp", "no sampler", "sampler=sampler)", "shuffle=True)", "rows", "reads every row"),
    Fault("ddp", "set_epoch left out", "        sampler.set_epoch(epoch)\n", "", "order", "never called"),
    Fault(
        "ddp",
        "forward through .module",
        "cross_entropy(model(rows)",
        "cross_entropy(model.module(rows)",
        "gradient",
        "never reduced",
    ),
    Fault(
        "ddp",
        "averaged twice",
        "            nn.utils.clip",
        "            for p in model.parameters():\n                p.grad /= dist.get_world_size()\n"
        "            nn.utils.clip",
        "loss weight",
        "averaged twice",
    ),
    Fault(
        "ddp",
        "loss divided by the ranks",
        "rows), targets)",
        "rows), targets) / dist.get_world_size()",
        "loss weight",
        "averaged twice",
    ),
    Fault(
        "ddp",
        "clipped in parts",
        "clip_grad_norm_(model.parameters(), 0.5)",
        "clip_grad_norm_(model.module[0].parameters(), 0.1); "
        "nn.utils.clip_grad_norm_(model.module[2].parameters(), 0.1)",
        "clipping",
        "norm of all parameters",
    ),
    Fault(
        "ddp",
        "schedule advanced for each rank",
        "            schedule.step()",
        "            for _ in range(dist.get_world_size()):\n                schedule.step()",
        "schedule",
        "once for each rank",
    ),
    Fault("ddp", "rate by rank", "lr=options.lr", "lr=options.lr * (1 + dist.get_rank())", "rate", "different rates"),
    Fault(
        "ddp",
        "rank 1's weights decayed alone",
        "            schedule.step()",
        "            schedule.step()\n            if dist.get_rank() == 1:\n                with torch.no_grad():\n"
        "                    model.module[0].weight *= 0.999",
        "weights",
        "drifted apart",
    ),
    Fault(
        "ddp",
        "optimizer of a copy",
        "optim.SGD(model.parameters()",
        "optim.SGD([p.detach().clone().requires_grad_() if p.dim() == 1 else p for p in model.parameters()]",
        "updates",
        "no step moves",
    ),
    Fault("accumulate", "not divided", ".mean() / MICRO", ".mean()", "loss weight", "3 accumulated micro-batches"),
    Fault(
        "accumulate",
        "sync flag of the first micro-batch",
        "last else model.no_sync()",
        "number % MICRO == 0 else model.no_sync()",
        "gradient",
        "before the last micro-batch",
    ),
    Fault(
        "accumulate",
        "never synced",
        "contextlib.nullcontext() if last else model.no_sync()",
        "model.no_sync()",
        "gradient",
        "never reduced",
    ),
    Fault(
        "accumulate",
        "gradients cleared at each micro-batch",
        "            with contextlib",
        "            optimizer.zero_grad()\n            with contextlib",
        "gradient",
        "removed before the step",
    ),
    Fault(
        "accumulate",
        "clipped at each micro-batch",
        "                loss.backward()\n",
        "                loss.backward()\n                nn.utils.clip_grad_norm_(model.parameters(), 0.1)\n",
        "gradient",
        "before the gradient is whole",
    ),
    Fault(
        "accumulate",
        "schedule advanced at each micro-batch",
        "            if last:\n",
        "            schedule.step()\n            if last:\n",
        "schedule",
        "several times a step",
    ),
    Fault(
        "accumulate",
        "rows of half the ranks",
        "DistributedSampler(data)",
        "DistributedSampler(data, num_replicas=4, rank=dist.get_rank())",
        "rows",
        "read by no rank",
    ),
    Fault(
        "by_hand",
        "added up, not divided",
        "                parameter.grad /= dist.get_world_size()\n",
        "",
        "loss weight",
        "added up over the 2 ranks",
    ),
    Fault(
        "by_hand",
        "one parameter left out",
        "for parameter in model.parameters():\n" + REDUCE,
        "for parameter in list(model.parameters())[1:]:\n" + REDUCE,
        "gradient",
        "left out",
    ),
    Fault(
        "by_hand",
        "never reduced",
        REDUCE + "                parameter.grad /= dist.get_world_size()\n",
        "                pass\n",
        "gradient",
        "never reduced",
    ),
    Fault(
        "by_hand",
        "clipped before the reduction",
        "            for parameter in model.parameters():\n" + REDUCE,
        "            nn.utils.clip_grad_norm_(model.parameters(), 0.05)\n"
        "            for parameter in model.parameters():\n" + REDUCE,
        "gradient",
        "clipped before the reduction",
    ),
    Fault(
        "by_hand",
        "every rank draws the same rows",
        "manual_seed(100 + dist.get_rank())",
        "manual_seed(100)",
        "rows",
        "one seed",
    ),
    Fault(
        "by_hand",
        "weights not broadcast",
        "        dist.broadcast(parameter.data, 0)\n",
        "        pass\n",
        "initial weights",
        "common seed",
    ),
    Fault(
        "accelerate_loop",
        "loader not prepared",
        "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)",
        "model, optimizer = accelerator.prepare(model, optimizer)",
        "rows",
        "reads every row",
    ),
    Fault(
        "accelerate_loop",
        "model not prepared",
        "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)",
        "optimizer, loader = accelerator.prepare(optimizer, loader)",
        "gradient",
        "never reduced",
    ),
    Fault(
        "accelerate_loop",
        "divided by hand, too",
        "accelerator.backward(loss)",
        "accelerator.backward(loss / 3)",
        "loss weight",
        "twice",
    ),
    Fault(
        "accelerate_loop",
        "clipped at each micro-batch",
        "                if accelerator.sync_gradients:\n    ",
        "                if True:\n    ",
        "gradient",
        "before the gradient is whole",
    ),
    Fault(
        "accelerate_loop",
        "rank 1's weights decayed alone",
        "                optimizer.zero_grad()\n",
        "                optimizer.zero_grad()\n                if accelerator.process_index:\n"
        "                    next(model.parameters()).data.mul_(0.99)\n",
        "weights",
        "drifted apart",
    ),
    Fault(
        "lightning_trainer",
        "no sampler of Lightning's",
        "        max_epochs=10,\n",
        "        max_epochs=10,\n        use_distributed_sampler=False,\n",
        "rows",
        "reads every row",
    ),
    Fault(
        "lightning_trainer",
        "divided by hand, too",
        "mse_loss(self.net(x), y)",
        "mse_loss(self.net(x), y) / 3",
        "loss weight",
        "twice",
    ),
    Fault(
        "lightning_trainer", "rate by rank", "lr=0.01", "lr=0.01 * (1 + self.global_rank)", "rate", "different rates"
    ),
    Fault(
        "lightning_trainer",
        "rank 1's weights decayed alone",
        "        x, y = batch\n",
        "        x, y = batch\n        if self.global_rank:\n            self.net[0].weight.data.mul_(0.99)\n",
        "weights",
        "drifted apart",
    ),
    Fault(
        "lightning_trainer",
        "schedule advanced at each batch",
        "        return torch.optim.Adam(self.parameters(), lr=0.01)\n",
        "        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)\n"
        "        self.schedule = torch.optim.lr_scheduler.StepLR(optimizer, 100)\n        return optimizer\n\n"
        "    def on_train_batch_end(self, *_: object) -> None:\n        self.schedule.step()\n",
        "schedule",
        "once a micro-batch",
    ),
    Fault(
        "hf_trainer",
        "loader not prepared",
        "        trainer.train()\n",
        "        loader = torch.utils.data.DataLoader(Rows(), 4, shuffle=True)\n"
        "        trainer.get_train_dataloader = lambda: loader\n        trainer.train()\n",
        "rows",
        "reads every row",
    ),
    Fault(
        "hf_trainer",
        "divided by hand, too",
        "cross_entropy(logits, labels)",
        "cross_entropy(logits, labels) / 3",
        "loss weight",
        "twice",
    ),
    Fault(
        "hf_trainer",
        "divided by the ranks, too",
        "cross_entropy(logits, labels)",
        "cross_entropy(logits, labels) / 2",
        "loss weight",
        "averaged twice",
    ),
    Fault(
        "hf_trainer",
        "rate by rank",
        "learning_rate=0.01",
        "learning_rate=0.01 * (1 + int(os.environ['RANK']))",
        "rate",
        "different rates",
    ),
    Fault(
        "hf_trainer",
        "rank 1's weights decayed alone",
        "        logits = self.net(x)\n",
        "        if self.training and int(os.environ['RANK']):\n            self.net[0].weight.data.mul_(0.99)\n"
        "        logits = self.net(x)\n",
        "weights",
        "drifted apart",
    ),
    Fault(
        "fsdp2",
        "no sampler",
        "batch_size=5, sampler=sampler",
        "batch_size=5, shuffle=True, generator=torch.Generator().manual_seed(5)",
        "rows",
        "reads every row",
    ),
    Fault("fsdp2", "not divided", "(loss / 3).backward()", "loss.backward()", "loss weight", "not divided by 3"),
    Fault(
        "fsdp2",
        "multiplied by the ranks",
        "(loss / 3).backward()",
        "(loss * dist.get_world_size() / 3).backward()",
        "loss weight",
        "multiplied by the 2 ranks",
    ),
    Fault(
        "fsdp2",
        "sync flag of the first micro-batch",
        "set_requires_gradient_sync(last)",
        "set_requires_gradient_sync(number % 3 == 1)",
        "gradient",
        "are in no step",
    ),
    Fault(
        "fsdp2",
        "optimizer made before the model is sharded",
        "    model = Model()\n",
        "    model = Model()\n    made = torch.optim.Adam(model.parameters(), lr=0.01)\n"
        "    torch.optim.Adam = lambda *_, **__: made\n",
        "updates",
        "other tensors than the model",
    ),
    Fault(
        "fsdp2",
        "clipped in parts",
        "nn.utils.clip_grad_norm_(model.parameters(), 0.1)",
        "[nn.utils.clip_grad_norm_(p, 0.1) for p in model.parameters()]",
        "clipping",
        "parts",
    ),
    Fault("fsdp2", "rate by rank", "lr=0.01", "lr=0.01 * (1 + dist.get_rank())", "rate", "different rates"),
    Fault(
        "fsdp2",
        "schedule advanced for each rank",
        "schedule.step()",
        "[schedule.step() for _ in range(dist.get_world_size())]",
        "schedule",
        "advances",
    ),
)
