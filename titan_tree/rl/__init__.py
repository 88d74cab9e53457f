"""Reinforcement learning on token trees: sample rollouts, reward them, train on their trees, repeat.

settings.py          the tables [rl], [rl.server], [rl.teacher], [rl.agent], [serve] and [warm_start]
environment.py       what a task is: the protocols Environment and Episode, Reply, and the environment Desk
agents.py            programs that play rollouts: the environment of a file of tasks, and play_agents
search.py            a bundled environment: questions that need several searches
model_recorder.py    answers requests of agents with sampled turns, and keeps their sessions
serving.py           titan-tree serve
tinker/              the models of clients of Tinker's API
sampler.py           the protocols Sampler and RemoteSampler
truncation.py        top-p, top-k and min-p sampling, and the ids that it kept
cached_sampler.py    samples from the weights of a dense model that is trained
tree_cache.py        its keys and values, one for each distinct token of the contexts
generate_sampler.py  samples from the weights of any other model, through transformers
server/              samples from a server of vLLM, and gives it the trained weights
rollouts.py          Rollout; Chat, which turns messages into tokens; play, which samples rollouts
reference_policy.py  the fixed policy with which a loss compares the trained one
teachers.py          models whose likeliest tokens a loss compares with those of the trained one
episode_trainer.py   EpisodeTrainer, whose samples come from an environment
trainer.py           RLTrainer, which trains on its rollouts, and the checks of its settings
run.py               a whole run: the warm start, then RL
"""
