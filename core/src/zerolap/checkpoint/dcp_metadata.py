"""``.metadata``, which torch.distributed.checkpoint writes as a pickle: read as records, checked, and only then made torch's own.

After this every tensor of a checkpoint is known to be covered by its chunks, once, and every chunk to have bytes of its own in a
file of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from zerolap._torch.checkpoint_format import StorageInfo
from zerolap.untrusted.files import printable
from zerolap.untrusted.pickles import Kind, Maker, Record, Table, UnreadableError, parse, refuse
from zerolap.untrusted.tensors import DTYPES, size_of

LARGEST = 2**27  # bytes of .metadata: 500 000 tensors
_BYTES_PER_OBJECT = 4  # what DCP writes has one container in eight bytes

_METADATA = "torch.distributed.checkpoint.metadata"
_KINDS = (
    (_METADATA, "Metadata"),
    (_METADATA, "MetadataIndex"),
    (_METADATA, "TensorStorageMetadata"),
    (_METADATA, "BytesStorageMetadata"),
    (_METADATA, "ChunkStorageMetadata"),
    (_METADATA, "TensorProperties"),
    (_METADATA, "StorageMeta"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
)


def _layout(name: Any) -> str:
    if name != "torch.strided":
        refuse("a tensor that is not strided")
    return "strided"


_MEMORY_FORMATS = (torch.contiguous_format, torch.channels_last, torch.preserve_format)


def _memory_format(number: Any) -> torch.memory_format:
    if type(number) is not int or number not in (0, 1, 2):
        refuse("an unknown memory format")
    return _MEMORY_FORMATS[number]


def _path(*parts: Any) -> None:
    """Where the checkpoint was when it was written, which is not needed."""


_TABLE: Table = {
    **{key: Kind(key[1]) for key in _KINDS},
    **{("torch", name): dtype for name, dtype in DTYPES.items()},
    ("torch", "Size"): Maker(size_of),
    ("torch.serialization", "_get_layout"): Maker(_layout),
    (_METADATA, "_MEM_FORMAT_ENCODING"): Maker(_memory_format),
    **{
        (module, name): Maker(_path)
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
    },
}


def read_metadata(program: bytes, sizes: Mapping[str, int]) -> Metadata:
    """The metadata of a checkpoint whose files have these sizes; UnreadableError if it cannot be right."""
    tree = parse(program, table=_TABLE, bytes_per_object=_BYTES_PER_OBJECT, asked_by="its .metadata")
    return _Checker(len(program), sizes).metadata(tree)


def _must(is_so: bool, what: str) -> None:
    if not is_so:
        raise UnreadableError(f"its .metadata cannot be right: {what}")


def _whole(value: Any, what: str) -> int:
    _must(type(value) is int and 0 <= value < 2**63, f"{what} is no number of bytes")
    return int(value)


class _Checker:
    """From records to torch's classes. What is visited is counted: a small file can refer to one long list many times."""

    def __init__(self, length: int, sizes: Mapping[str, int]) -> None:
        self.left, self.sizes = length, sizes

    def count(self, items: Any) -> Any:
        self.left -= len(items) + 1
        _must(self.left >= 0, "it says more than it has room for")
        return items

    def fields(self, record: Any, kind: str, known: Iterable[str], needed: Iterable[str] = ()) -> dict[str, Any]:
        _must(isinstance(record, Record) and record.kind == kind, f"there is no {kind} where one should be")
        state = record.state if record.state is not None else {}
        _must(type(state) is dict and set(self.count(state)) <= set(known), f"a {kind} has other fields than torch's")
        _must(set(needed) <= set(state), f"a {kind} lacks a field")
        return dict(state)

    def mapping(self, value: Any, what: str) -> dict[Any, Any]:
        _must(type(value) is dict, f"{what} is not a dict")
        return dict(self.count(value))

    def size(self, value: Any) -> torch.Size:
        _must(type(value) is torch.Size, "a shape is none")
        return torch.Size(self.count(value))

    def metadata(self, root: Any) -> Metadata:
        known = ("state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version")
        state = self.fields(root, "Metadata", known, known[:3])
        entries = {
            name: self.entry(name, kept)
            for name, kept in self.mapping(state["state_dict_metadata"], "what is kept").items()
        }
        paths = {
            name: self.path(name, where) for name, where in self.mapping(state["planner_data"], "what is where").items()
        }
        _must(paths.keys() == entries.keys(), "not everything that is kept has a place")
        storage = self.storage(self.mapping(state["storage_data"], "what is in which file"), entries)
        version = state.get("version")
        _must(version is None or type(version) is str, "its version is not text")
        made = Metadata(state_dict_metadata=entries, planner_data=paths, storage_data=storage)
        if hasattr(made, "version"):  # older versions of torch know none, and need none
            made.version = version
        return made

    def path(self, name: Any, where: Any) -> tuple[str | int, ...]:
        _must(
            type(where) in (tuple, list) and all(type(each) in (str, int) for each in self.count(where)),
            "a place is none",
        )
        # Two ways to say one thing would let a tensor's size be asked of one entry and its numbers of another.
        _must(name == ".".join(map(str, where)), "a place is not what it is called")
        return tuple(where)

    def entry(self, name: Any, kept: Any) -> TensorStorageMetadata | BytesStorageMetadata:
        _must(type(name) is str, "a name is not text")
        if isinstance(kept, Record) and kept.kind == "BytesStorageMetadata":
            self.fields(kept, "BytesStorageMetadata", ())
            return BytesStorageMetadata()
        fields = ("properties", "size", "chunks")
        state = self.fields(kept, "TensorStorageMetadata", fields, fields)
        _must(type(state["chunks"]) is list, "chunks are no list")
        size, chunks = self.size(state["size"]), [self.chunk(each) for each in self.count(state["chunks"])]
        check_coverage(name, size, chunks)
        properties = self.properties(state["properties"], len(size))
        return TensorStorageMetadata(properties=properties, size=size, chunks=chunks)

    def chunk(self, record: Any) -> ChunkStorageMetadata:
        fields = ("offsets", "sizes")
        state = self.fields(record, "ChunkStorageMetadata", fields, fields)
        return ChunkStorageMetadata(offsets=self.size(state["offsets"]), sizes=self.size(state["sizes"]))

    def properties(self, record: Any, num_dims: int) -> TensorProperties:
        is_one = isinstance(record, Record) and record.kind == "TensorProperties" and type(record.state) is tuple
        _must(is_one and len(record.state) in (5, 6), "a tensor's properties are none")
        dtype, layout, requires_grad, memory_format, pin_memory, *strides = self.count(record.state)
        is_known = (
            isinstance(dtype, torch.dtype) and layout == "strided" and isinstance(memory_format, torch.memory_format)
        )
        _must(is_known and type(requires_grad) is bool and type(pin_memory) is bool, "a tensor's properties are none")
        for each in (
            strides
        ):  # newer versions write how a tensor lay in memory; it is loaded into one that lies somewhere already
            is_none_or_one = each is None or (type(each) is tuple and len(each) == num_dims)
            _must(is_none_or_one and all(type(n) is int for n in each or ()), "a tensor's strides are none")
        return TensorProperties(
            dtype=dtype, requires_grad=requires_grad, memory_format=memory_format, pin_memory=pin_memory
        )

    def storage(
        self, said: dict[Any, Any], entries: Mapping[str, TensorStorageMetadata | BytesStorageMetadata]
    ) -> dict[MetadataIndex, StorageInfo]:
        """Where the bytes of each chunk are: within a file, and where no other's are."""
        # What a chunk has at least; what is no tensor has something.
        least: dict[MetadataIndex, int] = {}
        for name, kept in entries.items():
            if isinstance(kept, BytesStorageMetadata):
                least[MetadataIndex(name)] = 1
            else:
                for chunk in kept.chunks:
                    least[MetadataIndex(name, chunk.offsets)] = chunk.sizes.numel() * kept.properties.dtype.itemsize
        found: dict[MetadataIndex, StorageInfo] = {}
        for key, record in said.items():
            index, info = self.index(key), self.info(record)
            name = printable(index.fqn, 200)
            _must(index in least and index not in found, f"{name} has bytes that no chunk needs")
            _must(info.length >= least[index], f"{name} has fewer bytes than its shape needs")
            found[index] = info
        _must(found.keys() == least.keys(), "not every chunk has bytes in a file")
        self.check_places(found.values())
        return found

    def index(self, record: Any) -> MetadataIndex:
        state = self.fields(record, "MetadataIndex", ("fqn", "offset", "index"), ("fqn",))
        offset, hint = state.get("offset"), state.get("index")
        _must(type(state["fqn"]) is str and (hint is None or type(hint) is int), "the name of a chunk is none")
        return MetadataIndex(state["fqn"], None if offset is None else self.size(offset), hint)

    def info(self, record: Any) -> StorageInfo:
        needed = ("relative_path", "offset", "length")
        state = self.fields(record, "_StorageInfo", (*needed, "transform_descriptors"), needed)
        file = state["relative_path"]
        _must(type(file) is str, "the name of a file is not text")
        if file not in self.sizes:
            raise UnreadableError(f"it refers to a file that is not part of it: {printable(file, 300)}")
        _must(not state.get("transform_descriptors"), "what is in a file is transformed, by a way that is not ours")
        offset, length = _whole(state["offset"], "an offset"), _whole(state["length"], "a length")
        _must(offset + length <= self.sizes[file], f"{printable(file, 300)} is shorter than what should be in it")
        return StorageInfo(file, offset, length)

    def check_places(self, infos: Iterable[StorageInfo]) -> None:
        ends: dict[str, int] = {}
        for info in sorted(infos, key=lambda info: (info.relative_path, info.offset, info.length)):
            _must(info.offset >= ends.get(info.relative_path, 0), "two chunks have the same bytes of a file")
            ends[info.relative_path] = info.offset + info.length


def check_coverage(name: str, size: torch.Size, chunks: Iterable[ChunkStorageMetadata]) -> None:
    """Refuse chunks that are not all of a tensor, each element once: what no chunk has would be memory that was never written."""
    called = printable(name, 200)
    ranges: list[tuple[int, int]] = []
    cut: int | None = None  # the one dimension in which it is cut
    chunks = list(chunks)
    for chunk in chunks:
        _must(len(chunk.offsets) == len(chunk.sizes) == len(size), f"{called} has chunks of other dimensions")
        for dim, (start, count, whole) in enumerate(zip(chunk.offsets, chunk.sizes, size, strict=True)):
            _must(start + count <= whole, f"{called} has a chunk outside of it")
            if count != whole:
                _must(cut in (None, dim), f"{called} is cut in two directions, which zerolap never does")
                cut = dim
    if cut is None:
        _must(len(chunks) == 1, f"{called} has {len(chunks)} chunks that are all of it")
        return
    ranges = sorted((chunk.offsets[cut], chunk.offsets[cut] + chunk.sizes[cut]) for chunk in chunks)
    ends = [0, *(stop for _, stop in ranges)]
    is_covered = ends[-1] == size[cut] and all(start == end for (start, _), end in zip(ranges, ends, strict=False))
    _must(is_covered, f"the chunks of {called} are not all of it, each element once")
