"""zerolap with torch.compile: attach to DDP, compile DDP, train what was compiled. Gathers must be eager, as they are by default.

torchrun --standalone --nproc-per-node 2 examples/integrations/with_compile.py
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import zerolap


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 8))


def batch(step: int) -> Tensor:
    """Other data on every rank and in every step."""
    return torch.randn(16, 32, generator=torch.Generator().manual_seed(1000 * step + dist.get_rank()))


def main(steps: int = 20) -> tuple[nn.Module, zerolap.ZeroRedundancyOptimizer]:
    dist.init_process_group("gloo")
    ddp = DDP(make_model())
    opt = zerolap.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=1e-2, overlap_with_ddp=True)
    handle = zerolap.attach(ddp, opt)
    compiled = torch.compile(ddp)

    for step in range(steps):
        x = batch(step)
        loss = nn.functional.mse_loss(compiled(x), x[:, :8])
        opt.zero_grad()
        loss.backward()
        opt.step()

    if dist.get_rank() == 0:
        whole = 2 * sum(p.nbytes for p in ddp.parameters())
        print(f"attached: {handle.is_attached}, {handle.stats().num_updates} updates; optimizer state: ", end="")
        print(f"{handle.stats().state_bytes} bytes per rank, {whole} with AdamW itself")
    return ddp.module, opt


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
