"""Names of the shell's variables that every rank gets. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from ortlaunch.base.errors import PlanError
from ortlaunch.recipe import Recipe

# Variables of the user's shell that every rank gets, by name; their values are never written or
# shown.
FORWARDED_VARIABLES = (
    "PATH",
    "PYTHONPATH",
    "LD_LIBRARY_PATH",
    "VIRTUAL_ENV",
    "XDG_CACHE_HOME",
    *(name for proxy in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
      for name in (proxy, proxy.lower())),
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
    "REQUESTS_CA_BUNDLE",
    "CURL_CA_BUNDLE",
)  # fmt: skip
FORWARDED_PREFIXES = (
    "NCCL_", "GLOO_", "UCX_", "FI_", "I_MPI_", "MPI4PY_", "OMP_", "MKL_", "KMP_", "HF_", "TRANSFORMERS_", "TOKENIZERS_",
    "ORTMODULE_", "ORTLAUNCH_", "TORCH_", "TORCHINDUCTOR_", "DS_", "PYTORCH_", "WANDB_", "MLFLOW_",
    "CUDA_CACHE_", "CUDA_LAUNCH_BLOCKING", "CUDA_MODULE_LOADING",
)  # fmt: skip


def forwarded_variable_names_or_refuse_unset(
    recipe: Recipe, environ: Mapping[str, str], may_come_from_secret: bool
) -> tuple[str, ...]:
    """Return the names of the variables of the user's environment that ranks get.

    Args:
        may_come_from_secret: a scheduler starts the ranks; a variable that is not set here may come from a
            secret.

    Raises:
        PlanError: a variable that the recipe names is not set.
    """
    present_names = {
        name
        for name in environ
        if name in FORWARDED_VARIABLES or name.startswith(FORWARDED_PREFIXES)
    }
    missing_names = [name for name in recipe.launch.forward if name not in environ]
    if missing_names and not (may_come_from_secret and recipe.submit.scheduler == "kubernetes"):
        raise PlanError(
            f"launch.forward: {', '.join(missing_names)} is not set in this shell; export it, or take it "
            "out"
        )
    # Variables with a value in the recipe need none from the shell.
    return tuple(sorted((present_names | set(recipe.launch.forward)) - set(recipe.launch.env)))
