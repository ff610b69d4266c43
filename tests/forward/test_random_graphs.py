"""Random small models under random rules: every rewrite verifies, runs, and keeps the output types."""

from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import amp_compiler as amp

ROWS, COLUMNS = 4, 6
UNARY = {
    "relu": torch.relu,
    "gelu": F.gelu,
    "tanh": torch.tanh,
    "exp": lambda x: torch.exp(x.clamp(max=2)),
    "softmax": lambda x: F.softmax(x, -1),
    "norm": lambda x: F.layer_norm(x, (COLUMNS,)),
    "centre": lambda x: x - x.mean(-1, keepdim=True),
    "total": lambda x: x + x.sum(),
    "transposed": lambda x: x.t().contiguous().t() + 0,
    "shaped": lambda x: x.reshape(COLUMNS, ROWS).flip(0).reshape(ROWS, COLUMNS),
    "doubled": lambda x: torch.cat([x, x], 0)[:ROWS],
    "split": lambda x: torch.stack(x.chunk(2, -1)).sum(0).repeat(1, 2),
    "in_place": lambda x: (x * 2).add_(1).relu_(),
    "sliced_write": lambda x: _write_first_column(x * 1),
    "half": lambda x: x.half().float(),
    "float": lambda x: x.float(),
    "rounded": lambda x: x.round().to(torch.int64).float(),
    "sorted": lambda x: x.sort(-1).values,
    "masked": lambda x: x.masked_fill(x > 0.5, -1e30).clamp(min=-5),
    "zeros": lambda x: x + torch.zeros_like(x),
    "dropout": lambda x: F.dropout(x, 0.0, True),
}
BINARY = {
    "add": torch.add,
    "mul": torch.mul,
    "maximum": torch.maximum,
    "where": lambda a, b: torch.where(a > b, a, b * 0.5),
    "product": lambda a, b: (a @ b.t()) @ b / 8,
    "attention": lambda a, b: F.scaled_dot_product_attention(a[None, None], b[None, None], a[None, None])[0, 0],
}


def _write_first_column(x: torch.Tensor) -> torch.Tensor:
    x[:, 0] = 0.5
    return x


class Drawn(nn.Module):
    """Runs a drawn program: each step applies an op to earlier results."""

    def __init__(self, program: list[tuple[str, int, int]]) -> None:
        super().__init__()
        self.program = program
        self.layers = nn.ModuleList([nn.Linear(COLUMNS, COLUMNS), nn.Linear(COLUMNS, COLUMNS, bias=False)])

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values = [x, self.layers[0](x)]
        for op, first, second in self.program:
            a, b = values[first % len(values)], values[second % len(values)]
            if op in UNARY:
                values.append(UNARY[op](a))
            elif op in BINARY:
                values.append(BINARY[op](a, b))
            else:
                values.append(self.layers[second % 2](a))
        return values[-1], values[len(values) // 2]


steps = st.tuples(st.sampled_from([*UNARY, *BINARY, "linear", "linear"]), st.integers(0, 9), st.integers(0, 9))
programs = st.lists(steps, min_size=1, max_size=8)
precisions = st.sampled_from(["low", "fp32", "widest", "follow"])
families = st.sampled_from(
    ["matmul", "elementwise", "activation", "view", "movement", "softmax", "normalization", "reduction", "attention"]
)
rule = st.builds(lambda family, precision: {"match": {"family": family}, "precision": precision}, families, precisions)
rule_sets = st.builds(
    lambda base, rules: {"version": 1, "extends": base, "rules": rules},
    st.sampled_from(["default", "fast", "safe"]),
    st.lists(rule, max_size=4),
)
ALL_DENY: dict[str, Any] = {"version": 1, "rules": [{"match": {}, "precision": "fp32"}]}
X = torch.linspace(-1.5, 1.5, ROWS * COLUMNS).reshape(ROWS, COLUMNS)


relaxed = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@relaxed
@given(programs, rule_sets, st.sampled_from(["bf16", "fp16"]))
def test_every_rewrite_verifies_runs_and_keeps_output_types(program, rules, dtype):
    model = Drawn(program)
    expected = model(X)
    compiled = amp.compile(model, rules=rules, dtype=dtype, backend="eager")
    actual = compiled(X)
    assert compiled.execution == "as one graph"
    assert [a.dtype for a in actual] == [e.dtype for e in expected]
    assert [a.shape for a in actual] == [e.shape for e in expected]
    wanted = [e.requires_grad for e in expected]
    assert [a.requires_grad for a in actual] == wanted
    if any(wanted):
        sum(a.sum() for a in actual if a.requires_grad).backward()


@relaxed
@given(programs, st.sampled_from(["bf16", "fp16"]))
def test_all_deny_equals_fp32_to_the_bit(program, dtype):
    torch.manual_seed(0)
    model = Drawn(program)
    expected = model(X)
    compiled = amp.compile(model, rules=ALL_DENY, dtype=dtype, backend="eager")
    for got, wanted in zip(compiled(X), expected, strict=True):
        assert torch.equal(got, wanted)
    assert not [cast for cast in compiled.plan.casts if not cast.explicit]
