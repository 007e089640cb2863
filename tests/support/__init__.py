"""What tests share: models and programs to train, broken adapters, traces made by hand. No tests."""

from pathlib import Path

ROOT = Path(__file__).parents[2]  # of the project
