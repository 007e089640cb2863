"""Trace a few real steps in every schedule, and make the pictures of the documentation of them.

    python benchmarks/timelines.py --network 1000 --pages timelines --pictures docs/pictures

Two ranks of one core each train the 27M LM on two hosts made of network namespaces, which needs root; or on loopback. Pictures are
taken by Playwright's Chromium, or the one that ZEROLAP_CHROMIUM names; without ``--pictures`` there are only pages.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))

from entries import MODELS, Zerolap
from network import open_network

from zerolap.observe.timeline import merge, read, to_html

WAYS = [("interleaved", "eager"), ("interleaved", "lazy"), ("after_backward", "lazy"), ("on_step", "eager")]
OF_README = ("interleaved", "lazy")
CAP_MB = 5
NUM_TO_SETTLE, NUM_TRACED = 6, 2


def run_rank(given: argparse.Namespace) -> None:
    """On one rank: train in every way, and trace the last steps of each."""
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {rank % (os.cpu_count() or 1)})
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    for schedule, gather in WAYS:
        torch.manual_seed(0)
        model: Any = MODELS[given.model]()
        entry = Zerolap(model, cap=CAP_MB, schedule=schedule, gather=gather)
        batches = [model.batch(given.batch, torch.Generator().manual_seed(10 * i + rank)) for i in range(NUM_TRACED)]
        for number in range(NUM_TO_SETTLE):
            entry.step(batches[number % NUM_TRACED])
        entry.finish()
        dist.barrier()
        with entry.handle.trace(given.traces / f"{schedule}-{gather}"):
            for batch in batches:
                entry.step(batch)
        entry.handle.detach()
    dist.destroy_process_group()


def take_pictures(pages: Path, pictures: Path) -> None:
    """Each chart by itself, and one whole page for the README."""
    from playwright.sync_api import sync_playwright

    pictures.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as driver:
        # No sandbox: containers run as root, where Chromium refuses to start with one; the pages are our own.
        browser = driver.chromium.launch(executable_path=os.environ.get("ZEROLAP_CHROMIUM"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1180, "height": 900}, device_scale_factor=1.5)
        for schedule, gather in WAYS:
            page.goto((pages / f"{schedule}-{gather}.html").resolve().as_uri())
            page.locator(".chart canvas").wait_for()
            page.locator(".chart").screenshot(path=pictures / f"schedule-{schedule}-{gather}.png")
            if (schedule, gather) == OF_README:
                chart, width = page.locator(".chart").bounding_box(), page.viewport_size["width"]
                clip = {"x": 0, "y": 0, "width": width, "height": chart["y"] + chart["height"] + 6}
                page.screenshot(path=pictures / "timeline.png", clip=clip)
        browser.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(MODELS), default="lm27")
    parser.add_argument("--batch", type=int, default=3)
    parser.add_argument("--network", default="1000", help="loopback, or Mbit/s (needs root)")
    parser.add_argument("--pages", type=Path, default=Path("timelines"), help="where the pages are written")
    parser.add_argument("--pictures", type=Path, help="where pictures of them are written")
    parser.add_argument("--traces", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if "RANK" in os.environ:
        run_rank(given)
        return
    with tempfile.TemporaryDirectory() as folder, open_network(given.network, 2) as network:
        arguments = ["--model", given.model, "--batch", str(given.batch), "--traces", folder]
        network.run(__file__, arguments, seconds=600)
        given.pages.mkdir(parents=True, exist_ok=True)
        for schedule, gather in WAYS:
            run = merge(read([Path(folder) / f"{schedule}-{gather}"]))
            (given.pages / f"{schedule}-{gather}.html").write_text(to_html(run), encoding="utf-8")
    if given.pictures is not None:
        take_pictures(given.pages, given.pictures)


if __name__ == "__main__":
    main()
