"""LoRA for whole models.

adapters.py         chooses weights, freezes the base, draws factors, and switches updates off
peft.py             adapters in PEFT's format
"""
