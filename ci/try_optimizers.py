"""Train with optimizer classes from PyPI, sharded and not, and write what came of each into docs/optimizers.md.

    python ci/try_optimizers.py            # two ranks; needs pytorch_optimizer, schedulefree, transformers, torchao
    python ci/try_optimizers.py --check    # fails if a class trains otherwise than with DDP, without being refused

Each class trains a small model beside DDP + the same class, under overlap and without, six steps, then is put into its evaluation mode.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import importlib.metadata
import logging
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import zerolap
from zerolap_conformance.ranks import try_ranks

PAGE = Path(__file__).parent.parent / "docs/optimizers.md"
BEGIN, END = "<!-- tried: begin -->\n", "<!-- tried: end -->\n"
ROUNDING = 1e-6  # of classes whose own arithmetic is not the same twice

# Options beside the learning rate, and whether its param groups say which of them are Muon's.
CLASSES: dict[str, dict[str, Any]] = {
    **{f"torch.optim.{name}": {} for name in ("Muon", "Adafactor")},
    **{f"pytorch_optimizer.{name}": {"use_muon": True} for name in ("Muon", "AdaMuon", "AdaGO")},
    **{
        f"pytorch_optimizer.{name}": {}
        for name in (
            "SOAP", "Shampoo", "Lamb", "LARS", "Lion", "Adan", "AdEMAMix", "ADOPT", "CAME", "GaLore", "Grams", "MARS", "SPlus",
            "StableAdamW", "Tiger", "RACS", "Alice", "ScheduleFreeAdamW", "Kron", "Prodigy", "DAdaptAdam", "Conda", "ScalableShampoo",
        )
    },
    "transformers.Adafactor": {"relative_step": False, "scale_parameter": False},
    **{f"schedulefree.{name}": {} for name in ("AdamWScheduleFree", "SGDScheduleFree", "RAdamScheduleFree")},
    **{f"torchao.optim.{name}": {} for name in ("AdamW8bit", "AdamW4bit", "AdamWFp8")},
}  # fmt: skip


class Model(nn.Module):
    """Matrices large enough that classes which factor or quantise their states do so."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 64), nn.Linear(64, 64)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3)
        )

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for block in self.blocks:
            x = x + block(x)
        out: Tensor = self.head(x)
        return out


def found(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def groups_of(name: str, model: Model, options: dict[str, Any]) -> Any:
    matrices = [param for param in model.blocks.parameters() if param.ndim == 2]
    if name == "torch.optim.Muon":
        for param in model.parameters():
            param.requires_grad_(any(param is each for each in matrices))
        return matrices
    others = [param for param in model.parameters() if not any(param is each for each in matrices)]
    if options.get("use_muon"):
        return [{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False}]
    return list(model.parameters())


def train(name: str, overlap: bool) -> float:
    """On a rank: the largest difference to DDP + the same class."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    kind = found(name)
    options = {"lr": 1e-3, **{key: value for key, value in CLASSES[name].items() if key != "use_muon"}}
    models, given = [], []
    for _ in range(2):
        torch.manual_seed(0)
        model = Model()
        given.append(groups_of(name, model, CLASSES[name]))
        models.append(DDP(model, bucket_cap_mb=0.05))
    sharded = zerolap.ZeroRedundancyOptimizer(given[1], kind, overlap_with_ddp=overlap, **options)
    handle = zerolap.attach(models[1], sharded) if overlap else None
    optimizers: list[Any] = [kind(given[0], **options), sharded]
    worst = 0.0

    def compare() -> None:
        nonlocal worst
        if handle is not None:
            handle.finish()
        for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
            worst = max(worst, float((a - b).abs().max()))

    for optimizer in optimizers:
        if hasattr(optimizer, "train"):
            optimizer.train()
    for step in range(6):
        words = torch.randint(64, (4, 6), generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))
        for model_, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model_(words).square().mean().backward()
            optimizer.step()
        compare()
    for optimizer in optimizers:
        if hasattr(optimizer, "eval"):
            optimizer.eval()
    compare()
    return worst


def outcomes(num_ranks: int) -> Iterator[tuple[str, list[str], bool]]:
    """Of each class: how it trained under overlap and without, and whether that is right."""
    for name in CLASSES:
        try:
            found(name)
        except (ImportError, AttributeError):
            yield name, ["not installed"] * 2, True
            continue
        said, is_right = [], True
        for overlap in (True, False):
            results = try_ranks(num_ranks, train, name, overlap, limit=120, group_timeout=60)
            errors = [result.error for result in results if result.error is not None]
            if errors:
                last = errors[0].strip().splitlines()[-1]
                said.append(f"refused: {last.partition(': ')[2][:160]}")
                is_right &= last.startswith("ValueError")
            else:
                worst = max(float(result.value) for result in results)
                said.append("bitwise" if worst == 0 else f"within {worst:.1g}")
                is_right &= worst <= ROUNDING
        print(f"{name}: {said}{'' if is_right else ': WRONG'}", file=sys.stderr, flush=True)
        yield name, said, is_right


def table(rows: list[tuple[str, list[str], bool]], num_ranks: int) -> str:
    packages = sorted({name.partition(".")[0] for name, *_ in rows})
    versions = ", ".join(f"{package} {importlib.metadata.version(package.replace('_', '-'))}" for package in packages)
    lines = [f"Tried on {datetime.date.today()}, {num_ranks} Gloo ranks: {versions}.", ""]
    lines += ["| class | under overlap | without |", "|---|---|---|"]
    lines += [f"| `{name}` | {' | '.join(each.replace('|', '/') for each in said)} |" for name, said, _ in rows]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--ranks", type=int, default=2)
    given = parser.parse_args()
    rows = list(outcomes(given.ranks))
    wrong = [name for name, _, is_right in rows if not is_right]
    if not given.check:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        _, _, after = rest.partition(END)
        PAGE.write_text(before + BEGIN + table(rows, given.ranks) + END + after)
    if wrong:
        raise SystemExit(f"trained otherwise than with DDP, or failed in a way that is no refusal: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
