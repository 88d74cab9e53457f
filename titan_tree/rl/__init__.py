"""Reinforcement learning on token trees: sample rollouts, reward them, train on their trees, repeat.

environment.py       what a task is: the protocols Environment and Episode, and Reply
desk.py              a bundled environment: two turns and a tool, for a tiny model
search.py            a bundled environment: questions that need several searches
sampler.py           what samples turns: the protocol Sampler, and Completion
cached_sampler.py    samples from the weights of a dense model that is trained
context_cache.py     its keys and values, shared by rows with an equal context
graphs.py            its CUDA graphs
generate_sampler.py  samples from those of any other model, through transformers
server_sampler.py    samples from a server, such as vLLM or SGLang
server.py            sends requests to it
server_answers.py    reads its answers
engines.py           its commands that change weights
weight_push.py       sends it the trained weights: from a folder, or as an adapter
broadcast.py         ... or over a process group with SGLang
vllm_transfer.py     ... or over vLLM's own group
served.py            from the table [rl.server] to a ServerSampler
background.py        functions in daemon threads
ahead.py             samples from a server one step ahead of training
rollouts.py          Rollout; Chat, which turns messages into tokens; and play, which samples rollouts
branching.py         rollouts that continue others
reference.py         the fixed policy that a loss compares the trained one with
checks.py            what must hold before a run starts
trainer.py           RLTrainer, the loop
warm_start.py        WarmStart, which trains on demonstrations before it
run.py               a whole run: the warm start, then RL
__main__.py          the command: python -m titan_tree.rl --config FILE.toml [key=value ...]
"""
