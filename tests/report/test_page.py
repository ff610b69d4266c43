"""The page of a plan, without a browser: what it holds, that nothing is loaded, that names are only ever text."""

import hashlib
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from importlib.metadata import version
from pathlib import Path

import onnx
import pytest
import torch
from page_plans import MIXED
from planning import plan_text
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from toys import classes, sgd_step

import amp_compiler as amp
from amp_compiler.errors import AmpError
from amp_compiler.forward.autocast import CastCounter
from amp_compiler.fx.step_graph import step_graph_of
from amp_compiler.ir.plan import PlannedCast, PlannedNode, PrecisionPlan
from amp_compiler.report.html import plan_html
from amp_compiler.report.page_data import line_of
from amp_compiler.report.table import human_bytes

ROOT = Path(__file__).parents[2]
PARTS = ROOT / "amp_compiler" / "report" / "page"
HOSTILE = "</script><script>alert('&')</script>\u2028<!--"


class Page(HTMLParser):
    """Checks that tags close in order and nothing is a comment; collects texts and the addresses that it would load."""

    VOID = ("meta", "input", "br", "link", "img")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.cells: list[str] = []
        self.words: list[str] = []
        self.loads: list[str] = []
        self.scripts: list[str] = []
        self.style = ""
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.loads += [value for name, value in attrs if name in ("src", "href", "data", "action", "poster")]
        self.tags.append(tag)
        if tag == "script":
            self.scripts.append("")
        if tag == "td":
            self.cells.append("")
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data
        elif self.open and self.open[-1] == "style":
            self.style += data
        elif self.open:
            self.words.append(data)
        if self.open and self.open[-1] == "td":
            self.cells[-1] += data

    def handle_comment(self, data):
        raise AssertionError(f"a comment: {data}")

    @property
    def data(self):
        return json.loads(self.scripts[0])


def hostile_plan() -> PrecisionPlan:
    node = PlannedNode(
        HOSTILE, HOSTILE, HOSTILE, HOSTILE, "low", HOSTILE, HOSTILE, source=HOSTILE, outputs=((HOSTILE, HOSTILE),),
        inputs=("x", HOSTILE + "w"),
    )  # fmt: skip
    casts = (PlannedCast("x", "fp32", "bf16", 1, ((HOSTILE, 0),)),)
    return PrecisionPlan(HOSTILE, HOSTILE, HOSTILE, (node,), casts, (("x", "fp32"),), (HOSTILE,))


def rows_of(columns: dict) -> list[dict]:
    """Rows, from columns that say each value once, as the page reads them."""
    held = {name: [values[number] for number in numbers] for name, (values, numbers) in columns.items()}
    return [dict(zip(held, row, strict=True)) for row in zip(*held.values(), strict=True)]


def test_the_data_are_the_plan():
    plan = plan_text(MIXED)
    data = Page(plan_html(plan)).data
    side, message = data["graphs"][0]["sides"][0], json.loads(plan.to_json())
    assert (rows_of(side["nodes"]), rows_of(side["casts"])) == (message["nodes"], message["casts"])
    assert (side["inputs"], side["outputs"]) == (message["inputs"], message["outputs"])


def test_nothing_is_loaded():
    text = plan_html(plan_text(MIXED), other=plan_text(MIXED))
    page = Page(text)
    assert page.loads == []
    own = page.scripts[2] + page.style
    assert not re.search(
        r"https?://(?!www\.w3\.org/2000/svg)|@import|url\((?!#)|\bfetch\(|XMLHttpRequest|import\(", own
    )
    assert not re.search(r"\bfetch\(|XMLHttpRequest|\bimport\(|https?://(?!www\.w3\.org/)", page.scripts[1])
    assert "default-src 'none'" in text  # and a browser that is asked to all the same does not


def test_names_are_only_ever_text():
    text = plan_html(hostile_plan(), other=hostile_plan(), names=(HOSTILE, HOSTILE))
    page = Page(text)
    assert len(page.scripts) == 3
    assert HOSTILE not in text
    assert "<!--" not in text.replace("<!doctype", "")
    assert "\u2028" not in page.scripts[0]
    assert rows_of(page.data["graphs"][0]["sides"][0]["nodes"])[0]["module"] == HOSTILE
    scripts = "".join((PARTS / name).read_text(encoding="utf-8") for name in ("text.js", "drawing.js", "page.js"))
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", scripts)


class Attention(nn.Module):
    """Products of all kinds, beside views that must not count."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.out = nn.Conv1d(4, 8, 3, groups=2), nn.LayerNorm(8), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.stem(x).transpose(1, 2)).reshape(-1, 6, 8).contiguous()
        return self.out(torch.softmax(y @ y.transpose(1, 2), -1) @ y)


def test_shares_are_of_arithmetic_and_bytes_and_names_are_the_models(monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "86400")
    model, x = Attention(), torch.randn(3, 4, 8)
    plan = amp.explain(model, (x,), dtype="bf16", device="cuda")
    with FlopCounterMode(display=False) as counter:
        model(x)
    products = [node for node in plan.nodes if node.family in ("matmul", "convolution")]
    assert sum(node.flops for node in products) == counter.get_total_flops() > 0
    assert {node.family for node in plan.nodes if not node.bytes} == {"view"}
    page = Page(plan_html(plan))
    words = " ".join(" ".join(page.words).split())
    total = sum(node.flops for node in plan.nodes)
    share = f"{100 * sum(node.flops for node in plan.nodes if node.precision == 'low') / total:.0f} %"
    parameters = sum(one.numel() for one in model.parameters())
    result = f"1970-01-02 · amp_compiler {amp.__version__} · torch {version('torch')}"
    for part in (f"Attention · {parameters} parameters · x fp32[3, 4, 8]", result, f"arithmetic in bf16 {share}"):
        assert part in words
    reads = {name for row in rows_of(page.data["graphs"][0]["sides"][0]["nodes"]) for name in row["inputs"]}
    assert {name for name, _ in model.named_parameters()} <= reads
    assert "p_stem" not in page.scripts[0] and "p_out" not in page.scripts[0]
    back = PrecisionPlan.from_dict(json.loads(plan.to_json()))
    assert (back.model, back.nodes[0].flops) == (plan.model, plan.nodes[0].flops)
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "today")
    with pytest.raises(AmpError, match="SOURCE_DATE_EPOCH"):
        plan_html(plan)


def test_the_same_page_under_any_hash_seed(tmp_path):
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from amp_compiler.ir.plan import PrecisionPlan, PlannedNode, PlannedCast\n"
        "from amp_compiler.report.html import plan_html; from amp_compiler.report.svg import plan_svg\n"
        "made = [PlannedNode(f'n{i}', f'aten.op{i % 7}', 'f', f'm.{i % 5}', 'low', f'r:{i % 3}', 'why',\n"
        "        source=f's.py:{i}', outputs=((f'n{i}', 'bf16'),), inputs=(f'n{i - 1}' if i else 'x',))\n"
        "    for i in range(40)]\n"
        "plan = PrecisionPlan('bf16', 'default', 'cpu', tuple(made),\n"
        "    (PlannedCast('x', 'fp32', 'bf16', 6, (('n0', 0),)),), (('x', 'fp32'),), ('n39',))\n"
        "sys.stdout.buffer.write((plan_html(plan, other=plan) + plan_svg(plan)).encode())\n"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", code, str(ROOT)],
            capture_output=True,
            check=True,
            env={"PYTHONHASHSEED": seed, "SOURCE_DATE_EPOCH": "0"},
        ).stdout
        for seed in ("1", "2")
    ]
    assert runs[0] == runs[1]
    assert len(runs[0]) > 100_000


def test_the_users_line_is_shown_where_it_can_be_read(tmp_path):
    file = tmp_path / "model.py"
    file.write_text("first\n    x = relu(x)  # </script>\n", encoding="utf-8")
    assert line_of(f"{file}:2") == "x = relu(x)  # </script>"
    for place in (f"{file}:9", "nowhere.py:1", "", "model.py", f"{file}:x"):
        assert line_of(place) == ""
    node = PlannedNode("a", "aten.relu", "", "", "low", "", "", source=f"{file}:2", outputs=(("a", "bf16"),), inputs=())
    text = plan_html(PrecisionPlan("bf16", "default", "cpu", (node,), ()))
    assert Page(text).data["code"] == {f"{file}:2": "x = relu(x)  # </script>"}


def test_what_is_no_plan_or_profile_is_refused():
    plan = plan_text(MIXED)
    for options, message in (
        ({"other": "plan.json"}, "other is a str"),
        ({"profile": 3}, "profile is a int"),
        ({"step": plan}, "step is a PrecisionPlan"),
        ({"other": plan, "names": ("a",)}, r"names is \('a',\)"),
        ({"other": plan, "names": ("a", "b", "c")}, "pass what the two plans are called"),
        ({"other": plan, "names": "xy"}, "names is 'xy'"),
        ({"other": plan, "names": (None, 1)}, "names is"),
    ):
        with pytest.raises(AmpError, match=message):
            plan_html(plan, **options)


def small_step():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.LayerNorm(16), torch.nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return amp.training_step(model, classes, optimizer, dtype="bf16", loss_scale=None, backend="eager")


def test_the_whole_step_is_a_graph_of_the_page(tmp_path):
    step, batch = small_step(), (torch.randn(4, 8), torch.randint(2, (4,)))
    step(*batch)
    before = [parameter.clone() for parameter in step.model.parameters()]
    graph = step_graph_of(step.graph_module)
    calls = [node for node in step.graph_module.graph.nodes if node.op == "call_function"]
    assert len(graph.nodes) + len(graph.casts) == sum("getitem" not in str(node.target) for node in calls)
    phases = dict.fromkeys(node.phase for node in graph.nodes)
    assert list(phases) == ["forward", "backward", "update"]
    assert [name for name, _ in graph.inputs] == ["batch_0", "batch_1"]
    step.to_html(tmp_path / "step.html")
    page = Page((tmp_path / "step.html").read_text(encoding="utf-8"))
    data, words = page.data, " ".join(" ".join(page.words).split())
    with torch.autocast("cpu", dtype=torch.bfloat16), CastCounter() as counted:
        classes(step.model, *batch)
    assert f"torch.autocast : {counted.casts} casts" in words and human_bytes(counted.cast_bytes) in words
    assert all(torch.equal(one, other) for one, other in zip(before, step.model.parameters(), strict=True))
    assert [one["key"] for one in data["graphs"]] == ["forward", "step"]
    side = data["graphs"][1]["sides"][0]
    nodes = rows_of(side["nodes"])
    assert [node["name"] for node in nodes] == [node.name for node in graph.nodes]
    assert len(rows_of(side["casts"])) == len(graph.casts)
    (mean,) = (node for node in step.plan.nodes if node.op == "aten.layer_norm")
    assert {node["reason"] for node in nodes if node["op"] == "aten.native_layer_norm_backward"} == {mean.reason}
    result = {value for node in nodes for value, _ in node["outputs"]} | {cast.name for cast in graph.casts}
    known = result | {name for name, _ in (*side["inputs"], *side["stored"])}
    assert "0.weight in bf16" in known and not any("p_model" in name for name in known)
    assert all(value in known for node in nodes for value in node["inputs"])


def test_a_profile_is_told_as_it_stands(tmp_path):
    step = small_step()
    batch = torch.randn(4, 8), torch.randint(2, (4,))
    profile = amp.profile(step, [batch, batch])
    step.to_html(tmp_path / "step.html", profile=profile)
    page = Page((tmp_path / "step.html").read_text(encoding="utf-8"))
    message, rows = page.data, page.data["profile"]
    assert len(rows) == len(profile.rows)
    for row, shown in zip(profile.rows, rows, strict=True):
        assert (shown["name"], shown["kind"]) == (row.name, row.kind)
        assert sum(shown["stored"].values()) == row.stored.total
        for dtype, result in shown["fractions"].items():
            assert result == [getattr(row.stored.fractions(dtype), part) for part in ("zero", "subnormal", "infinite")]
    lost = {row.name: {dtype: row.fraction_lost(dtype) for dtype in ("fp16", "bf16")} for row in profile.updates}
    assert lost == {row["name"]: row["updates"] for row in rows if row["updates"]}
    advice = profile.loss_scale("fp16")
    said = f"In fp16 a static loss scale of {advice.scale:,.0f} loses {advice.lost:.2%} of the gradients of weights"
    assert f"Over 2 batches. {said}; none loses {advice.lost_without:.2%}" in " ".join(" ".join(page.words).split())
    assert message["ranges"] == {"fp16": [-24, -14, 15], "bf16": [-133, -126, 127]}


def test_the_page_of_an_onnx_file(tmp_path):
    result = onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["": 20]> g (float[2, 8] x) => (float[2, 8] y)'
        "<float[8, 8] w = {" + ", ".join(["1"] * 64) + "}>"
        '{ ["/encoder/layer.0/MatMul"] a = MatMul(x, w) ["/encoder/Softmax"] y = Softmax <axis = -1> (a) }'
    )
    plan = amp.explain(result, dtype="fp16")
    data = Page(plan_html(plan)).data
    nodes = rows_of(data["graphs"][0]["sides"][0]["nodes"])
    assert [node["name"] for node in nodes] == ["/encoder/layer.0/MatMul", "/encoder/Softmax"]
    assert nodes[0]["module"] == "encoder.layer.0"


def test_a_step_in_subgraphs_and_a_step_before_its_first_call_are_refused(tmp_path):
    with pytest.raises(AmpError, match="call it with a batch first"):
        small_step().to_html(tmp_path / "step.html")
    model = torch.nn.Linear(4, 1)

    def loss(model, x):
        result = model(x).square().mean()
        return result * 2 if result.item() > 1e9 else result  # decided by a number: not one graph

    step = sgd_step(model, loss, loss_scale=None)
    step(torch.ones(2, 4))
    with pytest.raises(AmpError, match=r"subgraphs is not one graph to draw.*step\.plan\.to_html"):
        step.to_html(tmp_path / "step.html")


def luminance(colour: str) -> float:
    """Of `#rrggbb`, as WCAG 2 defines it."""
    parts = (int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5))
    red, green, blue = (one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    brighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (brighter + 0.05) / (darker + 0.05)


def test_what_is_written_can_be_read_in_light_and_dark():
    style = (PARTS / "page.css").read_text(encoding="utf-8")
    light, dark, *_ = re.findall(r":root \{(.*?)\}", style, re.DOTALL)
    for palette in (light, dark):
        colours = dict(re.findall(r"--([a-z0-9-]+): (#[0-9a-f]{6});", palette))
        for text, grounds in (
            ("ink", ("page", "card", "low-fill", "fp32-fill", "keep-fill", "cast-fill")),
            ("soft", ("page", "card", "low-fill", "fp32-fill", "keep-fill")),  # WCAG AA: 4.5
            ("accent", ("page", "card")),
            ("changed", ("page", "card")),
            ("bad", ("page", "card")),
            ("cast", ("low-fill", "fp32-fill")),
        ):
            for ground in grounds:
                assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
        for line in ("low", "fp32", "keep", "cast"):  # of shapes: 3
            assert contrast(colours[line], colours["card"]) >= 3, line


def test_the_libraries_are_those_of_the_lock_file_with_their_licences():
    about = json.loads((PARTS / "libraries.json").read_text(encoding="utf-8"))
    text = (PARTS / "libraries.min.js").read_bytes()
    assert hashlib.sha256(text).hexdigest() == about["sha256"]
    lock = json.loads((ROOT / "tools" / "page_libraries" / "package-lock.json").read_text(encoding="utf-8"))["packages"]
    assert [package["name"] for package in about["packages"]][:2] == ["@dagrejs/dagre", "d3-color"]
    for package in about["packages"]:
        locked = lock[f"node_modules/{package['name']}"]
        assert (package["version"], package["integrity"]) == (locked["version"], locked["integrity"])
        assert package["license"] in ("MIT", "ISC", "BSD-3-Clause")
        assert f"{package['name']} {package['version']}".encode() in text
    assert text.count(b"Copyright") >= 3
    assert sum(path.stat().st_size for path in PARTS.iterdir()) < 300_000
    assert not any("resolved" in entry for entry in lock.values())  # the lock file names no host
