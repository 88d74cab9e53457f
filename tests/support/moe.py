"""Small mixtures of experts, and their definition."""

import torch
import torch.nn.functional as F

from titan_tree.components.moe.layer import MoE


class Shared(torch.nn.Linear):
    """Stands in for a shared expert."""

    def __init__(self, size: int) -> None:
        super().__init__(size, size, bias=False)


def small_moe(norm_topk_prob=True, shared=True, top_k=2, num_experts=5, dtype=torch.float64):
    """Returns a random mixture of experts with 8 inputs and hidden layers of 16."""
    moe = MoE(8, 16, num_experts, top_k, norm_topk_prob, Shared(8) if shared else None)
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.normal_(0, 0.5)
    return moe.to(dtype)


def moe_by_token(moe, x):
    """Returns the definition of a mixture of experts, one token and one expert at a time."""
    rows = []
    for row in x:
        probability = (moe.gate.weight @ row).softmax(0)
        chosen = probability.sort(descending=True).indices[: moe.top_k]
        total = probability[chosen].sum() if moe.norm_topk_prob else 1.0
        out = torch.zeros_like(row)
        for e in chosen:
            gate, up = (moe.experts.gate_up_proj[e] @ row).chunk(2)
            out = out + probability[e] / total * (moe.experts.down_proj[e] @ (F.silu(gate) * up))
        if moe.shared_expert is not None:
            gate = torch.sigmoid(moe.shared_expert_gate.weight @ row)
            out = out + gate * moe.shared_expert(row)
        rows.append(out)
    return torch.stack(rows)
