"""DeepSpeed's ZeRO 1/2 optimizer step with its own and with ortlaunch's overflow check and gradient norm.

    python benchmarks/deepspeed_step.py [--parameters bert-base|small] [--rounds 7] [--threads N]

Two gloo ranks on this machine, BERT's parameter shapes, random gradients; both ways take turns on the same
gradients in the same two processes. Status 1 where check + norm of bert-base are less than 5 times faster, or a norm
is more than 1e-6 off float64.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT, RANKS = Path(__file__).parents[1], 2
FACTOR, ERROR = 5.0, 1e-6
SIZES: dict[str, dict[str, int]] = {
    "bert-base": {},
    "small": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128,
              "vocab_size": 1000},
}  # fmt: skip
WAYS = ("stock", "ours")


def seconds(act: Callable[[], Any]) -> float:
    """Wall-clock of one call that all ranks begin together."""
    import torch.distributed as dist

    dist.barrier()
    started = time.perf_counter()
    act()
    return time.perf_counter() - started


def bert(size: str) -> Any:
    """A module with BERT's parameters by name, random; its loss has a fixed random gradient for each."""
    import torch
    import transformers

    with torch.device("meta"):
        shapes = transformers.BertForPreTraining(transformers.BertConfig(**SIZES[size]))
    module, generator = torch.nn.Module(), torch.Generator().manual_seed(torch.distributed.get_rank())
    for name, parameter in shapes.named_parameters():
        shape = parameter.shape
        module.register_parameter(name.replace(".", "_"), torch.nn.Parameter(0.02 * torch.randn(shape)))
        module.register_buffer("to_" + name.replace(".", "_"), 1e-3 * torch.randn(shape, generator=generator))
    module.forward = lambda: sum((p * module.get_buffer(f"to_{n}")).sum() for n, p in module.named_parameters())
    return module


def deepspeed_engine(size: str, stage: int, precision: str) -> Any:
    """DeepSpeed around the parameters, with AdamW in a group with and one without weight decay."""
    import deepspeed
    import torch

    module, groups = bert(size), ([], [])  # type: ignore[var-annotated]
    for name, parameter in module.named_parameters():
        groups["bias" in name or "LayerNorm" in name].append(parameter)
    optimizer = torch.optim.AdamW(
        [{"params": groups[0], "weight_decay": 0.01}, {"params": groups[1], "weight_decay": 0.0}], lr=1e-5, fused=True
    )
    config = {
        "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0, "steps_per_print": 10**9,
        "zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": precision == "bf16"},
    }  # fmt: skip
    return deepspeed.initialize(model=module, optimizer=optimizer, config=config, dist_init_required=False)[0]


def use(way: str, optimizer: Any) -> None:
    """Switch the optimizer to one way."""
    from ortlaunch.worker.deepspeed.gradient_norm import fuse_gradient_norm, restore

    restore(optimizer)
    applied = fuse_gradient_norm(optimizer) if way == "ours" else None
    if applied and not applied.applied:
        raise SystemExit(f"not applied: {applied.why}")


def in_double(optimizer: Any) -> float:
    """The gradients' norm over all ranks, in float64."""
    import torch

    gradients = [gradient for group in optimizer.averaged_gradients.values() for gradient in group]
    total = torch.stack([gradient.double().square().sum() for gradient in gradients]).sum()
    torch.distributed.all_reduce(total)
    return float(total.sqrt())


def measure(size: str, stage: int, precision: str, rounds: int) -> dict[str, Any]:
    """Seconds of check, norm and whole step by way, and the norm's relative error."""
    engine = deepspeed_engine(size, stage, precision)
    optimizer = engine.optimizer
    took: dict[str, dict[str, list[float]]] = {
        part: {way: [] for way in WAYS} for part in ("check", "norm", "check + norm", "step")
    }
    errors: dict[str, float] = dict.fromkeys(WAYS, 0.0)
    for number in range(rounds + 1):
        for stepping in WAYS:
            engine.backward(engine())
            exact, times = in_double(optimizer), {}
            for way in WAYS if number % 2 else WAYS[::-1]:
                use(way, optimizer)
                check = seconds(lambda: optimizer.check_overflow(partition_gradients=optimizer.partition_gradients))
                norms: list[Any] = []
                norm = seconds(lambda norms=norms: norms.append(float(optimizer.scaled_global_norm())))
                errors[way] = max(errors[way], abs(norms[0] / exact - 1))
                times[way] = {"check": check, "norm": norm, "check + norm": check + norm}
            use(stepping, optimizer)
            times[stepping]["step"] = seconds(engine.step)
            if number:  # the first round allocates
                for way, parts in times.items():
                    for part, value in parts.items():
                        took[part][way].append(value)
    engine.destroy()
    medians = {part: {way: statistics.median(values) for way, values in ways.items()} for part, ways in took.items()}
    checked = "yes" if optimizer.check_grad_overflow else "no"
    return {"stage": stage, "precision": precision, "checked": checked, "seconds": medians, "error": errors}


def rank(arguments: argparse.Namespace) -> None:
    """One of the two processes, with memory as in a run (allocator.py)."""
    from ortlaunch.worker.engine.allocator import keep_freed_memory

    keep_freed_memory(os.environ)
    import deepspeed
    import torch

    torch.set_num_threads(arguments.threads)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else half a minute to compile
    torch.distributed.init_process_group("gloo")
    found = [
        measure(arguments.parameters, stage, precision, arguments.rounds)
        for stage in (1, 2)
        for precision in ("fp32", "bf16")
    ]
    if torch.distributed.get_rank() == 0:
        Path(arguments.write).write_text(json.dumps(found), encoding="utf-8")
    torch.distributed.destroy_process_group()


def launched(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """What rank 0 of two measured."""
    with tempfile.TemporaryDirectory() as folder:
        write = str(Path(folder) / "found.json")
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
        options = [f"--parameters={arguments.parameters}", f"--rounds={arguments.rounds}"]
        command = [*launcher, __file__, *options, f"--threads={arguments.threads}", f"--write={write}"]
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
        result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if result.returncode:
            raise SystemExit(result.stdout[-2000:] + result.stderr[-4000:])
        found: list[dict[str, Any]] = json.loads(Path(write).read_text(encoding="utf-8"))
        return found


def rows(found: list[dict[str, Any]]) -> list[str]:
    """The table: milliseconds stock -> ours, ratio."""
    lines = [f"{'ZeRO':4} {'':4} {'part':12} {'stock ms':>9} {'ours ms':>9} {'ratio':>6}  relative error of the norm"]
    for case in found:
        for part, ways in case["seconds"].items():
            error = f"stock {case['error']['stock']:.0e}, ours {case['error']['ours']:.0e}" if part == "norm" else ""
            note = {"check": f"in DeepSpeed's step: {case['checked']}", "norm": error}.get(part, "")
            stock, ours = ways["stock"], ways["ours"]
            head = f"{case['stage']:<4} {case['precision']:4} {part:12}"
            lines.append(f"{head} {stock * 1e3:9.2f} {ours * 1e3:9.2f} {stock / ours:6.1f}  {note}".rstrip())
    return lines


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", choices=SIZES, default="bert-base")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=max(1, (os.cpu_count() or 1) // RANKS), help="of each rank")
    parser.add_argument("--write", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.write:
        rank(arguments)
        return 0
    found = launched(arguments)
    print(f"{arguments.parameters}, {RANKS} ranks x {arguments.threads} threads, medians of {arguments.rounds} rounds")
    print(*rows(found), sep="\n")
    slow = [case for case in found if _ratio(case, "check + norm") < FACTOR and arguments.parameters == "bert-base"]
    wrong = [case for case in found if case["error"]["ours"] > ERROR]
    for case in slow:
        print(f"less than {FACTOR:.0f} times faster: ZeRO {case['stage']}, {case['precision']}")
    for case in wrong:
        print(f"more than {ERROR:.0e} off float64: ZeRO {case['stage']}, {case['precision']}")
    return int(bool(slow or wrong))


def _ratio(case: dict[str, Any], part: str) -> float:
    ways = case["seconds"][part]
    ratio: float = ways["stock"] / ways["ours"]
    return ratio


if __name__ == "__main__":
    sys.exit(main())
