"""titan-tree plan: the command, the steps it samples, and wrong input."""

import json
from itertools import islice
from pathlib import Path

import pytest
import torch

from titan_tree.cli import main
from titan_tree.cli.plan import layer_trace
from titan_tree.cli.plan.device import device_memory
from titan_tree.cli.plan.estimate import build_planned_model, estimate, planned_steps
from titan_tree.cli.plan.layer_trace import Kept, LayerTrace
from titan_tree.cli.plan.memory import MemoryPlan
from titan_tree.cli.plan.workload import take_sample
from titan_tree.data.dataset import TreeDataset
from titan_tree.errors import UserError
from titan_tree.run import build
from titan_tree.run.balance.assignment import assign_freely
from titan_tree.run.config import load_config
from titan_tree.tree.batch import TokenShard
from titan_tree.tree.costs import tree_sizes

CONFIGS = Path(__file__).parents[2] / "train_configs"
DEMO, DEMO_MOE, RL_DEMO = (str(CONFIGS / f"{name}.toml") for name in ("demo", "demo_qwen3_moe", "rl_demo"))


KEPT = {"none": Kept(1000.0, 100.0), "selective": Kept(300.0, 50.0), "full": Kept(100.0)}


@pytest.fixture(autouse=True)
def _known_layers(monkeypatch):
    """Tracing layers takes seconds; test_plan_memory.py tests it."""
    monkeypatch.setattr(layer_trace, "_trace", lambda model, block, policy, *ranks: KEPT[policy])


def plan(capsys, *arguments):
    """Runs ``plan --json`` and returns what it prints."""
    assert main(["plan", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refusal(capsys, *arguments):
    assert main(["plan", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line.removeprefix("titan-tree: error: ")


def estimated(*overrides, config=DEMO, gpus=2, gpu="h200", groups=None):
    return estimate(load_config(config, overrides), gpus, gpu, groups)


def test_the_report_fits_80_columns_and_adds_up(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["plan", DEMO, "--gpus", "2"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    run = out.partition("\n\n")[0].splitlines()
    assert all(line[2] != " " for line in run[1:])  # no line is wrapped
    titles = [line for line in out.splitlines() if line and not line.startswith(" ")]
    assert titles == ["run", "GiB on the fullest GPU", "notes"]
    assert "fits" in out
    assert not list(tmp_path.iterdir())  # nothing is written
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)  # the default of --gpus
    found = plan(capsys, DEMO)
    assert (found["gpus"], found["gpu"]) == (2, "H200")
    assert found["memory_sum"] == pytest.approx(sum(found["memory"].values()))
    assert found["parameters"] == 459_520
    assert found["fits"]


@pytest.mark.slow
def test_tables_of_other_commands_have_no_effect(capsys):
    others = ["lightning.trainer.max_steps=1", "rl.rollouts=4", "warm_start.steps=9"]
    assert plan(capsys, DEMO, *others, "--gpus", "1")["parameters"] == 459_520


def training_steps(config, model, is_balanced, owners=2, steps=2):
    """Returns the inputs of the first steps of training, by owner, as whole batches."""
    reader = build.build_reader(config.data, build.build_tokenizer(config.data, None), model)
    loss = build.build_loss(config.loss)
    preparer = build.build_tree_step(config, model, loss, torch.device("cpu")).preparer()
    if not is_balanced:
        for owner in range(owners):
            dataset = TreeDataset(config.data, reader, allow_larger=True, rank=owner, world_size=owners)
            yield [preparer(trees) for trees in islice(dataset, steps)]
        return
    by_step = [
        [tree for micro_batch in step for tree in micro_batch]
        for step in islice(TreeDataset(config.data, reader, allow_larger=True), steps)
    ]
    costs, limit = model.costs().tree_costs(), config.data.max_tokens
    chosen = [assign_freely(tree_sizes(trees), costs, owners, limit) for trees in by_step]
    for owner in range(owners):
        micro_batches = [
            [[trees[i] for i in batch] for batch in assignment[owner]]
            for trees, assignment in zip(by_step, chosen, strict=True)
        ]
        yield list(map(preparer, micro_batches))


@pytest.mark.parametrize("is_balanced", [False, True])
@pytest.mark.parametrize("share", [1, 2])
def test_the_steps_are_those_of_training(is_balanced, share):
    """The sample of two steps has the trees that two owners train on first, in the same micro-batches."""
    overrides = ["data.max_tokens=1000", "partition.strategy=redundancy_free"]
    balance = f"parallel.balance={str(is_balanced).lower()}"
    config = load_config(DEMO, [*overrides, balance, f"parallel.sequence_parallel={share}"])
    model = build_planned_model(config, 2 * share)
    reader = build.build_reader(config.data, build.build_tokenizer(config.data, None), model)
    assert take_sample(reader, 4) == 4
    found = planned_steps(config, model, reader, 2 * share, 2)
    for owner, inputs in enumerate(training_steps(config, model, is_balanced)):
        for step, expected in zip(found, inputs, strict=True):
            own, counts = step[owner], expected.counts
            assert [list(map(len, batches)) for batches in expected.micro_batches] == [
                [each.tokens for each in passes] for passes in own.micro_batches
            ]
            assert (own.counts, own.chain_tokens) == (counts, counts.chain_peak)
            batches = [batch for partitions in expected.micro_batches for batch in partitions]
            for each, batch in zip(own.passes, batches, strict=True):
                shares = [len(TokenShard(r, share).of(batch).edge_label) for r in range(share)]
                assert each.edges == max(shares)  # of the GPU with the most
    sizes = MemoryPlan(model, config, 2 * share, LayerTrace(model), found)
    assert sizes.is_partitioned
    assert sizes.cached_keys > 0


def test_a_small_sample_repeats_its_groups(capsys):
    found = plan(capsys, DEMO, "data.global_batch_groups=4", "--gpus", "1", "--groups", "2")
    assert (found["groups"], found["steps"]) == (2, 1)
    once = plan(capsys, DEMO, "data.global_batch_groups=2", "--gpus", "1", "--groups", "2")
    assert found["logical_tokens"] == 2 * once["logical_tokens"]
    assert found["por"] == once["por"]
    assert any("groups repeat" in note for note in found["notes"])
    assert not any("groups repeat" in note for note in once["notes"])


def test_samples_that_share_nothing_are_noted(capsys, tmp_path):
    note = "samples share nothing, so trees save nothing; titan-tree inspect FILE says why"
    for names, notes in ((["a", "b"], [note]), (["a", "a"], [])):
        rows = [{"group_id": name, "tokens": [5, 6, 7 + n]} for n, name in enumerate(names)]
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        found = plan(capsys, DEMO, f"data.files={tmp_path / 'rows.jsonl'}", "--gpus", "1", "--groups", "1")
        assert [each for each in found["notes"] if "share" in each] == notes, names


def test_tokens_are_means_over_steps():
    config = load_config(DEMO, ["data.shuffle_buffer=0", "data.global_batch_groups=2"])
    model = build_planned_model(config, 1)
    reader = build.build_reader(config.data, build.build_tokenizer(config.data, None), model)
    take_sample(reader, 4)
    counts = [owner.counts for (owner,) in planned_steps(config, model, reader, 1, 2)]
    one, two = (estimate(config, 1, "h200", num_groups) for num_groups in (2, 4))
    assert (one["steps"], two["steps"]) == (1, 2)
    assert one["executed_tokens"] == counts[0].executed_tokens
    assert two["executed_tokens"] == sum(each.executed_tokens for each in counts) / 2


def test_a_plan_that_does_not_fit_says_what_to_change():
    fits, tight = (estimated("data.max_tokens=4096", gpus=1, gpu=gpu) for gpu in ("h200", "0.6"))
    assert (fits["fits"], tight["fits"]) == (True, False)
    assert fits["memory"] == tight["memory"]
    (note,) = set(tight["notes"]) - set(fits["notes"])
    assert note.startswith("to need less memory: more GPUs, training.activation_checkpoint=full")
    full = estimated("data.max_tokens=4096", "training.activation_checkpoint=full", gpus=1)
    assert full["memory_sum"] < fits["memory_sum"]


def test_gpus_by_name_or_size():
    assert device_memory("H100") == ("H100", 79 * 2**30)
    assert device_memory("24") == ("GPU of 24 GiB", 24 * 2**30)
    for text in ("b300", "0", "-1", "nan", "inf"):
        with pytest.raises(UserError, match="--gpu: expected h200, h100, cpu or a number of GiB, got"):
            device_memory(text)


def test_more_ranks_that_share_tokens_need_less_memory_and_more_replicas_need_more():
    settings = ["data.max_tokens=1000", "training.dtype=bfloat16"]
    by_share = [estimated(*settings, f"parallel.sequence_parallel={n}", gpus=4)["memory"] for n in (1, 2, 4)]
    for part in ("activations", "gateway cache"):
        sizes = [each.get(part, 0) for each in by_share]
        assert sizes == sorted(sizes, reverse=True), part
    assert len({each["weights"] for each in by_share}) == 1
    by_replicas = [estimated(*settings, f"parallel.replicate={n}", gpus=4)["memory"] for n in (1, 2, 4)]
    for part in ("weights", "optimizer states"):
        sizes = [each[part] for each in by_replicas]
        assert sizes[0] < sizes[1] < sizes[2] == pytest.approx(4 * 459_520 * {"weights": 1}.get(part, 2))


def test_partitions_need_gradients_that_are_summed_last(capsys):
    found = plan(capsys, DEMO, "data.max_tokens=1000", "parallel.reduce_gradients=every", "--gpus", "2")
    assert any("will refuse parallel.reduce_gradients = every" in note for note in found["notes"])


def test_a_router_without_balance_needs_more(capsys):
    found = plan(capsys, DEMO_MOE, "parallel.expert_parallel=2", "--gpus", "2")
    assert found["memory_random_router"] > found["memory_sum"]
    assert plan(capsys, DEMO_MOE, "--gpus", "2")["memory_random_router"] == pytest.approx(
        plan(capsys, DEMO_MOE, "--gpus", "2")["memory_sum"]
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([DEMO, "--gpus", "9" * 5000], "--gpus: expected an integer from 1 to 1,000,000, got '999"),
        ([DEMO, "--gpus", "1", "--groups", "-1"], "--groups: expected an integer"),
        ([DEMO, "--gpus", "1", "--gpu", "b300"], "--gpu: expected h200, h100, cpu or a number of GiB"),
        (["missing.toml", "--gpus", "1"], "unknown configuration file 'missing.toml' (known: "),
        ([DEMO, "data.files=missing.jsonl", "--gpus", "1"], "missing.jsonl"),
        ([RL_DEMO, "--gpus", "1"], "rl_demo.toml: missing, without a default: data.files; set them"),
        ([DEMO, "--gpus", "1", "model.flavor=9B"], "unknown flavor of qwen3 '9B'"),
        ([DEMO, "parallel.expert_parallel=2", "--gpus", "2"], "expected 1, because the model has no experts"),
        (
            [DEMO_MOE, "parallel.expert_parallel=3", "--gpus", "4"],
            "expected a divisor of the number of ranks",
        ),
        (
            [DEMO_MOE, "parallel.expert_parallel=16", "--gpus", "16"],
            "expected a divisor of the number of exp",
        ),
        (
            [DEMO, "parallel.replicate=3", "--gpus", "4"],
            "parallel.replicate: expected a divisor of the number",
        ),
        (
            [DEMO, "parallel.sequence_parallel=8", "--gpus", "8"],
            "parallel.sequence_parallel: expected a divisor of num_attention_heads, 4, got 8",
        ),
        (
            [DEMO, "parallel.sequence_parallel=2", "partition.activations=offload", "--gpus", "2"],
            "partition.activations: expected 'keep' or 'recompute'",
        ),
        ([DEMO, "partition.strategy=none", "data.max_tokens=99", "--gpus", "1"], "more than data.max_tokens"),
    ],
)
def test_wrong_input_is_one_line(capsys, arguments, message):
    assert message in refusal(capsys, *arguments)


def test_a_tower_needs_memory_for_the_images_of_the_data(capsys, tmp_path):
    """Two samples share an image of 8 x 8 tokens; the second one adds an image of 8 x 9."""
    pillow = pytest.importorskip("PIL.Image")
    rows = []
    for name, columns in (("a", 8), ("b", 9)):
        pillow.new("RGB", (32 * columns, 256), "navy" if name == "a" else "red").save(
            tmp_path / f"{name}.png"
        )
    for names in ("a", "ab"):
        tokens, images = [1], []
        for name in names:
            images.append({"start": len(tokens), "image": f"{name}.png"})
            tokens += [9] * 8 * {"a": 8, "b": 9}[name] + [2]
        mask = [0] * (len(tokens) - 1) + [1]
        rows.append({"group_id": "g", "tokens": tokens, "loss_mask": mask, "images": images})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = f"data.files={tmp_path / 'rows.jsonl'}", "model.name=qwen3", "training.dtype=bfloat16"
    trained, frozen = (
        plan(capsys, DEMO, *keys, f"model.vision={vision}", "--gpus", "1") for vision in ("train", "frozen")
    )
    rows = (64 + 72) * 128 * 2  # of the features and of one deepstack output
    assert trained["memory"]["features of images"] == 10 * rows
    assert frozen["memory"]["features of images"] == 2 * rows
    assert trained["memory"]["pixels of images"] == 3 * (64 + 72) * 32**2
    assert not any("tower" in note for found in (trained, frozen) for note in found["notes"])
