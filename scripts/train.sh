#!/usr/bin/env bash
# Train a model. The first run sets up the Python environment (scripts/setup.sh).
#
#   ./scripts/train.sh                            the demo (scripts/first_run.py): about a minute on a CPU
#   ./scripts/train.sh CONFIG [key=value ...]     titan-tree train CONFIG, on all GPUs of this machine or on the CPU
#
# For several machines, start torchrun on each of them; see docs/parallelism.md.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

python=$("$root/scripts/setup.sh")
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}

if (($# == 0)); then
    exec "$python" "$root/scripts/first_run.py"
fi
processes=1
if [[ $1 != -h && $1 != --help ]]; then
    processes=$("$python" -c 'import torch; print(max(1, torch.cuda.device_count()))')
fi
exec "$python" -m titan_tree train --nproc "$processes" "$@"
