"""What the table of torch's private names says of each. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """How a name is used."""

    USED = "used"  # called or read, by the seam alone
    OVERRIDDEN = "defined by zerolap"  # torch calls or reads ours
    RECENT = "public, but not in all versions"  # the seam has something else where it is missing
    NOT_ALL = "not in all versions"  # used where it is there; the seam has something else where it is missing
    IN_FILES = "known by its spelling"  # torch writes it to files, which are read without importing it


@dataclass(frozen=True, slots=True)
class PrivateName:
    """A name of torch that no version of it promises to keep."""

    path: str
    why: str
    without: str
    kind: Kind = Kind.USED
    written_in: str | None = None  # torch's file that has it, where it is no attribute of what its path names

    @property
    def attribute(self) -> str:
        return self.path.rpartition(".")[2]
