"""A streamed corpus: its order in any world and after any resume, its disk space and its errors."""

from __future__ import annotations

import json
import random
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from ortlaunch.launch_plan import BatchPlan
from ortlaunch.recipe.fields.data import Corpus, StreamSettings
from ortlaunch.worker.data import Batches, ChatSamples, Mixture, TokenWindows, UserSamples
from ortlaunch.worker.data.chats.rows import Chat
from ortlaunch.worker.data.chats.samples import ANSWER
from ortlaunch.worker.data.corpus import files_of_corpus_patterns
from ortlaunch.worker.data.file_rows import DataError, read_file_rows
from ortlaunch.worker.data.packed_samples import PackedSamples
from ortlaunch.worker.data.streams import remote
from ortlaunch.worker.data.streams.samples import StreamedSamples
from ortlaunch.worker.data.streams.writer import ChatCounts, StreamedCorpus
from ortlaunch.worker.data.token_cache import Documents

LENGTH = 8
SHUFFLE = 16
GLOBAL = 12
# Bytes of a window.
WINDOW = LENGTH * SHUFFLE * 4


def write_shards(folder: Path, count: int = 5, lines: int = 90) -> None:
    """Write files of lines whose words are numbers, none of them twice."""
    number = 0
    for shard in range(count):
        texts = []
        for line in range(lines + 7 * shard):
            words = range(number, number + 3 + line % 6)
            number = words.stop
            texts.append(" ".join(map(str, words)))
        (folder / f"part{shard}.txt").write_text("\n".join(texts) + "\n")


def encode(texts: list[str]) -> list[list[int]]:
    return [[int(word) for word in text.split()] for text in texts]


def stream(path: Path | str | list[str], folder: Path, buffer: int = 0) -> Any:
    paths = tuple(path) if isinstance(path, list) else (str(path),)
    corpus = Corpus(format="text", path=paths, document="line", stream=StreamSettings())
    streamed = StreamedCorpus(corpus, files_of_corpus_patterns(corpus), encode, LENGTH, SHUFFLE, 7)
    return StreamedSamples(
        streamed,
        lambda documents, seed: TokenWindows(documents.tokens, LENGTH, False),
        "",
        folder,
        buffer,
    )


def write_chat_shards(folder: Path, count: int = 5, rows: int = 60) -> None:
    """Write files of prompts and answers whose words are numbers, none of them twice."""
    number = 0
    for shard in range(count):
        texts = []
        for row in range(rows + 7 * shard):
            words = [*map(str, range(number, number + 3 + row % 4))]
            number += len(words)
            texts.append(json.dumps({"ask": " ".join(words[:2]), "say": " ".join(words[2:])}))
        (folder / f"part{shard}.jsonl").write_text("\n".join(texts) + "\n")


def encode_chats(chats: list[Chat]) -> list[list[int]]:
    return [
        [
            int(word) | (ANSWER * place)
            for place in (0, 1)
            for word in chat.messages[place]["content"].split()
        ]
        for chat in chats
    ]


def stream_of_chats(path: Path | str | list[str], folder: Path) -> Any:
    """Return the packed chats of a stream."""
    paths = tuple(path) if isinstance(path, list) else (str(path),)
    columns = {"prompt_column": "ask", "response_column": "say"}
    corpus = Corpus(format="jsonl", path=paths, stream=StreamSettings(), **columns)

    def packed(documents: Documents, seed: int = 0) -> Any:
        chats = ChatSamples(documents, LENGTH, 0, "")
        return PackedSamples(chats, LENGTH, "") if len(chats) else chats

    counts = ChatCounts(
        lambda documents: ChatSamples(documents, LENGTH, 0, "").kept.tolist(),
        lambda documents: len(packed(documents)),
    )
    files = files_of_corpus_patterns(corpus)
    streamed = StreamedCorpus(corpus, files, encode_chats, LENGTH, SHUFFLE, 7, counts)
    return StreamedSamples(streamed, packed, "", folder, 0)


STREAMS: dict[str, Callable[..., Any]] = {"text": stream, "chats": stream_of_chats}


def batches(samples: Any, world: int = 1) -> Batches:
    return Batches(samples, BatchPlan(GLOBAL, GLOBAL // world, 1, world, None), 7)


Taken = list[tuple[int, list[int]]]


def trained(of: Batches, steps: range) -> list[Taken]:
    """Return (sample, its tokens) of each step, over all ranks."""
    world = of.batch.data_parallel_ranks
    found = []
    for step in steps:
        taken = []
        for rank in range(world):
            ids = of.read_micro_batch_and_count_tokens(step, 0, rank)["input_ids"].tolist()
            taken += [*zip(of.sample_indices_of_micro_batch(step, 0, rank), ids)]
        of.release_streamed_samples_and_return_positions(of.positions_before_step(step + 1))
        found.append(taken)
    of.close_streams()
    return found


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    write_shards(folder)
    return folder


@pytest.fixture(scope="module")
def whole(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Taken]:
    """Return the steps of an uninterrupted training of two epochs and a half."""
    samples = stream(shards / "*.txt", tmp_path_factory.mktemp("whole"))
    return trained(batches(samples), range(70))


def test_an_epoch_has_each_sample_once(whole: list[Taken], shards: Path) -> None:
    """All windows of all files are read once an epoch, shuffled, and again in another order."""
    taken = [ids for step in whole for _, ids in step]
    per_epoch = sum(
        len([word for text in path.read_text().split("\n") for word in text.split()]) // LENGTH
        for path in shards.iterdir()
    )
    first, second = taken[:per_epoch], taken[per_epoch : 2 * per_epoch]
    assert len({*map(tuple, first)}) == per_epoch
    assert sorted(first) == sorted(second)
    assert first not in (sorted(first), second)
    indices = [index for step in whole for index, _ in step]
    assert sorted(indices[: 2 * per_epoch]) == list(range(2 * per_epoch))


@pytest.mark.parametrize("kept", [True, False])
def test_a_resume_in_another_world_takes_the_same_samples(
    whole: list[Taken], shards: Path, tmp_path: Path, kept: bool
) -> None:
    """Stopped after any step, with and without the windows on the disk, it goes on exactly."""
    positions: Any = []
    seen = 0
    for number, (world, begin, end) in enumerate(
        [(1, 0, 4), (2, 4, 23), (3, 23, 24), (2, 24, 51), (1, 51, 60)]
    ):
        samples = stream(shards / "*.txt", tmp_path / ("same" if kept else str(number)))
        of = batches(samples, world)
        of.begin_step_after_positions(begin, seen)
        of.seek_streams(positions)
        assert trained(of, range(begin, end)) == whole[begin:end]
        # As JSON, which a checkpoint is.
        positions = json.loads(
            json.dumps(
                of.release_streamed_samples_and_return_positions(of.positions_before_step(end))
            )
        )
        seen = of.positions_before_step(end)


DAMAGES: dict[str, Callable[[bytes], bytes | None]] = {
    "empty": lambda data: b"",
    "zero": lambda data: bytes(len(data)),
    "cut": lambda data: data[: len(data) // 2],
    "one bit": lambda data: bytes([data[0] ^ 1]) + data[1:],
    "gone": lambda data: None,
}


@pytest.mark.parametrize("ending", [".u32", ".ends", ".json"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_windows_after_a_power_failure(
    damage: str,
    ending: str,
    whole: list[Taken],
    shards: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Windows that are not what was written are written again, and the run says so."""
    of = batches(stream(shards / "*.txt", tmp_path))
    assert trained(of, range(3)) == whole[:3]
    positions = of.release_streamed_samples_and_return_positions(of.positions_before_step(3))
    # The window in use, and those that were written ahead.
    waiting = [path for path in tmp_path.rglob(f"*{ending}") if path.stem >= "000000002"]
    assert waiting
    for path in waiting:
        data = DAMAGES[damage](path.read_bytes())
        path.unlink()
        path.write_bytes(data) if data is not None else None
    of = batches(stream(shards / "*.txt", tmp_path))
    of.begin_step_after_positions(3, of.positions_before_step(3))
    of.seek_streams(positions)
    assert trained(of, range(3, 20)) == whole[3:20]
    said = "its tokens are not as they were written" in capfd.readouterr().out
    assert said or ending == ".json"


def test_a_resume_opens_one_file(
    shards: Path, tmp_path: Path, whole: list[Taken], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The position alone leads to the file and the document, in any epoch."""
    of = batches(stream(shards / "*.txt", tmp_path / "a"))
    trained(of, range(66))
    positions = of.release_streamed_samples_and_return_positions(of.positions_before_step(66))
    opened = []
    from ortlaunch.worker.data.streams import writer

    read = writer.read_file_rows
    monkeypatch.setattr(writer, "read_file_rows", lambda *a: (opened.append(a[0]), read(*a))[1])
    again = batches(stream(shards / "*.txt", tmp_path / "b"))
    again.begin_step_after_positions(66, 66 * GLOBAL)
    again.seek_streams(positions)
    assert trained(again, range(66, 67)) == whole[66:67]
    assert len({*opened}) <= 3
    assert opened[0] == again.streams[0].streamed.file_of_turn(positions[0].turn)


def test_a_rollback_reads_deleted_windows_again(
    whole: list[Taken], shards: Path, tmp_path: Path
) -> None:
    """The same process goes back to a checkpoint whose windows are gone."""
    of = batches(stream(shards / "*.txt", tmp_path), 2)
    trained(of, range(5))
    positions = of.release_streamed_samples_and_return_positions(5 * GLOBAL)
    trained(of, range(5, 50))
    of.begin_step_after_positions(5, 5 * GLOBAL)
    of.seek_streams(positions)
    assert trained(of, range(5, 50)) == whole[5:50]


def sizes(folder: Path) -> dict[str, int]:
    found = {}
    for path in folder.rglob("*.u32*"):
        with suppress(FileNotFoundError):
            found[path.name] = path.stat().st_size
    return found


def test_the_disk_space_is_bounded(shards: Path, tmp_path: Path) -> None:
    """The windows never exceed the buffer, over more than 20 times of it."""
    buffer = 6 * WINDOW
    steps = 165
    of = batches(stream(shards / "*.txt", tmp_path, buffer))
    most = 0
    for step in range(steps):
        assert len(of.read_micro_batch_and_count_tokens(step, 0, 0)["input_ids"]) == GLOBAL
        of.release_streamed_samples_and_return_positions(of.positions_before_step(step + 1))
        before, after = sizes(tmp_path), None
        # Until the writer waits for room, as files come and go while they are listed.
        while before != after:
            before, after = sizes(tmp_path), before
        most = max(most, sum(before.values()))
    of.close_streams()
    assert steps * GLOBAL * LENGTH * 4 > 20 * buffer
    assert 2 * WINDOW < most <= buffer


def test_a_mixture_of_a_stream_and_indexed_samples(shards: Path, tmp_path: Path) -> None:
    """Weights hold, and a resume in another world has the same samples of both."""

    def mixed(folder: str) -> Mixture:
        own = UserSamples(
            [{"input_ids": [-n] * LENGTH, "labels": [-n] * LENGTH} for n in range(50)]
        )
        return Mixture([own, stream(shards / "*.txt", tmp_path / folder)], [1.0, 3.0])

    one = batches(mixed("a"))
    first = trained(one, range(20))
    positions = one.release_streamed_samples_and_return_positions(20 * GLOBAL)
    rest = trained(one, range(20, 50))
    again = batches(mixed("b"), 3)
    again.begin_step_after_positions(20, 20 * GLOBAL)
    again.seek_streams(positions)
    assert trained(again, range(20, 50)) == rest
    streamed = [ids[0] >= 0 and ids[-1] > 0 for step in first + rest for _, ids in step]
    assert 0.7 < sum(streamed) / len(streamed) < 0.8
    assert len(positions) == 1


class Server(BaseHTTPRequestHandler):
    """Serves a folder with ranges; the class attributes make it slow or let it fail."""

    folder = Path()
    failing = 0
    requests: list[tuple[str, str]] = []
    ranges = True
    seconds = 0.0

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        cls = type(self)
        time.sleep(cls.seconds)
        path = cls.folder / self.path[1:]
        cls.requests.append((self.command, self.path[1:]))
        number = len(cls.requests)
        if not path.is_file():
            self.send_error(404)
            return
        # In turn: an error of the server, a lost connection, half of an answer.
        fault = (number // cls.failing) % 3 if cls.failing and number % cls.failing == 0 else None
        if fault == 0:
            self.send_error(503)
        if fault in (0, 1):
            return
        data = path.read_bytes()
        asked = self.headers.get("Range")
        if asked and cls.ranges:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            data = data[int(first) : int(last) + 1]
        self.send_response(206 if asked and cls.ranges else 200)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Accept-Ranges", "bytes")
        self.end_headers()
        if body:
            self.wfile.write(data[: len(data) // 2] if fault else data)

    def log_message(self, *_: Any) -> None: ...


@contextmanager
def served(folder: Path, **settings: Any) -> Iterator[tuple[str, Any]]:
    handler = type("Handler", (Server,), {"folder": folder, "requests": [], **settings})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=partial(server.serve_forever, poll_interval=0.02))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", handler
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_lost_connection_is_tried_again(
    whole: list[Taken],
    shards: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A server that fails in each third request gives the samples of the local files."""
    monkeypatch.setattr(remote, "_PAUSES", (0.01,) * 9)
    monkeypatch.setattr(remote, "_BLOCK_BYTES", 700)
    names = sorted(path.name for path in shards.iterdir())
    with served(shards, failing=3) as (url, handler):
        samples = stream([f"{url}/{name}" for name in names], tmp_path)
        assert trained(batches(samples), range(30)) == whole[:30]
    assert len(handler.requests) > 2 * len(names)
    assert "; the next attempt is in 0:00" in capfd.readouterr().out


def test_parquet_over_http(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A Parquet file behind a server that fails is read by ranges, its rows as the local ones."""
    from pyarrow import Table, parquet

    monkeypatch.setattr(remote, "_PAUSES", (0.01,) * 9)
    monkeypatch.setattr(remote, "_BLOCK_BYTES", 2000)
    chance = random.Random(7)
    texts = ["".join(chance.choices("abcdefghij ", k=90)) for _ in range(2000)]
    parquet.write_table(Table.from_pydict({"text": texts}), tmp_path / "a.parquet", 100)
    size = (tmp_path / "a.parquet").stat().st_size
    with served(tmp_path, failing=2) as (url, handler):
        corpus = Corpus(format="parquet", path=(f"{url}/a.parquet",), stream=StreamSettings())
        rows = read_file_rows(files_of_corpus_patterns(corpus)[0], "parquet")
        assert next(rows).values == {"text": texts[0]}
        # The metadata at the end, and groups of rows: not a request for each block.
        assert len(handler.requests) < size // 2000
        assert [row.values["text"] for row in rows] == texts[1:]
    assert "; the next attempt is in 0:00" in capfd.readouterr().out


MOTO = Path(__file__).resolve().parents[3] / "build/moto/bin/python"
# Each line of input starts or stops the server, which keeps its files in memory.
SERVE_S3 = """
import sys
from moto.server import ThreadedMotoServer
port = 0
while sys.stdin.readline():
    server = ThreadedMotoServer("127.0.0.1", port, verbose=False)
    server.start()
    port = server.get_host_and_port()[1]
    print(port, flush=True)
    sys.stdin.readline()
    server.stop()
    print("stopped", flush=True)
"""


@contextmanager
def served_by_s3(folder: Path) -> Iterator[tuple[dict[str, str], Callable[[float], None]]]:
    """Serve a folder's files as `s3://bucket/data/`.

    Gives the variables that a reader needs, and a function that stops the server for some seconds.
    """
    import s3fs

    keys = dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "testing")
    command = [str(MOTO), "-c", SERVE_S3]
    pipe = subprocess.PIPE
    timers: list[threading.Timer] = []
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, bufsize=1) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        write, read = server.stdin.write, server.stdout.readline

        def outage(seconds: float) -> None:
            write("stop\n")
            assert read() == "stopped\n"
            timers.append(threading.Timer(seconds, write, ["start\n"]))
            timers[-1].start()

        try:
            write("start\n")
            url = f"http://127.0.0.1:{int(read())}"
            bucket = s3fs.S3FileSystem(
                key="testing", secret="testing", endpoint_url=url, skip_instance_cache=True
            )
            bucket.mkdir("bucket")
            bucket.put(str(folder), "bucket/data", recursive=True)
            yield {**keys, "AWS_DEFAULT_REGION": "us-east-1", "AWS_ENDPOINT_URL": url}, outage
            for _ in timers:
                assert int(read())
        finally:
            for timer in timers:
                timer.join()
            server.kill()


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.skipif(not MOTO.exists(), reason="make test-ci installs moto, a server of S3")
def test_files_of_s3_are_read_again_after_an_outage(
    whole: list[Taken], shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bucket gives the samples of the local files, also after its server was down."""
    monkeypatch.setattr(remote, "_PAUSES", (0.1,) * 100)
    with served_by_s3(shards) as (environ, outage):
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        of = batches(stream("s3://bucket/data/*.txt", tmp_path))
        outage(1.0)
        assert trained(of, range(30)) == whole[:30]


def test_the_first_step_comes_before_the_second_file(shards: Path, tmp_path: Path) -> None:
    """A server that holds the second file back lets the training begin."""
    with served(shards) as (url, handler):
        one = stream(f"{url}/part1.txt", tmp_path / "a")
        assert len(trained(batches(one), range(1))[0]) == GLOBAL
        # A whole file is one block.
        assert [path for command, path in handler.requests if command == "GET"] == ["part1.txt"]


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("none.txt", {}, "none.txt: cannot be read: ClientResponseError: 404"),
        ("part1.txt", {"ranges": False}, "the server ignores requests for a range of bytes"),
        ("bad.txt", {}, "bad.txt:2: is not UTF-8"),
    ],
)
def test_errors_of_a_server(
    shards: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    settings: Any,
    said: str,
) -> None:
    """A file that is absent, a server without ranges and bad bytes are errors of the data."""
    monkeypatch.setattr(remote, "_BLOCK_BYTES", 100)
    folder = tmp_path / "served"
    folder.mkdir()
    # Larger than what is read at once.
    write_shards(folder, 2, 2000)
    (folder / "bad.txt").write_bytes(b"1 2\n\xff\xfe\n")
    with served(folder, **settings) as (url, _), pytest.raises(DataError, match=said):
        trained(batches(stream(f"{url}/{name}", tmp_path / "windows")), range(1))


def test_files_without_a_sample(tmp_path: Path) -> None:
    """An epoch without one sample is an error, not an endless wait."""
    (tmp_path / "a.txt").write_text("1 2 3\n")
    started = time.monotonic()
    with pytest.raises(DataError, match=r"no file of 1 has the tokens of one sample \(8\)"):
        trained(batches(stream(tmp_path / "*.txt", tmp_path / "windows")), range(1))
    assert time.monotonic() - started < 30


def test_a_file_without_rows_is_left_out(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its turn may come late in a training, which goes on with the next file."""
    texts = {"a.txt": (shards / "part0.txt").read_text(), "b.txt": "", "c.txt": " \n\n"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    with served(tmp_path) as (url, _):
        samples = stream([f"{url}/{name}" for name in texts], tmp_path / "windows")
        assert len(trained(batches(samples), range(20))) == 20
    out = capsys.readouterr().out
    assert "b.txt: is empty; leave it out: the stream continues with the next file\n" in out
    assert "c.txt: has no rows; leave it out: the stream continues with the next file\n" in out
