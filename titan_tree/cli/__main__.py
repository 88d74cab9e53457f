"""`python -m titan_tree.cli COMMAND` does what `titan-tree COMMAND` does."""

import sys

from titan_tree.cli import main

sys.exit(main())
