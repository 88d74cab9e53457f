"""FSDP2, activation checkpointing, compilation; and the one file that imports torchtitan."""
