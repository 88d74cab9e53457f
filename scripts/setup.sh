#!/usr/bin/env bash
# Print the Python interpreter to run titan_tree with, after setting it up if need be: scripts/setup.sh [EXTRA]
# EXTRA is test or dev, see pyproject.toml. PYTHON=/path/to/python3 chooses what to start from.
set -euo pipefail
folder=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

base=${PYTHON:-python3}
found=$("$base" --version 2>&1) || found="no $base"
if ! "$base" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "error: expected Python 3.11 or later, found $found: install one, or name it in the environment variable PYTHON" >&2
    exit 1
fi
exec "$base" "$folder/environment.py" "$@"
