"""Reinforcement learning on token trees: sample rollouts, reward them, train on their trees, repeat.

environment.py       what a task is: the protocols Environment and Episode, and Reply
desk.py              the bundled environment: two turns and a tool
sampler.py           what samples turns: the protocol Sampler, and Completion
cached_sampler.py    samples from the weights of a dense model that is trained
generate_sampler.py  samples from those of any other model, through transformers
server_sampler.py    samples from a server with OpenAI's API, such as vLLM or SGLang
rollouts.py          Rollout; Chat, which turns messages into tokens; and play, which samples rollouts
branching.py         rollouts that continue others, and the advantages of all rollouts of a task
trainer.py           RLTrainer and WarmStart, the loops
run.py               a whole run: the warm start, then RL
__main__.py          the command: python -m titan_tree.rl --config FILE.toml [key=value ...]
"""
