"""Balance: which rank trains on which tree, so that no rank waits long for the others.

assignment.py     trees -> ranks and micro-batches of even cost
splitting.py      divides trees that are too large for an even assignment into pieces
sharing.py        BalancedSharing: ranks read different groups and send each tree to its owner
data_group.py     the processes that make the same steps on all ranks
balancing.py      Balancing: the costs of a run, first estimated and then fitted to measured work
"""
