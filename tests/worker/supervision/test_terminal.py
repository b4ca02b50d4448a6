"""Plain lines for logs from a rank's output, and one live line below them on a terminal."""

from __future__ import annotations

import os

import pytest

from ortlaunch.worker.supervision import terminal
from ortlaunch.worker.supervision.terminal import LIVE, OutputStream, Screen

ERASE = b"\r\x1b[K"


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([b"one\ntw", b"o\nthree"], b"one\ntwo\nthree\n"),
        ([b"\x1b[1mLOAD", b" REPORT\x1b[0", b"m from: x\n"], b"LOAD REPORT from: x\n"),
        ([b"\r  0%|   |", b"\r 50%|#  |", b"\r100%|## |\n"], b"100%|## |\n"),
        ([b"dos\r\n", b"\r\n"], b"dos\n\n"),
        ([b"\x1b]8;;http://x\x07link\x1b]8;;\x07\n"], b"link\n"),
        ([b"k" * 3_000_000], b"k" * 3_000_000 + b"\n"),
    ],
    ids=["pieces", "colours", "bar", "dos", "link", "long"],
)
def test_lines_of_a_stream_are_plain(pieces: list[bytes], expected: bytes) -> None:
    """Colours are removed, an overwritten line keeps its last form, and pieces are joined."""
    stream = OutputStream()
    found = b"".join(
        [stream.add_bytes_and_take_complete_and_live_lines(piece).lines for piece in pieces]
        + [stream.take_unfinished_line()]
    )
    # A line longer than a megabyte is written in pieces.
    assert found.replace(b"k\nk", b"kk") == expected


def test_a_bar_that_is_drawn_for_hours_takes_no_memory() -> None:
    """Only the last form of a line that is drawn again and again stays in memory."""
    stream = OutputStream()
    for number in range(1000):
        stream.add_bytes_and_take_complete_and_live_lines(b"\r%d|%s" % (number, b"#" * 100))
    assert len(stream.incomplete_line) < 300


def test_the_live_line_is_not_among_the_lines() -> None:
    """A rank's live line is separated from the output that surrounds it."""
    output = OutputStream().add_bytes_and_take_complete_and_live_lines(
        b"half a " + LIVE % b"step 1" + b"line\n" + LIVE % b"step 2"
    )
    assert (output.lines, output.live) == (b"half a line\n", b"step 2")


def drawn(width: int | None, *acts: tuple[str, bytes]) -> bytes:
    """Return the bytes that a screen writes."""
    end, begin = os.pipe()
    screen = Screen({"out": begin, "err": begin}, width)
    for name, text in acts:
        screen.draw_live_line_on_terminal(text) if name == "live" else screen.print_lines(
            name, text
        )
    screen.erase_live_line()
    os.close(begin)
    with os.fdopen(end, "rb") as file:
        return file.read()


def test_lines_stay_and_the_live_line_is_the_last() -> None:
    """A new line replaces the live line, which is drawn again below and removed at the end."""
    acts = [("live", b"step 1"), ("out", b"loss 3\n"), ("err", b"warning\n"), ("live", b"step 2")]
    expected = [b"step 1", b"loss 3\n", b"step 1", b"warning\n", b"step 1", b"step 2", b""]
    assert drawn(80, *acts) == b"".join(ERASE + text for text in expected)


def test_a_live_line_is_cut_to_the_width() -> None:
    """A live line is cut to the width: a longer one would wrap, and each drawing leave a line."""
    # Each of these letters has three bytes, and one column.
    assert drawn(6, ("live", "█████████".encode())) == ERASE + "█████".encode() + ERASE


def test_without_a_terminal_there_is_no_live_line() -> None:
    """Without a terminal, lines are written unchanged and there is no live line."""
    assert drawn(None, ("out", b"a\n"), ("err", b"b\n")) == b"a\nb\n"


def test_what_is_waited_for_has_a_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A live line that ends in dots shows the seconds since it came; a bar has its own clock."""
    now = [10.0]
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now[0])
    end, begin = os.pipe()
    screen = Screen({"out": begin, "err": begin}, 80)
    for live, seconds in (
        (b"reading data ...", (0.4, 1.1, 1.9, 2.0)),
        (b"training 10%", (5.0,)),
        (b"saving ...", (0.5,)),
    ):
        screen.draw_live_line_on_terminal(live)
        started = now[0]
        for waited in seconds:
            now[0] = started + waited
            screen.update_waited_seconds_on_live_line()
    os.close(begin)
    with os.fdopen(end, "rb") as file:
        drawn = file.read().split(ERASE)[1:]
    assert drawn == [
        b"reading data ...",
        b"reading data ... 1 s",
        b"reading data ... 2 s",
        b"training 10%",
        b"saving ...",
    ]


def test_torch_does_not_report_the_missing_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a run on the CPU, a CUDA build of torch does not warn that there is no CUDA runtime."""
    import logging

    from ortlaunch.worker.__main__ import silence_no_gpu_warning_on_cpu

    logger = logging.getLogger("torch.utils.cpp_extension")
    monkeypatch.setattr(logger, "level", logging.NOTSET)
    silence_no_gpu_warning_on_cpu("cpu")
    assert not logger.isEnabledFor(logging.WARNING)
