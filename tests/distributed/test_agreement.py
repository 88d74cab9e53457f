"""Ranks that run or read different things end with one line that names the difference and the ranks."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.processes import as_rank, run_ranks
from tests.support.tiny_run import tiny_config, write_config, write_groups
from titan_tree.distributed import agreement
from titan_tree.distributed.agreement import check_agreement
from titan_tree.engine.step_io import NO_COUNTS, StepInput, all_reduce_counts
from titan_tree.errors import AgreedError, UserError
from titan_tree.run import rank_facts as at_start
from titan_tree.run.trainer import Trainer

CHATML = "{% for m in messages %}{{ m.role + m.content }}{% endfor %}"


def differ(rank: int, ports: list[int], folder: Path) -> None:
    """In each case, rank 1 has another setting, file or code than rank 0."""
    own = folder / f"rank{rank}"
    own.mkdir()
    (own / "template.jinja").write_text(CHATML + " " * rank)
    snapshot = own / "tokenizer"
    snapshot.mkdir()
    (snapshot / "tokenizer.json").write_text(json.dumps({"rank": rank}))
    write_groups(own / "data.jsonl", seed=0)
    content = (own / "data.jsonl").read_text()
    (own / "same size.jsonl").write_text(content.replace("0.5", "1.0") if rank else content)
    bytes_ = r"[\d,]+ bytes, checksum \w{8}"
    cases: list[tuple[dict[str, Any], str]] = [
        (
            {"model__overrides__hidden_size": 64 if rank else 32},
            r"model.overrides.hidden_size \(rank 0: 32; rank 1: 64\)",
        ),
        ({"optimizer__lr": 2e-3 if rank else 1e-3}, r"optimizer.lr \(rank 0: 0.001; rank 1: 0.002\)"),
        (
            {"optimizer__lr": 2e-3 if rank else 1e-3, "training__seed": rank},
            r"optimizer.lr \(rank 0: 0.001; rank 1: 0.002\) and 1 more",
        ),
        (
            {"data__files": own / "same size.jsonl"},
            rf"data.files\[0\] \(rank 0: {bytes_}; rank 1: {bytes_}\)",
        ),
        (
            {"data__files": own / "data.jsonl", "data__template": own / "template.jinja"},
            rf"data.template \(rank 0: 59 {bytes_[7:]}; rank 1: 60 {bytes_[7:]}\)",
        ),
        ({"data__tokenizer": snapshot}, rf"data.tokenizer \(rank 0: {bytes_}; rank 1: {bytes_}\)"),
    ]
    for port, (options, difference) in zip(ports, cases, strict=False):
        with as_rank(rank, 2, port), pytest.raises(UserError) as error:
            Trainer(tiny_config(folder, **options))
        torch.distributed.destroy_process_group()
        message = (
            rf"start: rank 0, 1 differ in {difference}; start all ranks with the same files and settings"
        )
        assert re.fullmatch(message, str(error.value)), str(error.value)
    with as_rank(rank, 2, ports[-1]), pytest.MonkeyPatch.context() as patch:
        patch.setattr(at_start, "_version", lambda name: f"2.{rank}" if name == "torch" else "1")
        with pytest.raises(UserError, match=r"in the version of torch \(rank 0: 2.0; rank 1: 2.1\); start"):
            Trainer(tiny_config(folder))
        check_agreement({"a": 1}, "now")  # the group still works
        with pytest.raises(
            AgreedError, match=r"^data: rank 0, 1 differ in the groups that they have read; st"
        ):
            all_reduce_counts(StepInput.nothing(), checksum=7 + rank)
        assert all_reduce_counts(StepInput.nothing(), checksum=7) == (NO_COUNTS, 0)
        assert all_reduce_counts(StepInput.nothing(), rank, None if rank else 7) == (NO_COUNTS, 1)


@pytest.mark.slow
def test_ranks_that_start_with_other_settings_or_files_are_named(tmp_path: Path) -> None:
    write_config(tmp_path)
    run_ranks(differ, 2, tmp_path, num_groups=7)


def read_other_groups(rank: int, ports: list[int], folder: Path, balance: bool) -> None:
    """The file of rank 1 differs in one token, where the check at the start does not look."""
    data = folder / f"data{rank}.jsonl"
    lines = [json.dumps({"tokens": [1, 2, 3, group]}) for group in range(12)]
    if rank:
        lines[4] = lines[4].replace("[1, 2, 3", "[1, 2, 5")
    data.write_text("".join(line + "\n" for line in lines))
    options = {
        "data__files": data,
        "data__shuffle_buffer": 0,
        "parallel__balance": balance,
        "parallel__check_interval": 0,
    }
    with as_rank(rank, 2, ports[0]), pytest.MonkeyPatch.context() as patch:
        patch.setattr(at_start, "_content", lambda paths: "not read")
        trainer = Trainer(tiny_config(folder, checkpoint__interval=1, **options))
        with pytest.raises(AgreedError) as error:
            trainer.train()
        trainer.close()
    assert trainer.progress.step == 1  # groups 0 to 2
    assert re.fullmatch(
        r"data: rank 0, 1 differ in the groups that they have read; start all ranks with the same files and "
        r"settings; the run ended after step 1; the same command continues from \S*step-1",
        str(error.value),
    ), str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("balance", [True, False])
def test_ranks_that_read_other_groups_are_named_before_the_step(tmp_path: Path, balance: bool) -> None:
    write_config(tmp_path)
    run_ranks(read_other_groups, 2, tmp_path, balance)


def test_settings_that_start_collectives_are_compared(tmp_path: Path) -> None:
    write_config(tmp_path)
    facts = dict(at_start._facts(tiny_config(tmp_path, checkpoint__interval=3)))
    assert facts["checkpoint.interval"] == "3"
    assert {"checkpoint.async_save", "checkpoint.export_hf", "metrics.log_interval"} <= facts.keys()
    assert not {"folder", "checkpoint.folder", "metrics.loggers"} & facts.keys()


def test_code_and_folders_have_fingerprints(tmp_path: Path) -> None:
    (tmp_path / "sub" / ".hidden").mkdir(parents=True)
    first, second = tmp_path / "a", tmp_path / "sub" / "b"
    first.write_bytes(b"123")
    second.write_bytes(b"456789")
    (tmp_path / "sub" / ".hidden" / "c").write_bytes(b"x")
    assert at_start._content([tmp_path]) == "9 bytes, checksum cbf43926"  # CRC-32 of 123456789
    with pytest.raises(UserError, match=r"/none: cannot be read: No such file"):
        at_start._content([tmp_path / "none"])


def test_a_fingerprint_changes_with_every_bit() -> None:
    weights = torch.randn(3, 5)
    for dtype in (torch.float32, torch.bfloat16):
        own = weights.to(dtype)
        other = own.clone()
        other.view(agreement.INTEGERS[dtype.itemsize])[1, 2] ^= 1
        assert agreement._fingerprint(own) == agreement._fingerprint(own.clone())
        assert agreement._fingerprint(own) != agreement._fingerprint(other)
    assert agreement._fingerprint(torch.tensor(True)) == 1
