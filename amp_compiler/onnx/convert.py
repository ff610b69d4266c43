"""`amp.convert_onnx`: an ONNX model in, the same model in mixed precision out."""

from __future__ import annotations

import contextlib
import gc
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx

from amp_compiler.errors import OnnxError
from amp_compiler.ir.dtypes import LowArgument, low_type
from amp_compiler.ir.files import output_file
from amp_compiler.ir.plan import PrecisionPlan, many
from amp_compiler.onnx import needs_onnx
from amp_compiler.onnx.check.batches import check_batches, noting_sizes
from amp_compiler.onnx.check.loads import MOST_DEPTH, MOST_NODES, Refusal, is_installed, is_long, refusal_of
from amp_compiler.onnx.check.run import Engine, make_engine
from amp_compiler.onnx.later_opset import late_message
from amp_compiler.onnx.lowering.apply import apply_plan
from amp_compiler.onnx.lowering.lowered import Lowered
from amp_compiler.onnx.lowering.norms import guard_norms
from amp_compiler.onnx.lowering.pins import UNKNOWN_TYPE, UNNAMED_OP
from amp_compiler.onnx.lowering.scale_products import fp8_nodes, scale_products
from amp_compiler.onnx.lowering.transposes import guard_transposes
from amp_compiler.onnx.model.edit import kept_types, unique
from amp_compiler.onnx.model.infer import infer, is_sound, light_of
from amp_compiler.onnx.model.model import OnnxFile, OnnxModel, Source, open_model
from amp_compiler.onnx.model.save import save, to_proto
from amp_compiler.onnx.model.validate import raised_as_onnx
from amp_compiler.onnx.plan import plan_onnx
from amp_compiler.passes.onnx_plan.find_masks import mask_floors
from amp_compiler.policy.loader import load_rules
from amp_compiler.policy.targets import Target, load_target
from amp_compiler.policy.unused import warn_of_unused

logger = logging.getLogger("amp_compiler")
_SEEN = {  # what calibration sees, by the words of `pin_calibrated` and `pin_differences`
    "beside values beyond half of the range": "; fp16 ends at",
    "beside values that become subnormal or zero": "; the normal numbers",
    "for sums and differences that cancel": "they cancel",
}


@dataclass(frozen=True)
class Conversion:
    """What `convert_onnx` did.

    Args:
        plan: every node's verdict and every cast.
        model: the converted model; `None` where it was written to a file.
        path: the file that was written; `None` where there is none.
        changed: whether the plan, or a fusion, changed anything.
        report: what `verify=` found; `None` without it.
        refusal: why the installed ONNX Runtime does not load the model; `None` where it does, or there is none, or
            `check=False`.
        notes: what else there is to know, in a sentence each: nodes that stay FP32 for their opset alone, or for what
            calibration has seen, how many products have FP8 operands, what was fused and what a later opset would let
            be, that the model is too long to be loaded, and how much stays as it is for types that are not known and
            for ops of custom domains.
    """

    plan: PrecisionPlan
    model: onnx.ModelProto | None = None
    path: Path | None = None
    changed: bool = False
    report: Any = None
    refusal: Refusal | None = None
    notes: tuple[str, ...] = ()


@needs_onnx()
def convert_onnx(
    source: Source,
    output: str | Path | None = None,
    *,
    rules: Any = "default",
    dtype: LowArgument = "fp16",
    calibration: Any = None,
    keep_io_types: bool | Iterable[str] = True,
    verify: Any = None,
    raise_opset: bool = True,
    opset: int | None = None,
    check: bool = True,
    providers: Sequence[str] | None = None,
    custom_ops: Sequence[str | Path] | None = None,
    as_fp32: Iterable[str] | str = (),
    fuse: bool = False,
    target: Target | None = None,
) -> Conversion:
    """Convert an ONNX model to mixed precision.

    Casts become `Cast` nodes, stored data whose readers are all low are stored in 16 bits, and whatever the plan does
    not touch stays as it is, but for nodes with the name of an earlier one: they get one of their own, without which
    ONNX Runtime refuses the model. Model-local functions are written out where they are called.

    Args:
        source: path of a model, a `ModelProto`, or what `open_model` gave. It is never changed, and its file read once.
        output: file to write, atomically; without it the model is returned. Where the input keeps its data in a file
            of their own, so does the output: `<output>.data`, or where there is an older output
            `<output>.<digest>.data`, so that nobody ever reads a model with another one's data.
        rules: a preset name, a path, a dict or a `RuleSet`.
        dtype: `"fp16"` or `"bf16"`, or a `torch.dtype` or its name.
        calibration: batches (dicts from input name to NumPy array), an npz file or a folder of those: the FP32 model
            runs over them, and the magnitudes that its values reach decide too. Dimensions that the model leaves open
            count as large as the data have them, in `reduction_size` and in the bytes of casts. Rules that say
            `math: fp8` need it: the scales of operands come from it.
        keep_io_types: inputs and outputs of the graph keep their types. With `False`, floating-point outputs have the
            type in which they are made, and FP32 inputs that are read in the low type alone have the low type. Names
            of inputs and outputs: these keep their types, and the others are as with `False`.
        verify: batches as for `calibration`, over which both models run with true rounding after every op.
        raise_opset: raise the opset where only a later one admits the low type, as far as the installed ONNX Runtime
            loads the model; with `False` such ops stay FP32.
        opset: raise the model to this opset, and no further.
        check: refuse what ONNX's full checker refuses, have its inference look at the result, and load the result once
            in ONNX Runtime where that is installed; what that says against it is a warning, and `Conversion.refusal`.
        providers: execution providers of ONNX Runtime that calibration and verification run on and the result is loaded
            with, the first choice first; the CPU's by default.
        custom_ops: libraries of custom ops for ONNX Runtime, as paths.
        as_fp32: types whose parts of the model are made FP32 first, and then decided on by the rules: `fp64`, `fp16`,
            `bf16`. `dtype="bf16", as_fp32="fp16"` makes an FP16 model a BF16 one.
        fuse: write norms and GELUs that an exporter has left in parts as `LayerNormalization` (from opset 17 on),
            `RMSNormalization` (23) or `Gelu` (20), where that computes the same. By default all stay in parts: a norm
            in FP32, with casts around it. No opset is raised for it: name one with `opset`. The plan says of each what
            was done, or why it stays in parts.
        target: `"cpu"`, `"cuda"`, `"directml"`, `"webgpu"` or `"tensorrt"`: no node gets a type for which this
            execution provider has no kernel. `Conversion.notes` counts the nodes without a kernel and the casts that
            ONNX Runtime inserts, with the target and without. By default a file is to run anywhere.

    Returns:
        The plan, with the model or its path.

    Raises:
        AmpError: there is no such target, or it does not know the type.
        OnnxError: the model cannot be read, converted or written.
        RuleError: the rules cannot be loaded.

    Example:
        ```python
        done = amp.convert_onnx("m.onnx", "m.fp16.onnx", rules="default", dtype="fp16")
        print(done.plan.low_nodes, "of", len(done.plan.nodes), "nodes in fp16")
        ```
    """
    low = low_type(dtype)
    runners = None if target is None else load_target(target, low)
    rule_set = load_rules(rules)
    opened = open_model(source)
    written = None if output is None else _target(opened, output)
    kept = kept_types(keep_io_types, opened.proto.graph)
    engine = make_engine(providers, custom_ops)
    for name, batches in (("calibration", calibration), ("verify", verify)):
        check_batches(() if batches is None else batches, name)
    ranges: Mapping[str, float] = {}
    sizes: dict[str | tuple[str, int], int] = {}
    if calibration is not None:
        from amp_compiler.onnx.check.calibrate import calibrate

        ranges = calibrate(opened, noting_sizes(calibration, opened, sizes), engine=engine)
    converted = None
    with _paused_collector():
        plan, lowered = plan_onnx(
            opened,
            rule_set,
            low,
            ranges,
            keep_io_types=kept,
            raising=raise_opset,
            check=check,
            opset=opset,
            sizes=sizes,
            as_fp32=as_fp32,
            fused=fuse,
            target=runners,
            calibrated=calibration is not None,
        )
        look = _Look(opened, lowered.model, engine, check)
        late = late_message(lowered, rule_set, raising=raise_opset, opset=opset)
        warn_of_unused(plan.unused_rules, lowered.model.ir.graph.name or "the ONNX model")
        with raised_as_onnx(opened.name, "it cannot be converted"):
            _rename_duplicates(lowered)
            floors = mask_floors(lowered.graph, plan.labels, low)
            changed = apply_plan(lowered, plan, floors=floors, keep_io_types=kept)
            if changed:
                guard_norms(lowered)
            changed |= guard_transposes(lowered, plan)
            changed |= scale_products(lowered, plan, ranges)
            if written is None:
                converted = to_proto(lowered.model)
                look(converted, lowered.model.folder)
            else:
                save(lowered.model, written, look)
        changed, graph_notes = changed or lowered.fused > 0, lowered.notes
        del lowered  # with its neutral graph, which the collector would walk
    report = None
    result: Path | onnx.ModelProto | None = written or converted
    if verify is not None and result is not None:
        from amp_compiler.onnx.check.verify import verify as compare

        report = compare(opened, result, verify, engine=engine)
    if look.refusal is not None and not look.refusal.kernel:
        logger.warning("%s: %s", written or opened.name, look.refusal)
    if late and not raise_opset:
        logger.warning("%s", late)
    notes = (
        *([late] if late else []),
        *_calibrated(plan),
        *_unconverted(plan),
        *_in_fp8(plan),
        *graph_notes,
        *look.notes,
    )
    return Conversion(plan, converted, written, changed, report, look.refusal, notes)


def _calibrated(plan: PrecisionPlan) -> Iterator[str]:
    """How many nodes are FP32 for what calibration has seen, by cause."""
    reasons = [node.reason for node in plan.nodes if " in calibration" in node.reason]
    counts = {cause: sum(words in reason for reason in reasons) for cause, words in _SEEN.items()}
    causes = ", ".join(f"{count} {cause}" for cause, count in counts.items() if count)
    if causes:
        yield f"by calibration {len(reasons)} of {many(len(plan.nodes), 'node')} in FP32: {causes}"


def _unconverted(plan: PrecisionPlan) -> Iterator[str]:
    """How much is converted, and why not more, where unknown types or ops of custom domains are the cause."""
    unknown = [node for node in plan.nodes if node.reason.endswith(UNKNOWN_TYPE)]
    unnamed = Counter(node.op for node in plan.nodes if node.reason == UNNAMED_OP)
    much = f"{plan.low_nodes} of {many(len(plan.nodes), 'node')} in {plan.dtype}"
    if unknown:
        first = unknown[0]
        yield f"{much}: {many(len(unknown), 'type')} of values not inferred, from node '{first.name}' ({first.op}) on"
    if unnamed:
        listed = ", ".join(f"{count} {op}" for op, count in sorted(unnamed.items()))
        yield f"{much}: neither the op table nor a rule names {listed}"


def _in_fp8(plan: PrecisionPlan) -> Iterator[str]:
    """How many products have FP8 operands, and why others have none that a rule asks for."""
    said = (node.reason.partition("; not in FP8: ")[2] for node in plan.nodes)
    count, why_not = len(fp8_nodes(plan)), Counter(why for why in said if why)
    if count or why_not:
        rest = "".join(f"; {number} stay in 16 bits: {why}" for why, number in sorted(why_not.items()))
        yield f"products of FP8 operands: {count}{rest}"


class _Look:
    """Looks at a result before it is put in place, with inference and ONNX Runtime, and keeps what that says.

    Args:
        opened: the original, which is loaded too where the result does not load.
        model: what the result is made of.
        engine: what it is loaded with.
        wanted: whether anything is to be checked.
    """

    def __init__(self, opened: OnnxFile, model: OnnxModel, engine: Engine, wanted: bool) -> None:
        self.opened, self.model, self.engine, self.wanted = opened, model, engine, wanted
        self.refusal: Refusal | None = None
        self.notes: tuple[str, ...] = ()

    def __call__(self, proto: onnx.ModelProto, folder: Path | None) -> None:
        """Refuse a result whose types disagree, unless those of the input do already; then load it once."""
        if not self.wanted:
            return
        try:
            infer(light_of(proto, folder), strict=True)
        except OnnxError as wrong:
            if is_sound(self.model.proto, self.model.folder):
                raise OnnxError(
                    f"the converted model is not valid: {wrong.what}",
                    hint="report this as a bug, with the model; rules that keep the node in FP32 avoid it",
                ) from wrong
        if is_installed() and is_long(proto):
            self.notes = (
                f"it was not loaded in ONNX Runtime, which takes long with more than {MOST_NODES} nodes, or"
                f" a chain of more than {MOST_DEPTH}",
            )
        refusal = refusal_of(proto, folder, engine=self.engine)
        if refusal is not None:
            before = refusal_of(self.opened.proto, self.opened.folder, engine=self.engine)
            self.refusal = replace(refusal, before=before is not None)


@contextlib.contextmanager
def _paused_collector() -> Iterator[None]:
    """No garbage collection while a graph is built, which would walk it over and over: two fifths of the time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _target(opened: OnnxFile, output: str | Path) -> Path:
    if not isinstance(output, str | Path):
        raise OnnxError(f"amp_compiler cannot write to a {type(output).__name__}", hint="give a path, or no output")
    target, path = output_file(output, OnnxError), opened.path
    if path is not None:
        same = path.samefile(target) if path.exists() and target.exists() else path.resolve() == target
        if same:
            raise OnnxError("the output is the input", where=str(output), hint="name another output file")
    return Path(output)


def _rename_duplicates(lowered: Lowered) -> None:
    """Give each node with the name of an earlier one in its graph the name that the neutral graph has for it."""
    if not lowered.renamed:
        return
    graphs = lowered.model.graphs
    taken = {node.name or "" for graph in graphs for node in graph}
    neutral = {node: name for name, node in lowered.nodes.items()}
    for graph in graphs:
        seen: set[str] = set()
        for node in graph:
            if not node.name or node in lowered.model.unnamed:
                continue
            if node.name in seen:
                node.name = unique(neutral.get(node, node.name), taken)
            seen.add(node.name)
