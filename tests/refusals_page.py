"""`docs/refusals.md`, whose sections are written by the sweeps over torch's own lists."""

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "refusals.md"


def check_section(name: str, text: str) -> None:
    """Hold a section against what a sweep found; with `AMP_REGENERATE=1` it is written anew.

    Args:
        name: it stands between `<!-- sweep: NAME -->` and `<!-- end -->`.
        text: what must stand there.
    """
    page = PAGE.read_text(encoding="utf-8")
    block = re.search(rf"(?<=<!-- sweep: {name} -->\n).*?(?=\n<!-- end -->)", page, re.DOTALL)
    assert block is not None, f"the page has no section for {name}"
    if os.environ.get("AMP_REGENERATE"):
        PAGE.write_text(page[: block.start()] + text + page[block.end() :], encoding="utf-8")
    assert text == block[0] or os.environ.get("AMP_REGENERATE")


def table_of_totals(counts: Mapping[str, Mapping[str, int]]) -> list[str]:
    """A row for each form: how many of each outcome."""
    columns = list(next(iter(counts.values())))
    return [
        f"| | {' | '.join(columns)} |",
        f"|---|{'---:|' * len(columns)}",
        *(f"| {form} | {' | '.join(str(count[one]) for one in columns)} |" for form, count in counts.items()),
    ]


def table_of_reasons(refused: Iterable[tuple[str, str, str]], head: str) -> list[str]:
    """A row for each reason.

    Args:
        refused: reason, what is refused, and in which form.
        head: title of the second column.
    """
    reasons: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for reason, what, form in refused:
        reasons[reason.replace("|", "\\|").replace("<", "&lt;")][what].append(form)
    rows = []
    for reason, result in sorted(reasons.items()):
        message = "; ".join(f"`{what}` ({', '.join(dict.fromkeys(forms))})" for what, forms in sorted(result.items()))
        rows.append(f"| {reason} | {message} |")
    return [f"| reason | {head} |", "|---|---|", *rows] if rows else ["Nothing is refused."]
