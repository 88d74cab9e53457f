#!/usr/bin/env bash
# Train a model. The first run sets up the Python environment (scripts/setup.sh).
#
#   ./scripts/train.sh                            the demo: a tiny model on the bundled sample; about a minute on a CPU
#   ./scripts/train.sh CONFIG [key=value ...]     your configuration, on all GPUs of this machine or on the CPU
#
# For several machines, start torchrun on each of them; see docs/parallelism.md.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

python=$("$root/scripts/setup.sh")
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}

if (($# == 0)); then
    exec "$python" -m titan_tree.train --config "$root/train_configs/demo.toml"
fi
config=$1
shift
gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
if ((gpus > 1)); then
    # This is torchrun, started with the interpreter chosen above.
    exec "$python" -m torch.distributed.run --standalone --nproc-per-node "$gpus" \
        -m titan_tree.train --config "$config" "$@"
fi
exec "$python" -m titan_tree.train --config "$config" "$@"
