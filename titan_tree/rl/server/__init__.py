"""Sampling from a server of vLLM or SGLang, and the weights that it gets.

server_sampler.py  ServerSampler, and how the table [rl.server] becomes one
protocols.py       VLLM and SGLang: their requests, answers and commands
broadcast.py       sends weights over a process group
client.py          ServerClient: HTTP requests, and when they are sent again
"""
