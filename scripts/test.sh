#!/usr/bin/env bash
# Run the everyday tests, in less than five minutes on two cores. The first run sets up the Python environment
# (scripts/setup.sh).
#
#   ./scripts/test.sh                         the everyday suite
#   ./scripts/test.sh --all                   everything that CI runs
#   ./scripts/test.sh tests/tree -k mask      any arguments of pytest; a file that is named runs whole
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

python=$("$root/scripts/setup.sh" test)
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}

cd "$root"
export OMP_NUM_THREADS=1  # two workers with one thread each
unset PYTHONDONTWRITEBYTECODE  # every process would compile the package again
exec "$python" -m pytest -n 2 --dist loadgroup "$@"
