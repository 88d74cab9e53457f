"""TRL's fused head on trees: every field, for each supported architecture."""

import os

import pytest
import torch
from torch import Tensor

os.environ |= {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
pytest.importorskip("trl")

from trl.trainer.utils import add_fused_lm_head

from tests.support.hf_families import VOCAB, hf_family
from titan_tree.integrations.fused_head import Forests, FusedHead
from titan_tree.integrations.hugging_face import _add_head
from titan_tree.integrations.tree_view import TreeView
from titan_tree.models.transformers.support import SUPPORTED

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("trl")]  # importing trl takes ten seconds

OUTPUTS = ("log_probs", "entropy", "mean_logits", "is_top1", "log_sum_sq_probs")
# sinks, caps, scales, latents
IN_CI = {"gpt_oss", "gemma2", "gemma4_text", "cohere2", "granite", "deepseek_v3", "qwen3 in fp64"}


@pytest.mark.parametrize("max_tokens", [None, 12])
@pytest.mark.parametrize(
    "family",
    [
        name if name in IN_CI else pytest.param(name, marks=pytest.mark.exhaustive)
        for name in [*sorted(SUPPORTED), "qwen3 in fp64"]
    ],
)
def test_every_field_of_the_fused_head_is_equal(family: str, max_tokens: int | None) -> None:
    """Fields, gradients, and what the model does without the fused head, for each supported architecture."""
    model = hf_family(family.split()[0])
    if family.endswith(
        "fp64"
    ):  # fields are fp32, as TRL's: it compares entropies with their quantile in fp32
        model.double()
    add_fused_lm_head(model, temperature=0.7, outputs=OUTPUTS)
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCAB, (3, 20), generator=draw)
    ids[:, :12] = ids[0, :12]
    mask = torch.ones_like(ids)
    mask[1, 15:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :3] = -100

    def results() -> tuple[dict[str, Tensor], dict[str, Tensor], list[Tensor]]:
        model.zero_grad()
        out = model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True)
        (out.loss + out.log_probs.exp().sum() + 0.3 * out.entropy.sum()).backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        with torch.no_grad():
            plain = model(input_ids=ids, attention_mask=mask).logits
            generated = model.generate(ids[:, :9], max_new_tokens=5, do_sample=False)
        return {name: out[name] for name in (*OUTPUTS, "loss", "label_mask")}, gradients, [plain, generated]

    fields, gradients, plain = results()
    _add_head(model, FusedHead(TreeView(model), Forests(max_tokens, 1), lambda *_: None, 0.7, OUTPUTS))
    found, found_gradients, found_plain = results()
    assert all(map(torch.equal, plain, found_plain))
    for name, want in fields.items():
        torch.testing.assert_close(found[name], want, rtol=1e-5, atol=1e-5, msg=name)
    assert found_gradients.keys() == gradients.keys()
    for name, want in gradients.items():
        # transformers rounds the gradients of Gated DeltaNet's decays more coarsely in fp32.
        limit = 1e-4 if name.endswith(("A_log", "dt_bias")) else 1e-5
        assert (found_gradients[name] - want).norm() <= limit * want.norm(), name
