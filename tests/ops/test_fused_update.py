"""The update operators on a CPU: against torch.optim, against their traced form, and skipped."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx
from update_arguments import assert_same_bits, copies, hyper, number, update_arguments

from amp_compiler.errors import LoweringError
from amp_compiler.ops.update import formulas as update_math
from amp_compiler.ops.update import operators as fused_update
from amp_compiler.ops.update import rounding
from amp_compiler.ops.update.operators import COMMIT, FUSED, commit, decomposition
from amp_compiler.ops.update.rounding import Storage

assert fused_update
OPS = torch.ops.amp_compiler
SHAPES = ((5003,), (3, 7), (), (0,), (4, 3, 5, 5))
FLAGS = (False, True)


def parameters(seed=0):
    torch.manual_seed(seed)
    return [torch.randn(shape) for shape in SHAPES]


def zeros(like):
    return [torch.zeros_like(tensor) for tensor in like]


def train(optimizer, weights, steps):
    """Steps of a torch optimizer; yields the gradients of each before it is made."""
    for _ in range(steps):
        grads = [torch.randn_like(weight) for weight in weights]
        yield grads
        for weight, grad in zip(weights, grads, strict=True):
            weight.grad = grad.clone()
        optimizer.step()


@settings(max_examples=25, deadline=None, database=None, derandomize=True)
@given(
    lr=st.floats(1e-5, 1.0),
    momentum=st.sampled_from([0.0, 0.5, 0.9]),
    dampening=st.sampled_from([0.0, 0.3]),
    decay=st.sampled_from([0.0, 1e-4, 0.1]),
    nesterov=st.booleans(),
    maximize=st.booleans(),
)
def test_sgd_is_bit_equal_to_torch(lr, momentum, dampening, decay, nesterov, maximize):
    if nesterov and (momentum == 0 or dampening):
        nesterov = False
    masters = parameters()
    weights = [master.clone().requires_grad_() for master in masters]
    optimizer = torch.optim.SGD(
        weights, lr, momentum, dampening, decay, nesterov=nesterov, maximize=maximize, foreach=False
    )
    buffers, started = zeros(masters) if momentum else [], number(0)
    numbers = hyper(lr, momentum, dampening, decay, 0)
    for grads in train(optimizer, weights, 4):
        OPS.sgd_update(masters, grads, buffers, [], started, numbers, number(1), number(0), nesterov, maximize)
    for master, weight in zip(masters, weights, strict=True):
        assert torch.equal(master, weight)
    for buffer, weight in zip(buffers, weights, strict=bool(buffers)):
        assert torch.equal(buffer, optimizer.state[weight]["momentum_buffer"])


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize(("amsgrad", "maximize", "decoupled"), list(itertools.product(FLAGS, FLAGS, FLAGS)))
def test_adam_agrees_with_torch(amsgrad, maximize, decoupled, decay):
    """The moments are bit-equal; the weights differ by the last bit of ATen's square root, a fraction of one step."""
    masters = parameters()
    weights = [master.clone().requires_grad_() for master in masters]
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    options = {"betas": (0.8, 0.99), "amsgrad": amsgrad, "maximize": maximize, "foreach": False}
    optimizer = kind(weights, 1e-2, weight_decay=decay, **options)
    first, second, largest = zeros(masters), zeros(masters), zeros(masters) if amsgrad else []
    low_weights, steps = [master.half() for master in masters], [number(0) for _ in masters]
    rest = (hyper(1e-2, 0.8, 0.99, 1e-8, decay, 0), number(1), number(0), amsgrad, maximize, decoupled)
    for grads in train(optimizer, weights, 5):
        OPS.adam_update(masters, grads, first, second, largest, low_weights, steps, *rest)
    for i, weight in enumerate(weights):
        state = optimizer.state[weight]
        # Decay in the gradient carries a last bit of the weight over into the moments.
        exact = {"rtol": 0, "atol": 0} if decoupled or not decay else {"rtol": 1e-5, "atol": 1e-7}
        torch.testing.assert_close(first[i], state["exp_avg"], **exact)
        torch.testing.assert_close(second[i], state["exp_avg_sq"], **exact)
        assert torch.equal(steps[i], state["step"]) and steps[i] == 5
        torch.testing.assert_close(masters[i], weight.detach(), rtol=3e-7, atol=1e-8)
        assert torch.equal(low_weights[i], masters[i].half())


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("maximize", FLAGS)
@pytest.mark.parametrize("kind", ["sgd", "adam", "adamw"])
def test_l1_decay_is_a_step_towards_zero_added_to_the_gradient(kind, maximize, decay):
    """As torch's optimizer does when it is given `gradient + l1 * sign(weight)`, the formula of Caffe.

    `maximize` turns the gradient of the objective and not the decay, as torch does with L2.
    """
    l1, lr, masters = 0.03, 1e-2, parameters()
    masters[1][0, :3] = torch.tensor([0.0, -0.0, 1e-30])
    weights = [master.clone().requires_grad_() for master in masters]
    classes = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    options = {"weight_decay": decay, "maximize": maximize, "foreach": False}
    if kind == "sgd":
        options["momentum"] = 0.9
    optimizer = classes[kind](weights, lr, **options)
    first, second, started = zeros(masters), zeros(masters), number(0)
    steps = [number(0) for _ in masters]
    for _ in range(4):
        grads = [torch.randn_like(weight) for weight in masters]
        for weight, grad in zip(weights, grads, strict=True):
            pull = l1 * weight.detach().sign()
            weight.grad = grad - pull if maximize else grad + pull
        optimizer.step()
        if kind == "sgd":
            numbers = hyper(lr, 0.9, 0, decay, l1)
            OPS.sgd_update(masters, grads, first, [], started, numbers, number(1), number(0), False, maximize)
        else:
            rest = (hyper(lr, 0.9, 0.999, 1e-8, decay, l1), number(1), number(0), False, maximize, kind == "adamw")
            OPS.adam_update(masters, grads, first, second, [], [], steps, *rest)
    for master, weight in zip(masters, weights, strict=True):
        if kind == "sgd":
            assert torch.equal(master, weight)
        else:  # the last bit of ATen's square root
            torch.testing.assert_close(master, weight.detach(), rtol=1e-6, atol=1e-7)


def test_l1_decay_comes_after_unscaling_and_leaves_zeros_where_they_are():
    masters = [torch.tensor([2.0, -2.0, 0.0, -0.0])]
    grads = [torch.zeros(4)]
    OPS.sgd_update(
        masters, grads, [], [], number(0), hyper(0.5, 0, 0, 0, 0.25), number(1 / 1024), number(0), False, False
    )
    assert torch.equal(masters[0], torch.tensor([1.875, -1.875, 0.0, 0.0]))


def test_low_gradients_are_read_as_they_are_and_scaled_by_the_coefficient():
    masters, low_weights, kinds = parameters(), [], itertools.cycle([torch.half, torch.bfloat16])
    grads = [torch.randn_like(m).to(t) for m, t in zip(masters, kinds, strict=False)]
    expected = [m - 0.5 * (g.float() * 0.25) for m, g in zip(masters, grads, strict=True)]
    numbers = hyper(0.5, 0, 0, 0, 0)
    OPS.sgd_update(masters, grads, [], low_weights, number(0), numbers, number(0.25), number(0), False, False)
    torch.testing.assert_close(masters, expected, rtol=1e-6, atol=1e-7)


def test_scaling_by_a_power_of_two_changes_no_bit():
    plain, scaled = parameters(), parameters()
    grads = [torch.randn_like(master) for master in plain]
    for weights, factor in ((plain, 1.0), (scaled, 1024.0)):
        state = [zeros(weights), zeros(weights), [], [], [number(0) for _ in weights]]
        given_ = [grad * factor for grad in grads]
        rest = (hyper(1e-2, 0.9, 0.999, 1e-8, 0.1, 0.01), number(1 / factor), number(0), False, False, True)
        OPS.adam_update(weights, given_, *state, *rest)
    assert all(torch.equal(a, b) for a, b in zip(plain, scaled, strict=True))


def every_update(skip, bad=None):
    """Arguments for each update operator, by name, over weights of several shapes."""
    result = {}
    for one in FUSED:
        for storage in ({}, {"mode": Storage.KAHAN, "weight": torch.bfloat16}):
            flags = dict.fromkeys(one.flags, True) | {"nesterov": False, "maximize": one.name == "sgd"}
            given_ = update_arguments(one, flags, SHAPES, more=0.1, skip=skip, started=0.0, watched=True, **storage)
            if bad is not None:
                given_[1][1][0, 0] = bad
            result[one.operator(low=bool(storage))] = given_
    return result


def leaves(value):
    return torch.utils._pytree.tree_leaves(value)


@pytest.mark.parametrize("bad", [None, float("nan"), float("inf")])
@pytest.mark.parametrize("form", ["operator", "decomposition"])
def test_a_skipped_step_changes_nothing(form, bad):
    for name, arguments in every_update(skip=1.0, bad=bad).items():
        operator = getattr(OPS, name).default
        before = copies(arguments)
        (operator if form == "operator" else decomposition(operator))(*arguments)
        assert_same_bits(before, arguments)


def test_the_decomposition_can_be_traced_and_does_the_same():
    for name, arguments in every_update(skip=0.0).items():
        operator = getattr(OPS, name).default
        traced_arguments = copies(arguments)
        flat, spec = torch.utils._pytree.tree_flatten(traced_arguments)
        positions = [i for i, item in enumerate(flat) if isinstance(item, torch.Tensor)]

        def run(*tensors, operator=operator, flat=flat, positions=positions, spec=spec):
            filled = list(flat)
            for position, tensor in zip(positions, tensors, strict=True):
                filled[position] = tensor
            decomposition(operator)(*torch.utils._pytree.tree_unflatten(filled, spec))

        tensors = [flat[i] for i in positions]
        graph = make_fx(run, tracing_mode="fake")(*copies(tensors))
        graph(*tensors)
        operator(*arguments)
        targets = {str(node.target) for node in graph.graph.nodes if node.op == "call_function"}
        assert "aten.copy_.default" in targets and not any("amp_compiler" in target for target in targets)
        for expected, got in zip(leaves(arguments), leaves(traced_arguments), strict=True):
            if isinstance(expected, torch.Tensor):
                exact = {"rtol": 1e-6, "atol": 1e-8} if expected.dtype is torch.float32 else {}
                torch.testing.assert_close(got, expected, **exact)


@pytest.mark.parametrize("name", ["adam_update", "sgd_update", "adam_update_low", "sgd_update_low"])
def test_the_operators_are_declared_as_they_behave(name):
    arguments = every_update(skip=0.0)[name]
    torch.library.opcheck(getattr(OPS, name).default, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("bad", [None, float("nan"), float("inf"), -float("inf")])
def test_grad_check(bad):
    grads = [torch.randn(1000), torch.randn(3, 5).half(), torch.randn(()).bfloat16(), torch.randn(0)]
    if bad is not None:
        grads[1][2, 4] = bad
    norm, nonfinite, flags = OPS.grad_check(grads, number(0.5))
    expected = torch.cat([grad.double().flatten() * 0.5 for grad in grads]).norm()
    torch.testing.assert_close(norm, expected.float(), rtol=1e-6, atol=0, equal_nan=True)
    assert nonfinite == float(bad is not None) and flags.dtype is torch.uint8
    assert flags.tolist() == [0, int(bad is not None), 0, 0]
    torch.library.opcheck(OPS.grad_check.default, (grads, number(0.5)), test_utils=("test_schema", "test_faketensor"))
    norm, nonfinite, _ = OPS.grad_check([torch.full((4,), 3e38)], number(1))
    assert norm.isinf() and nonfinite == 0, "a norm that overflows is no gradient that is not finite"


def test_the_exact_square_root():
    numbers = torch.cat([torch.rand(10000) * 2.0**e for e in (-140, -60, 0, 60)])
    assert torch.equal(update_math.exact_sqrt(numbers), torch.from_numpy(numbers.numpy() ** 0.5))


def test_wrong_arguments_are_named():
    with pytest.raises(LoweringError, match="not an update"):
        decomposition(torch.ops.aten.add.Tensor)
    rest = (number(0), hyper(1, 0, 0, 0, 0), number(1), number(0), False, False)
    with pytest.raises(LoweringError, match=r"lists of \[1, 2\]"):
        OPS.sgd_update([torch.ones(2)], [torch.ones(2), torch.ones(2)], [], [], *rest)
    with pytest.raises(LoweringError, match="shape"):
        OPS.sgd_update([torch.ones(2)], [torch.ones(3)], [], [], *rest)
    few = (number(0), hyper(1, 0, 0, 0), number(1), number(0), False, False)
    with pytest.raises(LoweringError, match="4 hyperparameters, not 5"):
        OPS.sgd_update([torch.ones(2)], [torch.ones(2)], [], [], *few)
    with pytest.raises(LoweringError, match="stochastically"):
        rounding.dropped_bits(torch.float32)


@pytest.mark.parametrize("skip", [0.0, 1.0])
@pytest.mark.parametrize("run", [COMMIT, commit], ids=["operator", "traceable"])
def test_writes_are_all_committed_or_none(run, skip):
    targets = [torch.zeros(3), torch.zeros((), dtype=torch.int64)]
    run(torch.tensor(skip), targets, [torch.ones(3), torch.tensor(7)])
    assert targets[0].tolist() == [1.0 - skip] * 3
    assert targets[1].item() == (0 if skip else 7)


def test_a_commit_opens_into_a_choice_and_a_copy():
    traced = make_fx(decomposition(COMMIT), tracing_mode="fake")(torch.zeros(()), [torch.zeros(3)], [torch.ones(3)])
    targets = [str(node.target) for node in traced.graph.nodes if node.op == "call_function"]
    assert targets == ["aten.ne.Scalar", "aten.where.self", "aten.copy_.default"]
