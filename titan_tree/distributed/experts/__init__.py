"""Expert parallelism: ranks hold different experts and exchange tokens.

exchange.py           sends copies of tokens to the ranks of their experts, and back
sharded_experts.py    the experts of a rank; overlaps the exchange with the computation
expert_parallel.py    shards the experts of a model
"""
