"""`python -m titan_tree COMMAND` does what `titan-tree COMMAND` does."""

from titan_tree.cli import program

program()
