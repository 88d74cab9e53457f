import sys

from titan_tree.cli import main

sys.exit(main())
