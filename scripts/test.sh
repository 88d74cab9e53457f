#!/usr/bin/env bash
# Run the tests. The first run sets up the Python environment (scripts/setup.sh).
#
#   ./scripts/test.sh [pytest arguments]
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

python=$("$root/scripts/setup.sh" test)
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}

cd "$root"
export OMP_NUM_THREADS=1  # two workers with one thread each
exec "$python" -m pytest -n 2 --dist loadgroup "$@"
