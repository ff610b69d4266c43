"""Rules of your own: extend a preset, and see which rule decided what.

python examples/02_rules.py
"""

from pathlib import Path

import torch
from torch import nn

import amp_compiler as amp

RULES = Path(__file__).with_name("my_rules.yaml")


class Experts(nn.Module):
    """A router that mixes four small networks."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(64, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = torch.softmax(self.router(x), -1)
        return sum(weights[:, i : i + 1] * expert(x) for i, expert in enumerate(self.experts))


def make_model() -> tuple[nn.Module, tuple[torch.Tensor]]:
    return Experts(), (torch.randn(8, 64),)


def main() -> tuple[amp.PrecisionPlan, amp.PrecisionPlan]:
    torch.manual_seed(0)
    model, example = make_model()

    # Planning only: nothing is compiled or run.
    before = amp.explain(model, example, rules="default", dtype="bf16")
    after = amp.explain(model, example, rules=RULES, dtype="bf16")

    print("What the rules change:\n")
    print(before.diff(after))
    print("Who decided, for the router and the softmax:\n")
    for node in after.nodes:
        if RULES.name in node.rule:
            print(f"  {node.name}: {node.precision}, by {Path(node.rule).name}: {node.reason}")
    print(f"\nbytes cast in one forward: {before.cast_bytes} -> {after.cast_bytes}")

    # Rules may be a dict as well, for a quick trial.
    trial = amp.explain(model, example, rules={"version": 1, "extends": "default", "deny": ["matmul"]}, dtype="bf16")
    print(f"nodes in bf16 with the matrix products denied: {trial.low_nodes} of {len(trial.nodes)}")
    return before, after


if __name__ == "__main__":
    main()
