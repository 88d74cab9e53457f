"""The task of rl_loop.py through Tinker's API: this file needs the package ``tinker``, but no titan_tree.

    titan-tree serve train_configs/serve.toml model.hf_path=/models/SmolLM2-135M-Instruct
    python examples/tinker_loop.py /models/SmolLM2-135M-Instruct    # in another terminal

The server merges the data of a call into trees. Its metrics say how many tokens it computed. Two cores of a
shared CPU printed this, with ``--lr 3e-4`` and the server's ``training.dtype=float32``:

    step  reward  logical tokens  distinct tokens  seconds
       0   0.127            1829              513     12.0
       ...
       9   0.294            1850              458     16.3
"""

import argparse
import random
from time import perf_counter

import tinker
from letters import WORDS, advantages, ask, reward
from tinker import types


def datum(prompt: list[int], answer: types.SampledSequence, advantage: float) -> types.Datum:
    """Returns the training sample of an answer. Entry t of each input speaks of the token after token t."""
    tokens, unseen = [*prompt, *answer.tokens], [0.0] * (len(prompt) - 1)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "logprobs": [*unseen, *answer.logprobs],
            "advantages": [*unseen, *[advantage] * len(answer.tokens)],
        },
    )


def main(arguments: list[str] | None = None) -> list[float]:
    """Trains, and returns the mean reward of each step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", help="the model that the server serves")
    parser.add_argument("--url", default="http://127.0.0.1:8765")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tasks", type=int, default=4, help="words per step")
    parser.add_argument("--answers", type=int, default=8, help="answers per word")
    parser.add_argument("--max-tokens", type=int, default=16, help="of an answer")
    parser.add_argument("--lora", type=int, default=16, help="rank")
    parser.add_argument("--lr", type=float, default=1e-4)
    args = parser.parse_args(arguments)

    service = tinker.ServiceClient(base_url=args.url, api_key="tml-local")
    trainer = service.create_lora_training_client(base_model=args.model, rank=args.lora, seed=0).result()
    tokenizer, draw = trainer.get_tokenizer(), random.Random(0)

    mean_rewards = []
    print("step  reward  logical tokens  distinct tokens  seconds")
    for number in range(args.steps):
        start, data, rewards = perf_counter(), [], []
        sampler = trainer.save_weights_and_get_sampling_client().result()
        words = draw.sample(WORDS, args.tasks)
        prompts = [
            tokenizer.apply_chat_template(ask(word), add_generation_prompt=True, return_dict=False)
            for word in words
        ]
        waiting = [  # futures: the server samples all of them at once
            sampler.sample(
                types.ModelInput.from_ints(prompt),
                num_samples=args.answers,
                sampling_params=types.SamplingParams(max_tokens=args.max_tokens, seed=draw.getrandbits(31)),
            )
            for prompt in prompts
        ]
        for word, prompt, future in zip(words, prompts, waiting, strict=True):
            answers = future.result().sequences
            group = [reward(tokenizer.decode(answer.tokens), word) for answer in answers]
            data += [datum(prompt, *x) for x in zip(answers, advantages(group), strict=True)]
            rewards += group
        trained = trainer.forward_backward(data, "importance_sampling")
        stepped = trainer.optim_step(types.AdamParams(learning_rate=args.lr, grad_clip_norm=1.0))
        metrics, _ = trained.result().metrics, stepped.result()
        mean_rewards.append(sum(rewards) / len(rewards))
        logical, distinct = (int(metrics[f"{name}:sum"]) for name in ("tokens", "distinct_tokens"))
        seconds = perf_counter() - start
        print(f"{number:4}  {mean_rewards[-1]:6.3f}  {logical:14}  {distinct:15}  {seconds:7.1f}")
    service.close("success").result()
    return mean_rewards


if __name__ == "__main__":
    main()
