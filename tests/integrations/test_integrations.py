"""Lightning, Accelerate, Transformers and safetensors, the real libraries, on 2 Gloo ranks. Run by `tox run -e integrations`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import zerolap
from support.integration_ranks import Run, check, run_example
from zerolap_conformance.ranks import run_ranks

pytestmark = pytest.mark.integrations

EPOCHS = 4
# Both clip by the same norm, added up in another order, so that coefficients may differ in the last bit: after 16 to 32 steps of
# AdamW, parameters of up to 1 differed by at most 2.5e-7.
CLIPPED = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    example: str
    num_updates: int
    no_clipping: float | None
    misuses: dict[str, list[tuple[str, str]]]
    """What the framework does by itself, if the example does not see to it: an error in these words."""


FRAMEWORKS = [
    Framework(
        example="with_lightning",
        num_updates=32,
        no_clipping=None,
        misuses={
            "gradients were changed between backward and step()": [
                ("def configure_gradient_clipping(", "def not_called(")
            ]
        },
    ),
    Framework(
        example="with_accelerate",
        num_updates=16,
        no_clipping=None,
        misuses={
            "gradients were changed between backward and step()": [
                ("zero.clip_grad_norm_(clip)", "accelerator.clip_grad_norm_(ddp.parameters(), clip)")
            ],
            "call consolidate_state_dict": [
                (
                    'zerolap.checkpoint.save(folder, ddp, zero, step=epoch + 1, extra={"scheduler": scheduler.state_dict()})',
                    "accelerator.save_state(folder)",
                )
            ],
        },
    ),
    Framework(
        example="with_transformers",
        num_updates=32,
        no_clipping=0.0,
        misuses={
            "gradients were changed between backward and step()": [("self.accelerator.clip_grad_norm_ =", "unused =")],
            "call consolidate_state_dict": [("self.optimizer.optimizer.consolidate_state_dict()", "pass")],
        },
    ),
]


@pytest.mark.parametrize("framework", FRAMEWORKS, ids=lambda framework: framework.example)
def test_a_framework_trains_as_with_the_plain_optimizer_and_resumes(framework: Framework, tmp_path: Path) -> None:
    free: dict[str, Any] = {"epochs": EPOCHS, "clip": framework.no_clipping}
    clipped: dict[str, Any] = {"epochs": EPOCHS, "clip": 0.05}

    def run(kind: str, folder: str, options: dict[str, Any], *edits: tuple[str, str]) -> Run:
        return kind, {"folder": str(tmp_path / folder), **options}, list(edits)

    (ours, plain, sharded, ours_clipped, plain_clipped, half), said = run_example(
        framework.example,
        tmp_path / "job 1",
        [
            run("example", "ours", free),
            run("plain", "plain", free),
            run("sharded", "sharded", free),
            run("example", "ours clipped", clipped),
            run("plain", "plain clipped", clipped),
            run("example", "resumed", {**free, "epochs": EPOCHS // 2}),
        ],
    )
    num_updates = framework.num_updates
    assert f"attached: True, {num_updates} updates; optimizer state: {ours[0].state_bytes} bytes per rank" in said
    check(ours, plain, num_updates=num_updates)
    check(ours_clipped, plain_clipped, num_updates=num_updates, tolerance=CLIPPED)
    with pytest.raises(AssertionError, match="differs"):  # clipping does something
        check(ours_clipped, plain, num_updates=num_updates, tolerance=CLIPPED)
    with pytest.raises(AssertionError, match="differs"):  # and so does the second half
        check(half, plain, num_updates=num_updates // 2, tolerance=CLIPPED)
    # The right numbers and half of the state are not enough: the updates must be those of the hook.
    with pytest.raises(AssertionError, match="zerolap's hook is not attached"):
        check(sharded, plain, num_updates=num_updates)

    (resumed, unattached), _ = run_example(
        framework.example, tmp_path / "job 2", [run("example", "resumed", free), run("unattached", "unattached", free)]
    )
    check(resumed, plain, num_updates=num_updates // 2)
    with pytest.raises(AssertionError, match="no hook was made for this optimizer"):
        check(unattached, plain, num_updates=num_updates)


@pytest.mark.parametrize(
    ("example", "words", "edits"),
    [(each.example, words, edits) for each in FRAMEWORKS for words, edits in each.misuses.items()],
)
def test_what_a_framework_does_by_itself_is_refused(
    example: str, words: str, edits: list[tuple[str, str]], tmp_path: Path
) -> None:
    options = {"folder": str(tmp_path / "run"), "epochs": 2, "clip": 0.05}
    ((first, second),), _ = run_example(example, tmp_path, [("example", options, edits)])
    assert words in first.error + second.error, (first.error, second.error)


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
