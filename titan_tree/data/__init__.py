"""Data files -> groups of trajectories -> token trees -> micro-batches, one list per optimizer step.

settings.py       the tables [data], [partition] and [validation]; the registry of estimators
readers/          readers of data formats: file -> records
schema.py         the fields of a record, and their checks
data_files.py     the files of a run: records -> groups -> trajectories; weights, sizes, checksums
sample_reader.py  trajectories -> training samples (TokenPaths), by way of the tokenizer
images.py         images of samples, resized as a model reads them
turns.py          the turns of a group, as nodes of a tree
advantages.py     rewards of a group -> advantages
packing.py        shuffles groups, merges paths into trees, packs trees into micro-batches; finds lines that
                  share prefixes but have no group id
dataset.py        TreeDataset: the endless, resumable stream of all of the above
loader.py         StepLoader: makes the inputs of steps ahead of training, in worker processes that send bytes
tree_bytes.py     a tree as bytes, in token stores and between ranks
token_store.py    files of tokenized trees
divergence.py     where and why the paths of a tree diverge, for `titan-tree inspect --report`
show.py           a sample as text, with its trained tokens marked
demo.py           the bundled sample

This package works with files and NumPy. Only loader.py imports torch.
"""
