"""GRPO in plain Python: sample answers, reward them, train on their trees. The model learns to count letters.

    python examples/rl_loop.py /models/SmolLM2-135M-Instruct --lora 16

A task's answers share its prompt, which a tree computes once. Sampling does, too. With ``--lr 3e-4``, it
printed on two cores of a CPU:

    step  reward  logical tokens  distinct tokens  seconds
       0   0.103            1868              613      5.6
       ...
       9   0.585            1496              215      1.4
"""

import argparse
import random
from time import perf_counter

import torch
from letters import WORDS, advantages, ask, reward

from titan_tree import (
    OneRank,
    TokenPath,
    TokenTree,
    TreeLoss,
    TreeStep,
    TreeTokenizer,
    clip_and_step,
    load_pretrained,
)
from titan_tree.components.lora import LoRA
from titan_tree.distributed.parallelize import parallelize, weight_shards
from titan_tree.models.lora.adapters import add_lora, init_lora
from titan_tree.models.tree_model import TreeModel
from titan_tree.rl.generate_sampler import default_sampler
from titan_tree.rl.rollouts import Chat
from titan_tree.tree.context import Completion


def load(folder: str, device: str, lora: int = 0) -> TreeModel:
    """Returns a model with fp32 weights, in bf16 on a GPU. With LoRA of this rank, they are frozen."""
    model = load_pretrained(folder, torch.float32, device)
    if lora:
        add_lora(model, LoRA(rank=lora, alpha=2 * lora))
        init_lora(weight_shards(model), seed=0)
    return parallelize(model, OneRank(device), dtype=torch.float32 if device == "cpu" else torch.bfloat16)


class Policy:
    """Samples answers from the current weights of a model."""

    def __init__(self, folder: str, model: TreeModel, max_tokens: int) -> None:
        self.chat = Chat(TreeTokenizer.load(folder))
        self.sampler, self.max_tokens, self.random = default_sampler(model), max_tokens, random.Random(0)

    def prompt(self, word: str) -> list[int]:
        """Returns the token ids of a task."""
        tokenizer = self.chat.tokenizer
        return tokenizer.encode(tokenizer.render(ask(word), add_generation_prompt=True))

    def answer(self, prompts: list[list[int]], number: int) -> list[list[Completion]]:
        """Returns ``number`` answers to each prompt."""
        rows = [prompt for prompt in prompts for _ in range(number)]
        seeds = [self.random.getrandbits(62) for _ in rows]
        turns = self.sampler.sample(rows, [self.max_tokens] * len(rows), self.chat.ends, seeds)
        return [turns[i : i + number] for i in range(0, len(turns), number)]


def path(prompt: list[int], turn: Completion, advantage: float = 0.0) -> TokenPath:
    """Returns the training sample of an answer. The loss counts what was sampled."""
    sampled, unknown = [1.0] * len(turn.tokens), [None] * len(prompt)
    return TokenPath(
        [*prompt, *turn.tokens],
        loss_mask=[*[0.0] * len(prompt), *sampled],
        advantage=advantage,
        old_logprobs=[*unknown, *turn.logprobs],
    )


def main(arguments: list[str] | None = None) -> list[float]:
    """Trains, and returns the mean reward of each step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", help="a model of Hugging Face's format")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tasks", type=int, default=4, help="words per step")
    parser.add_argument("--answers", type=int, default=8, help="answers per word")
    parser.add_argument("--max-tokens", type=int, default=16, help="of an answer")
    parser.add_argument("--loss", choices=["grpo", "cispo"], default="grpo")
    parser.add_argument("--lora", type=int, default=0, help="rank; 0 trains all weights")
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(arguments)

    model = load(args.folder, args.device, args.lora)
    policy = Policy(args.folder, model, args.max_tokens)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=args.lr, weight_decay=0.0)
    step = TreeStep(model, TreeLoss(args.loss, "path_token_mean"), args.device)

    mean_rewards = []
    print("step  reward  logical tokens  distinct tokens  seconds")
    for number in range(args.steps):
        start, trees, rewards = perf_counter(), [], []
        words = policy.random.sample(WORDS, args.tasks)
        prompts = [policy.prompt(word) for word in words]
        for word, prompt, turns in zip(words, prompts, policy.answer(prompts, args.answers), strict=True):
            group = [reward(policy.chat.text(turn.tokens), word) for turn in turns]
            trained = zip(turns, advantages(group), strict=True)
            trees.append(TokenTree.from_paths([path(prompt, *answer) for answer in trained]))
            rewards += group
        result = step.run(step.prepare([trees]))
        clip_and_step([optimizer], result.loss, max_norm=1.0)
        optimizer.zero_grad()
        mean_rewards.append(sum(rewards) / len(rewards))
        counts, seconds = result.counts, perf_counter() - start
        print(
            f"{number:4}  {mean_rewards[-1]:6.3f}  {counts.logical_tokens:14}  {counts.distinct_tokens:15}  "
            f"{seconds:7.1f}"
        )
    return mean_rewards


if __name__ == "__main__":
    main()
