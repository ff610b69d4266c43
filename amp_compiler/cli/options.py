"""Options that several commands have."""

from __future__ import annotations

import enum
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from amp_compiler.cli.usage import read_stored_type, read_type

# What options take whose values are few, in small letters.
Device = enum.StrEnum("Device", "AUTO CPU CUDA")
Backend = enum.StrEnum("Backend", "INDUCTOR EAGER")


def presets() -> list[str]:
    """The names of the presets; asked for by a shell alone, for reading rules takes time to import."""
    from amp_compiler.policy.sources import preset_names

    return [*preset_names()]


def _targets() -> list[str]:
    from amp_compiler.policy.targets import TARGETS

    return [*TARGETS]


def _type(parser: Callable[[str], str], *names: str) -> Any:
    metavar = f"[{'|'.join(names)}]"
    return typer.Option(
        "--dtype", parser=parser, metavar=metavar, autocompletion=lambda: names, help="The 16-bit type."
    )


RulesOption = Annotated[
    str, typer.Option("--rules", autocompletion=presets, help="A preset's name or a path to a rule file.")
]
TypeOption = Annotated[Any, _type(read_type, "auto", "fp16", "bf16")]
StoredTypeOption = Annotated[Any, _type(read_stored_type, "fp16", "bf16")]
ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help="As for `explain`: a model, a factory of one, or an ONNX file.")
]
DataOption = Annotated[
    Path | None,
    typer.Option(
        "--data",
        metavar="DATA",
        help="Of an ONNX file: an npz file of inputs, or a folder of them, one batch a file. Without it inputs are "
        "drawn, which says little of a trained model.",
    ),
]
LossOption = Annotated[
    str,
    typer.Option(
        "--loss",
        metavar="FUNCTION",
        help="Called as loss(model, *args), named as MODEL is: then loss and gradients count (`tune`: they alone).",
    ),
]
EvalOption = Annotated[bool, typer.Option("--eval", help="For inference: `model.eval()` first.")]
ArgsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--args",
        metavar="SPEC",
        help="An example argument, such as `fp32[8,64]`, or `labels=i64[8]` for a keyword. Give it once for each.",
    ),
]
OutputOption = Annotated[Path | None, typer.Option("--output", "-o", help="Write there instead of to the terminal.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
TargetOption = Annotated[
    str | None,
    typer.Option(
        "--target",
        metavar="<cpu|cuda|directml|webgpu|tensorrt>",
        autocompletion=_targets,
        help="Execution provider that is to run the file: what it has no 16-bit kernel for stays FP32.",
    ),
]
