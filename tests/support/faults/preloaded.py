"""What ranks need, imported once, by the fork server. Starts no threads."""

import torch.distributed.checkpoint
import torch.distributed.optim
import torch.nn.parallel  # noqa: F401

import support.faults.adapters  # noqa: F401
import zerolap  # noqa: F401
from zerolap._torch import COMPILER_MODULES
from zerolap_conformance.requirements import all_requirements

for name in COMPILER_MODULES:
    __import__(name)
all_requirements()
