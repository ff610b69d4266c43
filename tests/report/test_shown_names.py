"""Every form of a plan has the model's names for its parameters, and the type for `low`."""

import re
from html import unescape

import pytest
import torch
from torch import nn

import amp_compiler as amp
from amp_compiler.report.names import for_people
from amp_compiler.report.svg import plan_svg

FORMS = {"text": str, "cell": lambda plan: plan._repr_html_(), "picture": plan_svg}
X = torch.ones(2, 8)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_every_form_says_the_type_and_the_names_of_the_model(form, dtype):
    plan = amp.explain(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), (X,), dtype=dtype, device="cuda")
    text = re.sub(r'class="\w+"|<style>[^<]*', "", unescape(FORMS[form](plan)))
    assert re.search(rf"\b{dtype}\b", text) and not re.search(r"\blow\b|\bp_", text)
    assert form == "picture" or "0.weight" in text  # which adds up what is cast of weights


def test_a_page_of_compiled_code_says_of_what_model(tmp_path):
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            torch._dynamo.graph_break()
            return self.second(x)

    for model, named in ((Broken(), "graph1/"), (nn.Sequential(nn.Linear(8, 4)), "")):
        compiled = amp.compile(model, dtype="bf16", backend="eager")
        compiled(X)
        plan = compiled.plan
        assert plan.model.name == type(model).__name__
        assert len(plan.model.inputs) == len(plan.inputs) > 0
        assert set(plan.model.names.values()) == {name for name, _ in model.named_parameters()}
        assert all(value.startswith(named) for value, name in plan.model.names.items() if "second" in name)
        assert not re.search(r"\bp_", str(plan))


def test_a_name_that_an_input_has_already_is_not_given_again():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8, 8))
            self.norm = nn.LayerNorm(8)

        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return self.norm(weight @ self.weight)

    plan = amp.explain(Net(), (X,), dtype="bf16")
    (own,) = (value for value, name in plan.model.names.items() if name == "weight")
    product, norm = (node for node in for_people(plan, plan).nodes if node.family != "view")
    assert product.inputs == ("weight", own) and own != "weight"
    assert {"norm.weight", "norm.bias"} <= set(norm.inputs)
