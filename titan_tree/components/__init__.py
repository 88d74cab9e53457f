"""Tokenizer, partitioner, attention, Gated DeltaNet, experts, log-probs, losses: each importable alone."""
