"""What goes over the wire in fewer bits than it is kept in, and how many bytes that takes. No tensors, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal

from zerolap._public import public

BLOCK = 128  # elements that share a scale; measured in docs/wire.md
_ALIGNMENT = 16  # bytes: where the next rank's message begins, its scales must be readable in place


def in_blocks(numel: int) -> int:
    """What so many elements of a parameter take in whole blocks."""
    return -(-numel // BLOCK) * BLOCK


FormatName = Literal["int8", "fp8", "bf16"]


class WireFormat(Enum):
    """How numbers are sent."""

    INT8 = "int8"  # a byte each, and a scale for every block
    FP8 = "fp8"  # a byte each, with 3 bits of mantissa, and a scale for every block
    BF16 = "bf16"  # as they are, with 8 bits of mantissa

    @property
    def has_scales(self) -> bool:
        return self is not WireFormat.BF16

    @property
    def itemsize(self) -> int:
        """Bytes for each element, scales aside."""
        return 1 if self.has_scales else 2

    def num_scales(self, numel: int) -> int:
        return -(-numel // BLOCK) if self.has_scales else 0

    def num_bytes(self, numel: int, *, scale_itemsize: int = 4) -> int:
        """What a message of so many elements takes."""
        taken = self.num_scales(numel) * scale_itemsize + numel * self.itemsize
        return -(-taken // _ALIGNMENT) * _ALIGNMENT


@public
@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """What ``attach(..., wire=...)`` sends in fewer bits, by direction. ``wire="int8"`` is ``Wire(gradients="int8", parameters="int8")``.

    Gradients: each rank rounds what it sends to the owner of a part once, and the owner sums in single precision. Parameters: owners keep exact
    values in their shards and send the difference from what all ranks have; what was rounded off goes with the next one.
    """

    gradients: FormatName | None = None
    """The format of gradients; None for exact."""

    parameters: FormatName | None = None
    """The format of parameters' differences; None for exact."""

    gradient_feedback: bool = False
    """Add what was rounded off gradients to those of the next step. Takes the memory of all gradients in single precision on every rank."""

    seed: int | None = None
    """Round int8 up or down at random, by the part that is rounded off, from this seed on; None to round to the nearest."""

    def __post_init__(self) -> None:
        known = [each.value for each in WireFormat]
        for name in ("gradients", "parameters"):
            value = getattr(self, name)
            if value is not None and value not in known:
                raise ValueError(
                    f"wire: {name} must be one of {known}, or None to send them as they are, got {value!r}"
                )
        if type(self.gradient_feedback) is not bool:
            raise TypeError(f"wire: gradient_feedback must be True or False, got {self.gradient_feedback!r}")
        if self.gradient_feedback and self.gradients is None:
            raise ValueError(
                "wire: gradient_feedback=True is for gradients that are rounded; add gradients=, or leave it out"
            )
        if self.seed is None:
            return
        if type(self.seed) is not int or not 0 <= self.seed < 2**32:
            raise ValueError(f"wire: seed must be a whole number from 0 to 2**32 - 1, or None, got {self.seed!r}")
        if "int8" not in (self.gradients, self.parameters):
            raise ValueError("wire: seed is for rounding to int8; other formats round to the nearest")

    @classmethod
    def of(cls, given: object) -> Wire:
        """What was given to ``attach``."""
        if given is None:
            return cls()
        if isinstance(given, cls):
            return given
        known = [each.value for each in WireFormat]
        if not isinstance(given, str) or given not in known:
            raise ValueError(
                f"wire must be one of {known}, a zerolap.Wire, or None to send all as it is, got {given!r}"
            )
        name = WireFormat(given).value
        return cls(gradients=name, parameters=name)  # type: ignore[arg-type]  # one of the names

    @property
    def reduces_in(self) -> WireFormat | None:
        return None if self.gradients is None else WireFormat(self.gradients)

    @property
    def gathers_in(self) -> WireFormat | None:
        return None if self.parameters is None else WireFormat(self.parameters)

    @property
    def is_exact(self) -> bool:
        """Whether all is sent as it is."""
        return self.gradients is None and self.parameters is None

    @property
    def block(self) -> int:
        """Parameters begin, and are cut, at multiples of this many elements."""
        return 1 if self.is_exact else BLOCK

    def __str__(self) -> str:
        if self.is_exact:
            return "exact"
        both = f"gradients {self.gradients or 'exact'}, parameters {self.parameters or 'exact'}"
        feedback = ", feedback" if self.gradient_feedback else ""
        return both + feedback + ("" if self.seed is None else f", stochastic from {self.seed}")
