"""A model of your own that runs on token trees: one layer of attention, one of Gated DeltaNet.

It calls ``tree`` wherever tokens mix. ``Sequence`` computes the same for one sequence, in plain PyTorch.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

D, H = 32, 2  # hidden size, heads
K = D // H  # head dim


class Sequence:
    """Replaces ``tree`` for one sequence. Arguments and results: see ``titan_tree.models.plain.TreePass``."""

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1)

    def conv(self, x: Tensor, weight: Tensor) -> Tensor:
        padded = F.pad(x.T, (weight.shape[1] - 1, 0))
        return F.silu(F.conv1d(padded, weight[:, None], groups=len(weight))).T

    def recurrence(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None = None) -> Tensor:
        if beta is not None:
            q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
            q = q * q.shape[-1] ** -0.5
        decay = g.exp().view(*v.shape[:2], -1, 1)  # one per head, or one per channel of the keys
        state, out = v.new_zeros(v.shape[1], k.shape[2], v.shape[2]), []
        for t in range(len(v)):
            state, update = decay[t] * state, v[t]
            if beta is not None:
                update = beta[t][:, None] * (update - torch.einsum("hkv,hk->hv", state, k[t]))
            state = state + torch.einsum("hk,hv->hkv", k[t], update)
            out.append(torch.einsum("hkv,hk->hv", state, q[t]))
        return torch.stack(out)


class OwnModel(nn.Module):
    """Has what ``PlainModel`` needs: ``hidden_states`` and ``output_weight``."""

    def __init__(self, vocab_size: int = 61, max_positions: int = 64) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab_size, D), nn.Embedding(max_positions, D)
        self.qkv, self.mix = nn.Linear(D, 3 * D), nn.Linear(D, 3 * D)
        self.conv = nn.Parameter(torch.randn(3 * D, 4) / 2)
        self.gates = nn.Linear(D, 2 * H)
        self.norms = nn.ModuleList(nn.RMSNorm(D) for _ in range(3))
        self.head = nn.Linear(D, vocab_size, bias=False)

    @property
    def output_weight(self) -> Tensor:
        return self.head.weight

    def hidden_states(self, tokens: Tensor, positions: Tensor, tree) -> Tensor:
        """Returns the hidden states [N, D] of N tokens. ``tree`` mixes each token with its ancestors."""
        x = self.tokens(tokens) + self.positions(positions)
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, H, K)).unbind(1)
        x = x + tree.attention(q, k, v).flatten(1)
        y = self.norms[1](x)
        q, k, v = tree.conv(self.mix(y), self.conv).unflatten(-1, (3, H, K)).unbind(1)
        g, beta = self.gates(y).chunk(2, dim=-1)
        x = x + tree.recurrence(q, k, v, -F.softplus(g), beta.sigmoid()).flatten(1)
        return self.norms[2](x)

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns the logits of one sequence, without titan_tree."""
        positions = torch.arange(len(tokens), device=tokens.device)
        return self.head(self.hidden_states(tokens, positions, Sequence()))
