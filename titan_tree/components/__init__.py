"""TreeTokenizer, TreeAttention, TreeLoss, the log-prob head: each importable alone."""
