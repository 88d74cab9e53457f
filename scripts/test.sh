#!/usr/bin/env bash
# Run the tests: ./scripts/test.sh [pytest arguments]. Sets up the environment first, as train.sh does.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

python=$("$root/scripts/setup.sh" test)
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}

cd "$root"
export OMP_NUM_THREADS=1  # the two workers share the machine
exec "$python" -m pytest -n 2 "$@"
