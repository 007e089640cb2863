"""The zerolap adapter for CPU tensors over Gloo. Public is ``CpuGlooAdapter``; what it does is in ``adapter``."""

from zerolap_cpu_gloo.adapter import CpuGlooAdapter

__all__ = ["CpuGlooAdapter"]

CpuGlooAdapter.__module__ = (
    __name__  # what users, tracebacks and pickles see: where it lives is nobody's business but ours
)
