"""What the FX frontend and the passes on FX share: types, arguments, source lines, and refreshing a rewritten graph."""

import builtins
import contextlib
import functools
import re
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from amp_compiler.errors import LoweringError, ValuesReadError
from amp_compiler.fx.meta import Key
from amp_compiler.fx.torch_private.tracing import new_graph_module, own_decompositions, recorded_graph
from amp_compiler.ir.dtypes import DType
from amp_compiler.ir.graph import Attr
from amp_compiler.ops.fp8 import fp8_product
from amp_compiler.ops.recurrent import KINDS
from amp_compiler.ops.recurrent_network import empty_results
from amp_compiler.ops.typed_op import typed_op

CAST = torch.ops.aten.to.dtype
LOW_TYPES = (torch.float16, torch.bfloat16)
_TO_NEUTRAL: dict[torch.dtype, DType] = {
    getattr(torch, dtype.value): dtype for dtype in DType if isinstance(getattr(torch, dtype.value, None), torch.dtype)
}
_TO_TORCH = {neutral: dtype for dtype, neutral in _TO_NEUTRAL.items()}


def neutral_dtype(dtype: torch.dtype) -> DType:
    """The neutral type of a torch type; `DType.OTHER` for quantized and sub-byte ones."""
    if "float8" in str(dtype):
        return DType.FLOAT8
    return _TO_NEUTRAL.get(dtype, DType.OTHER)


def torch_dtype(dtype: DType) -> torch.dtype:
    """The torch type of a neutral type.

    Raises:
        LoweringError: for a type that torch does not have.
    """
    if dtype not in _TO_TORCH:
        raise LoweringError(f"torch has no element type for {dtype.value}", hint="keep such values out of the plan")
    return _TO_TORCH[dtype]


def is_float(dtype: torch.dtype) -> bool:
    """True for the real floating-point types that casts may be placed on."""
    return neutral_dtype(dtype).is_float


def node_tensor(node: fx.Node) -> torch.Tensor | None:
    """The fake tensor that a node makes; `None` where it makes none, or several."""
    value = node.meta.get("val")
    return value if isinstance(value, torch.Tensor) else None


def is_single_number(tensor: torch.Tensor) -> bool:
    """Whether a tensor has one element; nothing is asked of a symbolic size, which would put a bound on it."""
    return all(isinstance(size, int) and size == 1 for size in tensor.shape)


def hint(size: int | torch.SymInt) -> int:
    """A dimension as a number: the size seen at capture for a symbolic one, 1 where torch knows none."""
    if isinstance(size, int):
        return size
    known = size.node.hint if size.node.has_hint() and not size.node.is_nested_int() else None
    return int(known) if known is not None else 1


def canonical_op(target: Any) -> str:
    """Canonical op name of a node's target: no overload, no in-place underscore.

    Example:
        >>> canonical_op(torch.ops.aten.add_.Tensor)
        'aten.add'
    """
    if isinstance(target, torch._ops.OpOverload):
        namespace, _, name = target._schema.name.partition("::")
        inplace = name.endswith("_") and not name.endswith("__") and target._schema.is_mutable
        return f"{namespace}.{name[:-1] if inplace else name}"
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"higher_order.{target.name()}"
    module = getattr(target, "__module__", "") or "builtins"
    return f"{module.lstrip('_')}.{getattr(target, '__name__', str(target))}"


def op_of(node: fx.Node) -> str:
    """The canonical name of what a call computes: of the operator within, where the call carries one out."""
    carries = node.target in (typed_op, fp8_product)
    return canonical_op(node.args[0] if carries else node.target)


def flat_arguments(node: fx.Node) -> Iterator[tuple[str, tuple[Any, ...], Any]]:
    """Every argument of a node in schema order as (slot, path, argument); lists are opened one level.

    The path says where it stands: `(position or keyword,)`, with the index in the list behind it where there is one.
    """
    names = _argument_names(node)
    for position, argument in enumerate(node.args):
        slot = names[position] if position < len(names) else str(position)
        yield from _open_list(slot, (position,), argument)
    for keyword in sorted(node.kwargs, key=lambda key: names.index(key) if key in names else len(names)):
        yield from _open_list(keyword, (keyword,), node.kwargs[keyword])


def _open_list(slot: str, path: tuple[Any, ...], argument: Any) -> Iterator[tuple[str, tuple[Any, ...], Any]]:
    if isinstance(argument, (list, tuple)) and any(isinstance(item, fx.Node) for item in argument):
        for index, item in enumerate(argument):
            yield f"{slot}.{index}", (*path, index), item
    else:
        yield slot, path, argument


def _argument_names(node: fx.Node) -> list[str]:
    if isinstance(node.target, torch._ops.OpOverload):
        return [argument.name for argument in node.target._schema.arguments]
    return []


def schema_argument(node: fx.Node, name: str) -> Any:
    """The argument of that schema name as the node was called; its default, or `None`, where it was left out."""
    if name in node.kwargs:
        return node.kwargs[name]
    names = _argument_names(node)
    if name in names and names.index(name) < len(node.args):
        return node.args[names.index(name)]
    if isinstance(node.target, torch._ops.OpOverload):
        for declared in node.target._schema.arguments:
            if declared.name == name and declared.has_default_value():
                return declared.default_value
    return None


def tensor_operands(node: fx.Node) -> list[tuple[str, tuple[Any, ...], fx.Node]]:
    """The arguments of a node that are tensors, in schema order, as (slot, path, node that makes it)."""
    return [
        (slot, path, argument)
        for slot, path, argument in flat_arguments(node)
        if isinstance(argument, fx.Node) and node_tensor(argument) is not None
    ]


def rename_placeholder(node: fx.Node, name: str) -> None:
    """Give a placeholder a name, in the graph and in the signature of the printed code.

    An argument may be called as one of Python's own, such as `input`, which fx gives to no node by itself.
    """
    if hasattr(builtins, name) and all(other.name != name for other in node.graph.nodes):
        node.name = name
    else:
        node._rename(name)
    node.target = node.name


def results_of(graph: fx.Graph) -> list[Any]:
    """The values that a flat graph returns, in order."""
    results: Any = graph.output_node().args[0]
    return list(results) if isinstance(results, (list, tuple)) else [results]


def replace_other_uses(old: fx.Node, new: fx.Node) -> None:
    """Let every reader of `old` but `new` itself read `new`."""
    old.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)


def replace_operand(node: fx.Node, path: tuple[Any, ...], new: fx.Node) -> None:
    """Put `new` in the place of one argument and leave every other use of the old one alone."""
    head, rest = path[0], path[1:]
    old = node.args[head] if isinstance(head, int) else node.kwargs[head]
    changed: Any = new
    if rest:
        items = list(old)  # type: ignore[arg-type]
        items[rest[0]] = new
        changed = items
    if isinstance(head, int):
        node.update_arg(head, changed)
    else:
        node.update_kwarg(head, changed)


def neutral_attribute(argument: Any) -> Attr:
    """A non-tensor argument as plain data: types and devices by name, symbolic sizes as text."""
    if argument is None or isinstance(argument, (bool, int, float, str)):
        return argument
    if isinstance(argument, torch.dtype):
        return neutral_dtype(argument).value
    if isinstance(argument, (list, tuple)):
        return tuple(neutral_attribute(item) for item in argument)
    return str(argument)


def call_before(place: fx.Node, target: Any, arguments: Sequence[Any], phase: str, **options: Any) -> fx.Node:
    """Add a call in front of a node, with the fake tensors that it makes.

    Args:
        place: the node.
        target: an operator that runs on fake tensors.
        arguments: nodes, lists of them, and numbers.
        phase: `forward`, `backward` or `update`; empty in a graph of one phase.
        options: named arguments that are no nodes.
    """
    values = fx.node.map_arg(tuple(arguments), lambda argument: argument.meta["val"])
    with place.graph.inserting_before(place), torch.no_grad():
        node = place.graph.call_function(target, tuple(arguments), options)
        node.meta = {"val": target(*values, **options)} | ({Key.PHASE: phase} if phase else {})
    return node


def trace_before(
    place: fx.Node, function: Callable[..., Any], arguments: Sequence[fx.Node], phase: str
) -> list[fx.Node]:
    """Trace a function of tensors and add its nodes in front of a node; a result that is an argument is that node.

    Args:
        place: the node.
        function: of the arguments' tensors; returns one tensor or several.
        arguments: nodes of the graph.
        phase: `forward`, `backward` or `update`; empty in a graph of one phase.
    """
    recorded = recorded_graph(function, *(node.meta["val"] for node in arguments))
    return splice_before(place, recorded, arguments, phase)


def splice_before(place: fx.Node, traced: fx.Graph, arguments: Sequence[fx.Node], phase: str) -> list[Any]:
    """Add the nodes of a traced graph in front of a node; the rest is as for `trace_before`. A result may be `None`."""
    graph = place.graph
    environment = dict(zip(traced.find_nodes(op="placeholder"), arguments, strict=True))
    with graph.inserting_before(place):
        for node in traced.nodes:
            if node.op == "call_function":
                environment[node] = graph.node_copy(node, lambda old: environment[old])
                if phase:
                    environment[node].meta[Key.PHASE] = phase
    return [fx.node.map_arg(item, environment.__getitem__) for item in results_of(traced)]  # type: ignore[misc]


def replace_call(call: fx.Node, by: Any) -> None:
    """Let another value, or those of a list for a call that returns several, take the place of a call."""
    if isinstance(by, (list, tuple)):
        for item in list(call.users):
            replace_call(item, by[item.args[1]])  # type: ignore[index]
    elif call.users:
        call.replace_all_uses_with(by)
    call.graph.erase_node(call)


def add_placeholder(last: fx.Node, name: str, meta: dict[Any, Any]) -> fx.Node:
    """Add a placeholder behind another, with its metadata."""
    with last.graph.inserting_after(last):
        placeholder = last.graph.placeholder(name)
    placeholder.meta = meta
    return placeholder


def copy_graph(graph_module: fx.GraphModule) -> fx.GraphModule:
    """A copy that may be rewritten: of the nodes with their metadata, not of the tensors in it."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    results = graph.graph_copy(graph_module.graph, copies)
    graph.output(results)
    for node, copy in copies.items():
        copy.meta = dict(node.meta)
    return new_graph_module(graph_module, graph)


def annotate_calls(graph_module: fx.GraphModule) -> None:
    """Let what is captured of the calls of a graph have their `meta["custom"]`.

    Args:
        graph_module: a traced module, which is changed.
    """
    for node in graph_module.graph.nodes:
        if node.op == "call_function" and "custom" in node.meta:
            node.target = _annotated(node.target, node.meta["custom"])
    graph_module.recompile()


def _annotated(function: Callable[..., Any], custom: dict[str, Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with fx.traceback.annotate(custom):
            return function(*args, **kwargs)

    return call


def upcast_behind_inputs(graph: fx.Graph, source: fx.Node) -> fx.Node:
    """A cast of a placeholder to FP32, right behind the placeholders."""
    return call_before(graph.find_nodes(op="placeholder")[-1].next, CAST, [source, torch.float32], "")


def own_upcasts(graph: fx.Graph) -> list[fx.Node]:
    """The casts that widen a 16-bit value for one node that computes in FP32, as `fx.widen` places them.

    Without those of values that are changed in place, of which a copy is needed.
    """
    casts = []
    for node in graph.find_nodes(op="call_function", target=CAST):
        source: Any = node.args[0]
        tensor = node_tensor(source)
        kept = Key.PLACED in node.meta or Key.PIN in node.meta or source.meta.get(Key.VOLATILE)
        if not kept and tensor is not None and tensor.dtype in LOW_TYPES and node.args[1] is torch.float32:
            casts.append(node)
    return casts


_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')
_TORCH_ROOT = str(Path(torch.__file__).parent)
_TORCH_ELSEWHERE = re.compile(r"[/\\](site|dist)-packages[/\\]torch[/\\]")
_OWN_ROOT = f"{Path(__file__).parents[1]}/"
_SITE_ROOTS = tuple(sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}))


def user_source(stack_trace: str | None) -> str:
    """`file:line` of the innermost frame that is neither torch's nor ours.

    Files of installed packages are named from the package on. A file of ONNX may have been made on another machine.
    """
    frames = [
        match
        for match in _FRAME.finditer(stack_trace or "")
        if not (match["file"].startswith((_TORCH_ROOT, _OWN_ROOT, "<")) or _TORCH_ELSEWHERE.search(match["file"]))
    ]
    if not frames:
        return ""
    return f"{shorten_path(frames[-1]['file'])}:{frames[-1]['line']}"


def shorten_path(file: str) -> str:
    """A source path as people know it: relative to the working folder, or from the package's name on."""
    for root in (*_SITE_ROOTS, str(Path.cwd())):
        if file.startswith(root + "/"):
            return file[len(root) + 1 :]
    return file


_DYNAMO_ROOT = re.compile(r"^L\['?\w+'?\]")
_INDEX = re.compile(r"(?:\._modules)?\[['\"]?(\w+)['\"]?\]")


def module_of(node: fx.Node) -> tuple[str, str]:
    """Qualified name and class name of the module whose forward called the node; empty at the root."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return "", ""
    return _module_of(*next(reversed(stack.values())))


@functools.lru_cache(4096)
def _module_of(path: str, cls: Any) -> tuple[str, str]:
    name = _INDEX.sub(r".\1", _DYNAMO_ROOT.sub("", path)).replace("._modules.", ".").strip(".")
    type_name = cls if isinstance(cls, str) else f"{cls.__module__}.{cls.__qualname__}"
    return re.sub(r"@\d+$", "", name), type_name.rpartition(".")[2]


def sparse_node(graph: fx.Graph) -> str:
    """The name of the first node that makes a sparse tensor; empty where there is none."""
    values = ((node, value) for node in graph.nodes for value in pytree.tree_leaves(node.meta.get("val")))
    sparse = (
        node.name for node, value in values if isinstance(value, torch.Tensor) and value.layout is not torch.strided
    )
    return next(sparse, "")


def refresh(graph_module: fx.GraphModule) -> None:
    """Compute every node's fake tensor anew after a rewrite, and recompile the module.

    Raises:
        LoweringError: where an op does not take the types that it is given; names the node and the model's line.
    """
    graph_module.graph.lint()
    graph_module.recompile()
    examples = [node.meta["val"] for node in graph_module.graph.find_nodes(op="placeholder")]
    modes = [value.fake_mode for value in examples if hasattr(value, "fake_mode")]
    prop = _Propagator(graph_module, modes[0] if modes else None)
    with torch.no_grad():
        prop.propagate_dont_convert_inputs(*examples)
    if prop.copies:
        graph_module.recompile()


_READS_VALUES = ("DataDependentOutputException", "DynamicOutputShapeException", "GuardOnDataDependentSymNode")


_QUICKER = {getattr(torch.ops.aten, kind).input: getattr(torch.ops.amp_compiler, kind).default for kind in KINDS}


_RECURRENT = {getattr(torch.ops.aten, kind).input: kind for kind in KINDS}


class _Propagator(FakeTensorProp):
    """Runs a graph on fake tensors.

    Attributes:
        copies: whether a view has become a copy: of the types that are planned, its operand lies otherwise in memory,
            as the result of attention does whose FP16 runs by other kernels than FP32.
    """

    copies = False

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator; one that ATen runs in thousands is run as ours, which gives the same types and shapes.

        On a GPU a recurrent network asks cuDNN how its weights lie, which those of a fake tensor do nowhere.
        """
        if target in _RECURRENT and args[0].device.type != "cpu":
            return empty_results(*args, **kwargs)
        if target is typed_op and args[0] in _RECURRENT and args[1][0].device.type != "cpu":
            args = (getattr(torch.ops.amp_compiler, _RECURRENT[args[0]]).default, *args[1:])
        run = _QUICKER.get(target, target)
        try:
            return super().call_function(run, args, kwargs)
        except RuntimeError as cause:
            if "symbolic sizes" not in str(cause):
                raise
            with own_decompositions():  # what ATen opens in C++ may not know sizes that vary: matmul in torch 2.11
                return super().call_function(run, args, kwargs)

    def run_node(self, n: fx.Node) -> Any:
        """Run one node on fake tensors; an error says where. A number that is read stays what it was captured as."""
        if n.target is torch.ops.aten.item.default and isinstance(n.meta.get("val"), (torch.SymFloat, torch.SymInt)):
            return n.meta["val"]
        try:
            if n.target is torch.ops.aten.view.default:
                with contextlib.suppress(RuntimeError, ValueError):
                    return super().run_node(n)
                n.target, self.copies = torch.ops.aten.reshape.default, True
            return super().run_node(n)
        except Exception as cause:  # any op may raise anything on types that it does not take
            if type(cause).__name__ in _READS_VALUES or "data is not allocated" in str(cause):
                raise ValuesReadError(
                    f"node '{n.name}' ({op_of(n)}) reads the values of a tensor while the graph is made",
                    where=user_source(n.meta.get("stack_trace")),
                    hint="give it Python numbers, or tensors that need not be read, such as a mask in torch.where",
                ) from cause
            raise LoweringError(
                f"node '{n.name}' ({op_of(n)}) cannot run on the planned types: {cause}",
                where=user_source(n.meta.get("stack_trace")),
                hint=f"add a rule that keeps it in fp32: match: {{op: {op_of(n)}}}, precision: fp32",
            ) from cause
