#!/usr/bin/env bash
# Run the everyday tests, and those of trainers of transformers, TRL and Lightning, on the oldest or on the newest
# versions that pyproject.toml allows, in build/oldest or build/newest. Needs uv (pip install uv) and gcc.
#
#   scripts/versions.sh oldest [ARGUMENTS]    Python 3.11, the lower bounds; other tests, as arguments of pytest
#   scripts/versions.sh newest [ARGUMENTS]    Python 3.14, the newest releases
#
# PYTHON names another Python. uv takes torch from PyPI, with CUDA; UV_TORCH_BACKEND=cpu takes the build for CPUs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

case ${1:-} in
    oldest) python=${PYTHON:-3.11} resolution=lowest-direct ;;
    newest) python=${PYTHON:-3.14} resolution=highest ;;
    *) echo "usage: scripts/versions.sh oldest|newest [ARGUMENTS]" >&2; exit 2 ;;
esac
venv=build/$1
shift
uv venv --quiet --allow-existing --python "$python" "$venv"
uv pip install --quiet --python "$venv/bin/python" --upgrade --resolution "$resolution" ".[test]"
uv pip list --quiet --python "$venv/bin/python" | grep -E "^(torch|triton|transformers|lightning|peft|trl) "
export OMP_NUM_THREADS=1 PYTHONPATH=$PWD
pytest=("$venv/bin/python" -m pytest -n 2 --dist loadgroup)
"${pytest[@]}" "$@"
[ $# != 0 ] || exec "${pytest[@]}" -m slow tests/integrations
