"""A step's forward and backward tried again, node by node, under its rules or others; nothing is changed."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from amp_compiler.backends.backend import DEFAULT
from amp_compiler.errors import AmpError
from amp_compiler.forward.program import EAGER
from amp_compiler.fx.capture.autocast_state import autocast_off
from amp_compiler.fx.capture.generators import generators_kept
from amp_compiler.fx.captured import Captured, Source
from amp_compiler.fx.finiteness import Finiteness, Replay, is_forward
from amp_compiler.fx.graph import results_of
from amp_compiler.fx.meta import Key
from amp_compiler.fx.torch_private.tracing import building
from amp_compiler.ir.nonfinite import INPUT, LOSS, SHOWN, NonfiniteNode, NonfiniteReport
from amp_compiler.ir.plan import PrecisionPlan
from amp_compiler.ops.loss_scale import DynamicLossScale
from amp_compiler.ops.update.rounding import WeightStorage
from amp_compiler.passes.pipeline import Stages
from amp_compiler.planner.cures import Cure, Trial, extended, find_cure, rules_text, spoilt_inputs, with_present_scales
from amp_compiler.policy.rules import RuleSet
from amp_compiler.training.build import StepOptions, begin_gradients
from amp_compiler.training.reporting.nonfinite import described
from amp_compiler.training.reporting.saturation import saturated
from amp_compiler.training.state import LowWeights
from amp_compiler.training.weights import MasterWeights, widened

_DOUBLINGS, _MOST_DOUBLINGS = 4, 24  # of the loss scale, tried where gradients are lost in zeros
_NO_POWER_OF_TWO, _IN_PROPORTION = 1.37, 0.05  # a gradient with another loss scale, and how near it has to be
_ALL_FP32 = ({"match": {}, "precision": "fp32"},)
_LEFT = 1e-3  # the part of the gradients that FP32 has which an advised loss scale may leave at zero


class StepTrials:
    """Runs one batch again and again, under several rules and loss scales.

    Args:
        batch: arguments of the loss function behind the model.
        options: what the step is built for.
    """

    def __init__(self, batch: tuple[Any, ...], options: StepOptions) -> None:
        self._falls = options.scale.constant is None
        self._model, self._batch = options.setup.module, batch
        # Weights that are stored low stay as they are: rounded FP32 copies of them have their values.
        state = options.setup.state
        masters = MasterWeights(state.parts)
        self._state = replace(state, storage=WeightStorage(), low_weights=LowWeights(), masters=masters)
        setup = replace(options.setup, state=self._state)
        # The scale is an input of every trial, so that one graph serves for many.
        options = replace(options, setup=setup, scale=DynamicLossScale(), gather="", divisor=1)
        self._options = options.under(dynamic_shapes=None, backend=EAGER, mode=DEFAULT)
        self._at: float | None = None  # the loss scale with which the last trial was finite, where it had to fall

    def report(self, scale: Tensor, *, looks: bool = True, cure: bool = True) -> NonfiniteReport:
        """What is not finite, and what fixes it.

        Args:
            scale: the loss scale, FP32 scalar.
            looks: where all is finite, look for what was lost without a trace.
            cure: look for what fixes it.

        Raises:
            AmpError: the loss is not one graph.
        """
        graph = self._build(self._options.settings.rules)
        seen = graph.run(scale)
        if not seen.spoilt:
            further = (self._swallowed, self._vanished, self._saturated) if looks else ()
            return next(filter(None, (look(graph, seen, scale) for look in further)), NonfiniteReport())
        proved = self._cure(graph, seen, scale) if cure else Cure()
        parameters = tuple(name for name in graph.updated if name in seen.spoilt)
        loss = tuple(name for name in seen.spoilt if name == LOSS)
        return NonfiniteReport(parameters, seen.nodes[:SHOWN], loss, proved.rule, proved.message)

    def _swallowed(self, graph: _Joint, seen: _Seen, scale: Tensor) -> NonfiniteReport:
        """Overflows that left no trace in loss and gradients, as far as FP32 has none there."""
        if not seen.swallowed or graph.plan is None:
            return NonfiniteReport()
        rules, first = self._options.settings.rules, Trial(graph.plan, seen.swallowed)
        cure = find_cure(rules, first, lambda others: self._tried(others, scale, swallowed=True))
        report = NonfiniteReport((), seen.swallowed[:SHOWN], (), cure.rule, cure.message)
        return report if cure.rule else NonfiniteReport()

    def _vanished(self, graph: _Joint, seen: _Seen, scale: Tensor) -> NonfiniteReport:
        """Gradients that 16 bits lose in zeros altogether, as far as FP32 does not."""
        rules = self._options.settings.rules
        if graph.plan is None or not seen.zeros:
            return NonfiniteReport()
        in_fp32 = self._build(extended(rules, _ALL_FP32))
        plain = in_fp32.run(scale)
        rightly = {*plain.zeros, *in_fp32.rounding_alone(set(seen.zeros), scale)}
        lost = tuple(name for name in seen.zeros if name not in rightly)
        if not lost:
            return NonfiniteReport()
        known = {(one.planned, one.phase) for one in plain.vanished}

        def trial(plan: PrecisionPlan | None, now: _Seen) -> Trial:
            nodes = tuple(one for one in now.vanished if (one.planned, one.phase) not in known)
            return Trial(plan, nodes if set(now.zeros) - rightly else ())  # type: ignore[arg-type]

        def attempt(others: RuleSet) -> Trial:
            tried = self._build(others)
            return trial(tried.plan, tried.run(scale))

        first = trial(graph.plan, seen)
        cure = find_cure(rules, first, attempt)
        for doublings in range(_DOUBLINGS, _MOST_DOUBLINGS + 1, _DOUBLINGS):
            if also := self._advised(graph, in_fp32, scale * 2.0**doublings, rightly, lost):
                cure = replace(cure, message=cure.message + also)
                break
        return NonfiniteReport((), first.nodes[:SHOWN], (), cure.rule, cure.message, lost)

    def _saturated(self, graph: _Joint, seen: _Seen, scale: Tensor) -> NonfiniteReport:
        """Operands of FP8 products that are larger than their scale holds, where all is finite."""
        if graph.plan is None or not seen.saturated:
            return NonfiniteReport()
        rules, now = self._options.settings.rules, seen
        entries: list[dict[str, Any]] = []
        why: dict[str, str] = {}
        while more := {name: f"saturated: {words}" for name, words in now.saturated if name not in why}:
            why |= more  # what a product no longer cuts off may be too much for the next one
            entries = with_present_scales(graph.plan, why)
            now = self._build(extended(rules, entries)).run(scale)
        words = tuple(words for _, words in seen.saturated)
        if now.spoilt:
            return NonfiniteReport(saturated=words, cure="scales of what the operands are now make it infinite or NaN")
        cure = "it is so in this step alone; by these rules a scale is of what the operand is now, and holds it"
        return NonfiniteReport(saturated=words, rule=rules_text(rules, entries), cure=cure)

    def _cure(self, graph: _Joint, seen: _Seen, scale: Tensor) -> Cure:
        bad = spoilt_inputs(seen.nodes, graph.names)
        if bad is not None:
            return bad
        if graph.plan is None:
            return Cure(message="it runs in FP32 (enabled=False): no rule fixes it, the model or its data have to")
        first = Trial(graph.plan, seen.nodes)
        lower = self._finite_scale(graph, scale) if all(one.phase == "backward" for one in seen.nodes) else None
        if lower is not None and self._falls:
            return Cure(message=f"only the loss scale was too high: at {lower:g} all is finite, and it falls by itself")
        cure = find_cure(self._options.settings.rules, first, lambda rules: self._tried(rules, scale))
        if cure.rule and self._at is not None:
            by_itself = f" at a loss scale of {self._at:g}, to which it falls by itself"
            return replace(cure, message=cure.message + by_itself)
        if lower is None:
            return cure
        in_fp32 = self._build(extended(self._options.settings.rules, _ALL_FP32))
        return replace(cure, message=cure.message + self._advised(graph, in_fp32, torch.full_like(scale, lower)))

    def _advised(
        self, graph: _Joint, in_fp32: _Joint, scale: Tensor, rightly: Set[str] = frozenset(), lost: Iterable[str] = ()
    ) -> str:
        """That a loss scale fixes it too, and what it leaves; empty where it does not."""
        kept, gradients = in_fp32.gradients(scale), graph.gradients(scale)
        if not all(bool(torch.isfinite(one).all()) for one in gradients.values()):
            return ""

        def left(names: Iterable[str]) -> float:
            there = {name: kept[name] != 0 for name in names if name in kept and name in gradients}
            gone = sum(int((mask & (gradients[name] == 0)).sum()) for name, mask in there.items())
            return gone / max(sum(int(mask.sum()) for mask in there.values()), 1)

        most = max(left(kept.keys() - rightly), left(lost))  # what is lost may be little beside all others
        advice = f"; a loss scale of {float(scale):g} fixes it too, and leaves {most:.2%} of the gradients at zero"
        return advice if most <= _LEFT else ""

    def _finite_scale(self, graph: _Joint, scale: Tensor) -> float | None:
        """The greatest scale from 1 on, in steps of two, with which all is finite; `None` where there is none."""

        def is_finite(halvings: int) -> bool:
            return not graph.run(scale * 2.0**-halvings).spoilt

        most = math.frexp(float(scale))[1] - 1
        if most < 1 or not is_finite(most):
            return None
        return float(scale) * 2.0 ** -(1 + bisect_left(range(1, most), True, key=is_finite))

    def _tried(self, rules: RuleSet, scale: Tensor, *, swallowed: bool = False) -> Trial:
        graph = self._build(rules)
        if graph.plan is None:
            raise AmpError("there is no plan with enabled=False", hint="leave enabled at True")
        seen = graph.run(scale)
        if swallowed:
            return Trial(graph.plan, seen.swallowed)
        only_backward = bool(seen.nodes) and all(one.phase == "backward" for one in seen.nodes)
        self._at = self._finite_scale(graph, scale) if only_backward and self._falls else None
        return Trial(graph.plan, seen.nodes if self._at is None else ())

    def _build(self, rules: RuleSet) -> _Joint:
        options = self._options.under(rules=rules)
        with autocast_off(), building(), generators_kept(), widened(self._model.parameters()):
            joint, weights, begun = begin_gradients(self._batch, options, Stages())
            leaves, scales = begun.leaves, _scales(joint.graph)
            pairs = zip(joint.graph.find_nodes(op="placeholder"), weights.resolvers(joint, self._state), strict=True)
            resolve = {node: one for node, one in pairs if node not in scales}
            every = [one.state for one in options.setup.optimizers]
            known = [(states, {key: {**held} for key, held in states.items()}) for states in every]
            values = {node: one(leaves) for node, one in resolve.items()}
            for states, before in known:  # a first call makes masters of 16-bit parameters
                for parameter in [*states]:
                    if parameter not in before:
                        del states[parameter]
                    elif states[parameter].keys() != before[parameter].keys():
                        states[parameter] = before[parameter]
        behind = {node: one for node in resolve if (one := weights.behind(node.name)) is not None}
        return _Joint(joint, values, behind, begun.plan, weights.names(), _names(begun.captured))


def _scales(graph: fx.Graph) -> list[fx.Node]:
    """The placeholders of the loss scale."""
    return [node for node in graph.find_nodes(op="placeholder") if node.meta.get(Key.STATE, ("",))[0] == "scale"]


@dataclass(frozen=True)
class _Seen:
    """What a run showed.

    Args:
        spoilt: the loss, and the parameters whose gradient is not finite, by name.
        nodes: the first nodes that these go back to, in execution order.
        swallowed: the same of all that is not finite, whether anything came of it or not.
        zeros: the parameters whose gradient is zero everywhere, by name.
        vanished: nodes that made nothing but zeros of other numbers, in execution order.
        saturated: FP8 products with an operand that saturates, and what it is, in words.
    """

    spoilt: tuple[str, ...]
    nodes: tuple[NonfiniteNode, ...]
    swallowed: tuple[NonfiniteNode, ...]
    zeros: tuple[str, ...]
    vanished: tuple[NonfiniteNode, ...]
    saturated: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class _Joint:
    """Forward and backward as one graph.

    Args:
        graph_module: the graph; its first result is the loss, its last ones are the gradients.
        values: of its placeholders, but for the loss scale.
        behind: per placeholder the parameter or buffer that its value is made of, where there is one.
        plan: of the forward; `None` in plain FP32.
        updated: names of the parameters, in the order of the gradients.
        names: what each placeholder is, in words.
    """

    graph_module: fx.GraphModule
    values: Mapping[fx.Node, Any]
    behind: Mapping[fx.Node, Tensor]
    plan: PrecisionPlan | None
    updated: tuple[str, ...]
    names: dict[str, str]

    def run(self, scale: Tensor) -> _Seen:
        """Run it node by node."""
        seen = self._replayed(scale).seen
        named = {LOSS: results_of(self.graph_module.graph)[0], **self._gradients()}
        origins = {name: seen.origins([node]) for name, node in named.items()}
        broken = {node for sources in origins.values() for node in sources}
        described_nodes = {node: self._described(node, seen) for node in broken | seen.origins(seen.bad)}
        zeros = tuple(name for name, node in named.items() if name != LOSS and seen.is_zero(node))
        vanished = seen.vanished if zeros else []
        return _Seen(
            tuple(name for name, sources in origins.items() if sources),
            tuple(described_nodes[node] for node in sorted(broken)),
            tuple(described_nodes[node] for node in sorted(described_nodes)),
            zeros,
            tuple(self._described(node, seen) for node in sorted(vanished)),
            () if self.plan is None else saturated(self.graph_module.graph, seen.ranges, self.plan, self.names),
        )

    def gradients(self, scale: Tensor) -> dict[str, Tensor]:
        """The gradients that the backward makes, times the loss scale, by the parameters' names.

        One that is added up only for the update, such as that of a weight with two copies, is not among them.
        """
        env = self._replayed(scale).env
        return {name: env[node] for name, node in self._gradients().items() if node in env}

    def rounding_alone(self, names: set[str], scale: Tensor) -> set[str]:
        """Those of some parameters whose gradient is errors of rounding alone: it is in proportion to no loss scale.

        The bias of the keys of an attention has such a gradient, and what stands in front of a norm.
        """
        once, again = (self._replayed(scale * factor).env for factor in (1.0, _NO_POWER_OF_TWO))
        of = {name: node for name, node in self._gradients().items() if name in names}
        pairs = {name: (once[node].float(), again[node].float() / _NO_POWER_OF_TWO) for name, node in of.items()}
        return {name for name, (one, other) in pairs.items() if (one - other).norm() > _IN_PROPORTION * one.norm()}

    def _replayed(self, scale: Tensor) -> Replay:
        replay = Replay(self.graph_module)
        replay.run_again({**self.values, **dict.fromkeys(_scales(self.graph_module.graph), scale)}, scale.device)
        return replay

    def _gradients(self) -> dict[str, Any]:
        """The nodes that make the gradients, by the parameters' names."""
        results = results_of(self.graph_module.graph)
        return dict(zip(self.updated, results[len(results) - len(self.updated) :], strict=True))

    def _described(self, node: fx.Node, seen: Finiteness) -> NonfiniteNode:
        result = described(node, is_forward=is_forward(node), ranges=seen.ranges, plan=self.plan)
        # It may be that the parameter was not finite before it was rounded.
        behind = self.behind.get(node) if result.op == INPUT and result.rounding else None
        is_data = behind is not None and not bool(torch.isfinite(behind).all())
        return replace(result, name=result.planned, rounding=False) if is_data else result


def _names(captured: Captured) -> dict[str, str]:
    """What the placeholders of a captured loss are, in words."""
    kinds = {Source.PARAMETER: "the parameter", Source.BUFFER: "the buffer"}
    return {
        entry.name: f"the batch itself ({entry.target})"
        if entry.source is Source.USER
        else f"the number {entry.target}"
        if entry.source is Source.NUMBER
        else f"{kinds.get(entry.source, 'the constant')} {entry.target.partition('.')[2] or entry.name}"
        for entry in captured.inputs
    }
