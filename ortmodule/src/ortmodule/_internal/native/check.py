"""Check that this machine has all that ORTModule needs. Imports no torch."""

from __future__ import annotations

from ortmodule._internal.errors import MissingDependency
from ortmodule._internal.native import cuda_libraries, extensions


def check(on_gpu: bool = False, computes: bool = False) -> list[MissingDependency]:
    """Return what is missing for ORTModule; empty if nothing is.

    Args:
        on_gpu: check for training on CUDA.
        computes: on a GPU, also let ONNX Runtime compute one node, in a process of its own, because it
            may abort its process where a library or the driver is missing. It takes seconds.
    """
    try:
        package_name = extensions.installed_ort_package_name_or_refuse()
        missing_extensions = extensions.missing_or_damaged_buildable_extension_names()
    except MissingDependency as error:
        return [error]
    missing = []
    if on_gpu and package_name == "onnxruntime-training-cpu":
        missing.append(
            MissingDependency(
                "onnxruntime-training-cpu has no CUDA",
                'pip install "ortmodule[cuda]", in an environment without it',
            )
        )
    elif on_gpu and (libraries := cuda_libraries.missing_cuda_libraries()):
        library_names = ", ".join(library.name for library in libraries)
        missing.append(
            MissingDependency(
                f"CUDA libraries of onnxruntime-training are not installed ({library_names})",
                cuda_libraries.cuda_install_command_text(libraries),
            )
        )
    elif on_gpu and computes and (reason := cuda_libraries.gpu_failure_reason_or_empty()):
        missing.append(MissingDependency(reason))
    if missing_extensions:
        reason = "; ".join(
            [
                f"{', '.join(missing_extensions)} not in {extensions.extension_cache_folder()}",
                *extensions.descriptions_of_extensions_changed_since_build(),
            ]
        )
        missing.append(
            MissingDependency(
                f"ORT's torch extensions are not built for this torch ({reason})",
                extensions.SETUP_COMMAND,
            )
        )
    return missing
