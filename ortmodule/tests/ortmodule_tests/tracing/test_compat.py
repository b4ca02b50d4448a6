"""The import of ORTModule on the installed torch: every applied repair is needed, and made once."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

# The pipeline imports all modules in which repairs are declared.
from ortmodule._internal import import_ortmodule, pipeline  # noqa: F401
from ortmodule._internal.base import patching, repair_registry
from ortmodule._internal.native import extensions
from ortmodule._internal.native.extension_cache import cache_root_without_creating
from ortmodule_tests.forks import Run
from ortmodule_tests.ort import needs_ort

# Arguments: the repair to leave out, then modules to import first.
PROLOGUE = """
import sys, warnings
skipped, first = sys.argv[1], sys.argv[2:]
for name in first:
    __import__(name)
import torch
from ortmodule._internal import import_ortmodule
from ortmodule._internal.base import repair_registry
from ortmodule._internal.native import extensions
from ortmodule import ORTModule, Settings

refusal = extensions.reason_interop_is_unbuildable_or_empty()

export, push = torch.onnx.export, torch.cuda.nvtx.range_push
repair_registry.record_unapplied_repair(skipped, "left out")
import_ortmodule.import_ortmodule_with_repairs_and_export_steps()
assert first or "deepspeed" not in sys.modules, "ORT loaded DeepSpeed"

class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1.0
    @staticmethod
    def backward(ctx, gradient):
        return -gradient

class Model(torch.nn.Module):
    def __init__(self, custom):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.custom = torch.nn.Linear(4, 1), custom
    def forward(self, x):
        y = self.linear(x)
        assert bool(y.numel()), "asked of a tensor, to provoke a TracerWarning"
        return (Reverse.apply(y) if self.custom else y).sum()

def gradient(custom):
    model = Model(custom)
    ORTModule(model, Settings(threads=1, torch_operators="off"))(torch.ones(2, 4)).backward()
    return model.linear.weight.grad.tolist()[0]
"""
STEP = """
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    assert gradient(custom=False) == [2.0] * 4
noise = [str(w.message) for w in caught if w.category.__name__ in ("TracerWarning", "DeprecationWarning")]
assert not noise, "warnings of the export: " + noise[0]
"""
# Each check fails with a message of its own, which MESSAGES has.
CHECKS = {
    **dict.fromkeys(("import", "extensions", "stand-in", "torchscript", "warnings", "nvtx"), STEP),
    "convolution": """
try:
    convolution = ORTModule(torch.nn.Conv2d(1, 1, 3), Settings(threads=1, torch_operators="off"))
    convolution(torch.ones(1, 1, 4, 4)).sum().backward()
except Exception as error:
    raise SystemExit(f"a convolution: {error}")
""",
    "padding": """
from onnxruntime.training.ortmodule._graph_transition_manager import GraphTransitionManager
words = torch.nn.Sequential(torch.nn.Embedding(5, 4, padding_idx=0))
hooks = GraphTransitionManager._add_check_embedding_sparsity_hook(True, torch.device("cuda"), None, None, words)
assert bool(hooks) != bool(refusal), "padding would take a Python operator"
""",
    "backward": """
try:
    assert gradient(custom=True) == [-2.0] * 4, "a custom backward was replaced"
except Exception as error:
    if not refusal or "Couldn't export Python operator" not in str(error):
        raise
    assert refusal in str(error), "the refusal has no reason"
""",
    "detach": """
class Stopped(Model):
    def forward(self, x):
        hidden = self.linear(x)
        return (hidden - hidden.detach()).sum()

stopped = Stopped(False)
ORTModule(stopped, Settings(threads=1, torch_operators="off"))(torch.ones(2, 4)).backward()
assert stopped.linear.weight.grad.tolist()[0] == [2.0] * 4, "the gradient went through detach"
""",
    "weights": """
infer, weights = torch._C._jit_pass_onnx_graph_shape_type_inference, []
torch._C._jit_pass_onnx_graph_shape_type_inference = lambda graph, given, opset: (
    weights.extend(weight.numel() for weight in given.values()), infer(graph, given, opset))
ORTModule(torch.nn.Linear(2000, 1), Settings(threads=1, torch_operators="off"))(torch.ones(2, 2000)).sum().backward()
assert weights == [1, 1], f"weights of these sizes were copied: {weights}"
torch._C._jit_pass_onnx_graph_shape_type_inference = infer
""",
    "no_grad": """
class Off(Model):
    def forward(self, x):
        hidden = self.linear(x)
        with torch.no_grad():
            target = hidden * 1
        return (hidden - target).sum()

off = Off(False)
ORTModule(off, Settings(threads=1, torch_operators="off"))(torch.ones(2, 4)).backward()
assert off.linear.weight.grad.tolist()[0] == [2.0] * 4, "the gradient went through no_grad"
""",
    "stacked": """
class Repeated(Model):
    def forward(self, x):
        hidden = self.linear(x).repeat_interleave(2, dim=-1)
        return (torch.stack((hidden, hidden * 2), dim=-1).flatten() * torch.arange(8)).sum()

try:
    ORTModule(Repeated(False), Settings(threads=1, torch_operators="off"))(torch.ones(2, 4)).backward()
except Exception as error:
    raise SystemExit(f"stacked over another dimension: {error}")
""",
    "call": """
class Swapped(Model):
    def forward(self, x):
        weights = {"weight": self.linear.weight * 2, "bias": self.linear.bias}
        return torch.func.functional_call(self.linear, weights, (x,)).sum()

try:
    ORTModule(Swapped(False), Settings(threads=1, torch_operators="off"))(torch.ones(2, 4)).backward()
except Exception as error:
    raise SystemExit(f"weights of a call: {error}")
""",
    "view": """
class Tripled(Model):
    def forward(self, x):
        hidden = self.linear(x)
        view = hidden[:1]
        view.mul_(3)
        return hidden.sum()

tripled = Tripled(False)
ORTModule(tripled, Settings(threads=1, torch_operators="off"))(torch.ones(2, 4)).backward()
assert tripled.linear.weight.grad.tolist()[0] == [4.0] * 4, "a change through a view was left out"
""",
    "checkpoint": """
class Kept(Model):
    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(self.linear, x, use_reentrant=False).sum()

try:
    ORTModule(Kept(False), Settings(threads=1, torch_operators="off"))(torch.ones(2, 4)).backward()
except Exception as error:
    raise SystemExit(f"a checkpoint: {error}")
""",
    "parts": """
class Halves(Model):
    def forward(self, x):
        first, last = self.linear(x).expand(-1, 2).chunk(2, -1)
        return first * first.shape[0] + last

halves = ORTModule(Halves(False), Settings(threads=1, torch_operators="off"))
small, large = halves(torch.ones(2, 4)), halves(torch.ones(5, 4))
assert abs(large[0] / small[0] - 2) < 1e-5, "the number of rows of a part stayed that of the first batch"
""",
    "attention": """
class Attention(torch.nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(4, 2, dropout=dropout, batch_first=True)
    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0].sum()

for dropout in (0.0, 0.5):
    ORTModule(Attention(dropout), Settings(threads=1, torch_operators="off"))(torch.ones(2, 3, 4)).backward()
""",
    "mask": """
types = set()

class Masked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, mask):
        types.add(mask.dtype)
        return x * mask
    @staticmethod
    def backward(ctx, gradient):
        return gradient, None

class Mask(Model):
    def forward(self, x):
        return Masked.apply(self.linear(x), x[:, :1] > 0).sum()

if not refusal:
    ORTModule(Mask(True), Settings(threads=1, torch_operators="off"))(torch.ones(2, 4)).backward()
    assert types == {torch.bool}, f"a mask became uint8: {types}"
""",
}
EPILOGUE = """
assert torch.onnx.export is export and torch.cuda.nvtx.range_push is push, "torch was changed"
print("applied:", *repair_registry.applied_repair_names())
"""
# By check: the error without the repair that names it as its example.
MESSAGES = {
    "import": "does not import",
    "checkpoint": "a checkpoint: ",
    "extensions": "extensions were not detected",
    "stand-in": "torch_interop_utils",
    "torchscript": "exporting the PyTorch model to ONNX",
    "backward": "a custom backward was replaced",
    "padding": "padding would take a Python operator",
    "mask": "a mask became uint8",
    "detach": "the gradient went through detach",
    "attention": "scaled_dot_product_attention with dropout",
    "stacked": "stacked over another dimension: ",
    "call": "weights of a call: ",
    "no_grad": "the gradient went through no_grad",
    "view": "a change through a view was left out",
    "weights": "weights of these sizes were copied",
    "parts": "the number of rows of a part stayed",
    "warnings": "warnings of the export",
    "convolution": "a convolution: ",
    "nvtx": "NVTX functions not installed",
}
ALL = "tracing/test_compat.py::test_each_check_passes["
# By repair: the check that fails without it.
CHECK_BY_REPAIR = {
    name: repair.example.removeprefix(ALL)[:-1]
    for name, repair in repair_registry.REPAIR_BY_NAME.items()
    if repair.example.startswith(ALL)
}


# Repairs that are applied only if the extension for custom autograd functions cannot be built.
REFUSING = ("disable_custom_autograd", "refuse_custom_backward", "skip_padding_hook")


@pytest.fixture(scope="module")
def refusing(built: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache in which torch_interop_utils could not be built."""
    # A copy of the real cache without one extension, which saves a build.
    here = extensions.extension_cache_folder()
    cache = tmp_path_factory.mktemp("refusing")
    folder = cache / here.relative_to(cache_root_without_creating())
    folder.mkdir(parents=True)
    for file in (*here.glob("*.so"), *here.glob("*.sha256")):
        if file.stem != extensions.INTEROP:
            shutil.copy2(file, folder)
    (folder / f"{extensions.INTEROP}.refused").write_text("the compiler says no")
    return cache


def passed_and_applied(fresh: Run, cache: Path, checks: Iterable[str]) -> tuple[set[str], set[str]]:
    """Return the checks that pass after `import onnxruntime` has come first and failed, and the repairs.

    This is the worst case. The first check that does not pass is the last one that is run.
    """
    program = PROLOGUE + "".join(f"{CHECKS[check]}\nprint('passed:{check}')\n" for check in checks)
    done = fresh(program + EPILOGUE, "nothing", "onnxruntime", ORT_EXTENSIONS_DIR=str(cache))
    # pytest shows it where a check does not pass.
    print(done.stderr)
    said, _, names = done.stdout.partition("applied:")
    return set(re.findall(r"^passed:(.*)$", said, re.MULTILINE)), set(names.split())


@pytest.fixture(scope="module")
def with_interop(fresh: Run, built: None) -> tuple[set[str], set[str]]:
    """The checks that pass, and the repairs, with the real cache."""
    return passed_and_applied(fresh, cache_root_without_creating(), CHECKS)


@pytest.fixture(scope="module")
def repairs(fresh: Run, refusing: Path, with_interop: tuple[set[str], set[str]]) -> dict[str, Path]:
    """All repairs that are applied with the installed versions, each with a cache that has it."""
    # Once with the real cache and once without the extension: no stack needs all repairs at once.
    checks = {CHECK_BY_REPAIR[repair] for repair in REFUSING}
    passed, without = passed_and_applied(fresh, refusing, checks)
    assert (passed, set(REFUSING) - without) == (checks, set())
    assert (
        extensions.reason_interop_is_unbuildable_or_empty()
        or not without & set(REFUSING) & with_interop[1]
    )
    # A repair that both need is tested with the real cache.
    return {
        **dict.fromkeys(without, refusing),
        **dict.fromkeys(with_interop[1], cache_root_without_creating()),
    }


@needs_ort
@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("check", CHECKS)
def test_each_check_passes(check: str, with_interop: tuple[set[str], set[str]]) -> None:
    """All checks pass with the repairs of the installed versions."""
    assert check in with_interop[0]


@needs_ort
@pytest.mark.slow
@pytest.mark.ci
def test_the_checks_pass_without_the_extension(repairs: dict[str, Path]) -> None:
    """They pass where torch_interop_utils could not be built, too, and the repairs for it are applied."""
    assert set(REFUSING) <= repairs.keys()


@needs_ort
@pytest.mark.nightly
@pytest.mark.parametrize("repair", list(CHECK_BY_REPAIR))
def test_each_repair_is_needed_where_it_is_applied(
    repairs: dict[str, Path], repair: str, fresh: Run, fresh_ort: Run
) -> None:
    """Without any one applied repair, one check of a tiny model fails with that repair's error."""
    if repair not in repairs:
        pytest.skip(f"not needed on torch {torch.__version__}")
    # Only this repair needs an import of ORT that failed before.
    first = ["onnxruntime.training"] if repair == "restore_checkpoint_functions" else []
    phase = repair_registry.REPAIR_BY_NAME[repair].phase_of_application()
    run = fresh if phase == "before import" else fresh_ort
    check = CHECK_BY_REPAIR[repair]
    done = run(PROLOGUE + CHECKS[check], repair, *first, ORT_EXTENSIONS_DIR=str(repairs[repair]))
    assert done.returncode != 0
    assert MESSAGES[check] in done.stderr


@needs_ort
def test_deepspeed_that_is_imported_later_has_orts_checkpoint(built: None, fresh_ort: Run) -> None:
    """ORT replaces the function at its own import, which does not import DeepSpeed here."""
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("needs deepspeed: make train installs it")
    done = fresh_ort(
        "import sys\nassert 'deepspeed' not in sys.modules\n"
        "import deepspeed\nprint(deepspeed.checkpointing.checkpoint.__qualname__)"
    )
    assert done.returncode == 0, done.stderr
    assert "_override_gradient_checkpoint." in done.stdout


@needs_ort
def test_importing_twice_repairs_once(built: None) -> None:
    """The second call returns the same module and applies no more repairs."""
    import_ortmodule.import_ortmodule_with_repairs_and_export_steps()
    before = repair_registry.applied_repair_names()
    assert (
        import_ortmodule.import_ortmodule_with_repairs_and_export_steps()
        is import_ortmodule.import_ortmodule_with_repairs_and_export_steps()
    )
    assert repair_registry.applied_repair_names() == before
    assert len(set(before)) == len(before)


def test_environment_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """A with-block's variables are removed or restored after it, also after an error."""
    monkeypatch.setenv("ORTLAUNCH_TEST_A", "before")
    monkeypatch.delenv("ORTLAUNCH_TEST_B", raising=False)

    def fail() -> None:
        with patching.set_environment_variables_temporarily(
            ORTLAUNCH_TEST_A="during", ORTLAUNCH_TEST_B="during"
        ):
            assert (os.environ["ORTLAUNCH_TEST_A"], os.environ["ORTLAUNCH_TEST_B"]) == (
                "during",
                "during",
            )
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert os.environ["ORTLAUNCH_TEST_A"] == "before"
    assert "ORTLAUNCH_TEST_B" not in os.environ
