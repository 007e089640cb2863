"""What tests share: models and programs to train, broken adapters, traces made by hand. No tests."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]  # of the project
# Of processes that import this package.
PYTHONPATH = os.pathsep.join(filter(None, (str(ROOT / "tests"), os.environ.get("PYTHONPATH"))))
