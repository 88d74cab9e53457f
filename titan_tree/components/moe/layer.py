"""MoE: the layer with a router, routed experts and a shared expert. ExpertInfo: all mixtures of a model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from titan_tree.components.lora import factors
from titan_tree.components.moe.experts import Dispatcher, ExpertWeight, expert_mlps
from titan_tree.components.moe.kernels import router_logits, top_k
from titan_tree.components.moe.routing import Routing
from titan_tree.errors import UserError
from titan_tree.tree.paths import ExpertSizes

BIAS = "e_score_correction_bias"


class Experts(nn.Module):
    """The weights of E SwiGLU networks without biases, by Hugging Face's names.

    Attributes:
        dispatcher: computes the experts together with the ranks that hold them; None without expert
            parallelism.
        local: parameters of this rank's experts as plain tensors, by name; None without expert parallelism.
    """

    def __init__(self, num_experts: int, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        # For each expert the rows of its gate projection, then those of its up-projection.
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * intermediate_size, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_size, intermediate_size))
        self.dispatcher: Dispatcher | None = None
        self.local: dict[str, Tensor] | None = None

    def weight(self, name: str, dtype: torch.dtype) -> ExpertWeight:
        """Returns the weight ``name`` with its update, if LoRA has added one."""
        base = getattr(self, name) if self.local is None else self.local[name]
        update = factors(self, name, dtype, self.local)
        return ExpertWeight(base.to(dtype), *(update or ()))


class MoE(nn.Module):
    """Sums the outputs of each token's k most probable experts, and of an optional shared expert.

    The router computes in fp32, or wider if x is. The experts compute in x's dtype, and their weights may
    have more precision. The shared expert serves all tokens.

    Args:
        hidden_size: d.
        intermediate_size: m.
        num_experts: E.
        top_k: k.
        norm_topk_prob: divide the chosen experts' probabilities by their sum.
        shared_expert: a module from [N, d] to [N, d] whose output a sigmoid gate scales, or None.
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
        # [E] fp32, added to the probabilities for the choice only (RouterBias). DeepSeek-V3 uses this name.
        self.e_score_correction_bias: Tensor | None
        self.register_buffer(BIAS, None)
        self.shared_expert = shared_expert
        if shared_expert is not None:
            self.shared_expert_gate = nn.Linear(hidden_size, 1, bias=False)

    def forward(
        self, x: Tensor, num_paths: Tensor, forced_experts: Tensor | None = None
    ) -> tuple[Tensor, Routing, Tensor]:
        """Routes N tokens to their experts and sums the outputs.

        Args:
            x: [N, d].
            num_paths: [N] fp32, the number of paths through each token that count in ``Routing``.
            forced_experts: [N, k] int16, experts to use instead of the most probable ones. A row has k
                different experts, or only -1 to let the router choose.

        Returns:
            The sums [N, d] in x's dtype, the routing of the N tokens, and the experts of each, [N, k] int16.
        """
        wide = torch.promote_types(x.dtype, torch.float32)
        logits = router_logits(x, self.gate.weight)
        probability = logits.softmax(-1)
        choice = probability.detach()
        if self.e_score_correction_bias is not None:
            choice = choice + self.e_score_correction_bias
        expert = top_k(choice, self.top_k)
        if forced_experts is not None:
            expert = torch.where(forced_experts >= 0, forced_experts.to(expert.dtype), expert)
        is_chosen = torch.zeros_like(probability, dtype=torch.bool).scatter(1, expert, True)
        if self.norm_topk_prob:  # a softmax over the chosen, because all their probabilities may underflow
            weight = logits.gather(1, expert).softmax(-1)
        else:
            weight = probability.gather(1, expert)
        paths = num_paths[:, None].to(wide)
        routing = Routing(
            tokens=(is_chosen & (paths > 0)).sum(0).to(wide),
            chosen=(is_chosen * paths).sum(0),
            probability=(probability * paths).sum(0),
            squared_lse=(logits.logsumexp(-1).square() * paths[:, 0]).sum(),
        )
        shared = None
        if self.shared_expert is not None:
            gate = F.linear(x, self.shared_expert_gate.weight.to(x.dtype))
            shared = torch.sigmoid(gate) * self.shared_expert(x)

        gate_up, down = (self.experts.weight(name, x.dtype) for name in ("gate_up_proj", "down_proj"))
        dispatcher = self.experts.dispatcher
        if dispatcher is None:
            out = expert_mlps(x, gate_up, down, expert, weight, is_chosen.sum(0))
        else:
            out = dispatcher(x, gate_up, down, expert, weight)
        out = out if shared is None else out + shared
        return out, routing, expert.to(torch.int16)

    @property
    def active_parameters(self) -> int:
        """Number of parameters in the k routed experts of one token."""
        total = sum(weight.numel() for weight in self.experts.parameters())
        return total * self.top_k // self.gate.out_features


class ExpertInfo:
    """The mixtures of experts in one model. ``Decoder.experts`` is None for a dense model.

    Args:
        layers: the mixture of experts of each layer of the model, or None for a dense layer; at least one
            layer has experts.
    Attributes:
        sizes: L, k and E.
        group: the ranks that shard each layer's experts and exchange tokens in every forward and backward
            pass. None: each rank has all experts. Set by distributed/experts/expert_parallel.py.
    """

    def __init__(self, layers: Sequence[MoE | None]) -> None:
        self._layers = list(layers)
        self._mixtures = {f"layers.{i}.mlp": moe for i, moe in enumerate(layers) if moe is not None}
        first = next(iter(self._mixtures.values()))
        self.sizes = ExpertSizes(len(self._mixtures), first.top_k, first.gate.out_features)
        self.group: ProcessGroup | None = None

    def by_layer(self, routed_experts: Tensor) -> list[Tensor | None]:
        """Splits recorded experts [L, N, k] into [N, k] per layer of the model, None for dense layers.

        Raises:
            UserError: L or k is not this model's.
        """
        num_layers, _, top_k = routed_experts.shape
        if (num_layers, top_k) != self.sizes[:2]:
            raise UserError(
                f"routed_experts: expected {self.sizes.num_layers} layers with experts and "
                f"{self.sizes.top_k} experts per token, as the model has, got {num_layers} and {top_k}; were "
                "they recorded with another model?"
            )
        recorded = iter(routed_experts.unbind())
        return [None if moe is None else next(recorded) for moe in self._layers]

    def router_biases(self) -> dict[str, Tensor]:
        """Returns the routers' biases, [E] fp32 per layer, by their names in ``state_dict``.

        They are the model's own tensors: changing them in place changes the model. Empty before
        ``add_router_biases``.
        """
        biases = {f"{name}.{BIAS}": moe.e_score_correction_bias for name, moe in self._mixtures.items()}
        return {name: bias for name, bias in biases.items() if bias is not None}

    def add_router_biases(self) -> None:
        """Gives every router without a bias a zero bias, [E] fp32, on the device of its weights."""
        for moe in self._mixtures.values():
            if moe.e_score_correction_bias is None:
                weight = moe.gate.weight
                moe.e_score_correction_bias = torch.zeros(moe.gate.out_features, device=weight.device)

    @property
    def active_parameters(self) -> int:
        """Parameters of routed experts that one token is multiplied with, summed over layers."""
        return sum(moe.active_parameters for moe in self._mixtures.values())
