"""ExpertInfo: everything about a model's mixtures of experts that code outside the layers needs.

L layers with experts, N tokens, E experts to choose from, k experts of a token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from titan_tree.components.moe import BIAS, MoE
from titan_tree.errors import UserError
from titan_tree.tree.paths import ExpertSizes


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
