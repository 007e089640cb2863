"""What zerolap says through ``logging``: nothing unless asked, and with the rank in every record."""

from __future__ import annotations

import logging
import os
import sys

from zerolap._public import public

FORMAT = "%(asctime)s %(levelname)s rank %(rank)s %(name)s: %(message)s"

logging.getLogger("zerolap").addHandler(logging.NullHandler())


class _WithRank(logging.Filter):
    """Puts ``rank`` into every record of a logger; "?" before there is one."""

    def filter(self, record: logging.LogRecord) -> bool:
        dist = sys.modules.get("torch.distributed")  # whoever has a rank has imported it; others need no torch
        if dist is not None and dist.is_available() and dist.is_initialized():
            record.rank = dist.get_rank()
        else:
            record.rank = os.environ.get("RANK", "?")
        return True


def logger_of(name: str) -> logging.Logger:
    """The logger of one of zerolap's modules. Its records have a rank, whatever handler gets them."""
    logger = logging.getLogger(name)
    if not any(isinstance(each, _WithRank) for each in logger.filters):
        logger.addFilter(_WithRank())
    return logger


@public
def log_to_stderr(level: int | str = "INFO", *, ranks: tuple[int, ...] | None = None) -> logging.Handler:
    """Print zerolap's log records to stderr. Returns the handler, for ``removeHandler``.

    Args:
        level: The least level that is printed, as ``logging`` takes it.
        ranks: Only of these ranks. Default: of all.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(FORMAT))
    if ranks is not None:
        handler.addFilter(lambda record: getattr(record, "rank", None) in ranks)
    logger = logging.getLogger("zerolap")
    logger.addHandler(handler)
    logger.setLevel(level)
    return handler
