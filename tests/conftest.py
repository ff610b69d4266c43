"""Beside the helper modules of the tests, so that pytest finds them; which tests compile; what tests share."""

import copy
import dataclasses
import functools
import gc
import logging
import os
import sys
import types
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmark_modules import benchmark_modules

os.environ["AMP_VERIFY"] = "1"  # every pipeline checks that its graph is a legal one
os.environ["TORCH_DYNAMO_RUN_GC_AFTER_COMPILE"] = "0"  # garbage is looked for below, not behind each of 2,000 captures


LONG_TESTS = Path(__file__).with_name("long_tests.txt")
LONG = frozenset(LONG_TESTS.read_text(encoding="utf-8").split())
LONGEST = 0.2  # seconds that a test of `make test-fast` takes


class _Uncaptured(logging.Logger):
    """Takes no handler of pytest's: where torch's trace has one, it writes whole graphs for it, a sixth of all time."""

    def addHandler(self, handler: logging.Handler) -> None:
        if not type(handler).__module__.startswith("_pytest"):
            super().addHandler(handler)


logging.getLogger("torch.__trace").__class__ = _Uncaptured


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is marked by what is known of a test: its parameter "inductor", its time, the place in its sweep."""
    sweeps: dict[str, list[pytest.Item]] = {}
    for item in items:
        values = item.callspec.params.values() if hasattr(item, "callspec") else ()
        if any(isinstance(value, str) and value == "inductor" for value in values):
            item.add_marker("compiles")
        if item.nodeid.partition("[")[0] in LONG:
            item.add_marker("long")
        if item.get_closest_marker("sweep") and not item.get_closest_marker("slow"):
            sweeps.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in sweeps.values():
        last = max(cases[0].get_closest_marker("sweep").args[0] - 1, 1)  # type: ignore[union-attr]
        kept = {round(place * (len(cases) - 1) / last) for place in range(last + 1)}
        for place, item in enumerate(cases):
            if place not in kept:
                item.add_marker("slow")


_seconds: Counter[str] = Counter()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """The seconds of each test, for `AMP_MEASURE=1`."""
    _seconds[report.nodeid] += report.duration


def pytest_sessionfinish(session: pytest.Session) -> None:
    """`AMP_MEASURE=1 make test-all-but-slow`, on a machine that is quiet, writes anew which tests are long."""
    if os.environ.get("AMP_MEASURE") and not hasattr(session.config, "workerinput"):
        ran = {name.partition("[")[0] for name in _seconds}
        long = {name.partition("[")[0] for name, seconds in _seconds.items() if seconds > LONGEST}
        LONG_TESTS.write_text("\n".join(sorted((LONG - ran) | long)) + "\n", encoding="utf-8")


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes long on a busy machine is not told: tests read what is logged."""
    monkeypatch.setattr("amp_compiler.fx.sign_of_life.PATIENCE", 3600.0)


@pytest.fixture
def bf16_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of graphs: the CPU is taken for one that multiplies BF16, where others get casts to FP32."""
    monkeypatch.setenv("AMP_PLAIN_CPU", "0")


@pytest.fixture(scope="session")
def bf16_lstm() -> None:
    """For tests in which torch itself runs an LSTM in BF16."""
    import torch

    sequence = torch.ones(1, 1, 1, dtype=torch.bfloat16)
    try:
        torch.nn.LSTM(1, 1, dtype=torch.bfloat16)(sequence)
    except RuntimeError:
        pytest.skip("torch's LSTM raises in BF16 on a CPU without kernels for it")


@pytest.fixture
def own_accelerate() -> Iterator[None]:
    """For tests that make an `accelerate.Accelerator`, whose settings are the process's: no other test's are there."""
    state = pytest.importorskip("accelerate.state").AcceleratorState
    state._reset_state(reset_partial_state=True)
    yield
    state._reset_state(reset_partial_state=True)


_LOOKS = pytest.StashKey[int]()


def _looks_of_inductor() -> int:
    """How often Inductor did something in this process, the compiled graphs that it found in its cache included."""
    utils = sys.modules.get("torch._dynamo.utils")
    return 0 if utils is None else sum(utils.counters["inductor"].values())


def pytest_collection_finish(session: pytest.Session) -> None:
    """Look for garbage seldom, and not in what was imported: it took more than a tenth of the tests' time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(400_000, 20, 50)


@pytest.fixture
def few_objects() -> None:
    """For tests that look for garbage again and again: what others have left is looked through once."""
    gc.collect()
    gc.freeze()


_REGISTRY = "torch.onnx._internal.exporter._registration"


def _keep_registry_of_exporter() -> None:
    """torch.onnx.export parses the sources of all its translations anew at each call, a second: here once a process."""
    registration: Any = sys.modules.get(_REGISTRY)
    registry: Any = getattr(registration, "ONNXRegistry", None)
    built = getattr(registry, "from_torchlib", None)
    if built is None or hasattr(built, "kept"):
        return
    kept = functools.cache(built)
    if hasattr(registration, "onnxscript_apis"):  # whose list is the same for every opset
        apis = registration.onnxscript_apis
        apis.get_torchlib_ops = functools.cache(apis.get_torchlib_ops)

    def again(*version: int, **versions: int) -> Any:
        fresh = copy.copy(kept(*version, **versions))  # a caller may add translations of its own
        fresh.functions = {target: list(result) for target, result in fresh.functions.items()}
        return fresh

    again.kept = kept  # type: ignore[attr-defined]
    registry.from_torchlib = staticmethod(again)


def _seed_without_stacks() -> None:
    """For a device that is not in use `torch.manual_seed` writes the stack down, once for each kind: milliseconds."""
    for kind in ("cuda", "mtia", "xpu"):
        module: Any = sys.modules.get(f"torch.{kind}")
        if hasattr(module, "traceback"):
            module.traceback = _NO_STACKS


_NO_STACKS = types.SimpleNamespace(format_stack=list)


def _find_no_test_case() -> None:
    """Each row of torch's own databases looks for the `TestCase` around it in the sources of the stack: 15 ms."""
    for name in ("common_utils", "opinfo.core"):
        module: Any = sys.modules.get(f"torch.testing._internal.{name}")
        if hasattr(module, "extract_test_fn"):
            module.extract_test_fn = lambda: None


def _trace_without_patches() -> None:
    """Each trace of make_fx sets two methods of `nn.Module` and sets them back: milliseconds where there are thousands
    of classes of modules. What is set does for such a tracer what the methods do."""
    tracing: Any = sys.modules.get("torch.fx.experimental.proxy_tensor")
    if tracing is None or hasattr(tracing.PythonKeyTracer, "bare"):
        return
    patcher, tracer = sys.modules["torch.fx._symbolic_trace"]._Patcher, tracing.PythonKeyTracer  # type: ignore[attr-defined]
    patch, trace = patcher.patch_method, tracer.trace
    tracer.bare = False

    def traced(self: Any, *arguments: Any, **named: Any) -> Any:
        before, tracer.bare = tracer.bare, type(self) is tracer  # torch.export's notes which module is called
        try:
            return trace(self, *arguments, **named)
        finally:
            tracer.bare = before

    patcher.patch_method = lambda *arguments, **named: None if tracer.bare else patch(*arguments, **named)
    tracer.trace = traced


def _keep_operators_of_exports() -> None:
    """torch.export looks up all operators of torch at each call: 50 ms."""
    utils: Any = sys.modules.get("torch._export.utils")
    if hasattr(utils, "_materialize_cpp_cia_ops") and not hasattr(utils._materialize_cpp_cia_ops, "cache_info"):
        utils._materialize_cpp_cia_ops = functools.cache(utils._materialize_cpp_cia_ops)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Count before the first fixture is made."""
    _keep_registry_of_exporter()
    _seed_without_stacks()
    _find_no_test_case()
    _trace_without_patches()
    _keep_operators_of_exports()
    item.stash[_LOOKS] = _looks_of_inductor()


@pytest.fixture(autouse=True)
def compiles_where_marked(request: pytest.FixtureRequest) -> Iterator[None]:
    """Inductor takes seconds for each graph: a test that runs it says so, and `make test-fast` leaves it out."""
    yield
    ran = _looks_of_inductor() > request.node.stash[_LOOKS]
    if ran and not any(map(request.node.get_closest_marker, ("compiles", "gpu"))):
        pytest.fail("Inductor ran: mark the test `compiles`, or use backend='eager' or the fixture `compiler`")


@pytest.fixture
def node_by_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Inductor would compile runs node by node: quick, and all that is around it stays the same."""
    from amp_compiler.backends import BACKENDS, eager

    monkeypatch.setitem(BACKENDS, "inductor", dataclasses.replace(BACKENDS["inductor"], build=eager.build))


@pytest.fixture(params=["node by node", pytest.param("inductor", marks=pytest.mark.slow)])
def compiler(request: pytest.FixtureRequest) -> str:
    """What takes the graphs that are given to Inductor; the test itself asks for `backend="inductor"`."""
    if request.param != "inductor":
        request.getfixturevalue("node_by_node")
    return str(request.param)


@pytest.fixture(params=["native", "torch"])
def loops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of weights are compared with the compiled code, and as on a machine without a compiler."""
    if request.param == "torch":
        monkeypatch.setattr("amp_compiler.ops.stale_copies.library", lambda: None)


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often a step was captured."""
    import amp_compiler.training.program_choice as training

    seen: list[int] = []
    real = training.build_step
    monkeypatch.setattr(training, "build_step", lambda *arguments: (seen.append(1), real(*arguments))[1])
    return seen


@pytest.fixture(scope="session")
def bench() -> dict[str, Any]:
    """The benchmarks' modules."""
    pytest.importorskip("transformers")
    return benchmark_modules()
