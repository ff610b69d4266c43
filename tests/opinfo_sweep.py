"""torch's own list of ops (`op_db`, 600 and more, with sample inputs) through `amp.compile` and `amp.training_step`.

Each op runs once per form: with its sample as it is, with the first floating-point tensor behind a linear layer whose
weight is the identity (so that domains, and matrices that must be positive definite, stay what they are), and with
inputs that are strided. Values and gradients are held against eager torch in FP32; how far off they may be is said by
eager torch.autocast. Random numbers are drawn from the same seed everywhere.

python tests/opinfo_sweep.py compile linear --ops add,matmul     # prints one line of JSON for each op

SWEEP_DEVICE says on which device; without it on the CPU.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.testing._internal import common_methods_invocations
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

import amp_compiler as amp

DEVICE = os.environ.get("SWEEP_DEVICE", "cpu")
WAYS = ("compile", "step")
FORMS = ("plain", "linear", "strided")
OUTCOMES = ("right", "refused", "raw", "wrong", "not run")
ULP = 2.0**-8  # of BF16
# What these hold is what the memory held: only type and shape are compared.
UNINITIALISED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
# Ops whose values no rounding leaves alone: type and shape are compared.
UNSTABLE = {"linalg.pinv.singular"}  # of a product of two narrow matrices, which has full rank once it is rounded
LEARNING_RATE = 0.5
SAMPLES = 1000  # that are looked through for one that fits
RESET_EVERY = 10  # ops; Dynamo's cache is of the process and grows


@dataclass(frozen=True)
class Result:
    """What became of one op in one form.

    Args:
        op: its name, with its variant.
        outcome: one of `OUTCOMES`.
        note: the text of the error, or what is wrong, or why it was not run.
        subgraphs: whether it ran in Dynamo's subgraphs.
    """

    op: str
    outcome: str
    note: str = ""
    subgraphs: bool = False


class Unfit(Exception):
    """Eager torch itself does not run the sample, or the form means nothing for it."""


# Torch's own sets a seed before each call, which the sweep does around each run.
common_methods_invocations.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)


_FLOATS = [op for op in op_db if torch.float32 in op.supported_dtypes(DEVICE)]
OPS = {f"{op.name}.{op.variant_test_name}".removesuffix("."): op for op in _FLOATS}


def seed() -> None:
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)


def sample_of(op: Any) -> Any:
    """The first sample with more than one number in it and no large tensor; else the first."""
    seed()
    first = None
    for sample in islice(op.sample_inputs(DEVICE, torch.float32, requires_grad=bool(op.supports_autograd)), SAMPLES):
        first = first or sample
        tensors = [leaf for leaf in tree_leaves((sample.input, sample.args, sample.kwargs)) if isinstance(leaf, Tensor)]
        sizes = [tensor.numel() for tensor in tensors]
        if sizes and min(sizes) > 0 and 1 < max(sizes) < 20_000 and any(map(trains, tensors)):
            return sample
    if first is None:
        raise Unfit("it has no sample of FP32")
    return first


def trains(tensor: Tensor) -> bool:
    return tensor.dtype is torch.float32 and tensor.layout is torch.strided


def with_gaps(tensor: Tensor) -> Tensor:
    """Twice the memory, every second number of which is the tensor's."""
    return torch.stack([tensor, tensor], -1)


class Call(nn.Module):
    """One call of an op.

    Args:
        op: of `op_db`.
        form: one of `FORMS`.
        learned: whether the floating-point tensors are parameters, as a training step needs them.
        rounded: round what the linear layer gives to BF16, and go on in FP32.
    """

    def __init__(self, op: Any, form: str, learned: bool, rounded: bool = False) -> None:
        super().__init__()
        self.rounded = rounded
        sample = sample_of(op)
        self.leaves, self.spec = tree_flatten(((sample.input, *sample.args), sample.kwargs))
        self.slots = [place for place, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor)]
        tensors = [self.leaves[place] for place in self.slots]
        wanted = [trains(one) and (one.requires_grad or not op.supports_autograd) for one in tensors]
        tensors = [one.detach().clone() if one.layout is torch.strided else one.detach() for one in tensors]
        self.function, self.finish = op.op, sample.output_process_fn_grad
        self.differentiable, self.strided = bool(op.supports_autograd), form == "strided"
        if self.strided:
            tensors = [with_gaps(one) if one.layout is torch.strided else one for one in tensors]
        self.tie = (
            nn.Parameter(torch.full((3,), 0.1, device=DEVICE)) if learned else None
        )  # a loss depends on it, whatever the op is
        self.linear, self.behind = None, -1
        if form == "linear":
            result = [place for place, one in enumerate(tensors) if wanted[place] and one.numel()]
            if not result:
                raise Unfit("it takes no floating-point tensor")
            self.behind = result[0]
            wide = tensors[self.behind].shape[-1] if tensors[self.behind].dim() else 1
            self.linear = nn.Linear(wide, wide, device=DEVICE)
            with torch.no_grad():
                self.linear.weight.copy_(torch.eye(wide))
                self.linear.bias.zero_()
        learns = [learned and form != "linear" and want for want in wanted]
        self.learned = nn.ParameterList([one for one, learn in zip(tensors, learns, strict=True) if learn])
        self.places = [place for place, learn in enumerate(learns) if learn]
        left = [place for place, learn in enumerate(learns) if not learn]
        self.inputs = [(tensors[place], wanted[place]) for place in left]  # of a call, and which ask a gradient
        self.total = len(tensors)

    def batch(self) -> list[Tensor]:
        """The tensors of one call, made anew."""
        result = []
        for one, wanted in self.inputs:
            one = one.clone() if one.layout is torch.strided else one
            if self.strided and one.layout is torch.strided:
                one = one.select(-1, 0)
            result.append(one.requires_grad_() if self.tie is None and self.differentiable and wanted else one)
        return result

    def forward(self, *inputs: Tensor) -> Any:
        """Run it."""
        tensors, waiting = [], list(inputs)
        for place in range(self.total):
            if place in self.places:
                weight = self.learned[self.places.index(place)]
                weight = weight.select(-1, 0) if self.strided else weight
                tensors.append(weight if self.differentiable else weight.detach().clone())
            else:
                tensors.append(waiting.pop(0))
        if self.linear is not None:
            x = tensors[self.behind]
            x = self.linear(x) if x.dim() else self.linear(x.reshape(1)).reshape(())
            x = x.bfloat16().float() if self.rounded else x
            tensors[self.behind] = x if self.differentiable else x.detach().clone()
        leaves = list(self.leaves)
        for place, tensor in zip(self.slots, tensors, strict=True):
            leaves[place] = tensor
        arguments, keywords = tree_unflatten(leaves, self.spec)
        return self.finish(self.function(*arguments, **keywords))


def objective(output: Any) -> Any:
    """A number that depends on every floating-point output."""
    total: Any = 0.0
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex()):
            leaf = leaf.to_dense() if leaf.layout is not torch.strided else leaf
            leaf = (torch.view_as_real(leaf.resolve_conj()) if leaf.is_complex() else leaf).float()
            total = total + (0.5 * leaf * leaf + leaf).mean()
    return total


def loss_of(model: Any, *batch: Tensor) -> Tensor:
    """What a step trains on."""
    return objective(model(*batch)) + model.tie.square().sum()  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Seen:
    """What a run gave: values, and gradients by what they belong to."""

    values: list[Any]
    gradients: dict[str, Tensor | None]


def run_forward(call: Call, run: Callable[..., Any]) -> Seen:
    """One call and, where the op has gradients, those of its inputs and of the linear layer."""
    seed()
    batch = call.batch()
    output = run(*batch)
    values, gradients = tree_leaves(output), {}
    loss = objective(output)
    if call.differentiable and isinstance(loss, Tensor) and loss.requires_grad:
        wanted = {str(place): one for place, one in enumerate(batch) if one.requires_grad}
        wanted |= dict(call.named_parameters())
        result = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
        gradients = dict(zip(wanted, result, strict=True))
    return Seen([one.detach() if isinstance(one, Tensor) else one for one in values], gradients)


def run_eager_step(call: Call, autocast: Any) -> Seen:
    """One SGD step of eager torch: the loss, and the gradients as the changes of the weights tell them."""

    def step(*batch: Tensor) -> Tensor:
        optimizer = torch.optim.SGD(call.parameters(), LEARNING_RATE)
        with autocast:
            loss = loss_of(call, *batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return run_step(call, step)


def run_step(call: Call, step: Callable[..., Any]) -> Seen:
    before = {name: one.detach().clone() for name, one in call.named_parameters()}
    seed()
    loss = step(*call.batch())
    after = dict(call.named_parameters())
    return Seen([loss], {name: change(before[name], after[name].detach()) for name in before})


def change(before: Tensor, after: Tensor) -> Tensor:
    """The gradient that SGD took; a weight that is infinite stays so, whatever it was."""
    return torch.where(before == after, 0.0, (before - after) / LEARNING_RATE)


def dense(value: Tensor) -> Tensor:
    value = value.detach()
    value = value if value.layout is torch.strided else value.to_dense()
    value = value.dequantize() if value.is_quantized else value
    value = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
    return value.double()


def off(value: Tensor, reference: Tensor, mask: Tensor) -> float:
    return float((value - reference)[mask].norm())


def fault(name: str, value: Any, reference: Any, autocast: Any, floor: float) -> str:
    """What is wrong with a value, in words, or nothing.

    Args:
        name: of the value.
        value: what is judged.
        reference: eager torch's in FP32.
        autocast: eager torch's under autocast, or `None` where it runs nothing.
        floor: what rounding of what it was made of may have done to it, absolutely.
    """
    if not isinstance(reference, Tensor):
        if type(value) is not type(reference):
            return f"{name}: a {type(value).__name__}, not a {type(reference).__name__}"
        same = value in (reference, autocast) or (value != value and reference != reference)
        close = isinstance(reference, float) and abs(value - reference) <= 4 * ULP * abs(reference)
        return "" if same or close else f"{name}: {value!r}, not {reference!r}"
    if not isinstance(value, Tensor):
        return f"{name}: a {type(value).__name__}, not a tensor"
    if value.dtype is not reference.dtype or value.layout is not reference.layout:
        return f"{name}: {value.dtype} and {value.layout}, not {reference.dtype} and {reference.layout}"
    alike = isinstance(autocast, Tensor) and autocast.shape == value.shape
    if value.shape != reference.shape and not alike:
        return f"{name}: shape {tuple(value.shape)}, not {tuple(reference.shape)}"
    if not (value.is_floating_point() or value.is_complex() or value.is_quantized):
        same = torch.equal(dense(value), dense(reference)) or (alike and torch.equal(value, autocast))
        return "" if same else f"{name}: other {value.dtype} values"
    ours, exact = dense(value), dense(reference)
    theirs = dense(autocast) if alike else exact
    if exact.shape != ours.shape:
        exact = theirs  # a size that depends on rounded values
    same_kind = ours.isfinite() == exact.isfinite()
    if not bool((same_kind | (ours.isfinite() == theirs.isfinite())).all()):
        return f"{name}: finite where eager torch is not, or the other way round"
    finite = ours.isfinite() & exact.isfinite() & theirs.isfinite()
    error, allowed = off(ours, exact, finite), 4 * off(theirs, exact, finite)
    allowed += (4 if alike else 16) * ULP * float(exact[finite].norm()) + floor
    return (
        ""
        if error <= allowed
        else f"{name}: {error:.2e} off, of {float(exact[finite].norm()):.2e}; {allowed:.2e} may be"
    )


def finite(seen: Seen) -> bool:
    """Whether all gradients are."""
    return all(bool(one.isfinite().all()) for one in seen.gradients.values() if one is not None)


def faults(ours: Seen, exact: Seen, theirs: Seen | None, way: str, call: Call) -> Iterator[str]:
    """What is wrong with a run."""
    if len(ours.values) != len(exact.values):
        yield f"{len(ours.values)} outputs, not {len(exact.values)}"
        return
    if ours.gradients.keys() != exact.gradients.keys():
        yield f"gradients of {sorted(ours.gradients)}, not of {sorted(exact.gradients)}"
    for place, (value, reference) in enumerate(zip(ours.values, exact.values, strict=True)):
        fits = theirs is not None and len(theirs.values) == len(exact.values)
        autocast = theirs.values[place] if fits and theirs is not None else None
        yield fault("loss" if way == "step" else f"output {place}", value, reference, autocast, 1e-6)
    if way == "step":
        skipped = not any(bool(one.any()) for one in ours.gradients.values() if one is not None)
        if skipped and not (finite(exact) and (theirs is None or finite(theirs))):
            return  # a step leaves the weights alone where a gradient is not finite
        if not finite(exact):
            yield "the gradients are not finite, and the step is not skipped"
            return
    weights = {name: float(one.detach().norm()) for name, one in call.named_parameters()} if way == "step" else {}
    for name, reference in exact.gradients.items():
        value, autocast = ours.gradients.get(name), None if theirs is None else theirs.gradients.get(name)
        if reference is None:
            value, reference = (None, None) if value is None else (value, torch.zeros_like(value))
        elif value is None:
            value = torch.zeros_like(reference)
        if reference is not None:
            floor = 1e-6 + 1e-6 * weights.get(name, 0.0) / LEARNING_RATE  # the change of a weight is rounded with it
            yield fault(f"gradient of {name}", value, reference, autocast, floor)


def eager(op: Any, way: str, form: str, autocast: Any = None, rounded: bool = False) -> Seen:
    """Eager torch, in FP32 or under autocast."""
    call, autocast = Call(op, form, way == "step", rounded), autocast or nullcontext()
    if way == "step":
        return run_eager_step(call, autocast)
    with autocast:
        return run_forward(call, call)


def in_bf16(op: Any, way: str, form: str) -> Seen | None:
    """What rounding does to eager torch; where autocast takes less than torch, FP32 behind a layer of BF16."""
    try:
        return eager(op, way, form, torch.autocast(DEVICE, torch.bfloat16))
    except Exception:  # noqa: BLE001  # types that do not fit each other, or a kernel that there is not
        return eager(op, way, form, rounded=True) if form == "linear" else None


def judged(name: str, way: str, form: str) -> Result:
    """Run one op."""
    op = OPS[name]
    try:
        exact = eager(op, way, form)
    except Unfit as reason:
        return Result(name, "not run", str(reason))
    except Exception as error:  # noqa: BLE001  # whatever torch says
        return Result(name, "not run", f"eager torch: {type(error).__name__}: {str(error).splitlines()[:1]}")
    theirs, call = in_bf16(op, way, form), Call(op, form, way == "step")
    try:
        if way == "step":
            optimizer = torch.optim.SGD(call.parameters(), LEARNING_RATE)
            step = amp.training_step(call, loss_of, optimizer, dtype="bf16", backend="eager")
            ours, subgraphs = run_step(call, step), "subgraph" in step.execution
        else:
            compiled = amp.compile(call, dtype="bf16", backend="eager")
            ours, subgraphs = run_forward(call, compiled), compiled.execution != "as one graph"
    except amp.AmpError as error:
        return Result(name, "refused", error.what)
    except Exception as error:  # noqa: BLE001  # that is what is looked for
        return Result(name, "raw", f"{type(error).__name__}: {str(error).strip()[:300]}")
    if name in UNINITIALISED | UNSTABLE:
        ours, exact, theirs = (one and unfilled(one, way) for one in (ours, exact, theirs))
    result = [text for text in faults(ours, exact, theirs, way, call) if text]
    return Result(name, "wrong" if result else "right", "; ".join(result), subgraphs)


def unfilled(seen: Seen, way: str) -> Seen:
    """Only what can be compared of memory that was never written."""
    return Seen([] if way == "step" else [torch.zeros_like(one) for one in seen.values], {})


def results(way: str, form: str, names: Sequence[str]) -> Iterator[Result]:
    """Run ops one by one."""
    for number, name in enumerate(names, 1):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield judged(name, way, form)
        if number % RESET_EVERY == 0:
            torch._dynamo.reset()


def sweep(way: str, form: str, names: Sequence[str] = tuple(OPS)) -> list[Result]:
    """Run ops in processes of their own: one that ends its process is a fault, and the next go on in a new one."""
    left, result = list(names), []
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "AMP_LOG": "error", "AMP_VERIFY": "1"}
    while left:
        command = [sys.executable, __file__, way, form, "--ops", ",".join(left)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        message = [Result(**json.loads(line)) for line in done.stdout.splitlines() if line.startswith('{"op"')]
        result += message
        left = left[len(message) :]
        if left and done.returncode:
            result.append(Result(left.pop(0), "raw", f"the process ended with code {done.returncode}"))
    return result


def totals(matches: Sequence[Result]) -> dict[str, int]:
    """How many there are of each outcome, and how many ran in subgraphs."""
    count = Counter(one.outcome for one in matches)
    return {**{outcome: count[outcome] for outcome in OUTCOMES}, "in subgraphs": sum(one.subgraphs for one in matches)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("form", choices=FORMS)
    parser.add_argument("--ops", default=",".join(OPS), help="names, with commas between them")
    options = parser.parse_args()
    for result in results(options.way, options.form, options.ops.split(",")):
        print(json.dumps(asdict(result)), flush=True)
        if "CUDA error" in result.note:
            return  # from then on all calls of the process fail


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
