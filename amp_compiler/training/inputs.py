"""What a step graph is given: which tensors it trains, and where each placeholder's tensor comes from at run time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, fx

from amp_compiler.errors import AmpError, CaptureError
from amp_compiler.fx.captured import Captured, Input, Source, tensor_getter
from amp_compiler.fx.graph import LOW_TYPES, results_of
from amp_compiler.fx.meta import Key
from amp_compiler.ops.layout import as_real
from amp_compiler.ops.update.rounding import Storage, WeightStorage
from amp_compiler.passes.precision.scale_products import AMAXES
from amp_compiler.passes.step.place_operands import OPERAND
from amp_compiler.passes.step.place_weights import PlacedWeights, is_read_low, is_read_low_alone, placed_weights
from amp_compiler.passes.step.reduce_gradients import (
    Bucket,
    SharedGradient,
    buckets_of,
    in_order,
    norm_messages,
    shared_gradients,
)
from amp_compiler.passes.step.sum_gradients import owners_with_gradient
from amp_compiler.policy.rules import OpTable
from amp_compiler.ranks.parts import Parts
from amp_compiler.training.loss_module import LossModule
from amp_compiler.training.optimizers.fused import KINDS, BoundGroup, bind
from amp_compiler.training.optimizers.traced import TracedGroup
from amp_compiler.training.outside import OUTSIDE
from amp_compiler.training.program import Agreement, Resolver
from amp_compiler.training.state import StepState
from amp_compiler.training.weights import MASTER, store_alone

Getters = dict[str, Callable[[], Tensor]]
Agree = Callable[[tuple[SharedGradient, ...], tuple[str, ...]], tuple[SharedGradient, ...]]


class StepInputs:
    """The inputs of a step in the making.

    Args:
        model: the loss as a module.
        captured: its captured and rewritten forward.
        optimizers: checked optimizers.
        held: today's parameters and buffers, where Dynamo gives them; others are looked up in the model.

    Attributes:
        getters: today's tensor of every parameter, buffer and constant, by placeholder.
        trained: placeholders of the parameters that require a gradient and belong to an optimizer.

    Raises:
        CaptureError: no parameter is trained.
    """

    def __init__(
        self,
        model: LossModule,
        captured: Captured,
        optimizers: Sequence[torch.optim.Optimizer],
        held: Mapping[str, Tensor],
    ) -> None:
        self.entries = {entry.name: entry for entry in captured.inputs}
        self.optimizers = optimizers
        self.holders = {id(p): one for one in optimizers for group in one.param_groups for p in group["params"]}

        def getter_of(name: str, entry: Input) -> Callable[[], Tensor]:
            return functools.partial(held.__getitem__, name) if name in held else tensor_getter(model, captured, entry)

        self.getters: Getters = {
            name: getter
            for name, entry in self.entries.items()
            if entry.source in (Source.PARAMETER, Source.BUFFER) or entry.target in captured.constants
            if not self._is_given(entry, getter := getter_of(name, entry))
        }
        parameters = [name for name in self.getters if self.entries[name].source is Source.PARAMETER]
        tensors = {name: self.getters[name]() for name in parameters}
        self._parameters = parameters
        self.trained = tuple(
            name for name in parameters if tensors[name].requires_grad and id(tensors[name]) in self.holders
        )
        if not self.trained:
            raise depends_on_nothing()

    def _is_given(self, entry: Input, getter: Callable[[], Tensor]) -> bool:
        """Whether it is a parameter that only a capture has shown and nobody trains: each call gives today's."""
        shown = entry.source is Source.PARAMETER and entry.target.startswith(f"{OUTSIDE}.")
        return shown and entry.index >= 0 and id(getter()) not in self.holders

    def store_low(self, graph: fx.Graph, low: torch.dtype, ops: OpTable, storage: WeightStorage) -> None:
        """Convert the trained FP32 parameters that a graph reads in the low type, once and for all.

        One that the plan reads in FP32 alone (the weight of a norm under `default`) stays FP32: it is its own master.

        Args:
            graph: the forward, with the casts of the plan.
            low: the 16-bit type.
            ops: the op table.
            storage: how they are stored.
        """
        read_low: dict[str, Tensor] = {}
        for node in graph.find_nodes(op="placeholder"):
            parameter = self.getters[node.name]() if node.name in self.trained else None
            if parameter is not None and parameter.dtype is torch.float32 and is_read_low(node, low, ops):
                read_low[self.entries[node.name].target.partition(".")[2]] = parameter
        store_alone(read_low, low, storage)

    def split(
        self,
        graph: fx.Graph,
        low: torch.dtype,
        ops: OpTable,
        state: StepState,
        agree: Callable[[dict[str, bool]], Mapping[str, bool]],
    ) -> None:
        """Decide which weights are split over the ranks, and convert them to 16 bits beside their masters' parts.

        Args:
            graph: the forward, with the casts of the plan.
            low: the 16-bit type.
            ops: the op table.
            state: what the step holds.
            agree: gives which of the weights that any rank reads are read in the low type alone, by those of this one.
        """
        nodes = [node for node in graph.find_nodes(op="placeholder") if node.name in self.trained]
        names = {node.name: self.entries[node.name].target.partition(".")[2] for node in nodes}
        reads = agree({names[node.name]: is_read_low_alone(node, low, ops) for node in nodes if node.users})
        for node in nodes:
            name = names[node.name]
            if name in reads:
                parameter = self.getters[node.name]()
                split = state.parts.decide(parameter, name, reads[name])
                if split and parameter.dtype is torch.float32:
                    state.masters.split(parameter, self.holders[id(parameter)].state[parameter], low)

    def of_parts(self, parts: Parts) -> tuple[str, ...]:
        """Placeholders of the weights that are split over the ranks, whether this one trains them now or not."""
        return tuple(name for name in self._parameters if self.getters[name]() in parts)

    def stored(self) -> dict[str, torch.dtype]:
        """Type of every parameter as it is stored now, by placeholder."""
        return {name: self.getters[name]().dtype for name in self._parameters}


@dataclass
class TrainedWeights:
    """The trained weights on their way through the pipeline STEP: what one pass has made of them, for those behind it.

    Args:
        inputs: the inputs of the step.
        storage: how weights without a master are stored; `None` where there are masters.
        gathered: ids of the parameters that batches before this one have a gradient of.

    Attributes:
        agreement: what the ranks have agreed on.
        buckets: what of all gradients is sent so that each rank gets a part.
        parts: number of those gradients; they stand first.
        amaxes: placeholders of what is kept for delayed scaling.
    """

    inputs: StepInputs
    storage: Storage | None
    gathered: frozenset[int] = frozenset()
    placed: PlacedWeights = field(init=False)
    updated: tuple[str, ...] = ()
    groups: list[BoundGroup | TracedGroup] = field(default_factory=list)
    agreement: Agreement = field(default_factory=Agreement)
    buckets: tuple[Bucket, ...] = ()
    parts: int = 0
    amaxes: tuple[str, ...] = ()

    def wrt(self, graph_module: fx.GraphModule) -> tuple[str, ...]:
        """What the loss is differentiated by, behind `PlaceWeights`."""
        self.placed = placed_weights(graph_module.graph, self.inputs.trained)
        kept = [node for node in graph_module.graph.find_nodes(op="placeholder") if Key.STATE in node.meta]
        self.amaxes = tuple(node.name for node in kept if node.meta[Key.STATE][0] == AMAXES)
        return (*self.amaxes, *self.placed.wrt)  # their gradients are their new values, behind those of buffers

    def owner(self, joint: fx.GraphModule) -> tuple[str, ...]:
        """The weight that each gradient belongs to, in front of `SumGradients`.

        Raises:
            CaptureError: the loss depends on none of them.
        """
        self.updated = owners_with_gradient(joint, self.placed.owner)
        self._check_amaxes(joint)
        if not self.updated:
            raise depends_on_nothing()
        self.updated += self.absent(joint)
        return self.placed.owner

    def _check_amaxes(self, joint: fx.GraphModule) -> None:
        """Refuse delayed scaling of a product that the backward does not reach, of which nothing would be known.

        Raises:
            AmpError: names its module.
        """
        results = results_of(joint.graph)
        first = len(results) - len(self.placed.owner) - len(self.amaxes)
        kept = {node.name: node for node in joint.graph.find_nodes(op="placeholder")}
        for name, new in zip(self.amaxes, results[first:], strict=False):
            if not isinstance(new, fx.Node):
                where = kept[name].meta[Key.STATE][1].rpartition(":")[0]
                raise AmpError(
                    f"a product{f' in {where}' if where else ''} has delayed scaling, and no gradient goes through it",
                    hint="give it another scaling: by a rule with its module and 'math: {scaling: tensorwise}'",
                )

    def absent(self, joint: fx.GraphModule) -> tuple[str, ...]:
        """The weights that batches before this one have a gradient of, and this one has not."""
        if not self.gathered:
            return ()
        held = {name: id(self.inputs.getters[self.placed.parameter(name)]()) for name in self.placed.owner}
        own = {held[name] for name in owners_with_gradient(joint, self.placed.owner)}
        wanted = self.gathered - own
        by_id = {one: name for name, one in reversed(held.items()) if one in wanted}  # a tied one has several names
        return tuple(reversed(by_id.values()))

    def taken(self, graph_module: fx.GraphModule, parameters: Sequence[str]) -> dict[str, str]:
        """The weights that gradients made elsewhere belong to, behind `PlaceWeights`, each with its parameter.

        Args:
            graph_module: the graph.
            parameters: placeholders of the parameters that have a gradient.
        """
        self.placed = placed_weights(graph_module.graph, self.inputs.trained)
        master = {parameter: name for name, parameter in self.placed.masters.items()}
        owners = {master.get(parameter, parameter): parameter for parameter in parameters}
        self.updated = tuple(owners)
        return owners

    def split(
        self,
        graph_module: fx.GraphModule,
        agree: Agree,
        keeps: bool,
        parts: Parts,
        most_bytes: int,
        in_fp32: bool,
    ) -> tuple[Bucket, ...]:
        """What is sent by `ShardUpdate`, in front of which the ranks agree on what they have a gradient of.

        Args:
            graph_module: the graph, with its gradients.
            agree: gives what all ranks have a gradient of, by what this one has.
            keeps: whether this rank's gradients stay as they are.
            parts: which weights are split.
            most_bytes: as for `buckets_of`.
            in_fp32: as for `buckets_of`.
        """
        self._agree(graph_module, agree)
        names = self.inputs.of_parts(parts)
        split = [one for one in self.agreement.shared if one.name in names]
        if keeps or not split:
            return ()
        weights = {node.name: node for node in graph_module.graph.find_nodes(op="placeholder")}
        sizes = [weights[one.name].meta["val"].numel() for one in split]
        self.buckets, self.parts = buckets_of(split, sizes, most_bytes, in_fp32), len(split)
        order = in_order(graph_module.graph, split)
        self.updated = (*order, *(name for name in self.updated if name not in order))
        return self.buckets

    def share(self, graph_module: fx.GraphModule, agree: Agree, keeps: bool) -> tuple[SharedGradient, ...]:
        """What all ranks have a gradient of, in front of `ReduceGradients`; from then on all of that is updated.

        Args:
            graph_module: the graph, with its gradients.
            agree: gives it, by what this rank has.
            keeps: whether this rank's gradients stay as they are.

        Returns:
            All but what `ShardUpdate` sends.
        """
        if not self.agreement.shared:  # a pipeline without ShardUpdate
            self._agree(graph_module, agree)
        split = self.updated[: self.parts]
        whole = tuple(one for one in self.agreement.shared if one.name not in split)
        if not keeps:
            self.updated = (*split, *in_order(graph_module.graph, whole))
        return whole

    def _agree(self, graph_module: fx.GraphModule, agree: Agree) -> None:
        offered = shared_gradients(graph_module.graph, self.updated)
        sent = [(node, node.all_input_nodes[0].meta["val"]) for node in norm_messages(graph_module.graph)]
        norms = tuple(f"{node.target} of {list(value.shape)}" for node, value in sent)
        self.agreement = Agreement(offered=offered, shared=agree(offered, norms), norms=norms)

    def specs(self, parts: Parts) -> tuple[Any, ...]:
        """What `FuseUpdate` must know of the optimizers' groups, which are bound to the weights here.

        Args:
            parts: which weights are split.
        """
        if self.groups:
            return tuple(group.spec for group in self.groups)
        parameters = {name: self.inputs.getters[self.placed.parameter(name)]() for name in self.updated}
        masters = {id(parameter): name for name, parameter in parameters.items()}
        low_weights = {id(p): low for name, p in parameters.items() if (low := self.placed.low(name)) is not None}
        low_only = [p for p in parameters.values() if self.storage is not None and p.dtype in LOW_TYPES]
        stored = {id(p): self.storage for p in low_only if self.storage is not None}
        sent = [(one.name, place) for place, bucket in enumerate(self.buckets) for one in bucket.gradients]
        buckets = {id(parameters[name]): place for name, place in sent}
        self.groups = bind(self.inputs.optimizers, masters, low_weights, stored, parts, buckets)
        return tuple(group.spec for group in self.groups)

    def names(self) -> tuple[str, ...]:
        """Qualified names of the updated parameters, in the order of the gradients."""
        entries = self.inputs.entries
        return tuple(entries[self.placed.parameter(name)].target.partition(".")[2] for name in self.updated)

    def fixed(self, step: fx.GraphModule) -> set[str]:
        """The placeholders whose tensors are the same at every step: all but the batch."""
        kept = [node.name for node in step.graph.find_nodes(op="placeholder") if Key.STATE in node.meta]
        return {*self.placed.wrt, *self.inputs.getters, *kept}

    def behind(self, name: str) -> Tensor | None:
        """The parameter, buffer or constant that a placeholder is, or is made of; `None` where it is none of these."""
        copied = self.placed.copies[name][0] if name in self.placed.copies else self.placed.parameter(name)
        return self.inputs.getters[copied]() if copied in self.inputs.getters else None

    def operands(self, step: fx.GraphModule) -> tuple[Callable[[], Tensor], ...]:
        """What gives the weights of which a step writes FP8 operands, each once for each of them."""
        marks = [node.meta.get(Key.STATE, ("", None, 0)) for node in step.graph.find_nodes(op="placeholder")]
        weights = [recipe.weight for column, recipe, number in marks if column == OPERAND and not number]
        return tuple(self.inputs.getters[self.placed.copies.get(name, (name, None))[0]] for name in weights)

    def resolvers(self, step: fx.GraphModule, state: StepState) -> list[Resolver]:
        """For each placeholder of a step graph, what gives its tensor from the flat batch at run time."""
        return [self._resolver(node, state) for node in step.graph.find_nodes(op="placeholder")]

    def _resolver(self, node: fx.Node, state: StepState) -> Resolver:
        getters, placed = self.inputs.getters, self.placed
        column, recipe, number = node.meta.get(Key.STATE, ("", None, 0))
        if column == OPERAND:
            name, dtype = placed.copies.get(recipe.weight, (recipe.weight, None))
            return lambda leaves: state.low_weights.operands(getters[name](), dtype, recipe)[number]
        if Key.STATE in node.meta:
            return self._state(node.meta[Key.STATE], state)
        if node.name in placed.copies:
            name, dtype = placed.copies[node.name]
            return lambda leaves: state.low_weights.get(getters[name](), dtype)
        if node.name in placed.masters:
            get = getters[placed.masters[node.name]]
            return lambda leaves: self._master(get(), state)
        if node.name in getters:
            get = getters[node.name]
            if node.name in self.inputs.trained and get().dtype is torch.float32:
                return lambda leaves: self._taken_in(get(), state)
            if node.name in self.inputs.trained:
                return lambda leaves: as_real(get().detach())
            return lambda leaves: get().detach()
        return itemgetter(self.inputs.entries[node.name].index)

    def _master(self, parameter: Tensor, state: StepState) -> Tensor:
        return state.masters.get(parameter, self._state_of(parameter))

    def _taken_in(self, parameter: Tensor, state: StepState) -> Tensor:
        holder = self.inputs.holders[id(parameter)]
        if type(holder) in KINDS and MASTER in holder.state.get(parameter, {}):
            state.masters.take_in(parameter, holder.state[parameter])
        return parameter.detach()

    def _state_of(self, parameter: Tensor) -> dict[str, Any]:
        return self.inputs.holders[id(parameter)].state[parameter]  # type: ignore[no-any-return]

    def _state(self, key: tuple[Any, ...], state: StepState) -> Resolver:
        """Of a placeholder that `FuseUpdate` added; see the marks that it leaves."""
        column, group, number = key
        if column == AMAXES:
            return lambda leaves: state.amaxes.get(group, number)
        if column == "scale":
            return lambda leaves: getattr(state.scale.state, group)
        if column == "sum" and isinstance(group, str):  # of a weight; states are of a group's number
            return lambda leaves: state.sums.get(self.inputs.getters[self.placed.parameter(group)]())
        if column == "samples":
            return lambda leaves: getattr(state.samples, group)
        if column == "rng":
            return lambda leaves: state.rounding.tensor
        bound = self.groups[group]
        if column == MASTER:
            weight = bound.parameters[number]
            return lambda leaves: self._master(weight, state)
        return lambda leaves: bound.tensor(column, number)


def depends_on_nothing() -> CaptureError:
    """The error of a loss that trains no parameter."""
    return CaptureError(
        "the loss depends on no parameter of the optimizer",
        hint="pass an optimizer over the parameters of this model, and detach nothing on the way to the loss",
    )
