"""Norms and GELUs as exporters write them out, for the tests of what is found, kept whole and fused."""

import numpy as np
import onnx
from onnx import TensorProto as T
from onnx import helper as h
from onnx import numpy_helper as nh
from onnx_models import info, model, node, scalar

RNG = np.random.default_rng(3)
NUMBERS = {
    "two": 2.0, "three": 3.0, "half": 0.5, "one": 1.0, "minus_half": -0.5, "minus_one": -1.0,
    "root2": np.sqrt(2.0), "over_root2": np.sqrt(0.5), "outer": np.sqrt(2 / np.pi), "inner": 0.044715,
}  # fmt: skip


class Builder:
    """A model between two products, of `shape`."""

    def __init__(self, shape=(2, 5, 8), opset=18, kind=T.FLOAT):
        self.shape, self.opset, self.kind = shape, opset, kind
        self.nodes, self.data, self.count = [], {}, 0
        self.returned = []

    def add(self, op, *inputs, name="", **attributes):
        """A node, and the value that it makes."""
        self.count += 1
        result = name or f"{op.lower()}_{self.count}"
        self.nodes.append(node(op, inputs, [result], f"n_{result}", **attributes))
        return result

    def number(self, name):
        """A stored number of `NUMBERS`."""
        self.data.setdefault(name, scalar(name, NUMBERS[name], h.tensor_dtype_to_np_dtype(self.kind)))
        return name

    def store(self, name, array):
        """Stored data."""
        self.data[name] = nh.from_array(np.asarray(array), name)
        return name

    def mean(self, value, axes=(-1,), keepdims=1, name=""):
        """A `ReduceMean` with its axes where the opset has them."""
        if self.opset < 18:
            return self.add("ReduceMean", value, name=name, axes=list(axes), keepdims=keepdims)
        axes = self.store(f"axes_{len(self.data)}", np.asarray(axes, np.int64))
        return self.add("ReduceMean", value, axes, name=name, keepdims=keepdims)

    def model(self, output, products=True):
        """The model whose result is `output`."""
        shape = self.shape
        # Only what begins with x is read from outside; a product before it makes that a 16-bit value.
        inputs, last = [info("input", *shape, kind=self.kind)], output
        first = self.nodes
        if products:
            width = shape[-1]
            kind = h.tensor_dtype_to_np_dtype(self.kind)
            for name in ("w_in", "w_out"):
                self.store(name, (RNG.standard_normal((width, width)) / np.sqrt(width)).astype(kind))
            first = [node("MatMul", ["input", "w_in"], ["x"], "product_in"), *self.nodes]
            first.append(node("MatMul", [output, "w_out"], ["y"], "product_out"))
            last = "y"
        else:
            inputs = [info("x", *shape, kind=self.kind)]
        read = {name for one in first for name in one.input}
        data = [one for name, one in self.data.items() if name in read]
        imports = [h.make_opsetid("", self.opset)]
        bare = onnx.shape_inference.infer_shapes(
            h.make_model(h.make_graph(first, "g", inputs, [], data), opset_imports=imports), data_prop=True
        )
        known = {entry.name: entry for entry in bare.graph.value_info}
        outputs = [known[name] for name in (last, *self.returned)]
        return model(first, inputs, outputs, data, opset=self.opset, ir_version=11 if self.opset > 22 else 9)


def norm(
    *, centred=False, square="pow", root="sqrt_div", scale="behind", bias=False, axes=(-1,), epsilon=1e-5,
    casts=False, shape=(2, 5, 8), opset=18, kind=T.FLOAT, scale_shape=None, twice=False, exponent=2.0,
    returned="", products=True,
):  # fmt: skip
    """A norm that is written out.

    Args:
        centred: a mean is taken away first (layer norm), else RMS norm.
        square: `pow` or `mul`.
        root: `sqrt_div`, `reciprocal`, `one_over`, `pow_half`, `pow_minus_half`.
        scale: `before` or `behind` as operand of its product, or empty.
        bias: stored data are added.
        axes: of the means.
        epsilon: a number, an array, or `None` for none.
        casts: the input is 16-bit and cast up, and what is normalized is cast down.
        scale_shape: of the stored data; the last dimensions by default.
        twice: the normalized value is read elsewhere too.
        exponent: of the power.
        returned: `root` or `mean`: an inner value is an output.
    """
    built = Builder(shape, opset, T.FLOAT16 if casts else kind)
    data = built.add("Cast", "x", to=T.FLOAT) if casts else "x"
    numbers = np.float64 if kind == T.DOUBLE else np.float32
    if centred:
        data = built.add("Sub", data, built.mean(data, axes), name="centred")
    power = built.store("exponent", np.asarray(exponent, numbers))
    squared = built.add("Pow", data, power) if square == "pow" else built.add("Mul", data, data)
    value = built.mean(squared, axes, name="mean_of_squares")
    if epsilon is not None:
        value = built.add("Add", value, built.store("epsilon", np.asarray(epsilon, numbers)))
    one = built.store("one_wide", np.asarray(1, numbers))
    if root == "pow_minus_half":
        result = built.add("Mul", data, built.add("Pow", value, built.store("power", np.asarray(-0.5, numbers))))
    else:
        if root == "pow_half":
            value = built.add("Pow", value, built.store("power", np.asarray(0.5, numbers)), name="root")
        else:
            value = built.add("Sqrt", value, name="root")
        if root in ("sqrt_div", "pow_half"):
            result = built.add("Div", data, value)
        else:
            inverse = built.add("Reciprocal", value) if root == "reciprocal" else built.add("Div", one, value)
            result = built.add("Mul", inverse, data)
    if casts:
        result = built.add("Cast", result, to=T.FLOAT16)
    own = np.float16 if casts else numbers
    wanted = scale_shape if scale_shape is not None else tuple(shape[axis] for axis in axes)
    normalized = result
    if scale:
        stored = built.store("scale", (1 + RNG.standard_normal(wanted) / 4).astype(own))
        result = built.add("Mul", *((stored, result) if scale == "before" else (result, stored)))
    if bias:
        result = built.add("Add", result, built.store("bias", RNG.standard_normal(wanted).astype(own)))
    if twice:
        result = built.add("Add", result, built.add("Neg", normalized))
    if returned:
        built.returned.append({"root": "root", "mean": "mean_of_squares"}[returned])
    return built.model(result, products)


TANH_FORMS = ("pow", "products", "horner", "flat")
ERF_FORMS = ("half_x", "half_last", "half_inside", "over_two")


def gelu(form, *, opset=18, shape=(2, 5, 8), products=True, power=3.0, kind=T.FLOAT, half=0.5):
    """A GELU that is written out: `form` is one of `TANH_FORMS` or `ERF_FORMS`."""
    built = Builder(shape, opset, kind)
    number = built.number
    built.store("half", np.asarray(half, h.tensor_dtype_to_np_dtype(kind)))
    if form in ERF_FORMS:
        scaled = ("Mul", "over_root2") if form in ("half_inside", "over_two") else ("Div", "root2")
        plus = built.add("Add", built.add("Erf", built.add(scaled[0], "x", number(scaled[1]))), number("one"))
    else:
        inner, outer = number("inner"), number("outer")
        if form == "horner":  # x·c·(1 + 0.044715·x·x)
            near_one = built.add("Add", number("one"), built.add("Mul", built.add("Mul", "x", inner), "x"))
            argument = built.add("Mul", built.add("Mul", "x", outer), near_one)
        else:
            if form == "pow":
                power = built.store("power", np.asarray(power, h.tensor_dtype_to_np_dtype(kind)))
                cube = built.add("Pow", "x", power)
            else:
                cube = built.add("Mul", built.add("Mul", "x", "x"), "x")
            argument = built.add("Mul", built.add("Add", "x", built.add("Mul", cube, inner)), outer)
        plus = built.add("Add", number("one"), built.add("Tanh", argument))
    if form in ("half_x", "pow", "products", "horner"):
        result = built.add("Mul", built.add("Mul", "x", number("half")), plus)
    elif form == "half_last":
        result = built.add("Mul", built.add("Mul", "x", plus), number("half"))
    elif form == "over_two":
        result = built.add("Div", built.add("Mul", "x", plus), number("two"))
    else:
        result = built.add("Mul", "x", built.add("Mul", plus, number("half")))
    return built.model(result, products)
