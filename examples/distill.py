"""On-policy distillation: the student samples answers, and the teacher scores all of them in one tree pass.

    python examples/distill.py /models/SmolLM2-135M-Instruct --teacher /models/SmolLM2-360M-Instruct --top-k 8

Without ``--top-k``, the loss reads the teacher's log-prob of the sampled token alone (GKD, arXiv:2306.13649).
With SmolLM2-135M-Instruct as the teacher, the same with noise on its weights as the student, and
``--lr 3e-5``, it then printed on a CPU:

    step  KL to the teacher  logical tokens  distinct tokens
       0              3.332            1228              690
       ...
       5              2.165            1224              689

With ``--top-k 8``, the KL over the likeliest tokens and the rest fell from 0.660 to 0.559.
"""

import argparse

import torch
from letters import WORDS
from rl_loop import Policy, load, path

from titan_tree import TokenTree, TreeLoss, TreeStep, TreeTokenizer, UserError, clip_and_step
from titan_tree.scoring.score_trees import set_logprobs, set_teacher_topk


def main(arguments: list[str] | None = None) -> list[float]:
    """Trains, and returns the estimated KL(student || teacher) of each step, in nats per token."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", help="the student, a model of Hugging Face's format")
    parser.add_argument("--teacher", required=True, help="a model with the same tokenizer")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tasks", type=int, default=4, help="words per step")
    parser.add_argument("--answers", type=int, default=4, help="answers per word")
    parser.add_argument("--max-tokens", type=int, default=32, help="of an answer")
    parser.add_argument("--top-k", type=int, default=0, help="of the teacher's likeliest tokens; 0: none")
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(arguments)
    if TreeTokenizer.load(args.teacher).fingerprint() != TreeTokenizer.load(args.folder).fingerprint():
        raise UserError(f"{args.teacher}: expected the tokenizer of {args.folder}; choose another teacher")

    student, teacher = load(args.folder, args.device), load(args.teacher, args.device)
    policy = Policy(args.folder, student, args.max_tokens)
    optimizer = torch.optim.AdamW(student.parameters(), lr=args.lr, weight_decay=0.0)
    # Both losses are KL(student || teacher) on samples of the student.
    name, options = ("distill_topk", {"beta": 1.0}) if args.top_k else ("distill", {})
    step = TreeStep(student, TreeLoss(name, "token_mean", **options), args.device)

    divergences = []
    print("step  KL to the teacher  logical tokens  distinct tokens")
    for number in range(args.steps):
        prompts = [policy.prompt(word) for word in policy.random.sample(WORDS, args.tasks)]
        groups = policy.answer(prompts, args.answers)
        trees = [
            TokenTree.from_paths([path(prompt, turn) for turn in turns])
            for prompt, turns in zip(prompts, groups, strict=True)
        ]
        if args.top_k:
            set_teacher_topk(teacher, trees, args.top_k, max_tokens=16_384, partitioner=None)
        else:
            set_logprobs(teacher, trees, "ref_logprobs", max_tokens=16_384, partitioner=None)
        result = step.run(step.prepare([trees]))
        clip_and_step([optimizer], result.loss, max_norm=1.0)
        optimizer.zero_grad()
        divergences.append(result.loss_metrics["teacher_kl"].item())
        counts = result.counts
        print(f"{number:4}  {divergences[-1]:17.3f}  {counts.logical_tokens:14}  {counts.distinct_tokens:15}")
    return divergences


if __name__ == "__main__":
    main()
