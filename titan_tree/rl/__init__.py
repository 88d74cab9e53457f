"""Reinforcement learning on token trees: sample rollouts, reward them, train on their trees, repeat.

environment.py     what a task is: the protocols Environment and Episode, and Reply
desk.py            the bundled environment: two turns and a tool
sampler.py         what samples turns: the protocol Sampler, and Completion
cached_sampler.py  samples from the weights that are trained
server_sampler.py  samples from a server, such as vLLM or SGLang
server.py          sends requests to it
server_answers.py  reads its answers
engines.py         its commands that change weights
weight_push.py     sends it the trained weights: from a folder, or as an adapter
broadcast.py       ... or over a process group with SGLang
vllm_transfer.py   ... or over vLLM's own group
served.py          from the table [rl.server] to a ServerSampler
background.py      functions in daemon threads
ahead.py           samples from a server one step ahead of training
rollouts.py        Rollout; Chat, which turns messages into tokens; and play, which samples rollouts
branching.py       rollouts that continue others, and the advantages of all rollouts of a task
trainer.py         RLTrainer and WarmStart, the loops
run.py             a whole run: the warm start, then RL
__main__.py        the command: python -m titan_tree.rl --config FILE.toml [key=value ...]
"""
