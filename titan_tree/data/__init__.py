"""Data files -> groups of samples -> token trees -> micro-batches, one list per optimizer step.

readers/          one file per data format: file -> records
groups.py         the record schema: records -> groups -> samples
sample_reader.py  samples -> TokenPaths, by way of the tokenizer
advantages.py     rewards of a group -> advantages
turns.py          the turns of a group, as nodes of a tree
packing.py        shuffles groups, merges paths into trees, packs trees into micro-batches
tree_costs.py     how long a tree takes to train, from its sizes
balance.py        which rank trains on which tree
sharing.py        ranks read different groups and send each tree to its owner
tree_bytes.py     a tree as bytes, in token stores and between ranks
dataset.py        TreeDataset: the endless, resumable stream of all of the above
scored_records.py   paths -> records of token ids, for `titan-tree score`
resumable_file.py   a file that is written in rounds, and survives a kill
demo.py           the embedded sample
report.py         where and why the paths of a tree diverge, for `titan-tree inspect --report`

This package works with files and NumPy. It imports neither torch nor omegaconf.
"""
