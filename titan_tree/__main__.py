"""`python -m titan_tree COMMAND` does what `titan-tree COMMAND` does."""

import os.path
import sys

# Python puts the current directory first, where a stranger's data may lie beside modules. config/plugins.py
# adds it for modules that the user names.
if not sys.flags.safe_path and sys.path[0] != os.path.dirname(os.path.dirname(__file__)):
    del sys.path[0]

from titan_tree.cli import program

program()
