"""The suite a vendor runs: ``pytest --pyargs zerolap_conformance --zerolap-adapter NAME``."""

__version__ = "0.1.0"
