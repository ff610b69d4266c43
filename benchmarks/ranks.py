"""The step of several ranks against torch's ways, over gloo on one machine: time, memory of a rank, bytes on the wire.

    python benchmarks/ranks.py                    # two ranks with a thread each, MLP and GPT-2
    python benchmarks/ranks.py --models mlp --ranks 4

Every way has a process for each rank. The ways take turns, all ranks of one at a time, and the time is that of the
slower rank; beside it stands what a rank computes in all its threads, as steps wait for processors where there are more
ranks than these, or others use them. Bytes are those that the loopback interface carried, with all headers, per rank
and step; nothing else should use it meanwhile, so the fewest of several bursts count. Memory is that of all tensors
between two steps, and what a step adds to the resident pages.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cases import build, loss_of
from measuring import RESULTS, TORCH_TYPES, spread, write_results
from processes import FREEING, Memory, Process
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import amp_compiler as amp

OURS, SPLIT = "amp.training_step", "amp.training_step, shard: update"
WIDE = "amp.training_step, reduce: fp32"  # of two ranks over gloo the same as OURS
REDUCE = {OURS: {}, SPLIT: {"shard": "update"}, WIDE: {"precision": "fp32"}}
DDP, COMPILED, COMPRESSED, ZERO = "DDP", "DDP, torch.compile", "DDP, fp16_compress_hook", "ZeroRedundancyOptimizer"
FSDP = "FSDP2"
WAYS = (OURS, SPLIT, DDP, COMPILED, COMPRESSED, ZERO, FSDP)
COUNTERS = Path("/proc/net/dev")
BURSTS, LENGTH = 5, 4  # of steps, in which bytes are counted


class Variant:
    """One rank of one way to train with fused AdamW in BF16: call it for one step.

    Args:
        way: one of `WAYS`, or `WIDE`.
        name: of the model.
        bound: which batch.
        rank: of this process, of `ranks`, which meet at `port`.
        ranks: their number.
        port: of this machine.
        device: `cpu`.
    """

    def __init__(self, way: str, name: str, bound: str, rank: str, ranks: str, port: str, device: str) -> None:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
        dist.init_process_group("gloo", rank=int(rank), world_size=int(ranks))
        model, self.batch = build(name, bound, device)
        built = self._ours(model, way) if way in REDUCE else self._torchs(model, way, device)
        self.optimizer, self.run = built

    def __call__(self) -> object:
        return self.run()

    def idle(self) -> None:
        """What a loop leaves between two steps is all there is: the gradients of DDP stand in its buckets."""

    def _ours(self, model: nn.Module, way: str) -> tuple[Any, Callable[[], object]]:
        optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
        rules = {"version": 1, "extends": "default", "reduce": REDUCE[way]}
        step = amp.training_step(
            model, loss_of, optimizer, dtype="bf16", rules=rules, process_group=dist.group.WORLD
        )  # fmt: skip
        return optimizer, lambda: step(self.batch)

    def _torchs(self, model: nn.Module, way: str, device: str) -> tuple[Any, Callable[[], object]]:
        cast: Callable[[], Any] = lambda: torch.autocast(device, TORCH_TYPES["bf16"])  # noqa: E731
        trained: Any = torch.compile(model) if way == COMPILED else model
        if way == FSDP:
            policy, cast = MixedPrecisionPolicy(param_dtype=torch.bfloat16), contextlib.nullcontext
            for layer in layers(model):
                fully_shard(layer, mp_policy=policy)
            fully_shard(model, mp_policy=policy)
        else:
            trained = DistributedDataParallel(trained, gradient_as_bucket_view=True)
        if way == COMPRESSED:
            trained.register_comm_hook(None, fp16_compress_hook)
        parameters = list(model.parameters())
        if way == ZERO:
            optimizer: Any = ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, lr=1e-4, fused=True)
        else:
            optimizer = torch.optim.AdamW(parameters, 1e-4, fused=True)

        def step() -> object:
            optimizer.zero_grad(set_to_none=True)
            with cast():
                loss = loss_of(trained, self.batch)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return optimizer, step


def layers(model: nn.Module) -> Iterator[nn.Module]:
    """What FSDP2 shards one by one: the blocks of a transformer, the linear layers of an MLP."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            yield from module
        elif isinstance(module, nn.Sequential):
            yield from (one for one in module if any(True for _ in one.parameters()))


class Group:
    """All ranks of one way, each in a process."""

    def __init__(
        self, way: str, name: str, options: argparse.Namespace, stack: contextlib.ExitStack, freeing: bool = False
    ) -> None:
        port, settings = str(free_port()), FREEING if freeing else {}
        starts = [
            Process(
                Variant,
                (way, name, options.bound, str(rank), str(options.ranks), port),
                "cpu",
                None,
                options.cache,
                settings,
                wait=False,
            )
            for rank in range(options.ranks)
        ]
        self.ranks = [stack.enter_context(process) for process in starts]
        self.pool = stack.enter_context(ThreadPoolExecutor(options.ranks))
        self._all(lambda process: process.wait())

    def _all(self, order: Callable[[Process], Any]) -> list[Any]:
        return list(self.pool.map(order, self.ranks))

    def times(self, steps: int) -> list[tuple[float, float]]:
        """Milliseconds of that many steps in a row, each of the slowest rank, and what a rank computes in them."""
        each = zip(*self._all(lambda process: process.computing(steps)), strict=True)
        return [(max(took for took, _ in one), statistics.mean(computed for _, computed in one)) for one in each]

    def memory(self) -> Memory:
        """Of the rank that needs the most."""
        return max(self._all(lambda process: process.memory()), key=lambda one: one.peak_bytes)

    def sent(self) -> float:
        """Bytes that a rank sends in a step."""
        sizes = []
        for _ in range(BURSTS):
            before = carried()
            self.times(LENGTH)
            sizes.append((carried() - before) / LENGTH / len(self.ranks))
        return min(sizes)


def carried() -> int:
    """Bytes that the loopback interface has sent."""
    line = next(line for line in COUNTERS.read_text(encoding="ascii").splitlines() if line.strip().startswith("lo:"))
    return int(line.split()[9])


def free_port() -> int:
    """One that nobody listens at."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def taking_turns(groups: Mapping[str, Group], rounds: int, turn: int) -> dict[str, list[tuple[float, float]]]:
    """As `Group.times`, of each way; the first step of every turn, and the first round, do not count."""
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in groups}
    for number in range(rounds + 1):
        for way, group in groups.items():
            measured = group.times(1 + turn)[1:]
            times[way] += measured if number else []
    return times


def measured(name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each way; for its memory each has processes of its own, whose freed tensors leave them."""
    with contextlib.ExitStack() as stack:
        groups = {way: Group(way, name, options, stack) for way in options.ways}
        times = taking_turns(groups, max(options.steps // options.turn, 1), options.turn)
        sent = {way: group.sent() for way, group in groups.items()}
    rows = []
    for way in options.ways:
        with contextlib.ExitStack() as stack:
            memory = Group(way, name, options, stack, freeing=True).memory()
        middle, low, high = spread([took for took, _ in times[way]])
        ratios = [a / b for (a, _), (b, _) in zip(times[OURS], times[way], strict=True)] if OURS in times else []
        row = {"model": name, "bound": options.bound, "ranks": options.ranks, "variant": way}
        row |= {"step_ms": round(middle, 2), "step_ms_10": round(low, 2), "step_ms_90": round(high, 2)}
        row |= {"ours_to_this": round(statistics.median(ratios), 3) if ratios else None}
        row |= {"computing_ms": round(statistics.median(computed for _, computed in times[way]), 2)}
        row |= {"state_bytes": memory.state_bytes, "peak_bytes": memory.peak_bytes, "sent_bytes": round(sent[way])}
        rows.append(row)
    return rows


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["mlp", "gpt2"])
    parser.add_argument("--bound", default="gemm", help="gemm: the large batch; else the small one")
    parser.add_argument("--ways", nargs="+", choices=(*WAYS, WIDE), default=list(WAYS))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--turn", type=int, default=4, help="steps in a row that are timed")
    parser.add_argument("--json", type=Path, default=RESULTS / "ranks_cpu.json", help="where the numbers go")
    options = parser.parse_args()
    torch.set_num_threads(1)  # of each rank
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        options.cache = Path(folder)
        for name in options.models:
            for row in measured(name, options):
                rows.append(row)
                print(
                    f"{name:8} {row['variant']:32} {row['step_ms']:8.1f} ms, ours / it {row['ours_to_this']}"
                    f" computes {row['computing_ms']:8.1f} ms,"
                    f" {row['state_bytes'] / 1e6:8.1f} MB, peak {row['peak_bytes'] / 1e6:8.1f},"
                    f" sent {row['sent_bytes'] / 1e6:8.2f} MB",
                    flush=True,
                )
    options.device, options.threads = "cpu", 1
    write_results(options.json, "ranks", options, rows)


if __name__ == "__main__":
    main()
