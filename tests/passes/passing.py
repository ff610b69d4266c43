"""One helper that runs any pass on FX and checks all that its contract says."""

from typing import Any

import torch
from fx_reader import parse_fx
from torch import Tensor, fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from amp_compiler.fx.graph import copy_graph, results_of
from amp_compiler.fx.meta import Key
from amp_compiler.fx.text import format_fx
from amp_compiler.passes.base import FunctionalPass, Pass, PassResult
from amp_compiler.passes.step.place_operands import OPERAND


def run_checked(run: Pass[Any], text: str) -> tuple[str, PassResult[Any]]:
    """The text of a graph behind a pass, and the result; everything that the pass promises is checked.

    The text reads back as itself, before and after. A functional pass leaves its input alone. The inputs of the graph
    keep their names and places; what the pass adds stands behind them. An exact pass gives the same numbers to the bit,
    and one that says so changes nothing when it runs again.
    """
    inputs = parse_fx(text)
    assert format_fx(inputs) == text, "the text does not read back as itself"
    kept = copy_graph(inputs)
    names = [node.name for node in inputs.graph.find_nodes(op="placeholder")]
    result = run(inputs)
    matches = format_fx(result.subject)
    assert format_fx(parse_fx(matches)) == matches, "the result does not read back as itself"
    if isinstance(run, FunctionalPass):
        assert format_fx(inputs) == text
    after = [node.name for node in result.subject.graph.find_nodes(op="placeholder")]
    assert [name for name in after if name in names] == [name for name in names if name in after]
    if run.exact:
        _check_same_numbers(kept, result.subject)
    if run.idempotent:
        again = run(result.subject)
        assert not again.modified and format_fx(again.subject) == matches
    return matches, result


def _check_same_numbers(before: fx.GraphModule, after: fx.GraphModule) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs: dict[str, Tensor] = {}
    for graph_module in (before, after):
        for node in graph_module.graph.find_nodes(op="placeholder"):
            if node.name not in inputs:
                inputs[node.name] = _input(node, inputs, generator)
    old, new = (_run(graph_module, inputs) for graph_module in (before, after))
    for one, other in zip(old, new, strict=False):  # results that a pass adds stand behind those that were there
        if isinstance(one, Tensor) and isinstance(other, Tensor):
            assert one.dtype is other.dtype and torch.equal(one, other)


def _input(node: fx.Node, known: dict[str, Tensor], generator: torch.Generator) -> Tensor:
    """A value for a placeholder: another form of a weight has that weight's value."""
    of = node.meta.get(Key.LOW, (node.meta.get(Key.MASTER, node.meta.get(Key.WIDE)),))[0]
    column, recipe, number = node.meta.get(Key.STATE, ("", None, 0))
    if column == OPERAND:
        return recipe(known[recipe.weight])[number]  # type: ignore[no-any-return]
    value = node.meta["val"]
    if of in known:
        return known[of].to(value.dtype)
    with unset_fake_temporarily():
        if value.dtype.is_floating_point or value.dtype.is_complex:
            wide = torch.complex64 if value.dtype.is_complex else torch.float32
            result = torch.randn(value.shape, generator=generator, dtype=wide).to(value.dtype)
        else:
            result = torch.randint(0, 2, value.shape, generator=generator).to(value.dtype)
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).copy_(result)


def _given(value: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy in the type that the graph takes: stored data are rounded, complex numbers may be pairs of real ones."""
    if value.is_complex() and not dtype.is_complex:
        value = torch.view_as_real(value)
    return value.to(dtype, copy=True)


def _run(graph_module: fx.GraphModule, inputs: dict[str, Tensor]) -> list[Any]:
    places = graph_module.graph.find_nodes(op="placeholder")
    args = [_given(inputs[node.name], node.meta["val"].dtype) for node in places]
    torch.manual_seed(0)
    result = fx.Interpreter(graph_module).run(*args)
    assert len(results_of(graph_module.graph)) == len(result)
    return list(result)
