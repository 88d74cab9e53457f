"""Mixture of experts (arXiv:1701.06538; Switch Transformer, arXiv:2101.03961) on token trees.

The router decides for each token independently, so every distinct token of a tree is routed once. No expert
ever drops a token. Only sums over tokens depend on the tree (``Routing``): there, a token counts once per
path through it.

    layer      MoE: router, routed experts and shared expert; ExpertInfo: all mixtures of a model
    experts    the routed experts' matrix products
    kernels    the router's logits, SwiGLU, copies of rows, sums of rows, and the choice of experts
    routing    Routing, and RouterLoss and RouterBias, which balance experts: [router_loss] and [router_bias]

N tokens, L layers with experts, k experts of a token, E experts, d hidden size, m intermediate size of an
expert.
"""
