"""Faults as a product: broken adapters that are drawn, not listed. A fault is a verb of an adapter, conditions, and an effect."""
