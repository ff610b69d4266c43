"""The graphs by which TensorFlow tests its automatic mixed precision, as ONNX models of ours.

What they hold was read from tensorflow/core/grappler/optimizers/auto_mixed_precision_test.cc: ops, edges, what is
fetched, and how many casts TensorFlow puts in. Names of nodes are TensorFlow's. Where an op has no twin in ONNX, the
nearest one of the same of its four lists stands in: a sparse product, which TensorFlow runs in FP32, is `Exp`; the
gradient of a batch normalisation is a second batch normalisation. TensorFlow casts its constants at run time; they are
inputs here, so that each such cast counts as it does there. In all graphs but one what is fetched is an `Identity`. In
that one three nodes of the model are fetched by name, which TensorFlow leaves as they are; a rule says so here.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx
from onnx import parser

_HEAD = '<ir_version: 9, opset_import: ["" : 18, "lists" : 1]>\n'
_SQUARE = "float[32, 32]"
_IN = f"{_SQUARE} input"


@dataclass(frozen=True)
class TensorFlowGraph:
    """One graph.

    Args:
        nodes: of the graph in ONNX's text form.
        casts: how many casts TensorFlow adds.
        low: nodes that TensorFlow runs in 16 bits.
        fp32: nodes that it runs in FP32.
        rules: what is asked beside the preset.
        inputs: of the graph.
        outputs: of the graph, what is fetched.
        functions: of the model.
    """

    nodes: str
    casts: int
    low: tuple[str, ...] = ()
    fp32: tuple[str, ...] = ()
    rules: tuple[dict[str, object], ...] = ()
    inputs: str = _IN
    outputs: str = f"{_SQUARE} fetch"
    functions: str = ""

    def model(self) -> onnx.ModelProto:
        """The model, checked."""
        made = parser.parse_model(f"{_HEAD}g ({self.inputs}) => ({self.outputs}) {{\n{self.nodes}\n}}{self.functions}")
        onnx.checker.check_model(made, full_check=True)
        return made


def _unary(op: str) -> TensorFlowGraph:
    nodes = f"""
        [allow1] a = MatMul(input, eye)
        [infer1] b = {op}(a)
        [allow2] c = MatMul(b, eye)
        [fetch1] fetch = Identity(c)"""
    return TensorFlowGraph(nodes, 3, ("allow1", "infer1", "allow2"), inputs=f"{_IN}, {_SQUARE} eye")


_UNARY = ("Elu", "Erf", "Inv", "Log", "LogSoftmax", "Sigmoid", "Softmax", "Softplus", "Sqrt", "Tanh")
_RECURRENT = """
    [deny1] d = Exp(input)
    [loop] fetch = Loop(trips, go, d) <body = body
        (int64 i, bool c, float[32, 32] carried) => (bool again, float[32, 32] next) {
            [again] again = Identity(c)
            [infer1] s = Sqrt(carried)
            [allow1] next = MatMul(s, s)
        }>"""

_PUSH_AND_POP = """
<domain: "lists", opset_import: ["" : 18]>
push_and_pop (ihandle, x) => (ohandle, y) {
    at = Constant<value_int = -1>()
    pushed = SequenceInsert(ihandle, x)
    y = SequenceAt(pushed, at)
    ohandle = SequenceErase(pushed, at)
}"""

GRAPHS: dict[str, TensorFlowGraph] = {
    **{f"{op}Op": _unary({"Inv": "Reciprocal"}.get(op, op)) for op in _UNARY},
    "NoOp": TensorFlowGraph(
        """
        [deny1] a = Exp(input)
        [clr1] b = Relu(a)
        [infer1] c = Sqrt(b)
        [clr2] d = Relu(c)
        [fetch1] fetch = Identity(d)""",
        0,
        (),
        ("deny1", "clr1", "infer1", "clr2"),
        inputs="float[32] input",
        outputs="float[32] fetch",
    ),
    "AlreadyFp16": TensorFlowGraph(
        """
        [cst1] a = Cast<to = 10>(input)
        [allow1] b = MatMul(a, a)
        [clr1] c = Relu(b)
        [cst2] d = Cast<to = 1>(c)
        [clr2] e = Relu(d)
        [fetch1] fetch = Identity(e)""",
        0,
        ("allow1", "clr1"),
        ("clr2",),
    ),
    "Simple": TensorFlowGraph(
        """
        [deny1] a = Exp(input)
        [clr1] b = Relu(a)
        [infer1] c = Sqrt(b)
        [clr2] d = Relu(c)
        [allow1] e = MatMul(d, d)
        [clr3] f = Relu(e)
        [infer2] g = Log(f)
        [clr4] h = Relu(g)
        [deny2] i = Exp(h)
        [clr5] j = Relu(i)
        [fetch1] fetch = Identity(j)""",
        2,
        ("allow1",),
        ("deny1", "clr1", "infer1", "deny2", "clr5"),
    ),
    "BidirectionalClearChain": TensorFlowGraph(
        """
        [clr1] a = Relu(input)
        [clr2] b = Relu(input)
        [allow1] c = MatMul(a, a)
        [clr3a] n1 = Shape(a)
        [clr3b] n2 = Shape(b)
        [clr4] d = Relu(b)
        [fetch1_] fetch1 = Identity(c)
        [fetch2_] fetch2 = Identity(d)""",
        3,
        ("allow1",),
        outputs=f"{_SQUARE} fetch1, {_SQUARE} fetch2, int64[2] n1, int64[2] n2",
    ),
    "PreserveFetches": TensorFlowGraph(
        """
        [allow1] a = MatMul(input, input)
        [clr1] b = Relu(a)
        [infer1] c = Sqrt(b)
        [deny1] d = Exp(c)
        [clr2] e = Relu(d)
        [allow2] f = MatMul(e, e)
        [clr3] g = Relu(f)
        [deny2] h = Exp(g)
        [clr4] i = Relu(h)""",
        2,
        ("allow2",),
        ("allow1", "clr1", "infer1", "deny1", "clr2", "clr3", "deny2", "clr4"),
        ({"match": {"output": True}, "precision": "keep", "why": "it is fetched"},),
        outputs=f"{_SQUARE} a, {_SQUARE} e, {_SQUARE} g",
    ),
    "PreserveCPUNodes": TensorFlowGraph(
        """
        [clr1] a = Relu(input)
        [allow1] b = MatMul(a, a)
        [infer1] c = Tanh(b)
        [allow2] d = MatMul(c, c)
        [clr2] e = Relu(d)
        [fetch1] fetch = Identity(e)""",
        2,
        ("allow1",),
        ("allow2", "clr2"),
        ({"match": {"node": "^allow2$"}, "precision": "fp32", "why": "it runs on a CPU"},),
    ),
    "PreserveIdentityAfterVariable": TensorFlowGraph(
        """
        [clr1] a = Identity(var1)
        [allow1] b = MatMul(input, a)
        [clr2] c = Identity(input2)
        [allow2] d = MatMul(input, c)
        [fetch1_] fetch1 = Identity(b)
        [fetch2_] fetch2 = Identity(d)""",
        5,
        ("allow1", "allow2"),
        inputs=f"{_IN}, {_SQUARE} var1, {_SQUARE} input2",
        outputs=f"{_SQUARE} fetch1, {_SQUARE} fetch2",
    ),
    "FusedBatchNorm": TensorFlowGraph(
        """
        [allow1] a = Conv<pads = [1, 1, 1, 1]>(input, weight)
        [fbn1] b = BatchNormalization(a, scale, offset, mean, variance)
        [bng1] c = BatchNormalization(b, scale, offset, mean, variance)
        [infer1] d = Add(b, c)
        [allow2] e = Conv<pads = [1, 1, 1, 1]>(d, weight)
        [fetch1] fetch = Identity(e)""",
        3,
        ("allow1", "fbn1", "bng1", "infer1", "allow2"),
        inputs="float[8, 16, 56, 56] input, float[16, 16, 3, 3] weight, float[16] scale, float[16] offset, "
        "float[16] mean, float[16] variance",
        outputs="float[8, 16, 56, 56] fetch",
    ),
    "RepeatedAndListTypeAttrs": TensorFlowGraph(
        """
        [allow1] a = MatMul(input, input)
        [clr1a] b = Identity(a)
        [clr1b] c = Identity(a)
        [clr1c] d = Identity(a)
        [infer1] e = Sum(b, c, d)
        [allow2] f = MatMul(e, e)
        [fetch1] fetch = Identity(f)""",
        2,
        ("allow1", "clr1a", "infer1", "allow2"),
    ),
    "ExistingCast": TensorFlowGraph(
        """
        [cst1] a = Cast<to = 1>(input)
        [allow1] b = MatMul(a, a)
        [fetch1] fetch = Identity(b)""",
        1,
        ("allow1",),
        inputs="bool[32, 32] input",
    ),
    "RecurrentEdgeColorMismatch": TensorFlowGraph(
        _RECURRENT, 2, ("allow1",), ("deny1", "infer1"), inputs=f"{_IN}, int64 trips, bool go"
    ),
    "BatchMatMul": TensorFlowGraph(
        "[allow1] a = MatMul(input, input) [fetch1] fetch = Identity(a)",
        2,
        ("allow1",),
        inputs="float[64, 32, 32] input",
        outputs="float[64, 32, 32] fetch",
    ),
    "TensorListSetGet": TensorFlowGraph(
        """
        [tl1] empty = SequenceEmpty<dtype = 1>()
        [tl1w1] l1 = SequenceInsert(empty, input)
        [allow1] a = MatMul(input, input)
        [tl1w2] l2 = SequenceInsert(l1, a)
        [tl1r1] b = SequenceAt(l2, idx1)
        [infer1] c = Tanh(b)
        [allow2] d = MatMul(c, c)
        [tl1w3] l3 = SequenceInsert(l1, d)
        [tl1r2] e = SequenceAt(l3, idx1)
        [tl2] empty2 = SequenceEmpty<dtype = 1>()
        [tl2w1] m1 = SequenceInsert(empty2, input)
        [tl2r1] f = SequenceAt(m1, idx2)
        [fetch1_] fetch1 = Identity(e)
        [fetch2_] fetch2 = Identity(f)""",
        2,
        ("allow1", "allow2"),
        inputs=f"{_IN}, int64 idx1, int64 idx2, int64 idx3",
        outputs=f"{_SQUARE} fetch1, {_SQUARE} fetch2",
    ),
    "TensorListFromTensor": TensorFlowGraph(
        """
        [allow1] a = MatMul(input, input)
        [tl1] l = SplitToSequence<axis = 0, keepdims = 0>(a)
        [tl1r1] b = ConcatFromSequence<axis = 0, new_axis = 1>(l)
        [infer1] c = Tanh(b)
        [allow2] d = MatMul(c, c)
        [fetch1] fetch = Identity(d)""",
        2,
        ("allow1", "allow2"),
    ),
    "TensorListPushPop": TensorFlowGraph(
        """
        at = Constant<value_int = -1>()
        [tl1] empty = SequenceEmpty<dtype = 1>()
        [tl1w1] l1 = SequenceInsert(empty, input)
        [allow1] a = MatMul(input, input)
        [tl1w2] l2 = SequenceInsert(l1, a)
        [tl1r1] b = SequenceAt(l2, at)
        [infer1] c = Tanh(b)
        [allow2] d = MatMul(c, c)
        [tl1w3] l3 = SequenceInsert(empty, d)
        [tl1r2] e = SequenceAt(l3, at)
        [tl2] empty2 = SequenceEmpty<dtype = 1>()
        [tl2w1] m1 = SequenceInsert(empty2, input)
        [tl2r1] f = SequenceAt(m1, at)
        [fetch1_] fetch1 = Identity(e)
        [fetch2_] fetch2 = Identity(f)""",
        2,
        ("allow1", "allow2"),
        outputs=f"{_SQUARE} fetch1, {_SQUARE} fetch2",
    ),
    "TensorListPushBackBatchAndConcatLists": TensorFlowGraph(
        """
        at = Constant<value_int = -1>()
        [tl1] empty = SequenceEmpty<dtype = 1>()
        [tl2] empty2 = SequenceEmpty<dtype = 1>()
        [allow1] a = MatMul(input, input)
        [tl12w1] l1 = SequenceInsert(empty, a)
        [tl12w2] l2 = SequenceInsert(empty2, a)
        [tl3a] b = SequenceAt(l2, at)
        [tl3] l3 = SequenceInsert(l1, b)
        [tl3r1] c = SequenceAt(l3, at)
        [infer1] d = Tanh(c)
        [allow2] e = MatMul(d, d)
        [fetch1] fetch = Identity(e)""",
        2,
        ("allow1", "allow2"),
    ),
    # Its test counts no casts: four are what the types that it asks for come to.
    "TensorListThroughFunction": TensorFlowGraph(
        """
        at = Constant<value_int = -1>()
        [allow1] a = MatMul(input, input)
        [infer1] b = Tanh(a)
        [tl1] empty = SequenceEmpty<dtype = 1>()
        [tl1w1] l1 = SequenceInsert(empty, b)
        [func1] l2, unread = lists.push_and_pop(l1, b)
        [tl1r1] c = SequenceAt(l2, at)
        [tl2] empty2 = SequenceEmpty<dtype = 1>()
        [tl2w1] m1 = SequenceInsert(empty2, b)
        [tl2r1] d = SequenceAt(m1, at)
        [allow2] e = MatMul(c, d)
        [fetch1] fetch = Identity(e)""",
        4,
        ("allow1", "allow2"),
        functions=_PUSH_AND_POP,
    ),
}
