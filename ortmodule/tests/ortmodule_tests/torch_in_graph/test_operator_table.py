"""Each row of the operator table makes its example equal eager PyTorch, and is needed for that."""

from __future__ import annotations

import pytest

from ortmodule._internal.native import extensions
from ortmodule._internal.torch_in_graph.operator_table import OPERATORS, TORCH, OperatorRemedy
from ortmodule_tests.forks import Run
from ortmodule_tests.ort import needs_ort
from ortmodule_tests.torch_in_graph.operator_examples import compare_with_eager

pytestmark = [
    needs_ort,
    pytest.mark.usefixtures("built"),
    pytest.mark.skipif(
        bool(extensions.reason_interop_is_unbuildable_or_empty()),
        reason="ONNX Runtime's torch_interop_utils is not built",
    ),
]

# The remedy of these is an error.
REFUSED = {"as_strided"}


@pytest.mark.filterwarnings("ignore:at..frobenius_norm is deprecated")
@pytest.mark.parametrize("row", OPERATORS, ids=[row.name for row in OPERATORS])
def test_an_example_equals_eagers(row: OperatorRemedy) -> None:
    """Results, gradients and errors of an example are eager's, in one export.

    The table's own forms need no operator of torch.
    """
    comparison = compare_with_eager(row.example, "auto" if row.form is TORCH else "off")
    if row.name in REFUSED:
        assert comparison.verdict == "error"
    else:
        assert (comparison.verdict, comparison.exports) == ("right", 1), comparison


def test_a_fault_is_one_sentence() -> None:
    """Each row says what goes wrong in one sentence of at most 100 characters."""
    for row in OPERATORS:
        assert row.fault[0].isupper(), row.fault
        assert row.fault.endswith("."), row.fault
        assert len(row.fault) <= 100, row.fault


PLANTED = """
from ortmodule._internal.torch_in_graph.operator_table import TORCH, OperatorRemedy
from ortmodule_tests.torch_in_graph import operator_examples
# The exporter has no form of the first, and right ones of the others.
for name, form in ("erfinv", TORCH), ("tanh", TORCH), ("exp", lambda g, x: g.op("Exp", x)):
    def example(h, k, name=name):
        return getattr(h / 2, name)()
    operator_examples.add_row(OperatorRemedy(name, form, "Nothing is wrong.", example))
operator_examples.print_rows_without_effect()
"""


def test_a_row_without_effect_is_named(fresh_ort: Run) -> None:
    """Of the table and three planted rows without effect, these three alone are named."""
    done = fresh_ort(PLANTED, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["erfinv", "tanh", "exp"]
