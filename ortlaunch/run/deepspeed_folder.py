"""`--resume deepspeed:PATH`: the folder of one save of DeepSpeed's, and what its names alone say cannot be taken in.

The control side: it opens no file but `latest`. What is in the others, rank 0 finds out (worker/deepspeed/take_in.py).
"""

from __future__ import annotations

import os
from pathlib import Path

from ortlaunch.errors import InputError

PREFIX = "deepspeed:"
MODEL_FILE = "mp_rank_00_model_states.pt"
_WEIGHTS = "its weights alone can be had by the zero_to_fp32.py beside it, and given as model.pretrained"
_REFUSED = {
    "zero_pp_rank_*_model_states.pt": f"ZeRO 3, whose pieces are not read here; {_WEIGHTS}",
    "mp_rank_0[1-9]_model_states.pt": "tensor or pipeline parallel; here every rank has the whole model",
    "layer_*_model_states.pt": "a pipeline, or a mixture of experts; here every rank has the whole model",
    "expp_rank_*_optim_states.pt": "a mixture of experts; here every rank has the whole model",
}


def folder_of(choice: str) -> Path:
    """The folder of one tag, from `deepspeed:PATH`, where PATH is it, or has `latest`.

    Raises:
        InputError: there is none, or it cannot be taken in.
    """
    given = Path(os.path.abspath(choice[len(PREFIX) :] or "."))
    if not choice[len(PREFIX) :] or not given.is_dir():
        raise InputError(f"--resume {choice}: no such folder; give the one that engine.save_checkpoint wrote into")
    folder = given if _of_a_tag(given) else _latest(choice, given)
    for pattern, why in _REFUSED.items():
        if any(folder.glob(pattern)):
            raise InputError(f"--resume {choice}: {folder} is of {why}")
    if not (folder / MODEL_FILE).exists():
        raise InputError(f"--resume {choice}: {folder} has no {MODEL_FILE}; copy all that save_checkpoint wrote")
    return folder


def _of_a_tag(folder: Path) -> bool:
    return any(folder.glob("*_states.pt"))


def _latest(choice: str, given: Path) -> Path:
    """The tag that DeepSpeed's `latest` names."""
    if not (given / "latest").exists():
        raise InputError(f"--resume {choice}: is no folder of DeepSpeed's: it has neither `latest` nor {MODEL_FILE}")
    return given / (given / "latest").read_text(encoding="utf-8", errors="replace").strip()


def require_adam(choice: str, optimizer: str) -> None:
    """The recipe's optimizer is of the kind whose moments are taken in.

    Raises:
        InputError: it is not.
    """
    if optimizer not in ("adamw", "fused_adam"):
        raise InputError(
            f"--resume {choice}: what is taken in are moments of Adam, and optimizer.name is {optimizer}; "
            "give adamw or fused_adam"
        )
