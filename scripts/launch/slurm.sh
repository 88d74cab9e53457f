#!/usr/bin/env bash
# Train on several machines with Slurm (docs/parallelism.md). Submit it in a folder that all machines share and that
# contains the repository's .venv:
#
#   sbatch scripts/launch/slurm.sh train_configs/qwen3_8b.toml model.hf_path=DIR data.files=FILE
#
#SBATCH --job-name=titan_tree
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail
config=$1
shift

# shellcheck disable=SC1091  # the virtual environment
source .venv/bin/activate
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # a machine can rejoin only with a new store
export TORCHELASTIC_SHUTDOWN_TIMEOUT=100     # seconds for the last step and its checkpoint; torch 2.11 waits for 30
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
port=$((20000 + SLURM_JOB_ID % 10000))  # two jobs may share a machine

exec srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 \
    torchrun --nnodes="$SLURM_NNODES" --nproc-per-node="$SLURM_GPUS_ON_NODE" --max-restarts=3 \
    --rdzv-backend=c10d --rdzv-endpoint="$first:$port" --rdzv-id="$SLURM_JOB_ID" \
    --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGUSR1 \
    -m titan_tree train "$config" "$@"
