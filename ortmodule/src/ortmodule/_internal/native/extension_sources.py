"""Changes to a copy of ORT's installed extension sources, made before the copy is compiled.

ORT 1.19.2's sources use parts of torch 2.6 that later versions hide or have changed. Each replaced
text must occur exactly once; unknown sources are not built. Standard library only.
"""

from __future__ import annotations

import zlib
from pathlib import Path

# torch/torch.h and torch/extension.h include all of torch's C++ front end. The used headers alone
# compile faster.
_EXECUTOR_INCLUDES = """\
#include <torch/version.h>
#include <torch/csrc/jit/runtime/operator.h>
#include <ATen/ScalarOps.h>
#include <pybind11/pybind11.h>"""
# The result of an operator may be a view of an input (unfold). ORT would read the view after it has
# given the input's memory to another node, so views are copied.
_OWN_MEMORY = """\
static DLManagedTensor* own_memory(const at::Tensor& tensor, const std::vector<c10::IValue>& arguments) {
  for (const auto& argument : arguments) {
    if (argument.isTensor() && argument.toTensor().defined() && tensor.is_alias_of(argument.toTensor())) {
      return at::toDLPack(tensor.clone(at::MemoryFormat::Contiguous));
    }
  }
  return at::toDLPack(tensor.contiguous());
}

"""
# ORT passes on the text of an error, without its type. torch_in_graph/pass_errors.py reads both.
_TORCHS_ERRORS = """\
  try {
    aten_op.op->getOperation()(stack);
  } catch (const c10::IndexError& e) {
    throw std::runtime_error(std::string("torch's IndexError: ") + e.what_without_backtrace());
  } catch (const c10::ValueError& e) {
    throw std::runtime_error(std::string("torch's ValueError: ") + e.what_without_backtrace());
  } catch (const c10::Error& e) {
    throw std::runtime_error(std::string("torch's RuntimeError: ") + e.what_without_backtrace());
  }
"""
_INTEROP_INCLUDES = """\
#include <iostream>
#include <ATen/DLConvertor.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <c10/util/irange.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/utils/python_strings.h>"""

# Torch 2.7 hides the typeinfo that a dynamic_cast to PyNode needs, and 2.13 renamed PyNode::obj.
# torch's functionToPyObject returns the THPFunction of a custom function's node in all versions.
_PYTHON_FUNCTION = """\
template <typename NodePointer>
static py::object python_function(const NodePointer& node) {
  auto object = py::reinterpret_steal<py::object>(torch::autograd::functionToPyObject(node));
  TORCH_CHECK(THPFunction_Check(object.ptr()), "grad_fn is not of a custom autograd function.");
  return object;
}

"""

# Torch 2.13 hides tensor_fromDLPack. This copy of it uses at::fromDLPack, which stays visible.
_FROM_CAPSULE = """

static at::Tensor tensor_from_capsule(PyObject* capsule) {
  auto* managed = static_cast<DLManagedTensor*>(PyCapsule_GetPointer(capsule, "dltensor"));
  TORCH_CHECK(managed != nullptr, "found invalid pycapsule");
  at::Tensor tensor = at::fromDLPack(managed);
  PyCapsule_SetName(capsule, "used_dltensor");
  return tensor;
}
"""

# Compiled as one file instead of five: torch's headers take nearly all of the compile time.
_INTEROP_FILES = ("ctx_pool", "custom_function_shared", "custom_function_bw", "custom_function_fw")


def _changes_that_stop_error_printing(
    forward_or_backward: str,
) -> tuple[tuple[str, str], ...]:
    """Return the changes after which an error in a function is raised alone, and not printed too."""
    printing_line = (
        f'    std::cerr << "custom_function_{forward_or_backward}_runner failed with '
        '" << e.what() << std::endl;\n'
    )
    return (
        (
            "    if (PyErr_Occurred()) {\n      PyErr_Print();",
            "    if (PyErr_Occurred()) {\n      PyErr_Clear();",
        ),
        (printing_line, ""),
    )


# By extension and installed file: pairs of a text and its replacement.
_CHANGES: dict[str, dict[str, tuple[tuple[str, str], ...]]] = {
    "torch_gpu_allocator": {
        # emptyCache has an argument since torch 2.7, and ORT calls this address without one.
        "torch_gpu_allocator.cc": (
            (
                "&c10::cuda::CUDACachingAllocator::emptyCache)",
                "+[]() { c10::cuda::CUDACachingAllocator::emptyCache(); })",
            ),
        ),
    },
    "aten_op_executor": {
        "aten_op_executor.cc": (
            ("#include <torch/torch.h>", _EXECUTOR_INCLUDES),
            ("void ExecuteATenOperator(", _OWN_MEMORY + "void ExecuteATenOperator("),
            (
                "at::toDLPack(tensor.is_contiguous() ? tensor : tensor.contiguous())",
                "own_memory(tensor, arguments)",
            ),
            ("  aten_op.op->getOperation()(stack);\n", _TORCHS_ERRORS),
        ),
    },
    "torch_interop_utils": {
        # torch 2.13 holds nodes by intrusive_ptr. ORT's keys are the low 32 bits of an address,
        # which two contexts can share.
        "ctx_pool.h": (
            ("#include <torch/extension.h>", _INTEROP_INCLUDES + _FROM_CAPSULE),
            (
                "std::shared_ptr<torch::autograd::Node>> grad_fns_;",
                "decltype(torch::autograd::AutogradMeta::grad_fn_)> grad_fns_;",
            ),
        ),
        "ctx_pool.cc": (
            ("#include <torch/extension.h>", ""),
            (
                "at::Tensor target) {\n  uint32_t y = reinterpret_cast<uintptr_t>(ctx.ptr());",
                "at::Tensor target) {\n  uintptr_t y = reinterpret_cast<uintptr_t>(ctx.ptr());",
            ),
            (
                "unregister_grad_fn(py::object ctx) {\n"
                "  uint32_t y = reinterpret_cast<uintptr_t>(ctx.ptr());",
                "unregister_grad_fn(py::object ctx) {\n"
                "  uintptr_t y = reinterpret_cast<uintptr_t>(ctx.ptr());",
            ),
        ),
        "custom_function_shared.h": (("#include <torch/extension.h>", ""),),
        # All tensors without elements have the address 0, and share no memory.
        "custom_function_shared.cc": (
            ("#include <torch/extension.h>", ""),
            (
                "if (input_tensor_address_to_tensor_input_index_map.find(t_data_address) !=",
                "if (t_data_address && "
                "input_tensor_address_to_tensor_input_index_map.find(t_data_address) !=",
            ),
        ),
        "custom_function_bw.h": (("#include <torch/extension.h>", ""),),
        "custom_function_bw.cc": (
            ("#include <torch/extension.h>", ""),
            ("torch::utils::tensor_fromDLPack(", "tensor_from_capsule("),
            *_changes_that_stop_error_printing("backward"),
        ),
        "custom_function_fw.h": (("#include <torch/extension.h>", ""),),
        "custom_function_fw.cc": (
            ("#include <torch/extension.h>", ""),
            ("torch::utils::tensor_fromDLPack(", "tensor_from_capsule("),
            (
                "static void clear_grad_fns_for_next_edges(",
                f"{_PYTHON_FUNCTION}static void clear_grad_fns_for_next_edges(",
            ),
            (
                """\
  const auto& grad_fn = autograd_meta->grad_fn_;
  auto py_node_fn = dynamic_cast<torch::autograd::PyNode*>(grad_fn.get());
  TORCH_CHECK(py_node_fn != nullptr, "grad_fn is not PyNode type.");
  THPFunction* py_fn = (THPFunction*)py_node_fn->obj;
""",
                """\
  py::object function = python_function(autograd_meta->grad_fn_);
  THPFunction* py_fn = (THPFunction*)function.ptr();
""",
            ),
            (
                """\
  const std::shared_ptr<torch::autograd::Node>& cdata = tensor_owning_ctx.value().grad_fn();
  auto py_node_fn = dynamic_cast<torch::autograd::PyNode*>(cdata.get());
  TORCH_CHECK(py_node_fn != nullptr, "cdata is not PyNode type.");
""",
                "  const auto& cdata = tensor_owning_ctx.value().grad_fn();\n",
            ),
            (
                """\
  THPFunction* py_fn = (THPFunction*)py_node_fn->obj;
  py::object ret = py::reinterpret_steal<py::object>(torch::autograd::functionToPyObject(cdata));

  TORCH_CHECK(py_fn != nullptr, "cdata is not THPFunction type.");
""",
                """\
  py::object ret = python_function(cdata);
  THPFunction* py_fn = (THPFunction*)ret.ptr();
""",
            ),
            ("  auto saved_for = py_fn->cdata.lock();\n", "  auto saved_for = cdata;\n"),
            # Lines about ORT's internals, in the terminal of each run with torch in its graph.
            (
                'std::cerr << "First-time run initialize kernel info including materialize_grads '
                'and materialize_grads_config."\n                << std::endl;',
                "",
            ),
            (
                'std::cerr << "First time run initialize kernel info including saved_for_forward, '
                'and mark_dirty infos." << std::endl;',
                "",
            ),
            *_changes_that_stop_error_printing("forward"),
        ),
        "torch_interop_utils.cc": (
            (
                '#include "ctx_pool.h"\n',
                "".join(f'#include "{name}.cc"\n' for name in _INTEROP_FILES),
            ),
        ),
        "setup.py": (
            (
                "".join(
                    f'    "{name}.cc",\n'
                    for name in (
                        "ctx_pool",
                        "custom_function_bw",
                        "custom_function_fw",
                        "custom_function_shared",
                    )
                ),
                "",
            ),
            # torch adds the C++ standard that it needs: 17, in later versions 20. The code only
            # forwards calls, so -O1 loses nothing.
            ('["-O3", "-std=c++17"]', '["-O1"]'),
        ),
    },
}

# Appended to setup.py: load the built extension, in the process that has imported torch. Symbols
# that torch hides are missed only at this point, not by the compiler.
_LOADING_CODE = {
    "torch_interop_utils": """
import glob, importlib.util
_file = glob.glob("build/lib*/torch_interop_utils*.so")[0]
_spec = importlib.util.spec_from_file_location("torch_interop_utils", _file)
importlib.util.module_from_spec(_spec)
""",
}


class UnknownSource(ValueError):
    """An installed source file differs from the one that the changes were written for."""


def adapt_copied_sources_and_append_loading_code(extension_name: str, source_folder: Path) -> None:
    """Change the copy of an extension's sources in `source_folder` so that it builds on every torch.

    Raises:
        UnknownSource: a text to replace does not occur exactly once; names the file and the text.
    """
    for file, replacements in _CHANGES.get(extension_name, {}).items():
        path = source_folder / file
        path.write_text(_text_with_each_old_text_replaced_or_refuse(path, replacements))
    if extension_name in _LOADING_CODE:
        with open(source_folder / "setup.py", "a") as setup:
            setup.write(_LOADING_CODE[extension_name])


def checksum_of_source_changes() -> str:
    """Return a checksum of this file; builds of another revision are not reused."""
    return f"{zlib.crc32(Path(__file__).read_bytes()):08x}"


def _text_with_each_old_text_replaced_or_refuse(
    source_path: Path, old_and_new_texts: tuple[tuple[str, str], ...]
) -> str:
    text = source_path.read_text() if source_path.is_file() else ""
    for old_text, new_text in old_and_new_texts:
        if text.count(old_text) != 1:
            raise UnknownSource(
                f"ORT's {source_path.name} has {text.count(old_text)} times, instead of once: "
                f"{old_text.strip()[:120]!r}"
            )
        text = text.replace(old_text, new_text)
    return text
