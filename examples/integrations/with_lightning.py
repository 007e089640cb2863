"""zerolap in PyTorch Lightning: configure_optimizers makes the optimizer and attaches it. Started again, it resumes.

torchrun --standalone --nproc-per-node 2 examples/integrations/with_lightning.py runs/lightning
"""

import sys

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import zerolap


class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 8))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.mse_loss(self.layers(x), y)

    def configure_optimizers(self):
        opt = zerolap.ZeroRedundancyOptimizer(self.parameters(), torch.optim.AdamW, lr=1e-2, overlap_with_ddp=True)
        # By now the strategy has wrapped the module in DDP.
        self.handle = zerolap.attach(self.trainer.strategy.model, opt, schedule="on_step")
        return [opt], [torch.optim.lr_scheduler.ExponentialLR(opt, gamma=0.9)]

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        if gradient_clip_val is not None:  # by the norm of the mean gradients, which only the shards have
            optimizer.clip_grad_norm_(gradient_clip_val)


def fit(model, folder, epochs, clip):
    x = torch.randn(256, 32, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(x, x[:, :8]), batch_size=16, shuffle=True)
    # A checkpoint has the optimizer's whole state, which Lightning collects on rank 0.
    saving = ModelCheckpoint(folder, save_last=True)
    options = {"max_epochs": epochs, "gradient_clip_val": clip, "logger": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(accelerator="cpu", devices=2, callbacks=[saving], **options)
    trainer.fit(model, loader, ckpt_path="last")


def main(folder, epochs=4, clip=1.0):
    lightning.seed_everything(0)
    model = Regression()
    fit(model, folder, epochs, clip)
    if model.global_rank == 0:
        handle, whole = model.handle, 2 * sum(p.nbytes for p in model.parameters())
        print(f"attached: {handle.is_attached}, {handle.stats().num_updates} updates; optimizer state: ", end="")
        print(f"{handle.stats().state_bytes} bytes per rank, {whole} with AdamW itself")
    return model, model.handle


if __name__ == "__main__":
    main(sys.argv[1])
