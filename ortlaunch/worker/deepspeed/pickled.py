"""DeepSpeed's checkpoint files are pickles: read for plain values and tensors alone, and nothing in them is run.

torch's restricted unpickler calls what is listed and refuses all else. The few classes of DeepSpeed's that its files
name become empty ones of the same name, so that not even its code runs.
"""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import torch

from ortlaunch.errors import InputError

# What each becomes.
HARMLESS: dict[str, type] = {
    "deepspeed.utils.tensor_fragment.fragment_address": object,  # numel and start of a parameter's piece
    "deepspeed.runtime.zero.config.ZeroStageEnum": int,
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": object,
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": object,
}


def _stand_in(path: str, base: type) -> type:
    module, _, name = path.rpartition(".")
    return type(name, (base,), {"__module__": module})


_STAND_INS = [_stand_in(path, base) for path, base in HARMLESS.items()]


def read_pickled(path: Path) -> dict[str, Any]:
    """The dictionary in a file of torch.save's; its tensors are read from the disk when they are used.

    Raises:
        InputError: it names something that is not listed, or is no such file.
    """
    try:
        with torch.serialization.safe_globals(_STAND_INS):
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise InputError(_refused(path, str(error))) from None
    except Exception as error:  # a broken pickle raises whatever it likes
        line = next(iter(str(error).splitlines()), "")
        raise InputError(f"{path} cannot be read as torch.save writes it: {type(error).__name__}: {line}") from None
    if not isinstance(found, dict):
        raise InputError(f"{path} holds {type(found).__name__}, not the dictionary that DeepSpeed saves")
    return found


def _refused(path: Path, said: str) -> str:
    named = re.search(r"GLOBAL (\S+)", said)
    if named is None:
        return f"{path} is no pickle that is read here, and nothing in it was run: {said.splitlines()[0]}"
    return (
        f"{path} holds {named[1]}, which is neither a tensor nor one of DeepSpeed's harmless classes: refused, and "
        "nothing in it was run. If it is of client_state, save once more without it"
    )
