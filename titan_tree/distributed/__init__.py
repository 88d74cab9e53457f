"""Everything that depends on the number of ranks, and the only importers of torchtitan and torchao."""
