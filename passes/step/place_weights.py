"""`PlaceWeights`: trained weights as placeholders of masters, of 16-bit copies, or of both."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import fx

from amp_compiler.fx.graph import (
    CAST,
    LOW_TYPES,
    add_placeholder,
    canonical_op,
    node_tensor,
    replace_call,
    upcast_behind_inputs,
)
from amp_compiler.fx.meta import Key
from amp_compiler.passes.base import InPlacePass, PassResult, Texts
from amp_compiler.passes.step.separate_buffers import written_placeholders
from amp_compiler.policy.rules import OpTable


@dataclass(frozen=True)
class PlaceWeights(InPlacePass):
    """Give every weight of a rewritten forward the placeholders that its storage asks for.

    A cast of an FP32 weight becomes a placeholder for its 16-bit copy, which the update writes beside it (`low=`). A
    16-bit weight with a master gets a placeholder for the FP32 master (`master=`). One without gets, where something
    reads it in FP32, a placeholder for its FP32 value (`wide=`). That stands for a cast until the graph is traced back,
    so that a gradient made in FP32 is not rounded to 16 bits.

    Before (`stored={"w": torch.float32}`, `trained=("w",)`)::

        in w: fp32[8, 8]
        in x: bf16[4, 8]
        to_dtype: bf16[8, 8] = aten.to.dtype(w, torch.bfloat16)  # cast
        linear: bf16[4, 8] = aten.linear.default(x, to_dtype)

    After::

        in w: fp32[8, 8]
        in x: bf16[4, 8]
        in w_low0: bf16[8, 8]  # cast low=w:bf16
        linear: bf16[4, 8] = aten.linear.default(x, w_low0)

    Left alone: casts of inputs, of FP32 parameters that are not trained or that the forward writes, and to wide types.

    Args:
        stored: torch type of every parameter, by placeholder.
        trained: placeholders of the parameters to train.
        masters: whether 16-bit parameters have FP32 masters.
        split: placeholders of those whose master is split over several ranks, so that no graph can read it.
    """

    stored: Mapping[str, torch.dtype]
    trained: tuple[str, ...]
    masters: bool = True
    split: tuple[str, ...] = ()
    exact: ClassVar[bool] = True

    def run(self, subject: fx.GraphModule) -> PassResult[fx.GraphModule]:
        """Rewrite in place."""
        graph, count, texts = subject.graph, 0, Texts()
        before = texts.of(subject)
        placeholders = {node.name: node for node in graph.find_nodes(op="placeholder")}
        written = written_placeholders(graph, self.stored)
        for name, dtype in self.stored.items():
            node = placeholders[name]
            if dtype in LOW_TYPES:
                wide = _widened(graph, node, dtype)
                if name in self.trained and self.masters and name not in self.split:
                    _stand_in(graph, Key.MASTER, node, wide)
                elif name in self.trained and wide is not None:
                    _stand_in(graph, Key.WIDE, node, wide)
            elif name in self.trained and name not in written:
                count = _hoist_copies(graph, node, dtype, count)
        modified = texts.of(subject) != before
        if modified:
            subject.recompile()
        return PassResult(subject, modified)


@dataclass(frozen=True)
class PlacedWeights:
    """The trained weights of a graph, by placeholder, as `PlaceWeights` marked them.

    Args:
        parameters: placeholders of the trained parameters.
        copies: 16-bit copies of FP32 parameters: placeholder of the parameter, and type.
        masters: FP32 masters of 16-bit parameters: placeholder of the parameter.
        wide: FP32 values of 16-bit parameters without a master: placeholder of the parameter. They stand for a cast
            until the graph is differentiated, so that a gradient made in FP32 is not rounded to 16 bits.
    """

    parameters: tuple[str, ...]
    copies: dict[str, tuple[str, torch.dtype]] = field(default_factory=dict)
    masters: dict[str, str] = field(default_factory=dict)
    wide: dict[str, str] = field(default_factory=dict)

    @property
    def wrt(self) -> tuple[str, ...]:
        """What the loss is differentiated by: of each parameter in turn, itself and its other forms."""
        return tuple(name for name, _ in self._forms())

    @property
    def owner(self) -> tuple[str, ...]:
        """For each of `wrt`, the placeholder of the weight that the update starts from."""
        master = {parameter: name for name, parameter in self.masters.items()}
        return tuple(master.get(parameter, parameter) for _, parameter in self._forms())

    def _forms(self) -> list[tuple[str, str]]:
        others = {name: parameter for name, (parameter, _) in self.copies.items()} | self.masters | self.wide
        return [
            (name, parameter)
            for parameter in self.parameters
            for name in (parameter, *[name for name, of in others.items() if of == parameter])
        ]

    def parameter(self, owner: str) -> str:
        """Placeholder of the parameter that an owner is, or is the master of."""
        return self.masters.get(owner, owner)

    def low(self, owner: str) -> str | None:
        """Placeholder of the 16-bit copy that the update writes beside the owner; `None` where there is none."""
        if owner in self.masters:
            return self.masters[owner]
        return next((name for name, (parameter, _) in reversed(self.copies.items()) if parameter == owner), None)


def placed_weights(graph: fx.Graph, trained: tuple[str, ...]) -> PlacedWeights:
    """What `PlaceWeights` made of the trained weights.

    Args:
        graph: behind that pass, before or after differentiation.
        trained: placeholders of the parameters to train.
    """
    marked = graph.find_nodes(op="placeholder")
    return PlacedWeights(
        trained,
        {node.name: node.meta[Key.LOW] for node in marked if Key.LOW in node.meta},
        {node.name: node.meta[Key.MASTER] for node in marked if Key.MASTER in node.meta},
        {node.name: node.meta[Key.WIDE] for node in marked if Key.WIDE in node.meta},
    )


def is_read_low(node: fx.Node, low: torch.dtype, ops: OpTable, readers: Callable[[Iterable[bool]], bool] = any) -> bool:
    """True where a value is cast to the low type, at once or behind ops with which rounding commutes.

    Args:
        node: what makes the value.
        low: the 16-bit type.
        ops: the op table.
        readers: `all` asks that of each reader.
    """

    def reads_low(user: fx.Node) -> bool:
        if user.target is CAST:
            return user.args[1] is low
        exact = user.op == "call_function" and ops.info(canonical_op(user.target)).exact
        return exact and is_read_low(user, low, ops, readers)

    return bool(node.users) and readers(map(reads_low, node.users))


def is_read_low_alone(node: fx.Node, low: torch.dtype, ops: OpTable) -> bool:
    """True where whatever reads a weight reads it rounded to the low type, so that a 16-bit weight is as good.

    Args:
        node: placeholder of the weight, in front of `PlaceWeights`.
        low: the 16-bit type.
        ops: the op table.
    """
    captured = node_tensor(node)
    if captured is not None and captured.dtype in LOW_TYPES:
        return not _wide_casts(node)
    return is_read_low(node, low, ops, all)


def _wide_casts(node: fx.Node) -> list[fx.Node]:
    """The casts to FP32 by which a 16-bit parameter is read as its master."""
    casts = [user for user in node.users if user.target is CAST and user.args[1] is torch.float32]
    return [cast for cast in casts if Key.PIN in cast.meta or Key.PLACED in cast.meta]


def _widened(graph: fx.Graph, node: fx.Node, dtype: torch.dtype) -> fx.Node | None:
    """Gather all FP32 uses of a 16-bit parameter behind one cast; `None` where it has none.

    A cast that only emulates 16-bit arithmetic is none of them: it must see the rounded value, and its gradient is
    rounded as well.
    """
    captured = node_tensor(node)
    if captured is not None and captured.dtype is torch.float32:  # see `training.weights.widened`
        node.meta["val"] = captured.detach().to(dtype)
        narrow = [user for user in node.users if user.target is CAST and user.args[1] is dtype]
        others = [user for user in node.users if user not in narrow]
        wide = upcast_behind_inputs(graph, node) if others else None
        for user in others:
            user.replace_input_with(node, wide)  # type: ignore[arg-type]
        for cast in narrow:
            replace_call(cast, node)
        return wide
    casts = _wide_casts(node)
    wide = upcast_behind_inputs(graph, node) if casts else None
    for cast in casts:
        replace_call(cast, wide)
    return wide


def _stand_in(graph: fx.Graph, key: Key, node: fx.Node, wide: fx.Node | None) -> None:
    """Add a placeholder for the FP32 value of a 16-bit parameter, which takes the place of a cast."""
    meta = {**node.meta, "val": node.meta["val"].to(torch.float32), key: node.name}
    last = graph.find_nodes(op="placeholder")[-1]
    placeholder = add_placeholder(last, f"{node.name}_{key.name.lower()}", meta)
    if wide is not None:
        replace_call(wide, placeholder)


def _hoist_copies(graph: fx.Graph, node: fx.Node, dtype: torch.dtype, number: int) -> int:
    """Turn each cast of a weight to 16 bits into a placeholder for its copy; returns how many there are now.

    A cast to the type that the weight has, as of `weight.float()`, is the weight itself.
    """
    while same := [user for user in node.users if user.target is CAST and user.args[1] == dtype]:
        for cast in same:
            replace_call(cast, node)
    for cast in [user for user in node.users if user.target is CAST and user.args[1] in LOW_TYPES]:
        meta, last = {**cast.meta, Key.LOW: (node.name, cast.args[1])}, graph.find_nodes(op="placeholder")[-1]
        replace_call(cast, add_placeholder(last, f"{node.name}_low{number}", meta))
        number += 1
    return number
