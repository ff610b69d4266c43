"""Golden text of the passes: `tests/golden/<pass>/<case>.txt`, what goes in and, behind `---`, what comes out.

For `classify`: rules, a graph, and the decisions. For ONNX_PLAN: a graph, perhaps ranges or the target with its opset,
and the graph. For `assign_precision` and `place_casts`: a graph, perhaps decisions, and the outcome; lines
`node: precision` after `--- decisions` override the small table in `planning.py`. For all others: an FX graph, and the
graph. `AMP_REGENERATE=1 pytest tests/passes/test_golden.py` writes what is expected anew: read the diff.
"""

import functools
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fx_reader import parse_fx
from graph_reading import parse_graph
from passing import run_checked
from planning import FP16, draft_of, finish
from ruamel.yaml import YAML

from amp_compiler.fx.captured import captured_from_graph_module
from amp_compiler.fx.lower import lower
from amp_compiler.ir.arithmetic import Fp8
from amp_compiler.ir.dtypes import DType
from amp_compiler.ir.facts import Magnitudes
from amp_compiler.ir.plan import PlannedNode, PrecisionPlan
from amp_compiler.ops.cpu import update as cpu_update
from amp_compiler.ops.loss_scale import StaticLossScale
from amp_compiler.ops.update.operators import CHECK, COMMIT, OPERATORS
from amp_compiler.passes import PASSES, find_pass
from amp_compiler.passes.base import Pass
from amp_compiler.passes.pipeline import ONNX_CAPTURE, ONNX_PLAN
from amp_compiler.passes.plan.assign_precision import AssignPrecision
from amp_compiler.passes.plan.classify import Classify
from amp_compiler.passes.plan.make_plan import make_plan, plan_of
from amp_compiler.passes.spec import SPECS, complaint
from amp_compiler.passes.step.reduce_gradients import Bucket, SharedGradient
from amp_compiler.passes.step.trace_update import StateTensor, TracedUpdate
from amp_compiler.passes.step.update_group import UpdateGroup
from amp_compiler.planner.draft import Draft
from amp_compiler.policy.loader import load_rules
from amp_compiler.policy.rules import Context
from amp_compiler.policy.targets import load_target

GOLDEN = Path(__file__).parents[1] / "golden"
MARK, DECISIONS, GRAPH, RANGES = "---\n", "--- decisions\n", "--- graph\n", "--- ranges\n"
TARGET = "--- target\n"
RULES = load_rules("default")


def running_mean(masters: Any, grads: Any, states: Any, rates: Any) -> Any:
    """An optimizer's own code, with its writes."""
    weight, mean = masters[0].clone(), states[0].clone()
    mean.lerp_(grads[0], 0.1)
    weight.sub_(mean * rates[0])
    return [weight], [mean]


def planned(text: str) -> PrecisionPlan:
    return make_plan(lower(captured_from_graph_module(parse_fx(text))), RULES, DType.BFLOAT16)


def backward(name: str, gradient: str) -> PrecisionPlan:
    node = PlannedNode(name, "aten.linear", "matmul", "", "low", "my.yaml:3", "asked for", "low", backward=gradient)
    return PrecisionPlan("bf16", "mine", "cpu", (node,), ())


def computing(name: str, math: str = "fp32") -> PrecisionPlan:
    says = {"math": math, "math_rule": "my.yaml:3"}
    node = PlannedNode(name, "aten.gelu", "elementwise", "", "low", "", "asked for", "low", **says)
    return PrecisionPlan("bf16", "mine", "cpu", (node,), ())


SGD = UpdateGroup("sgd", ("a",), (), (("momentum_buffer", True), ("low_weights", False)), 5, (False, False), True)
MEAN = TracedUpdate("Mean", ("a",), ("b",), (StateTensor("mean", 0, (4, 4), (4, 1), torch.float32),), 1, running_mean)
UPDATE: dict[str, Any] = {"updated": ("a",), "results": 1, "buffers": (), "scale": StaticLossScale(8.0)}
SHARED = (  # the second rank alone has a gradient of `d`
    SharedGradient("a", torch.float32, (1, 0)), SharedGradient("c", torch.bfloat16, (0,)),
    SharedGradient("b", torch.float32, (0, 1)), SharedGradient("d", torch.float32, (0,)),
)  # fmt: skip
REDUCE: dict[str, Any] = {
    "updated": ("a", "b", "c"), "results": 1, "buffers": ("mean", "count"), "shared": SHARED, "bucket_bytes": 128
}  # fmt: skip
SPLIT = (  # of which another rank alone has a gradient of `d`
    Bucket(torch.bfloat16, (SharedGradient("c", torch.bfloat16, (0,)), SharedGradient("d", torch.bfloat16, (0, 1)))),
    Bucket(torch.bfloat16, (SharedGradient("a", torch.bfloat16, (0, 1)),)),
)
KERNELS = (CHECK, COMMIT, *OPERATORS.values())
# Options of the passes, by pass or by case; a function gets the text of the case.
OPTIONS: dict[str, Any] = {
    "name_modules": {"root": "model"},
    "apply_plan": lambda text: {"plan": planned(text)},
    "apply_plan/a_rule_lets_it_compute_in_fp32": {"plan": computing("gelu")},
    "apply_plan/a_rule_gives_gradients_a_type": {"plan": backward("linear", "fp32")},
    "apply_plan/no_gradients_are_asked_for": {"plan": backward("linear", "fp32"), "differentiable": False},
    "open_cells": {"low": torch.bfloat16},
    "open_cells/in_fp16": {"low": torch.float16},
    "type_backward": {"ops": RULES.ops},
    "type_backward/a_cast_of_its_own_for_weights_kept_low": {"ops": RULES.ops, "past_weights": False},
    "widen_math": {"ops": RULES.ops},
    "scale_products": {"plan": computing("linear", Fp8().short)},
    "scale_products/scales_of_steps_before_are_kept": {
        "plan": computing("linear", Fp8(scaling="delayed", history=4).short), "keeps_amaxes": True
    },
    "legalize": {"ops": RULES.ops},
    "hoist_weight_casts": {"weights": ("w",)},
    "separate_buffers": {"buffers": ("mean",)},
    "protect_buffers": {"protected": ("count", "mean")},
    "protect_buffers/buffers_that_are_read": {},
    "split_complex": {"trained": ("w",)},
    "split_complex/what_is_real_or_not_trained_is_left_alone": {"trained": ("r",)},
    "place_weights": {"stored": {"w": torch.float32}, "trained": ("w",)},
    "place_weights/a_master_of_a_16_bit_weight": {"stored": {"w": torch.bfloat16}, "trained": ("w",)},
    "place_weights/the_fp32_value_of_a_weight_without_a_master": {
        "stored": {"w": torch.bfloat16}, "trained": ("w",), "masters": False
    },
    "synchronize_norms": {"group": "0"},
    "synchronize_norms/a_rank_by_itself_is_left_alone": {},
    "differentiate": {"wrt": ("a",)},
    "differentiate/a_wide_weight_is_cast_again": {"wrt": ("w_wide",)},
    "differentiate/what_the_loss_does_not_depend_on_has_none": {"wrt": ("a", "b")},
    "differentiate/a_typed_op_brings_its_own_types": {"wrt": ("a", "b")},
    "take_gradients": {"owners": {"w_master": "w"}},
    "take_gradients/no_gradient_is_announced": {"owners": {}},
    "sum_gradients": {"owner": ("w", "w")},
    "sum_gradients/one_gradient_a_weight": {"owner": ("a", "b")},
    "sum_gradients/no_gradient_here": {"owner": ("a",), "absent": ("b",)},
    "gather_gradients": {"updated": ("a",), "gather": "use"},
    "gather_gradients/a_batch_before_the_last_is_added": {"updated": ("a",), "gather": "add"},
    "gather_gradients/one_batch_is_left_alone": {"updated": ("a",)},
    "reduce_gradients": {**REDUCE, "group": "0"},
    "reduce_gradients/all_in_fp32": {**REDUCE, "group": "0", "reduce_in_fp32": True, "broadcast_buffers": False},
    "reduce_gradients/a_bucket_goes_between_the_messages_of_norms": {  # another rank makes that of `b` behind one more
        "updated": ("a", "b", "c"), "results": 1, "buffers": (), "group": "0", "bucket_bytes": 16, "shared": tuple(
            SharedGradient(name, torch.float32, (0,), behind) for name, behind in (("a", 1), ("b", 3), ("c", 3))
        ),
    },
    "reduce_gradients/one_process_is_left_alone": {"updated": ("a",), "results": 1, "buffers": ()},
    "reduce_gradients/a_batch_that_is_only_gathered_is_left_alone": {
        "updated": ("a",), "results": 1, "buffers": (), "group": "0", "gather": "add"
    },
    "shard_update": {"updated": ("a", "b", "c"), "group": "0", "ranks": 2, "buckets": SPLIT},
    "shard_update/one_process_is_left_alone": {"updated": ("a", "b", "c")},
    "gather_weights": {"groups": (replace(SGD, masters=("a", "b"), ranks=2),), "group": "0"},
    "gather_weights/masters_that_are_whole_are_left_alone": {"groups": (SGD,), "group": "0"},
    "place_operands": {"trained": ("w",)},
    "fuse_update/parts_of_masters_and_a_norm_over_all_ranks": {
        **UPDATE, "updated": ("a", "b"), "groups": (replace(SGD, ranks=2), replace(SGD, masters=("b",))),
        "clip_norm": 1.0, "parts": 1, "group": "0",
    },
    "fold_loss_scale/a_batch_that_has_a_weight": {"weighs": True},
    "fuse_update": {**UPDATE, "groups": (SGD,), "clip_norm": 1.0},
    "fuse_update/batches_that_have_weights": {**UPDATE, "groups": (SGD,), "weighs": True},
    "fuse_update/an_optimizers_own_code_and_a_16_bit_copy": {**UPDATE, "groups": (MEAN,)},
    "recompute_cheap": {"devices": ("cpu",), "least": 0, "most": 10.0},
    "recompute_cheap/a_cpu_is_left_alone": {},
    "recompute_cheap/no_time_is_spent_where_none_is_given": {"devices": ("cpu",), "least": 0, "most": 0.0},
    "defer_gradients": {"most_inner": 64, "kernels": KERNELS},
    "cut_step": {"kernels": KERNELS},
    "cut_step/without_kernels_the_operators_are_opened": {"kernels": ()},
}  # fmt: skip


def classify(text: str) -> str:
    rules, _, graph = text.partition(GRAPH)
    draft = Draft(parse_graph(graph), load_rules(YAML(typ="safe").load(rules)), Context(FP16))
    decisions = Classify()(draft).subject.decisions
    return "".join(
        f"{name}: {decision.precision.value}"
        + (f" math={decision.math.short}" if decision.math else "")
        + (f"  by {decision.rule}" if decision.rule else "")
        + f"  ({decision.reason})\n"
        for name, decision in decisions.items()
    )


def decided(text: str) -> Draft:
    graph, _, lines = text.partition(DECISIONS)
    return draft_of(graph, dict(line.split(": ") for line in lines.splitlines() if line))


def assign(text: str) -> str:
    draft = AssignPrecision()(decided(text)).subject
    notes = ((name, label, draft.notes.get(name)) for name, label in draft.labels.items())
    return "".join(f"{label:<5}{name}" + (f"  ({note})\n" if note else "\n") for name, label, note in notes)


def place(text: str) -> str:
    lines = plan_of(finish(decided(text))).to_text().splitlines(keepends=True)
    return "".join(line for line in lines if line.startswith(("cast ", "read ", "model's own cast "))) or "no casts\n"


def pin(name: str, text: str) -> str:
    """The graph behind a pass of ONNX_PLAN, for FP16 and the preset `default`; magnitudes stand behind the graph."""
    text, _, target = text.partition(TARGET)
    graph, _, lines = text.partition(RANGES)
    rows = (line.split(": ") for line in lines.splitlines())
    ranges = {key: Magnitudes(*map(float, numbers.split())) for key, numbers in rows}
    draft = Draft(parse_graph(graph), RULES, Context(FP16, "onnx"), ranges=ranges)
    assert draft.to_text() == graph, "the text does not read back as itself"
    options: dict[str, Any] = {}
    if target:
        provider, opset = target.split()
        options = {"target": load_target(provider), "versions": dict.fromkeys(draft.graph.nodes, int(opset))}
    cls = find_pass(name)
    run = cls(**{key: value for key, value in options.items() if key in cls.__dataclass_fields__})
    result = run(draft).subject
    again = run(result)
    assert not again.modified and again.subject is result
    return result.to_text()


RUNNERS: dict[str, Callable[[str], str]] = {
    "classify": classify,
    "assign_precision": assign,
    "place_casts": place,
    **{name: functools.partial(pin, name) for name in ONNX_PLAN.names},
}
FILES = sorted(GOLDEN.glob("*/*.txt"))


def pass_of(case: str, text: str) -> Pass[Any]:
    name = case.partition("/")[0]
    options = OPTIONS.get(case, OPTIONS.get(name, {}))
    return find_pass(name)(**(options(text) if callable(options) else options))


@pytest.fixture(autouse=True)
def any_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which operators run natively depends on the machine; the text does not."""
    monkeypatch.setattr(cpu_update, "most_inner", lambda: 512)


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_golden(path: Path) -> None:
    inputs, _, expected = path.read_text(encoding="utf-8").rpartition(MARK)
    name = path.parent.name
    if name in RUNNERS:
        matches = RUNNERS[name](inputs)
    else:
        matches, result = run_checked(pass_of(f"{name}/{path.stem}", inputs), inputs)
        assert result.modified is (matches != inputs)
    if os.environ.get("AMP_REGENERATE"):
        path.write_text(inputs + MARK + matches, encoding="utf-8")
        return
    assert matches == expected


def test_every_pass_has_golden_files() -> None:
    assert {path.parent.name for path in FILES} == {folder.name for folder in GOLDEN.iterdir()} == set(PASSES)


@pytest.mark.parametrize("name", sorted(set(PASSES) - {"classify", "assign_precision", "place_casts"}))
def test_every_pass_has_a_case_that_changes_and_one_that_is_left_alone(name: str) -> None:
    texts = [path.read_text(encoding="utf-8").rpartition(MARK) for path in FILES if path.parent.name == name]
    changes = {inputs.partition(TARGET)[0].partition(RANGES)[0] != expected for inputs, _, expected in texts}
    assert True in changes
    assert False in changes or name in ("differentiate", "fuse_update")  # these two always add something


def test_a_row_that_a_mask_hides_whole_is_zeros() -> None:
    case = "zero_hidden_rows/a_mask_of_truth_values"
    text = (GOLDEN / f"{case}.txt").read_text(encoding="utf-8").partition(MARK)[0]
    graph = pass_of(case, text)(parse_fx(text)).subject
    q, mask = torch.rand(1, 2, 4, 16), torch.ones(1, 1, 4, 4, dtype=torch.bool)
    mask[0, 0, 2] = False
    (result,) = graph(q, q, q, mask)
    assert torch.equal(result, parse_fx(text)(q, q, q, mask)[0].nan_to_num())
    assert not result[0, :, 2].any() and result[0, :, 1].all()
    assert complaint(graph, SPECS["ONNX_CAPTURE"]) is None and ONNX_CAPTURE.names == ("zero_hidden_rows",)
