"""titan-tree plan, memory: against real tensors of a rank, against hand-computed numbers, part by part."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from tests.support.processes import process_group, run_ranks
from titan_tree.cli.plan.layer_trace import Kept
from titan_tree.cli.plan.memory import CONTEXT, GIB, NCCL, MemoryPlan
from titan_tree.cli.plan.tower_trace import chunk_bytes
from titan_tree.cli.plan.workload import OwnerSizes, PassSizes
from titan_tree.components.tree_attention import block_lists
from titan_tree.components.tree_partitioner.partitioner import TreePartitioner
from titan_tree.data.settings import DataConfig
from titan_tree.distributed.optimizers import build_optimizers
from titan_tree.distributed.parallelize import shard_sizes
from titan_tree.distributed.settings import OPTIMIZERS, OptimizerConfig, ParallelConfig
from titan_tree.engine import partitions
from titan_tree.engine.activations import Activations
from titan_tree.engine.step_io import NO_COUNTS
from titan_tree.models.pretrained import build_model
from titan_tree.models.settings import ModelConfig
from titan_tree.models.tree_model import Execution
from titan_tree.run.config import Config
from titan_tree.run.model_setup import build_parallel_model
from titan_tree.run.settings import TrainingConfig
from titan_tree.tree.batch import TreeBatch
from titan_tree.tree.gateway import CacheRows
from titan_tree.tree.images import Image
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_tree import TokenTree

# Sizes with rows that two ranks cannot shard evenly, and with shards whose states stay in fp32.
CASES = [
    ("qwen3_moe", {"num_experts": 7}),
    ("qwen3_5", {"intermediate_size": 390}),
    ("qwen3_5", {"vision": "train"}),
    ("qwen3", {"vision": "frozen"}),
]
OPTIMIZERS_AND_REPLICAS = [("adamw", 2), ("adamw8bit", 1)]

# Qwen3-MoE "debug": two layers of 8 experts each, of which a token uses 2.
EXPERTS = 8 * 3 * 96 * 128  # parameters in one layer
REST = 128 * (4 + 2 + 2 + 4) * 32 + 2 * 32 + 2 * 128 + 8 * 128  # attention, its norms, two norms, the router
ROOT = 512 * 128 + 128


def model_of(name="qwen3_moe", **sizes):
    with torch.device("meta"):
        model = build_model(name, "debug", **sizes)
    model.execution = Execution(torch.bfloat16)
    return model


def config_of(**values):
    """Returns a configuration; values are given as table__key."""
    config = Config(model=ModelConfig(name="qwen3_moe", flavor="debug"), data=DataConfig(files="demo"))
    for key, value in ({"training__dtype": "bfloat16"} | values).items():
        table, _, name = key.partition("__")
        setattr(getattr(config, table), name, value)
    return config


class Layers:
    """Stands in for LayerTrace."""

    def kept(self, policy, parallel):
        return Kept({"none": 100.0, "full": 10.0}[policy], 7.0)

    def recomputed(self, policy, parallel):
        return Kept(1000.0, 30.0)


MOMENTS = {
    "loss": "the loss",
    "last": "the backward pass of the last layer",
    "first": "the backward pass of the first layer",
    "end": "the end of the backward pass",
}


def steps_of(chain_tokens=64, tokens=32, edges=16, passes=2, is_partitioned=False):
    """Returns a step with equal forward passes."""
    cache = CacheRows(5, 3) if is_partitioned else CacheRows(0, 0)
    runs = [PassSizes(tokens=tokens, keys=tokens, edges=edges, cache=cache)] * passes
    return [[OwnerSizes([runs] if is_partitioned else [[run] for run in runs], chain_tokens, NO_COUNTS)]]


def memory_of(model=None, gpus=4, steps=None, **values):
    return MemoryPlan(model or model_of(), config_of(**values), gpus, Layers(), steps or steps_of())


def parts_of(moment, steps=None, gpus=4, imbalance=1.0, model=None, **values):
    """Returns the parts of memory at a moment, see ``MOMENTS``."""
    return memory_of(model, gpus, steps, **values).moments(imbalance)[MOMENTS[moment]]


# ---------------------------------------------------------------- weights, states, gradients


def num_bytes(tensor):
    """Returns the bytes of this rank's shard, which may be in 8 bits."""
    tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return tensor.codes.nbytes + tensor.scale.nbytes if hasattr(tensor, "codes") else tensor.nbytes


def compare_with_tensors(rank: int, ports: list[int]) -> None:
    with process_group(rank, 2, ports[0]):
        mesh = init_device_mesh("cpu", (2,))
        for (name, sizes), (optimizer, replicas) in itertools.product(CASES, OPTIMIZERS_AND_REPLICAS):
            overrides = {key: size for key, size in sizes.items() if key != "vision"}
            vision = sizes.get("vision", "off")
            config = ModelConfig(name=name, flavor="debug", overrides=overrides, vision=vision)
            parallel = ParallelConfig(replicate=replicas)
            model = build_parallel_model(config, TrainingConfig(), parallel, mesh)
            optimizers = build_optimizers(OptimizerConfig(name=optimizer), model)
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            for parameter in trained:
                parameter.grad = torch.zeros_like(parameter)
            optimizers.step()
            states = [state for each in optimizers for state in each.state.values()]
            found = (
                sum(map(num_bytes, model.parameters())),
                sum(num_bytes(parameter.grad) for parameter in trained),
                sum(num_bytes(s[key]) for s in states for key in ("exp_avg", "exp_avg_sq")),
            )
            if rank == 0:
                settings = {"parallel__reduce_gradients": "every", "parallel__replicate": replicas}
                config = config_of(optimizer__name=optimizer, **settings)
                memory = MemoryPlan(model_of(name, **sizes), config, 2, Layers(), steps_of())
                parts = memory.moments()[MOMENTS["end"]]
                expected = tuple(parts[key] for key in ("weights", "gradients", "optimizer states"))
                assert found == expected, (name, optimizer, replicas)


@pytest.mark.slow
def test_weights_gradients_and_states_match_the_tensors_of_a_rank():
    run_ranks(compare_with_tensors, 2)


@pytest.mark.parametrize("share", [1, 4])
def test_parts_that_depend_on_parameters_match_a_calculation_by_hand(share):
    layer = REST + EXPERTS // share
    sharded, whole = (ROOT + 2 * (REST + EXPERTS)) / 4, ROOT + 2 * layer
    settings = {"parallel__expert_parallel": share}
    for reduce, steps, gradients in (
        ("every", steps_of(), sharded),
        ("last", steps_of(), whole),
        ("last", steps_of(passes=1), sharded),  # nothing accumulates
        ("last", steps_of(is_partitioned=True), whole),
    ):
        parts = parts_of("end", steps, parallel__reduce_gradients=reduce, **settings)
        assert parts["weights"] == 4 * sharded
        assert parts["optimizer states"] == 8 * sharded
        assert parts["gradients"] == 4 * gradients
        assert parts["weights for computation"] == 2 * whole  # two layers: both are gathered
        assert parts["gradients being summed"] == 6 * ROOT + 4 * layer
    assert parts_of("last", **settings)["gradients being summed"] == 10 * layer


def test_replicas_hold_all_parameters_and_ranks_that_share_tokens_hold_none_of_their_own():
    alone = parts_of("end")
    assert parts_of("end", parallel__sequence_parallel=4) == alone
    halves = parts_of("end", parallel__replicate=2)
    for part in ("weights", "optimizer states"):
        assert halves[part] == 2 * alone[part]
    for part in ("weights for computation", "gradients", "gradients being summed"):
        assert halves[part] == alone[part]  # two passes: gradients are not sharded yet
    copies = parts_of("end", steps_of(passes=1), parallel__replicate=4)
    assert copies["gradients"] == copies["weights"] == 4 * (ROOT + 2 * (REST + EXPERTS))


def test_experts_of_several_replicas_are_gathered():
    one, two = (
        parts_of("end", gpus=4 * n, parallel__replicate=n, parallel__expert_parallel=4) for n in (1, 2)
    )
    assert one == two  # two layers, so all weights are gathered anyway
    model = model_of(num_hidden_layers=5)
    for replicas, in_experts in ((1, 5), (2, 2)):  # a single rank's experts are cast, those of two gathered
        settings = {"parallel__expert_parallel": 4, "parallel__replicate": replicas}
        memory = memory_of(model, 4 * replicas, parallel__reduce_gradients="every", **settings)
        assert memory.cast_weights() == ROOT + 2 * REST + in_experts * EXPERTS // 4


def test_a_layer_without_experts_is_gathered_beside_the_experts_of_a_rank():
    memory = memory_of(
        model_of(mlp_only_layers=[0]), parallel__expert_parallel=4, parallel__reduce_gradients="every"
    )
    dense = REST - 8 * 128 + 3 * 128 * 384  # no router, but an MLP
    assert memory.cast_weights() == ROOT + EXPERTS // 4 + 2 * dense


def test_two_layers_are_gathered_unless_weights_stay():
    model = model_of(num_hidden_layers=5)
    gathered = memory_of(model, parallel__reduce_gradients="every").cast_weights()
    assert gathered == ROOT + 2 * (REST + EXPERTS)
    everything = ROOT + 5 * (REST + EXPERTS)
    assert memory_of(model, steps=steps_of(is_partitioned=True)).cast_weights() == everything
    assert memory_of(model).cast_weights() == everything


def test_a_single_gpu_casts_all_weights_and_sums_nothing():
    parts = parts_of("end", gpus=1, parallel__reduce_gradients="every")
    whole = ROOT + 2 * (REST + EXPERTS)
    assert parts["weights for computation"] == 2 * whole
    assert parts["gradients"] == 4 * whole
    assert parts["gradients being summed"] == 0
    assert parts["CUDA and NCCL"] == CONTEXT
    assert parts_of("end")["CUDA and NCCL"] == CONTEXT + NCCL
    assert parts_of("end", gpus=1, training__dtype="float32")["weights for computation"] == 4 * whole


def test_8_bit_states_have_a_scale_per_256_numbers_but_some_shards_stay_in_fp32():
    state_bytes = OPTIMIZERS["adamw8bit"].state_bytes
    assert state_bytes(8192) == 2 * 8192 + 2 * 4 * 32
    assert state_bytes(4095) == OPTIMIZERS["adamw"].state_bytes(4095) == 8 * 4095
    assert state_bytes(8193) == 8 * 8193


def test_experts_are_sharded_along_their_rows_over_the_ranks_that_hold_the_same_ones():
    model = model_of(num_experts=6)
    names = [name for name, _ in model.named_parameters()]
    shards = dict(zip(names, shard_sizes(model, 4, expert_parallel=2), strict=True))
    assert shards["layers.0.mlp.experts.gate_up_proj"] == 3 * (192 // 2) * 128
    assert shards["layers.0.mlp.gate.weight"] == 2 * 128  # ceil(6 / 4) rows


# ---------------------------------------------------------------- what grows with tokens


def test_activations_follow_the_policy_of_suspended_partitions():
    for policy, expected in (("keep", 64 * 100), ("recompute", 32 * 100), ("offload", 32 * 100)):
        assert parts_of("loss", partition__activations=policy)["activations"] == expected
    budget = {"partition__activations": "auto"}
    assert parts_of("loss", **budget)["activations"] == 64 * 100
    assert parts_of("loss", **budget, partition__device_gb=5e-6)["activations"] == 5000
    running = parts_of("loss", **budget, partition__device_gb=1e-6)["activations"]
    assert running == 32 * 100  # a running partition needs it
    full = parts_of("loss", training__activation_checkpoint="full")
    assert full["activations"] == 64 * 10


def test_rows_that_arrive_for_experts_count_once_ranks_exchange_them():
    rows = 32  # per pass: all tokens of the other rank
    parts = parts_of("last", parallel__expert_parallel=2)
    assert parts["activations"] == pytest.approx(64 * 100 + 2 * rows * 7)  # the chain is twice as long
    copies = 32 * 2  # with 128 numbers each and 96 hidden units
    of_copies = 2 * copies * (128 + 4 * 96)
    assert parts["rows of the exchange"] == 2 * (2 * rows + 32) * 128 + of_copies
    assert parts["backward pass of a layer"] == 32 * 1000 + rows * 30
    unbalanced = parts_of("last", parallel__expert_parallel=2, imbalance=1.5)
    assert unbalanced["rows of the exchange"] == parts["rows of the exchange"] + 0.5 * of_copies
    assert unbalanced["activations"] == parts["activations"]  # of the three sizes, only copies would grow
    assert "rows of the exchange" not in parts_of("last")


def test_the_larger_gradients_within_a_layer_count():
    dense = model_of("qwen3")
    width, heads = dense.config.intermediate_size, 4 + 2 + 2  # of queries, keys and values
    assert parts_of("last", model=dense)["gradients in a layer"] == 2 * 32 * 3 * width
    exchange = 32 * (heads + 2)  # and a second copy of the values
    shared = parts_of("last", model=dense, parallel__sequence_parallel=2)  # 16 tokens
    assert shared["gradients in a layer"] == 2 * 16 * max(3 * width, exchange)
    sizes = parts_of("last", parallel__sequence_parallel=4)  # experts, and four key heads
    assert sizes["gradients in a layer"] == 2 * 8 * 32 * (4 + 4 + 4 + 4)
    assert parts_of("last")["gradients in a layer"] == 0


def test_log_probs_keep_probabilities_only_without_checkpointing_and_entropy():
    block = 8 * 16 * 512 + 4 * 16 * 128
    assert parts_of("loss")["log-probs"] == 2 * 16 * 512 + block
    assert parts_of("loss", loss__entropy=0.1)["log-probs"] == block
    assert parts_of("loss", training__activation_checkpoint="full")["log-probs"] == block
    many = parts_of("loss", steps_of(edges=2**20), training__activation_checkpoint="full")
    assert many["log-probs"] == GIB + 4 * 2**20 * 128


def test_the_gateway_cache_holds_rows_and_fp32_gradients():
    partitioned = steps_of(is_partitioned=True)
    parts = parts_of("loss", partitioned)
    assert parts["gateway cache"] == 5 * (2 * 2 * 2 * 32 * 2) * 3  # layers, k and v, heads, dims, bytes
    assert "gateway cache" not in parts_of("loss")
    hybrid = model_of("qwen3_5")
    sizes = hybrid.config
    state = sizes.linear_num_value_heads * sizes.linear_key_head_dim * sizes.linear_value_head_dim * 4
    tail = (sizes.linear_conv_kernel_dim - 1) * (2 * sizes.key_dim + sizes.value_dim) * 2
    keys = 2 * sizes.num_key_value_heads * sizes.head_dim * 2
    expected = 5 * keys * 3 + 3 * 3 * (state + tail) * 2  # one attention layer and three DeltaNet layers
    assert parts_of("loss", partitioned, 1, model=hybrid)["gateway cache"] == expected
    for ranks in (2, 4):  # key heads: 2 of attention, which 4 ranks copy
        own = 5 * keys * 3 / 2 + 3 * 3 * (state / ranks + own_tail(sizes, ranks)) * 2
        parts = parts_of("loss", partitioned, model=hybrid, parallel__sequence_parallel=ranks)
        assert parts["gateway cache"] == own


def own_tail(sizes, ranks):
    """Returns the bytes of the convolution's last inputs for a rank's heads."""
    keys = 2 * max(sizes.linear_num_key_heads // ranks, 1) * sizes.linear_key_head_dim
    values = sizes.linear_num_value_heads // ranks * sizes.linear_value_head_dim
    return (sizes.linear_conv_kernel_dim - 1) * (keys + values) * 2


def test_the_block_lists_have_the_size_of_the_two_largest():
    batch = TreeBatch.from_trees([TokenTree.from_paths([TokenPath([1] * 1000)])])
    tables = block_lists.prepare(batch.layout)
    assert block_lists.table_bytes(1000, 1000) == tables.key_blocks.nbytes + tables.key_groups.nbytes


def test_the_largest_moment_counts():
    memory = memory_of()
    sums = [sum(parts.values()) for parts in memory.moments().values()]
    assert sum(memory.peak()[1].values()) == max(sums)
    assert memory_of(steps=steps_of(edges=2**20)).peak()[0] == MOMENTS["loss"]
    large_root = memory_of(model_of(vocab_size=100_000), steps=steps_of(passes=1, edges=0))
    assert large_root.peak()[0] == MOMENTS["end"]
    many_tokens = steps_of(tokens=10**5, chain_tokens=10**5, edges=0)
    assert memory_of(steps=many_tokens).peak()[0] == MOMENTS["last"]


def test_gradients_of_earlier_passes_exist_at_the_loss():
    assert parts_of("loss")["gradients"] > 0
    assert parts_of("loss", steps_of(passes=1))["gradients"] == 0


def test_sizes_are_the_largest_of_all_steps_and_gpus():
    def run(tokens, keys, edges, cache=(0, 0)):
        return PassSizes(tokens=tokens, keys=keys, edges=edges, cache=CacheRows(*cache))

    first = OwnerSizes([[run(10, 10, 9)], [run(4, 4, 3)]], 10, NO_COUNTS)
    second = OwnerSizes([[run(6, 6, 5, (0, 2)), run(7, 13, 11, (8, 1))]], 13, NO_COUNTS)
    names = ("chain_tokens", "tokens", "edges", "passes", "cached_keys", "cached_states", "is_partitioned")
    for ranks, expected in ((1, (13, 10)), (4, (4, 3))):  # a quarter of the tokens, rounded up
        memory = memory_of(steps=[[first], [second]], parallel__sequence_parallel=ranks)
        assert tuple(getattr(memory, name) for name in names) == (*expected, 11, 2, 8, 2, True)
        assert memory.table_bytes == block_lists.table_bytes(7, 13)
    assert not memory_of(steps=[[first]]).is_partitioned


# ---------------------------------------------------------------- images


IMAGES = ((64, 96), (160, 224), (96, 96))  # height and width


def with_images(vision, is_partitioned=False, **values):
    """Returns the plan of a step whose first pass has images, for Qwen3-VL, "debug"."""
    (owner,) = steps_of(is_partitioned=is_partitioned)[0]
    first, *others = owner.passes
    runs = [dataclasses.replace(first, images=IMAGES), *others]
    steps = [
        [dataclasses.replace(owner, micro_batches=[runs] if is_partitioned else [[run] for run in runs])]
    ]
    return memory_of(model_of("qwen3", vision=vision), steps=steps, **values)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("vision", ["train", "frozen"])
def test_features_of_images_are_those_of_a_step(vision, dtype):
    """Those of a partitioned micro-batch on a CPU: features, and if trained, fp32 leaves and gradients."""
    model = build_model("qwen3", "debug", vision=vision).to(getattr(torch, dtype))
    shown = [Image(np.zeros((*size, 3), np.uint8) + i) for i, size in enumerate(IMAGES)]
    tokens = [[7] * len(image) + [1, 2] for image in shown]
    paths = [
        TokenPath([1, *ids], [0] * (len(ids) - 1) + [1, 1], images=[(1, image)])
        for ids, image in zip(tokens, shown, strict=True)
    ]
    plan = TreePartitioner("redundancy_free", 8).plan(TokenTree.from_paths(paths))
    runner = partitions._Runner(
        model, TreeBatch.from_plan(plan, "loss"), torch.device("cpu"), False, Activations(torch.device("cpu"))
    )
    runner.run(lambda batch, out: out.logprobs.sum(), None)
    tensors = [*runner.rows, *runner.features, *(x.grad for x in runner.features if x.requires_grad)]
    found = sum({x.untyped_storage().data_ptr(): x.nbytes for x in tensors}.values())
    parts = with_images(vision, training__dtype=dtype).moments()[MOMENTS["loss"]]
    assert parts["features of images"] == found > 0
    assert parts["pixels of images"] == sum(image.pixels.nbytes for image in shown)
    largest = chunk_bytes(model.visual, IMAGES, getattr(torch, dtype))
    moment = with_images(vision, training__dtype=dtype).moments()["images in the tower"]
    assert moment["images in the tower"] == largest


def test_a_trained_tower_is_the_last_unit_of_the_backward_pass():
    """So ranks sum no gradient before, and a frozen tower has none."""
    with torch.device("meta"):
        tower = sum(p.numel() for p in build_model("qwen3", "debug", vision="train").visual.parameters())
    whole = sum(p.numel() for p in model_of("qwen3").parameters())
    largest = 128 * (4 + 2 + 2 + 4) * 32 + 2 * 32 + 2 * 128 + 3 * 128 * 384
    for vision, trained in (("train", whole + tower), ("frozen", whole)):
        memory = with_images(vision, parallel__reduce_gradients="last")
        parts = memory.moments()["images in the tower"]
        assert parts["gradients"] == 4 * trained
        assert parts["weights"] == pytest.approx(whole + tower, rel=0.01)  # 4 bytes on 4 ranks
        assert parts["weights for computation"] == 2 * (whole + tower)
        assert parts.get("gradients being summed", 0) == (6 * tower + 4 * largest) * (vision == "train")
        assert parts["activations"] == 0
    one_pass = memory_of(model_of("qwen3", vision="train"), steps=steps_of(passes=1))
    assert one_pass.moments()[MOMENTS["end"]]["gradients"] == 4 * (whole + tower)
    gathered = memory_of(model_of("qwen3", vision="train"), parallel__reduce_gradients="every")
    assert gathered.cast_weights() == whole - 2 * largest + max(tower, 2 * largest)
