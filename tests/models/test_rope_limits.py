"""RoPE whose frequencies depend on the longest path is exact up to the length from which they change."""

import copy
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Phi3Config

from tests.support.oracle import relative_error
from titan_tree.errors import UserError
from titan_tree.models.transformers import TransformersModel
from titan_tree.scoring.score_trees import tree_logprobs

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
FACTORS = {"short_factor": [1 + i / 10 for i in range(8)], "long_factor": [2.0 + i for i in range(8)]}
LONGROPE = {
    "max_position_embeddings": 64,
    "original_max_position_embeddings": 16,
    "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, **FACTORS},
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}


@pytest.mark.parametrize(
    "config",
    [
        Phi3Config(**SIZES, **copy.deepcopy(LONGROPE)),
        LlamaConfig(**SIZES, max_position_embeddings=16, rope_parameters=DYNAMIC),
    ],
    ids=["longrope", "dynamic"],
)
def test_paths_up_to_the_limit_are_exact_and_longer_ones_are_refused(config: Any) -> None:
    torch.manual_seed(0)
    alone = AutoModelForCausalLM.from_config(config).double()
    model = TransformersModel(copy.deepcopy(alone))
    lists = [list(range(3, 19)), [*range(3, 9), 50, 51, 52]]
    want, got = [], tree_logprobs(model, lists)
    for tokens in lists:
        ids = torch.tensor(tokens)
        logits = alone(ids[None]).logits[0, :-1]
        want.append(logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0])
    for mine, other in zip(got, want, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-12)
    torch.cat(list(got)).sum().backward()
    torch.cat(want).sum().backward()
    gradients = dict(alone.named_parameters())
    for name, weight in model.base.named_parameters():
        assert relative_error(weight.grad, gradients[f"model.{name}"].grad) < 1e-6, name  # sums are fp32
    with pytest.raises(UserError, match=r"it has 17 tokens, but the model has 16 positions"):
        tree_logprobs(model, [list(range(17))])


def test_a_limit_that_is_missing_is_named() -> None:
    config = Phi3Config(**SIZES, **copy.deepcopy(LONGROPE))
    model = AutoModelForCausalLM.from_config(config)
    model.config.rope_parameters["original_max_position_embeddings"] = None
    with pytest.raises(UserError, match=r"original_max_position_embeddings: expected a positive integer for"):
        TransformersModel(model)
