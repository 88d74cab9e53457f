"""LoRA for whole models.

adapters.py         chooses weights, freezes the base, draws factors, and switches updates off
packed.py           projections that a model packs into one weight
peft.py             adapters in PEFT's format
"""
