"""`FuseUpdate`: turn gradients into one check and one update node per group of parameters."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx

from amp_compiler.fx.alias import source_of
from amp_compiler.fx.graph import add_placeholder, call_before, node_tensor, results_of, splice_before, trace_before
from amp_compiler.fx.meta import Key
from amp_compiler.ops.cuda.update import new_stale
from amp_compiler.ops.loss_scale import LossScale, LossScaleState
from amp_compiler.ops.update.operators import CHECK, COMMIT, OPERATORS, overflow
from amp_compiler.ops.update.reference import grad_check
from amp_compiler.passes.base import InPlacePass, PassResult
from amp_compiler.passes.step.fold_loss_scale import SCALE, TOTAL
from amp_compiler.passes.step.shard_update import part_of
from amp_compiler.passes.step.trace_update import OWN_STATE, TracedUpdate, trace_update
from amp_compiler.passes.step.update_group import UpdateGroup

MASTER = "master"  # column of the parts of masters
_CLIP_EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_
_COLUMN_SCALARS = frozenset({"step"})


@dataclass(frozen=True)
class FuseUpdate(InPlacePass):
    """Append the update to a joint graph.

    One `grad_check` reads every gradient once and gives the global norm and whether anything is not finite. One update
    node per group then reads each gradient in the type in which it was made, multiplies it by the inverse loss scale
    and the clipping factor, and writes master weight, moments and 16-bit weight. An optimizer without such a node has
    its own code traced in, see `trace_update`. Where a gradient is not finite
    nothing is written: weights, moments, step counts and buffers stay bit-identical, and only the scale changes. With
    `skips_overflow` the same holds where a weight without a master, or its momentum, would outgrow its 16-bit type.

    Before::

        return loss, new_buffer, grad_w

    After::

        grad_check = amp_compiler.grad_check.default([grad_w], reciprocal)
        norm = getitem(grad_check, 0); nonfinite = getitem(grad_check, 1); flags = getitem(grad_check, 2)
        commit = amp_compiler.commit.default(nonfinite, [buffer], [new_buffer])
        adam_update = amp_compiler.adam_update.default([w], [grad_w], [exp_avg], [exp_avg_sq], [], [w_low], [step],
                                                       hyper, coef, nonfinite, False, False, True)
        return loss, norm, nonfinite, flags, grad_w

    Where the loss scale does not ask whether gradients are finite (`LossScale.checks_finite`) and nothing else needs
    their norm, `grad_check` is given no gradient, and there is no pass over them but the update: the norm is NaN, not
    known.

    Of a group whose masters are split over several ranks (`UpdateGroup.ranks`), masters and moments are this rank's
    parts, as its gradients are, see `ShardUpdate`. Norm and flags are then summed over the ranks in one small message,
    and every rank finds the same ones::

        grad_check = amp_compiler.grad_check.default([wait_tensor], reciprocal)
        cat: fp32[2] = aten.cat.default([view, _to_copy])  # the square of the norm, and the flags
        all_reduce: fp32[2] = _c10d_functional.all_reduce.default(cat, "sum", "0")

    Left alone: nothing; with `gather="add"` there is no update, only the check.

    Args:
        groups: what to update, and how.
        updated: the master of each gradient at the end of the graph's outputs, one for each, see `SumGradients`.
        results: number of outputs before the new buffers (loss and aux).
        buffers: placeholder names of the buffers whose new values follow the results.
        scale: the loss scale.
        clip_norm: largest global norm, `None` for no clipping.
        divisor: what gradients are divided by besides the scale: of how many batches, and ranks, they are the sums.
        weighs: whether batches have weights, whose sum then is the divisor.
        gather: `"add"` updates nothing but buffers, `"use"` updates; empty where no batches are gathered.
        skips_overflow: see above; without it the update stores the largest finite number there.
        parts: how many of the gradients, the first ones, are this rank's parts of sums.
        group: torch's name of the group of ranks; empty for one process.
    """

    groups: tuple[UpdateGroup | TracedUpdate, ...]
    updated: tuple[str, ...]
    results: int
    buffers: tuple[str, ...]
    scale: LossScale
    clip_norm: float | None = None
    divisor: int = 1
    weighs: bool = False
    gather: str = ""
    skips_overflow: bool = False
    parts: int = 0
    group: str = ""
    exact: ClassVar[bool] = False

    def requires(self, subject: fx.GraphModule) -> str | None:
        """Results, new buffers and gradients stand in the outputs as announced, and the scale is a placeholder."""
        outputs = results_of(subject.graph)
        expected = self.results + len(self.buffers) + len(self.updated)
        if len(outputs) != expected:
            return f"the graph returns {len(outputs)} values, not {expected}"
        if not all(isinstance(gradient, fx.Node) for gradient in outputs[expected - len(self.updated) :]):
            return "a gradient is missing; run sum_gradients first"
        if not any(node.name == SCALE for node in subject.graph.find_nodes(op="placeholder")):
            return f"the graph has no placeholder '{SCALE}'; run fold_loss_scale first"
        return super().requires(subject)

    def run(self, subject: fx.GraphModule) -> PassResult[fx.GraphModule]:
        """Rewrite in place."""
        _Builder(self, subject).build()
        subject.recompile()
        return PassResult(subject, True)


class _Builder:
    def __init__(self, options: FuseUpdate, subject: fx.GraphModule) -> None:
        self.options, self.graph = options, subject.graph
        self.placeholders = {node.name: node for node in self.graph.find_nodes(op="placeholder")}
        self.last = list(self.placeholders.values())[-1]
        self.output = self.graph.output_node()
        self.outputs = results_of(self.graph)
        self.added: dict[tuple[Any, ...], fx.Node] = {}

    def build(self) -> None:
        options = self.options
        state = self._scale_state()
        gradients_of_outputs = self.outputs[options.results + len(options.buffers) :]
        gradients: dict[str, fx.Node] = dict(zip(options.updated, gradients_of_outputs, strict=True))
        inverse = self._inverse(state)
        if options.parts:
            norm, nonfinite, flags = self._checked_together(list(gradients.values()), inverse)
        elif options.scale.checks_finite or options.clip_norm is not None or options.scale.needs_norm:
            check = self._call(CHECK, [list(gradients.values()), inverse])
            norm, nonfinite, flags = (self._item(check, index) for index in range(3))
        else:  # without a pass over the gradients in front of the update
            check = self._call(CHECK, [[], inverse])
            (norm,) = self._inline(lambda one: torch.full_like(one, math.nan), [inverse])
            nonfinite, flags = self._item(check, 1), self._item(check, 2)
        if not options.scale.checks_finite:
            (nonfinite,) = self._inline(torch.zeros_like, [nonfinite])
        if options.skips_overflow and options.gather != "add":
            nonfinite = self._skipped_too(gradients, inverse, norm, nonfinite)
        self._commit_buffers(nonfinite)
        if options.gather != "add":
            (coef,) = self._inline(self._coefficient, [inverse, norm])
            for index, group in enumerate(options.groups):
                if isinstance(group, TracedUpdate):
                    self._trace(index, group, gradients, coef, nonfinite)
                else:
                    self._call(OPERATORS[group.kind], self._arguments(index, group, gradients, coef, nonfinite))
            self._commit_scale(state, nonfinite, self._norm_of_scale(gradients, inverse, norm))
        self.output.args = ((*self.outputs[: options.results], norm, nonfinite, flags, *gradients.values()),)

    def _inverse(self, state: list[fx.Node]) -> fx.Node:
        """What gradients are multiplied by."""
        options = self.options
        weights = options.weighs and options.gather != "add"  # else they are only looked at
        total = [self._placeholder(TOTAL, torch.empty_like(state[0].meta["val"]))] if weights else []

        def inverse(*fields: Tensor) -> Tensor:
            scale = options.scale.inverse(LossScaleState(*fields[: len(state)]))
            return scale / (fields[-1] if weights else options.divisor)

        return self._inline(inverse, [*state, *total])[0]

    def _checked_together(self, gradients: list[fx.Node], inverse: fx.Node) -> list[fx.Node]:
        """Norm and flags of gradients of which this rank has parts, the others whole; as `grad_check` gives them."""
        parts, whole = gradients[: self.options.parts], gradients[self.options.parts :]
        check = self._call(CHECK, [parts, inverse])

        def own(norm: Tensor, flags: Tensor) -> Tensor:
            return torch.cat([(norm * norm).reshape(1), flags.float()])

        (sent,) = self._inline(own, [self._item(check, 0), self._item(check, 2)])
        over_ranks = self._over_ranks(sent, "sum")

        def joined(sums: Tensor, unscale: Tensor, *others: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            norm, _, bad = grad_check(others, unscale)
            flags = torch.cat([sums[1:].clamp(max=1).to(torch.uint8), bad])
            return (sums[0] + norm * norm).sqrt(), flags.any().float(), flags

        return self._inline(joined, [over_ranks, inverse, *whole])

    def _over_ranks(self, value: fx.Node, how: str) -> fx.Node:
        sent = self._call(torch.ops._c10d_functional.all_reduce.default, [value, how, self.options.group])
        return self._call(torch.ops._c10d_functional.wait_tensor.default, [sent])

    def _norm_of_scale(self, gradients: dict[str, fx.Node], inverse: fx.Node, norm: fx.Node) -> fx.Node:
        """The norm that the next loss scale is made of, see `LossScale.norm_order`."""
        if not (self.options.scale.needs_norm and math.isinf(self.options.scale.norm_order)):
            return norm

        def largest(unscale: Tensor, *scaled: Tensor) -> Tensor:
            sizes = torch.stack([one.abs().amax().float() for one in scaled if one.numel()] or [unscale * 0.0])
            return torch.where(torch.isfinite(sizes), sizes, torch.zeros_like(sizes)).amax() * unscale

        largest_norm = self._inline(largest, [inverse, *gradients.values()])[0]
        return self._over_ranks(largest_norm, "max") if self.options.parts else largest_norm

    def _coefficient(self, inverse: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        if self.options.clip_norm is None:
            return inverse * 1.0
        return inverse * (self.options.clip_norm / (norm + _CLIP_EPSILON)).clamp(max=1.0)

    def _skipped_too(
        self, gradients: dict[str, fx.Node], inverse: fx.Node, norm: fx.Node, nonfinite: fx.Node
    ) -> fx.Node:
        """Not zero also where an update would make a number that its 16-bit type cannot hold."""
        (coef,) = self._inline(self._coefficient, [inverse, norm])
        for index, group in enumerate(self.options.groups):
            if isinstance(group, UpdateGroup) and group.storage is not None:
                arguments = self._arguments(index, group, gradients, coef, nonfinite)
                nonfinite = self._or_overflow(nonfinite, group.kind, arguments)
        return nonfinite

    def _or_overflow(self, nonfinite: fx.Node, kind: str, arguments: list[Any]) -> fx.Node:
        leaves, spec = pytree.tree_flatten(arguments)

        def either(bad: Tensor, *values: Tensor) -> Tensor:
            tensors = iter(values)
            arguments = [next(tensors) if isinstance(leaf, fx.Node) else leaf for leaf in leaves]
            return torch.maximum(bad, overflow(kind, pytree.tree_unflatten(arguments, spec)))

        return self._inline(either, [nonfinite, *(leaf for leaf in leaves if isinstance(leaf, fx.Node))])[0]

    def _arguments(
        self, index: int, group: UpdateGroup, gradients: dict[str, fx.Node], coef: fx.Node, skip: fx.Node
    ) -> list[Any]:
        """The arguments of a group's update operator; its states are placeholders, each made once."""
        masters = [self.placeholders[name] for name in group.masters]
        if group.ranks > 1:
            masters = [self._part(index, number, node, group.ranks) for number, node in enumerate(masters)]
        lists: list[Any] = [masters, [gradients[name] for name in group.masters]]
        for column, used in group.columns:
            if column == "low_weights":
                lists.append([self.placeholders[name] for name in group.low_weights])
            else:
                dtype = None if column == "compensation" else group.moment
                lists.append([self._state(index, column, n, m, dtype) for n, m in enumerate(masters)] if used else [])
        extra = [self._scalar_state(index, "started", skip, torch.float32, ())] if group.started else []
        if group.storage is None:
            mode: list[int] = []
        else:
            # The random state of stochastic rounding; one for all groups, each of which moves it on.
            extra, mode = [*extra, self._scalar_state(0, "rng", skip, torch.int64, (2,))], [group.storage]
        hyper = self._scalar_state(index, "hyper", skip, torch.float64, (group.scalars,))
        watched = [self._stale(index, skip, masters, group.takes), *group.takes] if group.low_weights else []
        return [*lists, *extra, hyper, coef, skip, *mode, *group.flags, *watched]

    def _stale(self, index: int, like: fx.Node, masters: Sequence[fx.Node], takes: Sequence[bool] = ()) -> fx.Node:
        """Where an update says which 16-bit copies were not their masters rounded."""
        sizes = [0 if takes else node_tensor(one).numel() for one in masters]  # type: ignore[union-attr]
        stale = new_stale(sizes, node_tensor(like).device)  # type: ignore[union-attr]
        return self._scalar_state(index, "stale", like, stale.dtype, tuple(stale.shape))

    def _trace(
        self, index: int, group: TracedUpdate, gradients: dict[str, fx.Node], coef: fx.Node, skip: fx.Node
    ) -> None:
        masters = [self.placeholders[name] for name in group.masters]
        states = []
        for state in group.states:
            like: Any = node_tensor(masters[state.parameter])
            value = like.new_empty_strided(state.shape, state.stride, dtype=state.dtype)
            states.append(self._placeholder((f"{OWN_STATE}{state.key}", index, state.parameter), value))
        low_weights = [self.placeholders[name] for name in group.low_weights if name is not None]
        rates = self._scalar_state(index, "lr", skip, torch.float64, (group.rates,))
        # On a GPU traced code that looked at 16-bit copies would read masters once more, which was never measured.
        looks = bool(low_weights) and node_tensor(skip).device.type != "cuda"  # type: ignore[union-attr]
        watched = [self._stale(index, skip, masters)] if looks else []
        gradients_of = [gradients[name] for name in group.masters]
        inputs = [*masters, *gradients_of, *states, *watched, *low_weights, rates, coef, skip]
        traced = trace_update(group, [node.meta["val"] for node in inputs])
        splice_before(self.output, traced.graph, inputs, "update")

    def _state(self, group: int, column: str, number: int, master: fx.Node, dtype: torch.dtype | None) -> fx.Node:
        tensor = node_tensor(master)
        if column in _COLUMN_SCALARS:
            value = tensor.new_empty((), dtype=torch.float32)  # type: ignore[union-attr]
        else:
            value = torch.empty_like(tensor, dtype=dtype)  # type: ignore[arg-type]  # with the strides of the weight
        return self._placeholder((column, group, number), value)

    def _part(self, group: int, number: int, weight: fx.Node, ranks: int) -> fx.Node:
        """This rank's part of the master of a weight."""
        like: Any = node_tensor(weight)
        return self._placeholder((MASTER, group, number), like.new_empty(part_of(like, ranks), dtype=torch.float32))

    def _scalar_state(
        self, group: int, column: str, like: fx.Node, dtype: torch.dtype, shape: tuple[int, ...]
    ) -> fx.Node:
        return self._placeholder((column, group, 0), node_tensor(like).new_empty(shape, dtype=dtype))  # type: ignore[union-attr]

    def _placeholder(self, key: tuple[Any, ...], value: torch.Tensor) -> fx.Node:
        if key not in self.added:
            meta = {"val": value, Key.STATE: key}
            self.last = self.added[key] = add_placeholder(self.last, "_".join(map(str, key)), meta)
        return self.added[key]

    def _scale_state(self) -> list[fx.Node]:
        scale = self.placeholders[SCALE]
        scale.meta[Key.STATE] = ("scale", "scale", 0)
        example = self.options.scale.init("cpu")
        tensor = node_tensor(scale)
        return [
            scale
            if field == "scale"
            else self._placeholder(("scale", field, 0), tensor.new_empty((), dtype=getattr(example, field).dtype))  # type: ignore[union-attr]
            for field in LossScaleState._fields
        ]

    def _commit_scale(self, state: list[fx.Node], nonfinite: fx.Node, norm: fx.Node) -> None:
        def following(*inputs: torch.Tensor) -> list[torch.Tensor]:
            fields, (bad, length) = inputs[:-2], inputs[-2:]
            return list(self.options.scale.next(LossScaleState(*fields), bad, length))

        for old, new in zip(state, self._inline(following, [*state, nonfinite, norm]), strict=True):
            if new is not old:
                self._call(torch.ops.aten.copy_.default, [old, new])

    def _commit_buffers(self, skip: fx.Node) -> None:
        """Write the new buffers where the step counts; a value that lies in an input may be about to be written."""
        first = self.options.results
        new_buffers = self.outputs[first : first + len(self.options.buffers)]
        values = [
            self._inline(torch.clone, [new])[0] if source_of(new).op == "placeholder" else new for new in new_buffers
        ]
        if values:
            targets = [self.placeholders[name] for name in self.options.buffers]
            self._call(COMMIT, [skip, targets, values])

    def _item(self, node: fx.Node, index: int) -> fx.Node:
        return self._call(operator.getitem, [node, index])

    def _call(self, target: Any, arguments: Sequence[Any]) -> fx.Node:
        return call_before(self.output, target, arguments, "update")

    def _inline(self, function: Callable[..., Any], arguments: Sequence[fx.Node]) -> list[fx.Node]:
        return trace_before(self.output, function, arguments, "update")
