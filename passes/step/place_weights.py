"""How the trained weights stand in a step's graph: as placeholders of masters, of 16-bit copies, or of both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from amp_compiler.fx.graph import CAST, LOW_TYPES, canonical_op, node_tensor
from amp_compiler.fx.meta import PIN
from amp_compiler.ops.update.rounding import Storage, WeightStorage
from amp_compiler.policy.rules import OpTable

LOW = "amp_low"  # key in node.meta of a placeholder for a 16-bit weight: (its master's placeholder, torch dtype)
_FROM_PLAN = "amp_cast"


@dataclass
class PlacedWeights:
    """The trained weights of a graph, by placeholder.

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

    def for_update(
        self, owners: list[str], held: dict[str, Callable[[], Tensor]], storage: WeightStorage
    ) -> tuple[dict[int, str], dict[int, str], dict[int, Storage]]:
        """What the update must know of the owners that have a gradient, each by `id` of the parameter.

        Args:
            owners: placeholders out of `owner`.
            held: today's tensor of every parameter, by placeholder.
            storage: how the optimizer holds them.

        Returns:
            Placeholder of the weight, placeholder of its 16-bit copy, and storage of a 16-bit weight without a master.
        """
        parameters = {name: held[self.parameter(name)]() for name in owners}
        masters = {id(parameter): name for name, parameter in parameters.items()}
        lows = {id(parameter): low for name, parameter in parameters.items() if (low := self.low(name)) is not None}
        stored = {id(p): storage.rounding for p in parameters.values() if storage.low and p.dtype in LOW_TYPES}
        return masters, lows, stored

    def parameter(self, owner: str) -> str:
        """Placeholder of the parameter that an owner is, or is the master of."""
        return self.masters.get(owner, owner)

    def low(self, owner: str) -> str | None:
        """Placeholder of the 16-bit copy that the update writes beside the owner; `None` where there is none."""
        if owner in self.masters:
            return self.masters[owner]
        return next((name for name, (parameter, _) in reversed(self.copies.items()) if parameter == owner), None)


def place_weights(
    graph_module: fx.GraphModule,
    trained: list[str],
    held: dict[str, Callable[[], Tensor]],
    storage: WeightStorage,
    low: torch.dtype,
    ops: OpTable,
    store_low: Callable[[Tensor, torch.dtype], None],
) -> PlacedWeights:
    """Give every weight of a rewritten forward the placeholders that its storage asks for, in place.

    Without masters, an FP32 parameter that the plan reads in the low type is converted here, once and for all. One
    that the plan reads in FP32 alone (the weight of a norm under `default`) stays FP32, and is its own master.

    Args:
        graph_module: the forward, with the casts of the plan.
        trained: placeholders of the parameters to train.
        held: today's tensor of every parameter, by placeholder.
        storage: how the optimizer holds them.
        low: the 16-bit type.
        ops: the op table.
        store_low: converts a parameter in place.
    """
    placed = PlacedWeights(tuple(trained))
    graph = graph_module.graph
    placeholders = {node.name: node for node in graph.find_nodes(op="placeholder")}
    for name, get in held.items():
        node = placeholders[name]
        if storage.low and name in trained and get().dtype is torch.float32 and _is_read_low(node, low, ops):
            store_low(get(), low)
        if get().dtype in LOW_TYPES:
            wide = _widened(graph, node, get())
            if name in trained and not storage.low:
                placed.masters[_stand_in(graph, f"{name}_master", node, wide)] = name
            elif name in trained and wide is not None:
                placed.wide[_stand_in(graph, f"{name}_wide", node, wide)] = name
        elif name in trained:
            _hoist_copies(graph, node, placed)
    graph.lint()
    graph_module.recompile()
    return placed


def insert_upcasts(joint: fx.GraphModule, placed: PlacedWeights) -> None:
    """Replace the placeholders in `placed.wide` of a joint graph by the casts that they stand for, in place."""
    graph = joint.graph
    for name, parameter in placed.wide.items():
        nodes = {node.name: node for node in graph.find_nodes(op="placeholder")}
        cast = _cast(graph, nodes[parameter])
        cast.meta["amp_phase"] = "forward"
        nodes[name].replace_all_uses_with(cast)
        graph.erase_node(nodes[name])
    if placed.wide:
        graph.lint()
        joint.recompile()


def _is_read_low(node: fx.Node, low: torch.dtype, ops: OpTable) -> bool:
    """True where the value is cast to the low type, at once or behind ops with which rounding commutes."""
    return any(
        (user.target is CAST and user.args[1] is low)
        or (user.op == "call_function" and ops.info(canonical_op(user.target)).exact and _is_read_low(user, low, ops))
        for user in node.users
    )


def _widened(graph: fx.Graph, node: fx.Node, parameter: Tensor) -> fx.Node | None:
    """Gather all FP32 uses of a 16-bit parameter behind one cast; `None` where it has none.

    A cast that only emulates 16-bit arithmetic is none of them: it must see the rounded value, and its gradient is
    rounded as well.
    """
    captured = node_tensor(node)
    if captured is not None and captured.dtype is torch.float32:  # see `master_weights.widened`
        node.meta["val"] = captured.detach().to(parameter.dtype)
        narrow = [user for user in node.users if user.target is CAST and user.args[1] is parameter.dtype]
        others = [user for user in node.users if user not in narrow]
        wide = _cast(graph, node) if others else None
        for user in others:
            user.replace_input_with(node, wide)  # type: ignore[arg-type]
        for cast in narrow:
            cast.replace_all_uses_with(node)
            graph.erase_node(cast)
        return wide
    casts = [user for user in node.users if user.target is CAST and user.args[1] is torch.float32]
    casts = [cast for cast in casts if PIN in cast.meta or _FROM_PLAN in cast.meta]
    wide = _cast(graph, node) if casts else None
    for cast in casts:
        cast.replace_all_uses_with(wide)  # type: ignore[arg-type]
        graph.erase_node(cast)
    return wide


def _cast(graph: fx.Graph, node: fx.Node) -> fx.Node:
    with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
        cast = graph.call_function(CAST, (node, torch.float32))
    cast.meta = {"val": node.meta["val"].to(torch.float32)}
    return cast


def _stand_in(graph: fx.Graph, name: str, node: fx.Node, wide: fx.Node | None) -> str:
    """Add a placeholder for the FP32 value of a 16-bit parameter, which takes the place of a cast; returns its name."""
    with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
        made = graph.placeholder(name)
    made.meta = {**node.meta, "val": node.meta["val"].to(torch.float32)}
    if wide is not None:
        wide.replace_all_uses_with(made)
        graph.erase_node(wide)
    return made.name


def _hoist_copies(graph: fx.Graph, node: fx.Node, placed: PlacedWeights) -> None:
    """Turn each cast of an FP32 weight into a placeholder for its 16-bit copy."""
    for cast in [user for user in node.users if user.target is CAST]:
        with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
            made = graph.placeholder(f"{node.name}_low{len(placed.copies)}")
        made.meta = {**cast.meta, LOW: (node.name, cast.args[1])}
        placed.copies[made.name] = (node.name, cast.args[1])  # type: ignore[assignment]
        cast.replace_all_uses_with(made)
        graph.erase_node(cast)
