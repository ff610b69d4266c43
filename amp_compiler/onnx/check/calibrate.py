"""Calibration: the largest magnitude of every float value of an ONNX model over a user's batches."""

from __future__ import annotations

from amp_compiler.onnx.check.batches import Batches, iterate_batches
from amp_compiler.onnx.check.run import Engine, Runner, open_to_run
from amp_compiler.onnx.check.taps import MEASURED, add_taps
from amp_compiler.onnx.model.model import Source, value_types


def calibrate(
    model: Source,
    batches: Batches,
    *,
    engine: Engine | None = None,
) -> dict[str, float]:
    """Run the FP32 model over all batches and measure its float values.

    All float inputs and float results of nodes are measured inside the run, each given out as one number, so that
    memory stays that of a plain run however many values there are, and the batches are read once. Values inside the
    bodies of `If`, `Loop` and `Scan` and of model-local functions cannot be outputs of a model and are not measured.

    Args:
        model: the model, its path, or what `open_model` gave; external weights are read by ONNX Runtime alone.
        batches: an iterable of {input name: array}, an npz file (one batch), or a folder of npz files.
        engine: execution providers and libraries of ops; the CPU alone by default.

    Returns:
        Value name to largest magnitude, in the order of the graph; infinite where an element was not finite in any
        batch, 0 for an empty tensor.

    Raises:
        OnnxError: the model or a batch cannot be read or run.

    Example:
        >>> ranges = calibrate("model.onnx", [{"x": numpy.ones((2, 8), numpy.float32)}])
        >>> ranges["x"]
        1.0
    """
    loaded = open_to_run(model)
    graph = loaded.proto.graph
    types = value_types(loaded)
    values = [value.name for value in graph.input] + [name for node in graph.node for name in node.output if name]
    weights = {tensor.name for tensor in graph.initializer}
    chosen = [name for name in dict.fromkeys(values) if types.get(name) in MEASURED and name not in weights]
    tapped, taps = add_taps(loaded.proto, chosen, types)
    del tapped.graph.output[: len(graph.output)]  # only the numbers are wanted
    runner = Runner(tapped, loaded.folder, loaded.name, engine) if taps else None
    ranges = {tap.value: 0.0 for tap in taps}
    for batch in iterate_batches(batches, loaded):
        outputs = runner.run(batch) if runner is not None else {}
        for tap in taps:
            ranges[tap.value] = max(ranges[tap.value], tap.absmax(outputs))
    return ranges
