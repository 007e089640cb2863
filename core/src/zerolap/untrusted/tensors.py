"""What ``torch.save`` has written, read without unpickling: tensors, numbers, strings and containers of them, on the CPU.

``torch.load(weights_only=True)`` runs no code, but builds whatever torch calls safe: a file can have it return memory that was never
written, take memory that the file does not fill, or inflate what is compressed. Here a tensor is bytes of the file, or an error.
"""

from __future__ import annotations

import io
import math
import struct
import sys
import zipfile
from collections import Counter, OrderedDict
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zerolap.untrusted.pickles import Maker, Table, UnreadableError, checked_key, parse, refuse, refuse_all_but_plain

_LARGEST_PICKLE = 2**26
_MAX_DIMS = 64  # of a tensor of torch's
_MOST_IN_SET = 100  # if tuples are among them, whose hashes can be chosen
_LOCAL_HEADER = struct.Struct("<4s22xHH")

DTYPES = {
    name: dtype
    for dtype in (getattr(torch, name) for name in dir(torch))
    if isinstance(dtype, torch.dtype) and not (name := str(dtype).removeprefix("torch.")).startswith(("q", "bits"))
}


class StorageType(NamedTuple):
    """Of what a storage is said to be; None: of bytes."""

    dtype: torch.dtype | None


class Stored(NamedTuple):
    """The bytes of a storage, and of what."""

    data: Tensor
    dtype: torch.dtype | None


_STORAGES = {
    "Float": torch.float32,
    "Double": torch.float64,
    "Half": torch.float16,
    "BFloat16": torch.bfloat16,
    "Int": torch.int32,
    "Long": torch.int64,
    "Short": torch.int16,
    "Char": torch.int8,
    "Byte": torch.uint8,
    "Bool": torch.bool,
    "ComplexFloat": torch.complex64,
    "ComplexDouble": torch.complex128,
}


class Window(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, stream: io.BufferedIOBase, start: int, length: int) -> None:
        self._stream, self._start, self._length, self._at = stream, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence])
        return self._at

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self._length - self._at))
        self._stream.seek(self._start + self._at)
        count = self._stream.readinto(memoryview(buffer)[:count])
        self._at += count
        return count


def load_plain(stream: io.BufferedIOBase, length: int, *, start: int = 0) -> Any:
    """What is in some bytes of a file; UnreadableError if it is not what ``torch.save`` writes of plain data."""
    try:
        archive = _Archive(Window(stream, start, length), length)
    except UnreadableError:
        raise
    except (
        Exception
    ) as error:  # zipfile is not made for what is hostile: besides BadZipFile it raises what it stumbles over
        raise UnreadableError(f"this is not an archive as torch.save writes it: {type(error).__name__}") from error
    found = parse(archive.program, table=_TABLE, stored=archive.storage, asked_by="a file")
    refuse_all_but_plain(found, StorageType, Stored)
    return found


class _Archive:
    """The zip archive that torch.save writes: nothing in it is compressed, and all of it lies within ``length``."""

    def __init__(self, stream: Window, length: int) -> None:
        self.stream, self.length, self.left = stream, length, length
        with zipfile.ZipFile(stream) as archive:
            self.entries = {entry.filename: entry for entry in archive.infolist()}
            pickles = [name for name in self.entries if name.endswith("data.pkl") and name.count("/") == 1]
            if len(self.entries) != len(archive.infolist()) or len(pickles) != 1:
                refuse("its archive has a name twice, or not one data.pkl")
        self.prefix = pickles[0].removesuffix("data.pkl")
        order = self.entries.get(f"{self.prefix}byteorder")
        if order is not None and bytes(self.record("byteorder", 16)) != sys.byteorder.encode():
            refuse("it was written on a machine with another byte order")
        self.program = bytes(self.record("data.pkl", _LARGEST_PICKLE))
        self.storages: dict[str, Tensor] = {}

    def record(self, name: str, largest: int) -> bytearray:
        entry = self.entries.get(self.prefix + name)
        if entry is None:
            refuse("its archive lacks a record")
        if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1 or entry.file_size != entry.compress_size:
            refuse("its archive is compressed")
        # Records that lie over each other could be far more than the file.
        self.left -= entry.file_size
        if entry.file_size > largest or self.left < 0:
            refuse("its archive has a record that is larger than it can be")
        self.stream.seek(entry.header_offset)
        header = self.stream.read(_LOCAL_HEADER.size)
        magic, name_length, extra_length = _LOCAL_HEADER.unpack(header)
        start = entry.header_offset + _LOCAL_HEADER.size + name_length + extra_length
        if magic != b"PK\x03\x04" or start + entry.file_size > self.length:
            refuse("its archive has a record outside of it")
        self.stream.seek(start)
        data = bytearray(entry.file_size)
        view, filled = memoryview(data), 0
        while filled < len(data):
            count = self.stream.readinto(view[filled:])
            if not count:
                refuse("its archive ends early")
            filled += count
        return data

    def storage(self, said: Any) -> Stored:
        """What a persistent id of torch.save's stands for."""
        match said:
            case ("storage", StorageType(dtype), str(key), str(), int(count)) if type(count) is int and count >= 0:
                pass
            case _:
                refuse("a storage is not described as torch.save does")
        nbytes = count * (dtype.itemsize if dtype is not None else 1)
        if key not in self.storages:
            data = self.record(f"data/{key}", nbytes)
            self.storages[key] = (
                torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
            )
        if self.storages[key].numel() != nbytes:
            refuse("a storage has not as many bytes as it is said to have")
        return Stored(self.storages[key], dtype)


# --- what is made of records ------------------------------------------------------------------------------------------


def size_of(dims: Any) -> torch.Size:
    """A shape: few, whole, not negative numbers, of which torch can have a tensor."""
    if type(dims) not in (tuple, list, torch.Size) or len(dims) > _MAX_DIMS:
        refuse("a shape that is none")
    if not all(type(each) is int and 0 <= each < 2**63 for each in dims) or math.prod(dims) >= 2**60:
        refuse("a shape that no tensor has")
    return torch.Size(dims)


def _tensor_v2(
    stored: Any, offset: Any, size: Any, stride: Any, requires_grad: Any, hooks: Any, metadata: Any = None
) -> Tensor:
    if not isinstance(stored, Stored) or stored.dtype is None:
        refuse("a tensor without a storage")
    return _tensor(stored.data, stored.dtype, offset, size, stride, requires_grad, hooks, metadata)


def _tensor_v3(
    stored: Any, offset: Any, size: Any, stride: Any, requires_grad: Any, hooks: Any, dtype: Any, metadata: Any = None
) -> Tensor:
    if not isinstance(stored, Stored) or stored.dtype is not None or not isinstance(dtype, torch.dtype):
        refuse("a tensor without a storage")
    return _tensor(stored.data, dtype, offset, size, stride, requires_grad, hooks, metadata)


def _tensor(
    data: Tensor, dtype: torch.dtype, offset: Any, size: Any, stride: Any, requires_grad: Any, hooks: Any, metadata: Any
) -> Tensor:
    size = size_of(size)
    is_stride = type(stride) is tuple and all(type(each) is int and 0 <= each < 2**60 for each in stride)
    if type(offset) is not int or offset < 0 or not is_stride or len(stride) != len(size):
        refuse("a tensor with an odd place in its storage")
    if type(requires_grad) is not bool or hooks or metadata:
        refuse("a tensor that is more than its numbers")
    last = offset + sum((dim - 1) * step for dim, step in zip(size, stride, strict=True))
    if data.numel() % dtype.itemsize or (size.numel() and last >= data.numel() // dtype.itemsize):
        refuse("a tensor that is larger than its storage")
    whole = data.view(dtype) if data.numel() else torch.empty(0, dtype=dtype)
    made = whole.as_strided(size, stride, offset) if size.numel() else torch.empty(size, dtype=dtype)
    return made.requires_grad_(requires_grad and (dtype.is_floating_point or dtype.is_complex))


def _parameter(data: Any, requires_grad: Any, hooks: Any) -> Tensor:
    if type(data) is not Tensor or type(requires_grad) is not bool or hooks:
        refuse("a parameter that is more than its numbers")
    return torch.nn.Parameter(data.detach(), requires_grad)


def _device(kind: Any, index: Any = None) -> torch.device:
    if type(kind) is not str or not (index is None or type(index) is int):
        refuse("a device that is none")
    return torch.device(kind) if index is None else torch.device(kind, index)


def _set(items: Any) -> set[Any]:
    if type(items) is not list or (len(items) > _MOST_IN_SET and any(type(item) is tuple for item in items)):
        refuse("a set that is none, or one of many tuples")
    return {checked_key(item) for item in items}


def _counter(counts: Any = ()) -> Counter[Any]:
    if type(counts) is not dict:
        refuse("a Counter that is none")
    return Counter(counts)


def _ordered(*items: Any) -> OrderedDict[Any, Any]:
    if items:
        refuse("an OrderedDict that is none")
    return OrderedDict()


def _bytes(text: Any, encoding: Any) -> bytes:
    if type(text) is not str or encoding not in ("latin1", "latin-1"):
        refuse("bytes that are none")
    return text.encode("latin1")


def _bytearray(data: Any = b"") -> bytearray:
    if type(data) is not bytes:
        refuse("a bytearray that is none")
    return bytearray(data)


def _complex(real: Any, imaginary: Any) -> complex:
    if type(real) is not float or type(imaginary) is not float:
        refuse("a complex number that is none")
    return complex(real, imaginary)


_TABLE: Table = {
    **{("torch", name): dtype for name, dtype in DTYPES.items()},
    **{("torch", f"{name}Storage"): StorageType(dtype) for name, dtype in _STORAGES.items()},
    ("torch.storage", "UntypedStorage"): StorageType(None),
    ("torch._utils", "_rebuild_tensor_v2"): Maker(_tensor_v2),
    ("torch._utils", "_rebuild_tensor_v3"): Maker(_tensor_v3),
    ("torch._utils", "_rebuild_parameter"): Maker(_parameter),
    ("torch", "Size"): Maker(size_of),
    ("torch", "device"): Maker(_device),
    ("collections", "OrderedDict"): Maker(_ordered),
    ("collections", "Counter"): Maker(_counter),
    ("_codecs", "encode"): Maker(_bytes),
    **{
        (module, name): Maker(make)
        for module in ("builtins", "__builtin__")
        for name, make in (
            ("set", _set),
            ("frozenset", lambda items: frozenset(_set(items))),
            ("bytearray", _bytearray),
            ("complex", _complex),
        )
    },
}
