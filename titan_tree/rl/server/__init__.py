"""Sampling from a server of vLLM or SGLang, and the weights that it gets.

server_sampler.py  ServerSampler, and how the table [rl.server] becomes one
engines.py         VLLM and SGLang: requests that sample, and commands that change weights
answers.py         reads the answers of requests that sample
broadcast.py       sends weights over a process group
client.py          ServerClient: HTTP requests, and when they are sent again
"""
