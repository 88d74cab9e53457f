"""Log-probs that the loop adds to rollouts, against transformers and PEFT on every rollout alone."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.support.cases import exhaustive
from tests.support.oracle import path_logprobs
from tests.support.rl_runs import rows, tiny, with_short_turns
from titan_tree import register_loss, save_adapter, save_pretrained
from titan_tree.errors import UserError
from titan_tree.models.tree_model import TreeModel
from titan_tree.rl.trainer import RLTrainer
from titan_tree.tree.paths import TokenPath

LETTERS = ("rl.environment=letters", "rl.max_turn_tokens=6", "lr_scheduler.min_lr_factor=1.0")
KL = ("loss.kl.coefficient=0.05",)
LORA = ("lora.rank=4", "optimizer.lr=0.05")


class Recorded(RLTrainer):
    """Keeps the paths of every step."""

    def paths(self, step: int) -> list[list[TokenPath]]:
        groups = super().paths(step)
        self.seen.extend(path for paths in groups for path in paths)
        return groups


def make(folder: Path, *options: str) -> Recorded:
    trainer = with_short_turns(Recorded(tiny(folder, *LETTERS, *options)))
    trainer.seen = []
    return trainer


def exported(model: TreeModel, folder: Path) -> Any:
    """Returns transformers' model with the current weights of ``model``, without LoRA's updates."""
    weights = {name: w for name, w in model.state_dict().items() if not name.endswith(("lora_A", "lora_B"))}
    save_pretrained(model, folder, weights)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def check_scores(seen: list[TokenPath], reference: Any) -> None:
    assert len(seen) >= 12
    with torch.no_grad():
        for path in seen:
            want, counted = path_logprobs(reference, path.tokens).numpy(), path.loss_mask[1:] > 0
            assert path.ref_logprobs[1:][counted] == pytest.approx(want[counted], abs=1e-5)


def kl_by_step(folder: Path) -> list[float]:
    return [float(row["ref_kl"]) for row in rows(folder)]


def trained_in_two_parts(folder: Path, *options: str) -> Recorded:
    """Returns a run that was resumed after two of four steps. Its metrics are those of the run in "whole"."""
    kl = kl_by_step(folder / "whole")
    assert abs(kl[0]) < 1e-9
    assert kl[3] > 1e-3
    for steps in (2, 4):
        resumed = make(folder / "resumed", *options, f"training.steps={steps}")
        resumed.train()
        resumed.close()
    assert rows(folder / "resumed") == rows(folder / "whole")
    return resumed


@pytest.mark.parametrize("max_tokens", exhaustive([60], [512, 60]))
def test_the_reference_is_the_start_of_the_run(tmp_path: Path, max_tokens: int) -> None:
    """Also in a run that was resumed, whose log-probs and metrics are those of an uninterrupted one."""
    options = (*KL, "optimizer.lr=3e-3", f"data.max_tokens={max_tokens}")
    whole = make(tmp_path / "whole", *options)
    reference = exported(whole.model, tmp_path / "start")
    whole.train()
    whole.close()
    check_scores(whole.seen, reference)
    resumed = trained_in_two_parts(tmp_path, *options)
    check_scores(resumed.seen, reference)


@pytest.mark.slow
def test_the_base_of_lora_is_the_reference(tmp_path: Path) -> None:
    """The adapter trains, a resumed run repeats it bit for bit, and no second model is loaded."""
    options = (*KL, *LORA)
    whole = make(tmp_path / "whole", *options)
    assert whole.reference.model is whole.model
    reference = exported(whole.model, tmp_path / "start")
    factors = {name: p.detach().clone() for name, p in whole.model.named_parameters() if p.requires_grad}
    base = {name: p.detach().clone() for name, p in whole.model.named_parameters() if not p.requires_grad}
    whole.train()
    whole.close()
    check_scores(whole.seen, reference)
    trained = dict(whole.model.named_parameters())
    assert all((trained[name] - before).norm() > 1e-3 for name, before in factors.items())
    assert all(torch.equal(trained[name], before) for name, before in base.items())
    resumed = trained_in_two_parts(tmp_path, *options)
    assert all(torch.equal(p, trained[name]) for name, p in resumed.model.named_parameters())


@pytest.mark.slow
def test_an_adapter_to_start_from_is_part_of_the_reference(tmp_path: Path) -> None:
    first = make(tmp_path / "first", *LORA, "training.steps=2")
    start = exported(first.model, tmp_path / "start")
    first.train()
    first.close()
    save_adapter(first.model, tmp_path / "adapter")
    reference = PeftModel.from_pretrained(start, tmp_path / "adapter")
    trainer = make(tmp_path / "second", *KL, f"lora.adapter={tmp_path}/adapter", "optimizer.lr=0.05")
    trainer.train()
    trainer.close()
    check_scores(trainer.seen, reference)
    kl = kl_by_step(tmp_path / "second")
    assert abs(kl[0]) < 1e-9
    assert kl[3] > 1e-4


@pytest.mark.slow
def test_a_resumed_run_refuses_another_adapter_to_start_from(tmp_path: Path) -> None:
    for seed in (0, 1):
        first = make(tmp_path / f"first {seed}", *LORA, f"training.seed={seed}", "training.steps=1")
        first.train()
        first.close()
        save_adapter(first.model, tmp_path / f"adapter {seed}")
    options = (*KL, f"lora.adapter={tmp_path}/adapter", "model.overrides.rope_theta=1000.0")
    (tmp_path / "adapter 0").rename(tmp_path / "adapter")
    trainer = make(tmp_path / "run", *options)
    trainer.num_steps = trainer.stopping.num_steps = 2
    trainer.train()
    trainer.close()
    make(tmp_path / "run", *options).close()
    (tmp_path / "adapter").rename(tmp_path / "adapter 0")
    (tmp_path / "adapter 1").rename(tmp_path / "adapter")
    with pytest.raises(UserError, match="expected the reference of the run so far"):
        make(tmp_path / "run", *options)


def test_a_teacher_is_distilled(tmp_path: Path) -> None:
    teacher = make(tmp_path / "teacher", "training.seed=7")
    with torch.no_grad():
        teacher.model.embedding_weight.mul_(8.0)  # far from uniform predictions
    reference = exported(teacher.model, tmp_path / "snapshot")
    teacher.close()
    options = [f"rl.reference={tmp_path}/snapshot", "loss.name=distill", "loss.reduction=token_mean"]
    trainer = make(tmp_path / "run", *options, "training.steps=1")
    student = exported(trainer.model, tmp_path / "student")
    trainer.train()
    trainer.close()
    check_scores(trainer.seen, reference)
    gaps = [
        (path_logprobs(student, path.tokens) - path_logprobs(reference, path.tokens))
        .detach()
        .numpy()[path.loss_mask[1:] > 0]
        for path in trainer.seen
    ]
    gap = np.concatenate(gaps).mean()
    assert gap > 0.1
    assert float(rows(tmp_path / "run")[0]["teacher_kl"]) == pytest.approx(gap, abs=1e-5)


def test_a_loss_of_your_own_gets_the_reference(tmp_path: Path) -> None:
    @register_loss("towards_reference", reference=True)
    def loss(logprobs: torch.Tensor, pairs: Any) -> torch.Tensor:
        return (logprobs - pairs.ref_logprobs).square()

    trainer = make(tmp_path, "loss.name=towards_reference", "training.steps=1")
    trainer.train()
    trainer.close()
    assert abs(float(rows(tmp_path)[0]["loss"])) < 1e-9


def test_the_weights_of_a_reference_have_the_dtype_of_the_computation(tmp_path: Path) -> None:
    trainer = make(tmp_path, *KL, "training.dtype=bfloat16")
    assert trainer.reference is not None
    assert {weight.dtype for weight in trainer.reference.model.parameters()} == {torch.bfloat16}
    assert {weight.dtype for weight in trainer.model.parameters()} == {torch.float32}
    trainer.close()


@pytest.mark.slow
def test_wrong_references_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"rl.reference: expected none, because the loss reads no ref_logpr"):
        make(tmp_path / "unneeded", "rl.reference=/models/nothing")
    other = make(tmp_path / "other", "model.overrides.vocab_size=270", "training.seed=3")
    exported(other.model, tmp_path / "small")
    other.close()
    with pytest.raises(UserError, match=r"rl.reference: expected a model with the 282 token ids .* got 270"):
        make(tmp_path / "vocabulary", *KL, f"rl.reference={tmp_path}/small")
    torch.distributed.destroy_process_group()
    snapshot = f"rl.reference={tmp_path}/snapshot"
    for seed, error in ((3, ""), (4, "rl.reference: expected the reference of the run so far, snapshot")):
        other = make(tmp_path / f"seed {seed}", f"training.seed={seed}")
        exported(other.model, tmp_path / f"weights {seed}")
        other.close()
        (tmp_path / "snapshot").unlink(missing_ok=True)
        (tmp_path / "snapshot").symlink_to(tmp_path / f"weights {seed}")
        with pytest.raises(UserError, match=error) if error else nullcontext():
            trainer = make(tmp_path / "run", *KL, snapshot, "training.steps=2")
            trainer.train()
            trainer.close()


@pytest.mark.parametrize("max_tokens", [512, 60])
def test_the_trainer_scores_rollouts_that_a_loss_corrects(tmp_path: Path, max_tokens: int) -> None:
    """The sampler says -5 for each end of a turn. The model disagrees."""
    trainer = make(
        tmp_path, "loss.correction.level=token", f"data.max_tokens={max_tokens}", "training.steps=1"
    )
    before = exported(trainer.model, tmp_path / "before")
    trainer.train()
    gaps = []
    with torch.no_grad():
        for path in trainer.seen:
            want, counted = path_logprobs(before, path.tokens).numpy(), path.loss_mask[1:] > 0
            assert path.old_logprobs[1:][counted] == pytest.approx(want[counted], abs=1e-5)
            gaps.append((path.old_logprobs - path.rollout_logprobs)[1:][counted])
    gap = np.concatenate(gaps)
    assert (np.abs(gap) < 1e-4).any()
    assert (np.abs(gap) > 0.1).any()  # the ends of turns
    (row,) = rows(tmp_path)
    assert float(row["ratio"]) == pytest.approx(1, abs=1e-5)
    assert float(row["rollout_kl"]) > 0.01
    trainer.close()
