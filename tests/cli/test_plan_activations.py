"""titan-tree plan, what layers keep: against the memory and the messages of real forward passes."""

import gc
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.cli.test_plan_memory import memory_of, model_of
from tests.support.processes import process_group, run_ranks
from titan_tree.cli.plan.device import GIB
from titan_tree.cli.plan.layer_trace import LayerTrace
from titan_tree.cli.plan.memory import exchanged
from titan_tree.cli.plan.tower_trace import chunk_bytes
from titan_tree.components.backends import ATTENTION_BACKENDS
from titan_tree.components.tree_attention import block_lists, operator
from titan_tree.distributed import titan
from titan_tree.distributed.parallelize import parallelize
from titan_tree.distributed.sequence_parallel import AllToAllExchange, shard_sequence
from titan_tree.distributed.settings import ParallelConfig
from titan_tree.models import vision as vision_models
from titan_tree.models.block import LayerOutput
from titan_tree.models.decoder import Decoder
from titan_tree.models.pretrained import build_model
from titan_tree.models.tree_model import Execution, ModelOutput
from titan_tree.tree.batch import TokenShard, TreeBatch
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_tree import TokenTree

# Allocates what the kernels of attention write, and computes nothing: the output is 0.
SIZES = SimpleNamespace(
    is_automatic=lambda device: False,
    refusal=lambda *inputs: None,
    prepare=block_lists.prepare,
    attention=partial(operator.attention, "sizes"),
    forward=lambda q, *_: (torch.zeros_like(q), block_lists.empty_lse(q)),
)


def memory_events(run: Callable[[], object]) -> list[int]:
    """Returns the bytes that ``run`` allocates on a CPU, and less than 0 where it frees some, in order."""
    gc.collect()
    with torch.profiler.profile(profile_memory=True) as profile:
        result = run()
        gc.collect()
    del result
    return [e.nbytes() for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]


def kept_per_token(model: Decoder, policy: str) -> float:
    """Compiles the layers of a model, and returns the bytes that they keep for each token of this rank."""
    torch._dynamo.reset()
    if policy != "none":
        wrapper = titan.FullAC if policy == "full" else titan.TreeSelectiveAC
        wrapper(wrapper.Config(preserve_rng_state=False)).apply(model)
    for layer in model.blocks:
        layer.compile(backend="aot_eager_decomp_partition", fullgraph=True, dynamic=True)
    for parameter in model.parameters():
        parameter.data.fill_(0.01)
    return (allocated(model, 1024) - allocated(model, 512)) / 512


def allocated(model: Decoder, num_tokens: int) -> int:
    """Returns the bytes that the layers of a model allocate and do not free for this rank's tokens."""
    path = TokenPath([1] * (num_tokens * model.token_shard.num_ranks))
    batch = model.token_shard.of(TreeBatch.from_trees([TokenTree.from_paths([path])]))
    layout = model.prepare(batch.layout)
    rope = model.make_rope(layout.positions)
    x = torch.zeros(num_tokens, model.config.hidden_size, dtype=torch.bfloat16, requires_grad=True)

    def forward() -> LayerOutput:
        hidden = x
        for layer in model.blocks:
            output = layer(hidden, rope, layout)
            hidden = output.hidden
        return output

    forward()  # compiles
    return sum(memory_events(forward))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "policy"),
    [
        pytest.param("qwen3_moe", "selective", marks=pytest.mark.exhaustive),
        pytest.param("qwen3", "selective", marks=pytest.mark.exhaustive),
        pytest.param("qwen3", "none", marks=pytest.mark.exhaustive),
        ("qwen3", "full"),
        pytest.param("qwen3_moe", "none", marks=pytest.mark.exhaustive),
        pytest.param("qwen3_moe", "full", marks=pytest.mark.exhaustive),
    ],
)
def test_traced_layers_keep_what_layers_on_a_cpu_allocate(name, policy):
    ATTENTION_BACKENDS.register("sizes", SIZES)
    try:
        per_token = kept_per_token(build_model(name, "debug", "sizes").bfloat16(), policy)
    finally:
        del ATTENTION_BACKENDS._entries["sizes"]
    kept = LayerTrace(model_of(name)).kept(policy, ParallelConfig())
    # A graph's output of the last layer counts in both; experts of tokens are kept by the model only.
    assert kept.per_token == pytest.approx(per_token, rel=0.01)
    assert kept.per_row == 0


ONE_KEY_HEAD = {"num_key_value_heads": 1}  # of which both ranks hold a copy


def compare_shares(rank: int, ports: list[int], expected: dict[str, float]) -> None:
    """Compares what two ranks keep, send and need for their exchanges with what is computed."""
    ATTENTION_BACKENDS.register("sizes", SIZES)
    with process_group(rank, 2, ports[0]):
        group = dist.group.WORLD
        assert group is not None
        model = build_model("qwen3", "debug", "sizes", **ONE_KEY_HEAD).bfloat16()
        share_sequence(model, group)
        for name in ("qwen3", "qwen3_5"):
            compare_exchange(build_model(name, "debug", **ONE_KEY_HEAD).bfloat16(), group)
        with pytest.MonkeyPatch.context() as patch:  # gloo frees buffers in threads that are not profiled
            patch.setattr(dist, "all_to_all_single", lambda out, x, *_, **__: out.zero_())
            compare_peak(group)
            policy = list(expected)[rank]
            assert kept_per_token(model, policy) == pytest.approx(expected[policy], rel=0.01), policy


def share_sequence(model: Decoder, group: dist.ProcessGroup) -> None:
    model.execution = Execution(sequence_group=group)
    shard_sequence(model, group)


def compare_exchange(model: Decoder, group: dist.ProcessGroup) -> None:
    """Compares the numbers that all_to_all gets in a forward and a backward pass."""
    share_sequence(model, group)
    model.init_weights(0)
    sent: list[int] = []
    exchange = dist.all_to_all_single

    def counted(out: torch.Tensor, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(x.numel())
        return exchange(out, x, *args, **kwargs)

    batch = model.token_shard.of(TreeBatch.from_trees([TokenTree.from_paths([TokenPath([1] * 64)])]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", counted)
        model(batch).logprobs.sum().backward()
    per_layer = [exchanged(block.mixer, 2) for block in model.blocks]
    assert sum(sent) == 2 * 32 * sum(sum(to_heads) + out for to_heads, out in per_layer)
    assert len(sent) == 2 * sum(len(to_heads) + 1 for to_heads, _ in per_layer)


def compare_peak(group: dist.ProcessGroup) -> None:
    """Compares the memory that the exchange of a layer needs in its backward pass, besides its input."""
    tokens = 4096
    tensors = [torch.zeros(tokens, n, 32, dtype=torch.bfloat16, requires_grad=True) for n in (4, 2, 2)]
    results = AllToAllExchange(group.group_name, TokenShard(group.rank(), 2)).to_heads(tensors, 2 * tokens)
    gradients = list(map(torch.ones_like, results))
    peak = max(accumulate(memory_events(lambda: torch.autograd.grad(results, tensors, gradients))))
    computed = memory_of(model_of("qwen3"), 2, parallel__sequence_parallel=2).head_exchange()
    assert peak == pytest.approx(2 * tokens * computed, rel=0.1)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_ranks_that_share_tokens_keep_and_exchange_what_is_computed():
    layers, shared = LayerTrace(model_of("qwen3", **ONE_KEY_HEAD)), ParallelConfig(sequence_parallel=2)
    kept = {policy: layers.kept(policy, shared).per_token for policy in ("none", "selective")}  # one per rank
    alone = layers.kept("none", ParallelConfig()).per_token
    assert kept["none"] > alone  # the exchange keeps both copies of the key head
    run_ranks(compare_shares, 2, kept)


@pytest.mark.exhaustive
def test_layers_of_known_sizes():
    def kept(model, policy):
        return LayerTrace(model).kept(policy, ParallelConfig()).per_token

    wide = model_of("qwen3")
    wide.execution = Execution(torch.float32)
    assert kept(model_of("qwen3"), "full") == 2 * 2 * 128  # the output of each of two layers
    assert kept(wide, "full") == 4 * 2 * 128
    difference = (kept(model_of("qwen3"), "none") - kept(model_of("qwen3"), "selective")) / 2
    assert LayerTrace(model_of("qwen3")).recomputed("selective", ParallelConfig()).per_token == difference
    # DeltaNet's kernels keep T of each chunk, [64, 64] per head, and 7 numbers per token and head.
    hybrid = model_of("qwen3_5")
    heads = hybrid.config.linear_num_value_heads
    attention_only = model_of("qwen3_5", full_attention_interval=1)
    deltas = kept(hybrid, "none") - kept(attention_only, "none") / 4
    assert deltas / 3 > heads * (64 * 2 + 7 * 4)


def saved_by(model: nn.Module, batch: TreeBatch) -> tuple[list[torch.Tensor], ModelOutput]:
    """Returns the tensors that autograd saves in a forward pass, and the output."""
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        return saved, model(batch)


def compare_rows(rank: int, ports: list[int], expected: dict[str, tuple[int, int]]) -> None:
    """Compares what autograd saves per row, and per copy, that arrives for this rank's experts."""
    ATTENTION_BACKENDS.register("sizes", SIZES)
    compile_module = nn.Module.compile
    options = {"backend": "aot_eager_decomp_partition", "fullgraph": True, "dynamic": True}
    with pytest.MonkeyPatch.context() as patch, process_group(rank, 2, ports[0]):
        patch.setattr(nn.Module, "compile", lambda module, **_: compile_module(module, **options))
        mesh = init_device_mesh("cpu", (2,))
        for policy, per_arrival in expected.items():
            torch._dynamo.reset()
            model = build_model("qwen3_moe", "debug", "sizes", num_hidden_layers=1)
            model.init_weights(0)
            settings = {"activation_checkpoint": policy, "compile": True, "expert_parallel": 2}
            parallelize(model, mesh, dtype=torch.bfloat16, **settings)
            tokens = torch.randint(
                500, (640 + 16 * rank,), generator=torch.Generator().manual_seed(rank)
            ).tolist()
            batch = TreeBatch.from_trees([TokenTree.from_paths([TokenPath(tokens)])])
            saved, out = saved_by(model, batch)
            chosen = out.routed_experts[0].long()
            everywhere: list[Any] = [None, None]
            dist.all_gather_object(everywhere, chosen)
            numbers = rows, copies = 1296 - len(tokens), int((torch.cat(everywhere) // 4 == rank).sum())
            shapes = ((rows, 128), (rows, 2)), ((copies, 1), (copies, 2 * 96))
            for number, per_one, those in zip(numbers, per_arrival, shapes, strict=True):
                sizes = {x.untyped_storage()._cdata: x.nbytes for x in saved if x.shape in those}
                assert sum(sizes.values()) == per_one * number, policy


@pytest.mark.slow
@pytest.mark.exhaustive
def test_traced_layers_keep_what_autograd_saves_per_arriving_row():
    layers, shared = LayerTrace(model_of(num_hidden_layers=1)), ParallelConfig(expert_parallel=2)
    # The row, and the number of each of its copies; the weight of each copy, and without checkpointing its
    # gate and its up-projection.
    expected = {
        "selective": (2 * 128 + 2 * 4, 4),
        "none": (2 * 128 + 2 * 4, 4 + 2 * 2 * 96),
        "full": (0, 0),
    }
    for policy, numbers in expected.items():
        assert layers.kept(policy, shared)[1:] == numbers, policy
    run_ranks(compare_rows, 2, expected)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5"])
@pytest.mark.parametrize("vision", ["train", "frozen"])
def test_an_image_needs_what_the_tower_allocates_on_a_cpu(name, vision, monkeypatch):
    """A trained tower runs it a second time, and backward."""
    sizes = {"hidden_size": 128, "intermediate_size": 512, "depth": 4, "deepstack_visual_indexes": [0, 2]}
    monkeypatch.setattr(vision_models, "DEBUG_TOWER", vision_models.DEBUG_TOWER | sizes)
    tower = build_model(name, "debug", vision=vision).visual.bfloat16()
    images = (160, 224), (64, 96)
    pixels = [torch.zeros(*image, 3, dtype=torch.uint8) for image in images]
    for weight in tower.parameters():
        weight.grad = torch.zeros_like(weight) if weight.requires_grad else None

    def run():
        with torch.set_grad_enabled(vision == "train"):
            rows = tower(pixels)
        if vision == "train":
            torch.autograd.backward(rows, list(map(torch.ones_like, rows)))

    with torch.backends.mkldnn.flags(enabled=False):  # on some CPUs, it copies weights to lay them out anew
        run()
        peak = max(accumulate(memory_events(run)))
    assert chunk_bytes(tower, images, torch.bfloat16) == pytest.approx(peak, rel=0.04)


@pytest.mark.slow
def test_the_page_has_the_memory_of_a_screenshot(monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "memory.md").read_text()
    sizes = {"hidden_size": 1152, "intermediate_size": 4304, "depth": 27, "num_heads": 16}
    sizes |= {"num_position_embeddings": 2304, "deepstack_visual_indexes": [8, 16, 24]}
    monkeypatch.setattr(vision_models, "DEBUG_TOWER", vision_models.DEBUG_TOWER | sizes)
    found = []
    for vision in ("train", "frozen"):
        with torch.device("meta"):
            tower = build_model("qwen3", "debug", vision=vision).visual
        found.append(chunk_bytes(tower, [(1088, 1920)], torch.bfloat16) / GIB)
    sentence = (
        f"`plan` computes {found[0]:.1f} GiB for 1920 x 1080 pixels and {found[1]:.1f} GiB for a frozen tower"
    )
    assert sentence in " ".join(page.split())
