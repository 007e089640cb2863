"""Checkpoints that were made to do harm: they are refused, in time, and nothing else happens in this process."""

from __future__ import annotations

import copy
import io
import json
import math
import os
import pathlib
import pickle
import random
import shutil
import signal
import time
import tracemalloc
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.nn.parallel import DistributedDataParallel as DDP

import zerolap
from support.training import SMALL_BUCKETS, Mlp, batches, iterate
from zerolap import checkpoint
from zerolap.checkpoint import convert
from zerolap.checkpoint.dcp_metadata import read_metadata
from zerolap.checkpoint.folder import path_of
from zerolap.checkpoint.reader import CheckpointError, CheckpointReader, digest_of
from zerolap.untrusted.pickles import UnreadableError
from zerolap.untrusted.tensors import load_plain
from zerolap_conformance.ranks import run_ranks


def _save(folder: str) -> None:
    ddp = DDP(Mlp(), bucket_cap_mb=SMALL_BUCKETS)
    zero = zerolap.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, overlap_with_ddp=True, lr=0.01)
    zerolap.attach(ddp, zero)
    for x in batches(2):
        iterate(ddp, zero, x)
    checkpoint.save(folder, ddp, zero, step=2, extra={"epoch": 7, "seen": torch.arange(3)})


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two ranks."""
    folder = tmp_path_factory.mktemp("good")
    run_ranks(2, _save, str(folder))
    return path_of(folder, 2)


@pytest.fixture
def path(good: Path, tmp_path: Path) -> Path:
    """One to be spoilt."""
    return Path(shutil.copytree(good, tmp_path / "step-000000002"))


@pytest.fixture(autouse=True)
def in_time() -> Iterator[None]:
    """What reads a pipe or a device that never ends is interrupted, and fails."""

    def late(*_: object) -> None:
        raise TimeoutError("it is still reading")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def _seal(path: Path, **changes: Any) -> None:
    """As somebody would who can write the manifest, too."""
    held = json.loads((path / "manifest.json").read_text())
    files = {name: digest_of(path / name) for name in held["files"] if (path / name).is_file()}
    (path / "manifest.json").write_text(json.dumps(held | {"files": files} | changes))


def _refused(path: Path, words: str = "") -> None:
    for read in (lambda: convert.describe(path), lambda: convert.to_file(path, path.parent / "single.pt")):
        with pytest.raises(CheckpointError) as caught:
            read()
        assert words in str(caught.value)
    assert not (path.parent / "single.pt").exists()


# --- the metadata -----------------------------------------------------------------------------------------------------

CLASSES = (
    metadata.Metadata,
    metadata.MetadataIndex,
    metadata.TensorStorageMetadata,
    metadata.BytesStorageMetadata,
    metadata.ChunkStorageMetadata,
    metadata.TensorProperties,
    metadata.StorageMeta,
    filesystem._StorageInfo,
    pathlib.PosixPath,
    pathlib.PurePath,
    pathlib.Path,
    torch.Size,
    OrderedDict,
)


def _process() -> dict[str, dict[str, int]]:
    """What a pickle could have changed here."""
    held: dict[str, Any] = {repr(cls): vars(cls) for cls in CLASSES} | {"torch": vars(torch)}
    # __slotnames__ is a cache of pickle's, which this test itself uses.
    return {
        name: {key: id(value) for key, value in dict(of).items() if key != "__slotnames__"} for name, of in held.items()
    }


@pytest.fixture
def unchanged() -> Iterator[None]:
    before = _process()
    yield
    assert _process() == before


def _text(text: str) -> bytes:
    return b"\x8c" + bytes([len(text.encode())]) + text.encode()


def _global(module: str, name: str) -> bytes:
    return _text(module) + _text(name) + b"\x93"


def _set_on_a_class(module: str, name: str, attribute: str) -> bytes:
    """BUILD with (None, {...}) sets attributes of whatever is on the stack: here of a class."""
    return b"\x80\x04" + _global(module, name) + b"N}" + _text(attribute) + _text("changed") + b"s\x86b."


@pytest.mark.parametrize(
    ("module", "name", "attribute"),
    [
        ("pathlib", "PosixPath", "suffix"),
        ("torch", "Size", "numel"),
        ("torch.distributed.checkpoint.metadata", "MetadataIndex", "fqn"),
        ("torch.serialization", "_get_layout", "__name__"),
        ("torch", "float32", "itemsize"),
    ],
)
@pytest.mark.usefixtures("unchanged")
def test_metadata_cannot_set_an_attribute_of_a_class(path: Path, module: str, name: str, attribute: str) -> None:
    for program in (
        _set_on_a_class(module, name, attribute),
        # Noted, set, and then used as if nothing had happened: the rest is a whole checkpoint.
        _set_on_a_class(module, name, attribute)[:-1] + b"0" + (path / ".metadata").read_bytes(),
    ):
        (path / ".metadata").write_bytes(program)
        _seal(path)
        _refused(path)


@pytest.mark.parametrize("protocol", [4, 5])
def test_metadata_of_torch_is_read_as_torch_reads_it(good: Path, protocol: int) -> None:
    program = (good / ".metadata").read_bytes()
    sizes = {file.name: file.stat().st_size for file in good.glob("*.distcp")}
    theirs = pickle.loads(program)
    ours = read_metadata(pickle.dumps(theirs, protocol=protocol), sizes)
    _assert_same(ours, theirs)


def _assert_same(ours: metadata.Metadata, theirs: metadata.Metadata) -> None:
    for name in ("state_dict_metadata", "planner_data", "storage_data", "version"):
        assert getattr(ours, name) == getattr(theirs, name), name


def test_fields_that_only_some_versions_of_torch_write_may_be_missing(path: Path) -> None:
    held = pickle.loads((path / ".metadata").read_bytes())
    del held.version, held.storage_meta
    for info in held.storage_data.values():
        info.transform_descriptors = []
    (path / ".metadata").write_bytes(pickle.dumps(held))
    _seal(path)
    assert convert.describe(path)["step"] == 2


# Opcodes by how a grammar combines them: what they take from the stack, and what they leave.
NAMES = [
    *((cls.__module__, cls.__qualname__) for cls in CLASSES),
    ("torch", "float32"),
    ("torch", "Tensor"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    ("os", "system"),
    ("builtins", "eval"),
    ("builtins", "getattr"),
]
TEXTS = ["fqn", "offset", "state_dict_metadata", "planner_data", "storage_data", "chunks", "size", "x" * 40, ""]
PUSHES: list[Callable[[random.Random], bytes]] = [
    lambda r: _global(*r.choice(NAMES)),
    lambda r: _text(r.choice(TEXTS)),
    lambda r: b"K" + bytes([r.randrange(256)]),
    lambda r: b"J" + r.randbytes(4),
    lambda r: b"\x8a\x09" + r.randbytes(9),
    lambda r: b"G" + r.randbytes(8),
    lambda r: r.choice([b"N", b"\x88", b"\x89", b")", b"]", b"}", b"\x8f"]),
    lambda r: b"h" + bytes([r.randrange(8)]),
    lambda r: b"c" + "\n".join((*r.choice(NAMES), "")).encode(),
]
ONE_TO_ONE = [b"\x85", b"\x94", b"2", b"0N", b"Q", b"(", b"R", b"b"]
TWO_TO_ONE = [b"\x86", b"a", b"R", b"b", b"\x81", b"\x93", b"\x92", b"i", b"o"]
TO_MARK = [b"t", b"u", b"e", b"l", b"d", b"\x90", b"\x91", b"1"]


def _program(seed: random.Random) -> bytes:
    parts, depth = [b"\x80\x04"], 0
    for _ in range(seed.randrange(4, 60)):
        roll = seed.random()
        if depth < 2 or roll < 0.45:
            parts.append(seed.choice(PUSHES)(seed))
            depth += 1
        elif roll < 0.6:
            parts.append(seed.choice(ONE_TO_ONE))
        elif roll < 0.9:
            parts.append(seed.choice(TWO_TO_ONE))
            depth -= 1
        else:
            parts.append(
                b"(" + b"".join(seed.choice(PUSHES)(seed) for _ in range(seed.randrange(5))) + seed.choice(TO_MARK)
            )
    return b"".join(parts) + b"."


@pytest.mark.usefixtures("unchanged")
def test_programs_of_any_opcodes_are_refused_and_change_nothing() -> None:
    seed, began = random.Random(17), time.monotonic()
    words: set[str] = set()
    for number in range(20_000):
        try:
            read_metadata(_program(seed), {})
        except UnreadableError as error:
            words.add(str(error).split(":")[-1][:25])
            continue
        raise AssertionError(f"program {number} passed for the metadata of a checkpoint")
    assert len(words) > 12, f"the grammar reaches little: {words}"
    assert time.monotonic() - began < 50


@pytest.mark.usefixtures("unchanged")
def test_metadata_that_was_changed_anywhere_is_refused_or_read_as_it_stands(good: Path) -> None:
    held = pickle.loads((good / ".metadata").read_bytes())
    for name in [name for name in held.state_dict_metadata if "layers.0.bias" not in name]:
        del held.state_dict_metadata[name], held.planner_data[name]
    held.storage_data = {key: value for key, value in held.storage_data.items() if "layers.0.bias" in key.fqn}
    original = pickle.dumps(held)
    sizes = {file.name: file.stat().st_size for file in good.glob("*.distcp")}
    _assert_same(read_metadata(original, sizes), held)
    seed, num_read = random.Random(18), 0
    for _ in range(2500):
        changed = bytearray(original)
        for _ in range(seed.choice((1, 1, 2, 5))):
            at = seed.randrange(len(changed))
            match seed.randrange(4):
                case 0:
                    changed[at] = seed.randrange(256)
                case 1:
                    del changed[at : at + seed.randrange(1, 9)]
                case 2:
                    changed[at:at] = seed.choice((b"b", b"R", b"0", b"2", b"N", b"(", b"\x86b", b"h\x00"))
                case _:
                    begin = seed.randrange(len(original))
                    changed[at : at + 8] = original[begin : begin + seed.randrange(1, 30)]
        try:
            ours = read_metadata(bytes(changed), sizes)
        except UnreadableError:
            continue
        num_read += 1
        _assert_same(ours, pickle.loads(bytes(changed)))  # harmless: it has no names but those of the table
    assert num_read > 5, "memory formats, hints and paths can be changed without harm"


def test_reading_takes_memory_and_time_by_the_length_of_the_metadata() -> None:
    many = 200_000
    bombs = {
        "lists": b"]" * many,
        "tuples in tuples": b")" + b"\x85" * many,
        "a deep tuple as a key": b"})" + b"\x85" * 1000 + b"Ns",
        "a long text that is not there": b"X\xff\xff\xff\xff",
        "a long number of the memo": b"]r\xff\xff\xff\xff",
        "marks": b"(" * many,
        "one list, referred to again and again": b"]\x94(" + b"N" * 1000 + b"e}(" + b"".join(
            _text(f"{i}") + b"h\x00" for i in range(5000)
        ) + b"u",
    }  # fmt: skip
    for name, bomb in bombs.items():
        tracemalloc.start()
        began = time.monotonic()
        with pytest.raises(UnreadableError):
            read_metadata(b"\x80\x04" + bomb + b".", {})
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 60 * len(bomb) + 2**20, (name, peak, len(bomb))
        assert time.monotonic() - began < 20, name


@pytest.mark.usefixtures("unchanged")
def test_a_list_that_all_tensors_share_does_not_multiply(good: Path) -> None:
    """Each of the tensors refers to one long list of chunks: little to read, much to visit."""
    held = pickle.loads((good / ".metadata").read_bytes())
    (name, kept), *_ = [each for each in held.state_dict_metadata.items() if hasattr(each[1], "chunks")]
    kept.chunks = kept.chunks * 3000
    for number in range(3000):
        held.state_dict_metadata[f"{name}{number}"] = metadata.TensorStorageMetadata(
            kept.properties, kept.size, kept.chunks
        )
    began = time.monotonic()
    with pytest.raises(UnreadableError):
        read_metadata(pickle.dumps(held), {file.name: file.stat().st_size for file in good.glob("*.distcp")})
    assert time.monotonic() - began < 20


# --- files ------------------------------------------------------------------------------------------------------------


def _link(path: Path, name: str, target: str) -> None:
    (path / name).unlink()
    (path / name).symlink_to(target)


def _outside(path: Path) -> None:
    """A file of another folder, with everything as if it belonged to the checkpoint."""
    shutil.copy(path / "__0_0.distcp", path.parent / "outside")
    held = pickle.loads((path / ".metadata").read_bytes())
    for info in held.storage_data.values():
        if info.relative_path == "__0_0.distcp":
            info.relative_path = "../outside"
    (path / ".metadata").write_bytes(pickle.dumps(held))
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["../outside"] = manifest["files"].pop("__0_0.distcp")
    (path / "manifest.json").write_text(json.dumps(manifest))
    _seal(path)


def _linked(path: Path) -> None:
    shutil.move(path / "__0_0.distcp", path.parent / "elsewhere")
    (path / "__0_0.distcp").symlink_to("../elsewhere")


def _pipe(path: Path, name: str) -> None:
    (path / name).unlink()
    os.mkfifo(path / name)


def _folder(path: Path) -> None:
    (path / "__0_0.distcp").unlink()
    (path / "__0_0.distcp").mkdir()


def _unlisted_metadata(path: Path) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["files"][".metadata"]
    (path / "manifest.json").write_text(json.dumps(manifest))


def _manifest(**changes: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        held = json.loads((path / "manifest.json").read_text())
        (path / "manifest.json").write_text(json.dumps(held | changes))

    return change


def _file_says(said: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        held = json.loads((path / "manifest.json").read_text())
        held["files"]["__0_0.distcp"] = said
        (path / "manifest.json").write_text(json.dumps(held))

    return change


def _text_of_manifest(text: str) -> Callable[[Path], None]:
    return lambda path: (path / "manifest.json").write_text(text) and None


def _huge(path: Path) -> None:
    for name in ("manifest.json", ".metadata"):
        os.truncate(path / name, 2**40)  # no byte of it is on disk


def _claims_huge(path: Path) -> None:
    os.truncate(path / "__0_0.distcp", 2**40)
    (path / "manifest.json").write_text(
        (path / "manifest.json").read_text().replace(f"{(path / '__0_0.distcp').stat().st_size}", "1")
    )


FILES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a path outside": (_outside, "names a file outside of it, ../outside"),
    "a link": (_linked, "__0_0.distcp is not a regular file"),
    "a link to a device": (lambda path: _link(path, "__0_0.distcp", "/dev/zero"), "is not a regular file"),
    "metadata is a device": (lambda path: _link(path, ".metadata", "/dev/zero"), ".metadata is not a regular file"),
    "the manifest is a device": (lambda path: _link(path, "manifest.json", "/dev/zero"), "manifest.json is not a regular"),
    "a pipe": (lambda path: _pipe(path, "__1_0.distcp"), "__1_0.distcp is not a regular file"),
    "metadata is a pipe": (lambda path: _pipe(path, ".metadata"), ".metadata is not a regular file"),
    "the manifest is a pipe": (lambda path: _pipe(path, "manifest.json"), "manifest.json is not a regular file"),
    "a folder": (_folder, "__0_0.distcp is not a regular file"),
    "metadata that is not in the manifest": (_unlisted_metadata, ".metadata is missing"),
    "a name with a line end": (_manifest(files={".metadata": [1, "0" * 128], "a\nb\x1b[2J": [1, "0" * 128]}), "outside"),
    "an empty name": (_manifest(files={".metadata": [1, "0" * 128], "": [1, "0" * 128]}), "names a file outside"),
    "an absolute name": (_manifest(files={".metadata": [1, "0" * 128], "/etc/passwd": [1, "0" * 128]}), "outside"),
    "two dots": (_manifest(files={".metadata": [1, "0" * 128], "..": [1, "0" * 128]}), "names a file outside"),
    "files are a list": (_manifest(files=[]), "not the manifest of a checkpoint"),
    "a step of text": (_manifest(step="2"), "not the manifest of a checkpoint"),
    "a step of nothing": (_manifest(step=None), "not the manifest of a checkpoint"),
    "a negative step": (_manifest(step=-1), "not the manifest of a checkpoint"),
    "true for a number": (_manifest(ranks=True), "not the manifest of a checkpoint"),
    "a size of text": (_file_says(["1", "0" * 128]), "no size and digest for __0_0.distcp"),
    "a negative size": (_file_says([-1, "0" * 128]), "no size and digest"),
    "a size that is no whole number": (_file_says([1.5, "0" * 128]), "no size and digest"),
    "a digest that is none": (_file_says([1, "zz"]), "no size and digest"),
    "nothing for a file": (_file_says(None), "no size and digest"),
    "deep nesting": (_text_of_manifest("[" * 100_000), "is nested too deeply"),
    "deep nesting in an object": (_text_of_manifest('{"a":' * 100_000), "is nested too deeply"),
    "a name twice": (_text_of_manifest('{"format": 1, "format": 1}'), "appears twice"),
    "not a number": (_text_of_manifest('{"format": NaN}'), "NaN is not a JSON number"),
    "a long number": (_text_of_manifest('{"format": ' + "9" * 5000 + "}"), "is damaged"),
    "no object": (_text_of_manifest("3"), "not the manifest of a checkpoint"),
    "bytes that are no text": (lambda path: (path / "manifest.json").write_bytes(b"\xff\xfe\x00"), "is damaged"),
    "a huge manifest": (_huge, "manifest.json has 1099511627776 bytes, and may have"),
    "another size than is claimed": (_claims_huge, "is damaged"),
}  # fmt: skip


@pytest.mark.parametrize("case", FILES)
def test_only_regular_files_of_the_folder_are_read(path: Path, case: str) -> None:
    spoil, words = FILES[case]
    spoil(path)
    _refused(path, words)


def test_a_huge_metadata_is_not_read(path: Path) -> None:
    os.truncate(path / ".metadata", 2**40)
    _manifest(files={".metadata": [2**40, "0" * 128]})(path)
    _refused(path, ".metadata has 1099511627776 bytes, and may have")


def test_the_folder_may_be_reached_by_a_link(path: Path, tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to(path.name)
    assert convert.describe(tmp_path / "latest")["step"] == 2


def test_a_file_that_was_changed_after_it_was_compared_is_not_read(path: Path) -> None:
    reader = CheckpointReader(path)
    data = bytearray((path / "__0_0.distcp").read_bytes())
    (path / "__0_0.distcp").unlink()
    (path / "__0_0.distcp").write_bytes(data)  # the same bytes, and yet another file
    with pytest.raises(CheckpointError, match="is not what was written"):
        reader.read({"optimizer": {"params": None, "param_groups": None}, "extra": reader.room(("extra",))})


# --- chunks -----------------------------------------------------------------------------------------------------------


def _flat(held: metadata.Metadata) -> tuple[str, metadata.TensorStorageMetadata]:
    """A state that two ranks have written."""
    return next((n, k) for n, k in held.state_dict_metadata.items() if n.startswith("optimizer.state") and len(getattr(k, "chunks", ())) == 2)  # fmt: skip


def _square(held: metadata.Metadata) -> tuple[str, metadata.TensorStorageMetadata]:
    return next((n, k) for n, k in held.state_dict_metadata.items() if len(getattr(k, "size", ())) == 2)


def _move(held: metadata.Metadata, by: int) -> None:
    name, kept = _flat(held)
    old = kept.chunks[1].offsets
    kept.chunks[1].offsets = torch.Size([old[0] + by])
    held.storage_data = {
        metadata.MetadataIndex(name, [old[0] + by]) if key == metadata.MetadataIndex(name, old) else key: value
        for key, value in held.storage_data.items()
    }


def _shrink(held: metadata.Metadata, by: int) -> None:
    chunk = _flat(held)[1].chunks[0]
    chunk.sizes = torch.Size([chunk.sizes[0] - by])


def _drop(held: metadata.Metadata) -> None:
    name, kept = _flat(held)
    chunk = kept.chunks.pop()
    del held.storage_data[metadata.MetadataIndex(name, chunk.offsets)]


def _negative(held: metadata.Metadata) -> None:
    _flat(held)[1].chunks[0].offsets = torch.Size([-1])


def _larger(held: metadata.Metadata) -> None:
    _, kept = _square(held)
    kept.size = torch.Size([kept.size[0] + 1, kept.size[1]])


def _larger_with_its_chunk(held: metadata.Metadata) -> None:
    _, kept = _square(held)
    kept.size = kept.chunks[0].sizes = torch.Size([kept.size[0] + 1, kept.size[1]])


def _no_chunks(held: metadata.Metadata) -> None:
    name, kept = _square(held)
    kept.chunks = []
    held.storage_data = {key: value for key, value in held.storage_data.items() if key.fqn != name}


def _other_dims(held: metadata.Metadata) -> None:
    kept = _square(held)[1]
    kept.size = torch.Size([kept.size.numel()])


def _as_doubles(held: metadata.Metadata) -> None:
    _square(held)[1].properties.dtype = torch.float64


def _as_ints(held: metadata.Metadata) -> None:
    _square(held)[1].properties.dtype = torch.int32


def _twice(held: metadata.Metadata) -> None:
    kept = _square(held)[1]
    kept.chunks = kept.chunks * 2


def _transposed(held: metadata.Metadata) -> None:
    kept = _square(held)[1]
    kept.size = kept.chunks[0].sizes = torch.Size(reversed(kept.size))


def _same_bytes(held: metadata.Metadata) -> None:
    (_, one), (_, two) = [each for each in held.storage_data.items() if each[0].fqn.endswith("exp_avg")][:2]
    one.offset, one.length, one.relative_path = two.offset, two.length, two.relative_path


def _beyond_the_file(held: metadata.Metadata) -> None:
    next(iter(held.storage_data.values())).offset += 10**9


def _negative_offset(held: metadata.Metadata) -> None:
    next(iter(held.storage_data.values())).offset = -1


def _compressed(held: metadata.Metadata) -> None:
    next(iter(held.storage_data.values())).transform_descriptors = ["stream.zstd"]


def _bytes_for_a_tensor(held: metadata.Metadata) -> None:
    name = _square(held)[0]
    held.state_dict_metadata[name] = metadata.BytesStorageMetadata()
    held.storage_data = {
        metadata.MetadataIndex(name) if key.fqn == name else key: value for key, value in held.storage_data.items()
    }


def _another_name(held: metadata.Metadata) -> None:
    name = _square(held)[0]
    held.planner_data[name] = ("model", "another")


def _swapped(held: metadata.Metadata) -> None:
    """The bytes of a tensor where those of what is no tensor should be, and the other way round."""
    name = next(n for n in held.state_dict_metadata if n.startswith("optimizer.state") and n.endswith(".step"))
    one = metadata.MetadataIndex(name, held.state_dict_metadata[name].chunks[0].offsets)
    params = metadata.MetadataIndex("optimizer.param_groups")
    held.storage_data[one], held.storage_data[params] = held.storage_data[params], held.storage_data[one]


CHUNKS: dict[str, tuple[Callable[[metadata.Metadata], None], str]] = {
    "a gap": (lambda held: _move(held, 1), "outside of it"),
    "a gap in the middle": (lambda held: _shrink(held, 1), "are not all of it, each element once"),
    "an overlap": (lambda held: _move(held, -1), "are not all of it, each element once"),
    "one is missing": (_drop, "are not all of it, each element once"),
    "a negative offset": (_negative, "a shape that no tensor has"),
    "larger than its chunk": (_larger, "are not all of it, each element once"),
    "larger than its bytes": (_larger_with_its_chunk, "fewer bytes than its shape needs|something other than"),
    "no chunks": (_no_chunks, "has 0 chunks"),
    "other dimensions": (_other_dims, "chunks of other dimensions"),
    "another dtype": (_as_doubles, "fewer bytes than its shape needs|something other than"),
    "another dtype of the same size": (_as_ints, "something other than its .metadata says"),
    "another shape of the same size": (_transposed, "something other than its .metadata says"),
    "the same chunk twice": (_twice, "2 chunks that are all of it"),
    "two with the same bytes": (_same_bytes, "have the same bytes of a file|fewer bytes"),
    "bytes beyond the file": (_beyond_the_file, "is shorter than what should be in it"),
    "bytes before the file": (_negative_offset, "an offset is no number of bytes"),
    "compressed": (_compressed, "is transformed"),
    "a place that is called otherwise": (_another_name, "a place is not what it is called"),
    "what is no tensor in its place": (_swapped, "param groups are not a list"),
}  # fmt: skip


@pytest.mark.parametrize("case", CHUNKS)
def test_chunks_are_all_of_their_tensor_each_element_once(path: Path, case: str) -> None:
    spoil, words = CHUNKS[case]
    held = pickle.loads((path / ".metadata").read_bytes())
    spoil(held)
    (path / ".metadata").write_bytes(pickle.dumps(held))
    _seal(path)
    with pytest.raises(CheckpointError, match=words):
        convert.to_file(path, path.parent / "single.pt")
    assert not list(path.parent.glob("*.pt")), "nothing is left"


def test_a_load_on_ranks_refuses_them_too_and_changes_nothing(good: Path, tmp_path: Path) -> None:
    cases = {"a gap in the middle": CHUNKS, "one is missing": CHUNKS, "bytes in place of a tensor": {"bytes in place of a tensor": (_bytes_for_a_tensor, "")}, "a pipe": FILES, "a path outside": FILES}  # fmt: skip
    for case, of in cases.items():
        path = Path(shutil.copytree(good, tmp_path / case / good.name))
        spoil: Any = of[case][0]
        if of is FILES:
            spoil(path)
        else:
            held = pickle.loads((path / ".metadata").read_bytes())
            spoil(held)
            (path / ".metadata").write_bytes(pickle.dumps(held))
            _seal(path)
    for said in run_ranks(2, _load_all, str(tmp_path), list(cases)):
        assert len(said) == len(cases), said


def _load_all(folder: str, cases: list[str]) -> list[str]:
    ddp = DDP(Mlp())
    zero = zerolap.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, overlap_with_ddp=True, lr=0.01)
    zerolap.attach(ddp, zero)
    before = copy.deepcopy(ddp.module.state_dict())
    said = []
    for case in cases:
        with pytest.raises(zerolap.ZerolapError) as caught:
            checkpoint.load(f"{folder}/{case}", ddp, zero)
        said.append(str(caught.value))
    assert all(torch.equal(value, before[name]) for name, value in ddp.module.state_dict().items())
    return said


# --- what torch.save writes -------------------------------------------------------------------------------------------


def _saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _loaded(data: bytes) -> Any:
    return load_plain(io.BytesIO(data), len(data))


def _repacked(data: bytes, change: Callable[[str, bytes], bytes], *, compression: int = zipfile.ZIP_STORED) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as source, zipfile.ZipFile(made, "w", compression) as target:
        for entry in source.infolist():
            target.writestr(entry.filename, change(entry.filename, source.read(entry)))
    return made.getvalue()


class Called:
    """Pickled as the call of something."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call


def test_everything_plain_is_read_as_torch_reads_it() -> None:
    base = torch.arange(24, dtype=torch.float32)
    values = {
        "numbers": [1, -1, 2**40, -(2**200), 1.5, math.inf, True, None, 1 + 2j],
        "texts": ["", "x" * 300, "ä\u202e", b"bytes", bytearray(b"more")],
        "containers": ((), (1, (2, [3, {"a": {4, 5}}])), OrderedDict(b=1, a=2)),
        "keys": {1: "a", None: "b", (1, 2): "c", 1.5: "d"},
        "torch": (torch.float32, torch.Size([1, 2]), torch.device("cpu")),
        "tensors": [
            torch.zeros(0), torch.tensor(3), torch.ones(2, 3, dtype=torch.bfloat16), torch.tensor([True, False]),
            torch.zeros(2, dtype=torch.complex64), torch.zeros(3, dtype=torch.float8_e4m3fn).view(torch.uint8),
            torch.zeros(2, 3, 4, 4).contiguous(memory_format=torch.channels_last), torch.zeros(0, 5),
        ],
        "views": [base[3:9], base.view(4, 6).T, base[::2], base[:1].expand(5)],
        "parameter": torch.nn.Parameter(torch.ones(3), requires_grad=False),
    }  # fmt: skip
    data = _saved(values)
    ours, theirs = _loaded(data), torch.load(io.BytesIO(data), weights_only=True)
    _equal(ours, theirs)
    views = ours["views"]
    assert views[0].untyped_storage().data_ptr() == views[2].untyped_storage().data_ptr(), "what was shared is shared"
    state = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)).state_dict()
    _equal(_loaded(_saved(state)), state)
    for dtype in (torch.float8_e5m2, torch.uint16, torch.uint64):
        one = _loaded(_saved(torch.zeros(3, dtype=dtype)))
        assert (one.dtype, one.shape) == (dtype, (3,))


def _equal(ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs), (ours, theirs)
    if isinstance(ours, torch.Tensor):
        assert (ours.dtype, ours.shape, ours.stride()) == (theirs.dtype, theirs.shape, theirs.stride())
        assert torch.equal(ours, theirs)
        assert ours.requires_grad == theirs.requires_grad
    elif isinstance(ours, dict):
        assert list(ours) == list(theirs)
        for key in ours:
            _equal(ours[key], theirs[key])
    elif isinstance(ours, list | tuple):
        assert len(ours) == len(theirs)
        for a, b in zip(ours, theirs, strict=True):
            _equal(a, b)
    else:
        assert ours == theirs


def _tensor_of(size: int) -> Callable[[str, bytes], bytes]:
    """The tensor of four elements is said to have more, the storage is not."""
    return lambda name, data: data.replace(b"K\x04\x85", b"M" + size.to_bytes(2, "little") + b"\x85") if name.endswith("data.pkl") else data  # fmt: skip


def _storage_of(size: int) -> Callable[[str, bytes], bytes]:
    return lambda name, data: data.replace(b"K\x04t", b"M" + size.to_bytes(2, "little") + b"t") if name.endswith("data.pkl") else data  # fmt: skip


def _same(name: str, data: bytes) -> bytes:
    return data


@pytest.mark.parametrize(
    ("what", "data"),
    [
        ("memory that nothing has written", lambda: _saved(Called(torch.Tensor, (1000,)))),
        ("a storage that nothing has written", lambda: _saved(Called(torch.UntypedStorage, (1000,)))),
        ("much memory for few bytes", lambda: _saved(Called(bytearray, (10**6,)))),
        ("a call", lambda: _saved(Called(os.mkdir, ("/tmp/never",)))),
        ("a function of torch", lambda: _saved(Called(torch.serialization._get_layout, ("torch.sparse_coo",)))),
        ("an instance", lambda: _saved(Called(metadata.StorageMeta, ()))),
        ("a tensor larger than its storage", lambda: _repacked(_saved(torch.arange(4.0)), _tensor_of(1000))),
        ("a storage larger than its record", lambda: _repacked(_saved(torch.arange(4.0)), _storage_of(1000))),
        ("compressed", lambda: _repacked(_saved(torch.zeros(2**20)), _same, compression=zipfile.ZIP_DEFLATED)),
        ("the old format", lambda: _old_format(torch.arange(4.0))),
        ("sparse", lambda: _saved(torch.eye(3).to_sparse())),
        ("cut off", lambda: _saved(torch.arange(4.0))[:-40]),
        ("nothing", lambda: b""),
        ("a pickle", lambda: pickle.dumps([1, 2])),
        ("text", lambda: b"PK\x05\x06" + bytes(18)),
    ],
)  # fmt: skip
def test_what_is_more_than_plain_data_is_refused(what: str, data: Callable[[], bytes]) -> None:
    with pytest.raises(UnreadableError):
        _loaded(data())
    assert not Path("/tmp/never").exists(), what


NUMBERS = b"](" + b"".join(b"M" + number.to_bytes(2, "little") for number in range(20_000)) + b"e"
TEXT = b"X" + (20_000).to_bytes(4, "little") + b"x" * 20_000


@pytest.mark.parametrize(
    ("noted", "again"),
    [
        (NUMBERS, b"cbuiltins\nset\nh\x01\x85R"),
        (NUMBERS, b"cbuiltins\nfrozenset\nh\x01\x85R"),
        (TEXT, b"c_codecs\nencode\nh\x01X\x06\x00\x00\x00latin1\x86R"),
    ],
)
def test_what_is_made_again_and_again_is_bounded_by_the_length(noted: bytes, again: bytes) -> None:
    program = b"\x80\x02](" + noted + b"q\x01" + again * 1000 + b"e."
    data = _repacked(_saved([1]), lambda name, data: program if name.endswith("data.pkl") else data)
    tracemalloc.start()
    with pytest.raises(UnreadableError, match="more than its length allows"):
        _loaded(data)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 150 * len(data), peak


@pytest.mark.parametrize("kind", ["numbers", "tuples", "a set of tuples", "complex numbers"])
def test_keys_whose_hashes_were_chosen_are_refused(kind: str) -> None:
    numbers = [number * (2**61 - 1) for number in range(1, 30_001)]  # all have the hash 0
    value: Any = {
        "numbers": dict.fromkeys(numbers[:3]),
        "tuples": {(number, 0): None for number in range(30_000)},
        "a set of tuples": {(number, 0) for number in range(30_000)},
        "complex numbers": {1 + 2j: None},
    }[kind]
    began = time.monotonic()
    with pytest.raises(UnreadableError):
        _loaded(_saved(value))
    assert time.monotonic() - began < 10


def test_many_tensors_and_deep_values_are_read() -> None:
    """The bounds are not in the way of what is large and honest."""
    deep: Any = []
    for _ in range(300):
        deep = [deep]
    value = {"scalars": [torch.tensor(float(i)) for i in range(300)], "sets": [{1}, {2}, frozenset()][:2], "deep": deep}
    loaded = _loaded(_saved(value))
    assert [each.item() for each in loaded["scalars"]] == list(range(300))
    assert loaded["deep"] == deep
    assert _loaded(_saved([[] for _ in range(3000)])) == [[]] * 3000
    assert _loaded(_saved([set(range(256)), set(range(256)), set("abc")])) == [set(range(256))] * 2 + [set("abc")]
    many = (
        torch.zeros(1)
        .expand(64, 64, 64, 64, 64)[:1, :1, :1, :1]
        .as_strided((1, 1, 1, 1, 1), (2**24, 2**18, 2**12, 2**6, 1))
    )
    assert _loaded(_saved(many)).stride() == many.stride(), "strides of a large tensor, which is not made here"
    assert _loaded(_saved([b"x" * 10] * 100)) == [b"x" * 10] * 100
    assert _loaded(_saved([bytes([i % 256]) * 3 for i in range(500)]))[7] == b"\x07" * 3


@pytest.mark.parametrize("name", [b"torch\nFloatStorage", b"torch._utils\n_rebuild_tensor_v2", b"torch\nSize"])
@pytest.mark.parametrize(
    ("before", "after"),
    [(b"c", b"\n"), (b"]c", b"\na"), (b"}K\x01c", b"\ns"), (b"c", b"\n\x85")],
    ids=["alone", "in-a-list", "in-a-dict", "in-a-tuple"],
)
def test_a_name_is_no_value(name: bytes, before: bytes, after: bytes) -> None:
    program = b"\x80\x02" + before + name + after + b"."
    data = _repacked(_saved([1]), lambda file, data: program if file.endswith("data.pkl") else data)
    with pytest.raises(UnreadableError):
        _loaded(data)


def _old_format(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, _use_new_zipfile_serialization=False)
    return buffer.getvalue()


def test_archives_that_were_changed_anywhere_raise_one_kind_of_error() -> None:
    original = _saved({"a": torch.arange(4.0), "b": [1, "x", {"c": (2, 3)}], "d": OrderedDict(e=torch.zeros(2))})
    seed = random.Random(19)
    outcomes = {True: 0, False: 0}
    for _ in range(3000):
        changed = bytearray(original)
        for _ in range(seed.choice((1, 1, 3))):
            at = seed.randrange(len(changed))
            if seed.random() < 0.7:
                changed[at] = seed.randrange(256)
            else:
                del changed[at : at + seed.randrange(1, 50)]
        try:
            _loaded(bytes(changed))
            outcomes[True] += 1
        except UnreadableError:
            outcomes[False] += 1
    assert min(outcomes.values()) > 100, outcomes


BAD_FILES: dict[str, Any] = {
    "no dict": [1],
    "no optimizer": {"model": {}},
    "a model that is a list": {"model": [], "optimizer": {"state": {}, "param_groups": []}},
    "numbers for names": {"model": {1: torch.zeros(2)}, "optimizer": {"state": {}, "param_groups": []}},
    "an optimizer that is a list": {"model": {}, "optimizer": []},
    "param groups of text": {"model": {}, "optimizer": {"state": {}, "param_groups": ["x"]}},
    "params that are text": {"model": {"a": torch.zeros(2)}, "optimizer": {"state": {}, "param_groups": [{"params": ["a"]}]}},
    "a parameter twice": {"model": {"a": torch.zeros(2)}, "optimizer": {"state": {}, "param_groups": [{"params": [0, 0]}]}},
    "a state of another": {"model": {"a": torch.zeros(2)}, "optimizer": {"state": {5: {}}, "param_groups": [{"params": [0]}]}},
    "a state of text": {"model": {"a": torch.zeros(2)}, "optimizer": {"state": {0: "x"}, "param_groups": [{"params": [0]}]}},
    "no tensor by that name": {"model": {"a": 3}, "optimizer": {"state": {}, "param_groups": [{"params": [0], "param_names": ["a"]}]}},
    "names that are none": {"model": {"a": torch.zeros(2)}, "optimizer": {"state": {}, "param_groups": [{"params": [0], "param_names": [[]]}]}},
    "too few names": {"model": {"a": torch.zeros(2)}, "optimizer": {"state": {}, "param_groups": [{"params": [0], "param_names": []}]}},
    "one number, many times": {"model": {"a": torch.zeros(1).expand(10**12)}, "optimizer": {"state": {}, "param_groups": [{"params": [0]}]}},
    "a state, many times": {"model": {"a": torch.zeros(2)}, "optimizer": {"state": {0: {"s": torch.zeros(1).expand(10**12)}}, "param_groups": [{"params": [0]}]}},
    "a step of text": {"model": {}, "optimizer": {"state": {}, "param_groups": []}, "step": "x"},
    "a negative step": {"model": {}, "optimizer": {"state": {}, "param_groups": []}, "step": -1},
    "an endless step": {"model": {}, "optimizer": {"state": {}, "param_groups": []}, "step": math.inf},
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_single_file_that_is_none_is_refused(tmp_path: Path, case: str) -> None:
    torch.save(BAD_FILES[case], tmp_path / "bad.pt")
    with pytest.raises(CheckpointError):
        convert.from_file(tmp_path / "bad.pt", tmp_path / "never")
    assert not (tmp_path / "never").exists()
