"""The errors zerolap raises when a contract is broken. A caller's mistake is a ValueError or LookupError instead."""

from zerolap._public import public


@public
class ZerolapError(RuntimeError):
    """Something that had to hold for training to go on does not hold."""


@public
class IllegalEventError(ZerolapError):
    """An event reached the overlap machine in a phase that has no row for it; nothing was changed."""


@public
class CollectiveError(ZerolapError):
    """A wait for other ranks failed or timed out; the message names rank, bucket and collective."""


@public
class AdapterNotFoundError(LookupError):
    """No installed adapter fits; the message says which are installed and what to install."""


def forked() -> ZerolapError:
    """For a child of the process that trains."""
    return ZerolapError(
        "this process was forked from the one that trains, and has no part in its collectives: parameters may be out of date here, and "
        "nothing can be updated. Start processes by spawn or forkserver, or call handle.finish() before the fork if they only read"
    )
