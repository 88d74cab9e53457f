"""Optimizers clip, step and skip steps that are not finite; 8-bit AdamW stays close to AdamW."""

import copy
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torchao.optim
from torch import Tensor, nn

from tests.support.optimizers import draw_gradients, model_and_optimizers, plain_state
from tests.support.tiny_run import read_metrics, tiny_config, train
from titan_tree.components import adamw_kernel as adamw_8bit
from titan_tree.components.lora import LoRA
from titan_tree.distributed import adamw, ao
from titan_tree.distributed.adamw import AdamW, AdamW8bit
from titan_tree.distributed.optimizers import build_optimizers, clip_and_step, optimizer_class
from titan_tree.distributed.settings import OPTIMIZERS, OptimizerConfig, OptimizerSpec
from titan_tree.errors import UserError
from titan_tree.models.lora.adapters import add_lora
from titan_tree.models.pretrained import build_model
from titan_tree.run.trainer import Trainer

NAMES = ["adamw", "adamw8bit"]  # those that come with titan_tree


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("max_norm", [0.5, 1e9, math.inf])
def test_the_first_step_is_adamw_on_clipped_gradients(name, max_norm):
    """8-bit states are rounded after the step that creates them, so the first step has no rounding."""
    model, optimizers = model_and_optimizers(name)
    reference, _ = model_and_optimizers(name)
    for each in (model, reference):
        draw_gradients(each, seed=1)
    norm = clip_and_step(optimizers, torch.ones(()), max_norm)

    gradients = [p.grad for p in reference.parameters()]
    want_norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients))
    assert norm.item() == pytest.approx(want_norm, rel=1e-5)
    for parameter in reference.parameters():
        # After one step from zero, the bias-corrected moments are g and g^2.
        g = parameter.grad.double() * min(1.0, max_norm / want_norm)
        decay = 0.0 if parameter.ndim == 1 else 1e-2 * 0.1
        parameter.data = ((1 - decay) * parameter.double() - 1e-2 * g / (g.abs() + 1e-8)).float()
    for (label, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6, msg=label)


@pytest.mark.parametrize("name", [name for name in NAMES if OPTIMIZERS[name].fused])
def test_fused_optimizers_scale_gradients_inside(name, monkeypatch):
    """Otherwise each step would wait for the norm and pass over the gradients once more."""
    model, optimizers = model_and_optimizers(name)
    draw_gradients(model, seed=1)
    monkeypatch.delattr(torch, "_foreach_div_")
    assert clip_and_step(optimizers, torch.ones(()), 1e-3) > 1e-3


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", ["loss", "gradient"])
def test_a_step_that_is_not_finite_changes_nothing(name, bad):
    model, optimizers = model_and_optimizers(name)
    draw_gradients(model, seed=1)
    clip_and_step(optimizers, torch.ones(()), 1.0)
    weights = [p.detach().clone() for p in model.parameters()]
    states = list(plain_state(optimizers))
    draw_gradients(model, seed=2)
    if bad == "gradient":
        model.embed_tokens.weight.grad[3, 5] = math.inf
    clip_and_step(optimizers, torch.tensor(math.nan if bad == "loss" else 1.0), 1.0)
    assert all(map(torch.equal, weights, model.parameters()))
    after = list(plain_state(optimizers))
    assert len(after) == len(states) == 3 * len(weights)
    assert all(map(torch.equal, after, states))
    draw_gradients(model, seed=2)
    clip_and_step(optimizers, torch.ones(()), 1.0)  # the next step works again
    assert not any(map(torch.equal, weights, model.parameters()))


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_after_a_bad_first_step_changes_nothing(name):
    """Saving creates the states of an optimizer that has not stepped yet."""
    results = []
    for saves in (False, True):
        model, optimizers = model_and_optimizers(name)
        draw_gradients(model, seed=1)
        clip_and_step(optimizers, torch.tensor(math.nan), 1.0)
        optimizers.zero_grad()
        if saves:
            optimizers.state_dict()
        draw_gradients(model, seed=2)
        clip_and_step(optimizers, torch.ones(()), 1.0)
        results.append(list(model.parameters()))
    for without, after in zip(*results, strict=True):
        assert torch.equal(without, after)


class Wrapper:
    """What a framework hands out instead of an optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.steps = optimizer, 0

    def step(self) -> None:
        self.steps += 1
        self.optimizer.step()


@pytest.mark.parametrize("fused", [False, True])
def test_several_optimizers_of_torch_are_clipped_to_one_norm(fused):
    """The reference is torch's clipping. A wrapper's own step is called."""
    models = [model_and_optimizers("adamw")[0] for _ in range(2)]
    optimizers = []
    for model in models:
        draw_gradients(model, seed=1)
        halves = [p for p in model.parameters() if p.ndim == 1], [p for p in model.parameters() if p.ndim > 1]
        optimizers.append([torch.optim.AdamW(half, lr=1e-2, eps=1e-3, fused=fused) for half in halves])
    want = torch.nn.utils.clip_grad_norm_(models[1].parameters(), 0.5)
    for optimizer in optimizers[1]:
        optimizer.step()
    plain, wrapped = optimizers[0][0], Wrapper(optimizers[0][1])
    norm = clip_and_step([plain, wrapped], torch.ones(()), 0.5)
    torch.testing.assert_close(norm, want)
    assert wrapped.steps == 1
    for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
    before = [p.detach().clone() for p in models[0].parameters()]
    clip_and_step([plain, wrapped], torch.tensor(math.nan), 0.5)
    assert all(map(torch.equal, before, models[0].parameters()))


def test_a_new_optimizer_is_one_spec():
    """SGD ignores unused keys; ``build_optimizers`` and ``clip_and_step`` know nothing about it."""
    OPTIMIZERS.register("sgd", OptimizerSpec(import_class=lambda: torch.optim.SGD))
    model, optimizers = model_and_optimizers("sgd", lr=0.1)
    draw_gradients(model, seed=1)
    matrix = model.embed_tokens.weight
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    want = (1 - 0.1 * 0.1) * matrix.detach() - 0.1 * matrix.grad * 0.5 / norm
    clip_and_step(optimizers, torch.ones(()), 0.5)
    torch.testing.assert_close(matrix, want)


class OddAdamW(torch.optim.AdamW):
    """Fails, or keeps what checkpoints do not hold, as ``odd`` says."""

    odd = ""

    def step(self, closure: Any = None) -> Any:
        torch.set_grad_enabled(False)
        if self.odd == "exit":
            raise SystemExit(0)
        loss = super().step()
        if self.odd == "state":
            self.state[next(iter(self.state))]["n"] = 3
        elif self.odd == "group":  # as Prodigy
            self.param_groups[0]["d"] = self.param_groups[0].get("d", 0) + 1
        return loss


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        ("exit", r"^optimizer OddAdamW: .*test_optimizer.py:\d+: SystemExit: 0$"),
        ("state", r"^optimizer 'odd': expected steps that change only tensors .* but they change n; store"),
        ("group", r"^optimizer 'odd': expected steps that change only tensors .* but they change d; store"),
        ("", None),
    ],
)
def test_an_optimizer_of_the_user_that_a_run_cannot_use_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, odd: str, message: str | None
) -> None:
    monkeypatch.setattr(OddAdamW, "odd", odd)
    config = tiny_config(tmp_path, checkpoint__interval=2, training__steps=2)
    with OPTIMIZERS.registered("odd", OptimizerSpec(import_class=lambda: OddAdamW)):
        object.__setattr__(config.optimizer, "name", "odd")
        if message is None:
            assert train(config).progress.step == 2
            return
        with pytest.raises(UserError, match=message):
            train(config)
    assert torch.is_grad_enabled()


def test_what_is_no_class_of_an_optimizer_is_one_line() -> None:
    with (
        OPTIMIZERS.registered("odd", OptimizerSpec(import_class=lambda: dict)),
        pytest.raises(
            UserError, match=r"^optimizer 'odd' \(optimizer.name\): .*ValueError: no signature found"
        ),
    ):
        optimizer_class(OptimizerConfig(name="odd"))


def test_options_are_arguments_of_the_optimizer() -> None:
    OPTIMIZERS.register("sgd", OptimizerSpec(import_class=lambda: torch.optim.SGD))
    model, _ = model_and_optimizers("adamw")
    (sgd,) = build_optimizers(OptimizerConfig(name="sgd", options={"momentum": 0.5}), model)  # type: ignore[arg-type]
    assert {group["momentum"] for group in sgd.param_groups} == {0.5}
    for name, option in (("sgd", "momentun"), ("sgd", "lr"), ("sgd", "maximize"), ("adamw8bit", "amsgrad")):
        message = rf"^optimizer.options.{option}: '{name}' has no such option; expected (momentum,|none)"
        with pytest.raises(UserError, match=message):
            optimizer_class(OptimizerConfig(name=name, options={option: 1}))
    for option, value, expected in (
        ("momentum", "a", "a number, got 'a'"),
        ("momentum", True, "a number, got True"),
        ("nesterov", 1, "true or false, got 1"),
    ):
        with pytest.raises(UserError, match=rf"^optimizer.options.{option}: expected {expected}"):
            optimizer_class(OptimizerConfig(name="sgd", options={option: value}))


class Stepwise(torch.optim.Rprop):
    """Has a default that TOML cannot write, and arguments without a name."""

    def __init__(self, params: Any, etas: tuple[float, float] = (0.5, 1.2), **others: Any) -> None:
        super().__init__(params, etas=etas)


def test_options_may_be_lists_and_need_a_name() -> None:
    OPTIMIZERS.register("stepwise", OptimizerSpec(import_class=lambda: Stepwise))
    model, _ = model_and_optimizers("adamw")
    (optimizer,) = build_optimizers(OptimizerConfig(name="stepwise", options={"etas": [0.4, 1.3]}), model)
    assert optimizer.param_groups[0]["etas"] == [0.4, 1.3]
    for options, message in (
        ({"etas": 0.4}, "etas: expected a list, got 0.4"),
        ({"others": 1}, "others: 'stepwise' has no such option; expected etas; remove it"),
    ):
        with pytest.raises(UserError, match=f"^optimizer.options.{message}$"):
            optimizer_class(OptimizerConfig(name="stepwise", options=options))


@pytest.mark.parametrize("targets", [("q_proj",), ("experts.down_proj",), ("q_proj", "experts.down_proj")])
def test_matrices_and_experts_with_lora_are_in_groups_of_their_own(targets: tuple[str, ...]) -> None:
    model = build_model("qwen3_moe", "debug", num_hidden_layers=1)
    add_lora(model, LoRA(rank=2, targets=targets))
    (optimizer,) = build_optimizers(OptimizerConfig(), model)
    groups = [group["param_names"] for group in optimizer.param_groups]
    pairs = [[name for name in names if name.endswith("_lora_A")] for names in groups]
    paths = {"q_proj": "self_attn.q_proj.weight", "experts.down_proj": "mlp.experts.down_proj"}
    assert pairs == [[f"layers.0.{paths[target]}_lora_A"] for target in reversed(targets)]


def test_8_bit_states_take_2_bytes_and_stay_near_adamw():
    runs = []
    for name in NAMES:
        model, optimizers = model_and_optimizers(name, lr=1e-3)
        start = torch.cat([p.detach().flatten() for p in model.parameters()])
        for step in range(20):
            draw_gradients(model, step % 5)
            clip_and_step(optimizers, torch.ones(()), 1.0)
        end = torch.cat([p.detach().flatten() for p in model.parameters()])
        runs.append(end - start)
    error = (runs[0] - runs[1]).norm() / runs[0].norm()
    assert 1e-4 < error < 0.03, error
    (optimizer,) = optimizers
    for parameter, state in optimizer.state.items():
        for moment in (state["exp_avg"], state["exp_avg_sq"]):
            if parameter.numel() < 4096:
                assert moment.dtype == torch.float32
            else:
                assert moment.codes.nbytes == parameter.numel()
                assert moment.scale.nbytes == 4 * parameter.numel() // 256


def test_the_kernel_and_plain_pytorch_train_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[list[Tensor]] = []
    start = [torch.randn(shape) for shape in ((20, 256), (300,), (0, 7), (5,))]
    for update in (adamw_8bit._update, adamw_8bit._launch):
        monkeypatch.setattr(adamw_8bit, "_update", update)
        weights = [nn.Parameter(x.clone()) for x in start]
        optimizer = AdamW8bit(weights, lr=1e-2)
        generator = torch.Generator().manual_seed(0)
        for scale, skip in ((1, 1), (2, 0), (1, 1), (5, 0), (None, None)):
            for weight in weights[:-1]:  # the last one gets no gradient, so no state
                gradient = torch.randn(weight.shape, generator=generator)
                weight.grad = gradient * (scale or 1) if not skip else torch.full_like(weight, torch.nan)
            optimizer.grad_scale = None if scale is None else torch.tensor(float(scale))
            optimizer.found_inf = None if skip is None else torch.tensor(float(skip))
            version = weights[0]._version
            optimizer.step()
            assert weights[0]._version > version
        assert [float(optimizer.state[weight]["step"]) for weight in weights[:-1]] == [3, 3, 3]
        assert weights[-1] not in optimizer.state
        runs.append([new.detach() - old for new, old in zip(weights, start, strict=True)])
    for plain, kernel in zip(*runs, strict=True):
        torch.testing.assert_close(kernel, plain, rtol=1e-5, atol=2e-7)


UPDATES = (
    *("torch", "plain"),
    pytest.param("kernel", marks=pytest.mark.slow),
    pytest.param("cuda", marks=pytest.mark.gpu),
)


@pytest.mark.parametrize("update", UPDATES)
def test_adamw_continues_a_run_of_torch(update: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference gets fp32 gradients, ours bf16 ones. Clipped, with two groups and a skipped step."""
    if update in ("plain", "kernel"):
        monkeypatch.setattr(adamw, "_has_kernel", lambda weight: True)
    if update == "kernel":
        monkeypatch.setattr(adamw_8bit, "_update", adamw_8bit._launch)
    device = "cuda" if update == "cuda" else "cpu"
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=generator) / 50 for shape in ((5, 257), (30,), (0, 7), (5,))]

    def make(cls: type[torch.optim.AdamW], values: list[Tensor]) -> tuple[list[nn.Parameter], Any]:
        weights = [nn.Parameter(x.detach().to(device, copy=True)) for x in values]
        groups = [{"params": weights[::2]}, {"params": weights[1::2], "weight_decay": 0.0}]
        return weights, cls(groups, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    theirs, reference = make(torch.optim.AdamW, start)
    ours, optimizer = make(AdamW, start)
    for step in range(20):
        if step == 10:
            ours, optimizer = make(AdamW, list(theirs))
            optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))
        for weight, other in zip(ours[:-1], theirs[:-1], strict=True):  # the last one gets no gradient
            gradient = torch.randn(weight.shape, generator=generator).to(device, torch.bfloat16)
            weight.grad, other.grad = gradient, gradient.float()
        loss = torch.tensor(math.nan if step == 5 else 1.0, device=device)
        exact = math.sqrt(sum(float(x.grad.double().square().sum()) for x in theirs if x.grad is not None))
        norms = [clip_and_step([each], loss, 1.0) for each in (optimizer, reference)]
        assert [norm.item() for norm in norms] == pytest.approx([exact, exact], rel=1e-6)
    states = [each.state_dict() for each in (optimizer, reference)]
    assert states[0]["param_groups"] == states[1]["param_groups"]
    torch.testing.assert_close(states[0]["state"], states[1]["state"], rtol=1e-5, atol=1e-9)  # dtypes, too
    assert {float(state["step"]) for state in states[0]["state"].values()} == {19.0}
    for mine, other, old in zip(ours, theirs, start, strict=True):
        torch.testing.assert_close(mine - old.to(device), other - old.to(device), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("option", ["amsgrad", "maximize"])
def test_adamw_leaves_some_options_to_torch(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's step, which torch wraps for its own instances, must not run hooks once more."""
    monkeypatch.setattr(adamw, "_has_kernel", lambda weight: True)
    weights = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    steps: list[type] = []
    for cls, weight in zip((torch.optim.AdamW, AdamW), weights, strict=True):
        optimizer = cls([weight], lr=0.1, fused=True, **{option: True})
        optimizer.register_step_post_hook(lambda optimizer, *_: steps.append(type(optimizer)))
        for scale in (1.0, 0.01):
            weight.grad = scale * torch.ones(3)
            optimizer.step()
    assert torch.equal(*weights)
    assert steps == [torch.optim.AdamW] * 2 + [AdamW] * 2


def test_a_closure_runs_before_the_update() -> None:
    """Lightning steps every optimizer with one."""
    weight = nn.Parameter(torch.ones(4))

    def closure() -> Tensor:
        loss = 3 * weight.sum()
        loss.backward()
        return loss

    assert AdamW8bit([weight], lr=0.1, weight_decay=0.0).step(closure) == 12
    torch.testing.assert_close(weight.detach(), torch.full((4,), 0.9))


def test_8_bit_adamw_without_torchao_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(name="torchao")

    monkeypatch.setattr(ao, "import_module", missing)
    with pytest.raises(UserError, match=r"^optimizer.name: needs torchao, .* pip install -e '.\[torchao\]'$"):
        OPTIMIZERS["adamw8bit"].import_class()


def test_bias_corrections_are_as_exact_as_fp32() -> None:
    """With equal gradients, each step has the size lr. In fp32, 1 - 0.999 has an error of 1e-5."""
    weight = nn.Parameter(torch.zeros(8))
    optimizer = AdamW8bit([weight], lr=1.0, betas=(0.9, 0.999), weight_decay=0.0)
    for step in range(1, 4):
        weight.grad = torch.full((8,), 2.0)
        optimizer.step()
        torch.testing.assert_close(weight.detach(), torch.full((8,), -float(step)), rtol=5e-7, atol=0)


@pytest.mark.slow
def test_a_checkpoint_of_torchao_is_resumed(tmp_path: Path) -> None:
    """Checkpoints of earlier versions were written with torchao's own optimizer."""
    options: dict[str, Any] = {
        "optimizer__name": "adamw8bit",
        "model__overrides__intermediate_size": 128,  # some weights have 4,096 numbers: 8-bit states
        "checkpoint__interval": 2,
    }
    spec, runs = OPTIMIZERS["adamw8bit"], []
    for before in (OptimizerSpec(import_class=lambda: torchao.optim.AdamW8bit), spec):
        folder = tmp_path / before.import_class().__module__
        OPTIMIZERS.register("adamw8bit", before, replace=True)
        with torch.compiler.set_stance("force_eager"):  # torchao compiles its step
            old = train(tiny_config(folder, training__steps=2, **options))
        OPTIMIZERS.register("adamw8bit", spec, replace=True)
        resumed = Trainer(tiny_config(folder, training__steps=4, **options))
        states = [list(plain_state(trainer.optimizers)) for trainer in (resumed, old)]
        assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(*states, strict=True))  # torchao's steps
        assert [len(state) for state in states] == 2 * [3 * len(list(old.model.parameters()))]
        resumed.train()
        resumed.close()
        assert resumed.optimizer_step.good_steps == 2
        runs.append([float(row["loss"]) for row in read_metrics(resumed.config)])
    assert runs[0] == pytest.approx(runs[1], rel=1e-5)


@pytest.mark.parametrize("async_save", ["false", "true"])
def test_a_run_with_8_bit_states_resumes_exactly(tmp_path: Path, async_save: str) -> None:
    options: dict[str, Any] = {
        "optimizer__name": "adamw8bit",
        "model__overrides__intermediate_size": 128,  # some weights have 4,096 numbers: 8-bit states
        "training__steps": 6,
        "checkpoint__interval": 2,
        "checkpoint__async_save": async_save,
        "lr_scheduler__warmup_steps": 2,
    }
    config = tiny_config(tmp_path, **options)
    whole = train(config)
    rows = read_metrics(config)
    assert [float(row["lr"]) for row in rows[:3]] == pytest.approx([5e-4, 1e-3, 1e-3])
    shutil.rmtree(Path(config.folder) / "checkpoints" / "step-6")
    resumed = train(config)
    assert resumed.optimizer_step.good_steps == 2
    assert read_metrics(config) == rows
    states = [list(plain_state(trainer.optimizers)) for trainer in (resumed, whole)]
    assert all(map(torch.equal, *states))
    slower = train(tiny_config(tmp_path, **options | {"training__steps": 7, "optimizer__lr": 5e-4}))
    assert float(read_metrics(slower.config)[-1]["lr"]) < 5e-4  # the configuration overrides the checkpoint
    with pytest.raises(UserError, match=r"model or optimizer: optimizer = adamw8bit \(now adamw\)"):
        train(tiny_config(tmp_path, **options | {"optimizer__name": "adamw"}))
