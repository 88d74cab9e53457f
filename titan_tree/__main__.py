"""`python -m titan_tree COMMAND` does what `titan-tree COMMAND` does."""

import sys
from pathlib import Path

# Python puts the current directory first, where a stranger's data may lie beside modules. config/plugins.py
# adds it for modules that the user names.
if not sys.flags.safe_path and Path(sys.path[0]) != Path(__file__).parents[1]:
    del sys.path[0]

from titan_tree.cli import program

program()
