"""titan-tree certify: every family passes, and a failure names the layer or the cause of a planted fault."""

import dataclasses
import json
import math
import subprocess
import sys

import numpy as np
import pytest
import torch

import titan_tree.components.lora
import titan_tree.components.moe as moe
import titan_tree.models.qwen3_5
import titan_tree.tree.batch as batches
from tests.support.cases import for_each
from tests.support.hf_families import hf_family
from tests.support.tiny_run import tiny_config
from titan_tree.certify import certify, reference
from titan_tree.certify.certified_step import opened
from titan_tree.certify.checks import _check, _gradients, leaks
from titan_tree.certify.report import text
from titan_tree.cli import main
from titan_tree.config.toml import dump_config
from titan_tree.engine.partitions import GatewayCache
from titan_tree.errors import UserError
from titan_tree.models.decoder import Decoder
from titan_tree.models.layers import RMSNorm, Rope
from titan_tree.models.settings import MODELS
from titan_tree.run.config import load_any
from titan_tree.tree.batch import TreeBatch

TRUNK = list(range(1, 13))
PATHS = [  # after the trunk, the first path parts from the others, and the second one from the third
    [*TRUNK, 20, 21, 22, 23, 24, 25, 26],
    [*TRUNK, 30, 31, 32, 33, 40, 41],
    [*TRUNK, 30, 31, 32, 33, 50, 51, 52],
]


SMALL = [[3, 4, 5], [3, 4, 6]]  # a smaller tree, which comes first in the file and last in the micro-batch


def configured(tmp_path, fields=lambda record: {}, **options):
    """Returns the configuration of a tiny model and two trees of five paths, whose records get ``fields``."""
    tmp_path.mkdir(exist_ok=True)
    with (tmp_path / "data.jsonl").open("w") as file:
        for number, tokens in enumerate(SMALL + PATHS):
            given = 12 if len(tokens) > 12 else 1
            record = {
                "group_id": "g" if len(tokens) > 12 else "small",
                "tokens": tokens,
                "loss_mask": [0] * given + [1] * (len(tokens) - given - 1) + [0],
                "weight": number + 1.0,
                "advantage": number - 0.5,
            }
            file.write(json.dumps(record | fields(record)) + "\n")
    if "5" in options["model__name"] or "next" in options["model__name"]:
        options |= {"model__overrides__full_attention_interval": 2}
    return tiny_config(tmp_path, **{"loss__name": "reinforce"} | options)


def with_logprobs(record):
    """Returns log-probs of another policy for the tokens that the loss counts."""
    pairs = zip(record["tokens"], record["loss_mask"], strict=True)
    old = [-4 + token / 100 if mask else None for token, mask in pairs]
    return {"old_logprobs": old, "ref_logprobs": [value and value / 2 for value in old]}


def truncated(record):
    """Returns a temperature and sampling masks of ids 0 to 39 and the token itself."""
    kept = [sorted({*range(40), token}) for token in record["tokens"]]
    masks = [ids if mask else [] for ids, mask in zip(kept, record["loss_mask"], strict=True)]
    return {"temperature": 0.5 + record["weight"] / 4, "sampling_mask": masks}


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=[] if name == "qwen3" else pytest.mark.exhaustive) for name in MODELS],
)
def test_every_family_passes(family, tmp_path):
    certificate = certify(configured(tmp_path, model__name=family))
    assert certificate.passed, text(certificate)
    names = ["outputs of layers", "log-probs", "loss", "gradients", "gradient of one parameter"]
    assert [check.name for check in certificate.checks] == [*names, "other branches", "same step again"]
    assert all(check.passed for check in certificate.checks)
    assert 0 < certificate.checks[3].error < 1e-5
    assert certificate.facts["data"].endswith("data.jsonl: g, small; 5 paths of 62 tokens, 32 distinct")
    assert certificate.verdict.startswith(
        f"PASSED: trees equal every path alone through {certificate.facts['against']}, in float32"
    )


@pytest.mark.slow
def test_paths_that_share_nothing_are_named(tmp_path):
    certificate = certify(
        configured(tmp_path, lambda record: {"group_id": str(record["weight"])}, model__name="qwen3")
    )
    assert certificate.facts["data"].endswith(
        "3 paths of 25 tokens, 25 distinct; they share nothing, so this says little about trees"
    )


def layout_fault(change):
    """Returns a fault that changes the layout of every batch."""

    def plant(patch):
        made = batches._layout
        patch.setattr(
            batches,
            "_layout",
            lambda tree, partition, access: change(made(tree, partition, access), tree, partition),
        )

    return plant


def pairs_fault(change):
    """Returns a fault that changes the fields of the pairs of trees with several paths."""

    def plant(patch):
        made = batches.tree_pairs

        def faulty(tree, edges, targets=False):
            edges, pairs = made(tree, edges, targets)
            if len(tree.paths) > 1:
                change(pairs)
            return edges, pairs

        patch.setattr(batches, "tree_pairs", faulty)

    return plant


def positions(layout, tree, partition):
    late = torch.from_numpy(tree.positions[partition.own_tokens] >= 12).int()
    return dataclasses.replace(layout, positions=layout.positions + late)


def visible_sibling(layout, tree, partition):
    return dataclasses.replace(layout, subtree_end=torch.full_like(layout.subtree_end, len(tree)))


def state_before(layout, tree, partition):
    before = torch.arange(len(layout.chunks.before), dtype=torch.int32) - 1
    return dataclasses.replace(layout, chunks=layout.chunks._replace(before=before))


def wrong_parent(patch):
    made = TreeBatch.from_plan

    def from_plan(plan, *args):
        label = {int(token): i for i, token in enumerate(plan.tree.tokens)}
        found = made(plan, *args)
        return [
            dataclasses.replace(b, edge_source=torch.tensor([label[t] - 1 for t in b.edge_label.tolist()]))
            for b in found
        ]

    patch.setattr(TreeBatch, "from_plan", from_plan)


def rope(patch):
    patch.setattr(Decoder, "make_rope", lambda model, at: Rope.at(at, model.config.rotary_dim, 1e4))


def unscaled_lora(patch):
    made = titan_tree.components.lora.factors

    def factors(module, *args):
        pair = made(module, *args)
        return pair and (pair[0], pair[1] / module.lora_scaling)

    patch.setattr(titan_tree.components.lora, "factors", factors)


def dropped_mask(patch):
    made = batches.tree_pairs

    def faulty(tree, edges):
        edges, pairs = made(tree, "all")
        if len(tree.paths) > 1:
            pairs.fields["loss_mask"][:] = 1
        return edges, pairs

    patch.setattr(batches, "tree_pairs", faulty)


def wrong_weight(pairs):
    pairs.path_fields["weight"][1] *= 1.5


def other_advantage(pairs):
    pairs.fields["advantage"][:] = np.roll(pairs.fields["advantage"], 1)


def no_renormalization(patch):
    made = moe.MoE.forward

    def forward(self, *args):
        self.norm_topk_prob = False
        return made(self, *args)

    patch.setattr(moe.MoE, "forward", forward)


def crossing_conv(patch):
    made = titan_tree.models.qwen3_5.prepare_conv

    def prepare_conv(layout, width):
        before = torch.arange(len(layout.predecessor), dtype=layout.predecessor.dtype) - 1
        return made(dataclasses.replace(layout, predecessor=before), width)

    patch.setattr(titan_tree.models.qwen3_5, "prepare_conv", prepare_conv)


def untied_head(patch):
    patch.setattr(Decoder, "output_weight", property(lambda model: model.embed_tokens.weight.detach()))


def norm_in_bfloat16(patch):
    made = RMSNorm.forward
    patch.setattr(RMSNorm, "forward", lambda norm, x: made(norm, x.bfloat16()).to(x.dtype))


def stale_keys(patch):
    made = GatewayCache.read

    def read(cache, batch):
        leaves = made(cache, batch)
        return leaves and [rows.detach().roll(1, 0).requires_grad_(rows.requires_grad) for rows in leaves]

    patch.setattr(GatewayCache, "read", read)


def lost_gradients(patch):
    made = GatewayCache.export_gradients

    def zeros(cache, batch):
        return [torch.zeros_like(gradient) for gradient in made(cache, batch)]

    patch.setattr(GatewayCache, "export_gradients", zeros)


LORA = {"lora__rank": 2}
PARTITIONS = {"data__max_tokens": 16}
KTO = {"loss__name": "kto", "loss__reduction": "path_token_mean", "loss__options__reference_point": 0.1}
ATTENTION = "outputs of layers: layers.0 (self_attn), largest at"
PARENT = "log-probs: largest at token 16 of path g/4, the first after a branch: error "
DELTANET = "outputs of layers: layers.0 (linear_attn), largest at"
FAULTS = [  # how it is planted, the family, options, what the verdict says
    (
        "positions",
        layout_fault(positions),
        "qwen3",
        {},
        ATTENTION,
    ),
    (
        "mask",
        layout_fault(visible_sibling),
        "qwen3",
        {},
        ATTENTION,
    ),
    (
        "parent",
        wrong_parent,
        "qwen3",
        {},
        PARENT,
    ),
    ("theta", rope, "qwen3", {}, ATTENTION),
    ("lora", unscaled_lora, "qwen3", LORA, ATTENTION),
    ("loss mask", dropped_mask, "qwen3", {"loss__name": "sft"}, "loss: "),
    ("weight", pairs_fault(wrong_weight), "qwen3", {}, "loss: "),
    ("advantage", pairs_fault(other_advantage), "qwen3", {}, "loss: "),
    ("router", no_renormalization, "qwen3_moe", {}, ATTENTION),
    (
        "state",
        layout_fault(state_before),
        "qwen3_5",
        {},
        DELTANET,
    ),
    ("conv", crossing_conv, "qwen3_5", {}, DELTANET),
    ("tied head", untied_head, "qwen3", {}, "gradients: largest: embed_tokens.weight"),
    ("norm", norm_in_bfloat16, "llama", {}, ATTENTION),
    ("stale keys", stale_keys, "qwen3", PARTITIONS, ATTENTION),
    ("gradients of keys", lost_gradients, "qwen3", PARTITIONS, "gradients: largest: "),
]
SLOW = ("mask", "weight", "state")  # the other faults are exhaustive


@pytest.mark.parametrize(
    ("plant", "family", "options", "named"),
    [
        pytest.param(*fault, id=name, marks=pytest.mark.slow if name in SLOW else pytest.mark.exhaustive)
        for name, *fault in FAULTS
    ],
)
def test_a_planted_fault_fails_and_is_named(plant, family, options, named, tmp_path, monkeypatch):
    plant(monkeypatch)
    certificate = certify(configured(tmp_path, model__name=family, **options))
    assert not certificate.passed
    assert certificate.verdict.startswith(f"FAILED in float32: {named}"), text(certificate)


def test_a_leak_is_found_without_a_reference(tmp_path, monkeypatch):
    layout_fault(visible_sibling)(monkeypatch)
    with opened(configured(tmp_path, model__name="qwen3"), 1000) as subject:
        check = leaks(subject.tree_step, subject.micro_batches)
    assert check.passed is False
    assert check.error > 1e-4
    assert check.found == "layers.0, path small/2: other tokens there change the output"


def test_paths_that_do_not_fit_are_cut_around_their_branch(tmp_path):
    with opened(configured(tmp_path, truncated, model__name="qwen3"), 12) as subject:
        first, second = subject.paths
        assert [first.tokens.tolist(), second.tokens.tolist()] == [
            [10, 11, 12, 20, 21, 22],
            [10, 11, 12, 30, 31, 32],
        ]
        assert first.loss_mask.tolist() == second.loss_mask.tolist() == [0, 0, 0, 1, 1, 1]
        assert first.id.endswith("[9:15]")
        assert first.sampling_mask.sizes.tolist() == [0, 0, 0, 40, 40, 40]
        assert len(subject.trees) == 1


@pytest.mark.slow
def test_the_command_writes_json_and_a_page_and_its_status_says_whether_all_checks_passed(
    tmp_path, monkeypatch, capsys
):
    config = configured(tmp_path, model__name="qwen3", training__dtype="bfloat16")
    (tmp_path / "run.toml").write_text(dump_config(config))
    arguments = ["certify", str(tmp_path / "run.toml"), "--json", str(tmp_path / "c.json")]
    assert main([*arguments, "--page", str(tmp_path / "c.html"), "data.max_tokens=16"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("PASSED: trees equal every path alone through the unmodified Qwen3ForCausalLM of ")
    written = json.loads((tmp_path / "c.json").read_text())
    assert written["passed"]
    assert written["checks"][3]["floor"] > 1e-3
    page = (tmp_path / "c.html").read_text()
    assert written["verdict"] in page
    assert "://" not in page  # it needs no other file
    pairs_fault(wrong_weight)(monkeypatch)
    assert main(arguments) == 1
    assert "FAILED in bfloat16: loss: " in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--page", "--json"])
def test_a_certificate_replaces_neither_its_input_nor_another_file(option, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    data = {"group_id": "a", "tokens": [1, 2]}
    files = {"run.toml": 'model.flavor = "debug"\ndata.files = "*.jsonl"\n', "d.jsonl": json.dumps(data)}
    for name, content in (files | {"notes": '{"passed": 3}'}).items():
        (tmp_path / name).write_text(content)
    for name in files:
        assert main(["certify", "run.toml", option, name, "--force"]) == 2
        message = f"{name}: the command reads this file; name another one to write"
        assert capsys.readouterr().err == f"titan-tree: error: {message}\n"
    assert main(["certify", "run.toml", option, "notes"]) == 2
    assert "notes: this file exists, and the command did not write it" in capsys.readouterr().err


def test_tokens_that_the_loss_does_not_count_are_refused(tmp_path):
    def late(record):
        return {"tokens": record["tokens"] + [60] * 30, "loss_mask": [0] * (len(record["tokens"]) + 29) + [1]}

    with pytest.raises(UserError) as error:
        certify(configured(tmp_path, late, model__name="qwen3"), max_tokens=20)
    assert str(error.value) == (
        "titan-tree certify: the loss counts none of the 20 tokens that are compared, because loss masks "
        "or weights are 0; raise --tokens, or check the data"
    )


def test_an_error_without_a_finite_limit_fails():
    for error, floor in ((math.inf, math.inf), (math.nan, 0.0), (0.0, math.inf)):
        assert not _check("loss", "", "here", error, floor, 1.2).passed


def test_gradients_of_zero_certify_nothing():
    zero, one = {"a": torch.zeros(2)}, {"a": torch.ones(2)}
    with pytest.raises(UserError, match="all gradients of the first step are 0, so a certificate would say"):
        _gradients(zero, zero, zero, 1.2)
    (check,) = _gradients(one | {"b": torch.ones(2)}, one, one, 1.2)
    assert (check.passed, check.found) == (False, "b: the reference has no such parameter to compare with")


def taught(record):
    """Returns a teacher's log-probs of two ids for the tokens that the loss counts, at a temperature."""
    pairs = zip(record["tokens"], record["loss_mask"], strict=True)
    topk = [{token: -0.5 - token / 100, 2: -2.0} if mask else None for token, mask in pairs]
    return {"teacher_topk": topk, "temperature": 0.5 + record["weight"] / 4}


def preferred(record):
    return {"preference": "desirable" if record["advantage"] > 1 else "undesirable"} | with_logprobs(record)


@pytest.mark.exhaustive
@for_each(
    "fields, options",
    [
        (truncated, {}),
        (with_logprobs, {"loss__name": "grpo", "loss__kl__coefficient": 0.1, "loss__entropy": 0.01}),
        (with_logprobs, {"loss__name": "gspo", **PARTITIONS}),
        (taught, {"loss__name": "distill_topk", "loss__options__beta": 0.5, **PARTITIONS}),
        (preferred, KTO),
        (truncated, {"loss__reduction": "first_path_token_mean", "loss__whiten": "true"}),
        (truncated, {"loss__name": "sft", "loss__reduction": "distinct_token_mean"}),
        (truncated, {"partition__strategy": "single_path", "data__max_tokens": 20}),
        (truncated, {"data__layout": "flat", "training__activation_checkpoint": "full", **LORA}),
    ],
)
def test_losses_and_fields_of_paths_pass(fields, options, tmp_path):
    certificate = certify(configured(tmp_path, fields, model__name="qwen3", **options))
    assert certificate.passed, text(certificate)


@pytest.mark.exhaustive
def test_without_transformers_the_reference_is_our_model_path_by_path(tmp_path, monkeypatch):
    def missing():
        raise UserError("transformers is not installed")

    monkeypatch.setattr(reference, "import_transformers", missing)
    certificate = certify(configured(tmp_path, model__name="qwen3_moe", **LORA))
    assert certificate.passed, text(certificate)
    own = "titan_tree's own model (transformers is not installed)"
    assert certificate.verdict.startswith(f"PASSED: trees equal every path alone through {own}, in float32; ")


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "family",
    [
        *("bailing_hybrid", "gemma2", "gpt_oss", "deepseek_v3", "kimi_linear", "lfm2", "lfm3", "nemotron_h"),
        *("olmo_hybrid", "qwen3_next", "qwen3_5_text"),
    ],
)
def test_snapshots_pass_with_layers_of_either_library(family, dtype, tmp_path):
    hf_family(family).save_pretrained(tmp_path / "hf")
    snapshot = {"model__flavor": "null", "model__overrides": "{}", "model__hf_path": tmp_path / "hf"}
    certificate = certify(configured(tmp_path, model__name="qwen3", training__dtype=dtype, **snapshot))
    assert certificate.passed, text(certificate)


@pytest.mark.exhaustive
@pytest.mark.parametrize("shared", ["expert_parallel", "sequence_parallel"])
def test_two_ranks_equal_every_path_alone(shared, tmp_path):
    (tmp_path / "run.toml").write_text(dump_config(configured(tmp_path, model__name="qwen3_moe", **LORA)))
    files = ["--nproc", "2", "--json", str(tmp_path / "c.json"), f"parallel.{shared}=2"]
    command = [sys.executable, "-m", "titan_tree", "certify", str(tmp_path / "run.toml"), *files]
    subprocess.run(command, check=True, timeout=300)
    written = json.loads((tmp_path / "c.json").read_text())
    assert written["facts"]["step"] == "loss reinforce, float32, cpu, 2 ranks"
    names = ["loss", "gradients", "gradient of one parameter", "same step again"]
    assert [check["name"] for check in written["checks"]] == names
    assert 0 < written["checks"][1]["error"] < 1e-5


@pytest.mark.exhaustive
def test_rollouts_of_reinforcement_learning_pass(tmp_path):
    config = load_any("train_configs/rl_demo.toml", [f"folder={tmp_path}", "rl.rollouts=2", "rl.branches=1"])
    certificate = certify(config)
    assert certificate.passed, text(certificate)
    source = "rollouts of desk, sampled by CachedSampler, with random advantages because all are 0: 0/1/0; "
    assert certificate.facts["data"].startswith(source)
