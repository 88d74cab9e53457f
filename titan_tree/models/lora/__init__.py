"""LoRA for whole models.

adapters.py         chooses weights, freezes the base, draws factors, and switches updates off
fused_experts.py    updates of the routed experts of transformers
peft.py             adapters in PEFT's format
"""
