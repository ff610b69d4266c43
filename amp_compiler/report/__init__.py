"""Plans as tables, pages and pictures; recorded runs as plots.

What draws is imported when it is first used.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from amp_compiler.ir.files import write_atomically
from amp_compiler.ir.plan import PrecisionPlan
from amp_compiler.ir.step_graph import StepGraph


def to_html(
    plan: PrecisionPlan,
    path: str | Path,
    *,
    profile: Any = None,
    other: PrecisionPlan | None = None,
    names: tuple[str, str] = ("this", "other"),
    step: StepGraph | None = None,
) -> None:
    """Write a plan as one self-contained HTML page, for a browser: the graph, drawn, with all that was decided.

    Args:
        plan: what to show; `plan.to_html(path)` is the same.
        path: the file.
        profile: what `amp.profile` found: each node shows its histograms of exponents.
        other: a plan that is shown beside this one, with all that differs.
        names: what the two are called.
        step: the whole training step that this forward is part of; `step.to_html(path)` gives it.

    Raises:
        AmpError: where the file cannot be written, or something else was given for one of these.

    Example:
        >>> import torch, amp_compiler as amp
        >>> plan = amp.explain(torch.nn.Linear(8, 4), (torch.ones(2, 8),), dtype="bf16")
        >>> amp.to_html(plan, "plan.html")
    """
    from amp_compiler.report.html import plan_html

    write_atomically(path, plan_html(plan, profile=profile, other=other, names=names, step=step))


def to_svg(plan: PrecisionPlan, path: str | Path) -> None:
    """Write a plan as one SVG picture, without a browser: a line for each node and cast, and who reads whom.

    Args:
        plan: what to draw; `plan.to_svg(path)` is the same.
        path: the file.

    Raises:
        AmpError: there is nothing to draw, or the file cannot be written.

    Example:
        >>> import torch, amp_compiler as amp
        >>> plan = amp.explain(torch.nn.Linear(8, 4), (torch.ones(2, 8),), dtype="bf16")
        >>> amp.to_svg(plan, "plan.svg")
    """
    from amp_compiler.report.svg import plan_svg

    write_atomically(path, plan_svg(plan))


def _cell(plan: PrecisionPlan) -> str:
    """What a notebook shows of a plan."""
    from amp_compiler.report.html import plan_cell

    return plan_cell(plan)


# `amp_compiler` imports this module, so that every plan has these.
for _name, _method in (("to_html", to_html), ("to_svg", to_svg), ("_repr_html_", _cell)):
    setattr(PrecisionPlan, _name, _method)
