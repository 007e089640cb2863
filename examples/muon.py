"""Muon for the matrices of a small GPT, AdamW for the rest, both sharded over two CPU ranks in the same buckets.

torchrun --standalone --nproc-per-node 2 examples/muon.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import zerolap


class Gpt(nn.Module):
    def __init__(self, words: int = 64, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(words, width), nn.Linear(width, words)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(words.shape[1] - 1)
        x = self.head(self.layers(self.embed(words[:, :-1]), mask=mask, is_causal=True))
        return nn.functional.cross_entropy(x.flatten(0, 1), words[:, 1:].flatten())


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    ddp = DDP(Gpt(), bucket_cap_mb=0.25)
    matrices = [param for param in ddp.module.layers.parameters() if param.ndim == 2]
    others = [param for param in ddp.parameters() if not any(param is matrix for matrix in matrices)]
    muon = zerolap.ZeroRedundancyOptimizer(matrices, torch.optim.Muon, lr=0.02, overlap_with_ddp=True)
    adamw = zerolap.ZeroRedundancyOptimizer(others, torch.optim.AdamW, lr=3e-3, overlap_with_ddp=True)
    handle = zerolap.attach(ddp, [muon, adamw], schedule="on_step", gather="lazy")
    for step in range(30):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        words = (torch.randint(64, (8, 1), generator=generator) + 3 * torch.arange(33)) % 64
        loss = ddp(words)
        loss.backward()
        handle.clip_grad_norm_(1.0)  # of all parameters together
        for optimizer in (muon, adamw):
            optimizer.step()
            optimizer.zero_grad()
    stats = handle.stats()
    if dist.get_rank() == 0:
        print(f"{stats.num_updates} updates, loss {loss.item():.4f}, {stats.state_bytes} bytes of state on this rank,")
        print(f"busiest rank / mean: {stats.state_balance:.2f} in state, {stats.work_balance:.2f} in work")
    handle.detach()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
