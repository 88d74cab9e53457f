"""Formats of other people's programs that run agents. They change often, and no common format needs them.

sessions.py     the events of a coding agent -> one record; claude_code.py, codex.py, pi.py and openhands.py
rollouts.py     rows of token ids from frameworks of reinforcement learning; verifiers.py
captures.py     model calls that proxies captured as token ids, and trials of Harbor
benchmarks.py   result files of tau-bench, tau2-bench and SWE-agent; atif.py reads trajectories of Harbor
"""
