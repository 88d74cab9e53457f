#!/usr/bin/env bash
# Print the Python interpreter that runs titan_tree, and set up its environment first if needed.
#
#   scripts/setup.sh [EXTRA]                  EXTRA is test or dev, see pyproject.toml
#
# Set PYTHON=/path/to/python3 to start from another interpreter than python3.
set -euo pipefail
folder=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

base=${PYTHON:-python3}
found=$("$base" --version 2>&1) || found="no $base"
if ! "$base" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "error: expected Python 3.11 or later, found $found: install it, or set the environment variable PYTHON to its path" >&2
    exit 1
fi
exec "$base" "$folder/environment.py" "$@"
