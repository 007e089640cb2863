"""The examples that need no third-party library: in a loop of one's own, compiled, in a vendor's stack; and the launch files."""

from __future__ import annotations

import copy
import importlib.metadata
import logging
import math
import os
import re
import runpy
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from torch.distributed.run import get_args_parser
from torch.nn.parallel import DistributedDataParallel as DDP

from support import ROOT
from support.integration_ranks import check, run_example
from support.ranks import on_ranks
from support.training import Mlp, assert_same_params, batches
from zerolap import checkpoint

LAUNCH = ROOT / "examples/launch"
STEPS = 20


@pytest.mark.parametrize("example", ["with_torchrun", "with_compile"])
def test_a_loop_of_ones_own_trains_as_with_the_plain_optimizer(example: str, tmp_path: Path) -> None:
    kinds = ("example", "plain", "sharded", "unattached")
    (ours, plain, sharded, unattached), said = run_example(example, tmp_path, [(kind, {}, []) for kind in kinds])
    assert f"attached: True, {STEPS} updates; optimizer state: {ours[0].state_bytes} bytes per rank" in said
    check(ours, plain, num_updates=STEPS)
    # The right numbers and half of the state are not enough: the updates must be those of the hook.
    with pytest.raises(AssertionError, match="zerolap's hook is not attached"):
        check(sharded, plain, num_updates=STEPS)
    with pytest.raises(AssertionError, match="no hook was made for this optimizer"):
        check(unattached, plain, num_updates=STEPS)


def test_examples_are_short_and_the_docs_show_all_of_them() -> None:
    shown = [
        path for page in (ROOT / "docs").glob("*.md") for path in re.findall(r'--8<-- "([^":]+)', page.read_text())
    ]
    assert not [path for path in shown if not (ROOT / path).exists()]
    for example in (ROOT / "examples/integrations").glob("*.py"):
        assert str(example.relative_to(ROOT)) in shown
        assert len(example.read_text().splitlines()) < 60, example
    assert {"examples/embedding.py", "examples/launch/slurm.sh", "examples/launch/pytorchjob.yaml"} <= {*shown}


# --- embedding ---------------------------------------------------------------------------------------------------------


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@on_ranks(2)
def test_a_vendor_embeds_zerolap_with_an_adapter_group_and_log_of_its_own() -> None:
    def refuse(**_: Any) -> Any:
        raise AssertionError("entry points were looked up")

    importlib.metadata.entry_points = refuse
    example = runpy.run_path(str(ROOT / "examples/embedding.py"))
    group = dist.new_group()
    log, kept = logging.getLogger("acme.test"), _Kept()
    log.addHandler(kept)
    log.setLevel(logging.INFO)

    torch.manual_seed(0)
    model = Mlp()
    oracle = DDP(copy.deepcopy(model))
    plain = example["AcmeSgd"](oracle.parameters(), lr=0.05, momentum=0.9)
    trainer = example["AcmeTrainer"](model, group=group, log=log)
    another = example["AcmeTrainer"](Mlp(), group=dist.new_group(), log=log)
    for x in batches(6):
        y = x[:, :3]
        trainer.step(x, y)
        another.step(x, y)
        plain.zero_grad()
        torch.nn.functional.mse_loss(oracle(x), y).backward()
        norm = torch.nn.utils.clip_grad_norm_(oracle.parameters(), 1.0)
        assert norm < 1.0, "or else the numbers are not bitwise those of torch's clipping"
        plain.step()
    assert_same_params(model, oracle.module)

    before = copy.deepcopy(model)
    with pytest.raises(example["AcmeError"], match="gradients are not finite"):
        trainer.step(x * (math.inf if dist.get_rank() == 0 else 1.0), y)
    assert_same_params(model, before, "after an update that was refused")

    assert another.close().num_updates == 6
    stats = trainer.close()
    assert stats.num_updates == 6
    assert trainer.num_bytes > 0
    whole = sum(p.nbytes for p in model.parameters())
    assert 0.3 < stats.state_bytes / whole < 0.7
    assert any("is not known to treat every element by itself" in message for message in kept.messages), kept.messages
    assert "6 updates" in kept.messages[-1]
    strangers = {"zerolap.cli", "zerolap_cpu_gloo", "typer", "rich"} & sys.modules.keys()
    assert not strangers, strangers


# --- launch files ------------------------------------------------------------------------------------------------------


def test_the_slurm_script_trains(tmp_path: Path) -> None:
    """Slurm itself is stood in for: a job of one node, this machine. What the script makes of it is run as it is."""
    script = LAUNCH / "slurm.sh"
    subprocess.run(["bash", "-n", script], check=True)
    commands = {
        "scontrol": 'test "$*" = "show hostnames localhost" && echo localhost',
        "srun": 'while [[ "$1" == --* ]]; do shift; done; exec "$@"',
    }
    for name, body in commands.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    for port in range(20000, 30000):
        with socket.socket() as probe:
            if probe.connect_ex(("localhost", port)) != 0:
                break
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]]),
        "SLURM_JOB_ID": str(port - 20000),
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_CPUS_PER_TASK": "2",
    }
    environment.pop("OMP_NUM_THREADS", None)
    folder = tmp_path / "run"
    command = [script, folder, "--steps", "4", "--save-every", "2"]
    job = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    assert job.returncode == 0, job.stderr[-4000:]
    assert "2 ranks, after step 0" in job.stdout
    assert checkpoint.steps(folder) == [2, 4]


def test_the_slurm_script_asks_for_what_it_uses() -> None:
    text = (LAUNCH / "slurm.sh").read_text()
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(.+)$", text, re.MULTILINE))
    assert asked["ntasks-per-node"] == "1", "torchrun starts the ranks of a node"
    assert int(asked["nodes"]) > 1
    assert {"cpus-per-task", "time", "job-name"} <= asked.keys()
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", LAUNCH / "slurm.sh"], check=True)


def test_the_pytorchjob_has_what_the_operator_and_torchrun_need(monkeypatch: pytest.MonkeyPatch) -> None:
    job = yaml.safe_load((LAUNCH / "pytorchjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", job["metadata"]["name"])
    policy, replicas = job["spec"]["elasticPolicy"], job["spec"]["pytorchReplicaSpecs"]
    assert replicas.keys() == {"Worker"}, "an elastic job has no master"
    worker = replicas["Worker"]
    assert policy["minReplicas"] <= worker["replicas"] <= policy["maxReplicas"]
    assert worker["replicas"] > 1
    assert worker["restartPolicy"] in ("OnFailure", "Always", "ExitCode", "Never")
    pod = worker["template"]["spec"]
    (container,) = pod["containers"]
    assert container["name"] == "pytorch", "the name by which the operator finds the container"
    assert container["image"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert all(isinstance(variable["value"], str) for variable in container["env"])

    # As torchrun reads it, with what the operator adds to the environment.
    added = {"RDZV_BACKEND": policy["rdzvBackend"], "RDZV_ENDPOINT": "zerolap-worker-0:23456", "NNODES": "1:4"}
    for name, value in {**added, "MAX_RESTARTS": str(policy["maxRestarts"])}.items():
        monkeypatch.setenv(f"PET_{name}", value)
    torchrun, *options = container["command"]
    given = get_args_parser().parse_args(options)
    assert torchrun == "torchrun"
    assert (given.rdzv_backend, given.rdzv_endpoint, given.nnodes) == ("c10d", "zerolap-worker-0:23456", "1:4")
    assert int(given.max_restarts) == policy["maxRestarts"]
    assert int(given.nproc_per_node) >= 1
    program = (ROOT / given.training_script).read_text()
    flags = dict(argument.split("=") for argument in given.training_script_args)
    assert all(f'add_argument("{flag}"' in program for flag in flags)
    (mount,) = (mount for mount in container["volumeMounts"] if mount["name"] == "checkpoints")
    assert Path(flags["--folder"]).is_relative_to(mount["mountPath"]), "checkpoints outlive the pods"
