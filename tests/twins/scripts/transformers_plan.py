"""A small language model of transformers, divided by its own plan:
torchrun --standalone --nproc-per-node 2 transformers_plan.py"""

import argparse
import tempfile

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig

VOCABULARY, LENGTH, WIDTH = 64, 8, 32


def saved(kind, tied, folder):
    """Saves a model with random weights, as though it were a pretrained one."""
    config = AutoConfig.for_model(
        kind,
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=tied,
        **(dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16) if "moe" in kind else {}),
    )
    if dist.get_rank() == 0:
        torch.manual_seed(1)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    dist.barrier()
    return folder


def clip(model, limit):
    """Clips by the whole norm, which torch's own function refuses of parameters of several meshes."""
    norms = [torch.linalg.vector_norm(p.grad) for p in model.parameters()]
    total = torch.stack([norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms]).norm()
    for p in model.parameters():
        p.grad.mul_(min(1.0, limit / float(total)))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="llama", help="or qwen3, qwen3_moe")
    parser.add_argument("--fsdp", type=int, default=1, help="replicas, whose weights FSDP2 shards")
    parser.add_argument("--config", action="store_true", help="by a DistributedConfig")
    parser.add_argument("--tied", action="store_true")
    parser.add_argument("--clip", type=float, default=0.0)
    parser.add_argument("--accumulate", type=int, default=1)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    tp = world // args.fsdp
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    path = saved(args.model, args.tied, folder[0])
    plan = {}  # rules that replace those of the model's own plan
    if args.config:
        config = DistributedConfig(tp_size=tp, fsdp_size=args.fsdp, tp_plan=plan or None)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, distributed_config=config)
    else:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, tp_plan=plan or "auto")
    model.train()
    torch.manual_seed(2)
    torch.nn.init.normal_(model.model.norm.weight, 1.0, 0.1)  # a part that is trained anew
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.randint(VOCABULARY, (96, LENGTH), generator=torch.Generator().manual_seed(0))
    data = TensorDataset(ids)
    sampler = DistributedSampler(data, num_replicas=args.fsdp, rank=rank // tp, seed=3)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for number, (batch,) in enumerate(loader):
            loss = model(input_ids=batch, labels=batch).loss
            loss = loss / args.accumulate
            loss.backward()
            if (number + 1) % args.accumulate == 0:
                if args.clip:
                    clip(model, args.clip)
                optimizer.step()
                optimizer.zero_grad()
        if rank == 0:
            print(f"epoch {epoch}: {loss.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
