"""`python -m titan_tree VERB` does what `titan-tree VERB` does."""

import sys

from titan_tree.cli import main

sys.exit(main())
