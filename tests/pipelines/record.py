"""Writes the text of every stage of the toy models: `python tests/pipelines/record.py`.

It hooks into the functions that make up a step today. What comes after must give the same texts.
"""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from toys import TOYS

import amp_compiler as amp
import amp_compiler.forward.program as program
import amp_compiler.passes.capture.canonicalize as fx_normalize
import amp_compiler.passes.pipeline as pipeline
import amp_compiler.training.build as step_build
from amp_compiler.backends import BACKENDS
from amp_compiler.fx.text import format_fx
from amp_compiler.ops.cpu import update as cpu_update

STAGES: list[tuple[str, str]] = []


def note(name: str, graph_module: Any) -> None:
    STAGES.append((name, format_fx(graph_module)))


def around(module: Any, name: str, stage: str, pick: Any) -> None:
    real = getattr(module, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs)
        note(stage, pick(result, *args))
        return result

    setattr(module, name, wrapped)


def normalize(graph_module: Any) -> Any:
    n = fx_normalize
    retype = n.inline_regions(graph_module)
    note("inline_regions", graph_module)
    n.drop_type_checks(graph_module.graph)
    if retype:
        n.refresh(graph_module)
    note("drop_type_checks", graph_module)
    n.write_out_types(graph_module.graph)
    note("write_out_types", graph_module)
    n.merge_getitems(graph_module.graph)
    note("merge_results", graph_module)
    n.functionalize(graph_module.graph)
    n.drop_aliases(graph_module.graph)
    note("functionalize", graph_module)
    n.isolate_mutations(graph_module.graph)
    n.mark_volatile(graph_module.graph)
    graph_module.graph.lint()
    graph_module.recompile()
    note("isolate_mutations", graph_module)
    return graph_module


def planned(name: str, draft: Any) -> str:
    if name == "classify":
        lines = [
            f"{node}: {d.precision.value}" + (f"  by {d.rule}" if d.rule else "") + f"  ({d.reason})"
            for node, d in draft.decisions.items()
        ]
    elif name == "assign_precision":
        lines = [
            f"{label} {node}" + (f"  ({draft.notes[node]})" if draft.notes.get(node) else "")
            for node, label in draft.labels.items()
        ]
    else:
        text = pipeline.plan_of(draft).to_text().splitlines()
        lines = [line for line in text if line.startswith(("cast ", "read ", "model's own cast "))]
    return "".join(line + "\n" for line in lines)


def find_pass(name: str) -> Any:
    made = real_find_pass(name)

    def run(draft: Any) -> Any:
        result = made()(draft)
        STAGES.append((name, planned(name, result.subject)))
        return result

    return lambda: run


class Noted:
    def __init__(self, real: Any, stage: str) -> None:
        self.real, self.stage = real, stage

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = self.real(*args, **kwargs)

        def call(graph_module: Any) -> Any:
            result = run(graph_module)
            note(self.stage, result.subject)
            return result

        return call


real_find_pass = pipeline.find_pass
pipeline.find_pass = find_pass
step_build.normalize = program.normalize = normalize
around(step_build, "capture_module", "capture", lambda r, *a: r.graph_module)
around(program, "apply_plan", "apply_plan", lambda r, g, p: g)
around(step_build, "place_weights", "place_weights", lambda r, g, *a: g)
around(step_build, "insert_upcasts", "restore_upcasts", lambda r, g, *a: g)
around(step_build, "_separate_buffers", "separate_buffers", lambda r, c: c.graph_module)
for module, attribute, stage in (
    (program, "TypeBackward", "type_backward"), (program, "Legalize", "legalize"),
    (program, "MultiplyConvolutions", "multiply_convolutions"), (step_build, "Differentiate", "differentiate"),
    (step_build, "FoldLossScale", "fold_loss_scale"), (step_build, "SimplifyCasts", "simplify_casts"),
    (step_build, "FuseUpdate", "fuse_update"),
):  # fmt: skip
    setattr(module, attribute, Noted(getattr(module, attribute), stage))
real_mark, real_name = program._mark_backward, step_build._name_modules
GRAPHS: list[Any] = []


def mark_backward(graph: Any, plan: Any) -> None:
    real_mark(graph, plan)
    note("mark_backward", graph.owning_module)


def name_modules(graph: Any) -> None:
    real_name(graph)
    note("name_modules", graph.owning_module)


program._mark_backward, step_build._name_modules = mark_backward, name_modules
cpu_update.most_inner = lambda: 512  # else it says what is fast on this processor
pieces = iter(())


def build(piece: Any, inputs: Any, exact: bool) -> Any:
    note("cut_step, a piece", piece)
    return piece.forward


BACKENDS["inductor"] = replace(BACKENDS["inductor"], build=build)


def written(stages: list[tuple[str, str]]) -> str:
    before, text = "", []
    for name, stage in stages:
        text.append(f"=== {name}" + (", nothing changed\n" if stage == before else f"\n{stage}"))
        before = stage
    # places in files move with every edit of these
    return re.sub(r"(toys\.py|\.yaml):\d+", r"\1", "".join(text))


def main() -> None:
    for name, toy in TOYS.items():
        STAGES.clear()
        step = toy.step(amp)
        torch.manual_seed(1)
        batch = toy.batch()
        for _ in range(toy.options.get("accumulate", 1)):
            step(*batch)
        path = Path(__file__).parent / f"{name}.txt"
        path.write_text(written(STAGES), encoding="utf-8")
        print(name, len(STAGES), path.stat().st_size)


main()
