"""Engines and their fallback, fp16 and bf16, and accumulation, in whole runs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.runs import EAGER, FULL, TOY, Train, ended_well, merged
from tests.ort import needs_ort

# ------------------------------------------------------------ engine truth


@needs_ort
def test_a_model_that_onnx_runtime_cannot_run(train: Train) -> None:
    """A model that ONNX Runtime cannot run ends the run before step 1, with reason and advice."""
    # With torch's operators allowed inside the graph, the model would run.
    without = {"model": {"factory": "toys:attending"}, "engine": {"torch_operators": "off"}}
    run = train("attending", merged(TOY, without))
    assert run.status == 1
    last = run.err[-3000:]
    assert "ONNX Runtime cannot run this model: " in last
    assert "aten::logcumsumexp" in last
    assert "Try engine.name=inductor or engine.name=eager, or engine.allow_fallback=true" in last
    assert "Traceback" not in last
    assert run.files().isdisjoint({"metrics.jsonl", "engine.json"})
    assert not (run.folder / "checkpoints").exists()


@needs_ort
@pytest.mark.slow
@pytest.mark.ci
def test_a_fallback_that_is_allowed_is_told(train: Train) -> None:
    """With allow_fallback a run trains in eager PyTorch; output and engine.json have the reason."""
    engine = {"name": "ort", "allow_fallback": True, "torch_operators": "off"}
    fallback = {"model": {"factory": "toys:attending"}, "engine": engine}
    run = ended_well(train("fallback", merged(TOY, fallback)))
    assert run.losses()[-1] < run.losses()[0]
    engine = run.truth()["engine"]
    assert (engine["asked"], engine["used"]) == ("ort", "eager")
    # A reason of a sentence, not only an error's class.
    assert len(engine["fallback_reason"]) > 20
    assert run.truth()["onnxruntime"]["forward_passes"] == 0
    assert (
        f"FALLBACK: engine ort was requested, eager runs: {engine['fallback_reason'][:20]}"
        in run.out
    )
    assert "ran on engine eager" in run.out


# ------------------------------------------------------------ precision, batches


@pytest.fixture(scope="module")
def bf16(train: Train) -> list[float]:
    return precise_curve(train, "bf16", None)


def precise_curve(train: Train, precision: str, zero: dict[str, int] | None) -> list[float]:
    """Return the losses of training and evaluation of a run with clipping."""
    batch = {"global_size": 64, "micro_size": 16}
    rate = {"learning_rate": 3e-2}
    recipe = merged(FULL, {"precision": precision, "zero": zero, "batch": batch, "optimizer": rate})
    run = ended_well(train(f"{precision}-{bool(zero)}", {**recipe, "model": TOY["model"]}))
    assert run.truth()["precision"] == precision
    assert all(norm > 0 for _, norm in run.values("gradient_norm"))
    evaluations = [loss for _, loss in run.values("evaluation_loss")]
    assert evaluations == sorted(evaluations, reverse=True)
    return [*run.losses(), *evaluations]


@pytest.mark.parametrize(
    ("precision", "zero"),
    [("fp16", None), ("bf16", {"stage": 2})],
)
@pytest.mark.slow
@pytest.mark.ci
def test_lower_precision(
    train: Train, bf16: list[float], precision: str, zero: dict[str, int] | None
) -> None:
    """bf16 with and without ZeRO 2, and fp16 by autocast, train on a CPU, nearly alike."""
    assert sum(bf16[7:10]) < 0.7 * sum(bf16[:3])
    other = precise_curve(train, precision, zero)
    assert other == pytest.approx(bf16, rel=0.02)
    # Otherwise fp16 or ZeRO had no effect.
    assert other != bf16


@pytest.mark.slow
@pytest.mark.ci
def test_fp16_skips_steps_that_overflow(train: Train) -> None:
    """fp16 skips steps until its loss scale fits; a resumed run restores scale and count."""
    # A loss of 3 times the size overflows fp16 at the first loss scales.
    recipe = merged(TOY, {**EAGER, "precision": "fp16", "model": {"arguments": {"scale": 3.0}}})
    recipe["schedule"] = {"name": "constant"}
    run = ended_well(train("skips", recipe))
    skipped = [count for _, count in run.values("skipped_steps")]
    losses = run.losses()
    assert 0 < skipped[4] == skipped[-1] < 5
    assert skipped == sorted(skipped)
    assert losses[-1] < losses[0]
    ended_well(train("skips-resumed", recipe, "train.max_steps=5"))
    resumed = ended_well(train("skips-resumed", recipe))
    assert (resumed.losses(), resumed.values("skipped_steps")) == (
        losses,
        run.values("skipped_steps"),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("clip", "others"),
    [pytest.param(0.7, (None, {"stage": 0}), marks=pytest.mark.ci), (None, ({"stage": 2},))],
)
def test_one_large_or_four_small_batches(
    clip: float | None, others: tuple[Any, ...], train: Train
) -> None:
    """One large batch and four small ones give one curve, with DeepSpeed and without."""
    recipe = merged(TOY, {**EAGER, "train": {"max_grad_norm": clip, "max_steps": 8}})
    at_once = ended_well(train(f"once-{clip}", recipe, "batch.micro_size=16"))
    norms = [norm for _, norm in at_once.values("gradient_norm")]
    for zero in others:
        in_four = ended_well(train(f"four-{clip}-{bool(zero)}", {**recipe, "zero": zero}))
        assert in_four.losses() == pytest.approx(at_once.losses(), rel=1e-5)
        found = [norm for _, norm in in_four.values("gradient_norm")]
        assert found == pytest.approx(norms, rel=1e-4)
        # Every step was clipped, so the test covers clipping.
        assert min(found) > (clip or 0)


@pytest.mark.slow
def test_inductor(train: Train) -> None:
    """torch.compile gives the same curve as eager, without and with ZeRO 1, and is recorded."""
    plain = merged(TOY, EAGER)
    expected = ended_well(train("for-inductor", plain)).losses()
    for zero in (None, {"stage": 1}):
        recipe = merged(TOY, {"engine": {"name": "inductor"}, "zero": zero})
        run = ended_well(train(f"inductor-{bool(zero)}", recipe, timeout=280))
        assert run.losses() == pytest.approx(expected, rel=1e-5)
        assert run.truth()["engine"]["used"] == "inductor"
