"""The pure part: when something happens, and who owns what. No tensors, no torch."""
