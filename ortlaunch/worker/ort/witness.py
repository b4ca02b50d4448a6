"""Counts what ONNX Runtime really ran, so that a run can say so instead of believing its settings.

Owns the counters and the wrappers that feed them. Must not decide anything: the engine reads and judges.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

from ortlaunch.worker.ort.compat import import_ortmodule, wrap_method


class Witness:
    """Counts ORT's completed graph runs, and the times a batch was handed to plain PyTorch, in this process."""

    def __init__(self) -> None:
        self._installed = False
        self.reset()

    def reset(self) -> None:
        """Set every counter to zero and forget the reasons."""
        self.forward_passes = 0
        self.backward_passes = 0
        self.inference_passes = 0
        self.fallbacks = 0
        self.fallback_reasons: list[str] = []

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """While open, passes are not of the run: afterwards the counters are what they were."""
        before = {name: copy.copy(value) for name, value in vars(self).items()}
        try:
            yield
        finally:
            vars(self).update(before)

    def install(self) -> None:
        """Start to count; every ORTModule of this process is counted, whenever it was made. Once is enough."""
        if self._installed:
            return
        self._installed = True
        import_ortmodule()
        from onnxruntime.training.ortmodule import _execution_agent, _fallback

        self._count(_execution_agent.TrainingAgent, "run_forward", "forward_passes")
        self._count(_execution_agent.TrainingAgent, "run_backward", "backward_passes")
        self._count(_execution_agent.InferenceAgent, "run_forward", "inference_passes")
        wrap_method(_fallback._FallbackManager, "fallback", self._record_fallback)

    def _count(self, owner: Any, method: str, counter: str) -> None:
        def counted(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            setattr(self, counter, getattr(self, counter) + 1)
            return result

        wrap_method(owner, method, counted)

    def _record_fallback(self, original: Callable[..., Any], manager: Any, *args: Any, **kwargs: Any) -> Any:
        # With retry on, ORT forgets the exception inside the call: read it first.
        reason = f"{type(manager._exception).__name__}: {manager._exception}"
        self.fallbacks += 1
        if reason not in self.fallback_reasons:
            self.fallback_reasons.append(reason)
        return original(manager, *args, **kwargs)
