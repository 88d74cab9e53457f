"""titan-tree plan, memory: against real tensors of a rank, against hand-computed numbers, part by part."""

import gc
import itertools
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from tests.support.processes import process_group, run_ranks
from titan_tree.build import build_parallel_model
from titan_tree.cli.plan.activations import Kept, LayerMemory
from titan_tree.cli.plan.hardware import GIB
from titan_tree.cli.plan.memory import CONTEXT, NCCL, Load, MemoryPlan, Sharding, optimizer_bytes, plan_bytes
from titan_tree.cli.plan.workload import Pass, RankStep
from titan_tree.components.tree_attention import operator, plan
from titan_tree.config import Config, DataConfig, ModelConfig, OptimizerConfig, ParallelConfig, TrainingConfig
from titan_tree.distributed import titan
from titan_tree.distributed.optimizers import build_optimizers
from titan_tree.distributed.parallelize import parallelize
from titan_tree.models.block import LayerOutput
from titan_tree.models.registry import build_model
from titan_tree.models.tree_model import ModelOutput
from titan_tree.registry import ATTENTION_BACKENDS
from titan_tree.tree.batch import CacheRows, TreeBatch
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_tree import TokenTree

# Sizes with rows that two ranks cannot shard evenly, and with shards whose states stay in fp32.
CASES = [("qwen3_moe", {"num_experts": 7}), ("qwen3_5", {"intermediate_size": 390})]

# Qwen3-MoE "debug": two layers of 8 experts each, of which a token uses 2.
EXPERTS = 8 * 3 * 96 * 128  # parameters in one layer
REST = 128 * (4 + 2 + 2 + 4) * 32 + 2 * 32 + 2 * 128 + 8 * 128  # attention, its norms, two norms, the router
ROOT = 512 * 128 + 128

# Allocates what the kernels of attention write, and computes nothing.
SIZES = SimpleNamespace(
    is_automatic=lambda device: False,
    refusal=lambda q, v, scoring, deterministic: None,
    prepare=plan.prepare,
    attention=partial(operator.attention, "sizes"),
    forward=lambda q, *_: (torch.empty_like(q), plan.empty_lse(q)),
)


def model_of(name="qwen3_moe", **sizes):
    with torch.device("meta"):
        model = build_model(name, "debug", **sizes)
    model.compute_dtype = torch.bfloat16
    return model


def config_of(**values):
    """Returns a configuration; values are given as table__key."""
    config = Config(model=ModelConfig("qwen3_moe", "debug"), data=DataConfig(files="demo"))
    for key, value in ({"training__dtype": "bfloat16"} | values).items():
        table, _, name = key.partition("__")
        setattr(getattr(config, table), name, value)
    return config


class Layers:
    """Stands in for LayerMemory."""

    def kept(self, policy):
        return Kept({"none": 100.0, "full": 10.0}[policy], 7.0)

    def work(self, policy):
        return Kept(1000.0, 30.0)


LOAD = Load(
    chain_tokens=64,
    tokens=32,
    edges=16,
    passes=2,
    table_bytes=11,
    cached_keys=5,
    cached_states=3,
    is_partitioned=False,
)


def parts_of(load=LOAD, gpus=4, imbalance=1.0, moment=None, **values):
    """Returns the parts of memory, at a moment that is not the largest if ``moment`` is given."""
    memory = MemoryPlan(model_of(), config_of(**values), gpus, Layers())
    return memory.peak(load, imbalance)[1] if moment is None else getattr(memory, moment)(load, imbalance)


def changed(**values):
    return Load(**vars(LOAD) | values)


# ---------------------------------------------------------------- weights, states, gradients


def num_bytes(tensor):
    """Returns the bytes of this rank's shard, which may be in 8 bits."""
    tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return tensor.codes.nbytes + tensor.scale.nbytes if hasattr(tensor, "codes") else tensor.nbytes


def compare_with_tensors(rank: int, ports: list[int]) -> None:
    with process_group(rank, 2, ports[0]):
        mesh = init_device_mesh("cpu", (2,))
        for (name, sizes), optimizer in itertools.product(CASES, ("adamw", "adamw8bit")):
            config = ModelConfig(name, "debug", overrides=sizes)
            model = build_parallel_model(config, TrainingConfig(), ParallelConfig(), mesh)
            optimizers = build_optimizers(OptimizerConfig(name=optimizer), model)
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            optimizers.step()
            states = [state for each in optimizers for state in each.state.values()]
            found = (
                sum(map(num_bytes, model.parameters())),
                sum(num_bytes(parameter.grad) for parameter in model.parameters()),
                sum(num_bytes(s[key]) for s in states for key in ("exp_avg", "exp_avg_sq")),
            )
            if rank == 0:
                config = config_of(optimizer__name=optimizer, parallel__reduce_gradients="every")
                memory = MemoryPlan(model_of(name, **sizes), config, 2, Layers())
                parts = memory._at_end(LOAD, 1.0)
                expected = tuple(parts[key] for key in ("weights", "gradients", "optimizer states"))
                assert found == expected, (name, optimizer)


@pytest.mark.slow
@pytest.mark.distributed
def test_weights_gradients_and_states_match_the_tensors_of_a_rank():
    run_ranks(compare_with_tensors, 2)


@pytest.mark.parametrize("share", [1, 4])
def test_parts_that_depend_on_parameters_match_a_calculation_by_hand(share):
    layer = REST + EXPERTS // share
    sharded, whole = (ROOT + 2 * (REST + EXPERTS)) / 4, ROOT + 2 * layer
    settings = {"parallel__expert_parallel": share, "moment": "_at_end"}
    for reduce, load, gradients in (
        ("every", LOAD, sharded),
        ("last", LOAD, whole),
        ("last", changed(passes=1), sharded),  # nothing accumulates
        ("last", changed(passes=1, is_partitioned=True), whole),
    ):
        parts = parts_of(load, parallel__reduce_gradients=reduce, **settings)
        assert parts["weights"] == 4 * sharded
        assert parts["optimizer states"] == 8 * sharded
        assert parts["gradients"] == 4 * gradients
        assert parts["weights for computation"] == 2 * whole  # two layers: both are gathered
        assert parts["gradients being summed"] == 10 * ROOT
    assert parts_of(**settings | {"moment": "_at_backward"})["gradients being summed"] == 10 * layer


def test_two_layers_are_gathered_unless_weights_stay():
    memory = MemoryPlan(model_of(num_hidden_layers=5), config_of(), 4, Layers())
    assert memory._gathered(LOAD) == ROOT + 2 * (REST + EXPERTS)
    assert memory._gathered(changed(is_partitioned=True)) == ROOT + 5 * (REST + EXPERTS)
    keeps = config_of(parallel__reshard_after_forward=False)
    assert MemoryPlan(model_of(num_hidden_layers=5), keeps, 4, Layers())._gathered(LOAD) == ROOT + 5 * (
        REST + EXPERTS
    )


def test_a_single_gpu_casts_all_weights_and_sums_nothing():
    parts = parts_of(gpus=1, moment="_at_end", parallel__reduce_gradients="every")
    whole = ROOT + 2 * (REST + EXPERTS)
    assert parts["weights for computation"] == 2 * whole
    assert parts["gradients"] == 4 * whole
    assert parts["gradients being summed"] == 0
    assert parts["CUDA and NCCL"] == CONTEXT
    assert parts_of(moment="_at_end")["CUDA and NCCL"] == CONTEXT + NCCL
    assert (
        parts_of(gpus=1, moment="_at_end", training__dtype="float32")["weights for computation"] == 4 * whole
    )


def test_8_bit_states_have_a_scale_per_256_numbers_but_some_shards_stay_in_fp32():
    assert optimizer_bytes(8192, "adamw8bit") == 2 * 8192 + 2 * 4 * 32
    assert optimizer_bytes(4095, "adamw8bit") == optimizer_bytes(4095, "adamw") == 8 * 4095
    assert optimizer_bytes(8193, "adamw8bit") == 8 * 8193


def test_experts_are_sharded_along_their_rows_over_the_ranks_that_hold_the_same_ones():
    model = model_of(num_experts=6)
    names = [name for name, _ in model.named_parameters()]
    shards = dict(zip(names, Sharding(4, 2).shards(model), strict=True))
    assert shards["layers.0.mlp.experts.gate_up_proj"] == 3 * (192 // 2) * 128
    assert shards["layers.0.mlp.gate.weight"] == 2 * 128  # ceil(6 / 4) rows


# ---------------------------------------------------------------- what grows with tokens


def test_activations_follow_the_policy_of_suspended_partitions():
    for policy, expected in (("keep", 64 * 100), ("recompute", 32 * 100), ("offload", 32 * 100)):
        assert parts_of(moment="_at_loss", partition__activations=policy)["activations"] == expected
    budget = {"moment": "_at_loss", "partition__activations": "auto"}
    assert parts_of(**budget)["activations"] == 64 * 100
    assert parts_of(**budget, partition__device_gb=5e-6)["activations"] == 5000
    assert parts_of(**budget, partition__device_gb=1e-6)["activations"] == 32 * 100  # it needs a running one
    full = parts_of(moment="_at_loss", training__activation_checkpoint="full")
    assert full["activations"] == 64 * 10


def test_rows_that_arrive_for_experts_count_once_ranks_exchange_them():
    rows = 32 * 2 * (1 - 6 / 28)  # per pass: 6 of the 28 pairs of 8 experts avoid a rank's four
    parts = parts_of(parallel__expert_parallel=2, moment="_at_backward")
    assert parts["activations"] == pytest.approx(64 * 100 + 2 * rows * 7)  # the chain is twice as long
    half = 32 * 2 / 2  # of the copies, with 128 numbers each and 96 hidden units
    assert parts["rows of the exchange"] == pytest.approx(2 * (2 * rows * 128 + half * 3 * (128 + 2 * 96)))
    assert parts["backward pass of a layer"] == pytest.approx(32 * 1000 + rows * 30)
    unbalanced = parts_of(parallel__expert_parallel=2, moment="_at_backward", imbalance=1.5)
    assert unbalanced["rows of the exchange"] == pytest.approx(1.5 * parts["rows of the exchange"])
    assert unbalanced["activations"] == pytest.approx(64 * 100 + 1.5 * 2 * rows * 7)
    assert "rows of the exchange" not in parts_of(moment="_at_backward")


def test_log_probs_keep_probabilities_only_without_checkpointing_and_entropy():
    block = 8 * 16 * 512 + 4 * 16 * 128
    assert parts_of(moment="_at_loss")["log-probs"] == 2 * 16 * 512 + block
    assert parts_of(moment="_at_loss", loss__entropy=0.1)["log-probs"] == block
    assert parts_of(moment="_at_loss", training__activation_checkpoint="full")["log-probs"] == block
    many = parts_of(changed(edges=2**20), moment="_at_loss", training__activation_checkpoint="full")
    assert many["log-probs"] == GIB + 4 * 2**20 * 128


def test_the_gateway_cache_holds_rows_and_fp32_gradients():
    parts = parts_of(changed(is_partitioned=True), moment="_at_loss")
    assert parts["gateway cache"] == 5 * (2 * 2 * 2 * 32 * 2) * 3  # layers, k and v, heads, dims, bytes
    assert "gateway cache" not in parts_of(moment="_at_loss")
    hybrid = MemoryPlan(model_of("qwen3_5"), config_of(), 1, Layers())
    sizes = hybrid.model.config
    state = sizes.linear_num_value_heads * sizes.linear_key_head_dim * sizes.linear_value_head_dim * 4
    tail = (sizes.linear_conv_kernel_dim - 1) * (2 * sizes.key_dim + sizes.value_dim) * 2
    keys = 2 * sizes.num_key_value_heads * sizes.head_dim * 2
    expected = 5 * keys * 3 + 3 * 3 * (state + tail) * 2  # one attention layer and three DeltaNet layers
    assert hybrid._fixed(changed(is_partitioned=True))["gateway cache"] == expected


def test_the_attention_plan_has_the_size_of_its_two_large_tables():
    batch = TreeBatch.from_trees([TokenTree.from_paths([TokenPath([1] * 1000)])])
    tables = plan.prepare(batch.layout)
    assert plan_bytes(1000, 1000) == tables.key_blocks.nbytes + tables.pieces.nbytes


def test_the_largest_moment_counts():
    memory = MemoryPlan(model_of(), config_of(), 4, Layers())
    moments = [memory._at_loss, memory._at_backward, memory._at_end]
    sums = [sum(moment(LOAD, 1.0).values()) for moment in moments]
    assert sum(memory.peak(LOAD)[1].values()) == max(sums)
    assert memory.peak(changed(edges=2**20))[0] == "the loss"
    large_root = MemoryPlan(model_of(vocab_size=100_000), config_of(), 4, Layers())
    assert large_root.peak(changed(passes=1, edges=0))[0] == "the end of the backward pass"
    assert (
        memory.peak(changed(tokens=10**5, chain_tokens=10**5, edges=0))[0] == "the start of the backward pass"
    )


def test_gradients_of_earlier_passes_exist_at_the_loss():
    assert parts_of(moment="_at_loss")["gradients"] > 0
    assert parts_of(changed(passes=1), moment="_at_loss")["gradients"] == 0


def test_a_load_is_the_largest_of_all_steps_and_gpus():
    first = RankStep([[Pass(10, 10, 55, 9)], [Pass(4, 4, 10, 3)]], 10, CacheRows(0, 0), 20, 14, 1.0)
    second = RankStep([[Pass(6, 6, 21, 5, True), Pass(7, 13, 70, 11)]], 13, CacheRows(8, 2), 20, 13, 1.0)
    load = Load.of([[first], [second]])
    assert load == Load(13, 10, 11, 2, plan_bytes(7, 13), 8, 2, True)
    assert not Load.of([[first]]).is_partitioned


# ---------------------------------------------------------------- activations of a layer


def allocated(name, policy, num_tokens):
    """Returns the bytes that the layers of a debug model allocate and do not free, on a CPU."""
    model = build_model(name, "debug", "sizes").bfloat16()
    if policy != "none":
        wrapper = titan.FullAC if policy == "full" else titan.TreeSelectiveAC
        wrapper(wrapper.Config(preserve_rng_state=False)).apply(model)
    for layer in model.blocks:
        layer.compile(backend="aot_eager_decomp_partition", fullgraph=True, dynamic=True)
    for parameter in model.parameters():
        parameter.data.fill_(0.01)
    batch = TreeBatch.from_trees([TokenTree.from_paths([TokenPath([1] * num_tokens)])])
    layout = model.prepare(batch.layout)
    rope = model.make_rope(layout.positions)
    x = torch.zeros(num_tokens, model.config.hidden_size, dtype=torch.bfloat16, requires_grad=True)

    def forward(hidden) -> LayerOutput:
        for layer in model.blocks:
            output = layer(hidden, rope, layout)
            hidden = output.hidden
        return output

    forward(x)  # compiles
    gc.collect()
    with torch.profiler.profile(profile_memory=True) as run:
        output = forward(x)
        gc.collect()
    del output
    events = run.profiler.kineto_results.events()
    return sum(event.nbytes() for event in events if event.name() == "[memory]")


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["none", "selective", "full"])
@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_traced_layers_keep_what_layers_on_a_cpu_allocate(name, policy):
    torch._dynamo.reset()
    ATTENTION_BACKENDS.register("sizes", SIZES)
    try:
        slope = (allocated(name, policy, 1024) - allocated(name, policy, 512)) / 512
    finally:
        del ATTENTION_BACKENDS._entries["sizes"]
    kept = LayerMemory(model_of(name), torch.bfloat16).kept(policy)
    # A graph's output of the last layer counts in both; experts of tokens are kept by the model only.
    assert kept.per_token == pytest.approx(slope, rel=0.01)
    assert kept.per_row == 0


def test_layers_of_known_sizes():
    layers = LayerMemory(model_of("qwen3"), torch.bfloat16)
    assert layers.kept("full").per_token == 2 * 2 * 128  # the output of each of two layers
    assert LayerMemory(model_of("qwen3"), torch.float32).kept("full").per_token == 4 * 2 * 128
    everything, kept = layers.kept("none").per_token / 2, layers.kept("selective").per_token / 2
    assert layers.work("selective").per_token == everything - kept
    # DeltaNet's kernels keep T of each chunk, [64, 64] per head, and 7 numbers per token and head.
    hybrid = model_of("qwen3_5")
    heads = hybrid.config.linear_num_value_heads
    attention_only = LayerMemory(model_of("qwen3_5", full_attention_interval=1), torch.bfloat16)
    deltas = (
        LayerMemory(hybrid, torch.bfloat16).kept("none").per_token - attention_only.kept("none").per_token / 4
    )
    assert deltas / 3 > heads * (64 * 2 + 7 * 4)


def saved_by(model: nn.Module, batch: TreeBatch) -> tuple[list[torch.Tensor], ModelOutput]:
    """Returns the tensors that autograd saves in a forward pass, and the output."""
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        return saved, model(batch)


def compare_rows(rank: int, ports: list[int], expected: dict[str, int]) -> None:
    """Compares what autograd saves per row that arrives for this rank's experts."""
    ATTENTION_BACKENDS.register("sizes", SIZES)
    compile_module = nn.Module.compile
    options = {"backend": "aot_eager_decomp_partition", "fullgraph": True, "dynamic": True}
    with pytest.MonkeyPatch.context() as patch, process_group(rank, 2, ports[0]):
        patch.setattr(nn.Module, "compile", lambda module, **_: compile_module(module, **options))
        mesh = init_device_mesh("cpu", (2,))
        for policy, per_row in expected.items():
            torch._dynamo.reset()
            model = build_model("qwen3_moe", "debug", "sizes", num_hidden_layers=1)
            model.init_weights(0)
            settings = {"activation_checkpoint": policy, "compile": True, "expert_parallel": 2}
            parallelize(model, mesh, dtype=torch.bfloat16, **settings)
            tokens = torch.randint(500, (640,), generator=torch.Generator().manual_seed(rank)).tolist()
            batch = TreeBatch.from_trees([TokenTree.from_paths([TokenPath(tokens)])])
            saved, out = saved_by(model, batch)
            chosen = out.routed_experts[0].long()
            everywhere = [torch.empty_like(chosen) for _ in range(2)]
            dist.all_gather(everywhere, chosen)
            rows = int((torch.cat(everywhere) // 4 == rank).any(1).sum())
            assert rows != 640  # then rows and tokens have different shapes
            shapes = (rows, 128), (rows, 2)
            sizes = {x.untyped_storage()._cdata: x.nbytes for x in saved if x.shape in shapes}
            assert sum(sizes.values()) == per_row * rows, policy


@pytest.mark.slow
@pytest.mark.distributed
def test_traced_layers_keep_what_autograd_saves_per_arriving_row():
    layers = LayerMemory(model_of(num_hidden_layers=1), torch.bfloat16, 2)
    # The row and its copies; besides, the weight and the slot of each copy, and the token of each row sent.
    assert layers.kept("selective").per_row == 2 * 128 + 2 * 4 + 3 * 4
    assert layers.kept("full").per_row == 0
    run_ranks(compare_rows, 2, {"selective": 2 * 128 + 2 * 4, "full": 0})
