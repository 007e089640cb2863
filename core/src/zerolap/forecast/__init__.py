"""Time and memory of a run that was not made. Pure: no tensors, no torch."""
