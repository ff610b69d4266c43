"""Random ONNX models of matrices, as a hypothesis strategy: products, norms, follows, and casts of the model's own."""

from __future__ import annotations

import onnx
from hypothesis import strategies as st
from onnx import TensorProto as T
from onnx import helper as h

_SHAPE = [4, 4]
_UNARY = ("Relu", "Neg", "Abs", "Sqrt", "Tanh", "Exp", "Log", "Identity", "Transpose", "Softmax", "Erf", "Sigmoid")
_BINARY = ("MatMul", "Add", "Mul", "Max", "Concat")
_FLOATS = (T.FLOAT, T.FLOAT16, T.BFLOAT16, T.DOUBLE)
_WHOLE = (T.BOOL, T.INT64, T.INT32, T.UINT8)


def _info(name: str, kind: int) -> onnx.ValueInfoProto:
    return h.make_tensor_value_info(name, kind, _SHAPE)


@st.composite
def models(draw: st.DrawFn, most: int = 12) -> onnx.ModelProto:
    """A valid model of up to `most` nodes: FP32 throughout but for its own casts, and inputs of whole numbers."""
    kinds: dict[str, int] = {"x0": T.FLOAT, "x1": T.FLOAT, "b": draw(st.sampled_from(_WHOLE)), "w": T.FLOAT}
    nodes = []
    for index in range(draw(st.integers(1, most))):
        floats = [name for name, kind in kinds.items() if kind == T.FLOAT][-6:]
        made = f"v{index}"
        shape = draw(st.sampled_from(("unary", "unary", "binary", "binary", "cast", "cast to FP32")))
        if shape == "unary":
            nodes.append(h.make_node(draw(st.sampled_from(_UNARY)), [draw(st.sampled_from(floats))], [made]))
            kinds[made] = T.FLOAT
        elif shape == "binary":
            op = draw(st.sampled_from(_BINARY))
            operands = [draw(st.sampled_from(floats)) for _ in range(2)]
            if op == "Concat":  # and half of it again, so that all shapes are alike
                nodes.append(h.make_node(op, operands, [f"{made}_both"], axis=0))
                nodes.append(h.make_node("Split", [f"{made}_both"], [made, f"{made}_rest"], axis=0, num_outputs=2))
                kinds[f"{made}_rest"] = T.FLOAT
            else:
                nodes.append(h.make_node(op, operands, [made]))
            kinds[made] = T.FLOAT
        else:
            kind = T.FLOAT if shape == "cast to FP32" else draw(st.sampled_from((*_FLOATS, *_WHOLE)))
            others = [name for name, known in kinds.items() if known != kind]
            if others:
                nodes.append(h.make_node("Cast", [draw(st.sampled_from(others))], [made], to=kind))
                kinds[made] = kind
    read = {name for node in nodes for name in node.input}
    made_here = [name for node in nodes for name in node.output if not name.endswith("_both")]
    results = [name for name in made_here if name not in read or draw(st.integers(0, 5)) == 0]
    if not results:  # a cast drawn where there was nothing to cast
        nodes.append(h.make_node("Relu", ["x0"], ["v"]))
        results, kinds["v"] = ["v"], T.FLOAT
    weight = h.make_tensor("w", T.FLOAT, _SHAPE, [0.25] * 16)
    graph = h.make_graph(
        nodes,
        "random",
        [_info(name, kinds[name]) for name in ("x0", "x1", "b")],
        [_info(name, kinds[name]) for name in results],
        [weight],
    )
    made_model = h.make_model(graph, opset_imports=[h.make_opsetid("", 18)], ir_version=9)
    onnx.checker.check_model(made_model, full_check=True)
    return made_model
