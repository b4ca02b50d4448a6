"""How libraries and kernels say what went wrong. Imports nothing of ortlaunch."""

from __future__ import annotations

import re

OUT_OF_MEMORY = re.compile(
    r"allocate memory|unable to allocate|failed to allocate|out of memory|OutOfMemory|bad_alloc|MemoryError|Errno 12\b"
)
KERNEL_KILL = re.compile(r"out-of-memory killer ended \w+")
NO_SPACE = re.compile(r"[Nn]o space left on device|Errno 28\b|Errno 122\b|[Dd]isk quota exceeded")
NO_LOCKS = re.compile(r"No locks available|Errno 37\b")
PORT_TAKEN = re.compile(r"[Aa]ddress already in use|EADDRINUSE|Errno 98\b")
NO_GPU = re.compile(r"sees no GPU|no NVIDIA driver|not compiled with CUDA|is planned on GPU|no CUDA-capable device")
OTHER_WORLD = re.compile(r"the plan has \d+ ranks, the launcher started|the launcher made it|mpi4py's MPI says")
OUT_OF_RANGE = re.compile(
    r"index out of range in self|Target \d+ is out of bounds|device-side assert|out of bounds for"
)
NATIVE = re.compile(r"terminate called|what\(\):|Assertion|assert|CHECK failed|Fatal Python error|Check failed")
