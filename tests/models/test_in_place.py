"""Models of transformers that stay where they are, against the unmodified models on every path alone."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from torch import nn
from transformers import PreTrainedModel

from tests.models.test_transformers import PATHS, oracle
from tests.support.hf_families import hf_family, hf_logprobs
from titan_tree.components.tree_loss.loss import TreeLoss
from titan_tree.components.tree_partitioner.partitioner import TreePartitioner
from titan_tree.engine.tree_step import TreeStep
from titan_tree.errors import UserError
from titan_tree.integrations.hugging_face import TOKENWISE
from titan_tree.models.transformers.in_place import InPlaceModel
from titan_tree.scoring.score_trees import tree_logprobs
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_tree import TokenTree

TREES = [[TokenTree.from_paths([TokenPath(path) for path in PATHS])]]


def run(model: InPlaceModel, max_tokens: int | None) -> torch.Tensor:
    """Runs a step and returns its loss."""
    partitioner = None if max_tokens is None else TreePartitioner("redundancy_free", max_tokens)
    step = TreeStep(model, TreeLoss("sft", reduction="token_mean"), partitioner=partitioner)
    prepared = step.prepare(TREES)
    assert (prepared.counts.forwards > 1) == (max_tokens is not None)
    return step.run(prepared).loss


@pytest.mark.parametrize(
    ("name", "is_checkpointed"),
    [
        ("qwen3", False),
        ("qwen3", True),
        ("gpt_oss", True),
        ("deepseek_v3", False),
        ("gemma2", True),
        ("granite", False),
        pytest.param("bailing_hybrid", True, marks=pytest.mark.slow),
        pytest.param("nemotron_h", True, marks=pytest.mark.slow),
    ],
)
def test_trees_equal_paths_and_the_model_stays_usable(name: str, is_checkpointed: bool) -> None:
    hf = hf_family(name)
    names = list(hf.state_dict())
    logprobs, loss, gradients = oracle(hf)
    model = InPlaceModel(hf)
    if is_checkpointed:
        hf.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        hf.train()
    for max_tokens in (None, 12):
        torch.testing.assert_close(run(model, max_tokens), loss, rtol=1e-5, atol=0, check_dtype=False)
        found = {key: p.grad for key, p in hf.named_parameters() if p.grad is not None}
        assert found.keys() == gradients.keys()
        for key, want in gradients.items():
            assert (found[key] - want).norm() <= 1e-5 * want.norm(), key
        hf.zero_grad()
        with torch.no_grad():
            for got, expected in zip(tree_logprobs(model, PATHS, max_tokens), logprobs, strict=True):
                torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    hf.eval()  # and without trees
    assert list(hf.state_dict()) == names
    for got, want in zip(oracle(hf)[0], logprobs, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    prompt = torch.tensor([PATHS[0]])
    generated = [
        each.generate(prompt, max_new_tokens=6, do_sample=False, pad_token_id=0)
        for each in (hf, hf_family(name))
    ]
    assert torch.equal(*generated)


def with_lora(hf: PreTrainedModel, *extra: str) -> nn.Module:
    targets = ["q_proj", "v_proj", "down_proj", *extra]
    config = LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
    torch.manual_seed(1)
    return get_peft_model(hf, config)


@pytest.mark.parametrize("max_tokens", [None, 12])
def test_adapters_of_peft_are_trained(max_tokens: int | None) -> None:
    hf = hf_family("llama")
    plain = with_lora(copy.deepcopy(hf))
    _, loss, gradients = oracle(plain)  # type: ignore[arg-type]
    model = InPlaceModel(hf)
    peft = with_lora(hf)
    model.wrapped_by(peft)
    torch.testing.assert_close(run(model, max_tokens), loss, rtol=1e-5, atol=0, check_dtype=False)
    found = {key: p.grad for key, p in peft.named_parameters() if p.grad is not None}
    assert found.keys() == gradients.keys()
    for key, want in gradients.items():
        assert (found[key] - want).norm() <= 1e-5 * want.norm(), key


def test_an_adapted_output_projection_is_refused() -> None:
    hf = hf_family("llama")
    model = InPlaceModel(hf)
    with pytest.raises(UserError, match="model: lm_head: expected the linear that it was, got Linear; leave"):
        model.wrapped_by(with_lora(hf, "lm_head"))


ADAPTERS = {
    **{name: {} for name in TOKENWISE},
    "BOFT": {"boft_block_size": 4},
    "C3A": {"block_size": 8},
    "FOURIERFT": {"n_frequency": 16},
    "IA3": {"feedforward_modules": []},
    "LN_TUNING": {"target_modules": ["input_layernorm"]},
    "LORA": {"use_dora": True, "use_rslora": True},
    "MISS": {"r": 8},
    "OFT": {"oft_block_size": 4, "r": 0},
    "PSOFT": {"r": 4},
    "ROAD": {"group_size": 4},
    "SHIRA": {"r": 4},
    "VBLORA": {"vector_length": 8, "num_vectors": 16},
    "WAVEFT": {"n_frequency": 16},
}


@pytest.mark.parametrize("name", sorted(ADAPTERS))
def test_adapters_that_treeify_accepts_change_each_token_by_itself(name: str) -> None:
    config = PEFT_TYPE_TO_CONFIG_MAPPING[name]
    options = {"target_modules": ["q_proj", "v_proj"]} | ADAPTERS[name]
    peft = get_peft_model(hf_family("qwen3"), config(task_type="CAUSAL_LM", **options)).train()
    trained = [parameter for parameter in peft.parameters() if parameter.requires_grad]
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in trained:
            parameter.add_(0.1 * torch.randn_like(parameter))
    want = [hf_logprobs(peft, path) for path in PATHS]
    gradients = torch.autograd.grad(torch.cat(want).sum(), trained, allow_unused=True)
    view = InPlaceModel(peft.get_base_model())
    view.wrapped_by(peft)
    got = tree_logprobs(view, PATHS)
    torch.testing.assert_close(torch.cat(got), torch.cat(want), rtol=1e-5, atol=1e-5)
    mine = torch.autograd.grad(torch.cat(got).sum(), trained, allow_unused=True)
    for gradient, expected in zip(mine, gradients, strict=True):
        if expected is not None:
            assert (gradient - expected).norm() <= 1e-4 * expected.norm() + 1e-7
    with torch.no_grad(), peft.disable_adapter():
        assert max((hf_logprobs(peft, p) - w).abs().max() for p, w in zip(PATHS, want, strict=True)) > 1e-2
