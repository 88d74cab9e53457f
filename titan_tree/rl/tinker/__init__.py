"""tinker: trains and samples what clients of Tinker's API ask for. The API is titan_tree.serve.tinker.

forest.py   DataForest: the sequences of data as one tree, with any targets
losses.py   the losses that clients name
tenants.py  Tenants: models that share one frozen base, each with its adapter or with all weights
"""
