#!/usr/bin/env bash
# Build the site of the documentation into build/site. A broken link or a warning is an error.
#
#   scripts/site.sh [ARGUMENTS]               arguments of mkdocs build, such as --site-dir DIR
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

python=$("$root/scripts/setup.sh" docs)
cd "$root"
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
export NO_MKDOCS_2_WARNING=1  # pyproject.toml requires mkdocs 1
exec "$python" -m mkdocs build --strict "$@"
