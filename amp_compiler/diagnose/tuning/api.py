"""`amp.tune`: the few nodes that have to stay in FP32 for a tolerance, as a rule file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from amp_compiler.diagnose.losses import LossFunction
from amp_compiler.diagnose.tuning.course import Tuning
from amp_compiler.diagnose.tuning.options import TuneOptions, subject_of
from amp_compiler.diagnose.tuning.result import TuneResult
from amp_compiler.fx.sign_of_life import sign_of_life
from amp_compiler.ir.dtypes import DTypeArgument, low_name
from amp_compiler.onnx import needs_onnx


@needs_onnx()
@sign_of_life("amp.tune")
def tune(
    subject: Any,
    batches: Any,
    *,
    rules: Any = None,
    dtype: DTypeArgument = "auto",
    tolerance: float | None = None,
    output: str | Path | None = None,
    budget: float | None = None,
    max_runs: int | None = None,
    loss_fn: LossFunction | None = None,
    loss_scale: float = 1.0,
) -> TuneResult:
    """Find the few nodes that have to stay in FP32 for a tolerance, and write them as a rule file.

    One run in FP32 measures what rounding each node makes of the results, to first order. Then a search runs the model
    with some of the most sensitive nodes in FP32, at most 4 log2(nodes) times and once for each node that it keeps, and
    drops from these what is not needed. The rules that come of it are read back from the file, and the model is run
    with them once more: `error` is what that gave. Of rules with `math: fp8`, such as the preset `fp8`, it finds the
    products that have to stay in 16 bits, and leaves all else as the rules say. Nothing is changed: no weight, buffer,
    optimizer or random number.

    Args:
        subject: a training step (loss and gradients are compared); a module, of `amp.compile` or plain (outputs, or
            with `loss_fn` loss and gradients); or an ONNX model, a path or a `ModelProto` (outputs, run as 16-bit
            hardware rounds).
        batches: for a step or a module each a tuple of arguments, or a single one; for a module also a dict of
            arguments by name. For an ONNX model dicts from input name to array, an npz file, or a folder of them.
        rules: what is extended: a preset's name, a path or a dict. Without it those of the step or of the compiled
            module, else `default`.
        dtype: as for `amp.compile`, of a plain module or an ONNX model; `auto` is FP16 for an ONNX model.
        tolerance: the largest relative L2 error of a result that is allowed: 0.01 in FP16 and 0.08 in BF16 by default.
            Gradients are results each; one below a thousandth of the norm of all is measured against that.
        output: where the rule file is written, atomically. Beside it stands `<output>.journal` until all is done, from
            which a run that was killed, or stopped by a budget, goes on.
        budget: seconds after which the search stops, with nodes that meet the tolerance.
        max_runs: runs of the model after which it does; 5 at least.
        loss_fn: `loss_fn(model, *batch)` of a module, as for `amp.training_step`; the rules are for what it computes
            too.
        loss_scale: what that is multiplied by for the backward. A step has its own, which counts as fallen to where the
            gradients fit, if it can fall.

    Returns:
        The nodes, the errors before and after, and the rules; print it.

    Raises:
        AmpError: what FP32 gives is not finite; the tolerance is not met even with all in FP32; `subject` is none of
            these, is not one graph, or its batches do not fit; the journal is of another model, rules or batches.

    Source: delta debugging: Zeller and Hildebrandt, Simplifying and Isolating Failure-Inducing Input, 2002. Signs for
    the length of a vector: Hutchinson, 1990.

    Example:
        >>> import torch, amp_compiler as amp
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
        >>> _ = torch.nn.init.constant_(model[0].weight, 3e4)
        >>> _ = torch.nn.init.constant_(model[1].weight, 1e-4)
        >>> result = amp.tune(model, [torch.ones(2, 4)], dtype="fp16")
        >>> [node.module for node in result.nodes], result.error < result.tolerance < result.before
        (['0', '1'], True)
    """
    path = Path(output) if isinstance(output, str) else output
    options = TuneOptions(rules, low_name(dtype), tolerance, path, budget, max_runs)
    options.check()
    tuned, rule_set = subject_of(subject, batches, options, loss_fn, loss_scale)
    return Tuning(tuned, rule_set, options).run()
