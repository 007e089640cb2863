"""What safetensors, Accelerate and Transformers save of a model whose optimizer is sharded: every parameter. Run by `tox run -e integrations`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import zerolap
from zerolap_conformance.ranks import run_ranks

pytestmark = pytest.mark.integrations


def _save_by_every_tool(folder: str, gather: str) -> dict[str, set[str]]:
    """The names in each tool's file, whose tensors are compared with the model's."""
    import accelerate
    import safetensors.torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=100, n_positions=16))
    ddp = DDP(model, bucket_cap_mb=0.05)
    opt = zerolap.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=1e-2, overlap_with_ddp=True)
    handle = zerolap.attach(ddp, opt, gather=gather)  # type: ignore[arg-type]
    for _ in range(3):
        tokens = torch.randint(0, 100, (2, 8))
        ddp(input_ids=tokens, labels=tokens).loss.backward()
        opt.step()
    assert handle.stats().num_buckets > 1
    if dist.get_rank() == 1:
        return {}
    safetensors.torch.save_model(model, f"{folder}/save_model.safetensors")
    free = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    safetensors.torch.save_file(free, f"{folder}/save_file.safetensors")
    accelerate.Accelerator(cpu=True).save_model(ddp, f"{folder}/accelerate")
    model.save_pretrained(f"{folder}/transformers")
    saved = {}
    for path in Path(folder).rglob("*.safetensors"):
        tensors = safetensors.torch.load_file(path)
        for name, tensor in tensors.items():
            assert torch.equal(tensor, model.state_dict()[name]), f"{path}: {name}"
        saved[str(path)] = set(tensors)
    return saved


@pytest.mark.parametrize("gather", ["eager", "lazy"])
def test_saving_tools_find_every_parameter_and_drop_only_what_the_model_ties(gather: str, tmp_path: Path) -> None:
    saved, _ = run_ranks(2, _save_by_every_tool, str(tmp_path), gather, limit=120)
    assert len(saved) == 4
    for path, names in saved.items():
        assert len(names) == 28, path
        assert len(names & {"lm_head.weight", "transformer.wte.weight"}) == 1, path  # tied by the model itself
