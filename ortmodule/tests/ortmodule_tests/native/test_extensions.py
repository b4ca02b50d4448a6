"""ORT's torch extensions: one build for each set of versions, missing parts, and failed builds."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from ortmodule import MissingDependency
from ortmodule._internal.native import extension_cache, extensions
from ortmodule_tests.modules import python
from ortmodule_tests.ort import needs_ort


def installed(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    """Make exactly these packages appear installed."""
    found = {name.replace("_", "-"): version for name, version in versions.items()}
    monkeypatch.setattr(extensions, "installed_version_or_none", found.get)


@pytest.mark.parametrize(
    ("packages", "message"),
    [
        ({}, 'pip install "ortmodule\\[cpu\\]"'),
        ({"onnxruntime": "1.27.0"}, 'pip install "ortmodule\\[cpu\\]"'),
        ({"onnxruntime_training_cpu": "1.18.0"}, "1.18.0 is installed. Type: pip install"),
        (
            {"onnxruntime_training_cpu": "1.19.2", "onnxruntime": "1.20.1"},
            "pip uninstall -y onnxruntime-training-cpu onnxruntime && pip install .*cpu",
        ),
        (
            {"onnxruntime_training_cpu": "1.19.2", "onnxruntime_training": "1.19.2"},
            "onnxruntime-training-cpu 1.19.2 and onnxruntime-training 1.19.2 are installed together",
        ),
    ],
)
def test_wrong_packages_say_what_to_type(
    monkeypatch: pytest.MonkeyPatch, packages: dict[str, str], message: str
) -> None:
    """No wheel, a wrong version, or two wheels of one module: the error has the command to type."""
    # A Python for which wheels exist: otherwise its version would be the error.
    monkeypatch.setattr(sys, "version_info", (3, 11, 7, "final", 0))
    installed(monkeypatch, torch="2.13.0", **packages)
    with pytest.raises(MissingDependency, match=message):
        extensions.missing_or_damaged_buildable_extension_names()


def test_python_312_has_no_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Python 3.12 and later the error lists the Python versions that work."""
    monkeypatch.setattr(sys, "version_info", (3, 12, 1, "final", 0))
    installed(monkeypatch, torch="2.13.0")
    with pytest.raises(MissingDependency, match=r"this is Python 3\.12\. Use Python 3\.11"):
        extensions.missing_or_damaged_buildable_extension_names()


def test_a_changed_extension_is_not_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A truncated library counts as missing, and setup builds it again.

    To load it would end the process by SIGBUS.
    """
    monkeypatch.setenv("ORT_EXTENSIONS_DIR", str(tmp_path))
    installed(monkeypatch, torch="2.99.0", onnxruntime_training_cpu="1.19.2")
    monkeypatch.setattr(extensions, "_require_build_tools", lambda: None)
    monkeypatch.setattr(extensions, "_compile_extensions_or_write_interop_refusal", write_all)
    extensions.build_missing_extensions_under_lock_and_list_them()
    assert extensions.missing_or_damaged_buildable_extension_names() == []
    library = extensions.extension_cache_folder() / "aten_op_executor.so"
    # Truncated: its checksum is the old one.
    library.write_text("")
    assert extensions.missing_or_damaged_buildable_extension_names() == ["aten_op_executor"]
    assert extensions.descriptions_of_extensions_changed_since_build() == [
        f"{library}: differs from the recorded checksum"
    ]
    assert extensions.build_missing_extensions_under_lock_and_list_them() == ["aten_op_executor"]
    assert extensions.missing_or_damaged_buildable_extension_names() == []


def test_a_cache_of_others_is_told_before_setup(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A cache folder that others can write to is refused, also before anything is built in it."""
    monkeypatch.setenv("ORT_EXTENSIONS_DIR", str(tmp_path))
    installed(monkeypatch, torch="2.99.0", onnxruntime_training_cpu="1.19.2")
    # Writable by everybody.
    tmp_path.chmod(0o757)
    with pytest.raises(MissingDependency, match="is writable by others"):
        extensions.missing_or_damaged_buildable_extension_names()


def write_all(names: list[str], folder: Path) -> None:
    """Write files in place of a compiler's results."""
    for name in names:
        (folder / f"{name}.so").write_text(name)


@needs_ort
def test_an_extension_that_does_not_load_says_how_to_build_it_again(
    built: None, tmp_path: Path
) -> None:
    """A library that cannot be loaded is an error with the command to type, not ORT's traceback."""
    # Empty libraries with valid seals: the damage is detected only by the import.
    damage = (
        "from ortmodule._internal import import_ortmodule; from ortmodule._internal.native import extension_cache; "
        "from ortmodule._internal.native import extensions as e; "
        "folder = e.extension_cache_folder(); folder.mkdir(parents=True); "
        "[(folder / f'{n}.so').write_text('') for n in e.required_extension_names()]; "
        "[extension_cache.write_checksum_and_protect_library(folder / f'{n}.so') "
        "for n in e.required_extension_names()]; "
        "import_ortmodule.import_ortmodule_with_repairs_and_export_steps()"
    )
    done = python(damage, timeout=60, ORT_EXTENSIONS_DIR=str(tmp_path))
    assert "MissingDependency: the built extension does not load" in done.stderr
    assert f"rm -r '{tmp_path}" in done.stderr


def test_torch_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing torch is an error of its own."""
    installed(monkeypatch, onnxruntime_training_cpu="1.19.2")
    with pytest.raises(MissingDependency, match="torch is not installed"):
        extensions.missing_or_damaged_buildable_extension_names()


def test_a_refused_extension_is_not_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without torch_interop_utils the rest works; the reason is recorded, and setup tries again."""
    monkeypatch.setenv("ORT_EXTENSIONS_DIR", str(tmp_path))
    installed(monkeypatch, torch="2.99.0", onnxruntime_training_cpu="1.19.2")
    assert extensions.missing_or_damaged_buildable_extension_names() == [
        "aten_op_executor",
        extensions.INTEROP,
    ]
    folder = extensions.extension_cache_folder()
    folder.mkdir(parents=True)
    write_all(["aten_op_executor"], folder)
    extension_cache.write_checksum_and_protect_library(folder / "aten_op_executor.so")
    # As a failed build leaves it.
    (folder / f"{extensions.INTEROP}.refused").write_text("no such symbol")
    assert not extensions.missing_or_damaged_buildable_extension_names()
    assert extensions.reason_interop_is_unbuildable_or_empty() == "no such symbol"
    monkeypatch.setattr(extensions, "_require_build_tools", lambda: None)
    monkeypatch.setattr(
        extensions,
        "_compile_extensions_or_write_interop_refusal",
        lambda names, folder: (folder / f"{names[0]}.so").write_text(""),
    )
    assert extensions.build_missing_extensions_under_lock_and_list_them() == [extensions.INTEROP]
    assert not extensions.reason_interop_is_unbuildable_or_empty()


@needs_ort
def test_unknown_sources_are_not_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A source without a text to replace is refused with file and text; others are built."""
    package = tmp_path / "onnxruntime"
    source = next(
        extensions._installed_package_folder_or_refuse("onnxruntime").glob(
            f"training/ortmodule/*/cpu/{extensions.INTEROP}"
        )
    )
    copied = package / source.relative_to(
        extensions._installed_package_folder_or_refuse("onnxruntime")
    )
    shutil.copytree(source, copied)
    code = copied / "custom_function_fw.cc"
    # Remove one of the texts that the changes expect.
    code.write_text(code.read_text().replace("py_fn->cdata.lock()", "py_fn->cdata"))
    monkeypatch.setattr(extensions, "_installed_package_folder_or_refuse", lambda name: package)
    extensions._compile_extensions_or_write_interop_refusal([extensions.INTEROP], tmp_path)
    refusal = (tmp_path / f"{extensions.INTEROP}.refused").read_text()
    assert "custom_function_fw.cc has 0 times, instead of once: 'auto saved_for" in refusal
    assert list(tmp_path.glob("*.so")) == []


@needs_ort
@pytest.mark.slow
def test_unchanged_sources_do_not_build_on_newer_torch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without the changes torch_interop_utils cannot be built from torch 2.7 on."""
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 7):
        pytest.skip("torch 2.6 and older take it as it is")
    # No changes at all.
    monkeypatch.setitem(extensions.extension_sources._CHANGES, extensions.INTEROP, {})
    extensions._compile_extensions_or_write_interop_refusal([extensions.INTEROP], tmp_path)
    assert "error" in (tmp_path / f"{extensions.INTEROP}.refused").read_text().lower()


@needs_ort
def test_functions_print_nothing(tmp_path: Path) -> None:
    """The extension that runs functions in the graph writes nothing to the terminal."""
    source = next(
        extensions._installed_package_folder_or_refuse("onnxruntime").glob(
            f"training/ortmodule/*/cpu/{extensions.INTEROP}"
        )
    )
    shutil.copytree(source, tmp_path / "work")
    extensions.extension_sources.adapt_copied_sources_and_append_loading_code(
        extensions.INTEROP, tmp_path / "work"
    )
    for file in (tmp_path / "work").glob("custom_function_[fb]w.cc"):
        assert "std::cerr" not in file.read_text()


@needs_ort
def test_the_allocator_calls_empty_cache_as_torch_declares_it(tmp_path: Path) -> None:
    """A function without arguments wraps emptyCache, which has an argument in newer torch."""
    source = next(
        extensions._installed_package_folder_or_refuse("onnxruntime").glob(
            "training/ortmodule/*/cuda/torch_gpu_allocator"
        )
    )
    shutil.copytree(source, tmp_path / "work")
    extensions.extension_sources.adapt_copied_sources_and_append_loading_code(
        "torch_gpu_allocator", tmp_path / "work"
    )
    code = (tmp_path / "work" / "torch_gpu_allocator.cc").read_text()
    assert (
        "reinterpret_cast<size_t>(+[]() { c10::cuda::CUDACachingAllocator::emptyCache(); });"
        in code
    )


def test_a_cuda_build_wants_the_cuda_extensions(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With CUDA builds of both, ORT's allocator and FusedAdam's kernels are built too."""
    (tmp_path / "capi").mkdir()
    # The files of torch and ORT from which the CUDA versions are read.
    (tmp_path / "version.py").write_text(
        "debug = False\ncuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n"
    )
    (tmp_path / "capi" / "build_and_package_info.py").write_text(
        "package_name = 'x'\ncuda_version = '12.2'\n"
    )
    installed(monkeypatch, torch="2.10.0", onnxruntime_training="1.19.2")
    monkeypatch.setattr(extensions, "_installed_package_folder_or_refuse", lambda name: tmp_path)
    assert extensions.required_extension_names() == [
        "aten_op_executor",
        "torch_interop_utils",
        "torch_gpu_allocator",
        "fused_ops",
    ]
    monkeypatch.setattr(
        extensions.cuda_libraries,
        "installed_cuda_include_folders",
        lambda cuda: ["/wheels/include"],
    )
    monkeypatch.setenv("CPATH", "/own")
    environment = extensions._build_environment_variables()
    assert environment["ONNXRUNTIME_CUDA_VERSION"] == "12.2"
    assert environment["CPATH"] == "/own:/wheels/include"
    assert environment["TORCH_CUDA_ARCH_LIST"] == "7.0;7.5;8.0;8.6;9.0+PTX"
    # The architectures are part of the cache's key.
    assert extensions.extension_cache_folder().name.endswith("_7.0-7.5-8.0-8.6-9.0+PTX")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    assert extensions._build_environment_variables()["TORCH_CUDA_ARCH_LIST"] == "9.0"
    assert extensions.extension_cache_folder().name.endswith("_9.0")
    assert environment["ONNXRUNTIME_ROCM_VERSION"] == ""
    assert (
        environment["ONNXRUNTIME_CUDA_NVCC_EXTRA_ARGS"]
        == "-lineinfo,-O3,--use_fast_math,--threads,0"
    )


def test_each_stack_has_its_own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each torch, and each build of one version, has a folder of its own."""
    monkeypatch.setenv("ORT_EXTENSIONS_DIR", str(tmp_path))
    folders = set()
    # Two builds of one version, and another version.
    for version in ("2.13.0+cpu", "2.13.0", "2.6.0"):
        installed(monkeypatch, torch=version, onnxruntime_training_cpu="1.19.2")
        folders.add(extensions.extension_cache_folder())
    assert len(folders) == 3
    assert {folder.parent for folder in folders} == {tmp_path}


@needs_ort
def test_unbuilt_extensions_say_setup(tmp_path: Path) -> None:
    """With an empty cache the error has the command `python -m ortmodule setup`."""
    # In a process of its own: an earlier test may have applied the repairs in this one.
    ended = subprocess.run(
        [
            sys.executable,
            "-c",
            "from ortmodule._internal import import_ortmodule as r; r.import_ortmodule_with_repairs_and_export_steps()",
        ],
        check=False,
        env={**os.environ, "ORT_EXTENSIONS_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 1
    assert re.search(
        r"MissingDependency: .*aten_op_executor.* Type: python -m ortmodule setup", ended.stderr
    )


@needs_ort
def test_missing_tools_are_all_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A missing compiler and a missing ninja are named in one error."""
    monkeypatch.setenv("ORT_EXTENSIONS_DIR", str(tmp_path))
    # A search path without any tool.
    monkeypatch.setattr(extensions, "_executable_search_path", lambda: str(tmp_path))
    with pytest.raises(
        MissingDependency, match=r"a C\+\+ compiler .*ninja .* Then type: python -m ortmodule setup"
    ):
        extensions.build_missing_extensions_under_lock_and_list_them()


@needs_ort
def test_an_unwritable_cache_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An error about the cache names its folder."""
    # A regular file in place of the cache folder.
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ORT_EXTENSIONS_DIR", str(tmp_path / "file"))
    with pytest.raises(
        MissingDependency,
        match=r"cannot write the cache folder .*Set ORT_EXTENSIONS_DIR to a folder you can write",
    ):
        extensions.build_missing_extensions_under_lock_and_list_them()


@needs_ort
@pytest.mark.slow
@pytest.mark.ci
def test_a_failed_compilation_shows_its_end_and_leaves_nothing(tmp_path: Path) -> None:
    """A failed compilation prints its last lines and leaves no temporary folder or partial file."""
    compiler = tmp_path / "c++"
    # torch reads the compiler's version first, so only calls with -c fail.
    compiler.write_text(
        '#!/bin/sh\ncase "$*" in *" -c "*) echo the compiler says no; exit 1;; esac\nexec c++ "$@"\n'
    )
    compiler.chmod(0o755)
    temporary = tmp_path / "temporary"
    cache = tmp_path / "cache"
    # The compiler's temporary folder, which must be empty afterwards.
    temporary.mkdir()
    environment = {
        **os.environ,
        "CXX": str(compiler),
        "TMPDIR": str(temporary),
        "ORT_EXTENSIONS_DIR": str(cache),
    }
    done = subprocess.run(
        [sys.executable, "-m", "ortmodule", "setup"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert "building aten_op_executor for torch" in done.stderr
    assert "the compiler says no" in done.stderr
    assert list(temporary.iterdir()) == []
    assert list(cache.rglob("*.so")) == []


@needs_ort
def test_two_builders_take_turns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The second builder of a cache waits for the first, and has nothing left to build."""
    compiled: list[list[str]] = []
    entered = threading.Barrier(2)
    unlocked = extensions._require_build_tools

    def compile_slowly(names: list[str], folder: Path) -> None:
        compiled.append(names)
        for name in names:
            (folder / f"{name}.so").write_text("")

    # Both builders pass the check for tools before either one gets the lock.
    def meet() -> None:
        unlocked()
        entered.wait(10)

    monkeypatch.setenv("ORT_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(extensions, "_compile_extensions_or_write_interop_refusal", compile_slowly)
    monkeypatch.setattr(extensions, "_require_build_tools", meet)
    builders = [
        threading.Thread(target=extensions.build_missing_extensions_under_lock_and_list_them)
        for _ in range(2)
    ]
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join()
    # The second builder compiles nothing.
    assert [names for names in compiled if names] == [extensions.required_extension_names()]


@needs_ort
def test_asking_imports_nothing_heavy() -> None:
    """The control side can check for extensions without an import of torch."""
    code = (
        f"import sys, {extensions.__name__} as e; e.missing_or_damaged_buildable_extension_names(); "
        "print([m for m in ('torch', 'onnxruntime', 'transformers', 'deepspeed') if m in sys.modules])"
    )
    assert python(code, timeout=60).stdout.strip() == "[]"
