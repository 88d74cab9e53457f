"""torchtitan's Qwen3 and training step, for ``python -m benchmarks ranks --way torchtitan``.

The layers, the exchange of experts' rows, FSDP2, checkpointing, compilation, chunked loss, clipping and fused
AdamW are those of torchtitan 0.3.0. The step calls them as torchtitan's trainer does: gradients are reduced
after every micro-batch. What differs:

- Attention is torchtitan's module for ``scaled_dot_product_attention``, which takes cuDNN's kernels first.
  Its configurations choose FlexAttention or ``varlen_attn``, which mask documents. On Hopper, ``varlen_attn``
  needs the package of FlashAttention 3, and a torch newer than 2.11.
- Matrices are drawn from N(0, 0.02^2), as titan_tree's, and no bias balances experts, so that random routing
  is as uneven as titan_tree's.
- torch 2.11 has no FSDP unit on two meshes. There, FSDP2 ignores the experts, which all ranks share: each
  rank holds its own in fp32, and the layer casts them to bf16. The weights of the head stay gathered after
  the loss. Losses and gradients are the same.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn

from benchmarks.steps import OPTIMIZER
from titan_tree.models.decoder_config import INIT_STD
from titan_tree.models.qwen3 import Qwen3Config, Qwen3MoeConfig
from titan_tree.tree.token_tree import TokenTree

HAS_TWO_MESHES = hasattr(torch_fsdp, "DataParallelMeshDims")
if not HAS_TWO_MESHES:  # torch 2.11: torchtitan needs the names, but not what they do, for "partial_dtensor"
    vars(torch_fsdp)["DataParallelMeshDims"] = type("DataParallelMeshDims", (), {})
    torch.compiler._is_non_strict_tracing = lambda: False

from torchtitan.components.loss import IGNORE_INDEX, ChunkedLossWrapper  # noqa: E402
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig  # noqa: E402
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.distributed import ParallelDims, fsdp, parallel_dims, utils  # noqa: E402
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC  # noqa: E402
from torchtitan.models import qwen3  # noqa: E402
from torchtitan.models.common import CosSinRoPE, Embedding, Linear  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config  # noqa: E402

CHUNKS = ChunkedLossWrapper.Config().num_chunks
CHECKPOINTING: dict[str, Any] = {"none": None, "selective": SelectiveAC.Config(), "full": FullAC.Config()}
# What torchtitan sets for the whole process before it compiles experts: their numbers of rows are read by the
# host. Selective checkpointing cannot be compiled by torch 2.11 with the assertions on them.
dynamo_settings = torch._dynamo.config.patch(
    capture_scalar_outputs=True,
    skip_fwd_side_effects_in_bwd_under_checkpoint=True,
    do_not_emit_runtime_asserts=True,
)

Batch = tuple[Tensor, Tensor]  # tokens [1, N] and labels [1, N]


def prepare(trees: Sequence[TokenTree], device: torch.device) -> list[Batch]:
    """Returns a micro-batch for each chain."""
    batches = []
    for tree in trees:
        tokens = torch.from_numpy(tree.tokens).long()[None].to(device)
        labels = torch.roll(tokens, -1, 1)
        labels[:, -1] = IGNORE_INDEX
        batches.append((tokens, labels))
    return batches


@dynamo_settings
def training_step(
    sizes: Qwen3Config, args: argparse.Namespace, device: torch.device
) -> tuple[nn.Module, Callable[[list[Batch]], tuple[float, float]]]:
    """Returns torchtitan's model, and its training step: a function that returns loss and gradient norm."""
    has_experts, size = isinstance(sizes, Qwen3MoeConfig), dist.get_world_size()
    parallelism = ParallelismConfig(
        expert_parallel_degree=size if has_experts else 1, spmd_backend="partial_dtensor"
    )
    utils.set_spmd_backend(parallelism.spmd_backend)
    parallel_dims.device_type = device.type
    dims = ParallelDims.from_config(parallelism, size)
    compiling = CompileConfig(enable=args.compile)
    model = build_model(sizes, args, device, dims, parallelism, compiling)
    loss_of = ChunkedLossWrapper.Config().build(compile_config=compiling)
    loss_of.set_lm_head(model.lm_head)
    model._skip_lm_head = True
    if (
        not HAS_TWO_MESHES
    ):  # torch 2.11 would not gather the last norm, of the same unit, for its backward pass
        model.lm_head.reshard = lambda: None
    values = {"lr": OPTIMIZER.lr, "betas": tuple(OPTIMIZER.betas), "eps": OPTIMIZER.eps}
    values["weight_decay"] = OPTIMIZER.weight_decay
    patterns = ["inner_experts", ".*"] if has_experts else [".*"]  # one fused kernel updates one mesh's
    groups = [
        ParamGroupConfig(pattern=each, optimizer_name="AdamW", optimizer_kwargs=values) for each in patterns
    ]
    optimizers = OptimizersContainer.Config(param_groups=groups).build(model_parts=[model])

    @dynamo_settings
    def update(batches: list[Batch]) -> tuple[float, float]:
        num_labels = torch.tensor(sum(tokens.numel() - 1 for tokens, _ in batches), device=device)
        dist.all_reduce(num_labels)
        total = torch.zeros((), device=device)
        for tokens, labels in batches:
            loss, _ = loss_of(model(tokens), labels, num_labels)
            loss.backward()
            total += loss.detach()
        norm = utils.clip_grad_norm_(
            model.parameters(), OPTIMIZER.max_grad_norm, foreach=True, ep_enabled=dims.ep_enabled
        )
        optimizers.step()
        optimizers.zero_grad()
        dist.all_reduce(total)
        results = total.item(), norm.item()
        assert all(map(math.isfinite, results)), f"loss and gradient norm: {results}"
        return results

    return model, update


def build_model(
    sizes: Qwen3Config,
    args: argparse.Namespace,
    device: torch.device,
    dims: ParallelDims,
    parallelism: ParallelismConfig,
    compiling: CompileConfig,
) -> Any:
    """Returns the model, parallelized, with random weights."""
    config = model_config(sizes, args)
    set_qwen3_sharding_config(
        config, enable_sp=parallelism.enable_sequence_parallel, enable_ep=dims.ep_enabled
    )
    with torch.device("meta"):
        model: Any = config.build()
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    ignores_experts = dims.ep_enabled and not HAS_TWO_MESHES
    model = qwen3.parallelize_qwen3(
        model,
        parallel_dims=dims,
        training=TrainingConfig(mixed_precision_param=dtype),
        parallelism=parallelism,
        compile_config=compiling,
        ac_config=CHECKPOINTING[args.activation_checkpoint],
        dump_folder="",
        skip_dp=ignores_experts,
    )
    if ignores_experts:
        shard_all_but_experts(model, dims, getattr(torch, dtype))
    for module in model.modules():
        if isinstance(module, torch_fsdp.FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # not times 1, which gloo cannot do
    model.to_empty(device=device)
    with torch.no_grad():
        model.init_weights()
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, INIT_STD)
    return model.train()


def model_config(sizes: Qwen3Config, args: argparse.Namespace) -> qwen3.Qwen3Model.Config:
    """Returns torchtitan's configuration of a model of these sizes."""
    dim, vocabulary = sizes.hidden_size, sizes.vocab_size
    common: dict[str, Any] = {
        "n_layers": sizes.num_hidden_layers,
        "dim": dim,
        "n_heads": sizes.num_attention_heads,
        "n_kv_heads": sizes.num_key_value_heads,
        "head_dim": sizes.head_dim,
        "attn_backend": "varlen",  # replaced below
        "rope": CosSinRoPE.Config(dim=sizes.head_dim, max_seq_len=args.tokens, theta=sizes.rope_theta),
    }
    if isinstance(sizes, Qwen3MoeConfig):
        layers = qwen3._build_qwen3_moe_layers(
            **common,
            moe_hidden_dim=sizes.moe_intermediate_size,
            num_experts=sizes.num_experts,
            top_k=sizes.num_experts_per_tok,
            moe_comm_backend="standard",
        )
    else:
        layers = qwen3._build_qwen3_layers(**common, hidden_dim=sizes.intermediate_size)
    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
        if layer.moe is not None:
            layer.moe.load_balance_coeff = None
            layer.moe.router._debug_force_load_balance = args.routing == "balanced"
    tied = sizes.tie_word_embeddings
    embedding = qwen3._EMBEDDING_SKIP_INIT if tied else qwen3._EMBEDDING_INIT
    return qwen3.Qwen3Model.Config(
        vocab_size=vocabulary,
        dim=dim,
        norm=qwen3._qwen3_norm(dim),
        enable_weight_tying=tied,
        tok_embeddings=Embedding.Config(num_embeddings=vocabulary, embedding_dim=dim, param_init=embedding),
        lm_head=Linear.Config(in_features=dim, out_features=vocabulary, param_init=qwen3._LINEAR_INIT),
        layers=layers,
    )


def shard_all_but_experts(model: Any, dims: ParallelDims, dtype: torch.dtype) -> None:
    """Applies torchtitan's FSDP2 and its order of prefetching to all weights but those of experts."""
    blocks = list(model.layers.values())
    experts = {p for block in blocks for p in block.moe.routed_experts.inner_experts.parameters()}
    with mock.patch.object(fsdp, "fully_shard", partial(torch_fsdp.fully_shard, ignored_params=experts)):
        fsdp.apply_fsdp_to_decoder(model, dims.get_mesh(["fsdp"]), dtype, torch.float32, pp_enabled=False)
    for this, following in pairwise([model.tok_embeddings, *blocks]):
        this.set_modules_to_forward_prefetch([following])
    blocks[-1].set_modules_to_forward_prefetch([model.norm, model.lm_head])
    for this, following in pairwise([model.lm_head, *reversed(blocks), model.tok_embeddings]):
        this.set_modules_to_backward_prefetch([following])
