"""Images in trees with the layers of transformers: against unmodified models on every path alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForImageTextToText, Qwen3Config, Qwen3ForCausalLM

from tests.support.cases import slow_except
from tests.support.oracle import SIZES, assert_same, flat, in_one_pass, relative_error
from tests.support.partitions import forest_of, in_partitions
from tests.support.vision import per_path, screen_paths, vision_model
from titan_tree.components.lora import LoRA
from titan_tree.components.tree_partitioner.partitioner import TreePartitioner
from titan_tree.errors import UserError
from titan_tree.models.lora.adapters import add_lora
from titan_tree.models.pretrained import load_pretrained, save_pretrained
from titan_tree.models.transformers.in_place import InPlaceModel
from titan_tree.models.transformers.snapshot import hf_name
from titan_tree.models.transformers.support import check_supported

TOLERANCE = 2e-5  # see test_images.py
KINDS = ("Qwen3VL", "Qwen3_5", "Qwen3VLMoe", "Qwen3_5Moe")


def load(hf: Any, folder: Path, vision: Any = "train", **options: Any) -> Any:
    hf.save_pretrained(folder)
    dtype = next(hf.parameters()).dtype
    return load_pretrained(folder, dtype, implementation="transformers", vision=vision, **options)


def named(gradients: dict[str, Any]) -> dict[str, Any]:
    """Returns gradients by the names that ``per_path`` gives them."""
    prefix = "model.language_model."
    return {
        hf_name(n, prefix[:-1]).removeprefix(prefix).removeprefix("model."): g for n, g in gradients.items()
    }


@pytest.mark.parametrize("kind", slow_except(["Qwen3VL"], KINDS))
@pytest.mark.parametrize("in_place", [False, True])
def test_one_pass_equals_every_path_alone(tmp_path: Path, kind: str, in_place: bool) -> None:
    hf, groups = vision_model(kind), screen_paths()
    want = per_path(hf, flat(groups))
    model = InPlaceModel(vision_model(kind)) if in_place else load(hf, tmp_path)
    logprobs, loss, gradients = in_one_pass(model, groups)
    assert_same((logprobs, loss, named(gradients)), want, TOLERANCE)
    assert sum(name.startswith("visual.") for name in gradients) == (57 if "VL" in kind else 45)


@pytest.mark.parametrize("kind", slow_except(["Qwen3VL"], KINDS))
@pytest.mark.parametrize("size", slow_except([8], [1, 8, 20]))
def test_partitions_equal_one_pass(tmp_path: Path, kind: str, size: int) -> None:
    """Cuts are before, after and inside images."""
    model, groups = load(vision_model(kind), tmp_path), screen_paths()
    _, want_loss, want = in_one_pass(model, groups)
    plan = TreePartitioner("redundancy_free", size).plan(forest_of(groups))
    assert len(plan) > 4
    loss, got = in_partitions(model, plan)
    assert loss == pytest.approx(want_loss, rel=1e-6)
    for name, gradient in want.items():
        assert relative_error(got[name], gradient) < TOLERANCE, name


@pytest.mark.parametrize("kind", slow_except(["Qwen3VL"], KINDS))
def test_snapshots_go_in_and_out(tmp_path: Path, kind: str) -> None:
    hf = vision_model(kind)
    model = load(hf, tmp_path / "hf", "frozen")
    assert not any(p.requires_grad for p in model.visual.parameters())
    save_pretrained(model, tmp_path / "ours", source=tmp_path / "hf")
    theirs, ours = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "ours"))
    assert ours.keys() == theirs.keys()
    again = AutoModelForImageTextToText.from_pretrained(tmp_path / "ours").eval()
    want, got = hf.state_dict(), again.state_dict()
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in want.items())


def test_lora_trains_the_text_model_alone(tmp_path: Path) -> None:
    model = load(vision_model("Qwen3VL"), tmp_path, "frozen")
    add_lora(model, LoRA(rank=2, targets=("q_proj", "down_proj")))
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 2 * 3
    assert not any("visual" in name for name in trained)


def test_models_without_images_are_refused(tmp_path: Path) -> None:
    for name in ("gemma3", "gemma4"):
        message = f"^here: model_type: {name} cannot run on trees: the tokens of an image see each other in"
        with pytest.raises(UserError, match=message):
            check_supported(AutoConfig.for_model(name), "here")
    message = "^here: model_type: llava is more than a text model; expected one of qwen3_5, qwen3_5_moe, "
    with pytest.raises(UserError, match=message):
        check_supported(AutoConfig.for_model("llava"), "here")
    text = Qwen3ForCausalLM(Qwen3Config(**SIZES, num_hidden_layers=1))
    with pytest.raises(UserError, match='expected "off" for the model_type qwen3, got another value; images'):
        load(text, tmp_path, "frozen")
