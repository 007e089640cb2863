"""What the happens-before checker found, in words. The finding itself is in csrc/checker.cpp."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zerolap_sim._extension import _Side


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """One operator touching one tensor's bytes. ``stack`` is empty unless ``configure(stacks=True)``, innermost first."""

    op: str
    stream: str  # "default stream", "stream 3", "communication stream of group '0'", or "host"
    stream_id: int
    device: int
    is_write: bool
    shape: tuple[int, ...]
    dtype: str
    allocation: int
    allocation_bytes: int
    first_byte: int
    end_byte: int
    stack: tuple[str, ...]

    @classmethod
    def from_record(cls, record: _Side) -> Access:
        op, stream, stream_id, device, is_write, shape, dtype, allocation, num_bytes, first, end, stack = record
        return cls(
            op=op,
            stream=stream,
            stream_id=stream_id,
            device=device,
            is_write=is_write,
            shape=shape,
            dtype=dtype.lower(),
            allocation=allocation,
            allocation_bytes=num_bytes,
            first_byte=first,
            end_byte=end,
            stack=tuple(stack.splitlines()),
        )

    def __str__(self) -> str:
        place = "on the host" if self.stream == "host" else f"on {self.stream}"
        verb = "writes" if self.is_write else "reads"
        return (
            f"'{self.op}' {place}, which {verb} a {self.dtype} tensor of shape {list(self.shape)} "
            f"(bytes {self.first_byte} to {self.end_byte} of allocation {self.allocation}, {self.allocation_bytes} bytes)"
        )


_ADVICE = {
    "unordered access": "Let the second stream wait for the first before it touches the tensor: "
    "stream.wait_event(event), stream.wait_stream(other), or work.wait() under the second stream.",
    "memory reused while in use": "The first tensor was freed while its stream could still be at it, and the second may get "
    "its memory. Call tensor.record_stream(stream), or keep the tensor (and the work) until the stream that allocated it "
    "has waited.",
}
_HOST_ADVICE = (
    "The copy was non-blocking. Synchronize the host with it first: event.synchronize() or stream.synchronize()."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Two accesses that nothing orders. ``first`` was launched first; ``count`` is how often the like was seen."""

    kind: str
    first: Access
    second: Access
    count: int

    def __str__(self) -> str:
        times = f" Seen {self.count} times." if self.count > 1 else ""
        lines = [
            f"simulated device: {self.kind}: {self.second}, is not ordered after {self.first}. "
            f"{_ADVICE.get(self.kind, _HOST_ADVICE)}{times}"
        ]
        for title, access in (("first", self.first), ("second", self.second)):
            if access.stack:
                lines += [f"  {title} access, launched from:", *(f"    {frame}" for frame in access.stack)]
        return "\n".join(lines)
