"""Readers -> paths -> TokenTree -> TreeBatch. Knows files and NumPy; never torch.distributed."""
