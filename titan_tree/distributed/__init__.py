"""Parallelism over ranks, and optimizers. Only files of this folder import torchtitan and torchao."""
