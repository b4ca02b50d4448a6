"""List the kernels of ONNX Runtime's CUDA provider, and ORT's placement of nodes, without a GPU.

    tools/cuda_kernels.py WHEEL
        writes ortmodule/src/ortmodule/_internal/native/cuda_kernels.txt
    tools/cuda_kernels.py WHEEL --place GRAPH.onnx ...
        prints nodes on the CPU and copies, by ORT's own decision

WHEEL: a file of `pip download onnxruntime-training==1.19.2 --no-deps`, for this Python. The
provider is started with stubs of CUDA's libraries that this script compiles (a C compiler and
readelf are needed): each function does nothing, and GPU memory is host memory. No kernel can run
so, but ORT registers all of them, and assigns and optimizes graphs as on a GPU. The registry is
then read from the process's own memory: its hash map has nodes of (next, key, KernelDef*), with
keys "NAME DOMAIN CUDAExecutionProvider" (onnxruntime 1.19.2, core/framework/kernel_registry.h and
kernel_def_builder.h, libstdc++).
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import importlib.util
import os
import re
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ortmodule._internal.native import extensions

PROVIDER = "CUDAExecutionProvider"
_TABLE = Path(__file__).parents[1] / "ortmodule/src/ortmodule/_internal/native/cuda_kernels.txt"
_LAST = 2**31 - 1
_OLDEST = 14  # engine.opset begins here
_FOLDER = "CUDA_KERNELS_FOLDER"
_EXECUTOR = "CUDA_KERNELS_EXECUTOR"
_WHOLE = "int %s(void **p, size_t n) { *p = aligned_alloc(256, (n / 256 + 1) * 256); return 0; }"
_COPY = "int %s(void *to, void *from, size_t n) { memmove(to, from, n); return 0; }"
_SET = "int %s(void *to, int value, size_t n) { memset(to, value, n); return 0; }"
_HANDLE = "int %s(void **p) { *p = (void *)1; return 0; }"
_FREE = "int %s(void *p) { free(p); return 0; }"
_NAME = 'char *%s() { return "no error"; }'
# Offsets in CUDA 11.8's cudaDeviceProp: totalGlobalMem, warpSize, maxThreadsPerBlock, major,
# multiProcessorCount.
_PROPERTIES = """int %s(char *p) { memset(p, 0, 640); *(long *)(p + 288) = 80L << 30; *(int *)(p + 308) = 32;
*(int *)(p + 320) = 1024; *(int *)(p + 360) = 8; *(int *)(p + 388) = 108; return 0; }"""
_FUNCTIONS = {
    "cudaGetDeviceCount": "int %s(int *n) { *n = 1; return 0; }",
    "cudaGetDevice": "int %s(int *n) { *n = 0; return 0; }",
    "cudaDeviceGetAttribute": "int %s(int *n) { *n = 1024; return 0; }",
    "cudaRuntimeGetVersion": "int %s(int *n) { *n = 11080; return 0; }",
    "cudaMemGetInfo": "int %s(size_t *a, size_t *b) { *a = *b = 80UL << 30; return 0; }",
    "cudaGetDeviceProperties": _PROPERTIES,
    **dict.fromkeys(("cudaMalloc", "cudaMallocHost", "cudaHostAlloc"), _WHOLE),
    **dict.fromkeys(("cudaFree", "cudaFreeHost"), _FREE),
    **dict.fromkeys(("cudaMemcpy", "cudaMemcpyAsync"), _COPY),
    **dict.fromkeys(("cudaMemset", "cudaMemsetAsync"), _SET),
    **dict.fromkeys(("cudaGetErrorName", "cudaGetErrorString"), _NAME),
    **dict.fromkeys(
        ("cudaEventCreate", "cudaEventCreateWithFlags", "cudaStreamCreateWithFlags"), _HANDLE
    ),
}
# Functions that the provider looks up in the driver by name.
_DRIVER = (
    "cuDeviceGetAttribute", "cuFuncSetAttribute", "cuFuncSetCacheConfig", "cuGetErrorName",
    "cuLaunchCooperativeKernel", "cuLaunchKernel", "cuLinkAddData_v2", "cuLinkAddFile_v2", "cuLinkComplete",
    "cuLinkCreate_v2", "cuLinkDestroy", "cuModuleGetFunction", "cuModuleGetGlobal_v2", "cuModuleLoadData",
    "cuModuleUnload",
)  # fmt: skip
_TYPES = {
    "f": "float", "d": "double", "NS_9MLFloat16E": "float16", "NS_8BFloat16E": "bfloat16", "b": "bool",
    "a": "int8", "h": "uint8", "s": "int16", "t": "uint16", "i": "int32", "j": "uint32", "l": "int64", "m": "uint64",
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument(
        "--place", type=Path, nargs="+", default=[], help="graphs of which to print the placement"
    )
    options = parser.parse_args()
    # The second call: this process has been started with the stubs on its library path.
    if _FOLDER in os.environ:
        sys.path.insert(0, os.environ[_FOLDER])
        return _place(options.place) if options.place else _write_table(options.wheel)
    with tempfile.TemporaryDirectory() as name:
        zipfile.ZipFile(options.wheel).extractall(name)
        provider = Path(name, "onnxruntime/capi/libonnxruntime_providers_cuda.so")
        _build_libraries(provider, Path(name))
        # The loader reads LD_LIBRARY_PATH only at the start of a process, hence a second one.
        environment = {**os.environ, _FOLDER: name, "LD_LIBRARY_PATH": name}
        if options.place:
            environment[_EXECUTOR] = str(
                extensions.extension_cache_folder() / "aten_op_executor.so"
            )
        return subprocess.run([sys.executable, *sys.argv], env=environment, check=False).returncode


def _build_libraries(provider: Path, folder: Path) -> None:
    """Compile a stub of each CUDA library of the provider, with the versions of its symbols."""
    listed = subprocess.run(
        ["readelf", "--dyn-syms", "-W", str(provider)], capture_output=True, text=True, check=True
    )
    # These two have no versioned symbols in the list: curand is only linked to, and functions of
    # the
    # driver are looked up by name.
    libraries = collections.defaultdict(
        set, {"libcurand.so.10": set(), "libcuda.so.1": set(_DRIVER)}
    )
    for symbol, library in re.findall(r" UND (\w+)@(libcu[\w.]+)", listed.stdout):
        libraries[library].add(symbol)
    for library, symbols in libraries.items():
        source = folder / "stub.c"
        versions = folder / "stub.map"
        lines = [
            _FUNCTIONS.get(symbol, "int %s() { return 0; }") % symbol for symbol in sorted(symbols)
        ]
        source.write_text("\n".join(["#include <stdlib.h>", "#include <string.h>", *lines, ""]))
        versions.write_text(
            f"{library} {{ global: *; }};\n" if library != "libcuda.so.1" else "{ global: *; };\n"
        )
        command = [
            "cc",
            "-w",
            "-shared",
            "-fPIC",
            "-fno-builtin",
            str(source),
            "-o",
            str(folder / library),
        ]
        subprocess.run(
            [*command, f"-Wl,-soname,{library}", f"-Wl,--version-script={versions}"], check=True
        )


# ------------------------------------------------------------ the table


def _write_table(wheel: Path) -> int:
    from ortmodule._internal.native.cuda_libraries import _serialized_relu_model

    session = _session(_serialized_relu_model())  # registers the kernels
    assert session.get_providers()[0] == PROVIDER, session.get_providers()
    operators: dict[tuple[str, ...], set[str]] = {}
    for domain, name, first, stated, types in _kernels(_Memory()):
        last = _last(domain, name, first) if stated == _LAST else stated
        # Kernels of older operator versions are never used.
        if last >= _OLDEST:
            versions = f"{first}{'+' if last == _LAST else f'-{last}'}"
            operators.setdefault((domain or "-", name, versions), set()).add(types)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    lines = [
        f"# Kernels of the CUDA provider of {wheel.name},",
        f"# sha256 {digest}, read by tools/cuda_kernels.py from the registry of the",
        (
            "# running provider. Domain (- is ONNX's), operator, versions; types of each kernel "
            "by constraint or argument."
        ),
        *sorted(" ".join((*operator, _in_one(kernels))) for operator, kernels in operators.items()),
    ]
    print(len(lines) - 3, "operators")
    return not _TABLE.write_text("\n".join((*lines, "")))


def _last(domain: str, name: str, first: int) -> int:
    """Return the last version of a kernel that has none: ORT uses it only for its first version."""
    from onnx import defs

    later = [
        schema.since_version
        for schema in defs.get_all_schemas_with_history()
        if schema.name == name
    ]
    # The next version of the operator ends the range; only ONNX's own domain has versions.
    newer = [version for version in later if not domain and version > first]
    return min(newer) - 1 if newer else _LAST


def _in_one(kernels: set[str]) -> str:
    """Return kernels as text; those that differ in one constraint are one with several types."""
    kept = [
        dict(words.split("=") for words in one.split())
        for one in sorted(kernels)
        if "Float8" not in one  # no training graph has it
    ]
    for name in sorted({name for one in kept for name in one}):
        groups: dict[str, dict[str, str]] = {}
        for one in kept:
            rest = str({key: value for key, value in one.items() if key != name})
            types = {
                *groups.setdefault(rest, {**one, name: ""}).get(name, "").split(","),
                *one.get(name, "").split(","),
            }
            groups[rest][name] = ",".join(sorted(types - {""}))
        kept = list(groups.values())
    return " | ".join(
        " ".join(f"{name}={types}" for name, types in one.items() if types) for one in kept
    )


class _Memory:
    """The memory of this process, read by address."""

    def __init__(self) -> None:
        self._file = open("/proc/self/mem", "rb", 0)  # noqa: SIM115  (as long as the process)
        lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
        self.parts = []
        for words in lines:
            # The heap and anonymous mappings, where the registry's objects are; mappings of more
            # than 1 GiB cannot hold it and would take long to search.
            low, high = (int(number, 16) for number in words[0].split("-"))
            if (
                words[1].startswith("rw")
                and (len(words) == 5 or words[5] == "[heap]")
                and high - low < 1 << 30
            ):
                self.parts.append((low, self.read(low, high - low)))

    def read(self, address: int, size: int) -> bytes:
        self._file.seek(address)
        return self._file.read(size)

    def words(self, address: int, count: int = 1) -> tuple[int, ...]:
        return struct.unpack(f"<{count}Q", self.read(address, 8 * count))

    def string(self, address: int) -> str:
        """Return the std::string at an address."""
        # libstdc++: pointer to the characters, then their number.
        begin, size = self.words(address, 2)
        return self.read(begin, size).decode()


def _kernels(memory: _Memory) -> Iterator[tuple[str, str, int, int, str]]:
    import numpy

    keys = {
        low + found.start(): len(found[0]) - 1
        for low, held in memory.parts
        for found in re.finditer(rb"\w+ [\w.]* CUDAExecutionProvider\0", held)
    }
    # First the texts of all keys, then the places in memory that point to one of them.
    addresses = numpy.array(sorted(keys), numpy.uint64)
    for low, held in memory.parts:
        words = numpy.frombuffer(held[: len(held) // 8 * 8], numpy.uint64)
        for place in numpy.nonzero(numpy.isin(words, addresses))[0]:
            # A std::string has the address and then the size; after its 32 bytes follows the value
            # of the map's node, a KernelDef*.
            if words[place + 1] == keys[int(words[place])]:
                yield _kernel(memory, memory.words(low + int(place) * 8 + 32)[0])


def _kernel(memory: _Memory, at: int) -> tuple[str, str, int, int, str]:
    """Return domain, name, first and last version, and constraints of a CUDA KernelDef."""
    # Offsets of the fields of KernelDef in onnxruntime 1.19.2.
    assert memory.string(at + 72) == PROVIDER
    first, last = struct.unpack("<ii", memory.read(at + 32, 8))
    types = {}
    node = memory.words(at + 120)[0]
    # The type constraints: a std::unordered_map from name to a std::vector of types.
    while node:
        begin, end = memory.words(node + 40, 2)
        names = [_type(memory, kind) for kind in memory.words(begin, (end - begin) // 8)]
        types[memory.string(node + 8)] = "any" if len(names) > 12 else ",".join(sorted(names))
        node = memory.words(node)[0]
    described = " ".join(f"{name}={types[name]}" for name in sorted(types)) or "*=any"
    return memory.string(at + 40), memory.string(at), first, last, described


def _type(memory: _Memory, at: int) -> str:
    """Return the type of an onnxruntime::DataTypeImpl, by the name in its RTTI."""
    name = (
        memory.read(memory.words(memory.words(memory.words(at)[0] - 8)[0] + 8)[0], 200)
        .partition(b"\0")[0]
        .decode()
    )
    found = re.fullmatch(r"N11onnxruntime10TensorTypeI(.+)EE", name)
    return _TYPES.get(found[1], found[1]) if found else name


# ------------------------------------------------------------ the placement


def _session(model: Any, executed: str = "", severity: int = 3) -> Any:
    import onnxruntime
    import onnxruntime.capi._pybind_state as state

    # With it ORT determines which arguments of ATen nodes are tensors.
    if _EXECUTOR in os.environ:
        import torch  # noqa: F401  (its libraries)

        spec: Any = importlib.util.spec_from_file_location(
            "aten_op_executor", os.environ[_EXECUTOR]
        )
        executor = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(executor)
        addresses = executor.is_tensor_argument_address(), executor.execute_aten_operator_address()
        state.register_aten_op_executor(*map(str, addresses))
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = executed
    options.log_severity_level = severity
    return onnxruntime.InferenceSession(model, options, providers=[PROVIDER])


def _place(graphs: list[Path]) -> int:
    """Print, for each graph, the nodes that ORT assigns to the CPU and the copies it inserts."""
    import onnx

    for path in graphs:
        with tempfile.TemporaryDirectory() as folder, (Path(folder) / "log").open("w+") as log:
            executed = str(Path(folder, "executed.onnx"))
            # ORT logs the placement from C++ to the process's standard error.
            kept = os.dup(2)
            os.dup2(log.fileno(), 2)
            try:
                why = _try_session(str(path), executed)
            finally:
                os.dup2(kept, 2)
            log.seek(0)
            text = log.read()
            if why:
                print(f"{path}: {why}")
                continue
            graph = onnx.load(executed, load_external_data=False).graph
        types = {
            value.name: value.type.tensor_type
            for value in (*graph.value_info, *graph.input, *graph.output)
        }
        of_cpu = re.search(
            r"placed on \[CPUExecutionProvider\]. Number of nodes: \d+(.*?)(?:placed on|$)",
            text,
            re.S,
        )
        nodes = re.findall(r"\] {2,}(\w+) \(", of_cpu[1]) if of_cpu else []
        copies = collections.Counter(
            f"{node.op_type} {_described(types.get(node.input[0]))}"
            for node in graph.node
            if "Memcpy" in node.op_type
        )
        print(
            f"{path}: {len(graph.node)} nodes; on the CPU "
            f"{dict(collections.Counter(nodes))}; copies {dict(copies)}"
        )
    return 0


def _try_session(model: str, executed: str) -> str:
    try:
        _session(model, executed, 0)
    except Exception as error:  # ORT's message is the result for this graph
        return str(error)
    return ""


def _described(kind: Any) -> str:
    if kind is None:
        return "unknown"
    dims = [dim.dim_param or str(dim.dim_value) for dim in kind.shape.dim]
    return f"type {kind.elem_type} [{', '.join(dims)}]"


if __name__ == "__main__":
    sys.exit(main())
