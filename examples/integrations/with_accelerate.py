"""zerolap in Hugging Face Accelerate: prepare the model, attach to the resulting DDP, prepare the optimizer.

    torchrun --standalone --nproc-per-node 2 examples/integrations/with_accelerate.py runs/accelerate

Started again, it resumes.
"""

import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import zerolap


def model_and_loader():
    torch.manual_seed(0)
    x = torch.randn(256, 32)
    model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 8))
    return model, DataLoader(TensorDataset(x, x[:, :8]), batch_size=16)


def main(folder, epochs=4, clip=1.0):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    ddp, loader = accelerator.prepare(*model_and_loader())
    zero = zerolap.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=1e-2, overlap_with_ddp=True)
    handle = zerolap.attach(ddp, zero, schedule="on_step")
    opt, scheduler = accelerator.prepare(zero, torch.optim.lr_scheduler.ExponentialLR(zero, gamma=0.99))

    done = 0
    if zerolap.checkpoint.steps(folder):
        loaded = zerolap.checkpoint.load(folder, ddp, zero)
        scheduler.load_state_dict(loaded.extra["scheduler"])
        done = loaded.step
    for epoch in range(done, epochs):
        for x, y in loader:
            with accelerator.accumulate(ddp):
                accelerator.backward(nn.functional.mse_loss(ddp(x), y))
                if clip is not None and accelerator.sync_gradients:
                    zero.clip_grad_norm_(clip)  # not accelerator's, which sees this rank's local gradients
                opt.step()
                scheduler.step()
                opt.zero_grad()
        # Not accelerator.save_state(), which needs the whole optimizer state on every rank.
        zerolap.checkpoint.save(folder, ddp, zero, step=epoch + 1, extra={"scheduler": scheduler.state_dict()})

    whole = 2 * sum(p.nbytes for p in ddp.parameters())
    accelerator.print(
        f"attached: {handle.is_attached}, {handle.stats().num_updates} updates; optimizer state: ", end=""
    )
    accelerator.print(f"{handle.stats().state_bytes} bytes per rank, {whole} with AdamW itself")
    return ddp.module, handle


if __name__ == "__main__":
    main(sys.argv[1])
