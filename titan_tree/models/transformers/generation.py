"""Models of transformers that share the modules of a trained model, so that ``generate`` samples from it.

``generating`` makes such a model on the meta device and replaces its modules by those that are trained. No
weight is copied, and every change shows at once: optimizer steps, the casts of ``cast_weights``, updates of
LoRA. The code of transformers runs the layers and computes masks, caches, rotary embeddings, attention and
Gated DeltaNet.

d hidden size.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from titan_tree.components.moe.layer import MoE
from titan_tree.errors import UserError, shorten
from titan_tree.models.decoder import Decoder
from titan_tree.models.gated_delta_net import GatedDeltaNet
from titan_tree.models.layers import at_least_fp32
from titan_tree.models.transformers.attention_function import NAMES
from titan_tree.models.transformers.rope import make_constant
from titan_tree.models.transformers.transformers_model import TransformersModel
from titan_tree.models.tree_model import TreeModel


def generating(model: TreeModel) -> PreTrainedModel:
    """Returns a model of transformers that computes on sequences what ``model`` computes on trees.

    It shares all modules with ``model``, and takes no memory for weights. Use it without gradients only.

    Args:
        model: a ``Decoder`` or a ``TransformersModel`` on its device, not sharded.
    Raises:
        UserError: transformers does not know the model, or lays out its weights in another way.
    """
    try:
        generator: Any = _from_decoder(model) if isinstance(model, Decoder) else _from_layers(model)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _refusal(model, " ".join(f"{type(error).__name__}: {error}".split())) from None
    if model.output_weight is None:
        generator.set_output_embeddings(_TiedHead(generator.get_input_embeddings()))
    else:
        generator.set_output_embeddings(model.lm_head)
    generator.generation_config = GenerationConfig()  # without what a snapshot's config.json may say
    shared = {id(weight) for weight in generator.parameters()}
    unused = [
        name
        for name, weight in model.named_parameters()
        if id(weight) not in shared and not name.startswith("visual.")
    ]
    tensors = (*generator.named_parameters(), *generator.named_buffers())
    if names := unused + [name for name, tensor in tensors if tensor.is_meta]:
        raise _refusal(model, f"{', '.join(names[:3])}: only one of the two has it")
    return generator


def _from_decoder(model: Decoder) -> Any:
    """Returns the model of transformers with the blocks, the embedding and the last norm of ``model``."""
    # Transformers packs the projections of some families. The family that they derive from has them as here.
    family = next(base for base in type(model).__mro__ if not getattr(base, "publishes_packed", False))
    generator = _on_meta(AutoConfig.for_model(**family.Config.to_hf(model.config)), "sdpa")  # type: ignore[attr-defined]
    base = generator.base_model
    _share(base, model, "embed_tokens", "norm")
    if hasattr(base, "rotary_emb"):
        with model.embed_tokens.weight.device:
            base.rotary_emb = type(base.rotary_emb)(generator.config)
        if model.mrope_sections and hasattr(base.rotary_emb, "mrope_section"):
            base.rotary_emb.mrope_section = model.mrope_sections
    for layer, block in zip(base.layers, model.blocks, strict=True):
        _share(layer, block, "input_layernorm", "post_attention_layernorm", "mlp")
        if isinstance(block.mlp, MoE):
            layer.mlp = _Mixture(block.mlp)
        _share_mixer(getattr(layer, block.mixer_name), block.mixer)
    return generator


def _share_mixer(mixer: Any, trained: Any) -> None:
    """Gives attention or a recurrence of transformers the modules and parameters of the trained one."""
    is_recurrent = isinstance(trained, GatedDeltaNet)
    kept_modules = {"conv1d", "norm"} if is_recurrent else set()
    _share(mixer, trained, *((trained._modules.keys() & mixer._modules.keys()) - kept_modules))
    if not is_recurrent:
        return
    # The same dicts, because ``cast_weights`` replaces their values.
    mixer._parameters, mixer.conv1d._parameters = trained._parameters, trained.conv1d._parameters
    mixer.conv1d.bias = None
    mixer.norm = _GatedNorm(trained.norm)


def _share(module: nn.Module, trained: nn.Module, *names: str) -> None:
    """Replaces modules of transformers by those of the same name in a module that is trained."""
    for name in names:
        module.get_submodule(name)  # raises AttributeError if there is none
        setattr(module, name, trained.get_submodule(name))


def _from_layers(model: TreeModel) -> Any:
    """Returns the model of transformers whose layers ``model`` has taken."""
    assert isinstance(model, TransformersModel)
    # Without a tree, the layers call transformers' own attention. "sdpa" ignores soft caps and sinks.
    scorings = [layer.call.scoring for layer in model.sizes if layer.call is not None]
    base: Any = model.base
    fits = base._supports_sdpa and all(
        scoring.softcap is None and scoring.sinks is None for scoring in scorings
    )
    attention = NAMES["sdpa" if fits else "eager"]
    base.set_attn_implementation(attention)
    if model.longest_path is not None:
        make_constant(base.rotary_emb)  # padding of rows that have ended has larger positions
    generator = _on_meta(copy.deepcopy(model.hf_config), attention)
    _share(generator.base_model, base, *(name for name, _ in base.named_children()))
    generator.base_model.layers = nn.ModuleList(block.get_submodule("layer") for block in model.layers)
    return generator


def _on_meta(config: Any, attention: str) -> Any:
    with torch.device("meta"):
        generator = AutoModelForCausalLM.from_config(
            config, attn_implementation=attention, trust_remote_code=False
        )
    return generator.eval()


class _Mixture(nn.Module):
    """Calls a ``MoE`` as transformers calls its own: from [..., d] to [..., d]."""

    def __init__(self, moe: MoE) -> None:
        super().__init__()
        self.moe = moe

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        none = tokens.new_zeros(len(tokens), dtype=torch.float32)  # no token counts in the router's sums
        out: Tensor
        out, *_ = self.moe(tokens, none)
        return out.view_as(x)


class _GatedNorm(nn.Module):
    """Calls the norm of Gated DeltaNet as transformers calls its own, with the output gate."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return (self.norm(x) * F.silu(gate.to(at_least_fp32(x)))).to(x.dtype)


class _TiedHead(nn.Module):
    """The output projection of a model whose embedding is also its output projection: from [..., d]."""

    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        self.embedding = embedding

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.embedding.get_parameter("weight"))


def _refusal(model: TreeModel, reason: str) -> UserError:
    return UserError(
        f"GenerateSampler: expected a model that transformers implements with the same weights, got "
        f"{model.family}: {shorten(reason)}; pass RLTrainer another sampler"
    )
