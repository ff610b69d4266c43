"""Rules on stored numbers: how large they are, and how many."""

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto as T
from onnx import numpy_helper as nh
from onnx_models import check, info, model, node

import amp_compiler as amp
from amp_compiler.onnx.convert import convert_onnx


def chain(folded: bool = False):
    """Three products: with numbers up to 3, up to 2000, and with few of them."""
    data = {
        "small": np.full((8, 64), 3.0, np.float32),
        "large": np.full((64, 64), -2000.0, np.float32),
        "few": np.full((64, 2), 0.5, np.float32),
    }
    data["small"][0, 0] = np.inf  # no number
    nodes = [
        node("MatMul", [before, name], [after], name)
        for before, name, after in (("x", "small", "a"), ("a", "large", "b"), ("b", "few", "y"))
    ]
    initializers = [nh.from_array(array, name) for name, array in data.items()]
    if folded:
        nodes = [*(node("Constant", [], [one.name], f"c_{one.name}", value=one) for one in initializers), *nodes]
        initializers = []
    return model(nodes, [info("x", 4, 8)], [info("y", 4, 2)], initializers)


def rules(**match):
    return {"version": 1, "extends": "default", "rules": [{"match": match, "precision": "fp32"}]}


@pytest.mark.parametrize("folded", [False, True], ids=["initializers", "constants"])
@pytest.mark.parametrize(
    ("match", "wide"),
    [
        ({"weight_absmax": "> 1000"}, {"large"}),
        ({"weight_absmax": "<= 3"}, {"small", "few"}),
        ({"weight_absmax": 2000}, {"large"}),
        ({"weight_size": "< 512"}, {"few"}),
        ({"weight_size": ">= 512"}, {"small", "large"}),
        ({"weight_size": "> 500", "weight_absmax": "< 10"}, {"small"}),
    ],
    ids=lambda value: str(sorted(value)) if isinstance(value, set) else str(value),
)
def test_a_rule_speaks_of_the_stored_numbers(match, wide, folded):
    done = check(chain(folded), "fp16", rules(**match))
    assert {entry.name for entry in done.plan.nodes if entry.precision == "fp32"} == wide
    stored = {tensor.name: tensor.data_type for tensor in done.model.graph.initializer}
    assert folded or {name for name, kind in stored.items() if kind == T.FLOAT} == wide
    assert not done.plan.unused_rules


def test_data_in_a_file_of_their_own_are_read(tmp_path):
    onnx.save(chain(), tmp_path / "m.onnx", save_as_external_data=True, location="m.bin", size_threshold=0)
    plan = amp.explain(tmp_path / "m.onnx", rules=rules(weight_absmax="> 1000"), dtype="fp16")
    assert [entry.name for entry in plan.nodes if entry.precision == "fp32"] == ["large"]


def test_a_rule_that_no_data_meet_is_told():
    (unused,) = convert_onnx(chain(), rules=rules(weight_absmax="> 1e6")).plan.unused_rules
    assert unused.condition == "weight_absmax"


@pytest.mark.long
def test_exports_and_torch_models_have_sizes_and_exports_have_numbers():
    net = torch.nn.Sequential(torch.nn.Linear(8, 64, bias=False), torch.nn.Linear(64, 2, bias=False)).eval()
    with torch.no_grad():
        net[0].weight[0, 0] = 5000.0
    x = torch.randn(4, 8)
    for match, wide in (({"weight_absmax": "> 1000"}, ["0"]), ({"weight_size": "< 200"}, ["1"])):
        plan = amp.export_onnx(net, (x,), rules=rules(**match)).plan
        assert [entry.module for entry in plan.nodes if entry.precision == "fp32"] == wide
    plan = amp.explain(net, (x,), rules=rules(weight_size="< 200"), dtype="bf16")
    assert [entry.module for entry in plan.nodes if entry.precision == "fp32"] == ["1"]
    unused = amp.explain(net, (x,), rules=rules(weight_absmax="> 1000"), dtype="bf16").unused_rules
    assert [rule.condition for rule in unused] == ["weight_absmax"], "weights of a torch model change"
