"""Models written natively for trees, their registry, and Hugging Face snapshots in and out."""
