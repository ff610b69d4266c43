"""Pipelines are run, printed, stopped, skipped in and added to; what cannot be is an error with the hint."""

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from fx_reader import parse_fx
from torch import fx, nn
from toys import TOYS

import amp_compiler as amp
from amp_compiler.errors import PassError
from amp_compiler.fx.meta import Key
from amp_compiler.passes.base import InPlacePass, PassResult
from amp_compiler.passes.pipeline import PLAN, Late, Pipeline, Stages, pipelines_with
from amp_compiler.passes.spec import SPECS, complaint

FORWARD, STEP = amp.pipelines.FORWARD, amp.pipelines.STEP
X = torch.linspace(-1, 1, 16).reshape(2, 8)


@dataclass(frozen=True)
class Double(InPlacePass):
    """Let the first result be twice what it was, and do what `wrong` says."""

    wrong: str = ""
    name: ClassVar[str] = "double"
    exact: ClassVar[bool] = False

    def run(self, subject: fx.GraphModule) -> PassResult[fx.GraphModule]:
        graph, output = subject.graph, subject.graph.output_node()
        first, *rest = output.args[0]  # type: ignore[misc]
        with graph.inserting_before(output):
            twice = graph.call_function(torch.ops.aten.mul.Tensor, (first, 2.0))
        if self.wrong != "no value":
            twice.meta["val"] = first.meta["val"]  # type: ignore[union-attr]
        if self.wrong == "unknown mark":
            twice.meta["amp_mine"] = True
        if self.wrong == "region":
            twice.target = torch.ops.aten._assert_tensor_metadata.default
        output.args = ((twice, *rest),)
        subject.recompile()
        return PassResult(subject, True)


class Nameless(InPlacePass):
    def run(self, subject: fx.GraphModule) -> PassResult[fx.GraphModule]:
        return PassResult(subject, False)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(8, 4)


def test_a_pass_of_ones_own_runs_and_is_a_stage() -> None:
    plain = amp.compile(model(), dtype="bf16", backend="eager")
    mine = amp.compile(model(), dtype="bf16", backend="eager", passes=FORWARD.insert_after("legalize", Double()))
    assert torch.equal(mine(X), plain(X) * 2)
    assert "double" in [stage.name for stage in mine.stages] and "aten.mul.Tensor" in mine.stages["double"].text
    assert "+mul" in dict(mine.stages.diffs())["double"]


def test_a_pass_of_ones_own_in_a_step() -> None:
    losses = []
    for passes in (None, STEP.insert_before("differentiate", Double())):
        step = TOYS["mlp"].step(amp, backend="eager", passes=passes)
        torch.manual_seed(1)
        losses.append(float(step(*TOYS["mlp"].batch())))
    assert losses[1] == 2 * losses[0]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("no value", "carries no example value"),
        ("unknown mark", "'amp_mine', which is no key of fx.meta.Key"),
        ("region", "must not stand here"),
    ],
)
def test_a_pass_that_breaks_the_contract_is_named(wrong: str, says: str) -> None:
    broken = amp.compile(model(), backend="eager", passes=FORWARD.insert_after("apply_plan", Double(wrong)))
    with pytest.raises(PassError, match="'double'") as caught:
        broken(X)
    assert says in str(caught.value)


def test_skipping_and_stopping() -> None:
    assert "simplify_casts" not in STEP.skip("simplify_casts").names
    assert STEP.stop_after("differentiate").names[-1] == "differentiate"
    step = TOYS["mlp"].step(amp, backend="eager", passes=STEP.skip("simplify_casts"))
    torch.manual_seed(1)
    assert torch.isfinite(step(*TOYS["mlp"].batch()))
    assert "simplify_casts" not in [stage.name for stage in step.stages]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: STEP.skip("differentiat"), "did you mean 'differentiate'"),
        (lambda: STEP.skip("differentiate"), "cannot be skipped"),
        (lambda: STEP.insert_after("legalize", Double()), "belongs to another pipeline"),
        (lambda: STEP.insert_after("differentiate", Double), "is no pass"),
        (lambda: STEP.insert_after("differentiate", Nameless()), "Nameless lacks `exact`"),
        (lambda: STEP.insert_after("differentiate", Double()).insert_after("double", Double()), "another name"),
        (lambda: amp.compile(model(), passes=STEP), "STEP is not run here"),
        (lambda: amp.compile(model(), passes=3), "is no pipeline"),
        (lambda: amp.compile(model(), passes=FORWARD.stop_after("apply_plan")), "lacks the pass"),
        (lambda: Pipeline("FORWARD", ("apply_plan",)).run(parse_fx("in x: fp32[2]\nreturn x"), {}), "option 'plan'"),
    ],
)
def test_what_cannot_be_is_an_error_with_the_fix(make: Any, says: str) -> None:
    with pytest.raises(PassError, match=says) as caught:
        make()
    assert caught.value.hint


def test_late_options_see_the_graph_as_it_is_then() -> None:
    graph = parse_fx("in x: fp32[2]\nneg: fp32[2] = aten.neg.default(x)  # at=model.a:B\nreturn neg\n")
    seen: list[str] = []

    def root(inputs: Any) -> str:
        seen.append(inputs.graph.find_nodes(op="placeholder")[0].name)
        return "model"

    Pipeline("CAPTURE", ("name_modules",)).run(graph, {"root": Late(root)})
    assert seen == ["x"]


def test_stages_are_found_by_name_and_place_and_told_apart() -> None:
    stages = Stages()
    for name, text in (("capture", "a\n"), ("functionalize", "a\n"), ("classify", "low a\n"), ("apply_plan", "b\n")):
        stages.note(name, text)
    assert stages["capture"].text == stages[1].text == "a\n" and len(stages[1:]) == 3
    assert [name for name, _ in stages] == ["capture", "functionalize", "classify", "apply_plan"]
    assert not stages.changed("functionalize") and stages.changed("apply_plan") and not stages.changed("legalize")
    assert "-a" in dict(stages.diffs())["apply_plan"] and "functionalize" in dict(stages.diffs())["apply_plan"]
    with pytest.raises(PassError, match="did you mean 'apply_plan'"):
        stages["apply_plans"]


@pytest.mark.parametrize(
    ("line", "spec", "says"),
    [
        ("alias: fp32[2] = aten.alias.default(x)", "CAPTURE", "aten.alias"),
        ("neg: fp32[2] = aten.neg.default(x)  # phase=forward", "CAPTURE", "'amp_phase', which does not belong here"),
        ("neg: fp32[2] = aten.neg.default(x)", "STEP", "has the phase None"),
        ('neg: fp32[2] = call_module("inner", x)', "STEP", "calls a module"),
    ],
)
def test_the_table_of_legal_graphs(line: str, spec: str, says: str) -> None:
    graph = parse_fx(f"in x: fp32[2]\n{line}\nreturn x\ngraph inner\nin x: fp32[2]\nreturn x\n")
    assert says in str(complaint(graph, SPECS[spec]))
    assert complaint(parse_fx("in x: fp32[2]\nreturn x\n"), SPECS[spec]) is None


def test_a_mark_of_another_type_is_illegal() -> None:
    graph = parse_fx("in x: fp32[2]\nreturn x\n")
    graph.graph.find_nodes(op="placeholder")[0].meta[Key.LOW] = "w"
    assert "of type str, not tuple" in str(complaint(graph, SPECS["STEP"]))


def test_only_the_pipelines_of_a_call_may_be_given() -> None:
    assert pipelines_with(None, (PLAN,)) == {"PLAN": PLAN}
    assert pipelines_with([FORWARD.skip("multiply_convolutions")], (PLAN, FORWARD))["FORWARD"] != FORWARD
