"""The Transformers Trainer with a sharded optimizer. Run it by `torchrun --standalone --nproc-per-node 2 examples/integrations/with_transformers.py`."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments, set_seed

from zerolap_integrations.transformers import ZeroLapTrainer as Trainer  # instead of Transformers' own

set_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2))
texts = torch.randint(64, (64, 16))
arguments = TrainingArguments(
    "runs/transformers", num_train_epochs=2, save_strategy="epoch", use_cpu=True, report_to=[]
)
trainer = Trainer(model=model, args=arguments, train_dataset=[{"input_ids": each, "labels": each} for each in texts])
trainer.train()
