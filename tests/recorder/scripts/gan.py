"""A GAN on DDP, as PyTorch's dcgan example trains one: noise, soft labels, two optimizers that step in turn."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(36, 8))
    sampler = DistributedSampler(data, shuffle=True, seed=3)
    loader = DataLoader(data, batch_size=6, sampler=sampler)
    generator = DistributedDataParallel(nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8)))
    discriminator = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))
    criterion = nn.BCEWithLogitsLoss()
    d_optimizer = torch.optim.SGD(discriminator.parameters(), lr=0.1)
    g_optimizer = torch.optim.SGD(generator.parameters(), lr=0.2)
    torch.manual_seed(10 + dist.get_rank())
    for epoch in range(5):
        sampler.set_epoch(epoch)
        for (real,) in loader:
            d_optimizer.zero_grad()
            criterion(discriminator(real), 0.8 + 0.2 * torch.rand(len(real), 1)).backward()
            fake = generator(torch.randn(len(real), 4))
            output = discriminator(fake.detach())
            criterion(output, torch.zeros_like(output)).backward()
            d_optimizer.step()
            g_optimizer.zero_grad()
            output = discriminator(fake)
            g_loss = criterion(output, torch.ones_like(output))
            g_loss.backward()
            g_optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
