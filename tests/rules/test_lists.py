"""Presets give every op the type that the lists of the systems give it which they are named after.

The lists stand in `lists/*.yaml`: names alone, with their source and version, what an op is called here, which have no
op here, and what a preset treats beyond them, each with its reason.
"""

from pathlib import Path

import pytest
from graph_reading import parse_graph
from ruamel.yaml import YAML

from amp_compiler.ir.dtypes import DType
from amp_compiler.ir.graph import Node, PrecisionGraph
from amp_compiler.policy.loader import load_rules
from amp_compiler.policy.matching import RuleMatcher
from amp_compiler.policy.rules import Context, Precision

READ = {path.stem: YAML(typ="safe").load(path) for path in sorted((Path(__file__).parent / "lists").glob("*.yaml"))}
FILES = {stem: file for stem, file in READ.items() if "lists" in file}  # the others hold facts of another form
PLACES = [(low, device) for low in (DType.FLOAT16, DType.BFLOAT16) for device in ("cpu", "cuda", "onnx")]


DEPTHWISE = "graph cpu\ninput x: fp32[2, 8, 4, 4]\ninput w: fp32[8, 1, 4, 4]\n"  # 8 channels, a filter for each


def decided(file: dict, ours: str, low: DType, device: str) -> Precision:
    """What the preset asks of an op, or of a node that a word of the file describes."""
    rules, graph = load_rules(file["preset"]), PrecisionGraph(device)
    if ours == "depthwise":
        graph = parse_graph(f"{DEPTHWISE}y = aten.conv2d(input=x, weight=w){{groups=8}} -> fp32[2, 8, 1, 1]")
        node = graph.nodes["y"]
    elif ours == "gelu by tanh":
        node = Node("y", "aten.gelu", (), (), {"approximate": "tanh"})
    elif ours.startswith("part "):
        node = Node("y", "aten.mul", (), (), part=ours.removeprefix("part "))
    else:
        assert ours in rules.ops.ops or ours.startswith("mylib."), f"{ours} is not in the op table"
        node = Node("y", ours, (), ())
    decision = RuleMatcher(rules, graph, Context(low, device)).decide(node)
    assert decision is not None and decision.reason
    return decision.precision


def agrees(file: dict, ours: str, requested: str, matches: Precision) -> bool:
    """Equality, but that an op with which rounding commutes may follow where it would take the type of its inputs."""
    free = requested == "widest" and load_rules(file["preset"]).ops.info(ours).exact
    return matches.value == requested or (free and matches is Precision.FOLLOW)


CASES = [(stem, title) for stem, file in FILES.items() for title in file["lists"]]


@pytest.mark.parametrize(("stem", "title"), CASES, ids=lambda part: part.replace(" ", "-"))
def test_every_op_of_a_list_is_treated_as_the_original_does(stem, title):
    file = FILES[stem]
    requested, names = file["lists"][title]["asked"], file["lists"][title]["names"].split()
    wrong = {}
    for name in names:
        if name in file["absent"]:
            continue
        for ours in file["ours"].get(name, [f"aten.{name}"]):
            for low, device in PLACES:
                result = decided(file, ours, low, device)
                if not agrees(file, ours, requested, result):
                    wrong[f"{name}: {ours}"] = result.value
    assert not wrong


@pytest.mark.parametrize("stem", FILES)
def test_nothing_else_is_low_or_fp32_without_a_reason(stem):
    file = FILES[stem]
    names = {name for one in file["lists"].values() for name in one["names"].split()}
    listed = {ours for name in names for ours in file["ours"].get(name, [f"aten.{name}"])}
    infos, used, wrong = load_rules(file["preset"]).ops.ops, set(), {}
    torch_and_onnx = {
        op: info for op, info in infos.items() if not op.startswith("com.microsoft.")
    }  # no list has those
    for op, info in {**torch_and_onnx, "mylib.unknown": None}.items():
        family = "unknown" if info is None else info.family
        matcher = RuleMatcher(load_rules(file["preset"]), PrecisionGraph(), Context(DType.FLOAT16, "cuda"))
        result = matcher.decide(Node("y", op, (), ())).precision
        if result in (Precision.LOW, Precision.FP32) and op not in listed:
            used |= {op, family} & set(file["beyond"])
            if not {op, family} & set(file["beyond"]):
                wrong[op] = result.value
    assert not wrong
    assert set(file["beyond"]) == used, "what needs no reason has none"


@pytest.mark.parametrize("stem", FILES)
def test_a_file_names_its_source_and_only_what_is_in_a_list(stem):
    file = FILES[stem]
    assert "github.com/" in file["source"] or "torch" in file["source"]
    names = [name for one in file["lists"].values() for name in one["names"].split()]
    assert len(names) == len(set(names))
    assert set(file["ours"]) | set(file["absent"]) <= set(names)
    assert not set(file["ours"]) & set(file["absent"])
