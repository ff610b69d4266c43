"""The way in: a model is lowered to a `PrecisionGraph`. `apply` carries a plan back.

The graph is planned for the device `onnx`: a file runs anywhere, and is run rather than trained. Rules may match that.

Bodies of If, Loop and Scan are written out before the node that holds them. That node reads the results of its bodies
as operands after its own (`then_branch.0`), and everything that crosses the border of a body keeps its captured type.
Bodies of Loop and Scan count as the region around them, so that a captured value is cast once, outside; each branch of
an If is a region of its own.

A sequence of tensors is a value of the type of its tensors that no cast takes (`PrecisionGraph.lists`), an empty one a
constant. Initializers, `Constant` and `ConstantOfShape` nodes are parameters and constants, whose casts cost nothing:
the stored data are rounded. An initializer that is also an input of the graph keeps its type, like a buffer that others
may write.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import onnx_ir as ir

from amp_compiler.ir.dtypes import DType
from amp_compiler.ir.facts import Execution, StoredNumbers
from amp_compiler.ir.graph import Pin, PrecisionGraph
from amp_compiler.onnx.lowering.builder import Builder
from amp_compiler.onnx.lowering.lowered import Lowered
from amp_compiler.onnx.model.data import examine, tensor_of
from amp_compiler.onnx.model.edit import KeptTypes, keeps
from amp_compiler.onnx.model.model import OnnxModel
from amp_compiler.onnx.model.types import neutral_type

# What starting a cast costs where a runtime runs a file node by node, in bytes that it moves in that time. The CPU
# provider of ONNX Runtime takes 0.3 µs a node, in which it moves about 4 KB; a GPU starts no faster, and moves more.
CAST_OVERHEAD = 4096
FILE = Execution(
    stored_casts_free=True,
    cast_overhead=CAST_OVERHEAD,
    widest_is_open=True,
    halves_stay=True,
    casts_join=True,
    weights_unknown=True,
    run_only=True,
    scales_stored=True,
)
"""How a file is run: node by node, each cast being one, and anywhere."""
_NO_NUMBERS = (DType.OTHER, DType.COMPLEX32, DType.COMPLEX64, DType.COMPLEX128)


def lower(
    model: OnnxModel,
    low: DType,
    *,
    named: Callable[[str, str], bool] | None = None,
    keep_io_types: KeptTypes = True,
    keep_quantized: bool = True,
    pins: Mapping[str, Pin] | None = None,
) -> Lowered:
    """Lower a model.

    Args:
        model: as `model.read_model` gives it. It is not changed.
        low: the 16-bit type; which operands may have it is read from `onnx.defs` for the model's own opset.
        named: whether a rule names an op of a custom domain, by op and node name; none does without it.
        keep_io_types: which outputs keep their types; other floating-point ones take the type in which they are made.
        keep_quantized: what quantises stays as it is, with what stands beside it; else the rules decide.
        pins: by name of a node, what is demanded of it where the model itself demands nothing.

    Returns:
        The neutral graph and the way back. Values have their ONNX names, nodes too as far as they are unique.

    Example:
        ```python
        lowered = lower(read_model(open_model("m.onnx")), DType.FLOAT16)
        plan = make_plan(lowered.graph, load_rules("default"), DType.FLOAT16)
        ```
    """
    lowered = Lowered(model, PrecisionGraph("onnx", FILE), low)
    main = model.ir.graph
    builder = Builder(lowered, named or (lambda op, name: False), keep_quantized, pins or {})
    builder.add_graph(main, "")
    for index, value in enumerate(main.outputs):
        name = builder.names.get(value)
        if name is None:
            continue
        floating = lowered.graph.values[name].dtype in (DType.FLOAT32, low)
        if keeps(keep_io_types, value) or name in lowered.graph.lists or not floating:
            lowered.graph.outputs.append(name)
            lowered.returned.append(index)
    values = lowered.values
    lowered.graph.stored_numbers = functools.cache(lambda name: _numbers(values.get(name), low))
    return lowered


def _numbers(value: ir.Value | None, low: DType) -> StoredNumbers | None:
    """What is known of the data stored under a name; `None` where these are no real numbers, or there are none."""
    tensor = tensor_of(value) if value is not None else None
    if tensor is None or tensor.size == 0 or neutral_type(tensor.dtype.value) in _NO_NUMBERS:
        return None
    return examine(tensor, low)
