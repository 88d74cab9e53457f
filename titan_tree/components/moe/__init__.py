"""Mixture of experts (Shazeer et al., arXiv:1701.06538; Switch Transformer, arXiv:2101.03961) on token trees.

A token is routed by itself, so on a tree every distinct token is routed once, and no expert ever refuses one.
What depends on the tree are sums over tokens, ``Routing``, in which a token counts once per path through it.

N tokens, k experts of each, E experts, d hidden size, m intermediate size of an expert.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_tree.components.moe.balance import RouterLoss, Routing, router_metrics
from titan_tree.components.moe.bias import RouterBias
from titan_tree.components.moe.experts import Dispatcher, expert_mlps

__all__ = ["BIAS", "Experts", "MoE", "RouterBias", "RouterLoss", "Routing", "router_metrics"]

BIAS = "e_score_correction_bias"


class Experts(nn.Module):
    """The weights of E SwiGLU networks without biases, by Hugging Face's names."""

    def __init__(self, num_experts: int, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        # Rows of each expert's gate first, then those of its up-projection.
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * intermediate_size, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_size, intermediate_size))
        # Where other ranks hold part of the experts: what takes tokens there, and the weights that are here.
        self.dispatcher: Dispatcher | None = None
        self.here: tuple[Tensor, Tensor] | None = None


class MoE(nn.Module):
    """Each token's sum over its k likeliest experts, and a shared expert for all tokens behind a sigmoid.

    The router computes in fp32 whatever x's dtype. Weights may be wider than x, whose dtype counts.

    Args:
        top_k: experts of a token, k.
        norm_topk_prob: divide the chosen experts' probabilities by their sum.
        shared_expert: a module from [N, d] to [N, d], or None.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        norm_topk_prob: bool,
        shared_expert: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.top_k, self.norm_topk_prob = top_k, norm_topk_prob
        self.gate = nn.Linear(hidden_size, num_experts, bias=False)
        self.experts = Experts(num_experts, hidden_size, intermediate_size)
        # [E] fp32, added to the probabilities for the choice alone, see RouterBias; named as in DeepSeek-V3.
        self.e_score_correction_bias: Tensor | None
        self.register_buffer(BIAS, None)
        self.shared_expert = shared_expert
        if shared_expert is not None:
            self.shared_expert_gate = nn.Linear(hidden_size, 1, bias=False)

    def forward(
        self, x: Tensor, num_paths: Tensor, forced_experts: Tensor | None = None
    ) -> tuple[Tensor, Routing, Tensor]:
        """[N, d] in x's dtype, sums over its tokens, and the experts that these had, [N, k] int16.

        Args:
            x: [N, d].
            num_paths: [N] fp32, of paths that run through each token and are to count.
            forced_experts: [N, k] int16, experts instead of the likeliest, all different in a row, or all -1.
        """
        wide = torch.promote_types(x.dtype, torch.float32)
        logits = F.linear(x.to(wide), self.gate.weight.to(wide))
        probability = logits.softmax(-1)
        choice = probability.detach()
        if self.e_score_correction_bias is not None:
            choice = choice + self.e_score_correction_bias
        expert = choice.topk(self.top_k, dim=-1).indices
        if forced_experts is not None:
            expert = torch.where(forced_experts >= 0, forced_experts.to(expert.dtype), expert)
        weight = probability.gather(1, expert)
        if self.norm_topk_prob:
            weight = weight / weight.sum(-1, keepdim=True)
        is_chosen = torch.zeros_like(probability, dtype=torch.bool).scatter(1, expert, True)

        experts = self.experts
        gate_up, down = experts.here or (experts.gate_up_proj, experts.down_proj)
        out = expert_mlps(
            x,
            gate_up.to(x.dtype),
            down.to(x.dtype),
            expert,
            weight,
            is_chosen.sum(0),
            experts.dispatcher,
        )
        if self.shared_expert is not None:
            gate = F.linear(x, self.shared_expert_gate.weight.to(x.dtype))
            out = out + torch.sigmoid(gate) * self.shared_expert(x)

        paths = num_paths[:, None].to(wide)
        routing = Routing(
            tokens=(is_chosen & (paths > 0)).sum(0).to(wide),
            chosen=(is_chosen * paths).sum(0),
            probability=(probability * paths).sum(0),
            squared_lse=(logits.logsumexp(-1).square() * paths[:, 0]).sum(),
        )
        return out, routing, expert.to(torch.int16)

    @property
    def active_parameters(self) -> int:
        """Of the routed experts' weights those that a token is multiplied with."""
        total = sum(weight.numel() for weight in self.experts.parameters())
        return total * self.top_k // self.gate.out_features
