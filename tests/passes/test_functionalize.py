"""Every in-place operator of ATen: its functional form has the same signature and gives the same numbers."""

import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from toys import Composed

import amp_compiler as amp
from amp_compiler.fx.graph import refresh
from amp_compiler.passes.capture.functionalize import Functionalize, _functional_variant

aten = torch.ops.aten
SAMPLES = {"number": 2, "int": 1, "float": 0.5, "bool": True, "List[int]": [1, 0], "str": "mean", "Optional[str]": None}
INPUTS = (
    torch.tensor([[0.3, 0.6, 0.2], [0.7, 0.1, 0.4], [0.5, 0.8, 0.9]]),
    torch.tensor([[1, 2, 0], [0, 1, 2], [2, 0, 1]]),
    torch.tensor([[0.3, 0.6, 0.2], [0.7, 0.1, 0.4], [0.5, 0.8, 0.9]], dtype=torch.float64),
    torch.tensor([[True, False, True], [False, True, True], [True, True, False]]),
)


def in_place_ops():
    names = {
        one.name.removeprefix("aten::") for one in torch._C._jit_get_all_schemas() if one.name.startswith("aten::")
    }
    for name in sorted(name for name in names if name.endswith("_") and not name.endswith("__")):
        packet = getattr(aten, name)
        for overload in sorted(packet.overloads()):
            changed = getattr(packet, overload)._schema.arguments[0].alias_info
            if changed is not None and changed.is_write:
                yield getattr(packet, overload)


IN_PLACE = list(in_place_ops())


def sample(target, kind):
    """Arguments behind the first, all of one kind; `None` where one of them is of a type that has no sample."""
    args, kwargs = [], {}
    for one in target._schema.arguments[1:]:
        if one.has_default_value() and not isinstance(one.type, torch.TensorType):
            continue
        if isinstance(one.type, torch.TensorType):
            value = INPUTS[kind].clone() if one.name != "index" else INPUTS[1].clone()
            value = value[1] if one.name == "index" and target._schema.name.startswith("aten::index") else value
        elif str(one.type) in SAMPLES:
            value = SAMPLES[str(one.type)]
        else:
            return None
        if one.kwarg_only:
            kwargs[one.name] = value
        else:
            args.append(value)
    return args, kwargs


def graph_of(target, inputs, args, kwargs):
    """A graph that changes a copy of what it is given, and returns what the operator gives."""
    graph, mode = fx.Graph(), FakeTensorMode()

    def placed(value):
        if not isinstance(value, torch.Tensor):
            return value
        node = graph.placeholder(f"input{len(graph.nodes)}")
        node.meta["val"] = mode.from_tensor(value)
        return node

    places = [placed(inputs), *map(placed, args)], {name: placed(value) for name, value in kwargs.items()}
    copy = graph.call_function(aten.clone.default, (places[0][0],))
    changed = graph.call_function(target, (copy, *places[0][1:]), places[1])
    graph.output((changed,))
    graph_module = fx.GraphModule(nn.Module(), graph)
    refresh(graph_module)
    return graph_module, changed


def checked(target, kind) -> tuple[bool, bool]:
    """Whether a sample could be run, and whether it became functional."""
    built = sample(target, kind)
    if built is None:
        return False, False
    args, kwargs = built
    inputs = INPUTS[kind].clone()
    try:
        torch.manual_seed(0)
        expected = target(inputs.clone(), *args, **kwargs)
        graph_module, node = graph_of(target, inputs, args, kwargs)
    except (RuntimeError, ValueError, TypeError, NotImplementedError, IndexError, AssertionError, amp.AmpError):
        return False, False  # it takes no such tensors
    Functionalize().run(graph_module)
    functional = not node.target._schema.is_mutable
    torch.manual_seed(0)
    tensors = [one for one in [inputs, *args, *kwargs.values()] if isinstance(one, torch.Tensor)]
    (result,) = graph_module(*tensors)
    assert result.dtype == expected.dtype, target
    assert torch.equal(torch.nan_to_num(result), torch.nan_to_num(expected)), target
    return True, functional


def test_the_functional_form_takes_the_same_types():
    result = {}
    for target in IN_PLACE:
        variant = _functional_variant(fx.Graph().call_function(target))
        if variant is not None:
            assert [(one.name, str(one.type)) for one in variant._schema.arguments] == [
                (one.name, str(one.type)) for one in target._schema.arguments
            ], target
            assert not variant._schema.is_mutable
            result[target] = variant
    assert result[aten.pow_.Scalar] is aten.pow.Tensor_Scalar and result[aten.add_.Tensor] is aten.add.Tensor
    assert len(result) > 200


def test_every_in_place_operator_gives_its_own_numbers():
    """What has no functional form of the same signature and type stays in place."""
    public = [one for one in IN_PLACE if not one._schema.name.startswith("aten::_")]  # others write where they are told
    ran = {target: [checked(target, kind) for kind in range(len(INPUTS))] for target in public}
    tried = [target for target, kinds in ran.items() if any(one for one, _ in kinds)]
    functional = [target for target, kinds in ran.items() if any(one for _, one in kinds)]
    for target in set(tried) - set(functional):
        assert _functional_variant(fx.Graph().call_function(target)) is None, target
    assert len(tried) > 200 and len(functional) > 190
    assert {aten.pow_.Scalar, aten.pow_.Tensor, aten.float_power_.Scalar, aten.ge_.Scalar} <= set(functional)


def doubled(value):
    value **= 2
    return value


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda value: value.pow_(-0.5), id="pow_"),
        pytest.param(doubled, id="**="),
        pytest.param(lambda value: value.pow_(value.detach().clone()), id="pow_ of a tensor"),
        pytest.param(lambda value: value.double().float_power_(2).float(), id="float_power_"),
        pytest.param(lambda value: value.ge_(1.5) + value.ge_(0), id="ge_"),
        pytest.param(lambda value: torch.bincount(torch.arange(4) % 2, value.detach()[0], 4).float(), id="bincount"),
        pytest.param(lambda value: value.sum().mul_(value.double().mean()), id="mul_ of a wider number"),
    ],
)
def test_a_forward_in_place_is_that_of_autocast(change):
    torch.manual_seed(0)
    model, x = Composed(lambda m, x: change(m.linear(x).abs() + 1) * x, linear=nn.Linear(4, 4)), torch.rand(3, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = model(x)
    result = amp.compile(model, dtype="bf16", backend="eager")(x)
    torch.testing.assert_close(result, expected.float(), rtol=2**-6, atol=0)  # two roundings to BF16
