"""Joint graphs are kept from process to process: the same graph again, or a new trace."""

import pickle

import pytest
import torch
from fx_reader import parse_fx
from torch.utils._python_dispatch import TorchDispatchMode
from toys import TOYS

import amp_compiler as amp
from amp_compiler.fx import kept_graphs
from amp_compiler.fx.kept_graphs import KeptGraph, marks_of
from amp_compiler.fx.text import format_fx
from amp_compiler.fx.torch_private.tracing import trace_settings
from amp_compiler.ops.cache_folder import cache_folder
from amp_compiler.ops.cpu.build import library
from amp_compiler.passes.step.differentiate import Differentiate

LOSS = """
in w: fp32[4, 4]
in x: bf16[3, 4]
cast: bf16[4, 4] = aten._to_copy.default(w, dtype=torch.bfloat16)  # at=fc:Linear
mm: bf16[3, 4] = aten.mm.default(x, cast)  # at=fc:Linear
wide: fp32[3, 4] = aten._to_copy.default(mm, dtype=torch.float32)
sum_1: fp32[] = aten.sum.default(wide)
return sum_1
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Empty but for the loops of the CPU, which another process would compile anew."""
    library()
    for one in cache_folder().glob("*.so"):
        (tmp_path / one.name).symlink_to(one)
    monkeypatch.setenv("AMP_COMPILER_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture
def traces(monkeypatch):
    """Counts how often a joint graph is traced."""
    result = []
    traced = Differentiate._traced
    monkeypatch.setattr(Differentiate, "_traced", lambda self, graph: result.append(graph) or traced(self, graph))
    return result


def joint(text=LOSS, wrt=("w",)):
    return Differentiate(wrt=wrt)(parse_fx(text)).subject


def kept(folder):
    return sorted(path.name for path in folder.glob("joint_*"))


def test_what_vmap_registers_is_in_no_trace(traces):
    torch.vmap(lambda x: x.sin())(torch.ones(3))
    joint()
    joint()
    assert len(traces) == 1


def test_the_second_one_is_read_and_is_the_same(folder, traces):
    first, second = joint(), joint()
    assert len(traces) == 1 and len(kept(folder)) == 1
    assert format_fx(first) == format_fx(second)
    for one, other in zip(first.graph.nodes, second.graph.nodes, strict=True):
        assert marks_of(one) == marks_of(other)
        assert one.meta.get("nn_module_stack") == other.meta.get("nn_module_stack")
    weights, inputs = torch.randn(4, 4), torch.randn(3, 4).bfloat16()
    for one, other in zip(first(weights, inputs), second(weights, inputs), strict=True):
        assert torch.equal(one, other)


def test_source_lines_are_those_of_the_graph_at_hand(traces):
    def forward(line):
        graph = parse_fx(LOSS)
        for node in graph.graph.nodes:
            node.meta["stack_trace"] = f'  File "model.py", line {line}, in forward'
        return Differentiate(wrt=("w",))(graph).subject

    for line in (1, 2):
        lines = {node.meta.get("stack_trace") for node in forward(line).graph.nodes if node.op == "call_function"}
        assert f'  File "model.py", line {line}, in forward' in lines and len(lines - {None}) == 1
    assert len(traces) == 1


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("in x: bf16[3, 4]", "in x: bf16[3, 4]{1, 3}"),
        ("bf16[3, 4]", "bf16[5, 4]"),
        ("aten.sum.default", "aten.mean.default"),
        ("  # at=fc:Linear", ""),
    ],
    ids=["strides", "shape", "op", "module"],
)
def test_another_graph_is_traced(old, new, traces):
    joint()
    other = joint(LOSS.replace(old, new).replace("fp32[3, 4]", "fp32[5, 4]" if "5" in new else "fp32[3, 4]"))
    assert len(traces) == 2
    traces.clear()
    assert format_fx(joint()) != format_fx(other) and not traces


def test_what_it_is_differentiated_by_counts(traces):
    joint(wrt=("w",))
    joint(LOSS.replace("in x: bf16[3, 4]", "in x: fp32[3, 4]").replace("(x, cast)", "(x, w)"), wrt=("w", "x"))
    joint(LOSS.replace("in x: bf16[3, 4]", "in x: fp32[3, 4]").replace("(x, cast)", "(x, w)"), wrt=("x", "w"))
    assert len(traces) == 3


SETTINGS = {  # how each is set, to another value and back
    "deterministic": (torch.use_deterministic_algorithms, True, False),
    "precision": (torch.set_float32_matmul_precision, "medium", torch.get_float32_matmul_precision()),
    "flash": (torch.backends.cuda.enable_flash_sdp, False, True),
    "dtype": (torch.set_default_dtype, torch.float64, torch.float32),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_of_torch_counts(name, traces):
    put, other, before = SETTINGS[name]
    joint()
    put(other)
    try:
        joint()
    finally:
        put(before)
    assert len(traces) == 2
    joint()
    assert len(traces) == 2


def test_the_source_of_the_package_counts(monkeypatch, traces):
    joint()
    monkeypatch.setattr(kept_graphs, "_own_source", lambda tracer: "another version")
    joint()
    assert len(traces) == 2


class Idle(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore:Warning only once")
def test_nothing_is_kept_under_what_has_no_text(folder):
    assert trace_settings() is not None
    with Idle():
        assert trace_settings() is None
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        assert trace_settings() is None
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("frac", lambda x: x, "CPU")
        assert trace_settings() is None
    assert trace_settings() is not None and not kept(folder)


def test_torchs_switch_for_all_caches_holds(folder, traces):
    with torch.compiler.config.patch(force_disable_caches=True):
        joint()
        joint()
    assert len(traces) == 2 and not kept(folder)


def test_nothing_is_kept_without_the_source(folder, monkeypatch, traces):
    """As in a program that was frozen into one file: a later version could not be told from this one."""
    kept_graphs._own_source.cache_clear()
    monkeypatch.setattr(kept_graphs.inspect, "getfile", lambda module: "frozen away")
    assert format_fx(joint()) == format_fx(joint())
    kept_graphs._own_source.cache_clear()
    assert len(traces) == 2 and not kept(folder)


@torch.library.custom_op("amp_test_kept::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


twice.register_fake(lambda x: torch.empty_like(x))
twice.register_autograd(lambda ctx, grad: grad * 2)


def test_an_operator_of_the_users_is_traced_each_time(folder, traces):
    text = LOSS.replace("aten.sum.default(wide)", "aten.sum.default(own)")
    text = text.replace("sum_1: fp32[] ", "own: fp32[3, 4] = amp_test_kept.twice.default(wide)\nsum_1: fp32[] ", 1)
    first, second = joint(text), joint(text)
    assert len(traces) == 2 and not kept(folder)
    assert format_fx(first) == format_fx(second)


@pytest.mark.parametrize("damage", [b"", "truncated", "flipped", "other"])
def test_a_damaged_file_is_told_and_written_anew(folder, traces, caplog, damage):
    whole = format_fx(joint())
    (file,) = folder.glob("joint_*")
    data = file.read_bytes()
    if damage == "other":
        damage = kept_graphs.gzip.compress(pickle.dumps(3))
    if damage == "flipped":
        damage = bytearray(data)
        damage[12:40] = bytes(255 - one for one in data[12:40])
    file.write_bytes(data[: len(data) // 2] if damage == "truncated" else damage)
    assert format_fx(joint()) == whole and len(traces) == 2
    assert "made anew" in caplog.text
    assert format_fx(joint()) == whole and len(traces) == 2


def test_a_folder_that_cannot_be_written_changes_nothing(monkeypatch, folder, traces):
    file = folder / "file"
    file.write_text("")
    monkeypatch.setenv("AMP_COMPILER_CACHE", str(file))
    assert format_fx(joint()) == format_fx(joint()) and len(traces) == 2


def read_back(graph, folder):
    nodes = list(graph.nodes)
    kept = KeptGraph(folder / "joint_0.gz", nodes, nodes[0].meta["val"].fake_mode)
    kept.store(graph, {node.name: place for place, node in enumerate(nodes)})
    return kept.load()


@pytest.mark.parametrize(
    "text",
    [
        "in x: fp32[2, 3]\nview: fp32[3] = aten.select.int(x, 0, 1)\nreturn view, None",
        "in x: fp32[4]\nsplit: (fp32[2], fp32[2]) = aten.split.Tensor(x, 2)\n"
        "getitem: fp32[2] = getitem(split, 1)\nreturn getitem",
        "in x: fp32[4]\nclamp: fp32[4] = aten.clamp.default(x, -inf, nan)\nreturn clamp",
        'in x: fp32[4]\nto: fp32[4] = aten._to_copy.default(x, device=device("cpu"), layout=torch.strided,'
        " memory_format=torch.preserve_format)\nreturn to",
        "in x: bf16[4]\nin y: bf16[4]\n"
        "add: fp32[4] = typed_op(aten.add.Tensor, (x, y), {}, torch.float32, torch.bfloat16)\nreturn add",
    ],
    ids=["view", "several", "numbers", "kinds", "typed"],
)
def test_what_is_kept_is_the_same_graph(text, tmp_path):
    wrapped = torch.fx.GraphModule({}, read_back(parse_fx(text).graph, tmp_path))
    assert format_fx(wrapped) == format_fx(parse_fx(text))


def test_a_view_keeps_its_offset(tmp_path):
    graph = parse_fx("in x: fp32[2, 3]\nview: fp32[3] = aten.select.int(x, 0, 1)\nreturn view").graph
    nodes = list(graph.nodes)
    with nodes[0].meta["val"].fake_mode:
        nodes[1].meta["val"] = nodes[0].meta["val"].select(0, 1)
    result = list(read_back(graph, tmp_path).nodes)[1].meta["val"]
    assert (result.shape, result.stride(), result.storage_offset()) == ((3,), (1,), 3)


def test_a_step_from_a_kept_graph_trains_as_the_first(traces):
    """Whose first and last layers share a weight, in two tables."""
    runs = []
    for _ in range(2):
        step = TOYS["tied"].step(amp, backend="eager")
        ids = torch.arange(10).view(2, 5)
        losses = [step(ids, ids) for _ in range(3)]
        runs.append([*losses, *step.model.parameters()])
        runs.append(str(step.stages))
    assert len(traces) == 1 and runs[1] == runs[3]
    assert all(map(torch.equal, runs[0], runs[2]))
