"""Sampling from a server of vLLM or SGLang, and the weights that it gets."""
