"""Tokenizer, partitioner, attention, recurrences, experts, log-probs, losses, LoRA and AdamW."""
