"""A forecast's numbers, measured on a real model, optimizer and ranks."""
