"""Measure the cost or gain of single parts: two or more ways to do the same work, in turns,
medians.

    python benchmarks/parts.py                       list the parts
    python benchmarks/parts.py NAME... [--rounds 5]  measure some; `all` measures every one

Each side is a process of its own that sleeps during the turns of the others (contest.py). Sides of
two ranks fork the second rank. The first side of a part is the one that the others are compared
with. Not every unit is better when smaller.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import json
import math
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from contest import Gate, race

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

Step = Callable[[], "float | None"]
"""One measured act; the result is its return value in the part's unit, else its time."""
SECOND = {"ms": 1000.0, "s": 1.0}
Side = Callable[[], Step]
"""Prepares a side in its process and returns the act."""


class Part(NamedTuple):
    """A row of the table below."""

    compares: str
    sides: Mapping[str, Side]
    unit: str = "ms"
    steps: int = 1
    """Acts of a turn; of acts that return a result the last counts."""
    rounds: int = 5


# ------------------------------------------------------------ set-up


def scratch() -> Path:
    """Return a new folder, which is deleted after the race."""
    return Path(tempfile.mkdtemp(dir=os.environ["CONTEST_FOLDER"]))


def command(*words: str, cwd: Path, **environ: str) -> str:
    """Standard output of a whole `ortlaunch` command, which must succeed."""
    argv = [sys.executable, "-m", "ortlaunch.cli", *words]
    done = subprocess.run(
        argv, cwd=cwd, env={**os.environ, **environ}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


def train(recipe: Path, folder: Path, **settings: Any) -> list[dict[str, Any]]:
    """The metrics of a whole run; `__` in a setting's name stands for a dot."""
    overrides = [f"{name.replace('__', '.')}={value}" for name, value in settings.items()]
    command("train", str(recipe), f"--run-dir={folder}", *overrides, cwd=folder.parent)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def two_ranks() -> Any:
    """Return the distributed context of this process and of a fork, on gloo.

    Both have the same scratch folder.
    """
    meeting = scratch() / "meeting"
    rank = int(os.fork() == 0)
    for name, value in (
        ("RANK", rank),
        ("LOCAL_RANK", rank),
        ("WORLD_SIZE", 2),
        ("LOCAL_WORLD_SIZE", 2),
    ):
        os.environ[name] = str(value)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist

    from ortlaunch.rank import Rank
    from ortlaunch.worker.process_group.distributed import DistributedContext

    torch.set_num_threads(1)  # so that the two ranks do not compete for cores
    dist.init_process_group("gloo", store=dist.FileStore(str(meeting), 2), rank=rank, world_size=2)
    return DistributedContext(Rank(rank, 2, rank, 2), torch.device("cpu"))


def session_of(folder: Path, context: Any, *overrides: str) -> Any:
    """The session of the tiny BERT as `train` builds it, on the ranks of the context."""
    from ortlaunch.planning.hosts import Host
    from ortlaunch.planning.make_plan import make_plan
    from ortlaunch.planning.workload import solve_batch_and_estimate_memory
    from ortlaunch.planning.world import World
    from ortlaunch.recipe import load_recipe
    from ortlaunch.run_folder.folder import RunDir

    recipe = load_recipe(ROOT / "recipes/bert-large/tiny.yaml", list(overrides)).recipe
    world = World(
        (Host("localhost", context.size, tuple(range(context.size))),),
        "torchrun",
        "cpu",
        None,
        (),
        threads=1,
    )
    plan = make_plan(
        recipe,
        world,
        solve_batch_and_estimate_memory(recipe, world),
        modules_folder=".",
        worker_argv=["-"],
    )
    if recipe.engine.name == "ort":
        from ortlaunch.worker.engine.ort_settings import import_ortmodule_with_settings

        import_ortmodule_with_settings(recipe.engine)
    from ortlaunch.worker.session import load_data_and_build_session
    from ortlaunch.worker.supervision.progress import Progress

    return load_data_and_build_session(
        recipe, plan, RunDir(folder), context, Progress(rank=1), None
    )


def memory(field: str) -> float:
    """Return a field of /proc/self/status in MiB."""
    found = re.search(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def peak_of(act: Callable[[], object]) -> float:
    """Return the peak memory that an act adds to the process, in MiB."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM to the present size
    before = memory("VmRSS")
    act()
    return memory("VmHWM") - before


# ------------------------------------------------------------ agreement of ranks, heartbeats


def training_step(*, agreed: bool) -> Step:
    """A step of the tiny BERT on two ranks, with or without the agreement at its end."""
    folder = scratch()
    context = two_ranks()
    from ortlaunch.worker.process_group.agreement import accept_save_and_stop_requests
    from ortlaunch.worker.tasks.train import TrainState, train_step

    # Eager, because the agreement does not depend on the engine and ort's start takes longer.
    session = session_of(folder, context, "engine.name=eager")
    state = TrainState()
    manager = accept_save_and_stop_requests(context)
    edge = manager.__enter__()

    def step() -> None:
        train_step(session, state, edge if agreed else None)
        if agreed:
            edge.handle_signals_and_wait_for_agreed_request()
        # The race has no fixed number of steps, so the steps of the recipe are repeated.
        state.step = (state.step + 1) % session.recipe.train.steps

    step.manager = manager  # type: ignore[attr-defined]  # else it closes
    return step


def agreement_alone() -> Step:
    """Begin and end with nothing between them: the wait for the slower rank is in it."""
    context = two_ranks()
    from ortlaunch.worker.process_group.agreement import accept_save_and_stop_requests

    manager = accept_save_and_stop_requests(context)
    edge = manager.__enter__()

    def step() -> None:
        _ = manager
        edge.agree_on_request_now()

    return step


def marks(passed: bool) -> Step:
    """The heartbeat marks of 10,000 steps of a rank, or the bare loop; us a step."""
    from ortlaunch.worker.supervision.pulse import (
        BACKWARD,
        FORWARD,
        READING,
        STEPPING,
        SharedProgress,
    )

    pulse = SharedProgress()
    pulse.begin_steps(0)
    stages = (READING, FORWARD, BACKWARD, STEPPING) if passed else ()

    def step() -> float:
        began = time.process_time()
        for _ in range(10_000):
            for stage in stages:
                pulse.end_stage_and_begin_next(stage)
            if passed:
                pulse.count_step_and_record_duration()
        # Seconds of 10,000 steps in microseconds a step.
        return (time.process_time() - began) * 100

    return step


def supervisors(count: int) -> Step:
    """Processor ms a second of supervisors of idle ranks, 10 inspections a second; 0: the loop."""
    from ortlaunch.planning.hosts import Host
    from ortlaunch.planning.make_plan import make_plan
    from ortlaunch.planning.workload import solve_batch_and_estimate_memory
    from ortlaunch.planning.world import World
    from ortlaunch.rank import Rank
    from ortlaunch.recipe import load_recipe
    from ortlaunch.run_folder.folder import RunDir
    from ortlaunch.worker.supervision.rank_process import RankProcess
    from ortlaunch.worker.supervision.watchdog import Watchdog

    run = RunDir(scratch())
    world = World((Host("localhost", 2, (0, 1)),), "torchrun", "cpu", None, (), threads=1)
    recipe = load_recipe(ROOT / "recipes/bert-large/tiny.yaml").recipe
    run.plan.write_text(
        make_plan(
            recipe,
            world,
            solve_batch_and_estimate_memory(recipe, world),
            modules_folder=".",
            worker_argv=["-"],
        ).to_json()
    )
    dogs = [Watchdog(Rank(rank, 2, rank, 2), run) for rank in range(count)]
    children = [RankProcess(sleeper(), run, rank, None) for rank in range(count)]
    if dogs:
        hub = dogs[0].exchange.socket
        assert hub is not None
        hub.bind(("127.0.0.1", 0))
        address, port = hub.getsockname()
        for dog in dogs:
            dog.shared_progress.meeting_point = {
                "address": address,
                "port": port,
                "host": "here",
                "key": "ab" * 16,
            }

    def step() -> float:
        began = time.process_time()
        for _ in range(50):
            for dog, child in zip(dogs, children):
                dog.exchange_heartbeats_and_end_stalled_rank(child)
            time.sleep(0.1)
        # 50 rounds of 0.1 s are 5 s.
        return (time.process_time() - began) / 5 * 1000

    return step


def sleeper() -> int:
    """A process that does nothing until this one ends."""
    from ortlaunch.base.die_with_parent import request_signal_at_parent_end_or_exit_if_ended

    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        request_signal_at_parent_end_or_exit_if_ended(signal.SIGKILL, parent)
        time.sleep(10_000)
        os._exit(0)
    return pid


def beats_of(ranks: int) -> Step:
    """CPU use of rank 0 for heartbeats of simulated ranks, in % of a core; none may be silent."""
    from ortlaunch.base.die_with_parent import request_signal_at_parent_end_or_exit_if_ended
    from ortlaunch.rank import Rank
    from ortlaunch.worker.supervision.heartbeats import (
        HeartbeatExchange,
        seconds_between_heartbeats,
    )
    from ortlaunch.worker.supervision.stall_rules import Heartbeat

    def beat(rank: int) -> Heartbeat:
        return Heartbeat(
            rank,
            f"host{rank // 8}",
            1,
            5,
            "the forward pass",
            100,
            7,
            0.1,
            0.1,
            "R",
            True,
            0.5,
            0.1,
        )

    hub = HeartbeatExchange(Rank(0, ranks, 0, 8))
    every = seconds_between_heartbeats(ranks)
    assert hub.socket is not None
    hub.socket.bind(("127.0.0.1", 0))
    address, port = hub.socket.getsockname()
    meeting = {"address": address, "port": port, "host": "here", "key": "ab" * 16}
    hub.connect_to_rank_0_once(meeting)
    parent = os.getpid()
    if os.fork() == 0:
        request_signal_at_parent_end_or_exit_if_ended(
            signal.SIGKILL, parent
        )  # it has this side's standard output open
        others = HeartbeatExchange(Rank(1, ranks, 1, 8))
        others.connect_to_rank_0_once(meeting)
        began = time.monotonic()
        while True:
            for rank in range(1, ranks):
                time.sleep(max(0.0, began + rank / ranks * every - time.monotonic()))
                others.send_heartbeat(beat(rank))
            began += every

    def step() -> float:
        ends = time.monotonic() + 3 * every
        used = 0.0
        while time.monotonic() < ends:
            time.sleep(0.1)
            hub.send_heartbeat(beat(0))
            began = time.process_time()
            hub.receive_and_process_messages()
            used += time.process_time() - began
        beats = hub.heartbeats_to_judge_here_or_none(beat(0)) or []
        silent = sum(one.is_silent for one in beats)
        if len(beats) < ranks or silent:
            raise SystemExit(f"of {ranks} ranks {len(beats)} were heard, {silent} count as silent")
        return 100 * used / (3 * every)

    return step


def connections(lazy: str, ranks: int = 32) -> Step:
    """The most descriptors that two gloo groups add to a rank, in a full mesh or on demand."""
    os.environ.update(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1", TORCH_GLOO_LAZY_INIT=lazy)
    import torch
    import torch.distributed as dist

    def be_rank(rank: int, store: Path, counts: int) -> None:
        files = Path("/proc/self/fd")
        before = len(list(files.iterdir()))
        dist.init_process_group(
            "gloo", store=dist.FileStore(str(store), ranks), rank=rank, world_size=ranks
        )
        highest = torch.tensor([rank])
        total = torch.tensor([float(rank)])
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=dist.new_group(backend="gloo"))
        dist.all_reduce(total)
        texts = [""] * ranks
        dist.all_gather_object(texts, str(rank))
        expected = (ranks - 1, ranks * (ranks - 1) / 2, [str(each) for each in range(ranks)])
        assert (int(highest), float(total), texts) == expected
        dist.barrier()
        os.write(counts, f"{len(list(files.iterdir())) - before}\n".encode())
        dist.barrier()

    def step() -> float:
        read_end, write_end = os.pipe()
        store = scratch() / "store"
        pids = []
        for rank in range(ranks):
            pid = os.fork()
            if pid == 0:
                be_rank(rank, store, write_end)
                os._exit(0)
            pids.append(pid)
        os.close(write_end)
        if sum(os.waitpid(pid, 0)[1] for pid in pids):
            raise SystemExit("a rank failed")
        with os.fdopen(read_end) as lines:
            return max(float(line) for line in lines)

    return step


# ------------------------------------------------------------ head and loss

# A head of the size of Llama's, on one short batch.
ROWS = 1024
WIDTH = 768
VOCABULARY = 32_000


def head(way: str) -> Callable[[], None]:
    """Forward and backward of head and loss: matmuls alone, whole logits, chunks of 160 rows."""
    import torch
    from torch.nn import functional

    from ortlaunch.worker.model.chunked_loss import chunked_cross_entropy

    torch.manual_seed(0)
    hidden = torch.randn(ROWS, WIDTH, requires_grad=True)
    weight = (torch.randn(VOCABULARY, WIDTH) * 0.02).requires_grad_()
    labels = torch.randint(VOCABULARY, (ROWS,))

    # The lower bound of both other ways: one matmul forward, two backward.
    def matmuls() -> None:
        with torch.no_grad():
            logits = hidden @ weight.t()
            _ = logits @ weight, logits.t() @ hidden

    def trained() -> None:
        hidden.grad = weight.grad = None
        if way == "whole":
            loss = functional.cross_entropy(functional.linear(hidden, weight), labels)
        else:
            loss = chunked_cross_entropy(hidden, weight, None, labels, 160, True)
        loss.backward()

    return matmuls if way == "matmuls" else trained


def minilm_head(engine: str, chunked: bool) -> Step:
    """Forward and backward of MiniLM's masked-lm head on 32 x 96 hidden states, 15 % labelled."""
    import torch
    import transformers

    from ortlaunch.worker.model.chunked_head import ChunkedHead
    from ortlaunch.worker.model.model import LossModule
    from ortmodule import ORTModule, Settings

    sizes = {
        "hidden_size": 384,
        "vocab_size": 30_522,
        "num_hidden_layers": 1,
        "num_attention_heads": 12,
    }

    class Head(torch.nn.Module):
        """The part of BertForMaskedLM after the last hidden states."""

        def __init__(self) -> None:
            super().__init__()
            self.cls = transformers.models.bert.modeling_bert.BertOnlyMLMHead(
                transformers.BertConfig(**sizes)
            )

        def forward(self, hidden: Any, labels: Any = None) -> Any:
            logits = self.cls(hidden)
            loss = None
            if labels is not None:
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
            return transformers.modeling_outputs.MaskedLMOutput(loss=loss, logits=logits)

    torch.manual_seed(0)
    hidden = torch.randn(32, 96, 384, requires_grad=True)
    labels = torch.randint(30_522, (32, 96))
    # Masked language models predict 15 % of the tokens; the loss ignores -100.
    labels[torch.rand(32, 96) > 0.15] = -100
    module: Any = LossModule(Head().train())
    if chunked:
        module.chunk_head_or_restore_it(ChunkedHead("cls.predictions.decoder", 160, False))
    if engine == "ort":
        module = ORTModule(module, Settings(threads=torch.get_num_threads()))

    def step() -> None:
        hidden.grad = None
        module.zero_grad(set_to_none=True)
        module(hidden=hidden, labels=labels).backward()

    return step


# ------------------------------------------------------------ data


def order(computed: bool, samples: int) -> Callable[[list[int]], object]:
    """Samples at positions of an epoch: NumPy's permutation, or computed (a Feistel network)."""
    import numpy as np

    if computed:
        from ortlaunch.worker.data.order import SampleOrder

        return SampleOrder(samples, 7).sample_epochs_at
    # Drawn once, before the turns; the permutation is kept in memory.
    held = np.random.Generator(np.random.Philox([7, 0])).permutation(samples)
    return lambda places: [(int(held[place]), 0) for place in places]


def first_batch(computed: bool) -> Step:
    """MiB until the first micro batch of an epoch of 500 million samples is known."""
    return lambda: peak_of(lambda: order(computed, 500_000_000)(list(range(8))))


def batches_of_order(computed: bool) -> Step:
    """200 micro batches of 64 samples from all over an epoch of 50 million."""
    samples = 50_000_000
    at = order(computed, samples)
    starts = [random.Random(place).randrange(samples - 64) for place in range(200)]

    def step() -> None:
        for start in starts:
            at(list(range(start, start + 64)))

    return step


def corpus_in_memory(megabytes: int) -> Step:
    """Anonymous MiB that 1,000 micro batches from all over a mapped corpus add."""
    import numpy as np

    from ortlaunch.launch_plan import BatchPlan
    from ortlaunch.worker.data import Batches, TokenWindows
    from ortlaunch.worker.data.read_ahead import ReadAheadSettings
    from ortlaunch.worker.data.shards import ShardWriter, map_shards_as_one_sequence

    path = scratch() / "tokens"
    generator = np.random.default_rng(0)
    shards = ShardWriter(path, 0)
    for _ in range(megabytes):
        shards.append_tokens_and_checksum_full_shards(
            generator.integers(0, 30_000, (1 << 20) // 4, dtype=np.uint32)
        )
    # One micro batch a step on one rank: 32 samples of 512 tokens.
    shards.close()
    batches = Batches(
        TokenWindows(map_shards_as_one_sequence(path), 512, with_mask=True),
        BatchPlan(32, 32, 1, 1, None),
        7,
    )
    # Anonymous memory only: pages of the mapped file belong to the kernel's cache.
    before = memory("RssAnon")

    def step() -> float:
        with batches.read_rank_batches_ahead(0, ReadAheadSettings(0)):
            for number in range(1_000):
                batches.read_micro_batch_and_count_tokens(number, 0, 0)
        return memory("RssAnon") - before

    return step


def fed_step(cached: bool) -> Step:
    """A step of the tiny BERT on engine ort, on batches that are read, or on one in memory."""
    import torch

    from ortlaunch.rank import Rank
    from ortlaunch.worker.data import Batches
    from ortlaunch.worker.process_group.distributed import DistributedContext
    from ortlaunch.worker.tasks.train import TrainState, train_step

    class Cached(Batches):
        """One batch for every position."""

        # Takes over the other's fields instead of reading the data again.
        def __init__(self, of: Batches) -> None:
            vars(self).update(vars(of))
            self.only = of.read_micro_batch_and_count_tokens(0, 0, 0)

        def read_micro_batch_and_count_tokens(
            self, step: int, accumulation: int, rank: int
        ) -> dict[str, torch.Tensor]:
            return self.only

    alone = DistributedContext(Rank(0, 1, 0, 1), torch.device("cpu"))
    session = session_of(scratch(), alone, "train.max_steps=100000")
    state = TrainState()
    if cached:
        session = dataclasses.replace(session, batches=Cached(session.batches))

    def step() -> None:
        train_step(session, state)
        state.step += 1

    return step


def tokenized_by(way: str) -> Step:
    """Tokenizing 20 MB with empty caches: ours, or `datasets.map` of the same tokenizer."""
    from pydoc_data.topics import topics

    import datasets

    from ortlaunch.recipe.fields.data import Corpus, Data
    from ortlaunch.worker.data.token_cache import load_or_tokenize_documents
    from ortlaunch.worker.data.tokenizer import load_tokenizer_with_added_tokens_or_none

    # Text that every Python installation has: manuals and the standard library's sources.
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = [
        *topics.values(),
        *(source.read_text(encoding="utf-8", errors="ignore") for source in sources),
    ]
    whole = "\n\n".join(texts) + "\n\n"
    path = scratch() / "corpus.txt"
    # Repeated up to 20 MB.
    path.write_text(whole * math.ceil(20e6 / len(whole)), encoding="utf-8")
    data = {
        "train": "python-docs",
        "tokenizer": {"train": "bpe", "vocab_size": 8000},
        "sequence_length": 8,
    }
    words = load_tokenizer_with_added_tokens_or_none(Data.model_validate(data))

    def step() -> None:
        if way == "ortlaunch":
            # An empty cache in each turn, otherwise the second one would find the tokens.
            os.environ["ORTLAUNCH_CACHE"] = str(scratch())
            load_or_tokenize_documents(
                Corpus(format="text", path=(str(path),)), words, adds_end_mark=False
            )
        else:
            rows = datasets.load_dataset(
                "text",
                data_files=str(path),
                split="train",
                sample_by="paragraph",
                cache_dir=str(scratch()),
            )
            rows.map(
                lambda rows: {"input_ids": words(rows["text"], add_special_tokens=False)["input_ids"]},
                batched=True, num_proc=len(os.sched_getaffinity(0)), remove_columns=["text"],
            )  # fmt: skip

    return step


# ------------------------------------------------------------ DeepSpeed, the engine


def norm_of_gradients(ours: bool, stage: int, precision: str) -> Step:
    """Overflow check and gradient norm of BERT-base on two ranks, DeepSpeed's or ours."""
    from ortlaunch.worker.allocator import make_malloc_keep_memory_and_describe

    make_malloc_keep_memory_and_describe(os.environ)
    two_ranks()
    import deepspeed
    import torch
    import transformers

    from ortmodule._internal.deepspeed.gradient_norm import (
        fuse_gradient_norm_or_get_reason,
    )

    # Otherwise DeepSpeed compiles this operator for half a minute.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # Only the shapes of BERT-base are needed, not its weights.
    with torch.device("meta"):
        shapes = transformers.BertForPreTraining(transformers.BertConfig())
    module = torch.nn.Module()
    module.weights = torch.nn.ParameterList(
        0.02 * torch.randn(each.shape) for each in shapes.parameters()
    )
    # The simplest loss with a gradient for every weight.
    module.forward = lambda: sum((each * each.detach()).sum() for each in module.weights)
    config = {
        "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0, "steps_per_print": 10**9,
        "zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": precision == "bf16"},
    }  # fmt: skip
    adam = torch.optim.AdamW(module.parameters(), lr=1e-5)
    engine = deepspeed.initialize(
        model=module, optimizer=adam, config=config, dist_init_required=False
    )[0]
    optimizer = engine.optimizer
    if ours:
        refusal_reason = fuse_gradient_norm_or_get_reason(optimizer)
        assert not refusal_reason, refusal_reason
    # One backward pass fills the gradients; each act then reads them again.
    engine.backward(engine())

    def step() -> None:
        # So that no rank's time includes the wait for the other's last act.
        torch.distributed.barrier()
        optimizer.check_overflow(partition_gradients=optimizer.partition_gradients)
        optimizer.scaled_global_norm()

    return step


def network(name: str) -> tuple[Any, Any]:
    """A module that returns a loss, and its batch."""
    import torch
    import transformers
    from torch import nn

    class Squared(nn.Module):
        """Return the mean square of a body's output, or of a recurrent body's sequence."""

        def __init__(self, body: nn.Module) -> None:
            super().__init__()
            self.body = body

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = self.body(x)
            return (out[0] if isinstance(out, tuple) else out).square().mean()

    class Loss(nn.Module):
        """A language model's own loss."""

        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = self.model(
                input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids
            ).loss
            return loss

    if name == "LSTM":
        return Squared(nn.LSTM(64, 128, batch_first=True, bidirectional=True)), torch.randn(
            8, 32, 64
        )
    if name == "GRU":
        return Squared(nn.GRU(64, 128, batch_first=True)), torch.randn(8, 32, 64)
    if name == "convolutions":
        blocks = [
            nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.GroupNorm(8, o), nn.Mish())
            for i, o in ((3, 32), (32, 64), (64, 64))
        ]
        body = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(5), nn.Flatten(), nn.Linear(64 * 25, 10))
        return Squared(body), torch.randn(8, 3, 32, 32)
    sizes = {
        "vocab_size": 1000,
        "hidden_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    config = transformers.AutoConfig.for_model(
        name, **sizes, intermediate_size=1024, use_cache=False
    )
    auto = (
        transformers.AutoModelForMaskedLM if name == "bert" else transformers.AutoModelForCausalLM
    )
    return Loss(auto.from_config(config)), torch.randint(1000, (8, 64))


def torch_in_graph(name: str, way: str) -> Step:
    """Forward and backward on one thread: eager, or ort with `torch_operators` auto or off."""
    import torch

    from ortmodule import ORTModule, Settings
    from ortmodule._internal.pass_counters import PassAndGraphCounters

    torch.set_num_threads(1)
    torch.manual_seed(0)
    module, batch = network(name)
    if way != "eager":
        PassAndGraphCounters().start_counting_in_this_process()
        module = ORTModule(module, Settings(torch_operators=way))  # type: ignore[arg-type]
    # The first pass includes the export.
    module(batch).backward()
    return lambda: module(batch).backward()


# Model type, tokens of a sample, batch, and the fields of the config that differ from `attending`.
ATTENTION: dict[str, tuple[str, int, int, dict[str, Any]]] = {
    "llama_128": ("llama", 128, 8, {}),
    "llama_512": ("llama", 512, 2, {}),
    "llama_2048": ("llama", 2048, 1, {}),
    "padding_512": ("bert", 512, 2, {}),
    "grouped_2048": ("llama", 2048, 1, {"num_key_value_heads": 2}),
    "window_2048": ("mistral", 2048, 1, {"num_key_value_heads": 8, "sliding_window": 512}),
    "packed_2048": ("llama", 2048, 1, {}),
    "dropout_2048": ("llama", 2048, 1, {"attention_dropout": 0.1}),
}


def attending(name: str, engine: str) -> Step:
    """A training step of a model of 4 layers of width 512, with the launcher's settings."""
    import torch
    import transformers

    from ortlaunch.base import machine
    from ortlaunch.worker.allocator import make_malloc_keep_memory_and_describe, trim_heap
    from ortlaunch.worker.model.model import LossModule
    from ortmodule import ORTModule, Settings
    from ortmodule._internal import options

    make_malloc_keep_memory_and_describe(os.environ)
    if machine.is_onednn_faster():
        # torch calls oneDNN at this setting.
        torch.set_float32_matmul_precision("medium")
    kind, length, batch, changes = ATTENTION[name]
    if engine == "ort":
        options.load(Settings())
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 8000, "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8,
        "intermediate_size": 1376, "max_position_embeddings": length,
    }  # fmt: skip
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    ids = torch.randint(8000, (batch, length))
    given: dict[str, Any] = {"input_ids": ids, "labels": ids}
    if kind == "bert":
        config = transformers.AutoConfig.for_model(kind, **sizes, **no_dropout)
        module = transformers.AutoModelForSequenceClassification.from_config(config)
        # Three of ten tokens of each sample are padding.
        mask = torch.arange(length).lt(0.7 * length).long().expand(batch, -1)
        given = {"input_ids": ids, "attention_mask": mask, "labels": torch.zeros(batch).long()}
    else:
        config = transformers.AutoConfig.for_model(kind, **sizes, use_cache=False, **changes)
        module = transformers.AutoModelForCausalLM.from_config(config)
    if name.startswith("packed"):
        given["position_ids"] = torch.arange(length).remainder(300).expand(batch, -1)
    # Its only output is the loss, as in a run.
    module = LossModule(module.train())
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)
    trained: Any = ORTModule(module, Settings()) if engine == "ort" else module

    def step() -> None:
        trained(**given).backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    step()
    # A run does the same after the first pass of its engine.
    trim_heap()
    return step


# ------------------------------------------------------------ whole commands


def recomputed(engine: str, again: bool, unit: str) -> Step:
    """A Llama of 12 layers of 256: MiB that activations of 8 samples take, or seconds of a step.

    Activations are the peak of a run with a full micro batch less that of a run with one sample,
    scaled to the whole batch: both include the memory of the process itself.
    """
    micro = 8
    sizes = {"hidden_size": 256, "num_hidden_layers": 12, "num_attention_heads": 4, "intermediate_size": 704,
             "max_position_embeddings": 256}  # fmt: skip
    settings = {
        **{f"model.config.{name}": value for name, value in sizes.items()}, "data.sequence_length": 256,
        "data.tokenizer.vocab_size": 1000, "engine.name": engine, "engine.chunked_loss": "off",
        "model.gradient_checkpointing": str(again).lower(), "log.every_steps": 1,
    }  # fmt: skip

    def run(size: int, steps: int) -> tuple[float, float]:
        folder = scratch() / "run"
        batch = {"batch.global_size": size, "batch.micro_size": size, "train.max_steps": steps}
        records = train(ROOT / "recipes/llama2-7b/tiny.yaml", folder, **settings, **batch)
        ends = [one["elapsed_seconds"] for one in records if "loss" in one]
        measured = json.loads((folder / "memory.json").read_text())
        print(
            f"planned for activations: {measured['planned']['activations'] / 2**20:.0f} MiB",
            file=sys.stderr,
        )
        return measured["measured"]["peak"] / 2**20, statistics.median(
            b - a for a, b in zip(ends, ends[1:])
        )

    def step() -> float:
        peak, seconds = run(micro, 4)
        return seconds if unit == "s" else (peak - run(1, 3)[0]) * micro / (micro - 1)

    return step


def last_loss(recipe: str, precision: str) -> Step:
    """The last of 200 losses on engine eager; `highest` without oneDNN."""
    how = (
        {"engine.matmul_precision": "medium"}
        if precision == "medium"
        # On AMD oneDNN computes the matmuls of `highest` in the same way as those of `medium`.
        else {"engine.onednn": "false"}
    )

    def step() -> float:
        records = train(
            ROOT / recipe, scratch() / "run", engine__name="eager", train__max_steps=200, **how
        )
        return float([one["loss"] for one in records if "loss" in one][-1])

    return step


def held_out(way: str, steps: int = 2000) -> Step:
    """Nats for each masked word of held-out pages: of the tiny BERT, or of counts in its own
    tokens.

    `pairs` is Kneser-Ney smoothing by the previous word, which it always knows, at the discount
    that is best on the held-out text itself.
    """
    from pydoc_data.topics import topics

    import numpy as np

    folder = scratch()
    recipe = ROOT / "recipes/bert-large/tiny.yaml"
    pages = [topics[name].split("\n\n") for name in sorted(topics)]
    training = [paragraph for number, page in enumerate(pages) if number % 10 for paragraph in page]
    known = set(training)
    unseen = [paragraph for page in pages[::10] for paragraph in page if paragraph not in known]
    for name, part in (("train", training), ("evaluation", unseen)):
        (folder / f"{name}.txt").write_text("\n\n".join(part), encoding="utf-8")
    files = {
        f"data.{name}": f"{{format: text, path: [{folder / name}.txt]}}"
        for name in ("train", "evaluation")
    }

    def model() -> float:
        often = {"train.max_steps": steps, "train.evaluate_every_steps": steps}
        records = train(recipe, scratch() / "run", **files, **often)
        return math.log(
            [one["evaluation_perplexity"] for one in records if "evaluation_perplexity" in one][-1]
        )

    def counted() -> float:
        from ortlaunch.recipe import load_recipe
        from ortlaunch.worker.data import LoadedData

        data = LoadedData(
            load_recipe(recipe, [f"{name}={value}" for name, value in files.items()]).recipe
        )
        size = len(data.tokenizer)
        guesses = []
        source: Any = data.evaluation
        for number in range(len(source)):
            sample = source.sample(number, 0)
            ids = sample["input_ids"].numpy()
            labels = sample["labels"].numpy()
            truth = np.where(labels == -100, ids, labels)
            places = np.flatnonzero(labels != -100)
            guesses.append(np.stack([truth[places - 1], truth[places]]))
        before, word = np.concatenate(guesses, 1)
        corpus: Any = data.train
        tokens = np.asarray(corpus.tokens).astype(np.int64)
        if way == "frequency":
            counts = np.bincount(tokens, minlength=size) + 1.0
            return float(-np.log(counts[word] / counts.sum()).mean())
        pairs = np.zeros((size, size), dtype=np.float32)
        np.add.at(pairs, (tokens[:-1], tokens[1:]), 1.0)
        kinds = pairs > 0
        after = (kinds.sum(0) + 1.0) / (kinds.sum() + size)
        whole = pairs.sum(1)[before]
        different = kinds.sum(1)[before]

        def nats(discount: float) -> float:
            left = np.where(whole > 0, discount * different / np.maximum(whole, 1), 1.0)
            own = np.maximum(pairs[before, word] - discount, 0) / np.maximum(whole, 1)
            return float(-np.log(own + left * after[word]).mean())

        return min(nats(number / 20) for number in range(1, 20))

    return model if way == "model" else counted


FEDERATED = """\
name: federated
model:
  task: causal-lm
  config: {model_type: llama, hidden_size: 64, num_hidden_layers: 2, num_attention_heads: 2,
           intermediate_size: 128, max_position_embeddings: 64}
data:
  train: {format: text, path: [public.txt]}
  evaluation: {format: text, path: [held-out.txt]}
  tokenizer: {train: bpe, vocab_size: 1000}
  sequence_length: 64
batch: {micro_size: 16, accumulation_steps: 1}
optimizer: {name: adamw, learning_rate: 3e-3}
schedule: {name: constant}
engine: {name: eager}
train: {max_steps: 60}
"""


def devices(way: str, rounds: int = 5, steps: int = 20, batch: int = 16) -> Step:
    """Held-out loss of four `ortlaunch device` clients with topics of their own, averaged 5 times.

    For comparison one device trains on the topics of all: in as many steps of four times the batch,
    as data-parallel ranks do (`one place`), or in four times the steps (`in turn`). All start at a
    checkpoint of 60 steps on public topics.
    """
    from pydoc_data.topics import topics

    folder = scratch()
    clients = "abcd"
    names = ["public", "a", "b", "c", "held-out", "d", "public", "a", "b", "c", "d"]
    for name in set(names):
        texts = [
            topics[topic]
            for number, topic in enumerate(sorted(topics))
            if names[number % len(names)] == name
        ]
        (folder / f"{name}.txt").write_text("\n\n".join(texts), encoding="utf-8")
    (folder / "recipe.yaml").write_text(FEDERATED)
    command("train", "recipe.yaml", "--run-dir=run", cwd=folder)
    command("export", "run", "--format=ondevice", "--to=artifacts", cwd=folder)
    first = (folder / "artifacts/checkpoint").read_bytes()

    def learn(files: str, size: int, length: int, *words: str) -> None:
        files = ",".join(f"{name}.txt" for name in files)
        settings = (f"data.train.path=[{files}]", f"batch.micro_size={size}", f"train.max_steps={length}",
                    "optimizer.learning_rate=4e-3", "schedule.name=linear", "--checkpoint=common")  # fmt: skip
        command("device", "train", "artifacts", *settings, *words, cwd=folder)

    def step() -> float:
        (folder / "common").write_bytes(first)
        if way == "one place":
            learn(clients, batch * len(clients), rounds * steps, "--to=common")
        elif way == "in turn":
            learn(clients, batch, rounds * steps * len(clients), "--to=common")
        for _ in range(rounds if way == "federated" else 0):
            for name in clients:
                learn(name, batch, rounds * steps, f"--steps={steps}", f"--to=client-{name}")
            parts = [f"client-{name}" for name in clients]
            command("device", "average", "artifacts", *parts, "--to=common", cwd=folder)
        command("device", "evaluate", "artifacts", "--checkpoint=common", cwd=folder)
        return float(json.loads((folder / "artifacts/evaluation.json").read_text())["loss"])

    return step


def on_hosts(way: str, hosts: int = 10, names: int = 10) -> Step:
    """`ortlaunch doctor --hostfile`, or parallel `ssh HOST true`, to 100 names of a lab (root)."""
    from tests.cluster.lab import LOGIN, Lab, lacking

    # A lab needs root and Debian's packages.
    if lack := lacking():
        raise SystemExit(f"no lab: {lack}")
    lab = Lab(hosts, aliases=names).__enter__()
    folder = scratch()
    targets = [alias for name in lab.names for alias in lab.aliases_of(name)]
    (folder / "names").write_text("".join(f"{name}\n" for name in targets))
    (folder / "hosts").write_text("".join(f"{name} slots=1\n" for name in targets))
    # The lower bound of a check: nothing but the connections.
    argv = ["xargs", "-a", "names", "-P", str(len(targets)), "-I{}", "ssh", "{}", "true"]
    if way == "doctor":
        argv = [str(Path(sys.executable).with_name("ortlaunch")), "doctor", "--hostfile", "hosts"]

    def step() -> None:
        ended = lab.run(LOGIN, *argv, cwd=folder)
        if ended.returncode:
            raise SystemExit(
                f"status {ended.returncode}\n{ended.stdout[-2000:]}{ended.stderr[-2000:]}"
            )

    return step


# ------------------------------------------------------------ table


def of(side: Callable[..., Step], /, *arguments: Any, **named: Any) -> Side:
    """Return a side with its arguments."""
    return functools.partial(side, *arguments, **named)


def peak(way: str) -> Step:
    """MiB of one pass of the head."""
    act = head(way)
    return lambda: peak_of(act)


# Name -> the compared work, its sides, and the unit; the first side is the base of the ratios.
PARTS: dict[str, Part] = {
    "agreement": Part(
        "a step of bert-large/tiny on 2 ranks without and with the ranks' agreement, and the agreement alone",
        {"without": of(training_step, agreed=False), "with": of(training_step, agreed=True),
         "agreement alone": agreement_alone}, steps=20),
    "marks": Part(
        "a rank's heartbeat marks of a step", {"bare loop": of(marks, False), "marks": of(marks, True)}, "us"),
    "supervisors": Part(
        "processor time of the supervisors of 2 ranks, a second",
        {"bare loop": of(supervisors, 0), "2 supervisors": of(supervisors, 2)}, "ms", rounds=3),
    "heartbeats": Part(
        "rank 0's receipt of all ranks' heartbeats, of a core",
        {f"{ranks:,} ranks": of(beats_of, ranks) for ranks in (256, 2048, 8192)}, "%", rounds=1),
    "gloo_connections": Part(
        "open descriptors of a rank with two gloo groups of 32 ranks",
        {"full mesh": of(connections, "0"), "on demand": of(connections, "1")}, "descriptors", rounds=1),
    "chunked_loss": Part(
        "head and loss, 1,024 x 768 x 32,000, forward and backward",
        {"whole logits": of(head, "whole"), "chunks": of(head, "chunks"), "matmuls alone": of(head, "matmuls")}),
    "chunked_loss_memory": Part(
        "the same: memory at its peak",
        {"whole logits": of(peak, "whole"), "chunks": of(peak, "chunks")}, "MiB", rounds=3),
    "chunked_head": Part(
        "MiniLM's masked-lm head in eager and inside ONNX Runtime's graph",
        {f"{engine}, {'chunks' if chunked else 'whole'}": of(minilm_head, engine, chunked)
         for engine in ("eager", "ort") for chunked in (False, True)}),
    "data_order": Part(
        "200 micro batches of 64 samples from all over an epoch",
        {"permutation in memory": of(batches_of_order, False), "computed": of(batches_of_order, True)}),
    "data_order_memory": Part(
        "the order of 500 million samples: memory at its peak",
        {"permutation in memory": of(first_batch, False), "computed": of(first_batch, True)}, "MiB", rounds=1),
    "data_memory": Part(
        "memory of a process that reads all over a corpus (without mapped pages, which the kernel takes back)",
        {"100 MiB": of(corpus_in_memory, 100), "3,000 MiB": of(corpus_in_memory, 3000)}, "MiB", rounds=3),
    "data_speed": Part(
        "a step of bert-large/tiny on engine ort on one cached batch and on read ones",
        {"cached": of(fed_step, True), "read": of(fed_step, False)}, steps=5, rounds=15),
    "tokenizing": Part(
        "tokenizing 20 MB", {"datasets.map": of(tokenized_by, "datasets"), "ortlaunch": of(tokenized_by, "ortlaunch")},
        rounds=3),
    **{f"gradient_norm_zero_{stage}_{precision}": Part(
        f"DeepSpeed's overflow check and gradient norm of BERT-base on 2 ranks, ZeRO {stage}, {precision}",
        {"DeepSpeed's": of(norm_of_gradients, False, stage, precision),
         "ours": of(norm_of_gradients, True, stage, precision)}) for stage in (1, 2) for precision in ("fp32", "bf16")},
    **{f"torch_in_graph_{name}": Part(
        f"forward and backward of {name} on engine ort with torch inside the graph where it takes it",
        {base: of(torch_in_graph, name, base), "ort, auto": of(torch_in_graph, name, "auto")}, steps=5)
       for name, base in (("bert", "off"), ("llama", "off"), ("convolutions", "eager"), ("LSTM", "eager"),
                          ("GRU", "eager"))},
    **{f"attention_{name}": Part(
        f"a training step of {batch} x {length:,} tokens of a {kind} of width 512 on torch's fused attention",
        {engine: of(attending, name, engine) for engine in ("eager", "ort")}, steps=4)
       for name, (kind, length, batch, _) in ATTENTION.items()},
    **{f"recompute_{unit}": Part(
        f"gradient checkpointing: {shown}",
        {f"{engine}{', recomputed' if again else ''}": of(recomputed, engine, again, unit)
         for engine in ("eager", "inductor", "ort") for again in (False, True)}, unit, rounds=1)
       for unit, shown in (("MiB", "memory of activations"), ("s", "time of a step"))},
    **{f"precision_{family}": Part(
        f"the last loss of the tiny recipe of {family} at `engine.matmul_precision` highest and medium",
        {word: of(last_loss, recipe, word) for word in ("highest", "medium")}, "nats", rounds=1)
       for family, recipe in (("bert", "recipes/bert-large/tiny.yaml"), ("llama", "recipes/llama2-7b/tiny.yaml"))},
    "learns": Part(
        "guesses of held-out masked words: counts of words and of pairs, and bert-large/tiny after 2,000 steps",
        {"word pairs": of(held_out, "pairs"), "frequency": of(held_out, "frequency"), "model": of(held_out, "model")},
        "nats", rounds=1),
    "federated": Part(
        "four clients on devices, averaged, beside training in one place",
        {way: of(devices, way) for way in ("one place", "in turn", "federated")}, "nats", rounds=1),
    "doctor": Part(
        "a look at 100 names of hosts (a lab; root)",
        {"ssh HOST true": of(on_hosts, "ssh"), "ortlaunch doctor --hostfile": of(on_hosts, "doctor")}),
}  # fmt: skip


def be_side(part: Part, name: str) -> None:
    """Prepare a side, then act at each of its turns, without end; a second rank acts, too."""
    act = part.sides[name]()
    # Only rank 0 takes turns; a forked second rank follows it through their collectives.
    gate = Gate(1) if os.environ.get("RANK", "0") == "0" else None
    value = None
    while True:
        if gate is not None:
            gate.step(value)
        began = time.perf_counter()
        # Of acts with a result, the last one counts.
        for _ in range(part.steps):
            value = act()
        # An act without a result is measured by its time.
        if value is None:
            value = (time.perf_counter() - began) / part.steps * SECOND[part.unit]


def measure(name: str, rounds: int | None) -> str:
    """Print the table of a part."""
    part = PARTS[name]
    with tempfile.TemporaryDirectory() as folder:
        sides = {side: [sys.executable, __file__, name, "--side", side] for side in part.sides}
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        own = {
            "CONTEST_FOLDER": folder,
            "PYTHONPATH": path,
            "DS_ACCELERATOR": "cpu",
            "HF_HUB_OFFLINE": "1",
        }
        # Such as whole commands: they need no turn to warm up.
        is_long = part.rounds == 1
        times = race(sides, rounds or part.rounds, {**os.environ, **own}, warm_up=int(not is_long))
    base = times[next(iter(sides))].median
    lines = [
        f"{name}: {part.compares}",
        f"| | {part.unit}, median (least - most) | x | MiB of the process, at most |",
        "|---|---|---|---|",
    ]
    for side, found in times.items():
        least = min(found.turns)
        most = max(found.turns)
        # The base may be 0, such as of memory that an act adds.
        ratio = f"{found.median / base:.2f}" if base else ""
        cell = f"{found.median:.4g} ({least:.4g} - {most:.4g})"
        lines.append(f"| {side} | {cell} | {ratio} | {found.memory / 2**20:,.0f} |")
    return "\n".join(lines)


def main() -> None:
    """List the parts, measure some, or be one side of one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--rounds", type=int, help="turns of each side")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = list(PARTS) if options.names == ["all"] else options.names
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"no part {', '.join(unknown)}; parts: {', '.join(PARTS)}")
    if options.side:
        be_side(PARTS[names[0]], options.side)
    for name in names:
        print(measure(name, options.rounds), end="\n\n", flush=True)
    if not names:
        print(
            *(
                f"{name:28} {part.compares}: {', '.join(part.sides)}"
                for name, part in PARTS.items()
            ),
            sep="\n",
        )


if __name__ == "__main__":
    main()
