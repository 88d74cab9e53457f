"""Passes of Tinker's API on one forest against each datum alone, and the models of clients side by side."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from tinker import types
from transformers import AutoModelForCausalLM

from tests.support.cases import for_each
from tests.support.tinker_server import tenants
from tests.support.vision import vision_model
from titan_tree import UserError
from titan_tree.models.pretrained import save_pretrained
from titan_tree.rl.tinker import forest
from titan_tree.rl.tinker.losses import LOSSES
from titan_tree.rl.tinker.tenants import Tenants
from titan_tree.serve.tinker.wire import Datum, Pass, PassResult, Sample

ADAPTER = types.LoraConfig(rank=4, seed=1)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Tenants:
    return tenants(tmp_path_factory.mktemp("tinker"))


def data(loss: str, number: int = 64, seed: int = 0) -> list[Datum]:
    """Returns data of which each eight share a prompt. Targets of prompts are not the tokens that follow."""
    draw = np.random.default_rng(seed)
    prompts = [draw.integers(0, 256, 20) for _ in range(number // 8)]
    made = []
    for index in range(number):
        turn = draw.integers(0, 256, draw.integers(3, 12))
        tokens = np.concatenate([prompts[index // 8], turn]).astype(np.int32)
        targets = tokens[1:].astype(np.int64)
        targets[:19] = 0
        is_turn = (np.arange(len(targets)) >= 19).astype(np.float32)
        inputs = {"target_tokens": targets}
        if loss == "cross_entropy":
            inputs["weights"] = draw.normal(size=len(targets)).astype(np.float32) * is_turn
        else:
            inputs["logprobs"] = (-5.6 + 0.5 * draw.normal(size=len(targets))).astype(np.float32) * is_turn
            inputs["advantages"] = np.full(len(targets), draw.normal(), np.float32) * is_turn
        if loss == "gspo":
            inputs["sequence_ratio_mask"] = is_turn
        made.append(Datum(tokens[:-1], inputs))
    return made


def call(model: str, loss: str, given: list[Datum], forward_only: bool = False, **options: float) -> Pass:
    return Pass(model=model, number=1, loss=loss, options=options, forward_only=forward_only, data=given)


def gradients(
    engine: Tenants, model: str, loss: str, parts: list[list[Datum]]
) -> tuple[torch.Tensor, list[PassResult]]:
    """Returns the gradients after passes over some data, one pass each, and their results."""
    tenant = engine._tenants[model]
    tenant.optimizer.zero_grad()
    results = [engine.run([call(model, loss, part)])[0] for part in parts]
    return torch.cat([w.grad.flatten() for w in tenant.weights.values() if w.grad is not None]), results


def distance(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


@pytest.mark.slow
@for_each("adapter", [ADAPTER, None])
@for_each("loss", list(LOSSES))
def test_a_forest_of_64_data_computes_what_each_datum_alone_does(
    engine: Tenants, adapter: types.LoraConfig | None, loss: str
) -> None:
    name = f"{loss}-{adapter is None}"
    engine.create(name, adapter)
    if adapter is not None:  # B is 0 at first, and so would be half of the gradients
        for weight in engine._tenants[name].weights.values():
            torch.nn.init.normal_(weight, std=0.05, generator=torch.Generator().manual_seed(weight.numel()))
    given = data(loss)
    merged, (together,) = gradients(engine, name, loss, [given])
    alone, each = gradients(engine, name, loss, [[datum] for datum in given])
    assert distance(merged, alone) < 1e-6
    for one, other in zip(together.logprobs, each, strict=True):
        np.testing.assert_allclose(one, other.logprobs[0], atol=2e-6)
    assert together.metrics["loss:sum"] == pytest.approx(sum(r.metrics["loss:sum"] for r in each), rel=1e-6)
    assert together.metrics["tokens:sum"] == sum(len(datum.tokens) for datum in given)
    assert together.metrics["distinct_tokens:sum"] < 0.6 * sum(r.metrics["distinct_tokens:sum"] for r in each)
    engine.drop([name])


def reference(loss: str, logprobs: torch.Tensor, datum: Datum, options: dict[str, float]) -> torch.Tensor:
    """The formulas of the API's documentation, for one datum in float64."""
    given = {name: torch.from_numpy(x).double() for name, x in datum.inputs.items()}
    if loss == "cross_entropy":
        return -(logprobs * given["weights"]).sum()
    gap, advantages = logprobs - given["logprobs"], given["advantages"]
    low, high = options.get("clip_low_threshold", 0.8), options.get("clip_high_threshold", 1.2)
    if loss == "importance_sampling":
        return -(gap.exp() * advantages).sum()
    if loss == "ppo":
        return -torch.min(gap.exp() * advantages, gap.exp().clamp(low, high) * advantages).sum()
    if loss == "cispo":
        return -(gap.exp().clamp(low, high).detach() * logprobs * advantages).sum()
    if loss == "dro":
        return -(logprobs * advantages - 0.5 * options.get("beta", 0.05) * gap**2).sum()
    assert loss == "gspo"
    mean = gap.detach()[given["sequence_ratio_mask"] != 0].mean()
    ratio = (mean + logprobs - logprobs.detach()).exp()
    low, high = options.get("clip_low_threshold", 1 - 3e-4), options.get("clip_high_threshold", 1 + 4e-4)
    return -torch.min(ratio * advantages, ratio.clamp(low, high) * advantages).sum()


@pytest.mark.parametrize("max_tokens", [4096, 32])
def test_passes_equal_transformers_and_the_documented_formulas(tmp_path: Path, max_tokens: int) -> None:
    """With partitions, too. Targets are any tokens, also several per token."""
    engine = tenants(tmp_path, f"data.max_tokens={max_tokens}")
    engine.create("m", None)
    tenant = engine._tenants["m"]
    save_pretrained(tenant.model, tmp_path / "hf")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float64)
    cases = [(loss, data(loss, 16, seed), {}) for seed, loss in enumerate(LOSSES)]
    cases.append(("ppo", data("ppo", 8, 9), {"clip_low_threshold": 0.5, "clip_high_threshold": 1.1}))
    draw = np.random.default_rng(3)
    several = [
        Datum(
            d.tokens,
            {
                "target_tokens": draw.integers(0, 256, (len(d.tokens), 3)),
                "weights": draw.normal(size=(len(d.tokens), 3)),
            },
        )
        for d in data("cross_entropy", 8)
    ]
    cases.append(("cross_entropy", several, {}))
    for loss, given, options in cases:
        tenant.optimizer.zero_grad()
        (result,) = engine.run([call("m", loss, given, **options)])
        model.zero_grad()
        total = 0.0
        for datum, logprobs in zip(given, result.logprobs, strict=True):
            logits = model(torch.from_numpy(datum.tokens).long()[None]).logits[0].log_softmax(-1)
            targets = torch.from_numpy(datum.inputs["target_tokens"])
            expected = logits.gather(1, targets.reshape(len(targets), -1)).reshape(targets.shape)
            np.testing.assert_allclose(logprobs, expected.detach(), atol=5e-6)
            one = reference(loss, expected, datum, options)
            one.backward()
            total += one.item()
        assert result.metrics["loss:sum"] == pytest.approx(total, rel=1e-5)
        theirs = dict(model.named_parameters())
        for name, weight in tenant.weights.items():
            grad = theirs[name if name in theirs else f"model.{name}"].grad
            assert distance(weight.grad.double(), grad) < 1e-5, (loss, name)


def test_a_forward_pass_leaves_no_gradients(engine: Tenants) -> None:
    engine.create("f", ADAPTER)
    given = data("cross_entropy", 8)
    (trained,) = engine.run([call("f", "cross_entropy", given)])
    engine._tenants["f"].optimizer.zero_grad()
    (scored,) = engine.run([call("f", "cross_entropy", given, forward_only=True)])
    assert all(weight.grad is None for weight in engine._tenants["f"].weights.values())
    assert scored.metrics == trained.metrics
    for one, other in zip(scored.logprobs, trained.logprobs, strict=True):
        np.testing.assert_array_equal(one, other)


def test_passes_that_wait_together_have_one_forest(engine: Tenants) -> None:
    """Each gets its own results, and gradients add up."""
    engine.create("w", ADAPTER)
    given = data("ppo", 16)
    whole, (expected,) = gradients(engine, "w", "ppo", [given])
    engine._tenants["w"].optimizer.zero_grad()
    first, second = engine.run([call("w", "ppo", given[:5]), call("w", "ppo", given[5:])])
    got = torch.cat([w.grad.flatten() for w in engine._tenants["w"].weights.values()])
    assert distance(got, whole) < 1e-6
    assert len(first.logprobs) == 5
    assert first.metrics["loss:sum"] + second.metrics["loss:sum"] == pytest.approx(
        expected.metrics["loss:sum"]
    )
    sums = first.metrics["distinct_tokens:sum"] + second.metrics["distinct_tokens:sum"]
    assert sums == expected.metrics["distinct_tokens:sum"]


def test_without_merging_results_stay(tmp_path: Path, engine: Tenants) -> None:
    apart = tenants(tmp_path, "serve.merge=false")
    given, results = data("cispo", 16), []
    for one in (engine, apart):
        one.create("m", ADAPTER)
        results.append(gradients(one, "m", "cispo", [given]))
    (merged, (together,)), (alone, (each,)) = results
    assert distance(merged, alone) < 1e-6
    assert together.metrics["distinct_tokens:sum"] < 0.6 * each.metrics["distinct_tokens:sum"]


def test_targets_whose_branches_would_not_fit_are_refused(
    engine: Tenants, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything runs, so that earlier gradients stay."""
    engine.create("b", ADAPTER)
    engine.run([call("b", "cross_entropy", data("cross_entropy", 8))])
    monkeypatch.setattr(forest, "MAX_BRANCHED", 100)
    with pytest.raises(UserError, match="more than 100; send fewer data in a call"):
        engine.run([call("b", "cross_entropy", data("cross_entropy", 8))])
    assert engine.step("b", types.AdamParams())["grad_norm:mean"] > 0
    engine.drop(["b"])


def test_tenants_do_not_touch_each_other(engine: Tenants) -> None:
    """Two that take turns are where each of them is alone."""

    def train(names: list[str]) -> dict[str, list[torch.Tensor]]:
        for name in set(names):
            engine.create(name, ADAPTER if name != "full" else None)
        for name in names:
            engine.run([call(name, "cross_entropy", data("cross_entropy", 8, seed=len(name)))])
            engine.step(name, types.AdamParams(learning_rate=1e-2))
        weights = {n: [w.detach().clone() for w in engine._tenants[n].weights.values()] for n in set(names)}
        engine.drop(list(set(names)))
        return weights

    base = [w.clone() for w in engine.base.parameters()]
    together = train(["a", "full", "bb", "a", "bb", "full"])
    assert all(torch.equal(w, before) for w, before in zip(engine.base.parameters(), base, strict=True))
    for name in ("a", "full", "bb"):
        for weight, alone in zip(together[name], train([name, name])[name], strict=True):
            torch.testing.assert_close(weight, alone, rtol=0, atol=0)


@pytest.mark.parametrize("adapter", [ADAPTER, None])
def test_saved_weights_continue_exactly(tmp_path: Path, adapter: types.LoraConfig | None) -> None:
    """In another process, whose base is the same."""

    def steps(engine: Tenants, seeds: range) -> None:
        for seed in seeds:
            engine.run([call("m", "cross_entropy", data("cross_entropy", 8, seed))])
            engine.step("m", types.AdamParams(learning_rate=1e-2, grad_clip_norm=1.0, weight_decay=0.1))

    first, second = tenants(tmp_path / "a"), tenants(tmp_path / "b")
    first.create("m", adapter)
    steps(first, range(2))
    first.save("m", tmp_path / "saved", {"any": 1})
    steps(first, range(2, 4))
    second.load("m", tmp_path / "saved", adapter, with_optimizer=True)
    steps(second, range(2, 4))
    for name, weight in first._tenants["m"].weights.items():
        torch.testing.assert_close(second._tenants["m"].weights[name], weight, rtol=0, atol=0)
    second.load("m", tmp_path / "saved", adapter, with_optimizer=False)
    assert not second._tenants["m"].optimizer.state
    if adapter is not None:  # engines that sample read this one
        peft = PeftModel.from_pretrained(_hf(first, tmp_path), tmp_path / "saved" / "adapter")
        assert sum("lora_A" in name for name, _ in peft.named_parameters()) == 14


def _hf(engine: Tenants, folder: Path) -> torch.nn.Module:
    save_pretrained(engine.base, folder / "hf")
    return AutoModelForCausalLM.from_pretrained(folder / "hf")


def test_samples_come_from_the_weights_that_were_saved(engine: Tenants) -> None:
    engine.create("s", ADAPTER)
    for weight in engine._tenants["s"].weights.values():
        torch.nn.init.normal_(weight, std=0.1, generator=torch.Generator().manual_seed(weight.numel()))
    engine.snapshot("s", "one")
    prompts = [list(range(65, 75)), list(range(65, 80))]
    asked = [Sample(prompt=p, number=3, max_tokens=6, seed=4, prompt_logprobs=True) for p in prompts]
    before = engine.sample("one", asked)
    engine.run([call("s", "cross_entropy", data("cross_entropy", 8))])
    engine.step("s", types.AdamParams(learning_rate=0.1))
    assert [one.turns for one in engine.sample("one", asked)] == [one.turns for one in before]
    engine.snapshot("s", "two")
    assert [one.turns for one in engine.sample("two", asked)] != [one.turns for one in before]
    # What training reads of these tokens is what sampling has reported.
    for prompt, sequences in zip(prompts, engine.sample("two", asked), strict=True):
        for tokens, logprobs, _ in sequences.turns:
            whole = np.array(prompt + tokens)
            inputs = {"target_tokens": whole[1:], "weights": np.ones(len(whole) - 1)}
            (scored,) = engine.run(
                [call("s", "cross_entropy", [Datum(whole[:-1], inputs)], forward_only=True)]
            )
            np.testing.assert_allclose(scored.logprobs[0][len(prompt) - 1 :], logprobs, atol=1e-4)
            assert sequences.prompt_logprobs is not None
            assert np.isnan(sequences.prompt_logprobs[0])
            np.testing.assert_allclose(
                scored.logprobs[0][: len(prompt) - 1], sequences.prompt_logprobs[1:], atol=1e-4
            )


def test_texts_end_samples_behind_the_token_that_completes_them(engine: Tenants) -> None:
    long = Sample(prompt=[65, 66], max_tokens=60, seed=7)
    ((tokens, logprobs, _),) = engine.sample("", [long])[0].turns
    end = next(i for i, token in enumerate(tokens) if 65 <= token < 91)  # a capital letter is one token
    for stop in ((chr(tokens[end]), "not in it"), (tokens[end], 256)):
        sample = Sample(prompt=[65, 66], max_tokens=60, seed=7, stop=stop)  # type: ignore[arg-type]
        assert engine.sample("", [sample])[0].turns == [(tokens[: end + 1], logprobs[: end + 1], True)]


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5"])  # two samplers
def test_at_temperature_0_the_likeliest_tokens_are_drawn(tmp_path: Path, name: str) -> None:
    """Without stops, until the limit. A stop beyond the vocabulary is never drawn."""
    flavor = (f"model.name={name}", "model.flavor=debug", "model.overrides.vocab_size=282")
    engine = tenants(tmp_path, model=(*flavor, "data.tokenizer=byte"))
    engine.create("g", ADAPTER)
    prompts = [[65, 66, 67], [65, 66, 67, 68, 69]]
    for stop in ((), (10**6, -1)):
        asked = [
            Sample(prompt=p, number=2, max_tokens=m, temperature=0.0, stop=stop, top_k=5)
            for p, m in zip(prompts, (3, 6), strict=True)
        ]
        for sample, result in zip(asked, engine.sample("", asked), strict=True):
            for tokens, logprobs, is_stopped in result.turns:
                assert (len(tokens), logprobs, is_stopped) == (sample.max_tokens, [0.0] * len(tokens), False)
                whole, ids = np.array(sample.prompt + tokens), np.arange(282)
                targets = np.broadcast_to(ids, (len(whole) - 1, 282))
                inputs = {"target_tokens": targets, "weights": np.zeros(targets.shape)}
                given = call("g", "cross_entropy", [Datum(whole[:-1], inputs)], forward_only=True)
                (scored,) = engine.run([given])
                assert scored.logprobs[0].argmax(1)[len(sample.prompt) - 1 :].tolist() == tokens


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5"])  # two samplers
def test_weights_that_are_nan_sample_nothing(tmp_path: Path, name: str) -> None:
    flavor = (f"model.name={name}", "model.flavor=debug", "model.overrides.vocab_size=282")
    engine = tenants(tmp_path, model=(*flavor, "data.tokenizer=byte"))
    engine.base.embedding_weight.fill_(torch.nan)
    with pytest.raises(UserError, match="the model's log-probs: expected numbers, got nan"):
        engine.sample("", [Sample(prompt=[65, 66, 67], max_tokens=2)])


def test_without_vision_in_training_all_weights_are_sampled_from(tmp_path: Path) -> None:
    """Those of the frozen tower are not saved, because they are the base's."""
    vision_model().save_pretrained(tmp_path / "hf")
    snapshot = (f"model.hf_path={tmp_path / 'hf'}", "model.vision=frozen", "data.tokenizer=byte")
    engine = tenants(tmp_path, model=snapshot)
    engine.create("v", None)
    with torch.no_grad():
        for weight in engine._tenants["v"].weights.values():
            weight.mul_(1.1)
    engine.snapshot("v", "live")
    engine.save("v", tmp_path / "saved", {})
    asked = [Sample(prompt=[5, 6, 7], max_tokens=4, seed=2, prompt_logprobs=True)]
    (live,), (saved,) = engine.sample("live", asked), engine.sample((tmp_path / "saved", None), asked)
    assert saved.turns == live.turns
    assert engine.sample("", asked)[0].turns != live.turns


def test_damaged_files_change_nothing(tmp_path: Path, engine: Tenants) -> None:
    engine.create("d", ADAPTER)
    engine.run([call("d", "cross_entropy", data("cross_entropy", 8))])
    engine.step("d", types.AdamParams(learning_rate=1e-2))
    engine.save("d", tmp_path / "saved", {})
    engine.run([call("d", "cross_entropy", data("cross_entropy", 8))])
    engine.step("d", types.AdamParams(learning_rate=1e-2))
    before = [w.detach().clone() for w in engine._tenants["d"].weights.values()]
    for file in (tmp_path / "saved" / "optimizer.safetensors", tmp_path / "saved" / "weights.safetensors"):
        file.write_bytes(file.read_bytes()[:-9])
        with pytest.raises(UserError, match=f"{file.name}: expected what this server saved, but it is damag"):
            engine.load("d", tmp_path / "saved", ADAPTER, with_optimizer=file.name.startswith("optimizer"))
    for weight, old in zip(engine._tenants["d"].weights.values(), before, strict=True):
        torch.testing.assert_close(weight, old, rtol=0, atol=0)
    assert engine._tenants["d"].optimizer.state


def test_steps_without_finite_gradients_change_nothing(engine: Tenants) -> None:
    engine.create("n", ADAPTER)
    with pytest.raises(UserError, match="expected gradients of forward_backward, got none"):
        engine.step("n", types.AdamParams())
    given = data("importance_sampling", 8)
    given[0].inputs["logprobs"] = np.full_like(given[0].inputs["logprobs"], -1e30)
    engine.run([call("n", "importance_sampling", given)])
    before = [w.detach().clone() for w in engine._tenants["n"].weights.values()]
    with pytest.raises(UserError, match="expected finite gradients"):
        engine.step("n", types.AdamParams(learning_rate=0.1))
    for weight, old in zip(engine._tenants["n"].weights.values(), before, strict=True):
        torch.testing.assert_close(weight, old, rtol=0, atol=0)
    assert not engine._tenants["n"].optimizer.state
