"""PyTorch Lightning with a sharded optimizer. Run it by `torchrun --standalone --nproc-per-node 2 examples/integrations/with_lightning.py`."""

import lightning
import torch

from zerolap_integrations.lightning import ZeroLapStrategy as Strategy  # instead of Lightning's DDPStrategy


class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.ReLU(), torch.nn.Linear(128, 8))

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.mse_loss(self.layers(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


lightning.seed_everything(0)
loader = torch.utils.data.DataLoader([(each, each[:8]) for each in torch.randn(256, 32)], batch_size=16)
trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy=Strategy(), max_epochs=2, gradient_clip_val=1.0)
trainer.fit(Regression(), loader)
