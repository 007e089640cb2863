"""Run the comparison in all its settings and write RESULTS.md, with every row, and a picture of each setting.

    python benchmarks/suite.py                 # all settings, about an hour; needs root for the namespaces
    python benchmarks/suite.py --setting 27M   # those whose title holds this

Each setting is one run of compare.py. What was measured before stays in RESULTS.md until its setting is run again.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import compare
import cost
import forecast

HERE = Path(__file__).parent
RESULTS = HERE / "results"

ALL: tuple[str, ...] = ()
MAIN = (
    "fused",
    "FSDP2, not",
    "zerolap interleaved",
    "zerolap after_backward eager",
    "zerolap after_backward lazy",
    "zerolap auto",
)
ON_MANY_HOSTS = (  # those with 1 MB buckets: of 8 MB, the usual ones have no second
    "fused AdamW, 1",
    "zerolap interleaved eager, 1",
    "zerolap interleaved lazy, 1",
    "zerolap after_backward lazy, 1",
    "zerolap on_step",
)


def _many_hosts(ranks: int, network: str, milliseconds: int) -> tuple[list[str], tuple[str, ...]]:
    """Layers that sleep as long as a core would compute: there are fewer cores than ranks."""
    options = ["--model", "asleep", "--ranks", str(ranks), "--network", network, "--batch", str(milliseconds)]
    return [*options, "--cap", "1", "--rounds", "3", "--steps", "4"], ON_MANY_HOSTS


ON_ONE_HOST = (*MAIN, "zerolap by messages")
BATCHES_AND_NETWORKS: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "27M LM, 1 Gbit/s, the wire dominates": (
        ["--model", "lm27", "--network", "1000", "--batch", "1", "--rounds", "3", "--memory"],
        ALL,
    ),
    "27M LM, 1 Gbit/s, wire and compute about equal": (
        ["--model", "lm27", "--network", "1000", "--batch", "3", "--rounds", "3"],
        MAIN,
    ),
    "27M LM, loopback": (
        ["--model", "lm27", "--network", "loopback", "--batch", "1", "--rounds", "3", "--cap", "5"],
        ON_ONE_HOST,
    ),
    "5M LM, 200 Mbit/s with 5 ms delay": (
        ["--model", "lm5", "--network", "200+5ms", "--batch", "1", "--rounds", "2"],
        ("fused AdamW, ", "FSDP2, not", "zerolap interleaved", "zerolap after_backward lazy", "zerolap auto"),
    ),
    "5M LM, loopback": (
        ["--model", "lm5", "--network", "loopback", "--batch", "1", "--rounds", "7", "--cap", "5"],
        ON_ONE_HOST,
    ),
    "110M LM, 1 Gbit/s": (
        ["--model", "lm110", "--network", "1000", "--batch", "1", "--rounds", "2", "--steps", "4"],
        ("FSDP2, not", "zerolap interleaved lazy", "zerolap auto"),  # each takes 2 GB a rank
    ),
    "3000 small tensors, 100 Mbit/s": (
        ["--model", "many", "--network", "100", "--batch", "1", "--rounds", "2", "--cap", "1"],
        MAIN,
    ),
    "Convnet, 1 Gbit/s": (
        ["--model", "conv", "--network", "1000", "--batch", "1", "--rounds", "5", "--cap", "1"],
        MAIN,
    ),
    "8 MB on 4 hosts, 200 Mbit/s, next to no compute": _many_hosts(4, "200", 2),
    "8 MB on 4 hosts, 200 Mbit/s, compute half of the wire": _many_hosts(4, "200", 260),
    "8 MB on 8 hosts, 200 Mbit/s, next to no compute": _many_hosts(8, "200", 2),
    "8 MB on 8 hosts, 200 Mbit/s, compute half of the wire": _many_hosts(8, "200", 300),
    "8 MB on 2 hosts of 2 ranks, 200 Mbit/s, compute half of the wire": _many_hosts(4, "2x200", 180),
}

FORECASTS: dict[str, list[str]] = {
    "Forecast of the 27M LM, 1 Gbit/s": ["--model", "lm27", "--network", "1000", "--seconds", "240"],
    "Forecast of the 5M LM, 200 Mbit/s with 5 ms delay": ["--model", "lm5", "--network", "200+5ms", "--seconds", "180"],
    "Forecast of the 5M LM, loopback": ["--model", "lm5", "--network", "loopback", "--seconds", "120"],
}


def draw(found: dict[str, Any], path: Path) -> None:
    """A bar for every entry, the spread of its rounds, and the bound."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    rows = found["rows"][::-1]
    figure, axes = pyplot.subplots(figsize=(9, 0.34 * len(rows) + 1.2), layout="constrained")
    colours = ["#0f766e" if row["name"].startswith("zerolap") else "#94a3b8" for row in rows]
    axes.barh([row["name"] for row in rows], [row["seconds"] for row in rows], color=colours)
    for place, row in enumerate(rows):
        axes.plot(row["rounds"], [place] * len(row["rounds"]), ".", color="#0f172a", markersize=3)
        axes.text(row["seconds"], place, f"  {row['ratio']:.2f}", va="center", fontsize=8)
    axes.set_xlabel("seconds a step (dots: rounds; figures: ratio to DDP + fused AdamW)")
    axes.set_title(found["setting"], fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def write_page(path: Path) -> None:
    """All that has been measured, in one page."""
    parts = [(HERE / f"RESULTS.{part}.md").read_text().rstrip() for part in ("head", "notes")]
    for title in BATCHES_AND_NETWORKS:
        stored = RESULTS / f"{name_of(title)}.json"
        if not stored.exists():
            continue
        found = json.loads(stored.read_text())
        picture = f"results/{name_of(title)}.svg"
        parts.append(
            f"## {title}\n\n{found['date']}: {found['setting']}. {found['machine']}.\n\n"
            f"`python benchmarks/compare.py {' '.join(found['asked'])}`\n\n"
            f"![{title}]({picture})\n\n{compare.to_markdown(found['rows']).rstrip()}"
        )
    units = RESULTS / "cost.json"
    if units.exists():
        table = cost.to_markdown(json.loads(units.read_text())).rstrip()
        parts.append(
            f"## Cost of a unit\n\n`python benchmarks/cost.py`\n\n![Cost of a unit](results/cost.svg)\n\n{table}"
        )
    parts += [file.read_text().rstrip() for file in sorted(RESULTS.glob("forecast-*.md"))]
    path.write_text("\n\n".join(parts) + "\n")


def name_of(title: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in title.lower()).replace("--", "-")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setting", action="append", help="only settings whose title holds this")
    parser.add_argument("--page", action="store_true", help="only write the page anew, from what is stored")
    asked = parser.parse_args()
    RESULTS.mkdir(exist_ok=True)

    def is_asked(title: str) -> bool:
        return not asked.page and (not asked.setting or any(part in title for part in asked.setting))

    for title, (options, only) in BATCHES_AND_NETWORKS.items():
        if not is_asked(title):
            continue
        options = [*options, *(part for name in only for part in ("--only", name))]
        given = compare.parser().parse_args([*options, "--out", str(RESULTS / "raw")])
        found = compare.measure(given)
        found |= {
            "asked": [f'"{part}"' if " " in part else part for part in options],
            "date": datetime.date.today().isoformat(),
            "machine": compare.machine(),
        }
        del found["options"]
        (RESULTS / f"{name_of(title)}.json").write_text(json.dumps(found, indent=1))
        draw(found, RESULTS / f"{name_of(title)}.svg")
        print(f"\n{title}\n\n{compare.to_markdown(found['rows'])}", flush=True)
        write_page(HERE / "RESULTS.md")
    for title, options in FORECASTS.items():
        if is_asked(title):
            given = forecast.make_parser().parse_args([*options, "--out", str(RESULTS / "raw")])
            text = (
                f"## {title}\n\n{datetime.date.today().isoformat()}, {compare.machine()}.\n\n"
                f"`python benchmarks/forecast.py {' '.join(options)}`\n\n{forecast.measure_and_report(given)}"
            )
            (RESULTS / f"{name_of(title)}.md").write_text(text)
            print(f"\n{text}", flush=True)
    write_page(HERE / "RESULTS.md")


if __name__ == "__main__":
    main()
