"""Token trees as data structures. Nothing here reads files or talks to other processes.

In reading order:

paths.py           TokenPath: one training sample
path_fields.py     the fields of a TokenPath as checked arrays, its SamplingMask and its TokenTargets
images.py          Image: pixels in place of tokens, their image rows in trees and their positions
context.py         Context and Completion: what a model reads and writes while it samples
token_tree.py      TokenTree: paths merged by shared prefixes, every distinct token once
routed_experts.py  the experts that sampling recorded, merged like the tokens
pairs.py           PathPairs: the (edge, path) pairs on which losses run
partition.py       Partition, PartitionPlan: a tree cut into parts, each run in one forward pass
gateway.py         the rows of the gateway cache that each partition reads and writes
chunks.py          runs of up to 64 tokens that a recurrent layer processes at once; Chains orders them
layout.py          TreeLayout: the metadata that attention and recurrent layers read
batch.py           TreeBatch: the tensors of one forward pass; TokenShard: those of one rank
costs.py           ModelCosts, TreeCosts: operations, bytes and seconds of trees
"""
