"""Models of the library transformers on token trees, without code for single families.

    support.py             which architectures are exact on trees, and why others are not
    attention_function.py  the attention function that transformers' layers call, and the cache of a partition
    rope.py                RoPE that is exact up to some length of the longest path
    mixers.py              recurrent layers and short convolutions, one function for each kind
    blocks.py              one layer as a function of its inputs
    transformers_model.py  TransformersModel, which takes the layers of a model
    in_place.py            InPlaceModel, which leaves a model as it is
    snapshot.py            snapshots
    generation.py          models whose ``generate`` samples from a trained model

The layers of transformers look up their attention function by name and pass it every keyword that they do
not know themselves (https://huggingface.co/docs/transformers/attention_interface). titan_tree registers
TreeAttention there, and gives layers the depth of each token in the tree as its position. Everything else in
a layer treats tokens one by one.
"""

from titan_tree.models.transformers.attention_function import TreeInputs
from titan_tree.models.transformers.transformers_model import TransformersModel

__all__ = ["TransformersModel", "TreeInputs"]
