"""Supervised training in plain Python: conversations -> samples -> one token tree -> AdamW.

    python examples/sl_loop.py /models/SmolLM2-135M-Instruct

The conversations begin alike, so the tree computes fewer tokens than their samples have. The loss and the
gradients are those of all samples alone. It printed on a CPU:

    step  loss   logical tokens  distinct tokens
       0  2.199             390              120
       1  1.800             390              120
       2  1.470             390              120
"""

import argparse

import torch

from titan_tree import TokenTree, TreeLoss, TreeStep, TreeTokenizer, clip_and_step, load_pretrained

QUESTION = {"role": "user", "content": "Name a fruit, and how many letters it has."}
ANSWER = {"role": "assistant", "content": "A pear. It has 4 letters."}
FOLLOW_UPS = {  # question -> answer
    "And in French?": "Une poire. It has 5 letters.",
    "And in Spanish?": "Una pera. It has 4 letters.",
    "And in German?": "Eine Birne. It has 5 letters.",
}
CONVERSATIONS = [
    [QUESTION, ANSWER, {"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    for question, answer in FOLLOW_UPS.items()
]


def main(arguments: list[str] | None = None) -> list[float]:
    """Trains, and returns the loss of each step in nats per counted token."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", help="a model of Hugging Face's format")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(arguments)

    tokenizer = TreeTokenizer.load(args.folder)
    model = load_pretrained(args.folder, torch.float32, args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    # One sample per answer: what precedes it, and the answer, which the loss counts.
    samples = [sample for messages in CONVERSATIONS for sample in tokenizer.samples(messages)]
    tree = TokenTree.from_paths(samples)
    step = TreeStep(model, TreeLoss("sft", "token_mean"), args.device)
    prepared = step.prepare([[tree]])  # one micro-batch of one tree

    losses = []
    print("step  loss   logical tokens  distinct tokens")
    for number in range(args.steps):
        result = step.run(prepared)  # adds gradients to parameter.grad
        clip_and_step([optimizer], result.loss, max_norm=1.0)
        optimizer.zero_grad()
        losses.append(result.loss.item())
        counts = result.counts
        print(f"{number:4}  {losses[-1]:.3f}  {counts.logical_tokens:14}  {counts.distinct_tokens:15}")
    return losses


if __name__ == "__main__":
    main()
