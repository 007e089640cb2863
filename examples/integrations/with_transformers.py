"""zerolap in the Transformers Trainer, on a tiny GPT-2 that is made here. Started again, it resumes.

torchrun --standalone --nproc-per-node 2 examples/integrations/with_transformers.py runs/transformers
"""

import sys
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

import zerolap


class ZerolapTrainer(Trainer):
    handle = None

    def training_step(self, model, *args, **kwargs):
        if self.handle is None:  # the first step: by now the model is in DDP, and the optimizer in Accelerate's
            zero = self.optimizer.optimizer
            self.handle = zerolap.attach(model, zero, schedule="on_step")
            # Trainer calls this before every step, if only for the norm. The mean gradients are in the shards.
            self.accelerator.clip_grad_norm_ = lambda parameters, max_norm: zero.clip_grad_norm_(max_norm)
        return super().training_step(model, *args, **kwargs)

    def save_model(self, output_dir=None, _internal_call=False):
        if _internal_call:  # for a checkpoint, with the optimizer's state, which rank 0 writes
            self.optimizer.optimizer.consolidate_state_dict()
        super().save_model(output_dir, _internal_call)


def settings(folder, epochs, clip):
    set_seed(0)
    size = {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**size, bos_token_id=0, eos_token_id=0))
    texts = torch.randint(64, (64, 16), generator=torch.Generator().manual_seed(1))
    options = {"num_train_epochs": epochs, "max_grad_norm": clip, "save_strategy": "epoch", "disable_tqdm": True}
    options |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "ddp_find_unused_parameters": False}
    args = TrainingArguments(folder, use_cpu=True, report_to=[], lr_scheduler_type="constant", **options)
    return {"model": model, "args": args, "train_dataset": [{"input_ids": text, "labels": text} for text in texts]}


def main(folder, epochs=4, clip=1.0):
    Path(folder).mkdir(parents=True, exist_ok=True)
    options = {"optimizer_class": torch.optim.AdamW, "lr": 1e-3, "overlap_with_ddp": True}
    given = settings(folder, epochs, clip) | {"optimizer_cls_and_kwargs": (zerolap.ZeroRedundancyOptimizer, options)}
    trainer = ZerolapTrainer(**given)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(folder))
    handle = trainer.handle
    if trainer.is_world_process_zero() and handle is not None:
        whole = 2 * sum(p.nbytes for p in trainer.model.parameters())
        print(f"attached: {handle.is_attached}, {handle.stats().num_updates} updates; optimizer state: ", end="")
        print(f"{handle.stats().state_bytes} bytes per rank, {whole} with AdamW itself")
    return trainer.model, handle


if __name__ == "__main__":
    main(sys.argv[1])
