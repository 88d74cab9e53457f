"""titan-tree plan, time: each part is operations or bytes, divided by a rate."""

import dataclasses
import re
from pathlib import Path

import pytest
import torch

from tests.cli.test_plan_memory import EXPERTS, REST, ROOT, config_of, model_of
from titan_tree.cli.plan.timing import GPUS, Gpu, Timing, bandwidth, find_gpu, total
from titan_tree.cli.plan.workload import OwnerStep, Run
from titan_tree.engine.step_io import NO_COUNTS
from titan_tree.errors import UserError
from titan_tree.models.pretrained import build_model
from titan_tree.tree import costs as rates

RUN = Run(tokens=1000, keys=1000, pairs=440_000, edges=100)


def timing(name="qwen3_moe", gpus=4, gpu=GPUS["h200"], **values):
    sizes = values.pop("sizes", {})
    return Timing(model_of(name, **sizes), config_of(**values), gpus, gpu)


def owner_step(*micro_batches):
    runs = [runs if isinstance(runs, list) else [runs] for runs in micro_batches]
    return OwnerStep(runs, 0, NO_COUNTS)


def test_the_parts_of_a_pass_match_a_calculation_by_hand():
    seconds = timing().of_run(RUN)
    matrices = 2 * (128 * 12 * 32 + 8 * 128)  # attention and router, in two layers
    assert seconds["projections"] == pytest.approx(6 * matrices * 1000 / 640e12)
    assert seconds["experts"] == pytest.approx(6 * 2 * (EXPERTS / 4) * 1000 / 438e12)  # 2 of 8 experts
    forward = 4 * 4 * 32 * 2 * 440_000  # 4 per pair, head and dim, in two layers
    assert seconds["attention"] == pytest.approx(forward / 298e12 + 2.5 * forward / 241e12)
    logits = 100 * 512
    assert seconds["vocabulary"] == pytest.approx(6 * 128 * logits / 640e12 + 18 * logits / 4e12)
    assert seconds["norms, RoPE, SwiGLU"] == pytest.approx(50e-9 * 1000 * 2)
    assert seconds["exchange for experts"] == 0


def test_the_exchange_sends_a_token_to_each_rank_of_its_experts():
    seconds = timing(parallel__expert_parallel=4).of_run(RUN)
    ranks = 4 * (1 - 15 / 28)  # of a token: 15 of the 28 pairs of 8 experts avoid a rank's two
    size = 1000 * ranks * 3 / 4 * 128 * 2
    assert seconds["exchange for experts"] == pytest.approx(4 * 2 * size / 316e9)  # 4 in each of two layers
    full = timing(parallel__expert_parallel=4, training__activation_checkpoint="full").of_run(RUN)
    assert full["exchange for experts"] == pytest.approx(6 / 4 * seconds["exchange for experts"])


def test_ranks_that_share_tokens_divide_the_work_and_exchange_heads():
    settings = {"parallel__expert_parallel": 2, "training__activation_checkpoint": "full"}
    alone = timing(**settings).of_run(RUN)
    for ranks in (2, 4):  # 4 query heads and 2 key heads of 32 numbers, in two layers
        seconds = timing(parallel__sequence_parallel=ranks, **settings).of_run(RUN)
        for part in ("projections", "attention", "experts", "exchange for experts", "norms, RoPE, SwiGLU"):
            assert seconds[part] == pytest.approx(alone[part] / ranks)
        assert seconds["vocabulary"] == alone["vocabulary"]  # edges are those of the GPU with the most
        size = 2 * 1000 / ranks * 2 * 32 * (4 + 4 + 2 * max(2, ranks))  # of q, the output, k and v
        calls = 2 * 4 * 75e-6
        once = size * (ranks - 1) / ranks / 316e9 + calls + 2 * size / 4e12
        assert seconds["exchange for heads"] == pytest.approx(3 * once)  # forward, recomputed, backward
    assert "exchange for heads" not in alone


def test_losses_of_whole_paths_score_partitions_first():
    settings = {"loss__name": "gspo", "training__activation_checkpoint": "none"}
    step = [owner_step([RUN, RUN])]
    plain, scored = (timing(**values).step(step) for values in (settings | {"loss__name": "sft"}, settings))
    for part in ("projections", "vocabulary", "norms, RoPE, SwiGLU"):
        assert scored[part] == pytest.approx(4 / 3 * plain[part])  # three forward passes become four
    assert timing(**settings).step([owner_step(RUN)]) == timing().step([owner_step(RUN)])


def test_the_idle_share_is_what_gpus_wait_for_the_slowest(monkeypatch):
    monkeypatch.setattr(rates, "LAUNCH_SECONDS", 0.0)
    monkeypatch.setattr(rates, "PARTITION_SECONDS", 0.0)
    twice = dataclasses.replace(RUN, tokens=2000, pairs=880_000, edges=200)
    model = timing("qwen3", gpus=2)
    assert model.idle_share([owner_step(RUN), owner_step(RUN)]) == pytest.approx(0)
    assert model.idle_share([owner_step(twice), owner_step(RUN)]) == pytest.approx(1 / 4)
    assert model.idle_share([owner_step(RUN), owner_step()]) == pytest.approx(1 / 2)
    step = [owner_step(twice, RUN), owner_step(RUN, twice)]  # in step: in both rows, one GPU waits
    assert model.idle_share(step) == pytest.approx(1 / 4)
    free = [owner_step([RUN, RUN], RUN), owner_step(RUN, [RUN, RUN])]
    assert model.idle_share(free) == pytest.approx(0)
    assert model.idle_share([owner_step(RUN)]) == 0


def test_recomputation_repeats_forward_passes():
    none, selective, full = (
        timing(training__activation_checkpoint=policy).of_run(RUN) for policy in ("none", "selective", "full")
    )
    for part in ("projections", "vocabulary", "experts", "norms, RoPE, SwiGLU"):
        assert full[part] == pytest.approx(4 / 3 * none[part])
    assert selective["projections"] == pytest.approx(3.5 / 3 * none["projections"])
    assert selective["attention"] == none["attention"] < full["attention"]
    suspended = dataclasses.replace(RUN, is_suspended=True)
    recomputed = timing(partition__activations="recompute").of_run(suspended)
    assert recomputed["projections"] == full["projections"]
    assert recomputed["vocabulary"] == none["vocabulary"]
    assert timing().of_run(suspended) == none


def test_delta_net_costs_its_value_dims_in_three_of_four_layers():
    model = timing("qwen3_5")
    seconds = model.of_run(RUN)
    values = 3 * model.model.config.value_dim
    rate = (5.1e-3 - 512 * 2.2e-6) / 32_768 / 4096
    assert seconds["DeltaNet"] == pytest.approx(rate * 1000 * values)
    chain = dataclasses.replace(RUN, serial_chunks=16)
    assert model.of_run(chain)["DeltaNet"] == pytest.approx(rate * 1000 * values + 3 * 16 * 2.2e-6)
    shared = timing("qwen3_5", parallel__sequence_parallel=2).of_run(chain)
    assert shared["DeltaNet"] == pytest.approx(rate * 500 * values + 3 * 16 * 2.2e-6)  # the chain stays
    matrices = sum(p.numel() for p in model.model.layers.parameters() if p.ndim == 2)
    assert seconds["projections"] == pytest.approx(6 * matrices * 1000 / 640e12)


def test_gpus_wait_for_each_other_in_every_micro_batch_unless_trees_are_partitioned():
    long = Run(tokens=10**6, keys=10**6, pairs=10**9, edges=10)
    short = Run(tokens=10**5, keys=10**5, pairs=10**8, edges=10)
    model = timing()
    alone = total(model.of_run(long))
    assert total(model.step([owner_step(long, short), owner_step(short, long)])) > 2 * alone
    free = model.step([owner_step([long, short]), owner_step([short, long])])
    assert total(free) < 1.5 * alone
    exchanging = timing(parallel__expert_parallel=4)
    assert (
        total(exchanging.step([owner_step([long], [short, short]), owner_step([short, short], [long])]))
        > 2 * alone
    )


def test_small_passes_wait_for_the_host():
    seconds = timing().step([owner_step(RUN)])
    kernels = total(timing().of_run(RUN))
    assert seconds["waiting for the host"] == pytest.approx(4e-3 * 2 - kernels)
    partitions = timing().step([owner_step([RUN, RUN, RUN])])
    assert partitions["partitions"] == pytest.approx(3 * 2 * 15e-3 / 28)


def test_fsdp_gathers_and_sums_what_kernels_do_not_hide():
    model = timing(gpus=4)
    everything, layer = ROOT + 2 * (REST + EXPERTS), REST + EXPERTS
    gather, reduce = 2 * 0.75 / 305e9, 4 * 0.75 / 301e9  # seconds per parameter; a quarter is local
    at_root = ROOT * (gather + reduce)
    assert model.fsdp(1e9, 1) == pytest.approx(at_root, rel=1e-4)  # all else is hidden
    assert model.fsdp(0.0, 1) == pytest.approx(at_root + 2 * layer * (2 * gather + reduce), rel=1e-4)
    keeps = timing(parallel__reshard_after_forward=False)
    assert keeps.fsdp(0.0, 1) == pytest.approx(at_root + 2 * layer * (gather + reduce), rel=1e-4)
    last, every = (timing(parallel__reduce_gradients=name).fsdp(0.0, 3) for name in ("last", "every"))
    assert last == pytest.approx(everything * (3 * gather + reduce) + 2 * layer * 3 * gather, rel=1e-4)
    assert every == pytest.approx(last + 2 * everything * reduce, rel=1e-4)
    assert timing(gpus=1).fsdp(0.0, 1) == 0


def test_replicas_gather_within_themselves_and_sum_shards_among_each_other():
    everything, layers = ROOT + 2 * (REST + EXPERTS), 2 * (REST + EXPERTS)
    for gpus, rate in ((16, 50e9), (8, 301e9)):
        shard, others = 2 / gpus, 1 - 2 / gpus
        inside = ROOT * others * (2 / 305e9 + 4 / 301e9) + layers * others * (4 / 305e9 + 4 / 301e9)
        sums = 2 * 4 * everything * shard / 2 / rate
        replicated = timing(gpus=gpus, parallel__replicate=2)
        assert replicated.fsdp(0.0, 1) == pytest.approx(inside + sums, rel=1e-3)
    alone = timing(gpus=16).fsdp(0.0, 1)  # everything over the network
    assert alone > 3 * timing(gpus=16, parallel__replicate=2).fsdp(0.0, 1)
    copies = timing(gpus=4, parallel__replicate=4)  # nothing is sharded, so nothing is gathered
    assert copies.fsdp(0.0, 1) == pytest.approx(2 * 4 * everything * 3 / 4 / 301e9)
    assert copies.optimizer() == pytest.approx(timing(gpus=1).optimizer())


def test_collectives_are_slower_across_nodes():
    assert bandwidth(316e9, 8) == 316e9
    assert bandwidth(316e9, 16) == 50e9


def test_the_optimizer_and_casts_read_and_write_the_shard_of_a_gpu():
    own = (ROOT + 2 * (REST + EXPERTS)) / 4
    assert timing().optimizer() == pytest.approx(32 * own / 4e12)
    assert timing(gpus=1).optimizer() == pytest.approx(4 * 32 * own / 4e12)
    assert timing(optimizer__name="adamw8bit").optimizer() == pytest.approx(20 * own / 4e12)
    assert [timing().casts(n) for n in (1, 3)] == pytest.approx([6 * own / 4e12, 3 * 6 * own / 4e12])
    assert timing(gpus=1).casts(3) == pytest.approx(4 * 6 * own / 4e12)  # once for all micro-batches


def test_gpus_by_name_or_size():
    assert find_gpu("H100") is GPUS["h100"]
    assert find_gpu("24") == Gpu("GPU of 24 GiB", 24 * 2**30, GPUS["h200"].bandwidth)
    for text in ("b300", "0", "-1", "nan", "inf"):
        with pytest.raises(UserError, match="--gpu: expected h200, h100 or a number of GiB, got"):
            find_gpu(text)
    slow = timing(gpu=GPUS["h100"]).of_run(RUN)
    assert slow["norms, RoPE, SwiGLU"] == pytest.approx(timing().of_run(RUN)["norms, RoPE, SwiGLU"] * 4 / 2.8)


@pytest.mark.slow
def test_the_table_of_tokens_in_a_step_follows_from_parameters_and_rates():
    page = (Path(__file__).parents[2] / "docs" / "memory.md").read_text()
    rows = re.findall(r"^\| Qwen(3|3\.5)-(\S+) \| (\S+) \| (\S+) \| (\S+) \| (\S+) \|$", page, re.MULTILINE)
    assert [f"{family}-{flavor}" for family, flavor, *_ in rows] == [
        "3-0.6B", "3-1.7B", "3-8B", "3-30B-A3B", "3.5-2B"
    ]  # fmt: skip
    for family, flavor, *shown in rows:
        name = {"3.5": "qwen3_5", "3": "qwen3_moe" if "A3B" in flavor else "qwen3"}[family]
        with torch.device("meta"):
            model = build_model(name, flavor)
        costs, parameters = model.costs(), sum(p.numel() for p in model.parameters())
        token = costs.flops_per_token / (330e12 if "A3B" in flavor else 560e12)
        token += costs.flops_per_edge / 560e12
        tokens = [0.97 / 0.03 * size * parameters / 4e12 / token for size in (32, 20)]
        operations = costs.flops_per_token + costs.flops_per_edge
        expected = [f"{parameters / 1e9:.1f}", f"{operations / 1e9:.1f}"]
        assert shown == expected + [f"{round(n / 1000)},000" for n in tokens], flavor
