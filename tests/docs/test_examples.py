"""The loops of examples/ train tiny models: gradients are those of rows, losses fall and rewards rise."""

import importlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.oracle import hf_model, path_logprobs, relative_error
from tests.support.vllm_server import save_tokenizer
from titan_tree.engine.tree_step import TreeStep
from titan_tree.tree.paths import TokenPath

ROOT = Path(__file__).parents[2]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two models with one tokenizer of bytes."""
    folders = [tmp_path_factory.mktemp(name) for name in ("student", "teacher")]
    for seed, folder in enumerate(folders):
        hf_model(True, seed=seed, vocab_size=258, max_position_embeddings=512).save_pretrained(folder)
        save_tokenizer(folder, ["<|im_start|>", "<|im_end|>"])
        (folder / "chat_template.jinja").write_text(TEMPLATE)
    return [str(folder) for folder in folders]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable:
    """Returns a function that runs an example with arguments."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    return lambda name, arguments: importlib.import_module(name).main(arguments.split())


@pytest.fixture
def first_step(monkeypatch: pytest.MonkeyPatch) -> dict:
    """Gets the paths, the weights, the loss and the gradients of the first step."""
    seen: dict = {}
    prepare, run = TreeStep.prepare, TreeStep.run

    def recorded(self, micro_batches):
        seen.setdefault("paths", [path for trees in micro_batches for tree in trees for path in tree.paths])
        return prepare(self, micro_batches)

    def ran(self, step):
        result, weights = run(self, step), dict(self.model.named_parameters())
        seen.setdefault("weights", {name: w.detach().clone() for name, w in weights.items()})
        seen.setdefault("gradients", {n: w.grad.clone() for n, w in weights.items() if w.grad is not None})
        seen.setdefault("loss", result.loss.item())
        return result

    monkeypatch.setattr(TreeStep, "prepare", recorded)
    monkeypatch.setattr(TreeStep, "run", ran)
    return seen


def assert_rows_agree(seen: dict, folder: str, path_loss: Callable, lora: float = 0.0) -> None:
    """Compares with loss and gradients of transformers, which computes each path alone.

    Args:
        path_loss: takes a path, the log-probs [n] of its counted tokens, and the index of these.
        lora: the scaling of LoRA, whose B are 0: the gradient of B is that of the weight, times A and this.
    """
    hf, loss = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), torch.tensor(0.0)
    for path in seen["paths"]:
        counted = torch.from_numpy(path.loss_mask[1:] > 0)
        loss = loss + path_loss(path, path_logprobs(hf, path.tokens)[counted], counted.nonzero()[:, 0] + 1)
    loss.backward()
    assert seen["loss"] == pytest.approx(loss.item(), rel=1e-5, abs=1e-6)
    wanted = {name.removeprefix("model."): w.grad for name, w in hf.named_parameters()}
    if lora:
        wanted = {
            name: lora * wanted[name.removesuffix("_lora_B")] @ seen["weights"][f"{name[:-1]}A"].T
            for name in seen["gradients"]
            if name.endswith("_lora_B")
        }
        assert len(wanted) == 14  # 7 linears in 2 layers
    for name, gradient in wanted.items():
        assert gradient.norm() > 0
        assert relative_error(seen["gradients"][name], gradient) < 1e-4, name


def policy_loss(path: TokenPath, logprobs: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """Returns -r A of each token. The ratios r are 1 in a first step."""
    ratio = (logprobs - torch.from_numpy(path.old_logprobs)[counted]).exp()
    torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=1e-4, atol=0)
    return -ratio * torch.from_numpy(path.advantage)[counted]


def test_sl_loop(run, folders, first_step, capsys):
    losses = run("sl_loop", f"{folders[0]} --steps 4 --lr 1e-2")
    paths = first_step["paths"]
    total = sum(path.loss_tokens for path in paths)
    assert_rows_agree(first_step, folders[0], lambda path, logprobs, _: -logprobs.sum() / total)
    assert losses[-1] < losses[0] - 0.5
    distinct = {tuple(path.tokens[: end + 1]) for path in paths for end in range(len(path))}
    printed = capsys.readouterr().out.splitlines()[1].split()[2:]
    assert printed == [str(sum(map(len, paths))), str(len(distinct))]


def test_rl_loop(run, folders, first_step):
    run("rl_loop", f"{folders[0]} --steps 1 --tasks 2 --answers 8 --max-tokens 6")
    paths = first_step["paths"]
    assert len(paths) == 16
    assert any(path.advantage.any() for path in paths)
    assert_rows_agree(first_step, folders[0], lambda *path: policy_loss(*path).mean() / len(paths))


def test_rl_loop_learns_with_lora(run, folders):
    options = "--loss cispo --lora 4 --steps 16 --tasks 4 --answers 16 --max-tokens 6 --lr 3e-2"
    rewards = run("rl_loop", f"{folders[0]} {options}")
    assert sum(rewards[-4:]) > 1.8 * sum(rewards[:4])


def test_distill(run, folders, first_step):
    options = "--steps 12 --tasks 2 --answers 16 --max-tokens 8 --lr 3e-3"
    divergences = run("distill", f"{folders[0]} --teacher {folders[1]} {options}")
    teacher = AutoModelForCausalLM.from_pretrained(folders[1], dtype=torch.float32)
    total = sum(path.loss_tokens for path in first_step["paths"])

    def path_loss(path, logprobs, counted):
        wanted = path_logprobs(teacher, path.tokens)[counted - 1]
        return ((logprobs - wanted).detach() * logprobs).sum() / total

    assert_rows_agree(first_step, folders[0], path_loss)
    assert sum(divergences[-3:]) / 3 < divergences[0] / 2
    divergences = run("distill", f"{folders[0]} --teacher {folders[1]} {options} --top-k 8")
    assert divergences[-1] < divergences[0] / 2


def test_tinker_loop(run, folders, first_step, tmp_path, monkeypatch):
    pytest.importorskip("tinker")
    from tests.support.tinker_server import serving

    module, paths = importlib.import_module("tinker_loop"), []
    make = module.datum

    def datum(prompt, answer, advantage):
        unseen = [0.0] * len(prompt)
        mask, logprobs = [*unseen, *[1.0] * len(answer.tokens)], [*unseen, *answer.logprobs]
        paths.append(TokenPath([*prompt, *answer.tokens], mask, 1.0, advantage, logprobs))
        return make(prompt, answer, advantage)

    monkeypatch.setattr(module, "datum", datum)
    with serving(tmp_path, folders[0]) as (url, _):
        options = f"--url {url} --steps 1 --tasks 2 --answers 8 --max-tokens 6 --lora 4"
        run("tinker_loop", f"{folders[0]} {options}")
    assert len(paths) == 16
    first_step["paths"] = paths
    assert_rows_agree(first_step, folders[0], lambda *path: policy_loss(*path).sum(), lora=32 / 4)
