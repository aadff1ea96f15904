#!/bin/bash
# Runs generate.py on a Ray cluster of all nodes of a Slurm job:
#
#     sbatch --nodes 2 examples/multi_node/slurm.sh [MODEL] --data-parallel-size 2
#
# Every node runs the same `moeserve launch`. It waits until all have come, so nothing here sleeps, and no order of starting
# matters. Needed under the same paths on every node: this checkout with its .venv, and the model.
#SBATCH --job-name=moeserve
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --exclusive
#SBATCH --time=01:00:00

set -euo pipefail
cd "$SLURM_SUBMIT_DIR"

# The first node, by a name or an address that means the same on all of them. Where the first node takes its own name for
# 127.0.1.1 (/etc/hosts), give its address: sbatch --export=ALL,HEAD=10.0.0.1 ...
HEAD=${HEAD:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)}

# Another port for each job, so that two jobs on a node do not meet.
PORT=$((20000 + SLURM_JOB_ID % 10000))

# The secret of this job: without one, whoever reaches the nodes could run programs there. srun hands it on.
export RAY_AUTH_MODE=token
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
export RAY_AUTH_TOKEN

# A node that fails ends the job, with its name and the reason in the job's output.
srun --ntasks-per-node=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 \
    .venv/bin/moeserve launch --head "$HEAD" --port "$PORT" --nodes "$SLURM_NNODES" --timeout 300 -- \
    .venv/bin/python examples/multi_node/generate.py "$@"
