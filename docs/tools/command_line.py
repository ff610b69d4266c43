"""The reference of `amp-compiler` from the commands themselves, for `docs/cli.md`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer

from amp_compiler.cli.main import app

HEAD = """# Command line

`amp-compiler COMMAND --help` prints the same. `amp-compiler --install-completion` adds completion to your shell.

| exit code | meaning |
|---|---|
| 0 | done |
| 1 | an error, as [errors](errors.md) lists them; `diff`: the plans differ; `rules check`: a file is wrong |
| 2 | wrong usage |
| 3 | `convert`: the verification failed; `find-nonfinite`: it found an inf or a NaN; `tune`: it was stopped |

The examples run from an empty folder, in the order of the page. `model.py` holds:

```python
import torch
from torch.nn import functional as F


def make():
    layers = torch.nn.Linear(64, 32), torch.nn.GELU(), torch.nn.Linear(32, 4)
    return torch.nn.Sequential(*layers), (torch.randn(8, 64),)


def loss(model, x, labels):
    return F.cross_entropy(model(x), labels)
```

The ONNX file, a batch of its inputs and the record of a run come from this script:

```python
import numpy
import torch

import amp_compiler as amp

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.GELU(), torch.nn.Linear(32, 4))
torch.onnx.export(model, (torch.randn(8, 64),), "m.onnx", input_names=["x"])
numpy.savez("data.npz", x=numpy.random.randn(8, 64).astype("float32"))

step = amp.training_step(
    model,
    lambda model, x, labels: torch.nn.functional.cross_entropy(model(x), labels),
    torch.optim.AdamW(model.parameters()),
    dtype="bf16",
    backend="eager",
    callbacks=[amp.callbacks.JSONLines("run.jsonl")],
)
for _ in range(5):
    step(torch.randn(8, 64), torch.randint(0, 4, (8,)))
step.flush()
```
"""
LOSS = "--loss model.py:loss --args 'fp32[8,64]' --args 'i64[8]'"
EXAMPLES = {
    "explain": [
        "model.py:make --dtype fp16",
        "model.py:make --dtype fp16 --format json -o a.json",
        "model.py:make --dtype fp16 --rules safe --format json -o b.json",
        f"model.py:make --print-after fold_loss_scale {LOSS}",
        "m.onnx --dtype fp16 --html plan.html",
    ],
    "diff": ["a.json b.json --html diff.html"],
    "convert": [
        "m.onnx m.fp16.onnx --calibrate data.npz --verify",
        "m.onnx m.bf16.onnx --dtype bf16 --report plan.html",
    ],
    "tune": [
        "m.onnx tuned.yaml --data data.npz --tolerance 1e-3",
        f"model.py:make my_tuned.yaml --dtype fp16 {LOSS}",
    ],
    "profile": ["m.onnx --data data.npz", f"model.py:make --dtype fp16 {LOSS}"],
    "find-nonfinite": ["m.onnx --data data.npz", f"model.py:make --dtype fp16 {LOSS}"],
    "passes": ["", "fold_loss_scale"],
    "plot": ["run.jsonl -o run.svg"],
    "demo": ["--epochs 1 --backend eager"],
    "env": [""],
    "rules list": [""],
    "rules show": ["fast"],
    "rules check": ["tuned.yaml"],
    "rules schema": [""],
    "rules import": ["exclude.txt --output rules.yaml"],
}


def page() -> str:
    """The page of the reference."""
    root = typer.main.get_command(app)
    sections = [_section(name, command) for name, command in _commands("amp-compiler", root)]
    return "\n\n".join([HEAD.strip(), *sections]) + "\n"


def _commands(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    """A command, or in the place of a group all in it."""
    if not hasattr(command, "commands"):
        yield name, command
        return
    for child, one in command.commands.items():
        yield from _commands(f"{name} {child}", one)


def _section(name: str, command: Any) -> str:
    """Its text, and a table of its arguments and options."""
    context = command.context_class(command, info_name=name)
    usage = " ".join(command.collect_usage_pieces(context))
    rows = [row for one in command.params if (row := one.get_help_record(context))]
    table = [f"| `{_cell(word)}` | {_cell(text)} |" for word, text in rows]
    about = (command.help or "").replace("\b", "").strip()
    short = name.removeprefix("amp-compiler ")
    examples = "\n".join(f"{name} {example}".strip() for example in EXAMPLES[short])
    file = "`exclude.txt` holds:\n\n```text\n/lm_head/MatMul\n```\n\n" if short == "rules import" else ""
    parts = [f"## {short}\n\n{about}\n\n```text\n{name} {usage}\n```\n"]
    parts += ["| option | meaning |", "|---|---|", *table, ""] if table else []
    return "\n".join([*parts, f"{file}```\n{examples}\n```"])


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())
