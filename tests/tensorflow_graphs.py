"""The graphs by which TensorFlow tests its automatic mixed precision, as ONNX models of ours.

What they hold was read from tensorflow/core/grappler/optimizers/auto_mixed_precision_test.cc: ops, edges, what is
fetched, and how many casts TensorFlow puts in. Names of nodes are TensorFlow's. Where an op has no twin in ONNX, the
nearest one of the same of its four lists stands in: a sparse product, which TensorFlow runs in FP32, is `Exp`; the
gradient of a batch normalisation is a second batch normalisation. TensorFlow casts its constants at run time; they are
inputs here, so that each such cast counts as it does there. In all graphs but one what is fetched is an `Identity`. In
that one three nodes of the model are fetched by name, which TensorFlow leaves as they are; a rule says so here.
"""

import re
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
        casts: how many casts TensorFlow adds.
        nodes: of the graph in ONNX's text form, with what TensorFlow runs in 16 bits or in FP32.
        rules: what is asked beside the preset.
        inputs: of the graph.
        outputs: of the graph, what is fetched.
        functions: of the model.
    """

    casts: int
    nodes: str
    rules: tuple[dict[str, object], ...] = ()
    inputs: str = _IN
    outputs: str = f"{_SQUARE} fetch"
    functions: str = ""

    def of(self, precision: str) -> list[str]:
        """Nodes that TensorFlow runs in 16 bits, `low`, or in `fp32`."""
        return re.findall(rf"\[(\w+)\].*# {precision}", self.nodes)

    def model(self) -> onnx.ModelProto:
        """The model, checked."""
        nodes = re.sub("# .*", "", self.nodes)
        result = parser.parse_model(f"{_HEAD}g ({self.inputs}) => ({self.outputs}) {{{nodes}\n}}{self.functions}")
        onnx.checker.check_model(result, full_check=True)
        return result


def _unary(op: str) -> TensorFlowGraph:
    nodes = f"""
        [allow1] a = MatMul(input, eye)  # low
        [infer1] b = {op}(a)  # low
        [allow2] c = MatMul(b, eye)  # low
        [fetch1] fetch = Identity(c)"""
    return TensorFlowGraph(3, nodes, inputs=f"{_IN}, {_SQUARE} eye")


_UNARY = ("Elu", "Erf", "Inv", "Log", "LogSoftmax", "Sigmoid", "Softmax", "Softplus", "Sqrt", "Tanh")
_RECURRENT = """
    [deny1] d = Exp(input)  # fp32
    [loop] fetch = Loop(trips, go, d) <body = body
        (int64 i, bool c, float[32, 32] carried) => (bool again, float[32, 32] next) {
            [again] again = Identity(c)
            [infer1] s = Sqrt(carried)  # fp32
            [allow1] next = MatMul(s, s)  # low
        }>
"""

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
        0,
        """
        [deny1] a = Exp(input)  # fp32
        [clr1] b = Relu(a)  # fp32
        [infer1] c = Sqrt(b)  # fp32
        [clr2] d = Relu(c)  # fp32
        [fetch1] fetch = Identity(d)""",
        inputs="float[32] input",
        outputs="float[32] fetch",
    ),
    "AlreadyFp16": TensorFlowGraph(
        0,
        """
        [cst1] a = Cast<to = 10>(input)
        [allow1] b = MatMul(a, a)  # low
        [clr1] c = Relu(b)  # low
        [cst2] d = Cast<to = 1>(c)
        [clr2] e = Relu(d)  # fp32
        [fetch1] fetch = Identity(e)""",
    ),
    "Simple": TensorFlowGraph(
        2,
        """
        [deny1] a = Exp(input)  # fp32
        [clr1] b = Relu(a)  # fp32
        [infer1] c = Sqrt(b)  # fp32
        [clr2] d = Relu(c)
        [allow1] e = MatMul(d, d)  # low
        [clr3] f = Relu(e)
        [infer2] g = Log(f)
        [clr4] h = Relu(g)
        [deny2] i = Exp(h)  # fp32
        [clr5] j = Relu(i)  # fp32
        [fetch1] fetch = Identity(j)""",
    ),
    "BidirectionalClearChain": TensorFlowGraph(
        3,
        """
        [clr1] a = Relu(input)
        [clr2] b = Relu(input)
        [allow1] c = MatMul(a, a)  # low
        [clr3a] n1 = Shape(a)
        [clr3b] n2 = Shape(b)
        [clr4] d = Relu(b)
        [fetch1_] fetch1 = Identity(c)
        [fetch2_] fetch2 = Identity(d)""",
        outputs=f"{_SQUARE} fetch1, {_SQUARE} fetch2, int64[2] n1, int64[2] n2",
    ),
    "PreserveFetches": TensorFlowGraph(
        2,
        """
        [allow1] a = MatMul(input, input)  # fp32
        [clr1] b = Relu(a)  # fp32
        [infer1] c = Sqrt(b)  # fp32
        [deny1] d = Exp(c)  # fp32
        [clr2] e = Relu(d)  # fp32
        [allow2] f = MatMul(e, e)  # low
        [clr3] g = Relu(f)  # fp32
        [deny2] h = Exp(g)  # fp32
        [clr4] i = Relu(h)  # fp32""",
        rules=({"match": {"output": True}, "precision": "keep", "why": "it is fetched"},),
        outputs=f"{_SQUARE} a, {_SQUARE} e, {_SQUARE} g",
    ),
    "PreserveCPUNodes": TensorFlowGraph(
        2,
        """
        [clr1] a = Relu(input)
        [allow1] b = MatMul(a, a)  # low
        [infer1] c = Tanh(b)
        [allow2] d = MatMul(c, c)  # fp32
        [clr2] e = Relu(d)  # fp32
        [fetch1] fetch = Identity(e)""",
        rules=({"match": {"node": "^allow2$"}, "precision": "fp32", "why": "it runs on a CPU"},),
    ),
    "PreserveIdentityAfterVariable": TensorFlowGraph(
        5,
        """
        [clr1] a = Identity(var1)
        [allow1] b = MatMul(input, a)  # low
        [clr2] c = Identity(input2)
        [allow2] d = MatMul(input, c)  # low
        [fetch1_] fetch1 = Identity(b)
        [fetch2_] fetch2 = Identity(d)""",
        inputs=f"{_IN}, {_SQUARE} var1, {_SQUARE} input2",
        outputs=f"{_SQUARE} fetch1, {_SQUARE} fetch2",
    ),
    "FusedBatchNorm": TensorFlowGraph(
        3,
        """
        [allow1] a = Conv<pads = [1, 1, 1, 1]>(input, weight)  # low
        [fbn1] b = BatchNormalization(a, scale, offset, mean, variance)  # low
        [bng1] c = BatchNormalization(b, scale, offset, mean, variance)  # low
        [infer1] d = Add(b, c)  # low
        [allow2] e = Conv<pads = [1, 1, 1, 1]>(d, weight)  # low
        [fetch1] fetch = Identity(e)""",
        inputs="float[8, 16, 56, 56] input, float[16, 16, 3, 3] weight, float[16] scale, float[16] offset, "
        "float[16] mean, float[16] variance",
        outputs="float[8, 16, 56, 56] fetch",
    ),
    "RepeatedAndListTypeAttrs": TensorFlowGraph(
        2,
        """
        [allow1] a = MatMul(input, input)  # low
        [clr1a] b = Identity(a)  # low
        [clr1b] c = Identity(a)
        [clr1c] d = Identity(a)
        [infer1] e = Sum(b, c, d)  # low
        [allow2] f = MatMul(e, e)  # low
        [fetch1] fetch = Identity(f)""",
    ),
    "ExistingCast": TensorFlowGraph(
        1,
        """
        [cst1] a = Cast<to = 1>(input)
        [allow1] b = MatMul(a, a)  # low
        [fetch1] fetch = Identity(b)""",
        inputs="bool[32, 32] input",
    ),
    "RecurrentEdgeColorMismatch": TensorFlowGraph(2, _RECURRENT, inputs=f"{_IN}, int64 trips, bool go"),
    "BatchMatMul": TensorFlowGraph(
        2,
        """
        [allow1] a = MatMul(input, input)  # low
        [fetch1] fetch = Identity(a)""",
        inputs="float[64, 32, 32] input",
        outputs="float[64, 32, 32] fetch",
    ),
    "TensorListSetGet": TensorFlowGraph(
        2,
        """
        [tl1] empty = SequenceEmpty<dtype = 1>()
        [tl1w1] l1 = SequenceInsert(empty, input)
        [allow1] a = MatMul(input, input)  # low
        [tl1w2] l2 = SequenceInsert(l1, a)
        [tl1r1] b = SequenceAt(l2, idx1)
        [infer1] c = Tanh(b)
        [allow2] d = MatMul(c, c)  # low
        [tl1w3] l3 = SequenceInsert(l1, d)
        [tl1r2] e = SequenceAt(l3, idx1)
        [tl2] empty2 = SequenceEmpty<dtype = 1>()
        [tl2w1] m1 = SequenceInsert(empty2, input)
        [tl2r1] f = SequenceAt(m1, idx2)
        [fetch1_] fetch1 = Identity(e)
        [fetch2_] fetch2 = Identity(f)""",
        inputs=f"{_IN}, int64 idx1, int64 idx2, int64 idx3",
        outputs=f"{_SQUARE} fetch1, {_SQUARE} fetch2",
    ),
    "TensorListFromTensor": TensorFlowGraph(
        2,
        """
        [allow1] a = MatMul(input, input)  # low
        [tl1] l = SplitToSequence<axis = 0, keepdims = 0>(a)
        [tl1r1] b = ConcatFromSequence<axis = 0, new_axis = 1>(l)
        [infer1] c = Tanh(b)
        [allow2] d = MatMul(c, c)  # low
        [fetch1] fetch = Identity(d)""",
    ),
    "TensorListPushPop": TensorFlowGraph(
        2,
        """
        at = Constant<value_int = -1>()
        [tl1] empty = SequenceEmpty<dtype = 1>()
        [tl1w1] l1 = SequenceInsert(empty, input)
        [allow1] a = MatMul(input, input)  # low
        [tl1w2] l2 = SequenceInsert(l1, a)
        [tl1r1] b = SequenceAt(l2, at)
        [infer1] c = Tanh(b)
        [allow2] d = MatMul(c, c)  # low
        [tl1w3] l3 = SequenceInsert(empty, d)
        [tl1r2] e = SequenceAt(l3, at)
        [tl2] empty2 = SequenceEmpty<dtype = 1>()
        [tl2w1] m1 = SequenceInsert(empty2, input)
        [tl2r1] f = SequenceAt(m1, at)
        [fetch1_] fetch1 = Identity(e)
        [fetch2_] fetch2 = Identity(f)""",
        outputs=f"{_SQUARE} fetch1, {_SQUARE} fetch2",
    ),
    "TensorListPushBackBatchAndConcatLists": TensorFlowGraph(
        2,
        """
        at = Constant<value_int = -1>()
        [tl1] empty = SequenceEmpty<dtype = 1>()
        [tl2] empty2 = SequenceEmpty<dtype = 1>()
        [allow1] a = MatMul(input, input)  # low
        [tl12w1] l1 = SequenceInsert(empty, a)
        [tl12w2] l2 = SequenceInsert(empty2, a)
        [tl3a] b = SequenceAt(l2, at)
        [tl3] l3 = SequenceInsert(l1, b)
        [tl3r1] c = SequenceAt(l3, at)
        [infer1] d = Tanh(c)
        [allow2] e = MatMul(d, d)  # low
        [fetch1] fetch = Identity(e)""",
    ),
    # Its test counts no casts: four are what the types that it asks for come to.
    "TensorListThroughFunction": TensorFlowGraph(
        4,
        """
        at = Constant<value_int = -1>()
        [allow1] a = MatMul(input, input)  # low
        [infer1] b = Tanh(a)
        [tl1] empty = SequenceEmpty<dtype = 1>()
        [tl1w1] l1 = SequenceInsert(empty, b)
        [func1] l2, unread = lists.push_and_pop(l1, b)
        [tl1r1] c = SequenceAt(l2, at)
        [tl2] empty2 = SequenceEmpty<dtype = 1>()
        [tl2w1] m1 = SequenceInsert(empty2, b)
        [tl2r1] d = SequenceAt(m1, at)
        [allow2] e = MatMul(c, d)  # low
        [fetch1] fetch = Identity(e)""",
        functions=_PUSH_AND_POP,
    ),
}
