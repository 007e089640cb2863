#!/usr/bin/env bash
# Several nodes under Slurm: one torchrun per node, which starts one rank per device. Submit it with
#
#     sbatch --nodes 4 examples/launch/slurm.sh /shared/run
#
# The folder must be on a file system that all nodes share. A job that is preempted or requeued continues from its last checkpoint.
#SBATCH --job-name=zerolap
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
# Devices: --gpus-per-node=8, or whatever your site calls them; and as many ranks:
set -euo pipefail

FOLDER=${1:?give the folder for checkpoints, shared by all nodes}
RANKS_PER_NODE=${RANKS_PER_NODE:-2}
PROGRAM=${PROGRAM:-examples/elastic.py}

# The first node hosts the rendezvous; the port is specific to the job, so that two jobs can share a node.
HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
PORT=$((20000 + SLURM_JOB_ID % 10000))

# Ranks of a restart must not find the addresses of those that were lost (docs/elastic.md).
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# CPU threads of a rank; torchrun sets 1 by default.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((SLURM_CPUS_PER_TASK / RANKS_PER_NODE))}
# Where nodes have several networks, name the interface that connects them, or ranks wait for each other on the wrong one:
# export GLOO_SOCKET_IFNAME=ib0 NCCL_SOCKET_IFNAME=ib0

mkdir -p "$FOLDER"
srun --kill-on-bad-exit=1 torchrun \
    --nnodes "$SLURM_JOB_NUM_NODES" \
    --nproc-per-node "$RANKS_PER_NODE" \
    --max-restarts 3 \
    --rdzv-backend c10d \
    --rdzv-endpoint "$HEAD:$PORT" \
    --rdzv-id "$SLURM_JOB_ID" \
    "$PROGRAM" --folder "$FOLDER" "${@:2}"
