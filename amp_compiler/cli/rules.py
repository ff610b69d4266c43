"""The commands `amp-compiler rules ...`: look at rule sets, check rule files, make them of other tools' lists."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from amp_compiler.cli.options import OutputOption, presets
from amp_compiler.cli.usage import check_place, print_error
from amp_compiler.errors import AmpError

rules_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Look at rule sets and check rule files.")


@rules_app.command("list")
def rules_list() -> None:
    """List the built-in rule sets."""
    from rich.console import Console
    from rich.table import Table

    from amp_compiler.policy.loader import load_rules, preset_names

    table = Table("name", "rules", "what it is for", header_style="bold")
    for name in preset_names():
        table.add_row(name, str(len(load_rules(name).rules)), _first_sentence(_preset_text(name)))
    Console().print(table)


@rules_app.command("show")
def rules_show(
    name: Annotated[str, typer.Argument(autocompletion=presets, help="A preset's name or a path to a rule file.")],
) -> None:
    """Print a rule file as it stands."""
    from amp_compiler.policy.loader import load_rules, preset_names

    load_rules(name)  # a file with an error is reported, not shown
    typer.echo(_preset_text(name) if name in preset_names() else Path(name).read_text(encoding="utf-8"), nl=False)


@rules_app.command("check")
def rules_check(files: Annotated[list[Path], typer.Argument(help="Rule files.")]) -> None:
    """Check rule files; the first line of each error says where it is."""
    from amp_compiler.policy.loader import load_rules

    broken = 0
    for file in files:
        try:
            rules = load_rules(str(file))
        except AmpError as error:
            broken += 1
            print_error(error)
        else:
            typer.echo(f"{file}: good; rules with those that it extends: {len(rules.rules)}")
    if broken:
        raise typer.Exit(1)


@rules_app.command("schema")
def rules_schema() -> None:
    """Print the JSON Schema of rule files, for editors."""
    import json

    from amp_compiler.policy.json_schema import schema

    typer.echo(json.dumps(schema(), indent=1, ensure_ascii=False))


@rules_app.command("import")
def rules_import(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="A net or solver of NVCaffe (.prototxt), a configuration of DeepSpeed (.json), or a list: "
            "names of nodes, one on each line, alone or as `name:precision` (Polygraphy); or JSON or YAML with "
            "the options of ModelOpt's AutoCast (nodes_to_exclude, op_types_to_exclude, data_max, init_max, …) or of "
            "the float16 converters (op_block_list, node_block_list).",
        ),
    ],
    output: OutputOption = None,
    extends: Annotated[
        str | None,
        typer.Option("--extends", autocompletion=presets, help="What the rules stand on; by default what fits them."),
    ] = None,
) -> None:
    """Make a rule file of another system's: NVCaffe's nets, DeepSpeed's options, lists of what stays FP32."""
    from amp_compiler.cli.usage import emit
    from amp_compiler.policy.importing.files import import_file

    check_place("--output", output, {"the file": source})
    rules = import_file(source, extends=extends)
    emit(rules.to_text(), output)
    for note in rules.notes:
        typer.echo(f"note: {note}", err=True)


def _preset_text(name: str) -> str:
    from importlib.resources import files

    return (files("amp_compiler.rules") / f"{name}.yaml").read_text(encoding="utf-8")


def _first_sentence(text: str) -> str:
    """What the comment at the head of a preset says first, without the preset's name and without the details."""
    words = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        comment = line.lstrip("#").strip()
        if not comment.startswith("yaml-language-server"):
            words.append(comment)
    sentence = re.split(r"[.;:] ", re.sub(r"^`[^`]*`:\s*", "", " ".join(words).strip()), maxsplit=1)[0]
    return sentence.rstrip(".")
