"""Sampling from a server of vLLM, and the weights that it gets.

server_sampler.py  ServerSampler, and how the table [rl.server] becomes one
vllm.py            VLLM: requests, answers and commands
client.py          ServerClient: HTTP requests, and when they are sent again
"""
