"""The skeleton of a vendor's adapter package. VENDORS.md shows what this writes."""

from __future__ import annotations

import re
from pathlib import Path

PYPROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "zerolap-{name}"
version = "1.0.0"
dependencies = ["zerolap"]

[project.entry-points."zerolap.adapters"]
{name} = "zerolap_{name}:{title}Adapter"
"""

MODULE = '''\
"""zerolap on {title} devices."""

from zerolap import Capabilities, {base}


class {title}Adapter({base}):
    name = "{name}"
    device_type = "{device_type}"  # as in torch.device("{device_type}")
    backend = "{backend}"  # as in init_process_group("{backend}")
    capabilities = Capabilities(
        futures_complete_at_enqueue={has_streams},
        exact_cut=1,
        has_float64=True,
        one_issue_order={has_streams},
    )
'''


def write(
    folder: Path, *, name: str, device_type: str | None = None, backend: str | None = None, has_streams: bool = True
) -> list[Path]:
    """Write the package; ValueError or FileExistsError, before anything is written, if it cannot be right."""
    if not re.fullmatch("[a-z][a-z0-9_]*", name):
        raise ValueError(f"{name!r} cannot be a name; use lower-case letters, digits and underscores, for example acme")
    for option, text in (("--device-type", device_type), ("--backend", backend)):
        if text is not None and not re.fullmatch(r"[A-Za-z]\w*", text):
            raise ValueError(f"{option} is a name of torch's: letters, digits and underscores, got {text!r}")
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{folder} is a file, and a folder is needed")
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} already exists and is not empty")
    values = {
        "name": name,
        "title": name.title().replace("_", ""),
        "base": "StreamAdapter" if has_streams else "Adapter",
        "device_type": device_type or name,
        "backend": backend or f"{name}ccl",
        "has_streams": has_streams,
    }
    files = {folder / "pyproject.toml": PYPROJECT, folder / f"src/zerolap_{name}/__init__.py": MODULE}
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.format(**values))
    return list(files)
