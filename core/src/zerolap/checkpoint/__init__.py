"""Sharded checkpoints: saved atomically by all ranks, loaded by any number of them. Public is what is listed here."""

from typing import TYPE_CHECKING

from zerolap._public import lazily

if TYPE_CHECKING:
    from zerolap.checkpoint.folder import latest as latest
    from zerolap.checkpoint.folder import steps as steps
    from zerolap.checkpoint.load_sharded import Loaded as Loaded
    from zerolap.checkpoint.load_sharded import load as load
    from zerolap.checkpoint.reader import CheckpointError as CheckpointError
    from zerolap.checkpoint.save_sharded import async_save as async_save
    from zerolap.checkpoint.save_sharded import save as save
    from zerolap.checkpoint.writer import Saving as Saving

_HOMES = {
    "CheckpointError": "zerolap.checkpoint.reader",
    "Loaded": "zerolap.checkpoint.load_sharded",
    "Saving": "zerolap.checkpoint.writer",
    "async_save": "zerolap.checkpoint.save_sharded",
    "latest": "zerolap.checkpoint.folder",
    "load": "zerolap.checkpoint.load_sharded",
    "save": "zerolap.checkpoint.save_sharded",
    "steps": "zerolap.checkpoint.folder",
}

__all__ = [*_HOMES]

__getattr__ = lazily(__name__, _HOMES)
