"""Options that several commands have."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated, Any

import typer

from amp_compiler.cli.usage import read_type


class Device(enum.StrEnum):
    """What `--device` takes."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


RulesOption = Annotated[str, typer.Option("--rules", help="A preset's name or a path to a rule file.")]
TypeOption = Annotated[
    Any, typer.Option("--dtype", parser=read_type, metavar="[auto|fp16|bf16]", help="The 16-bit type.")
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
        help="Execution provider that is to run the file: what it has no 16-bit kernel for stays FP32.",
    ),
]
