"""Reading a checkpoint of torch.distributed.checkpoint that may be damaged, or made to do harm."""

from __future__ import annotations

import hashlib
import io
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from zerolap._public import public_in
from zerolap._torch.checkpoint_format import narrow_tensor_by_index, set_element
from zerolap.checkpoint.dcp_metadata import LARGEST, read_metadata
from zerolap.errors import ZerolapError
from zerolap.untrusted.files import Identity, identity, open_regular, printable, read_all, read_json
from zerolap.untrusted.tensors import Window, load_plain

FORMAT = 1
MANIFEST = "manifest.json"
METADATA = ".metadata"
_LARGEST_MANIFEST = 2**26


@public_in("zerolap.checkpoint")
class CheckpointError(ZerolapError):
    """A checkpoint cannot be written or used; model, optimizer and other checkpoints are as they were."""


def digest_of(file: Path) -> list[Any]:
    """Size and digest, as a manifest has them."""
    with file.open("rb") as stream:
        return [file.stat().st_size, _digest(stream)]


def _digest(stream: IO[bytes]) -> str:
    digest = hashlib.blake2b()
    while chunk := stream.read(2**20):
        digest.update(chunk)
    return digest.hexdigest()


def unpacked(packed: Tensor) -> Any:
    """What was packed as bytes, if it is harmless."""
    try:
        buffer = bytearray(packed.numel())
        if buffer:
            torch.frombuffer(buffer, dtype=torch.uint8).copy_(packed)  # not by numpy(): torch does not bring NumPy
        return load_plain(io.BytesIO(buffer), len(buffer))
    except Exception as error:
        raise CheckpointError(
            "only tensors, numbers, strings and containers of them can be in a checkpoint, for nothing else is safe to load: "
            f"{error}"
        ) from error


# --- the manifest -----------------------------------------------------------------------------------------------------


class Manifest(NamedTuple):
    """What a checkpoint says it consists of."""

    step: int
    ranks: int
    files: dict[str, tuple[int, str]]  # size and digest of each


def read_manifest(path: Path, *, folder: int) -> Manifest:
    """The manifest in a folder that is open, checked; ValueError, OSError or CheckpointError if it is not usable."""
    held = read_json(MANIFEST, largest=_LARGEST_MANIFEST, inside=folder)
    if not isinstance(held, dict) or not {"format", "step", "ranks", "files"} <= held.keys():
        raise CheckpointError(f"{path}/{MANIFEST} is not the manifest of a checkpoint")
    if held["format"] != FORMAT or type(held["format"]) is not int:
        raise CheckpointError(f"{path} has format {printable(held['format'], 100)}, this is for {FORMAT}")
    step, ranks, files = held["step"], held["ranks"], held["files"]
    is_counted = type(step) is int and type(ranks) is int and 0 <= step < 2**63 and 1 <= ranks < 2**31
    if not is_counted or not isinstance(files, dict) or METADATA not in files:
        raise CheckpointError(
            f"{path}/{MANIFEST} is not the manifest of a checkpoint: a number is out of range, or {METADATA} is missing"
        )
    return Manifest(step, ranks, {name: _checked(path, name, said) for name, said in files.items()})


def _checked(path: Path, name: str, said: Any) -> tuple[int, str]:
    is_plain = 0 < len(name) <= 255 and not re.search(r"[/\\\x00-\x1f\x7f]", name) and name not in (".", "..", MANIFEST)
    if not is_plain:
        raise CheckpointError(f"{path} names a file outside of it, {printable(name, 300)}: it is not read")
    match said:
        case [int(size), str(digest)] if (
            type(size) is int and 0 <= size < 2**63 and re.fullmatch(r"[0-9a-f]{128}", digest)
        ):
            return size, digest
    raise CheckpointError(f"{path}/{MANIFEST} has no size and digest for {printable(name, 300)}")


# --- the reader -------------------------------------------------------------------------------------------------------


class _LoadPlanner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        loaded = load_plain(value, len(value.getbuffer()))
        set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], loaded)


class CheckpointReader(filesystem.FileSystemReader):
    """Reads one checkpoint, once it has proved whole. No other rank is needed for it.

    Only regular files in the checkpoint's folder are opened, none of them by a link; the folder itself may be reached by one, as
    ``latest`` is. What this process has compared with its digest must still be the same file, unchanged, when it is read.
    """

    def __init__(self, path: Path, *, share: tuple[int, int] = (0, 1)) -> None:
        """Compares this rank's share, (rank, ranks), of the files with their digests."""
        super().__init__(path)
        self.folder = path
        self._compared: dict[str, Identity] = {}
        try:
            with _opened(path) as folder:
                manifest = read_manifest(path, folder=folder)
                self.step, self.ranks, self.files = manifest
                self.metadata = read_metadata(
                    self._read_metadata(folder),
                    {name: size for name, (size, _) in self.files.items() if name != METADATA},
                )
                self._under: dict[tuple[str | int, ...], dict[str, Any]] = {}
                for name, (*parents, last) in self.metadata.planner_data.items():
                    of = self._under.setdefault(tuple(parents), {})
                    of[str(last)] = self.metadata.state_dict_metadata[name]
                self._chunks = {
                    MetadataIndex(name, chunk.offsets): (chunk.sizes, kept.properties.dtype)
                    for name, kept in self.metadata.state_dict_metadata.items()
                    if isinstance(kept, TensorStorageMetadata)
                    for chunk in kept.chunks
                }
                mine, num_ranks = share
                for name in sorted(self.files.keys() - {METADATA})[mine::num_ranks]:
                    self._compare(name, folder)
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}") from error

    def _read_metadata(self, folder: int) -> bytes:
        """Read by every rank, and compared by every rank: all else depends on it."""
        size, digest = self.files[METADATA]
        with open_regular(METADATA, inside=folder, largest=LARGEST, size=size) as stream:
            data = read_all(stream, size)
        self._must_be(hashlib.blake2b(data).hexdigest() == digest, METADATA)
        return data

    def _compare(self, name: str, folder: int) -> None:
        size, digest = self.files[name]
        with open_regular(name, inside=folder, size=size) as stream:
            self._must_be(_digest(stream) == digest, name)
            self._compared[name] = identity(os.fstat(stream.fileno()))

    def _must_be(self, is_same: bool, name: str) -> None:
        if not is_same:
            raise CheckpointError(f"{self.folder / printable(name, 300)} is damaged: it is not what was written")

    def names(self, under: tuple[str, ...]) -> dict[str, Any]:
        """What is directly under a path, and what is known of it."""
        return dict(self._under.get(under, {}))

    def has(self, where: tuple[str, ...]) -> bool:
        return where[-1] in self._under.get(where[:-1], {})

    def room(self, where: tuple[str, ...]) -> Tensor:
        kept = self._under.get(where[:-1], {}).get(where[-1])
        if not isinstance(kept, TensorStorageMetadata):
            raise CheckpointError(f"{self.folder} has no tensor {printable('.'.join(where), 200)}")
        return torch.empty(kept.size, dtype=kept.properties.dtype)

    def read(self, state: dict[str, Any]) -> dict[str, Any]:
        """Fill ``state``. As torch.distributed.checkpoint.load() does it, without asking other ranks."""
        planner = _LoadPlanner()
        planner.set_up_planner(state, self.metadata, is_coordinator=True)
        for name, value in planner.state_dict.items():
            kept = self.metadata.state_dict_metadata.get(name)
            if kept is not None and isinstance(value, Tensor) != isinstance(kept, TensorStorageMetadata):
                raise CheckpointError(
                    f"{self.folder} has {printable(name, 200)} as {type(kept).__name__}, and it is asked for as {type(value).__name__}"
                )
        self.set_up_storage_reader(self.metadata, is_coordinator=True)
        try:
            self.read_data(planner.finish_plan(planner.create_local_plan()), planner).wait()
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(f"{self.folder} cannot be read: {type(error).__name__}: {error}") from error
        return state

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """As torch's own, but what is in a file must be what the metadata says, to the shape and dtype of each chunk."""
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        with _opened(self.folder) as folder:
            for name, items in by_file.items():
                with open_regular(name, inside=folder, size=self.files[name][0]) as stream:
                    now = identity(os.fstat(stream.fileno()))
                    self._must_be(self._compared.get(name, now) == now, name)
                    for item in items:
                        self._read_item(item, stream, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_item(self, item: ReadItem, stream: io.BufferedReader, planner: LoadPlanner) -> None:
        info = self.storage_data[item.storage_index]
        if item.type == LoadItemType.BYTE_IO:
            planner.load_bytes(item, io.BytesIO(Window(stream, info.offset, info.length).read()))
            return
        tensor = load_plain(stream, info.length, start=info.offset)
        if type(tensor) is not Tensor or (tensor.shape, tensor.dtype) != self._chunks[item.storage_index]:
            raise CheckpointError(
                f"{self.folder} has something other than its .metadata says in place of {printable(item.storage_index.fqn, 200)}"
            )
        target = planner.resolve_tensor(item).detach()
        target.copy_(narrow_tensor_by_index(tensor, item.storage_offsets, item.lengths))
        planner.commit_tensor(item, target)


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    """A descriptor of a folder: what is opened by it is in this folder, whatever happens to its name."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
