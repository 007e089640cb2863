"""Several optimizers on one DDP: their books as one, and which of them were told to step. Who owns what is decided elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from zerolap.errors import ZerolapError
from zerolap.runtime.param_groups import ParamGroup
from zerolap.runtime.shard_optimizer import LocalOptimizer, ShardBook
from zerolap.schedule.balance import Load
from zerolap.schedule.ownership import Piece


class Books:
    """The books of all optimizers that share one DDP, as one.

    Parameter *i* of optimizer *k* of *m* has the place *i m + k*: a param group that is added later changes no other's.
    """

    def __init__(self, books: Sequence[ShardBook]) -> None:
        self.books = books
        self.num_optimizers = len(books)
        self.rank, self.world_size = books[0].rank, books[0].world_size

    def number_of(self, place: int) -> int:
        """Which optimizer a parameter belongs to."""
        return place % self.num_optimizers

    def index_of(self, place: int) -> int:
        """Its index there."""
        return place // self.num_optimizers

    def load_of(self, place: int, param: Tensor) -> Load:
        """What it takes a rank to own a whole parameter."""
        return self.books[self.number_of(place)].load_of(param)

    def by_place(self) -> dict[int, Tensor]:
        """All parameters."""
        return {
            index * self.num_optimizers + number: param
            for number, book in enumerate(self.books)
            for index, param in enumerate(book.params)
        }

    @property
    def device(self) -> torch.device:
        return self.books[0].params[0].device

    @property
    def groups(self) -> list[ParamGroup]:
        return [group for book in self.books for group in book.groups]

    @property
    def locals(self) -> list[LocalOptimizer]:
        return [local for book in self.books for local in book.locals]

    def make_locals(
        self, tensors: Mapping[Piece, Tensor], *, params: Mapping[Piece, Tensor] | None = None
    ) -> dict[int, LocalOptimizer]:
        """For every optimizer that has some of these pieces one over them, which it knows by its own numbers."""
        made = {}
        for number, book in enumerate(self.books):
            mine = self._own_pieces(tensors, number)
            if mine:
                made[number] = book.make_local(
                    mine, params=None if params is None else self._own_pieces(params, number)
                )
        return made

    def _own_pieces(self, tensors: Mapping[Piece, Tensor], number: int) -> dict[Piece, Tensor]:
        return {
            piece._replace(param=self.index_of(piece.param)): tensor
            for piece, tensor in tensors.items()
            if self.number_of(piece.param) == number
        }


class StepCalls(dict[int, bool]):
    """Which optimizers were told to step since backward, by number, and whether their step is left out. Several on one DDP make their
    update together, when the last one is told."""

    def __init__(self, num_optimizers: int) -> None:
        super().__init__()
        self._num_optimizers = num_optimizers

    @property
    def are_all(self) -> bool:
        return len(self) == self._num_optimizers

    def next_left_out(self, nonfinite: set[int]) -> int | None:
        """One that will not be told, where all that are missing have gradients that are not finite; None if others are waited for."""
        missing = [number for number in range(self._num_optimizers) if number not in self]
        return missing[0] if self and missing and nonfinite.issuperset(missing) else None

    def take(self) -> list[bool]:
        """Which of all optimizers are left out; then none was told to step."""
        left_out = [self[number] for number in range(self._num_optimizers)]
        self.clear()
        return left_out

    def refuse_some(self) -> None:
        """ZerolapError that some optimizers were told to step after the last backward, and others were not."""
        missing = [number for number in range(self._num_optimizers) if number not in self]
        raise ZerolapError(
            f"after the last backward step() was called on optimizers {sorted(self)} of those that were attached together, and not "
            f"on {missing}: they update together. Call step() on all of them or on none"
        )
