"""Files behind a URL (http, s3, hf and the other protocols of fsspec), read in blocks.

A lost connection is tried again with growing pauses, and a line for each. fsspec and its backends
are the extra `stream`; they are imported here alone.
"""

from __future__ import annotations

import functools
import io
import time
from collections.abc import Callable
from typing import Any, BinaryIO, TypeVar

from ortlaunch.errors import MissingDependency, first_message_line
from ortlaunch.units import clock_duration
from ortlaunch.worker.data.reading import DataError, RemoteFile
from ortlaunch.worker.data.streams.hub import hub_reason, hub_status

_Value = TypeVar("_Value")
# Bytes of a request.
_BLOCK_BYTES = 1 << 22
# Pauses before another attempt, in seconds: a quarter of an hour in all.
_PAUSES = (1, 2, 4, 8, 15, 30, *(60,) * 14)
# HTTP statuses of a request that may succeed later, although it is the client's error.
_RETRY_STATUSES = (408, 425, 429)


def remote_files(pattern: str) -> list[RemoteFile]:
    """Return the files that a URL, or a URL with `*`, matches, sorted.

    Raises:
        DataError: the protocol is unknown, or a file has no size.
        MissingDependency: the protocol's package is not installed.
    """
    try:
        import fsspec

        system, path = fsspec.url_to_fs(pattern)
    except ImportError as error:
        raise MissingDependency(
            f'{pattern}: {first_message_line(error)}; type: pip install "ortlaunch[stream]"'
        ) from None
    except ValueError as error:
        raise DataError(
            f"{pattern}: {first_message_line(error)}; http, https, s3 and hf are usual"
        ) from None

    def list_files() -> list[tuple[str, int | None]]:
        paths = sorted(system.glob(path)) if "*" in pattern else [path]
        return [*zip(paths, system.sizes(paths))]

    return [
        _create_remote_file(system, *path_and_size)
        for path_and_size in _retry_request(pattern, list_files)
    ]


def _create_remote_file(system: Any, path: str, size: int | None) -> RemoteFile:
    remote_file = RemoteFile(system.unstrip_protocol(path))
    if size is None:
        raise DataError(f"{remote_file}: the server reports no size; it must send Content-Length")
    remote_file.size = size
    remote_file.open = functools.partial(_open_remote_file, system, path, remote_file)
    return remote_file


def _open_remote_file(system: Any, path: str, file: RemoteFile) -> BinaryIO:
    """Open a remote file, which is read by requests for ranges of bytes."""
    from fsspec.spec import AbstractBufferedFile

    # fsspec's own files of http and s3 do not try again after all of the pauses.
    class Ranges(AbstractBufferedFile):
        def _fetch_range(self, start: int, end: int) -> bytes:
            return _retry_request(
                file, functools.partial(_read_range, system, path, file, start, end)
            )

    return io.BufferedReader(Ranges(system, path, block_size=_BLOCK_BYTES, size=file.size))


def _read_range(system: Any, path: str, file: RemoteFile, start: int, end: int) -> bytes:
    data: bytes = system.cat_file(path, start=start, end=end)
    if len(data) > end - start:
        raise DataError(
            f"{file}: the server ignores requests for a range of bytes; use a server with "
            "ranges (nginx, Apache, an object store), or copy the files to a disk"
        )
    if len(data) < end - start:
        raise OSError(f"got {len(data):,} of {end - start:,} bytes")
    return data


def _retry_request(url: str, request: Callable[[], _Value]) -> _Value:
    """Return the result of a request, which is repeated while the connection fails.

    Raises:
        DataError: there is no such file, no permission, or no connection after all pauses.
    """
    for pause in (*_PAUSES, None):
        try:
            return request()
        except DataError:
            raise
        # Each protocol has error classes of its own.
        except Exception as error:
            # fsspec reports a lost connection as a missing file, with the real error as its cause.
            real_error = (isinstance(error, FileNotFoundError) and error.__cause__) or error
            reason = _failure_reason(url, real_error)
            if pause is None or _is_final_error(real_error):
                raise DataError(f"{url}: cannot be read: {reason}") from error
        print(f"{url}: {reason:.200}; the next attempt is in {clock_duration(pause)}", flush=True)
        time.sleep(pause)
    raise AssertionError("the last attempt returns or raises")


def _failure_reason(url: str, error: BaseException) -> str:
    protocol, _, path = url.partition("://")
    if protocol != "hf":
        return f"{type(error).__name__}: {first_message_line(error)}"
    repository_prefix = "datasets/" if path.startswith("datasets/") else ""
    return hub_reason(
        error, "/".join(path.removeprefix(repository_prefix).split("/")[:2]), repository_prefix
    )


def _is_final_error(error: BaseException) -> bool:
    status = getattr(error, "status", 0) or hub_status(error)
    refused = 400 <= status < 500 and status not in _RETRY_STATUSES
    return refused or isinstance(error, (FileNotFoundError, PermissionError))
