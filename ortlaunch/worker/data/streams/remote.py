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

from ortlaunch.base.errors import MissingDependency, first_message_line
from ortlaunch.base.units import clock_duration
from ortlaunch.worker.data.file_rows import DataError, RemoteFile
from ortlaunch.worker.data.streams.hub import hub_error_reason_and_remedy, hub_http_status_or_0

_Value = TypeVar("_Value")
# Bytes of a request.
_BLOCK_BYTES = 1 << 22
# Pauses before another attempt, in seconds: a quarter of an hour in all.
_PAUSES = (1, 2, 4, 8, 15, 30, *(60,) * 14)
# HTTP statuses of a request that may succeed later, although it is the client's error.
_RETRY_STATUSES = (408, 425, 429)


def remote_files_of_url(url_pattern: str) -> list[RemoteFile]:
    """Return the files that a URL, or a URL with `*`, matches, sorted.

    Raises:
        DataError: the protocol is unknown, or a file has no size.
        MissingDependency: the protocol's package is not installed.
    """
    try:
        import fsspec

        system, path = fsspec.url_to_fs(url_pattern)
    except ImportError as error:
        raise MissingDependency(
            f'{url_pattern}: {first_message_line(error)}; type: pip install "ortlaunch[stream]"'
        ) from None
    except ValueError as error:
        raise DataError(
            f"{url_pattern}: {first_message_line(error)}; http, https, s3 and hf are usual"
        ) from None

    def list_files() -> list[tuple[str, int | None]]:
        paths = sorted(system.glob(path)) if "*" in url_pattern else [path]
        return [*zip(paths, system.sizes(paths))]

    return [
        _create_remote_file_or_refuse_unknown_size(system, *path_and_size)
        for path_and_size in _retry_request_with_pauses(url_pattern, list_files)
    ]


def _create_remote_file_or_refuse_unknown_size(
    system: Any, remote_path: str, reported_byte_count: int | None
) -> RemoteFile:
    remote_file = RemoteFile(system.unstrip_protocol(remote_path))
    if reported_byte_count is None:
        raise DataError(f"{remote_file}: the server reports no size; it must send Content-Length")
    remote_file.size = reported_byte_count
    remote_file.open = functools.partial(_open_remote_file, system, remote_path, remote_file)
    return remote_file


def _open_remote_file(system: Any, remote_path: str, remote_file: RemoteFile) -> BinaryIO:
    """Open a remote file, which is read by requests for ranges of bytes."""
    from fsspec.spec import AbstractBufferedFile

    # fsspec's own files of http and s3 do not try again after all of the pauses.
    class Ranges(AbstractBufferedFile):
        def _fetch_range(self, start: int, end: int) -> bytes:
            return _retry_request_with_pauses(
                remote_file,
                functools.partial(
                    _read_exact_remote_range, system, remote_path, remote_file, start, end
                ),
            )

    return io.BufferedReader(
        Ranges(system, remote_path, block_size=_BLOCK_BYTES, size=remote_file.size)
    )


def _read_exact_remote_range(
    system: Any, remote_path: str, remote_file: RemoteFile, start_byte: int, end_byte: int
) -> bytes:
    data: bytes = system.cat_file(remote_path, start=start_byte, end=end_byte)
    if len(data) > end_byte - start_byte:
        raise DataError(
            f"{remote_file}: the server ignores requests for a range of bytes; use a server with "
            "ranges (nginx, Apache, an object store), or copy the files to a disk"
        )
    if len(data) < end_byte - start_byte:
        raise OSError(f"got {len(data):,} of {end_byte - start_byte:,} bytes")
    return data


def _retry_request_with_pauses(url: str, send_request: Callable[[], _Value]) -> _Value:
    """Return the result of a request, which is repeated while the connection fails.

    Raises:
        DataError: there is no such file, no permission, or no connection after all pauses.
    """
    for pause in (*_PAUSES, None):
        try:
            return send_request()
        except DataError:
            raise
        # Each protocol has error classes of its own.
        except Exception as error:
            # fsspec reports a lost connection as a missing file, with the real error as its cause.
            real_error = (isinstance(error, FileNotFoundError) and error.__cause__) or error
            reason = _request_failure_reason(url, real_error)
            if pause is None or _is_retry_useless(real_error):
                raise DataError(f"{url}: cannot be read: {reason}") from error
        print(f"{url}: {reason:.200}; the next attempt is in {clock_duration(pause)}", flush=True)
        time.sleep(pause)
    raise AssertionError("the last attempt returns or raises")


def _request_failure_reason(url: str, error: BaseException) -> str:
    protocol, _, path = url.partition("://")
    if protocol != "hf":
        return f"{type(error).__name__}: {first_message_line(error)}"
    repository_prefix = "datasets/" if path.startswith("datasets/") else ""
    return hub_error_reason_and_remedy(
        error, "/".join(path.removeprefix(repository_prefix).split("/")[:2]), repository_prefix
    )


def _is_retry_useless(error: BaseException) -> bool:
    status = getattr(error, "status", 0) or hub_http_status_or_0(error)
    refused = 400 <= status < 500 and status not in _RETRY_STATUSES
    return refused or isinstance(error, (FileNotFoundError, PermissionError))
