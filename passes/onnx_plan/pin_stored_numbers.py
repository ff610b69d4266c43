"""`pin_stored_numbers`: FP32 for what reads stored numbers that the low type does not hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from amp_compiler.ir.dtypes import DType
from amp_compiler.ir.facts import StoredNumbers
from amp_compiler.ir.graph import Node
from amp_compiler.passes.onnx_plan.pinning import PinPass, Walker
from amp_compiler.planner.draft import Draft

_SCALING = frozenset({"onnx.Mul", "onnx.Div", "onnx.PRelu"})  # an error of a factor is one of the result
_FACTORS = {"onnx.Selu": ("gamma", "alpha"), **dict.fromkeys(("onnx.Gemm", "onnx.HardSigmoid"), ("alpha", "beta")),
            **dict.fromkeys(("onnx.LeakyRelu", "onnx.Elu", "onnx.Celu"), ("alpha",))}  # fmt: skip  # scaling attributes
_SUMMING = frozenset({"onnx.Gemm", "onnx.HardSigmoid"})  # their result is the sum of what each of these scales


@dataclass(frozen=True)
class PinStoredNumbers(PinPass):
    """Pin to FP32 what reads stored numbers beyond the low type, or such that would become zero in it.

    So are products with, and quotients by, numbers that are all subnormal in it, which keep few digits. The arithmetic
    behind all that is pinned too, up to the next product, norm or softmax: it may be as huge or as tiny.
    Numbers that become zero do not count in a factor of a product or a table of rows whose largest number is a normal
    one of the low type: there they are below the rounding of the others.

    Before (low type fp16):

        const c: fp32[] number=100000.0
        a = onnx.Add(A=x, B=c) -> fp32[2, 8]
        b = onnx.Relu(X=a) -> fp32[2, 8]

    After:

        a = onnx.Add(A=x, B=c) -> fp32[2, 8]  pin=fp32 "'c' holds numbers up to 100000, beyond fp16"
        b = onnx.Relu(X=a) -> fp32[2, 8]  pin=fp32 "works on what was made of 'c', which fp16 does not hold"

    Bounds of a Clip that are attributes are such numbers too, the largest one of FP32 excepted, and so are attributes
    that scale a result, or a part of it, to which nothing else is added.

    Left alone: what reads a mask (`find_masks`), or numbers that fit.
    """

    def pins(self, draft: Draft) -> Mapping[str, str]:
        """Those of each misfit, in the order of the values."""
        finder = _Finder(draft.graph, draft.context.low)
        for name, numbers in finder.stored():
            if name not in draft.graph.masks:
                finder.misfit(name, numbers)
        for node in draft.graph.nodes.values():
            if node.op == "onnx.Clip" and node.attrs:
                finder.bounds(node)
            if node.op in _FACTORS:
                finder.factor(node, _FACTORS[node.op])
        return finder.pins


class _Finder(Walker):
    def misfit(self, name: str, numbers: StoredNumbers) -> None:
        """Pin what reads numbers that do not fit."""
        fmt, reason = self.low.format, f"'{name}' holds numbers up to {numbers.largest:g}, beyond {self.low.short}"
        over, tiny = numbers.largest > fmt.max, numbers.largest < fmt.smallest_normal
        if not over and not numbers.subnormal and not numbers.lost:
            return
        moves, sinks = self._spread(name)
        if not over and numbers.lost:
            reason = f"{numbers.lost} of the numbers in '{name}' would become zero in {self.low.short}"
            gathered = any(self.info(node).moves == "index" for node in moves)
            if not tiny and (gathered or all(self.info(node).factors for node in sinks)):
                return
        elif not over:
            reason = f"'{name}' holds numbers up to {numbers.largest:g}, subnormal in {self.low.short}"
            sinks = [node for node in sinks if node.op in _SCALING or self.info(node).factors]
            fits = numbers.number is not None and numbers.number % fmt.smallest_subnormal == 0
            if not sinks or not tiny or fits:
                return
        self._pin_onward(moves, sinks, reason, name)

    def bounds(self, node: Node) -> None:
        """Pin what clips to bounds that do not fit, which are attributes up to opset 10; the largest FP32 is none."""
        fmt = self.low.format
        for name in ("min", "max"):
            number = abs(float(str(node.attrs.get(name, 0.0))))
            lost, over = 0 < number <= fmt.smallest_subnormal / 2, fmt.max < number < DType.FLOAT32.format.max
            if lost or over:
                becomes = "zero" if lost else "an infinity"
                reason = f"its bound {name}={number:g} would become {becomes} in {self.low.short}"
                self._pin_onward([], [node], reason, node.name)

    def factor(self, node: Node, names: tuple[str, ...]) -> None:
        """Pin what scales all of a result, or a part, by an attribute that is subnormal in the low type."""
        names = names[:1] if node.op == "onnx.Gemm" and len(node.inputs) < 3 else names
        factors = {abs(float(str(node.attrs.get(name, 1.0)))): name for name in names}
        number = max(factors) if node.op in _SUMMING else min(filter(None, factors), default=0.0)
        if 0 < number < self.low.format.smallest_normal:
            reason = f"its factor {factors[number]}={number:g} is subnormal in {self.low.short}"
            self._pin_onward([], [node], reason, node.name)

    def _pin_onward(self, moves: list[Node], sinks: list[Node], reason: str, name: str) -> None:
        """Pin what reads a value, and the arithmetic behind it; a softmax too, of which a mask may hide a whole row."""
        for node in (*moves, *sinks):
            self.pin(node, reason)
        pending, casts = list(filter(self.makes_floats, sinks)), set[str]()  # a comparison hands on no numbers
        while pending:
            pinned_value = pending.pop()
            for node, index in [user for value in pinned_value.outputs for user in self.graph.users(value)]:
                masked = node.inputs[index].slot in self.info(node).masks
                onward = self.passes(node) or self.info(node).carries
                if node.pin is not None and self.passes(node) and node.name not in casts:
                    casts.add(node.name)
                    pending.append(node)
                elif (onward or masked) and node.pin is None and node.name not in self.pins:
                    self.pin(node, f"works on what was made of '{name}', which {self.low.short} does not hold")
                    pending += [node] if onward else []

    def _spread(self, name: str) -> tuple[list[Node], list[Node]]:
        """The nodes that give the elements of a value on as they are, and those that work on them."""
        moves: dict[str, Node] = {}
        sinks: dict[str, Node] = {}
        pending = [name]
        while pending:
            for node, _ in self.graph.users(pending.pop()):
                if not self.passes(node):
                    sinks[node.name] = node
                elif node.name not in moves:
                    moves[node.name] = node
                    pending += [out for out in node.outputs if self.graph.values[out].dtype is DType.FLOAT32]
        return list(moves.values()), list(sinks.values())
