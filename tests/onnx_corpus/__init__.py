"""A corpus of ONNX models: exports of tiny transformers, ONNX's own light models, and hand-made ones.

Nothing is stored: every model is made by its builder, the same bytes on every call.
"""

import functools
from collections.abc import Callable

from onnx_corpus import case, control, parts, ranges, structure
from onnx_corpus.case import Built, Case


def _exported(name: str) -> Built:
    from onnx_corpus import exported  # imports torch and transformers

    return exported.build(name)


def _case(builder: Callable[[], Built], name: str = "", **facts: object) -> Case:
    return Case(name or builder.__name__.strip("_"), builder, **facts)  # type: ignore[arg-type]


EXPORTED = tuple(
    Case(name, functools.partial(_exported, name), kind="benign")
    for name in ("bert", "gpt2", "llama", "t5", "vit", "resnet50", "convnext", "whisper", "segformer")
)
LIGHT = tuple(
    Case(
        f"light_{name}", functools.partial(case.light, name), "overflow" if name in case.OVERFLOW else "odd",
        slow=name in case.SLOW,
    )
    for name in case.NAMES
)  # fmt: skip
MADE = (
    Case("mlp", parts.mlp, kind="benign"),
    Case("wide_mlp", parts.wide_mlp, kind="benign"),
    _case(structure.convolutions_with_batch_norm, kind="benign"),
    _case(ranges.overflow_in_activations, kind="overflow", low_share=0.85),
    _case(ranges.overflow_in_a_variance, kind="overflow", low_share=0.85),
    _case(ranges.outlier_channels, kind="outlier", low_share=0.85),
    _case(ranges.outliers_past_fp16, kind="outlier", low_share=0.85),
    _case(ranges.tiny_constants),
    # A value next to the border between two quantised ones changes by a whole step.
    _case(structure.quantised, error=2e-2),
    *(
        _case(builder)
        for builder in (
            control.if_, control.loop, control.scan, control.nested, control.lstm,
            control.local_function, structure.resize_with_shared_initializers, structure.shared_by_both,
            structure.unnamed_nodes, structure.duplicate_names, structure.double_part,
            structure.initializer_that_is_an_input, structure.opset_9, structure.empty_tensors,
            structure.existing_casts, structure.output_used_inside, structure.constant_nodes,
            structure.passed_through,
        )
    ),
)  # fmt: skip
CASES = (*EXPORTED, *LIGHT, *MADE)
# Converting the others to bfloat16 goes the way that FP16 goes, and takes seconds: the slow tests do.
QUICK_BF16 = ("gpt2", "vit", "resnet50", "light_squeezenet", *(case.name for case in MADE))
NAMES = {case.name: case for case in CASES}


@functools.cache
def built(name: str) -> Built:
    """The model of a case and its batches, made once in a process; whoever reads it leaves it as it is."""
    return NAMES[name].build()
