"""tinker: trains and samples what clients of Tinker's API ask for. The API is titan_tree.serve.tinker.

forest.py   DataForest: the sequences of data as one tree, with any targets
losses.py   the losses that clients name
tenant.py   Tenant: one model with its optimizer, its files and its samplers
tenants.py  Tenants: the models that share one frozen base, each with its adapter or with all weights
"""
