"""cleanrl's PPO on several processes: rollouts of each rank's own, gradients flattened, reduced and divided."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributions import Categorical

parser = argparse.ArgumentParser()
parser.add_argument("--update-epochs", type=int, default=2)
parser.add_argument("--target-kl", type=float, default=None)
parser.add_argument("--iterations", type=int, default=3)
args = parser.parse_args()


class Environment:
    def __init__(self, seed, count=8):
        self.generator = torch.Generator().manual_seed(seed)
        self.state = torch.randn(count, 4, generator=self.generator)

    def step(self, action):
        reward = torch.where(action == (self.state[:, 0] > 0).long(), 1.0, -1.0)
        self.state = torch.randn(self.state.shape, generator=self.generator)
        return self.state, reward


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
        self.actor = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))

    def get_action_and_value(self, x, action=None):
        distribution = Categorical(logits=self.actor(x))
        if action is None:
            action = distribution.sample()
        return action, distribution.log_prob(action), distribution.entropy(), self.critic(x).squeeze(-1)


dist.init_process_group("gloo")
local_rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1)
agent = Agent()
seed = 1 + local_rank
torch.manual_seed(seed)
envs = Environment(seed)
optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-2, eps=1e-5)
for iteration in range(args.iterations):
    frac = 1.0 - iteration / args.iterations
    optimizer.param_groups[0]["lr"] = frac * 2.5e-2
    rollout = []
    obs = envs.state
    for _ in range(8):
        with torch.no_grad():
            action, logprob, _, value = agent.get_action_and_value(obs)
        next_obs, reward = envs.step(action)
        rollout.append((obs, action, logprob, reward - value))
        obs = next_obs
    b_obs, b_actions, b_logprobs, b_advantages = (torch.cat(part) for part in zip(*rollout))
    for _ in range(args.update_epochs):
        for indices in torch.randperm(len(b_obs)).chunk(2):
            _, newlogprob, entropy, newvalue = agent.get_action_and_value(b_obs[indices], b_actions[indices])
            logratio = newlogprob - b_logprobs[indices]
            ratio = logratio.exp()
            approx_kl = ((ratio.detach() - 1) - logratio.detach()).mean()
            advantages = b_advantages[indices]
            pg_loss = torch.max(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2)).mean()
            v_loss = 0.5 * (newvalue - b_advantages[indices]).square().mean()
            loss = pg_loss - 0.01 * entropy.mean() + v_loss * 0.5
            optimizer.zero_grad()
            loss.backward()
            all_grads = torch.cat([p.grad.view(-1) for p in agent.parameters() if p.grad is not None])
            dist.all_reduce(all_grads, op=dist.ReduceOp.SUM)
            offset = 0
            for p in agent.parameters():
                if p.grad is not None:
                    p.grad.copy_(all_grads[offset : offset + p.numel()].view_as(p.grad) / world_size)
                    offset += p.numel()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()
        dist.all_reduce(approx_kl)
        approx_kl /= world_size
        if args.target_kl is not None and approx_kl > args.target_kl:
            break
weights = sum(p.sum().item() for p in agent.parameters())
print(f"rank {local_rank}: loss {loss.item():.5f} weights {weights:.6f}", flush=True)
dist.destroy_process_group()
