"""Forecasts of a run's time and memory before it is made. Pure: no tensors, no torch."""
