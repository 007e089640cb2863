"""A complete program to start from: two CPU ranks; gradients are clipped, so the update happens in step().

torchrun --standalone --nproc-per-node 2 examples/quickstart.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import zerolap


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    ddp = DDP(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1)))
    opt = zerolap.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=1e-2, overlap_with_ddp=True)
    handle = zerolap.attach(ddp, opt, schedule="on_step")
    for step in range(50):
        x = torch.randn(8, 32, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))
        opt.zero_grad()
        loss = (ddp(x) - x.mean(1, keepdim=True)).square().mean()
        loss.backward()
        opt.clip_grad_norm_(1.0)
        opt.step()
    if dist.get_rank() == 0:
        stats = handle.stats()
        print(f"{stats.num_updates} updates, loss {loss.item():.4f}, {stats.state_bytes} bytes of state on this rank")
    handle.detach()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
