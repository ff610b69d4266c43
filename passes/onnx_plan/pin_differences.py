"""`pin_differences`: FP32 for differences of nearly equal numbers, back to where their digits would be lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from amp_compiler.ir.facts import Magnitudes
from amp_compiler.ir.graph import Node, ValueKind
from amp_compiler.passes.onnx_plan.pinning import PinPass
from amp_compiler.passes.onnx_plan.summed_squares import REACH, SQUARING, SUMS, Squares
from amp_compiler.planner.draft import Draft
from amp_compiler.planner.numbers import find_numbers

_ADDING = frozenset({"onnx.Add", "onnx.Sub", "onnx.Sum"})
_TAKING = frozenset({"onnx.Add", "onnx.Sub"})
_SCALING = frozenset({"onnx.Mul", "onnx.Div"})
_LINEAR = _ADDING | SUMS | {"onnx.Neg", "onnx.Mean"}
CENTRING: Mapping[str, int] = {  # ops that take a mean away, or another number: the first axis that it is of
    "onnx.LayerNormalization": -1, "onnx.InstanceNormalization": 2, "onnx.GroupNormalization": 1,
    "onnx.BatchNormalization": 1, "onnx.MeanVarianceNormalization": 1, "onnx.Softmax": -1, "onnx.LogSoftmax": -1,
}  # fmt: skip
_BOUNDING = frozenset({"onnx.Clip", "onnx.Max", "onnx.Min", "onnx.Relu"})
_REDUCING = SUMS | {"onnx.ReduceMin", "onnx.ReduceMax"}
_CURVES = frozenset({"onnx.Relu", "onnx.Clip", "onnx.Max", "onnx.Abs", "onnx.Sqrt", "onnx.Reciprocal"})
_PRODUCTS = ("matmul", "convolution")
_ARITHMETIC = (*_PRODUCTS, "elementwise", "reduction")
_LOGARITHMS = frozenset({"onnx.Log", "onnx.ReduceLogSum"})
_STEEP = frozenset(f"onnx.{op}" for op in ("Log", "Reciprocal", "Sqrt", "Pow", "CumProd", "ReduceProd"))
_UP_TO_ONE = frozenset({"onnx.Exp", "onnx.Div"})  # besides what squashes
_SHIFTED = frozenset({"onnx.Softmax", "onnx.LogSoftmax"})  # what counts of their operand is the absolute error
_FAR = 16.0  # a place in cells of a grid, whose rounding in FP16 is beyond 1 in 100 of a cell
_CANCELLED = 8.0  # how many times smaller than both operands a difference is that has lost too many digits


@dataclass(frozen=True)
class PinDifferences(PinPass):
    """Pin to FP32 differences of nearly equal numbers, with what makes their operands.

    A difference keeps the absolute error of its operands: where these are 100 times as large, two of three digits of
    FP16 are gone. Such are:

    - the difference, or sum with a negative factor, of squares and products of the same data: a variance as
      `E[x²] - E[x]²`, a distance as `a² - 2ab + b²`;
    - an input of the model less stored numbers, another input or its own mean, and a norm of an input: it costs no
      cast, which stands behind it then;
    - sums of data and a place in a grid that leave the model (boxes), and differences of two with the same place;
    - the phases of sines, of which the whole turns do not count, where a product with an input of the model makes them
      (Fourier features);
    - sums of an input with stored weights (a window, filters, a Fourier transform) whose squares end in a logarithm: of
      a weak band beside a strong one it shows every digit;
    - one and data, or less data, of which a logarithm is taken: it is as small as the data;
    - one part of a running sum less another;
    - a norm of, and a mean taken from, sums with stored numbers that are all far from zero;
    - products of an input, or of a sum as above, with stored filters that sum to about zero, and differences of means;
    - an exponential less one, and one less a probability, quotient or cosine, or its square, whose digits count;
    - in a calibration, what stays 8 times smaller than both of its operands, or than the mean that a norm takes away,
      and what makes that, back to the next products.

    The rules' `keep: {differences: false}` leaves all of it to the rules.

    Before:

        q = onnx.Mul(A=a, B=a) -> fp32[2, 8]
        s = onnx.ReduceMean(data=q) -> fp32[2, 1]
        m = onnx.ReduceMean(data=a) -> fp32[2, 1]
        n = onnx.Mul(A=m, B=m) -> fp32[2, 1]
        v = onnx.Sub(A=s, B=n) -> fp32[2, 1]

    After: all five have a pin. That of `n`:

        pin=fp32 "part of 'v', a difference of squares of 'a' and products with it: nearly equal"

    Left alone: differences of what two layers make, of gated data, and of different parts of them (rotations).
    """

    def pins(self, draft: Draft) -> Mapping[str, str]:
        """Those of each difference; the first reason stands."""
        if not draft.rules.keeps("differences"):
            return {}
        finder = _Finder(draft.graph, draft.context.low)
        for node in draft.graph.nodes.values():
            if node.op in SQUARING and (finder.squares(node) or finder.is_moment(node)):
                finder.expanded(node)
            if draft.ranges:
                finder.cancelled(node, draft.ranges)
            if node.op in CENTRING:
                finder.centres(node, draft.ranges)
            if node.op in CENTRING or finder.own_mean(node) or finder.filters(node):
                finder.far_from_zero(node)
            if node.op in _TAKING:
                finder.places(node)
                finder.complement(node)
            if node.op in _LOGARITHMS:
                finder.near_one(node)
            if finder.info(node).periodic:
                finder.phases(node)
        if any(node.op in _LOGARITHMS for node in draft.graph.nodes.values()):
            finder.spectra()
        for name in finder.sources():
            finder.centred(name)
        kept = find_numbers(draft.graph, draft.rules).kept if finder.pins else {}
        return {name: reason for name, reason in finder.pins.items() if name not in kept}


class _Finder(Squares):
    # ---- squares and products of the same data

    def is_moment(self, node: Node) -> bool:
        """True for a product of two computed values that is summed, as for a covariance."""
        if node.op != "onnx.Mul" or len(node.inputs) != 2:
            return False
        return not any(self.holds_data(operand.value) for operand in node.inputs) and self.is_summed(node)

    def expanded(self, square: Node) -> None:
        """Pin the differences of a square, or sums of it, and other products with the same data."""
        factors = square.inputs if square.op == "onnx.Mul" else square.inputs[:1]
        data = tuple(dict.fromkeys(self.origin(factor.value) for factor in factors))
        came = {square.name: ""}
        frontier = [square]
        for _ in range(REACH):
            following: list[Node] = []
            for node in frontier:
                for user, index in [user for name in node.outputs for user in self.graph.users(name)]:
                    if user.op in _ADDING or (user.op == "onnx.Gemm" and index == 2):
                        self._compare(user, index, node.name, came, data)
                    if user.name not in came and self._is_linear(user, index):
                        came[user.name] = node.name
                        following.append(user)
            frontier = following

    def _compare(self, node: Node, index: int, before: str, came: Mapping[str, str], data: Sequence[str]) -> None:
        """Pin a sum that takes products with the data away from what squares of them made."""
        path = []
        while before:
            path.append(before)
            before = came[before]
        others = [operand.value for place, operand in enumerate(node.inputs) if place != index]
        ways_of = [[self._made_of(name, one, came) for name in others] for one in data]
        if not all(any(way is not None for way in ways) for ways in ways_of):
            return
        between = [*path, *(name for ways in ways_of for way in ways for name in way or ())]
        if any(self._takes_away(self.graph.nodes[name]) for name in (node.name, *between)):
            reason = f"part of '{node.name}', a difference of squares of '{data[0]}' and products with it: nearly equal"
            for name in (*between, node.name, *self._curves_behind(node), *self.to_end(node)):
                self.pin(self.graph.nodes[name], reason)

    def _made_of(self, name: str, data: str, apart: Mapping[str, str]) -> list[str] | None:
        """The arithmetic that makes a value of data, some nodes apart; `None` where it is not made of them."""
        known: dict[str, bool] = {}

        def reaches(name: str, depth: int) -> bool:
            if self.origin(name) == data:
                return True
            node = self.graph.producer(name)
            if node is None or node.name in apart or not depth or not self._is_arithmetic(node):
                return False
            if node.name not in known:
                ways = [reaches(operand.value, depth - 1) for operand in node.inputs]  # all are on the way
                known[node.name] = any(ways)
            return known[node.name]

        return [node for node, is_on_way in known.items() if is_on_way] if reaches(name, REACH) else None

    def _takes_away(self, node: Node) -> bool:
        """True for a difference, and for a product with a negative number."""
        factors = [self.scalar(node, index) or 0.0 for index in range(2)] if self.scales(node) else []
        alpha = node.attrs.get("alpha", 1.0)
        negative = isinstance(alpha, float) and alpha < 0 and node.op == "onnx.Gemm"
        return node.op in ("onnx.Sub", "onnx.Neg") or negative or min(factors, default=0.0) < 0

    def _is_linear(self, node: Node, index: int) -> bool:
        """True for what makes sums of squares of squares."""
        beside = any(self.holds_data(one.value) for place, one in enumerate(node.inputs) if place != index)
        return node.op in _LINEAR or self.mixes(node) or (node.op in _SCALING and beside) or (
            self.passes(node) or self.weighs(node) or (node.op == "onnx.Div" and index == 0)
        )  # fmt: skip

    def _is_arithmetic(self, node: Node) -> bool:
        return self.info(node).family in _ARITHMETIC or node.op in SUMS or node.op == "onnx.Pow" or self.passes(node)

    def _curves_behind(self, node: Node) -> list[str]:
        """What works on a difference alone, or with stored numbers, up to the first other node."""

        def through(user: Node) -> bool:
            computed = [one for one in user.inputs if not self.holds_data(one.value)]
            alone = len(computed) == 1 and (user.op in _CURVES or user.op in _LINEAR or self.scales(user))
            return alone or self.passes(user)

        return [one.name for one in self.reach(node, through)[1:]]

    # ---- inputs of the model

    def sources(self) -> list[str]:
        """The floating-point inputs."""
        values = self.graph.values.items()
        return [name for name, value in values if value.kind is ValueKind.INPUT and value.dtype.is_float]

    def centred(self, source: str) -> None:
        """Pin what takes a mean away from an input of the model, with the products that scale it before."""
        pending: list[tuple[str, list[Node]]] = [(source, [])]
        seen = {source}
        while pending:
            name, scaled = pending.pop()
            for user, index in self.graph.users(name):
                if seen.intersection(user.outputs):
                    continue
                others = [one.value for place, one in enumerate(user.inputs) if place != index]
                stored = bool(others) and all(map(self.holds_data, others))
                centres = self.filters(user) or (index == 0 and user.op in CENTRING.keys() - _SHIFTED)
                mean: list[Node] | None = [] if centres else None
                if user.op in _TAKING:
                    mean = self._mean(others[0], seen, user.op == "onnx.Add")
                path = [*scaled, *(mean or ()), *([] if self.passes(user) else [user])]
                averages = user.op in SUMS or self.averages(user)
                if mean is not None:
                    for node in path:
                        self.pin(node, f"it takes a mean away from the input '{source}', which may be nearly equal")
                elif self.passes(user) or user.op in _BOUNDING or averages or (user.op in _SCALING and stored):
                    seen.update(user.outputs)
                    pending += [(output, path) for output in user.outputs]

    def _mean(self, name: str, sources: set[str], added: bool) -> list[Node] | None:
        """What makes a mean that is taken away from an input; `None` where it may be anything else."""
        if self.holds_data(name):
            numbers = self.graph.stored_numbers(name)
            return [] if numbers is not None and (numbers.least < 0 or (numbers.most > 0 and not added)) else None
        origin = self.origin(name)
        if self.graph.values[origin].kind is ValueKind.INPUT and not added:
            return []
        maker = self.graph.producer(origin)
        if maker is None or added or not (maker.op in _REDUCING or self.averages(maker)):
            return None
        return [maker] if self.origin(maker.inputs[0].value) in sources else None

    def spectra(self) -> None:
        """Pin what sums inputs of the model with stored weights, where squares of it end in a logarithm."""
        linear = dict.fromkeys(self.sources(), False)  # what is linear in inputs: whether weights are in it
        seen = set(linear)
        for node in self.graph.nodes.values():
            if linear.keys().isdisjoint(one.value for one in node.inputs):
                continue
            floats = [one.value for one in node.inputs if self.graph.values[one.value].dtype.is_float]
            computed = [name for name in floats if not self.holds_data(name)]
            if not all(name in linear for name in computed):
                continue
            weighted = any(linear[name] for name in computed)
            if weighted and self.squares(node) and (end := self._logarithm(node)) is not None:
                self._pin_spectrum(computed, end, seen)
            product = self.info(node).family in _PRODUCTS
            scales = len(computed) == 1 and (product or node.op in _SCALING)
            if scales or node.op in _LINEAR or self.passes(node):
                linear.update(dict.fromkeys(node.outputs, weighted or product))

    def _pin_spectrum(self, values: list[str], end: Node, seen: set[str]) -> None:
        """Pin what makes values, back to those that were seen."""
        reason = f"part of the spectrum whose logarithm '{end.name}' takes: a weak band beside a strong one"
        while values:
            name = values.pop()
            maker = self.graph.producer(name)
            if name not in seen and maker is not None:
                self.pin(maker, reason)
                values += [one.value for one in maker.inputs if self.graph.values[one.value].dtype.is_float]
            seen.add(name)

    def _logarithm(self, square: Node) -> Node | None:
        """The logarithm that a square ends in, sums, scales, roots and bounds between."""

        def through(user: Node) -> bool:
            return self._is_arithmetic(user) or user.op in _BOUNDING | _CURVES

        users = (user for node in self.reach(square, through, REACH - 1) for user in self.users(node))
        return next((user for user in users if user.op in _LOGARITHMS), None)

    # ---- boxes

    def places(self, node: Node) -> None:
        """Pin a difference of two sums with one term, and a sum with places that leaves the model, as corners do."""
        makers = [self.maker(operand.value) for operand in node.inputs] if node.op == "onnx.Sub" else []
        if makers and makers[0] is makers[1] and makers[0] is not None and makers[0].op == "onnx.CumSum":
            self.pin(node, f"it takes one part of the running sum '{makers[0].name}' from another: a small rest")
        if makers and all(maker is not None and maker.op in _TAKING for maker in makers):
            one, other = ({self.origin(read.value) for read in maker.inputs} for maker in makers if maker is not None)
            for part in (*makers, node) if one & other else ():
                if part is not None:
                    self.pin(
                        part, f"part of '{node.name}', a difference of sums with '{min(one & other)}', which cancels"
                    )
        if any(self._is_grid(operand.value) for operand in node.inputs):
            onward = self.reach(node, lambda user: self.passes(user) or user.op in _TAKING | _SCALING)
            for part in onward if self.leaves(onward) else ():
                self.pin(part, f"it leaves the model, and is made of the places that '{node.name}' adds data to")

    def phases(self, sine: Node) -> None:
        """Pin a product of an input of the model with stored numbers that a sine takes, scaled and shifted."""
        names, between = [operand.value for operand in sine.inputs], list[Node]()
        while names and (maker := self.maker(names[0])) is not None:
            names = [operand.value for operand in maker.inputs if not self.holds_data(operand.value)]
            product = self.info(maker).family in _PRODUCTS
            if len(names) != 1 or not (product or maker.op in _TAKING | _SCALING):
                return
            between.append(maker)
            if product and self.graph.values[self.origin(names[0])].kind is ValueKind.INPUT:
                for node in (*between, sine):
                    self.pin(
                        node, f"part of the phases that '{sine.name}' takes, of which the whole turns do not count"
                    )

    def near_one(self, reader: Node) -> bool:
        """Pin the sum of one and data, or the difference, that a logarithm takes, or a root less one."""
        maker = self.maker(reader.inputs[0].value)
        if (
            maker is None
            or maker.op not in _ADDING
            or 1 not in (self.scalar(maker, index) for index in range(2 - (maker.op == "onnx.Sub")))
        ):
            return False
        self.pin(maker, f"'{reader.name}' shows how far from one it is, which is as small as the data")
        return True

    def complement(self, node: Node) -> None:
        """Pin one less what lies between zero and one, where no sum stands before what reads all of its digits."""
        place = next((index for index in range(2) if abs(self.scalar(node, index) or 0.0) == 1), None)
        part = self.maker(node.inputs[1 - place].value) if place is not None else None
        sign = (self.scalar(node, place or 0) or 0.0) * (1 if node.op == "onnx.Add" else -1)
        between = [node]
        while part is not None and len(between) < REACH and self._negates(part):
            sign = -sign
            between.append(part)
            part = next((self.maker(one.value) for one in part.inputs if not self.holds_data(one.value)), None)
        if part is None or sign > 0:
            return
        grows = part.op == "onnx.Exp" and (place == 1) == (len(between) == 1)
        for one in (part, *between) if grows or (part.op == "onnx.Sqrt" and self.near_one(part)) else ():
            self.pin(one, f"'{part.name}' may be near one, of which '{node.name}' leaves few digits")
        squared = part.op in ("onnx.Mul", "onnx.Pow") and self.squares(part)
        bounded = self.maker(part.inputs[0].value) if squared else part
        turns = bounded is not None and self.info(bounded).periodic
        if bounded is None or not (turns or self.info(bounded).squashes or bounded.op in _UP_TO_ONE):
            return
        onward = self.reach(node, lambda user: self.passes(user) or user.op in _SCALING)
        readers = [reader for one in onward for name in one.outputs for reader in self.graph.users(name)]
        if self.leaves(onward) or any(
            user.op in _STEEP or (user.op == "onnx.Div" and (index == 1 or turns)) for user, index in readers
        ):
            for one in (bounded, part, *between):
                self.pin(one, f"'{node.name}' is what '{part.name}' leaves of one, of which few digits are left")

    def _negates(self, node: Node) -> bool:
        return node.op == "onnx.Neg" or (node.op == "onnx.Mul" and -1 in (self.scalar(node, 0), self.scalar(node, 1)))

    def own_mean(self, node: Node) -> list[Node]:
        """What makes the mean of a value that is taken away from it."""
        names = [self.origin(operand.value) for operand in node.inputs] if node.op == "onnx.Sub" else []
        return (self._mean(names[1], {names[0]}, False) if names else None) or []

    def far_from_zero(self, norm: Node) -> None:
        """Pin a norm, and what makes its input, where stored numbers take all of that far from zero."""
        maker = self.behind(norm, 0)
        added = maker.inputs[slice(0, 2) if maker.op in _TAKING else slice(2, 3)] if maker is not None else ()
        known = [self.graph.stored_numbers(one.value) for one in added if self.holds_data(one.value)]
        if maker is not None and any(max(one.least, -one.most) >= _FAR for one in known if one is not None):
            for one in (maker, *self.own_mean(norm), norm):
                self.pin(one, f"'{norm.name}' takes away a mean of which stored numbers say that it is far from zero")

    def filters(self, node: Node) -> bool:
        """True for a product with stored filters that take differences."""
        if self.info(node).family not in _PRODUCTS:
            return False
        for index, operand in enumerate(node.inputs[:2]):
            origin, maker = self.origin(operand.value), self.graph.producer(operand.value)
            numbers = self.graph.stored_numbers(origin) if self.holds_data(origin) else None
            if numbers is None or not any(numbers.balanced):
                continue
            turned = maker is not None and maker.op == "onnx.Transpose"
            columns = bool(index) != (turned != bool(node.attrs.get(("transA", "transB")[index])))
            known = {"onnx.Conv": 0, "onnx.MatMul": int(columns), "onnx.Gemm": int(columns)}.get(node.op)
            if known is None or numbers.balanced[known]:
                return True
        return False

    def _is_grid(self, name: str) -> bool:
        """True for many stored numbers, none of them negative, that reach 16: a grid of places."""
        numbers = (
            self.graph.stored_numbers(name) if self.holds_data(name) and self.graph.values[name].numel > 1 else None
        )
        return numbers is not None and numbers.least >= 0 and numbers.most >= _FAR

    # ---- calibration

    def cancelled(self, node: Node, ranges: Mapping[str, float]) -> None:
        """Pin what calibration has seen to be small against two operands, products or one, with what makes these."""
        names = [one.value for one in node.inputs]
        sizes = sorted(self.largest(name, ranges) for name in names)
        if node.op in _ADDING and len(names) > 1:
            operand = sizes[-2]
        elif self.filters(node):
            operand = prod(sizes[:2])
        else:
            operand = 1.0 if node.op == "onnx.Log" else 0.0
        result = ranges.get(node.outputs[0], 0.0)
        if 0 < result * _CANCELLED < operand:
            seen = f"is at most {result:.3g} in calibration, its operands reach {operand:.3g}"
            self._pin_cancelled(node, names, ranges, result * _CANCELLED, seen)

    def centres(self, node: Node, ranges: Mapping[str, float]) -> None:
        """Pin a norm or softmax of which calibration has seen that little is left of its input without the mean."""
        name = node.inputs[0].value
        largest = ranges.get(name)
        if isinstance(largest, Magnitudes) and 0 < largest.spread * _CANCELLED < largest:
            seen = f"leaves {largest.spread:.3g} of '{name}' in calibration, which reaches {largest:.3g}"
            if node.op not in _SHIFTED or largest > _FAR:
                self._pin_cancelled(node, [name], ranges, largest / _CANCELLED, seen)

    def _pin_cancelled(
        self, node: Node, names: list[str], ranges: Mapping[str, float], least: float, seen: str
    ) -> None:
        """Pin a node, and what makes numbers as large as those that cancel, back through sums and moves of them."""
        self.pin(node, reason := f"'{node.name}' {seen}: they cancel")
        known = {node.name}
        while names:
            name = names.pop()
            maker = self.graph.producer(name)
            if maker is not None and maker.name not in known and self.largest(name, ranges) > least:
                known.add(maker.name)
                if not self.passes(maker):
                    self.pin(maker, reason)
                info = self.info(maker)
                if info.carries or info.exact or info.squashes:
                    names += [one.value for one in maker.inputs]
