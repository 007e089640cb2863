"""What traces mean: their files, the verdict, one clock for all ranks, and pictures. No torch: they are read anywhere."""

from zerolap.observe.timeline.chrome import to_chrome
from zerolap.observe.timeline.clocks import Run, merge
from zerolap.observe.timeline.page import to_html
from zerolap.observe.timeline.record import Bucket, HostClock, RankTrace, Span, TraceError, read, write
from zerolap.observe.timeline.verdict import Exposure, Verdict, judge

__all__ = [
    "Bucket",
    "Exposure",
    "HostClock",
    "RankTrace",
    "Run",
    "Span",
    "TraceError",
    "Verdict",
    "judge",
    "merge",
    "read",
    "to_chrome",
    "to_html",
    "write",
]
