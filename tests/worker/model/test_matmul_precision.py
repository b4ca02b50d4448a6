"""`engine.matmul_precision`: its scope, its report, and its exception for rotary positions."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ortlaunch.base import machine
from ortlaunch.base.errors import EngineError
from ortlaunch.recipe.rules.rules import broken_rule_problems, precision_and_engine_device_rules
from ortlaunch.worker.engine.comparison import run_and_compare_passes
from ortlaunch.worker.model.matmul_precision import (
    measure_matmul_mantissa_bits,
    measure_matmul_precision_record,
    patch_rotary_to_multiply_elementwise,
    use_matmul_precision,
    use_onednn_if_required_or_faster,
)  # fmt: skip
from ortlaunch.worker.tasks.bench import loss_change_from_highest_matmul_precision
from tests.control.benches import resolved
from tests.makers import recipe

pytestmark = pytest.mark.usefixtures("workbench")
CPU = torch.device("cpu")


class Seen(nn.Module):
    """A model that records torch's setting in every pass."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.words = set[str]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.words.add(torch.get_float32_matmul_precision())
        return (self.weight * x).sum()


class Rotary(nn.Module):
    """Rotary angles as transformers up to 5.22 computes them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 1e4 ** (-torch.arange(0, 1, 1 / 16)))

    def forward(self, places: torch.Tensor) -> torch.Tensor:
        return (
            self.inv_freq[None, :, None].expand(len(places), -1, 1) @ places[:, None, :]
        ).transpose(1, 2)


class Counted(TorchDispatchMode):
    """A mode that records the names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def units(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that sets the matrix units of this processor."""
    return lambda *names: monkeypatch.setattr(machine, "bfloat16_matmul_units", lambda: list(names))


def test_it_holds_for_a_while() -> None:
    """torch's setting is restored at the end of the context, also after an error."""
    for error in ((), (ValueError,)):
        with (
            pytest.raises(error) if error else use_matmul_precision("highest"),
            use_matmul_precision("medium"),
        ):
            assert torch.get_float32_matmul_precision() == "medium"
            if error:
                raise error[0]
        assert torch.get_float32_matmul_precision() == "highest"


def test_the_bits_of_a_product_are_measured() -> None:
    """The measured bits are float32's at highest, and bfloat16's at medium with a unit for it."""
    assert measure_matmul_mantissa_bits(CPU) == 23
    with use_matmul_precision("medium"):
        found = measure_matmul_precision_record("medium", CPU)
    assert found.in_force == "medium"
    assert found.mantissa_bits == (7 if "amx_bf16" in machine.bfloat16_matmul_units() else 23)
    assert (found.gains_nothing is None) == ("amx_bf16" in machine.bfloat16_matmul_units())


@pytest.mark.parametrize(("names", "word", "said"), [
    # Of these units only amx_bf16 serves float32 matmuls.
    (("amx_bf16", "avx512_bf16"), "medium", "float32 matmul runs in bfloat16 (amx_bf16)"),
    (("avx512_bf16",), "medium", "no effect: this processor has avx512_bf16, and a float32 matmul can only use amx"),
    ((), "medium", "no effect: this processor has no bf16 unit"),
    (("amx_bf16",), "high", "no effect: torch has no TensorFloat32 matmul on CPU"),
])  # fmt: skip
def test_a_plan_says_what_it_brings(
    names: tuple[str, ...], word: str, said: str, units: Any
) -> None:
    """A plan reports the effect of the precision on this host's processor, without torch."""
    units(*names)
    assert machine.lower_matmul_precision_effect_text(word, "cpu").startswith(said)
    notes = resolved(
        engine={"name": "eager", "matmul_precision": word}, launch={"device": "cpu"}
    ).notes
    assert any(note.startswith(f"matmul_precision {word}: {said}") for note in notes)


def test_a_plan_at_highest_says_nothing(units: Any) -> None:
    """A plan with the default precision has no note of it."""
    assert not any("matmul" in note for note in resolved(engine={"name": "eager"}).notes)


def test_it_is_every_engines_and_float32s() -> None:
    """All engines accept the setting; precisions of 16 bits refuse it."""
    for name in ("eager", "inductor", "ort", "auto"):
        made = recipe(engine={"name": name, "matmul_precision": "medium"})
        assert not [*broken_rule_problems(made), *precision_and_engine_device_rules(made, "cpu")]
    said = [
        text
        for _, text in broken_rule_problems(
            recipe(engine={"name": "eager", "matmul_precision": "high"}, precision="bf16")
        )
    ]
    assert said == ["has no effect with bf16: it changes the matmul of float32 only; leave it out"]


class Products(nn.Module):
    """A model with one square matrix of this width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, width))


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that sets the processor and the mantissa bits of its matmuls at medium."""

    def be(name: str, flags: set[str], bits: int = 23) -> None:
        monkeypatch.setattr(machine, "_processor_name", lambda: name)
        monkeypatch.setattr(machine, "_processor_flags", lambda: flags)
        monkeypatch.setattr(
            "ortlaunch.worker.model.matmul_precision.measure_matmul_mantissa_bits",
            lambda device: bits,
        )

    # Restores torch's setting after the test.
    with use_matmul_precision("highest"):
        yield be


@pytest.mark.parametrize(("name", "flags", "width", "engine", "taken"), [
    ("AMD EPYC", {"avx512f"}, 96, {}, True),
    # For smaller matrices a call of oneDNN costs more than it saves.
    ("AMD EPYC", {"avx512f"}, 95, {}, False),
    # oneDNN is faster only on AMD's processors with AVX-512.
    ("AMD EPYC", {"avx2"}, 256, {}, False),
    ("Intel Xeon", {"avx512f"}, 256, {}, False),
    ("Intel Xeon", {"avx512f"}, 8, {"onednn": True}, True),
    ("AMD EPYC", {"avx512f"}, 256, {"onednn": False}, False),
    # At medium torch already uses oneDNN.
    ("AMD EPYC", {"avx512f"}, 256, {"matmul_precision": "medium"}, False),
    # ONNX Runtime computes the matmuls.
    ("AMD EPYC", {"avx512f"}, 256, {"name": "ort", "torch_matmul": False}, False),
])  # fmt: skip
def test_products_are_onednns_where_that_is_faster(
    name: str, flags: set[str], width: int, engine: dict[str, Any], taken: bool, processor: Any
) -> None:
    """Float32 matmuls use oneDNN where it is faster or required."""
    # torch uses oneDNN at its setting medium.
    processor(name, flags)
    asked = recipe(engine={"name": "eager", **engine})
    assert use_onednn_if_required_or_faster(asked, Products(width), CPU) is taken
    assert torch.get_float32_matmul_precision() == ("medium" if taken else "highest")


def test_onednns_products_stay_float32(processor: Any) -> None:
    """oneDNN is not used if it lowers the precision, and is refused if the recipe requires it."""
    processor("AMD EPYC", {"avx512f"}, bits=7)
    assert not use_onednn_if_required_or_faster(
        recipe(engine={"name": "eager"}), Products(256), CPU
    )
    with pytest.raises(EngineError, match="oneDNN computes the float32 matmul in bfloat16"):
        use_onednn_if_required_or_faster(
            recipe(engine={"name": "eager", "onednn": True}), Products(256), CPU
        )
    assert torch.get_float32_matmul_precision() == "highest"


def test_onednn_is_refused_where_it_does_nothing() -> None:
    """`onednn` is refused with other precisions, on a GPU, and with ONNX Runtime's matmuls."""

    def said(**fields: Any) -> list[str]:
        made = recipe(**fields)
        return [
            text
            for _, text in (
                *broken_rule_problems(made),
                *precision_and_engine_device_rules(made, "cuda"),
            )
        ]

    on = {"name": "eager", "onednn": True}
    assert said(engine=on) == [
        "has no effect on cuda: it changes torch's matmul on CPU only; leave it out"
    ]
    assert said(engine=on, precision="bf16")[0].startswith("has no effect with bf16")
    assert said(engine={**on, "matmul_precision": "medium"})[0].startswith(
        "has no effect with matmul_precision medium"
    )
    own = said(engine={"name": "ort", "onednn": True, "torch_matmul": False})
    assert own[0].startswith("has no effect with torch_matmul: false")


def test_parity_is_compared_at_highest() -> None:
    """A comparison runs at the highest precision and restores the setting."""
    # It compares the engines, not the processor's units.
    reference = Seen()
    module = Seen()
    module.weight = reference.weight
    with use_matmul_precision("medium"):
        run_and_compare_passes(reference, module, {"x": torch.ones(3)})
        assert torch.get_float32_matmul_precision() == "medium"
    assert reference.words == module.words == {"highest"}


@pytest.mark.parametrize(
    ("word", "found"), [("highest", {}), ("medium", {"loss_from_highest": 0.5})]
)
def test_a_bench_measures_what_it_does_to_the_loss(word: str, found: dict[str, float]) -> None:
    """A bench measures the change of the loss on the engine's module, for the worst rank."""

    class Moved(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert not self.training
            return x.sum() * (1.0 if torch.get_float32_matmul_precision() == "highest" else 1.25)

    module = Moved()
    engine = SimpleNamespace(
        eval_module=module,
        plain=None,
        keeps_build_precision=False,
        to_device=dict,
        exclude_passes_from_counts=lambda with_compilations: nullcontext(),
    )
    # The other rank has the larger difference; this one has 0.25.
    data_parallel = SimpleNamespace(rank=0)
    group = SimpleNamespace(data_parallel=data_parallel, gather=lambda mine: [mine, 0.5])
    made = recipe(engine={"name": "eager", "matmul_precision": word})
    batches = SimpleNamespace(
        read_micro_batch_and_count_tokens=lambda step, accumulation, rank: {"x": torch.ones(2)}
    )
    session: Any = SimpleNamespace(engine=engine, group=group, recipe=made, batches=batches)
    with use_matmul_precision(word):
        assert loss_change_from_highest_matmul_precision(session) == found
    assert module.training


def test_rotary_positions_are_multiplied_by_elements() -> None:
    """Rotary positions are multiplied elementwise, with the same angles, bit for bit."""
    # A matmul would round position 257 to 256 in bfloat16.
    model = nn.Sequential(Rotary())
    # bfloat16 has exact integers up to 256 only.
    places = torch.arange(600.0).repeat(2, 1)
    with Counted() as plainly:
        before = model(places)
    patch_rotary_to_multiply_elementwise(model)
    with Counted() as exactly:
        after = model(places)
    assert "aten.bmm.default" in plainly.names
    assert "aten.bmm.default" not in exactly.names
    assert torch.equal(before, after)
