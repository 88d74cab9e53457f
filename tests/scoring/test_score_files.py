"""titan-tree score: the file holds all samples, with log-probs as the model gives them path by path."""

import json
import math
import random
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from tests.support.datasets import sample_reader
from tests.support.oracle import random_groups
from tests.support.processes import as_rank, run_ranks
from tests.support.tiny_run import SMALL, VOCAB, read_metrics, tiny_config, train
from titan_tree.cli import main
from titan_tree.config.toml import dump_config
from titan_tree.distributed.mesh import OneRank
from titan_tree.errors import UserError
from titan_tree.models.pretrained import save_pretrained
from titan_tree.run.model_setup import build_parallel_model
from titan_tree.scoring.resumable_file import ResumableFile
from titan_tree.scoring.score_files import score_files
from titan_tree.scoring.score_trees import tree_logprobs
from titan_tree.tree.paths import TokenPath


def write_rows(file: Path, seed: int = 0, *, advantages: bool = True, pairs: bool = False) -> Path:
    """Writes groups of token ids with every field. Ids repeat, and some rows are groups of their own."""
    draw, rows = random.Random(seed), []
    for group in range(6):
        prompt = [draw.randrange(VOCAB) for _ in range(draw.randint(3, 9))]
        for sample in range(1 if group == 2 else 3):
            answer = [draw.randrange(3) for _ in range(draw.randint(2, 6))]
            size = len(prompt) + len(answer)
            rows.append(
                {
                    **({"id": "same"} if group in (2, 3) else {"group_id": f"g{group}"}),
                    **({"rollout_id": "r"} if group == 4 and sample else {}),
                    **({} if not pairs else {"preference": draw.choice(["chosen", "rejected"])}),
                    **({} if not pairs or group < 3 else {"pair": "p"}),
                    "tokens": prompt + answer,
                    "loss_mask": [0] * len(prompt) + [1] * (len(answer) - 1) + [0.5],
                    "weight": draw.choice([0, 1, 2.5]),
                    "temperature": 1.0 if group else 0.7,
                    "reward": 1 if group == 4 and sample else draw.choice([0, 0.1, 1]),
                    "policy_version": [None] * len(prompt) + [4] * len(answer),
                    "sampling_mask": None if group < 4 else [None] * len(prompt) + [[i] for i in answer],
                    "rollout_logprobs": [None] * len(prompt) + [draw.uniform(-4.4, -3.9) for _ in answer],
                }
            )
            if advantages:
                rows[-1]["advantage"] = [draw.uniform(-2, 2) for _ in range(size)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def score(folder: Path, out: str, **options):
    """Scores folder/rows.jsonl, and returns the totals. Options are those of score_files and keys."""
    own = {name: options.pop(name) for name in ("field", "entropies", "routed_experts") if name in options}
    return score_files(config(folder, **options), folder / out, **own)


def config(folder: Path, **options):
    return tiny_config(folder, **{"data__files": f"[{folder / 'rows.jsonl'}]"} | options)


def read(file: Path):
    """Returns the paths of each group."""
    reader = sample_reader(file)
    return [(group.id, reader.paths(group)) for group in reader.files.groups()]


def model_of(folder: Path, **options):
    """Returns the model of the configuration, without a process group."""
    tables = config(folder, **options)
    return build_parallel_model(tables.model, tables.training, tables.parallel, OneRank())


def alone(model, path: TokenPath) -> np.ndarray:
    """Returns [T] log-probs of one path, run alone; NaN where nothing is scored."""
    with torch.no_grad():
        (logprobs,) = tree_logprobs(model, [path.tokens.tolist()], temperature=path.temperature)
    values = np.concatenate([[np.nan], logprobs.numpy()]).astype(np.float32)
    if path.sampling_mask is not None:
        assert path.sampling_mask.sizes.tolist() == (path.loss_mask > 0).tolist()
        values *= path.loss_mask == 0  # the only id that was kept has the probability 1
    return np.where(path.loss_mask > 0, values, np.nan)


@pytest.mark.parametrize("max_tokens", [160, 12])
def test_every_sample_keeps_its_fields_and_gets_its_log_probs(tmp_path, max_tokens):
    write_rows(tmp_path / "rows.jsonl", pairs=True)
    options = {"data__max_tokens": max_tokens, "data__global_batch_groups": 2}
    totals = score(tmp_path, "out.jsonl", **options)
    before, after = read(tmp_path / "rows.jsonl"), read(tmp_path / "out.jsonl")
    # Rows without group_id may have equal ids; three rows called "same" and one more stay four groups.
    assert [id for id, _ in after] == ["g0", "g1", "same", "same#2", "same#3", "same#4", "g4", "g5"]
    assert totals.groups == len(before) == len(after)
    model, compared = model_of(tmp_path, **options), 0
    for (old_id, old), (new_id, new) in zip(before, after, strict=True):
        assert len(old) == len(new)
        for a, b in zip(old, new, strict=True):
            for field in fields(TokenPath):
                if field.name == "sampling_mask" and a.sampling_mask is not None:
                    assert list(map(list, a.sampling_mask)) == list(map(list, b.sampling_mask))
                elif field.name not in ("id", "pair", "rollout", "old_logprobs"):
                    np.testing.assert_array_equal(getattr(a, field.name), getattr(b, field.name), field.name)
            assert a.id == b.id or a.id == "same"
            assert a.pair.removeprefix(old_id) == b.pair.removeprefix(new_id)
            np.testing.assert_allclose(b.old_logprobs, alone(model, a), rtol=1e-5, atol=1e-5)
            compared += int(np.isfinite(b.old_logprobs).sum())
    assert compared > 40
    rows = [[json.loads(line) for line in (tmp_path / f).open()] for f in ("rows.jsonl", "out.jsonl")]
    for a, b in zip(*rows, strict=True):
        assert a["reward"] == b["reward"]
        assert a.get("rollout_id") == b.get("rollout_id")


def test_the_difference_from_the_sampling_engine(tmp_path):
    write_rows(tmp_path / "rows.jsonl")
    totals = score(tmp_path, "out.jsonl")
    ratios = [
        b - a
        for _, paths in read(tmp_path / "out.jsonl")
        for path in paths
        for a, b, mask in zip(path.rollout_logprobs, path.old_logprobs, path.loss_mask, strict=True)
        if mask
    ]
    assert totals.compared == len(ratios)
    assert totals.abs_sum == pytest.approx(sum(map(abs, ratios)), rel=1e-5)
    assert totals.k3_sum == pytest.approx(sum(math.exp(r) - 1 - r for r in ratios), rel=1e-5)
    assert totals.largest == pytest.approx(max(map(abs, ratios)), rel=1e-5)
    assert totals.large == sum(abs(r) > 0.1 for r in ratios) < len(ratios)


def test_entropies_are_those_of_the_distribution_over_all_tokens(tmp_path):
    write_rows(tmp_path / "rows.jsonl")
    score(tmp_path, "out.jsonl", entropies=True, field="ref_logprobs")
    row = json.loads((tmp_path / "out.jsonl").open().readline())
    model, tokens = model_of(tmp_path), row["tokens"]
    assert "old_logprobs" not in row
    for t, entropy in enumerate(row["entropies"]):
        assert (entropy is None) == (row["loss_mask"][t] == 0) == (row["ref_logprobs"][t] is None)
        if entropy is not None:
            lists = [[*tokens[:t], other] for other in range(VOCAB)]
            with torch.no_grad():
                scores = tree_logprobs(model, lists, temperature=row["temperature"])
            last = torch.stack([score[-1] for score in scores]).double()
            assert entropy == pytest.approx(-(last.exp() * last).sum().item(), rel=1e-4)
    assert all(path.ref_logprobs is not None for _, paths in read(tmp_path / "out.jsonl") for path in paths)


@pytest.mark.parametrize("max_tokens", [160, 12])
def test_experts_are_those_that_tree_logprobs_returns(tmp_path, max_tokens):
    write_rows(tmp_path / "rows.jsonl")
    options = {**SMALL["qwen3_moe"], "data__max_tokens": max_tokens}
    score(tmp_path, "out.jsonl", routed_experts=True, **options)
    model = model_of(tmp_path, **options)
    for _, paths in read(tmp_path / "out.jsonl"):
        for path in paths:
            lists = [path.tokens.tolist()]
            with torch.no_grad():
                _, (experts,) = tree_logprobs(model, lists, return_routed_experts=True)
            np.testing.assert_array_equal(np.sort(path.routed_experts), np.sort(experts.numpy()))


def test_training_on_the_scored_file_equals_training_on_log_probs_from_this_process(tmp_path):
    """GRPO, with group advantages that both runs compute from the rewards."""
    write_rows(tmp_path / "rows.jsonl", advantages=False)
    keys = {"data__advantage": "group", "loss__name": "grpo", "optimizer__lr": 1e-2}
    score(tmp_path, "scored.jsonl", **keys)
    model, rows = model_of(tmp_path), []
    paths = [path for _, paths in read(tmp_path / "rows.jsonl") for path in paths]
    for line, path in zip((tmp_path / "rows.jsonl").open(), paths, strict=True):
        old = alone(model, path)
        values = [None if math.isnan(value) else float(value) for value in old]
        rows.append(json.loads(line) | {"old_logprobs": values})
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def metrics(name):
        run = config(tmp_path / name, **keys | {"data__files": tmp_path / f"{name}.jsonl"})
        train(run)
        return read_metrics(run)

    for a, b in zip(metrics("scored"), metrics("own"), strict=True):
        assert a.keys() == b.keys()
        for name in a:
            assert float(a[name]) == pytest.approx(float(b[name]), rel=1e-3, abs=1e-6), name
    assert any(float(row["loss"]) for row in metrics("scored"))


def test_the_turns_of_a_conversation_stay_one_rollout(tmp_path):
    """The scored file gives the advantages of the conversations, whose turns are paths of one rollout."""
    talk = [{"role": role, "content": text} for role, text in (("user", "q"), ("assistant", "a"))]
    talks = [[*talk, {"role": "user", "content": "r"}, {"role": "assistant", "content": x}] for x in "xy"]
    task = {"id": "t", "trajectories": [{"messages": m, "reward": i} for i, m in enumerate([*talks, talk])]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(task))
    options = {"data__tokenizer": "byte", "model__overrides__vocab_size": 512}
    score(tmp_path, "out.jsonl", **options)

    def advantages(file, tokenizer, name):
        from titan_tree.components.tree_tokenizer import TreeTokenizer

        reader = sample_reader(file, TreeTokenizer.byte_level() if tokenizer else None, advantage=name)
        return [
            (path.id, path.rollout_tokens, path.advantage.tolist())
            for group in reader.files.groups()
            for path in reader.paths(group)
        ]

    for name in ("group", "gigpo", "spo"):
        want = advantages(tmp_path / "rows.jsonl", True, name)
        assert advantages(tmp_path / "out.jsonl", False, name) == want


def on_two_ranks(rank, ports, folder):
    with as_rank(rank, 2, ports[0]):
        options = {**SMALL["qwen3_moe"], "data__global_batch_groups": 3, "data__max_tokens": 4}
        totals = score(folder, "two.jsonl", routed_experts=True, **options)
        assert totals.groups == 9
    with as_rank(rank, 2, ports[1]):  # both ranks score each tree together
        options = {"parallel__sequence_parallel": 2, "data__global_batch_groups": 3, "data__max_tokens": 8}
        score(folder, "shared.jsonl", **options)
    with as_rank(rank, 2, ports[2]), pytest.raises(UserError, match="old_logprobs: expected none, because"):
        score(folder, "wrong.jsonl", data__files=folder / "wrong.jsonl.data")  # the group of rank 1


@pytest.mark.slow
def test_two_ranks_write_the_file_of_one(tmp_path):
    """Ranks get different numbers of groups and partitions, and run some in another order than one rank."""
    write_rows(tmp_path / "rows.jsonl", advantages=False)
    (group,) = random_groups(20, num_nodes=12)
    with (tmp_path / "rows.jsonl").open("a") as file:
        for path in group:
            row = {"tokens": path.tokens.tolist(), "loss_mask": path.loss_mask.tolist(), "reward": 1}
            file.write(json.dumps({"group_id": "large", **row}) + "\n")
    config(tmp_path)  # writes the configuration that both ranks read
    wrong = [{"tokens": [1, 2]}, {"tokens": [1, 2], "old_logprobs": [0, -1]}]
    (tmp_path / "wrong.jsonl.data").write_text("".join(json.dumps(row) + "\n" for row in wrong))
    run_ranks(on_two_ranks, 2, tmp_path, num_groups=3)
    score(tmp_path, "one.jsonl", routed_experts=True, **SMALL["qwen3_moe"])
    assert_same_scores(tmp_path / "one.jsonl", tmp_path / "two.jsonl")
    score(tmp_path, "alone.jsonl")
    assert_same_scores(tmp_path / "alone.jsonl", tmp_path / "shared.jsonl")
    assert not (tmp_path / "two.jsonl.partial").exists()


def assert_same_scores(one, other):
    """Compares log-probs up to rounding, and everything else exactly."""
    for a, b in zip(*([json.loads(line) for line in file.open()] for file in (one, other)), strict=True):
        scores = [np.array([np.nan if x is None else x for x in row.pop("old_logprobs")]) for row in (a, b)]
        np.testing.assert_allclose(*scores, rtol=1e-5, atol=1e-5)
        assert a == b


class Killed(BaseException):
    pass


@pytest.mark.parametrize("at", ["before", "content", "after"])
def test_a_killed_run_continues_without_loss_or_duplicates(tmp_path, monkeypatch, at):
    """It ends in the third round: before it writes, with half a record written, or with all of it written."""
    write_rows(tmp_path / "rows.jsonl")
    keys = {"data__global_batch_groups": 2}
    score(tmp_path, "whole.jsonl", **keys)
    append, rounds = ResumableFile.append, []

    def dying(self, texts, progress):
        rounds.append(len(texts))
        if len(rounds) == 3:
            if at == "content":
                with self._content.open("a") as file:
                    file.write(texts[0][:-30])
            if at == "after":
                append(self, texts, progress)
            raise Killed
        append(self, texts, progress)

    monkeypatch.setattr(ResumableFile, "append", dying)
    with pytest.raises(Killed):
        score(tmp_path, "out.jsonl", **keys)
    assert not (tmp_path / "out.jsonl").exists()
    with pytest.raises(UserError, match=r"an interrupted run had other settings or data \(field\)"):
        score(tmp_path, "out.jsonl", field="ref_logprobs", **keys)
    done = []
    monkeypatch.setattr(ResumableFile, "append", lambda *args: (done.append(args[1]), append(*args)))
    totals = score(tmp_path, "out.jsonl", **keys)
    assert len(done) == (1 if at == "after" else 2)  # of four rounds
    assert totals.groups == 8
    assert (tmp_path / "out.jsonl").read_text() == (tmp_path / "whole.jsonl").read_text()
    assert not (tmp_path / "out.jsonl.partial").exists()


def test_the_command_line(tmp_path, capsys):
    write_rows(tmp_path / "rows.jsonl")
    (tmp_path / "c.toml").write_text(dump_config(config(tmp_path)))
    data, out = str(tmp_path / "rows.jsonl"), str(tmp_path / "out.jsonl")
    command = ["score", data, out, "--config", str(tmp_path / "c.toml"), "data.max_tokens=20"]
    assert main(command) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == f"{out}: 8 groups with 16 samples; tokens: 184 of all paths, 123 distinct"
    masks = [json.loads(line)["loss_mask"] for line in (tmp_path / "rows.jsonl").open()]
    trained = sum(entry > 0 for mask in masks for entry in mask)
    assert printed[1].startswith(f"rollout_logprobs of {trained} tokens: mean |difference| ")

    def error(*arguments):
        assert main(["score", *arguments]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    new = str(tmp_path / "new.jsonl")
    assert "--model or --config: missing" in error(data, new)
    assert "out.jsonl: this file exists; name another one, or replace it with --force" in error(*command[1:])
    with_config = ["--config", str(tmp_path / "c.toml")]
    assert "--field: expected one of old_logprobs, ref_logprobs" in error(
        data, new, *with_config, "--field", "rollout_logprobs"
    )
    assert "--experts: expected a model with experts" in error(data, new, *with_config, "--experts")
    message = error(out, str(tmp_path / "again.jsonl"), *with_config)
    assert "path g0/1: old_logprobs: expected none, because they are computed" in message
    assert main(["score", out, new, *with_config, "--field", "ref_logprobs"]) == 0
    paths = [path for _, paths in read(Path(new)) for path in paths]
    assert all(path.old_logprobs is not None and path.ref_logprobs is not None for path in paths)


def test_a_store_whose_rollouts_have_several_paths_is_refused(tmp_path):
    rows = [{"group_id": 1, "rollout_id": "r", "tokens": [1, 2, i]} for i in range(2)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["ingest", str(tmp_path / "rows.jsonl"), str(tmp_path / "s.store")]) == 0
    with pytest.raises(UserError, match="does not say which samples are one rollout, and these have several"):
        score(tmp_path, "out.jsonl", data__files=tmp_path / "s.store")


def test_a_snapshot_without_a_configuration(tmp_path):
    write_rows(tmp_path / "rows.jsonl")
    model = model_of(tmp_path)
    save_pretrained(model, tmp_path / "snapshot")
    command = ["score", str(tmp_path / "rows.jsonl"), str(tmp_path / "out.jsonl")]
    assert main([*command, "--model", str(tmp_path / "snapshot"), "training.dtype=float32"]) == 0
    for _, paths in read(tmp_path / "out.jsonl"):
        for path in paths:
            np.testing.assert_allclose(path.old_logprobs, alone(model, path), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("max_tokens", [160, 12])
def test_the_likeliest_tokens_are_those_of_transformers(tmp_path, max_tokens, capsys):
    rows = [json.loads(line) for line in write_rows(tmp_path / "rows.jsonl").open()]
    for row in rows:
        row["teacher"] = "large"
        if row["sampling_mask"] and row["group_id"] == "g5":
            row["sampling_mask"] = [mask and [*range(0, 60, 9), *mask] for mask in row["sampling_mask"]]
            row["sampling_mask"] = [mask and sorted({*mask}) for mask in row["sampling_mask"]]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    save_pretrained(model_of(tmp_path), tmp_path / "snapshot")
    command = ["score", str(tmp_path / "rows.jsonl"), str(tmp_path / "out.jsonl"), "--top-k", "5"]
    command += ["--model", str(tmp_path / "snapshot"), "training.dtype=float32"]
    assert main([*command, f"data.max_tokens={max_tokens}"]) == 0
    hf = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "snapshot", dtype=torch.float32)
    sizes = set()
    for path in [path for _, paths in read(tmp_path / "out.jsonl") for path in paths]:
        assert (path.teacher, path.old_logprobs) == ("large", None)
        with torch.no_grad():
            logits = hf(torch.tensor([path.tokens.tolist()])).logits[0, :-1] / path.temperature
        targets = path.teacher_topk
        assert (targets.sizes > 0).tolist() == [False, *(path.loss_mask[1:] > 0)]
        for t in np.flatnonzero(targets.sizes):
            got = targets.of_tokens(np.array([t]))
            kept = path.sampling_mask.of_tokens(np.array([t])).ids if path.sampling_mask else range(VOCAB)
            ids = np.array([*kept])
            values, order = logits[t - 1][ids].log_softmax(0).topk(min(5, len(ids)))
            assert got.ids.tolist() == ids[order.numpy()].tolist()
            np.testing.assert_allclose(got.logprobs, values, rtol=1e-5, atol=1e-5)
            sizes.add(len(got.ids))
    assert sizes == {1, 5}
    options = {"data__files": f"[{tmp_path / 'out.jsonl'}]", "data__max_tokens": max_tokens}
    run = tiny_config(tmp_path, loss__name="distill_topk", training__steps=1, **options)
    train(run)
    (row,) = read_metrics(run)
    assert float(row["teacher_kl"]) == pytest.approx(0, abs=1e-5)  # the student is the teacher
    assert 0 < float(row["teacher_mass"]) < 1
    files = [str(tmp_path / name) for name in ("out.jsonl", "again.jsonl")]
    again = ["score", *files, *command[3:]]
    assert main([*again, "--field", "old_logprobs"]) == 2
    assert (
        "teacher_topk: expected none, because they are computed; remove the field" in capsys.readouterr().err
    )
