"""The examples with Lightning, Accelerate and Transformers as they stand, and with the one line that names zerolap taken out. Run by
`tox run -e integrations`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support import ROOT
from support.framework_ranks import Result, as_torchrun, check, result_of
from zerolap_conformance.ranks import run_ranks

pytestmark = pytest.mark.integrations

PLAIN = {  # what stands in place of the line; by how much clipping may differ
    "with_lightning": "from lightning.pytorch.strategies import DDPStrategy as Strategy",
    "with_accelerate": "from accelerate import Accelerator",
    "with_transformers": "from transformers import Trainer",
}
CLIPPED = 1e-6


def _train(name: str, folder: str) -> tuple[Result, Result]:
    """As it stands, and without the line."""
    as_torchrun()
    results = []
    for number, is_plain in enumerate((False, True)):
        lines = (ROOT / f"examples/integrations/{name}.py").read_text().splitlines()
        (place,) = (place for place, line in enumerate(lines) if "zerolap" in line)
        if is_plain:
            lines[place] = PLAIN[name]
        os.makedirs(f"{folder}/{number}", exist_ok=True)
        os.chdir(f"{folder}/{number}")
        names: dict[str, object] = {"__name__": "__main__"}
        exec(compile("\n".join(lines), name, "exec"), names)
        trainer = names.get("trainer")
        match name:
            case "with_lightning":
                model, optimizer = trainer.lightning_module, trainer.optimizers[0]  # type: ignore[attr-defined]
            case "with_accelerate":
                model, optimizer = names["model"].module, names["optimizer"].optimizer  # type: ignore[attr-defined]
            case _:
                model, optimizer = trainer.model, trainer.optimizer.optimizer  # type: ignore[attr-defined]
        results.append(result_of(model, [optimizer]))
    return results[0], results[1]


@pytest.mark.parametrize("name", PLAIN)
def test_one_line_shards_the_optimizer(name: str, tmp_path: Path) -> None:
    both = run_ranks(2, _train, name, str(tmp_path), limit=200)
    ours, plain = ([pair[which] for pair in both] for which in (0, 1))
    check(ours, plain, tolerance=CLIPPED)
    with pytest.raises(AssertionError, match="of the state"):
        check(plain, plain)


def test_examples_are_short() -> None:
    for name in PLAIN:
        assert len((ROOT / f"examples/integrations/{name}.py").read_text().splitlines()) < 25
