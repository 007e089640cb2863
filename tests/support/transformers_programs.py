"""The Transformers Trainer's own loop, plain or with zerolap in one line; run on ranks. Every case is given by words."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

from support.framework_ranks import Result, as_torchrun, numbers_of, result_of, text_of
from zerolap_integrations.transformers import ZeroLapMonitor, ZeroLapTrainer, shard

SIZE = {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}


def _model(kind: str) -> Any:
    model = GPT2LMHeadModel(GPT2Config(**SIZE, bos_token_id=0, eos_token_id=0))
    if kind == "lora":
        from peft import LoraConfig, get_peft_model

        return get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=["c_attn"], fan_in_fan_out=True))
    return model


def _texts(num: int) -> list[dict[str, Tensor]]:
    texts = torch.randint(64, (num, 16), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": text, "labels": text} for text in texts]


def _metrics(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def _sft(folder: str) -> Any:
    """TRL's trainer, whose data are words and not numbers."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{f"w{number}": number + 3 for number in range(50)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    known = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    texts = [" ".join(f"w{(number * place) % 50}" for place in range(1, 12)) for number in range(32)]
    arguments = SFTConfig(folder, max_length=16, packing=False, **_options(folder))
    return SFTTrainer(
        model=_model(""), args=arguments, train_dataset=Dataset.from_dict({"text": texts}), processing_class=known
    )


def _options(folder: str, **options: Any) -> dict[str, Any]:
    given: dict[str, Any] = {
        "num_train_epochs": 2,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-3,
        "save_strategy": "no",
    }
    given |= {
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "logging_steps": 2,
        "dataloader_pin_memory": False,
    }
    return given | {"ddp_find_unused_parameters": False, "bf16": False} | options


def train(
    folder: str,
    *,
    line: bool,
    kind: str = "",
    ours: dict[str, Any] | None = None,
    resume: str | None = None,
    num_trainings: int = 1,
    watches: bool = False,
    **options: Any,
) -> Result:
    """Train as a user would."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    set_seed(0)
    if kind == "trl":
        trainer = _sft(folder)
        if line:
            shard(trainer, **(ours or {}))
    else:
        arguments = TrainingArguments(folder, **_options(folder, **options))
        cls = partial(ZeroLapTrainer, zerolap_options=ours) if line else Trainer
        callbacks = [ZeroLapMonitor()] if watches else []
        data = {"train_dataset": _texts(64), "eval_dataset": _texts(8), "compute_metrics": _metrics}
        trainer = cls(model=_model(kind), args=arguments, callbacks=callbacks, **data)
    for _ in range(num_trainings):
        trainer.train(resume_from_checkpoint=None if resume is None else get_last_checkpoint(resume))
    inner = trainer.optimizer.optimizer
    said: dict[str, Any] = {
        "log": [
            {k: v for k, v in each.items() if k in ("loss", "eval_loss", "eval_accuracy")}
            for each in trainer.state.log_history
        ]
    }
    said["norms"] = [each["grad_norm"] for each in trainer.state.log_history if "grad_norm" in each]
    if watches:
        said["live"] = [each for each in trainer.state.log_history if "zerolap/hidden_percent" in each]
    best = trainer.state.best_model_checkpoint
    said["best"] = best and Path(best).name
    trainer.save_model(f"{folder}/model")
    dist.barrier()
    _compare_saved(trainer.model, f"{folder}/model", kind)
    last = get_last_checkpoint(folder)
    if last is not None and Path(last, "optimizer.pt").exists():
        state = torch.load(f"{last}/optimizer.pt", weights_only=True)["state"]
        said["state"] = [numbers_of(each) for each in state.values()]
    handle = getattr(inner, "handle", None)
    return result_of(trainer.model, [inner], num_updates=None if handle is None else handle.stats().num_updates, **said)


def _compare_saved(model: nn.Module, folder: str, kind: str) -> None:
    """What Trainer has saved, with the live model, tensor by tensor."""
    (path,) = Path(folder).glob("*.safetensors")
    saved, live = safetensors.torch.load_file(path), dict(model.state_dict())
    if kind == "lora":
        from peft import get_peft_model_state_dict

        live = dict(get_peft_model_state_dict(model))  # type: ignore[arg-type]
    missing = live.keys() - saved.keys() - {"lm_head.weight"}  # tied
    assert not missing, missing
    assert saved, path
    assert all(torch.equal(value, live[name]) for name, value in saved.items())


def all_of(folder: str, cases: dict[str, dict[str, Any]]) -> dict[str, Result | str]:
    """Every case, one after another, in the same processes; an error as its text, and then no more."""
    as_torchrun()
    results: dict[str, Result | str] = {}
    for name, options in cases.items():
        try:
            results[name] = train(f"{folder}/{name}", **options)
        except Exception as error:
            results[name] = text_of(error)
            break
    return results
