"""Which nodes compute sizes, indices and angles: where the analysis begins and where it ends."""

import pytest
from graph_reading import parse_graph

from amp_compiler.planner.numbers import find_numbers
from amp_compiler.policy.loader import load_rules

HEAD = """graph onnx weights_unknown
input ids: i64[4]
input mask: bool[4, 8]
input x: fp32[4, 8]
param w: fp32[8, 8]
param thin: fp32[2, 8]
param narrow: fp32[8, 2]
param table: fp32[100, 8]
const c: fp32[]
"""


def found(body, keep=None):
    """Names of the nodes that are kept, and of those that run in the widest type, of a graph that returns nothing."""
    rules = load_rules({"version": 1, "extends": "default", "keep": keep or {"sizes": True}})
    numbers = find_numbers(parse_graph(f"{HEAD}{body}return\n"), rules)
    return sorted(numbers.kept), sorted(numbers.widest)


CAST = ' = onnx.Cast(input={}) -> {}[4, 8]  pin=cast "cast"\n'


def cast(name, operand, dtype="i64"):
    return name + CAST.format(operand, dtype)


def mul(name, *operands):
    slots = ", ".join(f"{slot}={operand}" for slot, operand in zip("AB", operands, strict=False))
    return f"{name} = onnx.Mul({slots}) -> fp32[4, 8]\n"


def one(name, op, operand, slot="input", dtype="fp32"):
    return f"{name} = onnx.{op}({slot}={operand}) -> {dtype}[4, 8]\n"


PRODUCT = "m = onnx.MatMul(A={}, B=w) -> fp32[4, 8]\n"
LAYER = one("d", "Softmax", "x") + PRODUCT.format("d")


@pytest.mark.parametrize(
    ("body", "kept", "widest"),
    [
        (mul("a", "x", "c") + cast("i", "a"), ["a"], []),
        (mul("a", "x", "c") + one("b", "Relu", "a", "X") + cast("i", "b", "u8"), ["a", "b"], []),
        (mul("a", "x", "c") + cast("i", "a", "bool"), ["a"], []),
        (mul("a", "x", "c") + cast("i", "a", "fp16"), [], []),
        (mul("a", "x", "c") + cast("i", "a", "fp8"), [], []),
        (PRODUCT.format("x") + mul("a", "m", "c") + cast("i", "a"), ["m"], ["a"]),
        (LAYER + mul("a", "m", "c") + cast("i", "a"), [], ["a"]),
        (LAYER + mul("b", "x", "c") + mul("a", "m", "b") + cast("i", "a"), ["b"], ["a"]),
        (one("m", "GlobalAveragePool", "x", "X") + mul("a", "m", "c") + cast("i", "a"), ["m"], ["a"]),
        (LAYER + mul("a", "m", "c") + one("r", "Round", "a", "X"), [], ["a", "r"]),
        (LAYER + mul("a", "m", "c") + cast("i", "a", "bool"), [], ["a"]),
        (one("s", "Softmax", "x") + mul("a", "s", "c") + one("r", "Floor", "a", "X"), [], ["a", "r"]),
        (mul("a", "x", "c") + one("r", "Floor", "a", "X"), ["a", "r"], []),
        (mul("a", "x", "c") + "g = onnx.Greater(A=a, B=c) -> bool[4, 8]\n", ["a", "g"], []),
        (PRODUCT.format("x") + mul("a", "x", "c") + "g = onnx.Greater(A=m, B=a) -> bool[4, 8]\n", ["a"], ["g"]),
        (mul("a", "x", "c") + "g = onnx.GridSample(X=x, grid=a) -> fp32[4, 8]\n", ["a"], []),
        (mul("a", "x", "c") + "g = onnx.GridSample(X=a, grid=x) -> fp32[4, 8]\n", [], []),
        (mul("a", "x", "c") + one("s", "Sin", "a"), ["a", "s"], []),
        (mul("a", "x", "c") + one("s", "Sin", "a") + mul("b", "s", "c") + one("t", "Tanh", "b"), ["a", "s"], []),
        (LAYER + mul("a", "m", "c") + one("s", "Sin", "a"), [], ["a", "s"]),
        (LAYER + one("r", "Resize", "m", "X") + one("s", "Sin", "r"), [], ["r", "s"]),
        (LAYER + "p = onnx.Add(A=m, B=w) -> fp32[4, 8]\n" + mul("a", "p", "c")
         + "g = onnx.GridSample(X=x, grid=a) -> fp32[4, 8]\n", ["p"], ["a"]),
        (LAYER + "p = onnx.Add(A=m, B=c) -> fp32[4, 8]\n" + mul("a", "p", "c")
         + "g = onnx.GridSample(X=x, grid=a) -> fp32[4, 8]\n", [], ["a", "p"]),
        (LAYER + "p = onnx.Add(A=m, B=w) -> fp32[4, 8]\n" + cast("i", "p"), [], ["p"]),
        ("t = onnx.AffineGrid(theta=x) -> fp32[4, 8]\n" + mul("a", "t", "c")
         + "g = onnx.GridSample(X=x, grid=a) -> fp32[4, 8]\n", ["a", "t"], []),
        (mul("a", "x", "c") + "h = onnx.OneHot(indices=a, depth=c, values=c) -> fp32[4, 8]\n", ["a"], []),
        (cast("p", "mask", "fp32") + mul("a", "p", "c") + one("t", "Tanh", "a"), [], []),
        (cast("p", "ids", "fp32") + mul("a", "p", "c") + one("t", "Tanh", "a"), ["a", "p", "t"], []),
        (cast("p", "ids", "fp32") + mul("a", "p", "x") + one("t", "Tanh", "a"), [], []),
        (cast("p", "ids", "fp32") + mul("a", "p", "c") + mul("b", "a", "x"), [], []),
        (cast("p", "ids", "fp32") + one("e", "Exp", "p") + mul("a", "e", "c") + one("s", "Sin", "a"),
         ["a", "e", "p", "s"], []),
        ("r = onnx.Gather(data=table, indices=ids) -> fp32[4, 8]\n" + one("t", "Tanh", "r"), [], []),
        ("r = onnx.Range(start=c, limit=c, delta=c) -> fp32[4, 8]\n" + mul("a", "r", "c") + one("t", "Tanh", "a"),
         ["a", "r", "t"], []),
        (mul("a", "c", "c") + "r = onnx.Range(start=c, limit=a, delta=c) -> fp32[4, 8]\n", ["a"], []),
        ("v = onnx.RandomNormal() -> fp32[4, 8]\n" + mul("a", "v", "c") + "g = onnx.Less(A=a, B=c) -> bool[4, 8]\n",
         ["a", "g", "v"], []),
        ("v = own.Op(x=x) -> fp32[4, 8]\n" + mul("a", "v", "c") + one("s", "Sin", "a"), [], ["a", "s"]),
    ],
)  # fmt: skip
def test_where_it_begins_and_ends(body, kept, widest):
    assert found(body) == (kept, widest)
    assert found(body, {"sizes": False, "angles": False}) == ([], [])


@pytest.mark.parametrize(
    ("product", "little"),
    [
        ("m = onnx.MatMul(A=x, B=w) -> fp32[4, 8]\n", False),
        ("t = onnx.Slice(data=x) -> fp32[4, 2]\nm = onnx.MatMul(A=t, B=thin) -> fp32[4, 8]\n", True),
        ('m = onnx.Einsum(Inputs.0=x, Inputs.1=w) {equation="ij,jk->ik"} -> fp32[4, 8]\n', False),
        ('m = onnx.Einsum(Inputs.0=x, Inputs.1=w) {equation="i, j -> ij"} -> fp32[4, 8]\n', True),
        ('m = onnx.Einsum(Inputs.0=x, Inputs.1=w) {equation="...i,...j->...ij"} -> fp32[4, 8]\n', True),
        ('m = onnx.Einsum(Inputs.0=x, Inputs.1=w) {equation="ij,jk"} -> fp32[4, 8]\n', False),
        ('m = onnx.Einsum(Inputs.0=x, Inputs.1=w) {equation="ij,kj->ik"} -> fp32[4, 8]\n', False),
        ('m = onnx.Einsum(Inputs.0=t, Inputs.1=thin) {equation="ij,jk->ik"} -> fp32[4, 8]\n', True),
        ('m = onnx.Einsum(Inputs.0=t, Inputs.1=thin) {equation="...j,jk->...k"} -> fp32[4, 8]\n', True),
        ("m = onnx.Conv(X=x, W=w) -> fp32[4, 8]\n", False),
        ("m = onnx.Conv(X=x, W=narrow) -> fp32[4, 8]\n", True),
    ],
)
def test_products_of_coordinates(product, little):
    body = "t = onnx.Slice(data=x) -> fp32[4, 2]\n" if "=t," in product and "t =" not in product else ""
    kept, _ = found(body + product + one("s", "Sin", "m"))
    assert ("m" in kept) is ("s" in kept) is little


@pytest.mark.parametrize(("kind", "little"), [("param", False), ("buffer", True)])
def test_a_narrow_layer_of_a_torch_model_makes_data(kind, little):
    """Its weight is learned; a buffer holds frequencies."""
    body = (
        f"graph cpu\ninput x: fp32[4, 2]\n{kind} w: fp32[8, 2]\nm = aten.linear(input=x, weight=w) -> fp32[4, 8]\n"
        "g = aten.gt(self=m) {other=0} -> bool[4, 8]\nreturn g\n"
    )
    numbers = find_numbers(parse_graph(body), load_rules("default"))
    assert ("m" in numbers.kept) is ("g" in numbers.kept) is little


def test_each_part_has_a_switch():
    body = mul("a", "x", "c") + cast("i", "a") + mul("b", "x", "c") + one("s", "Sin", "b")
    assert found(body, {"angles": False}) == (["a"], [])
    assert found(body, {"sizes": False}) == (["b", "s"], [])
