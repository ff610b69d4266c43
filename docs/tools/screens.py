"""Takes the screenshots of the docs in Chromium, of pages that it makes for that: `make screens`.

They show a small transformer that is trained for two steps and profiled, two plans of it side by side, and a plan of
5,000 nodes. Each is kept as a PNG of 256 colours, which is small.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import torch
from small_transformer import SmallTransformer

import amp_compiler as amp

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / "tools"), str(ROOT / "tests")]
import chromium  # noqa: E402
import page_plans  # noqa: E402

PICTURES = ROOT / "docs" / "pictures"
MOST_BYTES = 150_000
OTHER_RULES = {
    "version": 1,
    "extends": "default",
    "rules": [{"match": {"module": "blocks.1.mlp.*"}, "precision": "fp32", "why": "to see what differs"}],
}


def loss(model: torch.nn.Module, words: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """The mean cross entropy."""
    return torch.nn.functional.cross_entropy(model(words).flatten(0, 1), wanted.flatten())


def make_pages(folder: Path) -> dict[str, Path]:
    """The pages that are photographed."""
    torch.manual_seed(0)
    os.environ.setdefault("SOURCE_DATE_EPOCH", "1795651200")  # the same day in every picture
    model = SmallTransformer()
    batch = torch.randint(100, (8, 32)), torch.randint(100, (8, 32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = amp.training_step(model, loss, optimizer, dtype="bf16", loss_scale=None, backend="eager")
    profile = amp.profile(step, [batch, batch])
    pages = {name: folder / f"{name}.html" for name in ("step", "diff", "large")}
    step.to_html(pages["step"], profile=profile)
    plans = [
        amp.explain(model, batch[:1], dtype="fp16", device="cuda", rules=rules) for rules in ("default", OTHER_RULES)
    ]
    plans[0].to_html(pages["diff"], other=plans[1], names=("default", "mine"))
    plans[0].to_svg(PICTURES / "plan.svg")
    page_plans.transformer(5000).to_html(pages["large"])
    return pages


def main() -> int:
    """Take all of them."""
    if lacking := chromium.missing():
        print(lacking, file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder, chromium.window() as window:
        pages = make_pages(Path(folder))
        shots = (
            ("report", "step", "#node=linear_2", {}, ""),
            ("report_dark", "step", "#graph=step", {"scheme": chromium.DARK}, ""),
            ("report_diff", "diff", "#node=gelu_1", {}, ""),
            ("report_phone", "step", "#node=linear_2", {"width": 390, "height": 844}, "details"),
            ("report_large", "large", "", {}, ""),
        )
        for name, page, fragment, options, place in shots:
            window.open(pages[page], fragment, **options)
            if place:
                window.run("document.getElementById(arguments[0]).scrollIntoView()", place)
            target = PICTURES / f"{name}.png"
            target.write_bytes(chromium.picture(window))
            size = target.stat().st_size
            print(f"{target.relative_to(ROOT)}: {size:,} bytes")
            if size > MOST_BYTES:
                print("that is too large", file=sys.stderr)
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
