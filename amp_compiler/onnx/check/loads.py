"""Whether the installed ONNX Runtime loads a model, with its default optimizations, and what it says of the node."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import math
import re
from dataclasses import dataclass
from pathlib import Path

import onnx
import onnx.parser

from amp_compiler.errors import OnnxError
from amp_compiler.onnx.check.run import Engine, check_providers, session_options
from amp_compiler.onnx.model.infer import stripped
from amp_compiler.onnx.model.validate import make_inputs_of_stubs
from amp_compiler.onnx.model.walk import all_tensors, proto_graphs

WHOLE = 256_000_000
"""Bytes of data up to which a model is loaded with them. Of a larger one the large initializers become inputs."""
MOST_NODES = 4000
"""Nodes up to which a model is loaded."""
MOST_DEPTH = 1000
"""Nodes of a chain up to which it is: the time that a load in FP16 takes on the CPU grows with their square."""
_CHAIN = 0.75  # share of its nodes that stand behind one another in a chain; of a deep transformer it is about a half
_CRASHING = "NchwcTransformer"
"""The optimization at which ONNX Runtime 1.31 and 1.32 crash on a CPU: a `Transpose` before some FP16 products."""
_NODE = (
    re.compile(r"implementation for (?P<op>[\w.]+)\(\d+\) node with name '(?P<name>[^']*)'"),
    re.compile(r"Node[: ]*\((?P<name>[^)]*)\) Op ?\((?P<op>\w*)\)"),
    re.compile(r"Op(?:type)? \((?P<op>[\w:.]*)\).* (?:in )?node \((?P<name>[^)]*)\)"),
    re.compile(r"[Nn]ode[: ]+(?:with name )?['(](?P<name>[^')]*)[')](?P<op>)"),
)


@dataclass(frozen=True)
class Refusal:
    """Why ONNX Runtime does not load a model.

    Args:
        engine: `onnxruntime` with its version.
        node: name of the node that it speaks of; empty where it names none.
        op: its op, where that is told.
        problem: what it says.
        kernel: all that is missing is a kernel of the execution provider; another one may have it.
        before: it does not load the original either.
    """

    engine: str
    node: str
    op: str
    problem: str
    kernel: bool = False
    before: bool = False

    def __str__(self) -> str:
        what = f"at node '{self.node}'" if self.node else "at a node that it does not name"
        op = f" ({self.op})" if self.op else ""
        also = ", as it does not load the original" if self.before else ""
        return f"{self.engine} does not load it{also}: {what}{op}: {self.problem}"


def is_installed() -> bool:
    """Whether there is an ONNX Runtime."""
    return importlib.util.find_spec("onnxruntime") is not None


def refusal_of(
    proto: onnx.ModelProto, folder: Path | None, *, engine: Engine | None = None, light: bool = False
) -> Refusal | None:
    """Load a model once, and say why it does not load.

    Args:
        proto: the model.
        folder: where its external data lie.
        engine: execution providers and libraries of ops; the CPU alone by default.
        light: load it without its large data, which become inputs.

    Returns:
        `None` where it loads, where no ONNX Runtime is installed, and for a model that is too long, see `is_long`.
    """
    if not is_installed() or is_long(proto):
        return None
    if light or _data_bytes(proto) > WHOLE:
        proto = stripped(proto)
        make_inputs_of_stubs(proto.graph)
    problem = _load(proto, folder, engine)
    if problem is None:
        return None
    if any(not node.name for graph in proto_graphs(proto.graph) for node in graph.node):
        named = onnx.ModelProto()
        named.CopyFrom(proto)
        for node in (node for graph in proto_graphs(named.graph) for node in graph.node if not node.name):
            node.name = f"of '{next(iter(node.output), '')}'".replace("'", "")  # by what it makes
        problem = _load(named, folder, engine) or problem
    return _read(problem)


def is_long(proto: onnx.ModelProto) -> bool:
    """True for a model that is not loaded, because that would take long: it has many nodes, or is one long chain."""
    counts = itertools.accumulate(len(graph.node) for graph in proto_graphs(proto.graph))
    if any(count > MOST_NODES for count in counts):
        return True
    if len(proto.graph.node) <= MOST_DEPTH:
        return False
    depth: dict[str, int] = {}
    for node in proto.graph.node:
        here = 1 + max([depth.get(name, 0) for name in node.input], default=0)
        depth.update(dict.fromkeys(node.output, here))
    return max(depth.values(), default=0) > max(MOST_DEPTH, _CHAIN * len(proto.graph.node))


def _load(proto: onnx.ModelProto, folder: Path | None, engine: Engine | None) -> str | None:
    """What ONNX Runtime says against a model; `None` where it loads."""
    import onnxruntime as ort

    used = engine or Engine()
    try:
        options = session_options(used, folder)
        options.log_severity_level = 4
        options.intra_op_num_threads = 1
        session = ort.InferenceSession(
            proto.SerializeToString(), options,
            providers=list(used.providers), enable_fallback=0, disabled_optimizers=[_CRASHING],
        )  # fmt: skip
    except OnnxError:
        raise
    except Exception as cause:  # noqa: BLE001  its errors share no base class but Exception
        return str(cause)
    check_providers(session, used)
    return None


def _read(problem: str) -> Refusal:
    import onnxruntime as ort

    first = next((match for pattern in _NODE if (match := pattern.search(problem)) is not None), None)
    said = re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", "", " ".join(problem.split()))
    return Refusal(
        f"onnxruntime {ort.__version__}",
        first["name"] if first is not None else "",
        first["op"] if first is not None else "",
        said if len(said) <= 300 else f"{said[:300]}…",
        "NOT_IMPLEMENTED" in problem,
    )


def _data_bytes(proto: onnx.ModelProto) -> int:
    return sum(4 * math.prod(tensor.dims) for tensor in all_tensors(proto))  # at most, of what matters


@functools.cache
def latest_opset() -> int | None:
    """The latest opset of ONNX's own domain that the installed ONNX Runtime loads; `None` without one."""
    if not is_installed():
        return None
    for version in range(onnx.defs.onnx_opset_version(), 6, -1):
        head = f'<ir_version: 8, opset_import: ["" : {version}]>'
        smallest = onnx.parser.parse_model(f"{head} g (float[1] x) => (float[1] y) {{ y = Identity (x) }}")
        if _load(smallest, None, None) is None:
            return version
    return None
