"""Reading a checkpoint of torch.distributed.checkpoint that may be damaged, or made to do harm."""

from __future__ import annotations

import hashlib
import io
import json
import pathlib
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem

from zerolap.errors import ZerolapError

FORMAT = 1
MANIFEST = "manifest.json"


class CheckpointError(ZerolapError):
    """A checkpoint cannot be written or used; model, optimizer and other checkpoints are as they were."""


def digest_of(file: Path) -> list[Any]:
    """Size and digest, as a manifest has them."""
    with file.open("rb") as stream:
        return [file.stat().st_size, hashlib.file_digest(stream, "blake2b").hexdigest()]


def unpacked(packed: Tensor) -> Any:
    """What was packed as bytes, if it is harmless."""
    try:
        buffer = bytearray(packed.numel())
        torch.frombuffer(buffer, dtype=torch.uint8).copy_(packed)  # not by numpy(): torch does not bring NumPy
        return torch.load(io.BytesIO(buffer), map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(
            "only tensors, numbers, strings and containers of them can be in a checkpoint, for nothing else is safe to load: "
            f"{error}"
        ) from error


_ALLOWED = {
    (cls.__module__, cls.__qualname__): cls
    for cls in (
        metadata.Metadata,
        metadata.MetadataIndex,
        metadata.TensorStorageMetadata,
        metadata.BytesStorageMetadata,
        metadata.ChunkStorageMetadata,
        metadata.TensorProperties,
        metadata.StorageMeta,
        metadata._MEM_FORMAT_ENCODING,
        filesystem._StorageInfo,
        torch.Size,
        pathlib.PosixPath,
        pathlib.WindowsPath,
        pathlib.PurePosixPath,
    )
} | {("torch.serialization", "_get_layout"): torch.serialization._get_layout}


class _MetadataUnpickler(pickle.Unpickler):
    """Reads what torch.distributed.checkpoint writes, and runs nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        found = getattr(torch, name, None) if module == "torch" else None
        if isinstance(found, torch.dtype):
            return found
        raise CheckpointError(f"its .metadata asks for {module}.{name}, which no checkpoint needs: it is not loaded")


class _LoadPlanner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        loaded = torch.load(value, map_location="cpu", weights_only=True)
        set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], loaded)


class CheckpointReader(filesystem.FileSystemReader):
    """Reads one checkpoint, once it has proved whole. No other rank is needed for it."""

    def __init__(self, path: Path, *, share: tuple[int, int] = (0, 1)) -> None:
        """Compares this rank's share, (rank, ranks), of the files with their digests."""
        super().__init__(path)
        try:
            manifest = json.loads((path / MANIFEST).read_text())
            if manifest["format"] != FORMAT:
                raise CheckpointError(f"{path} has format {manifest['format']}, this is for {FORMAT}")
            self.step, self.ranks, self.files = int(manifest["step"]), int(manifest["ranks"]), dict(manifest["files"])
            mine, of = share
            for name, digest in sorted(self.files.items())[mine::of]:
                seen = digest_of(path / name) if (path / name).exists() else "nothing"
                if seen != digest:
                    raise CheckpointError(f"{path / name} is damaged: it is not what was written")
            with (path / ".metadata").open("rb") as stream:
                self.metadata = _MetadataUnpickler(stream).load()
            if not isinstance(self.metadata, metadata.Metadata):
                raise CheckpointError(f"{path}/.metadata holds no metadata")
            strangers = {info.relative_path for info in self.metadata.storage_data.values()} - self.files.keys()
            if strangers:
                raise CheckpointError(f"{path} refers to files that are not part of it: {sorted(strangers)}")
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}") from error

    def names(self, under: tuple[str, ...]) -> dict[str, Any]:
        """What is directly under a path, and what is known of it."""
        return {
            str(where[-1]): self.metadata.state_dict_metadata[name]
            for name, where in self.metadata.planner_data.items()
            if tuple(where[:-1]) == under
        }

    def has(self, where: tuple[str, ...]) -> bool:
        return where in self.metadata.planner_data.values()

    def room(self, where: tuple[str, ...]) -> Tensor:
        kept = self.names(where[:-1])[where[-1]]
        return torch.empty(kept.size, dtype=kept.properties.dtype)

    def read(self, state: dict[str, Any]) -> dict[str, Any]:
        """Fill ``state``. As torch.distributed.checkpoint.load() does it, without asking other ranks."""
        planner = _LoadPlanner()
        planner.set_up_planner(state, self.metadata, is_coordinator=True)
        self.set_up_storage_reader(self.metadata, is_coordinator=True)
        self.read_data(planner.finish_plan(planner.create_local_plan()), planner).wait()
        return state
