"""The structures of token trees: paths, trees, layouts, partitions, batches. Knows no files and no processes."""
