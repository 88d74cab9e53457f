"""Several tool results in one observation, and rollouts whose environment compacts their context."""

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.components.tree_tokenizer.test_probes import OPEN, TEXT, tokenizer_of
from tests.rl.test_sampling import TOKENIZER, Scripted, tiny_model
from tests.support.rl_runs import seeds_of
from titan_tree import TokenPath, TokenTree, TreeLoss, TreeTokenizer, tree_logprobs
from titan_tree.engine.tree_step import TreeStep
from titan_tree.models.decoder import Decoder
from titan_tree.models.tree_model import Execution
from titan_tree.rl.cached_sampler import CachedSampler
from titan_tree.rl.environment import Reply
from titan_tree.rl.rollouts import Chat, Rollout, branches, play, token_paths
from titan_tree.tree.context import Completion

END = "<|im_end|>"
NAMED_RESULTS = (  # as templates of models that want to know which call a result belongs to
    "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\n' }}"
    "{{ m.name ~ '#' ~ m.tool_call_id ~ '=' if m.role == 'tool' else '' }}{{ m.content ~ '<|im_end|>\n' }}"
    "{% endfor %}{{ '<|im_start|>assistant\n' if add_generation_prompt else '' }}"
)


class Summarizing:
    """Three turns. After the second one, the model goes on from a summary in a new context."""

    def __init__(self) -> None:
        self.prompt = [{"role": "user", "content": "task"}]

    def reply(self, turns: Sequence[str]) -> Reply:
        if len(turns) == 1:
            return Reply([{"role": "tool", "content": "one"}, {"role": "tool", "content": "two"}])
        if len(turns) == 2:
            summary = f"task, so far {turns[1]}"
            return Reply([{"role": "user", "content": summary}], new_context=True)
        return Reply(None, float(len(turns[2])))


class Ending:
    """Samples up to four tokens of a turn and then ends it, with the log-probs of the model."""

    def __init__(self, model: Decoder) -> None:
        self.model = model

    def sample(self, contexts: Any, limits: Any, stops: Any, seeds: Any) -> list[Completion]:
        turns = CachedSampler(self.model).sample(contexts, [1 + seed % 4 for seed in seeds], stops, seeds)
        for context, (tokens, logprobs, *_) in zip(contexts, turns, strict=True):
            if tokens[-1] not in stops:
                tokens.append(stops[0])
                with torch.no_grad():
                    logprobs.append(tree_logprobs(self.model, [[*context, *tokens]])[0][-1].item())
        return turns


def text(role: str, content: str, end: str = f"{END}\n") -> str:
    return f"<|im_start|>{role}\n{content}{end}"


FIRST = text("user", "task") + text("assistant", "a", END)
RESULTS = (
    "\n<|im_start|>user\n<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response>"
    f"{END}\n<|im_start|>assistant\n"
)


def played(*turns: str, limit: int = 400, number: int = 1) -> list[Rollout]:
    chat = Chat(TOKENIZER)
    rollouts = chat.start(Summarizing(), number)
    play(
        rollouts,
        Scripted(*(f"{turn}{END}" for turn in turns)),
        chat,
        seeds_of("seed", rollouts),
        max_turn_tokens=20,
        max_rollout_tokens=limit,
    )
    return rollouts


def test_all_results_of_parallel_calls_are_read_in_one_observation() -> None:
    (rollout,) = played("a", "b", "xyz")
    assert TOKENIZER.decode(rollout.tokens[: rollout.starts[1]]) == FIRST + RESULTS


@pytest.mark.parametrize("template", ["chatml", "qwen3"])
def test_the_template_renders_several_results_as_in_the_whole_conversation(template: str) -> None:
    tokenizer = TreeTokenizer.byte_level(template)
    results = [{"role": "tool", "content": str(i)} for i in range(3)]
    said: list[dict[str, Any]] = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "c"}]
    whole = tokenizer.render([*said, *results], add_generation_prompt=True)
    before = tokenizer.render(said[:1], add_generation_prompt=True)
    chat = Chat(tokenizer)
    observed = tokenizer.decode(chat.observation(results, chat.ends[0]))
    assert whole.startswith(before)
    assert whole.endswith(observed)
    assert all(f"\n{i}\n" in observed for i in range(3))


def test_a_template_may_render_the_names_of_calls() -> None:
    tokenizer = TreeTokenizer.byte_level(NAMED_RESULTS)
    results = [
        {"role": "tool", "name": name, "tool_call_id": id, "content": value}
        for name, id, value in (("add", "c1", "3"), ("mul", "c2", "4"))
    ]
    expected = text("tool", "add#c1=3") + text("tool", "mul#c2=4") + "<|im_start|>assistant\n"
    chat = Chat(tokenizer)
    assert tokenizer.decode(chat.observation(results, chat.ends[0])) == f"\n{expected}"


GPT_OSS = (  # calls have another end, and so has an answer in a history; results need a call
    "{% for m in messages %}{% set before = loop.previtem or m %}"
    "{{ raise_exception('no call') if 'tool' == m.role != before.role and not before.tool_calls }}"
    "<user>{{ m.role }}:" + TEXT + "{{ '<tool>' if m.tool_calls else '<eos>' if loop.last and m.role == "
    "'assistant' else '<end>' }}{% endfor %}{{ '<user>assistant:' if add_generation_prompt }}"
)


@pytest.mark.parametrize(
    ("template", "ends", "observed"),  # (end of the turn, role) -> observation
    [
        (
            OPEN,  # the mark of the next role is the end
            ["<user>", "<tool>"],
            {
                ("<user>", "user"): "12<assistant>",
                ("<tool>", "tool"): "12<assistant>",
                ("<tool>", "user"): "<user>12<assistant>",
                ("<user>", "tool"): "<tool>12<assistant>",
            },
        ),
        (
            GPT_OSS,
            ["<eos>", "<tool>"],
            {
                ("<eos>", "user"): "<user>user:12<end><user>assistant:",
                ("<tool>", "tool"): "<user>tool:12<end><user>assistant:",
                ("<tool>", "user"): "<user>user:12<end><user>assistant:",
            },
        ),
    ],
    ids=["GLM", "gpt-oss"],
)
def test_a_turn_ends_at_every_end_of_the_template(
    template: str, ends: list[str], observed: dict[tuple[str, str], str]
) -> None:
    tokenizer = tokenizer_of(template)
    chat, ids = Chat(tokenizer), tokenizer.special_tokens
    assert chat.ends == [ids[end] for end in ends]
    for (end, role), text in observed.items():
        assert tokenizer.decode(chat.observation([{"role": role, "content": "12"}], ids[end])) == text
    rollouts = chat.start(Summarizing(), 1)
    sampler = Scripted()
    sampler.turns = [tokenizer.encode(f"{turn}{ends[1 - i % 2]}") for i, turn in enumerate(("c", "s", "x"))]
    play(rollouts, sampler, chat, ["seed"], max_turn_tokens=20, max_rollout_tokens=400)
    assert not rollouts[0].is_cut_off
    assert rollouts[0].turns == ["c", "s", "x"]


def test_a_new_context_replaces_what_the_model_sees() -> None:
    chat = Chat(TOKENIZER)
    (rollout,) = chat.start(Summarizing(), 1)
    sampler = Scripted(*(f"{turn}{END}" for turn in ("a", "b", "xyz")))
    play([rollout], sampler, chat, ["seed"], max_turn_tokens=20, max_rollout_tokens=400)
    seen = [TOKENIZER.decode(contexts[0]) for contexts, _ in sampler.calls]
    prompt = text("user", "task") + "<|im_start|>assistant\n"
    summary = text("user", "task, so far b") + "<|im_start|>assistant\n"
    assert seen == [prompt, f"{prompt}a{END}{RESULTS}", summary]
    first, second = rollout.paths(np.arange(len(rollout.tokens)), "r")
    assert [path.id for path in (first, second)] == ["r/0", "r/1"]
    assert TOKENIZER.decode(first.tokens.tolist()) == f"{prompt}a{END}{RESULTS}b{END}"
    assert TOKENIZER.decode(second.tokens.tolist()) == f"{summary}xyz{END}"
    assert TOKENIZER.decode(first.tokens[first.loss_mask > 0].tolist()) == f"a{END}b{END}"
    assert TOKENIZER.decode(second.tokens[second.loss_mask > 0].tolist()) == f"xyz{END}"
    assert second.advantage.tolist() == list(range(len(first), len(first) + len(second)))
    assert (first.rollout_tokens, second.rollout_tokens) == (8, 8)
    assert rollout.reward == 3.0


def test_the_limit_of_tokens_holds_for_each_context() -> None:
    (rollout,) = played("a", "b", "xyz")
    first, second = (len(path) for path in rollout.paths(np.zeros(len(rollout.tokens)), "r"))
    assert first > second
    (fits,) = played("a", "b", "xyz", limit=first)
    assert (fits.is_cut_off, fits.tokens) == (False, rollout.tokens)
    (short,) = played("a", "b", limit=first - 1)
    assert (short.is_cut_off, short.reward, len(short.contexts)) == (True, 0.0, 1)


def test_a_summary_without_room_for_a_turn_cuts_the_rollout_off() -> None:
    class Long(Summarizing):
        def reply(self, turns: Sequence[str]) -> Reply:
            return Reply([{"role": "user", "content": "x" * 500}], new_context=True)

    chat = Chat(TOKENIZER)
    (rollout,) = chat.start(Long(), 1)
    play([rollout], Scripted(f"a{END}"), chat, ["seed"], max_turn_tokens=20, max_rollout_tokens=400)
    assert (rollout.is_cut_off, rollout.contexts) == (True, [0])


def test_forks_keep_the_contexts_before_their_turn() -> None:
    (rollout,) = played("a", "b", "xyz")
    for turn, contexts in ((1, [0]), (2, rollout.contexts)):
        fork = rollout.fork(turn)
        assert (fork.contexts, fork.tokens) == (contexts, rollout.tokens[: rollout.starts[turn]])
        assert fork.context == rollout.tokens[contexts[-1] : rollout.starts[turn]]
    chat = Chat(TOKENIZER)
    forks = branches([rollout], 6, random.Random(0))
    sampler, seeds = CachedSampler(tiny_model()), seeds_of("forks", forks)
    play(forks, sampler, chat, seeds, max_turn_tokens=20, max_rollout_tokens=400)
    assert {fork.inherited for fork in forks} == {1, 2}
    for fork in forks:
        if fork.inherited == 2:
            assert fork.contexts == rollout.contexts
            assert fork.tokens[: rollout.contexts[1]] == rollout.tokens[: rollout.contexts[1]]
        assert fork.reward is not None


def test_turn_advantages_across_contexts_by_hand() -> None:
    """Rollouts a, and b, which has a fork in its second context. Rewards are 1, 0 and 0.6.

    V(b's second context) = (0 + 0.6) / 2 = 0.3 = V(after b's turn in its first context); V(prompt) = 0.65.
    """

    def rollout(first: int, second: int, reward: float, inherited: int = 0) -> Rollout:
        made = Rollout(episode=Summarizing(), inherited=inherited)
        made.read([9])
        made.write([first], [-1.0])
        made.read([7, 7], new_context=True)
        made.write([second], [-1.0])
        made.end(reward)
        return made

    rollouts = [rollout(1, 3, 1.0), rollout(2, 3, 0.0), rollout(2, 4, 0.6, inherited=1)]
    paths = token_paths(rollouts, "task", "spo", {})
    assert [path.tokens.tolist() for path in paths[:2]] == [[9, 1], [7, 7, 3]]
    a, a2, b, b2, fork, fork2 = (path.advantage[-1] for path in paths)
    # The second contexts of a and b have equal tokens, but another history.
    assert [a, a2] == pytest.approx([0.35, 0.0])
    assert [b, b2] == pytest.approx([-0.35 / 2, -0.3])  # two paths share the turn that b sampled
    assert [fork, fork2] == pytest.approx([-0.35 / 2, 0.3])


def test_experts_of_each_context_stay_as_they_were_sampled() -> None:
    """A later turn sends the experts of the whole context again; only those of new tokens are taken."""

    def rows(start: int, number: int) -> np.ndarray:
        return np.arange(start, start + number)[:, None, None] + np.zeros((1, 2, 1), np.int16)

    rollout = Rollout(episode=None)
    rollout.read([1, 2])
    with_gap = rows(10, 3)
    with_gap[1] = -1  # a position that the server had cached
    rollout.write([3, 4], [-1.0, -1.0], with_gap)
    rollout.read([5])
    rollout.write([6], [-1.0], rows(20, 5))
    rollout.read([7, 8], new_context=True)
    rollout.write([9], [-1.0], rows(30, 2))
    first, second = rollout.paths(np.zeros(9), "r")
    assert first.routed_experts[:, 0, 0].tolist() == [10, 21, 12, 23, 24, -1]
    assert second.routed_experts[:, 0, 0].tolist() == [30, 31, -1]
    assert [each[:, 0, 0].tolist() for each in rollout.fork(0).experts] == [[10, 21]]  # its prompt's alone
    fork = rollout.fork(1)
    assert [each[:, 0, 0].tolist() for each in fork.experts] == [[10, 21, 12, 23, 24]]
    fork.write([6, 6], [-1.0, -1.0], rows(40, 6))
    assert fork.experts[0][:, 0, 0].tolist() == [10, 21, 12, 23, 24, 45]
    assert rollout.experts[0][:, 0, 0].tolist() == [10, 21, 12, 23, 24]


@pytest.mark.parametrize("reduction", ["rollout_token_mean", "token_mean", "path_mean"])
def test_the_loss_of_compacted_rollouts_is_that_of_their_definition(reduction: str) -> None:
    """Computed for each path alone with tree_logprobs. rollout_token_mean is the mean over rollouts."""
    model = tiny_model()
    model.execution = Execution(torch.float32)
    chat = Chat(TOKENIZER)
    rollouts = chat.start(Summarizing(), 3)
    short = SimpleNamespace(prompt=Summarizing().prompt, reply=lambda turns: Reply(None, 2.0))
    rollouts += chat.start(short, 1)
    play(rollouts, Ending(model), chat, seeds_of("seed", rollouts), max_turn_tokens=8, max_rollout_tokens=400)
    rollouts += branches(rollouts, 2, random.Random(1))
    forks = [r for r in rollouts if r.reward is None]
    play(forks, Ending(model), chat, seeds_of("forks", forks), max_turn_tokens=8, max_rollout_tokens=400)
    paths = token_paths(rollouts, "t", "group", {})
    step = TreeStep(model, TreeLoss("grpo", reduction=reduction), torch.device("cpu"))
    loss = step.run(step.prepare([[TokenTree.from_paths(paths)]])).loss.item()

    def token_loss(path: TokenPath) -> torch.Tensor:
        (logprobs,) = tree_logprobs(model, [path.tokens.tolist()])
        ratio = (logprobs - torch.from_numpy(path.old_logprobs[1:])).exp()
        loss = -torch.from_numpy(path.advantage[1:]) * ratio
        return torch.where(torch.from_numpy(path.loss_mask[1:]) > 0, loss, 0.0).detach()

    losses = [token_loss(path).sum().item() for path in paths]
    sizes = [path.loss_tokens for path in paths]
    of_rollout = [path.id.split("/")[1] for path in paths]
    assert len(paths) > len(set(of_rollout)) == len(rollouts)
    if reduction == "rollout_token_mean":
        means = []
        for name in sorted(set(of_rollout)):
            own = [i for i, each in enumerate(of_rollout) if each == name]
            means.append(sum(losses[i] for i in own) / sum(sizes[i] for i in own))
        expected = np.mean(means)
    else:
        expected = sum(losses) / (sum(sizes) if reduction == "token_mean" else len(paths))
    assert loss == pytest.approx(expected, rel=1e-4, abs=1e-5)
