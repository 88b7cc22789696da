"""Two pipelines of two stages, which read other rows: torchrun --standalone --nproc-per-node 4 pipeline_replicas.py"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--ddp", action="store_true")
    parser.add_argument("--gpipe", action="store_true")
    parser.add_argument("--clip", type=float, default=0.0)
    parser.add_argument("--optimizer", default="SGD")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    dp_rank, pp_rank = mesh.get_local_rank("dp"), mesh.get_local_rank("pp")
    dp_group, pp_group = mesh.get_group("dp"), mesh.get_group("pp")
    torch.manual_seed(7)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))
    part = model[:2] if pp_rank == 0 else nn.Sequential(*model[2:])
    module = DistributedDataParallel(part, process_group=dp_group) if args.ddp else part
    stage = PipelineStage(module, pp_rank, 2, torch.device("cpu"), group=pp_group)
    kind = ScheduleGPipe if args.gpipe else Schedule1F1B
    schedule = kind(stage, n_microbatches=4, loss_fn=lambda output, target: F.cross_entropy(output, target))
    optimizer = getattr(torch.optim, args.optimizer)(part.parameters(), lr=0.1)
    inputs = torch.randn(96, 16, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(inputs, inputs.argmax(1))
    sampler = DistributedSampler(data, num_replicas=2, rank=dp_rank, seed=3)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for batch, targets in loader:
            losses = []
            optimizer.zero_grad()
            if pp_rank == 0:
                schedule.step(batch)
            else:
                schedule.step(target=targets, losses=losses)
            if not args.ddp:
                for p in part.parameters():
                    dist.all_reduce(p.grad, group=dp_group)
                    p.grad /= 2
            if args.clip:
                norm = nn.utils.get_total_norm([p.grad for p in part.parameters()])
                square = norm**2
                dist.all_reduce(square, group=pp_group)
                nn.utils.clip_grads_with_norm_(part.parameters(), args.clip, square.sqrt())
            optimizer.step()
        if losses and dp_rank == 0:
            print(f"epoch {epoch}: {torch.stack(losses).mean().item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
