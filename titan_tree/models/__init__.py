"""Models that run on token trees, and Hugging Face snapshots of them.

decoder, decoder_config     the base class of all models, and of their sizes
block                       one layer: a mixer, and an MLP or a mixture of experts
attention, gated_delta_net  the two kinds of mixers
rope, layers                rotary embedding; norms, linears and the MLP
experts                     the interface to a model's experts for other packages
qwen3, ...                  one file per family, listed in titan_tree/registry.py
registry                    build_model: a family and a size by name
hf                          loads and saves snapshots
"""
