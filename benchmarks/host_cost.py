"""Host work of a replayed step: what the processor does before and after a CUDA graph is launched. Needs no GPU.

    python benchmarks/host_cost.py          # a call; steps of transformers of 28 and 148 parameters, an MLP of 1,000
    python benchmarks/host_cost.py --models blocks-2 --profile

Ours runs with a stand-in for CUDA graphs whose replay does nothing, so that what is left is the host's: checks of
modules, optimizers and addresses, the copy of the batch, and the copy of the loss.

`torch.compile` cannot record CUDA graphs here. It runs the parts that `reduce-overhead` has as well, with empty
kernels: Dynamo's guards, AOTAutograd's wrappers and autograd around one forward and one backward that return tensors
made beforehand; behind them `zero_grad` and `AdamW(fused=True)`. Not in it: what `reduce-overhead` does to replay
(addresses of inputs compared, inputs copied), clipping and the gradient scaler, which ours contains. So it is a floor.

`call-300` is a call of a compiled module of 300 layers in eval mode, whose graph returns a tensor made beforehand:
Dynamo's guards, and in ours what `amp.compile` does around them.

Times are of this process alone (CPU time), in microseconds a step; every number is the median of some dozen runs of ten
steps, and beside it the smallest: what other processes leave of the caches is in the median.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measuring import RESULTS, write_results
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import unset_fake_temporarily

import amp_compiler as amp
from amp_compiler.backends import BACKENDS, eager

STEPS = 10  # in one run
WIDTH = 16


class StandIn:
    """In the place of CUDA graphs: the replay does nothing."""

    def refuses(self, device: torch.device) -> str:
        """Nothing."""
        return ""

    def warm_up(self, run: Callable[..., Sequence[Any]], inputs: Sequence[Any]) -> Sequence[Any]:
        """The step itself."""
        return run(*inputs)

    def capture(
        self, run: Callable[..., Sequence[Any]], inputs: Sequence[Any]
    ) -> tuple[Callable[[], None], Sequence[Any]]:
        """Results that stay."""
        outputs = run(*inputs)
        return (lambda: None), outputs


class Block(nn.Module):
    """A transformer's block, with biases: 12 parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Of [batch, tokens, width]."""
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0])
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def blocks(layers: int) -> nn.Module:
    """A transformer of 12 parameters a layer, and 4."""
    return nn.Sequential(*[Block(WIDTH) for _ in range(layers)], nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8))


def mlp(layers: int) -> nn.Module:
    """An MLP of two parameters a layer."""
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(layers)])


KINDS = {"blocks": blocks, "mlp": mlp}


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Cross entropy of every token."""
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def ours(model: nn.Module, dtype: str, graph: bool) -> tuple[Callable[..., Any], Callable[[], str]]:
    """A training step with clipping, and in FP16 with a dynamic loss scale; and how it ran."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    step = amp.training_step(model, loss_fn, optimizer, dtype=dtype, clip_norm=1.0)
    if graph:
        step._state.graphs.api = StandIn()
    return step, lambda: step.execution


def torchs(model: nn.Module) -> Callable[..., Any]:
    """Forward, backward and a fused optimizer behind `torch.compile`, with empty kernels."""
    compiled = torch.compile(loss_fn, backend=aot_autograd(fw_compiler=_empty, bw_compiler=_empty))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss: Tensor = compiled(model, x, y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    return step


def _empty(graph_module: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
    """A graph whose results are made once: those that are inputs are passed on, the others are new aliases."""
    *_, output = graph_module.graph.nodes
    inputs = {node: place for place, node in enumerate(graph_module.graph.find_nodes(op="placeholder"))}
    results = output.args[0]
    own = [_made(node) if isinstance(node, fx.Node) and node not in inputs else None for node in results]

    def run(values: list[Any]) -> list[Any]:
        returned = [
            one.detach() if one is not None else values[inputs[node]] if node in inputs else None
            for node, one in zip(results, own, strict=True)
        ]
        values.clear()
        return returned

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _made(node: fx.Node) -> Tensor | None:
    value = node.meta["val"]
    if not isinstance(value, Tensor):
        return None
    with unset_fake_temporarily():
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).zero_()


def _nothing(graph_module: fx.GraphModule, *_: Any) -> Callable[..., Any]:
    """A graph without gradients whose results are made once."""
    results = [_made(node) for node in graph_module.graph.output_node().args[0]]
    return lambda *inputs: results


def called(layers: int, runs: int) -> list[dict[str, Any]]:
    """A call of a module of so many layers, by its guards alone."""
    build, x = BACKENDS["inductor"], torch.randn(2, WIDTH)
    BACKENDS["inductor"] = replace(build, build=_nothing)
    models = [mlp(layers).eval() for _ in range(2)]
    ways = {
        "amp.compile": amp.compile(models[0], dtype="bf16"),
        "torch.compile": torch.compile(models[1], backend=aot_autograd(fw_compiler=_empty, bw_compiler=_empty)),
    }
    rows = []
    with torch.no_grad():
        for variant, call in ways.items():
            for _ in range(3):
                call(x)
            median, least = microseconds(lambda call=call: call(x), runs)
            parameters = sum(1 for _ in models[0].parameters())
            rows.append({"model": f"call-{layers}", "parameters": parameters, "variant": variant,
                         "median_us": median, "least_us": least})  # fmt: skip
    BACKENDS["inductor"] = build
    return rows


def microseconds(step: Callable[[], Any], runs: int) -> tuple[float, float]:
    """Median and least CPU time of a step, one run behind the other, as in a training that does nothing else."""
    times = []
    for _ in range(runs + 2):
        start = time.process_time()
        for _ in range(STEPS):
            step()
        times.append((time.process_time() - start) / STEPS * 1e6)
    return statistics.median(times[2:]), min(times[2:])


def measured(name: str, runs: int, profile: bool) -> list[dict[str, Any]]:
    """One row for each way to run a model."""
    kind, _, layers = name.partition("-")
    if kind == "call":
        return called(int(layers), runs)
    x = torch.randn(2, 8, WIDTH)
    y = torch.randint(0, 8, (2, 8))
    steps: dict[str, Callable[[], Any]] = {}
    executions: dict[str, Callable[[], str]] = {}
    for variant, dtype in (("ours, BF16", "bf16"), ("ours, FP16", "fp16")):
        step, executions[variant] = ours(KINDS[kind](int(layers)), dtype, graph=True)
        steps[variant] = lambda step=step: step(x, y)
    model = KINDS[kind](int(layers))
    compiled = torchs(model)
    steps["torch.compile"] = lambda: compiled(x, y)
    for step in steps.values():
        for _ in range(6):
            step()
    for variant, execution in executions.items():
        if execution() != "as one graph, replayed as a CUDA graph":
            raise SystemExit(f"{name}: {variant} is {execution()}")
    if profile:
        with cProfile.Profile() as profiler:
            for _ in range(300):
                steps["ours, BF16"]()
        pstats.Stats(profiler).sort_stats("tottime").print_stats(20)
    parameters = sum(1 for _ in model.parameters())
    rows = []
    for variant, step in steps.items():
        median, least = microseconds(step, runs)
        rows.append(
            {"model": name, "parameters": parameters, "variant": variant, "median_us": median, "least_us": least}
        )
    return rows


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["call-300", "blocks-2", "blocks-12", "mlp-500"],
                        help="KIND-LAYERS")  # fmt: skip
    parser.add_argument("--runs", type=int, default=40, help=f"of {STEPS} steps each")
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    parser.add_argument("--json", type=Path, default=RESULTS / "host_cost_cpu.json", help="where the numbers go")
    options = parser.parse_args()
    torch.set_num_threads(1)
    # What Inductor would compile runs node by node: the kernels are not looked at.
    BACKENDS["inductor"] = replace(BACKENDS["inductor"], build=eager.build)
    rows: list[dict[str, Any]] = []
    print(f"{'model':12} {'parameters':>10} {'':16} {'median':>9} {'least':>9}   microseconds of CPU time a step")
    for name in options.models:
        for row in measured(name, options.runs, options.profile):
            rows.append(row)
            print(
                f"{row['model']:12} {row['parameters']:10,} {row['variant']:16}"
                f" {row['median_us']:9,.0f} {row['least_us']:9,.0f}",
                flush=True,
            )
    options.device, options.steps, options.threads = "cpu", STEPS * options.runs, 1
    write_results(options.json, "host_cost", options, rows)


if __name__ == "__main__":
    main()
