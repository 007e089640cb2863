"""Accelerate with a sharded optimizer. Run it by `torchrun --standalone --nproc-per-node 2 examples/integrations/with_accelerate.py`."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from zerolap_integrations.accelerate import ZeroLapAccelerator as Accelerator  # instead of Accelerate's own

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
torch.manual_seed(0)
x = torch.randn(256, 32)
model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 8))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(TensorDataset(x, x[:, :8]), batch_size=16)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x, y in loader:
    with accelerator.accumulate(model):
        accelerator.backward(nn.functional.mse_loss(model(x), y))
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
accelerator.save_state("runs/accelerate")
