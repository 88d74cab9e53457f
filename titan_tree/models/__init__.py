"""Models that run on token trees, and Hugging Face snapshots of them.

tree_model                  TreeModel: the contract of all models
settings                    the tables [model] and [lora]; the registry of families
decoder, decoder_config     the base class of titan_tree's own models, and of their sizes
block                       one layer: a mixer, and an MLP or a mixture of experts; Attention, a mixer
gated_delta_net             the other kind of mixer
layers                      norms, linears, the MLP and rotary embedding
weights                     shards of parameters, and random initial weights
qwen3, ...                  one file per family, listed in settings
plain                       a module of your own on trees
pretrained, hf              build, load and save models
transformers                models that run as transformers implements them
lora                        adapters
"""
