"""Benchmarks: `python -m benchmarks NAME` runs benchmarks/NAME.py, in a clone of the repository.

A benchmark measures one thing and has

    its docstring             what is measured and how, and the columns; the text of --help
    add_arguments(parser)     its command line
    run(args) -> rows         the measurement: an iterable of rows, which are written as they come
    KEYS, RATIOS              the columns that name a row, and those of --against, where larger is better
    QUICK                     the arguments of --quick, with which it runs on a CPU in seconds
    PACKAGES, COLUMNS, draw   optional: packages whose versions matter, the columns of the table, the picture
    MAY_BE_ZERO               optional: options for which 0 is a valid number

titan_tree/cli/bench runs it, and has the environment, tables and the guard. timers.py has timers and
contenders; steps.py the trainer's steps; trees.py trees of a given shape; layouts.py steps on trees beside
steps on rows without trees.
"""

BENCHES = {  # name -> summary; a module is imported only when it runs
    "por": "whole steps by overlap: trees of one size, from POR 0.2 to 0.92 (Tree Training, figure 8)",
    "ratio": "whole steps by the ratio of tokens to distinct tokens, from 1 to 150 (Prompt Trees)",
    "quality": "rewards of models that were trained on all paths, and on the longest path of each tree",
    "partition": "executed tokens, ERR and seconds of each strategy on real trees",
    "memory": "trees that are larger than memory, beside one path and one pass",
    "rl": "reinforcement learning: rewards, and the update on trees beside rows",
    "learning": "rewards of a real model that learns tasks of reasoning-gym, on trees and on rows",
    "images": "whole steps on trees with images, beside rows that encode each image again",
    "step": "whole steps on sequences and trees, beside a compiled transformers model",
    "attention": "TreeAttention's backends beside FlexAttention, cuDNN and FlashAttention-4",
    "recurrence": "TreeGDN, TreeKDA and TreeSSD beside flash-linear-attention",
    "experts": "a layer of experts beside transformers' and torchtitan's, and sharded over GPUs",
    "optimizer": "AdamW and 8-bit AdamW beside those of torch and torchao",
    "head": "the output projection with a teacher's likeliest tokens, beside the sampled token",
    "ranks": "whole steps of several GPUs that share weights, experts or tokens, beside one GPU",
    "trl": "a step of TRL's GRPO trainer on trees, beside the trainer itself",
}
ELSEWHERE = {  # former name -> what to do instead
    "sequence": "run python -m benchmarks ranks --way alone tokens",
    "real": "run titan-tree bench real",
    "samples": "docs/log/2026-11-23-data.md has its results",
    "input": "docs/log/2026-11-23-data.md has its results",
    "live": "docs/log/2026-11-23-data.md has its results",
    "balance": "docs/log/2026-11-23-many-gpus.md has its results",
    "checkpoint": "docs/log/2026-11-23-reliability.md has its results",
}
