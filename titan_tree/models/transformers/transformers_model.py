"""TransformersModel: a causal language model of transformers with the contract of titan_tree's own models."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from titan_tree.components.recurrence import prepare_conv
from titan_tree.errors import UserError
from titan_tree.models.block import LayerOutput
from titan_tree.models.transformers.attention_function import NAME, arguments
from titan_tree.models.transformers.blocks import (
    LayerCall,
    LayerPass,
    LayerSizes,
    Survey,
    TransformersBlock,
)
from titan_tree.models.transformers.mixers import Kind, conv_width, kind_of, recurrent_mixer
from titan_tree.models.transformers.rope import constant, longest_path
from titan_tree.models.transformers.support import check_supported, check_windows, logit_cap, logit_scale
from titan_tree.models.tree_model import TreeModel, matrix_flops, with_images
from titan_tree.models.vision import tower_class
from titan_tree.tree.batch import TreeBatch
from titan_tree.tree.layout import TreeLayout

LAST_NORMS = "norm", "embedding_norm", "norm_f"  # names of the norm after the last layer


@dataclass(frozen=True, kw_only=True)
class TransformersConfig:
    """The sizes of a model that titan_tree reads."""

    family: str  # transformers' model_type
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    max_position_embeddings: int

    @property
    def title(self) -> str:
        """Name of the architecture in messages."""
        return self.family


class TransformersModel(TreeModel):
    """A causal language model of transformers that runs on a ``TreeBatch``.

    Its layers stay what they are. Mixtures of experts choose experts as transformers implements it; losses
    and biases of routers, replay and expert parallelism need a ``Decoder``.

    Args:
        model: a supported model, on any device, also "meta". It becomes part of this one, and can no longer
            be used by itself.
        attention: backend of ``TreeAttention``.
        recurrence: backend of ``TreeGDN``, ``TreeKDA`` and ``TreeSSD``.
    Attributes:
        hf_config: the config of transformers.
    Raises:
        UserError: the model cannot run on trees, or a named ``recurrence`` backend for a model without Gated
            DeltaNet.
    """

    quantization: Collection[str] = ()  # methods of quantization that the layers may have

    def __init__(self, model: PreTrainedModel, attention: str = "auto", recurrence: str = "auto") -> None:
        text = model.config.get_text_config()
        where = getattr(model.config, "name_or_path", "") or "model"
        check_supported(model.config, where, self.quantization)
        sizes = {name: getattr(text, name) for name in ("vocab_size", "hidden_size", "num_hidden_layers")}
        base: Any = getattr(model.base_model, "language_model", model.base_model)
        limit = longest_path(text, where) if hasattr(base, "rotary_emb") else None
        positions = min(text.max_position_embeddings, limit or math.inf)
        super().__init__(
            TransformersConfig(family=text.model_type, max_position_embeddings=positions, **sizes), attention
        )
        self.hf_config, self.longest_path = model.config, limit
        model.set_attn_implementation(NAME)
        self.base = base
        self.visual, self.image_token_id = self._tower(model), getattr(model.config, "image_token_id", None)
        mixers = [mixer for layer in base.layers if (mixer := recurrent_mixer(layer)) is not None]
        self.kind: Kind | None = kind_of(mixers[0]) if mixers else None  # of all mixers of the model
        self.conv_width = conv_width(mixers[0]) if mixers else 0
        kernel = None if self.kind is None else self.kind.kernel
        self.recurrence = None if kernel is None else kernel(recurrence)
        if recurrence != "auto" and kernel is None:
            raise UserError(
                f"recurrence: expected backend 'auto' for a {text.model_type} model, which has no recurrent "
                f"layers, got {recurrence!r}"
            )
        self._take_layers(base)
        head = model.get_output_embeddings()
        if getattr(head, "bias", None) is not None:
            raise UserError(f"model: {text.model_type}: an output projection with a bias is not supported")
        self.lm_head = None if head.weight is base.get_input_embeddings().weight else head
        self.logit_scale, self.logit_cap = logit_scale(text), logit_cap(text)
        self.sizes = self._survey()
        windows = [layer.call.scoring.window if layer.call else None for layer in self.sizes]
        check_windows(text, windows)
        self.windows = list(dict.fromkeys(windows))
        rows = [layer.rows for layer in self.sizes]
        self.cache_streams = [each.stream for each in chain(*rows)]
        self.first_rows = list(accumulate(map(len, rows), initial=0))  # of each layer, in the list before
        self.num_recurrent_layers = sum(each.is_wide for each in chain(*rows))

    def prepare(self, layout: TreeLayout) -> TreeLayout:
        layout = super().prepare(layout)
        if not self.conv_width:
            return layout
        return dataclasses.replace(layout, conv_index=prepare_conv(layout, self.conv_width))

    def _take_layers(self, base: Any) -> None:
        """Makes blocks of the layers of ``base``, which then runs these blocks."""
        blocks = [TransformersBlock(layer, self.attention, self.recurrence) for layer in base.layers]
        self.layers = nn.ModuleList(blocks)
        del base.layers
        base.layers = [LayerCall(self.layers, i) for i in range(len(blocks))]

    def _tower(self, model: PreTrainedModel) -> Any:
        """Returns the tower, whose ``forward`` then maps images to features; None: the model has none."""
        if (tower := getattr(model.base_model, "visual", None)) is not None:
            tower.__class__ = tower_class(type(tower))
        return tower

    def _survey(self, survey: Survey | None = None) -> list[LayerSizes]:
        survey = survey or Survey()
        with torch.no_grad():
            two = torch.zeros(2, dtype=torch.int64, device=self.embedding_weight.device)
            self._run({"input_ids": two[None]}, two, survey)
        return survey.sizes

    def run_layers(
        self,
        batch: TreeBatch,
        layout: TreeLayout,
        gateway: Sequence[Tensor],
        embedding: Tensor,
        features: Sequence[Tensor] = (),
    ) -> LayerOutput:
        tokens, added = {"input_ids": batch.tokens[None]}, list[Tensor]()
        if features:
            x = self.base.get_input_embeddings()(batch.tokens)
            x, added = with_images(x, batch.image_row, features)
            tokens = {"inputs_embeds": x[None]}
        positions = layout.positions
        if positions.ndim == 2:  # layers read only the rotary embedding
            layout = dataclasses.replace(layout, positions=positions[0])
        current = self._new_pass(layout, gateway)
        current.added = added
        hidden = self._run(tokens, positions, current).to(embedding.dtype)
        return LayerOutput(hidden * self.logit_scale if self.logit_scale != 1 else hidden, current.exports)

    def _new_pass(self, layout: TreeLayout, rows: Sequence[Tensor]) -> Any:
        """Returns what layers get as the argument ``KEYWORD``."""
        return LayerPass(layout, rows, self.first_rows)

    def _run(self, tokens: Mapping[str, Tensor], positions: Tensor, current: Any) -> Tensor:
        """Returns the hidden states [N, d] after the last norm, of ids [1, N] or embeddings [1, N, d]."""
        with nullcontext() if self.longest_path is None else constant(self.base.rotary_emb):
            out = self.base(**tokens, **arguments(positions, current))
        return out.last_hidden_state[0]

    def empty_rows(self, x: Tensor) -> list[Tensor]:
        return [rows.empty(x) for layer in self.sizes for rows in layer.rows]

    def layer_flops(self, num_tokens: int, num_visible_pairs: int) -> int:
        """Returns the operations as defined by ``TreeModel``. Windows count all pairs."""
        flops = matrix_flops(p for p in self.layers.parameters() if p.ndim == 2)
        for name, experts in self.layers.named_parameters():
            if experts.ndim != 3 or ".experts." not in name:  # one matrix per expert
                continue
            # Gemma 4 has a name of its own for it.
            text = self.hf_config.get_text_config()
            used = getattr(text, "top_k_experts", None) or text.num_experts_per_tok
            flops += matrix_flops([experts]) // len(experts) * used
        if self.kind is not None:
            states = (rows.shape for layer in self.sizes for rows in layer.rows if rows.is_wide)
            flops += self.kind.flops * sum(map(math.prod, states))
        calls = [layer.call for layer in self.sizes if layer.call is not None]
        return flops * num_tokens + num_visible_pairs * sum(
            6 * call.num_heads * sum(call.head_dims) for call in calls
        )

    @property
    def family(self) -> str:
        return f"transformers/{self.config.family}"

    @property
    def last_norm(self) -> nn.Module:
        base: Any = self.base
        return next(getattr(base, name) for name in LAST_NORMS if hasattr(base, name))

    @property
    def embedding_weight(self) -> Tensor:
        base: Any = self.base
        return base.get_input_embeddings().weight

    @property
    def output_weight(self) -> Tensor | None:
        return None if self.lm_head is None else self.lm_head.weight
