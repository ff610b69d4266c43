"""Planning and rewriting of the benchmark's models, for `plan.py`."""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable
from typing import Any

import cases

from amp_compiler.forward.capture import capture_model
from amp_compiler.forward.program import normalize, plan_captured, rewrite
from amp_compiler.forward.settings import Settings
from amp_compiler.ir.dtypes import DType
from amp_compiler.passes.pipeline import Stages
from amp_compiler.policy.rules import RuleSet

LOW = {"bf16": DType.BFLOAT16, "fp16": DType.FLOAT16}


def best_of(repeats: int, prepare: Callable[[], Any], run: Callable[[Any], Any]) -> tuple[float, Any]:
    """The fewest processor seconds of `run`, and its last result; what `prepare` makes for it does not count."""
    seconds = []
    for _ in range(repeats):
        prepared = prepare()
        gc.collect()
        start = time.process_time()
        result = run(prepared)
        seconds.append(time.process_time() - start)
    return min(seconds), result


def measure_model(name: str, rules: RuleSet, dtype: str, device: str, repeats: int) -> dict[str, Any]:
    """Planning and rewriting of the captured forward of one model, without the capture itself.

    Args:
        name: one of `cases.NAMES`.
        rules: what decides.
        dtype: a key of `LOW`.
        device: where the model and its batch are.
        repeats: runs of each, of which the best counts.
    """
    model, batch = cases.build_for_inference(name, cases.LARGE, device)
    captured, _ = capture_model(model, (), batch, None)
    settings = Settings(rules, dtype)
    normalize(captured.graph_module, settings)
    nodes = sum(node.op == "call_function" for node in captured.graph_module.graph.nodes)
    seconds, plan = best_of(repeats, lambda: captured, lambda one: plan_captured(one, settings, LOW[dtype]))
    rewriting, _ = best_of(
        repeats,
        lambda: copy.deepcopy(captured.graph_module),
        lambda graph: rewrite(graph, plan, settings, Stages()),
    )
    return {
        "rules": rules.name, "graph": name, "nodes": nodes, "seconds": seconds, "rewrite_seconds": rewriting,
        "us_per_node": (seconds + rewriting) / nodes * 1e6, "casts": plan.cast_count, "cast_bytes": plan.cast_bytes,
    }  # fmt: skip
