"""zerolap in the frameworks people train with: one module for each, which is imported when it is asked for.

Public is what the modules ``lightning``, ``pytorch_lightning``, ``accelerate`` and ``transformers`` list.
"""
