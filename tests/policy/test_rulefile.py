"""The rule language: what loads, in which order, and that every mistake is told with its place and a hint."""

import json
from importlib import resources
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from amp_compiler.errors import RuleError
from amp_compiler.ir.dtypes import DType
from amp_compiler.ops.loss_scale import make_loss_scale
from amp_compiler.policy.json_schema import schema
from amp_compiler.policy.loader import load_rules
from amp_compiler.policy.rules import Comparison, Precision, RuleSet
from amp_compiler.policy.schema import RuleFileModel, RuleModel
from amp_compiler.policy.yaml_tree import MAX_BYTES, parse_yaml


@pytest.fixture
def write(tmp_path):
    def write(text: str, name: str = "my.yaml") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write


def rule(**parts):
    return {"version": 1, "rules": [{"match": {}, "precision": "low", **parts}]}


def match(**conditions):
    return {"version": 1, "rules": [{"match": conditions, "precision": "low"}]}


# ---- what loads


def test_full_file(write):
    rules = load_rules(
        write(
            """\
version: 1
extends: default
allow: [matmul, aten.relu]
deny:
  - softmax
rules:
  - match: {module: "decoder.*.mlp", op: aten.linear}
    precision: low
    math: fp32
    backward: {precision: fp32, math: fp32}
    why: because
  - match:
      node: "^/lm_head/"
      reduction_size: "> 8192"
      attr: {dim: -1, sizes: [1, 2], keepdim: true}
      inputs: [fp32, bf16]
      absmax: ">= 1e3"
      phase: forward
      device: cuda
      dtype: fp16
      module_type: [Linear, "*Norm"]
      family: matmul
    math: bf16
loss_scale: {mode: static, init: 8, min: 1, max: 2.5}
weights: {rounding: stochastic}
"""
        )
    )
    base = load_rules("default")
    assert rules.name.endswith("my.yaml")
    assert rules.rules[: len(base.rules)] == base.rules
    own = rules.rules[len(base.rules) :]
    lines = [rule.where.rpartition(":")[2] for rule in own]
    assert lines == ["3", "5", "3", "7", "12"], "families of both lists, then ops, then rules"
    assert [rule.precision for rule in own[:3]] == [Precision.LOW, Precision.FP32, Precision.LOW]
    first, second = own[3:]
    assert (first.math, first.backward, first.backward_math) == (DType.FLOAT32, Precision.FP32, DType.FLOAT32)
    assert first.why == "because" and first.match.get("module") == ("decoder.*.mlp",)
    assert second.precision is None and second.math is DType.BFLOAT16
    assert second.match.get("reduction_size") == Comparison(">", 8192.0)
    assert second.match.get("absmax") == Comparison(">=", 1000.0)
    assert second.match.get("attr") == (("dim", -1), ("sizes", (1, 2)), ("keepdim", True))
    assert set(second.match.get("inputs")) == {DType.FLOAT32, DType.BFLOAT16}
    assert (second.match.get("device"), second.match.get("dtype")) == (("cuda",), (DType.FLOAT16,))
    assert rules.loss_scale == {"mode": "static", "init": 8, "min": 1, "max": 2.5}, "another mode inherits nothing"
    assert rules.weights == {"master": "fp32", "rounding": "stochastic"}


def test_the_section_keep_is_merged_and_true_unless_it_says_otherwise(write):
    assert load_rules("default").keep == {"sizes": True, "angles": True, "running_sums": True}
    base = write("version: 1\nextends: default\nkeep: {angles: false, sizes: true}\n")
    rules = load_rules({"version": 1, "extends": str(base), "keep": {"sizes": False}})
    assert rules.keep == {"sizes": False, "angles": False, "running_sums": True}
    assert [rules.keeps(what) for what in ("sizes", "angles", "running_sums")] == [False, False, True]
    assert load_rules({"version": 1, "allow": ["matmul"]}).keeps("angles")


def test_presets_load_by_name_and_paths_by_path(write):
    assert load_rules("fast").name == "fast"
    path = write("version: 1\nallow: [matmul]\n")
    assert load_rules(str(path)) == load_rules(path)
    rules = load_rules(path)
    assert load_rules(rules) is rules


@pytest.mark.parametrize(
    "section",
    [
        {"mode": "norm_adaptive", "target_norm": 128.0, "patience": 7},
        {"mode": "none", "check_finite": False, "patience": 3},
        {"mode": "static", "init": 8.0, "patience": 4},
    ],
)
def test_every_setting_of_a_loss_scale_can_stand_in_a_rule_file(section):
    result = make_loss_scale(load_rules({"version": 1, "loss_scale": section}).loss_scale)
    assert result.mode == section["mode"] and result.patience == section.get("patience", 20)
    names = {"init": "scale"}
    assert all(getattr(result, names.get(key, key)) == value for key, value in section.items())


def test_loss_scale_of_the_same_mode_is_merged():
    rules = load_rules({"version": 1, "extends": "default", "loss_scale": {"init": 2.0}})
    assert rules.loss_scale["init"] == 2.0 and rules.loss_scale["growth_interval"] == 2000


def test_callers_cannot_spoil_a_preset():
    load_rules("default").loss_scale["mode"] = "spoilt"
    assert load_rules("default").loss_scale["mode"] == "dynamic"


def test_extends_is_relative_to_the_file(write):
    write("version: 1\ndeny: [softmax]\n", "base/one.yaml")
    write("version: 1\nextends: one.yaml\n", "base/two.yaml")
    rules = load_rules(write("version: 1\nextends: base/two.yaml\nallow: [softmax]\n"))
    assert [rule.precision for rule in rules.rules] == [Precision.FP32, Precision.LOW]


def test_old_names_of_the_lists_mean_the_same():
    old = load_rules({"version": 1, "whitelist": ["matmul"], "blacklist": ["softmax"]}).rules
    new = load_rules({"version": 1, "allow": ["matmul"], "deny": ["softmax"]}).rules
    assert [(rule.match, rule.precision) for rule in old] == [(rule.match, rule.precision) for rule in new]


def test_a_dict_has_keys_for_places():
    assert load_rules(rule()).rules[0].where == "<dict>:rules.0"


def test_ops_of_other_namespaces_are_taken_as_they_are():
    names = ["mylib.attention", "torchvision.*", "com.microsoft.Gelu"]
    assert load_rules(match(op=names)).rules[0].match.get("op") == tuple(names)


def test_an_empty_match_matches_everything_and_must_be_written():
    assert load_rules(rule()).rules[0].match.get("op") == ()
    with pytest.raises(RuleError, match=r"'match' is missing.*match: \{\}"):
        load_rules({"version": 1, "rules": [{"precision": "low"}]})


def test_words_that_yaml_1_1_takes_for_truth_values_are_text(write):
    rules = load_rules(write("version: 1\nrules:\n- {match: {attr: {mode: on}}, precision: low}\n"))
    assert rules.rules[0].match.get("attr") == (("mode", "on"),)


# ---- what is refused: (rules, what the message says)

WRONG = [
    ({}, "'version' is missing"),
    ({"version": 2}, "2 is not 1"),
    ({"version": True}, "whole number 1"),
    ({"version": 1, "rulez": []}, "unknown key 'rulez' .*did you mean 'rules'"),
    ({"version": 1, "rules": 3}, "valid list"),
    ({"version": 1, "allow": []}, "at least 1"),
    ({"version": 1, "allow": ["linear"]}, "no op family 'linear'.*'aten.linear'"),
    ({"version": 1, "deny": ["fp32"]}, "is a precision"),
    ({"version": 1, "allow": ["aten.add_"]}, "in place.*'aten.add'"),
    ({"version": 1, "allow": ["aten.add.Tensor"]}, "overloads.*'aten.add'"),
    ({"version": 1, "allow": ["aten.linar*"]}, "matches no known op.*did you mean 'aten.linear'"),
    ({"version": 1, "allow": ["matmul", "matmul"]}, "already in 'allow'"),
    ({"version": 1, "allow": ["matmul"], "blacklist": ["matmul"]}, "already in 'allow'"),
    ({"version": 1, "allow": ["matmul"], "whitelist": ["softmax"]}, "another name of 'allow'"),
    ({"version": 1, "extends": "defualt"}, "no preset 'defualt'.*did you mean 'default'"),
    ({"version": 1, "extends": "./missing.yaml"}, "cannot be read: No such file .*; check the path; use one of"),
    (rule(precision="lo"), "'lo' is not .*did you mean 'low'"),
    (rule(backward={"precison": "low"}), "unknown key 'precison'.*did you mean 'precision'"),
    ({"version": 1, "rules": [{"match": {}, "why": "x"}]}, "asks for nothing"),
    (rule(refuse="do otherwise"), "'refuse' stands alone"),
    ({"version": 1, "rules": [{"match": {}, "refuse": ""}]}, "at least 1 character"),
    (match(output="yes"), "valid boolean"),
    (match(opp="x"), "unknown key 'opp'.*did you mean 'op'"),
    (match(op="linear"), "matches no known op"),
    (match(op=None), "valid string"),
    (match(node="("), "no regular expression.*character 1"),
    (match(reduction_size="8192"), "no comparison"),
    (match(absmax="=> 3"), "no comparison"),
    (match(phase="backward"), "'phase: backward' would match nothing.*'backward: {precision: fp32}'"),
    (rule(precision="fp32", math="fp16"), r"compute in fp16, which is narrower.*rules\.0\.math.*'precision: low'"),
    (rule(precision="keep", math="fp32"), "leaves a node as it was captured"),
    (match(device="cdua"), "'cdua' is not .*did you mean 'cuda'"),
    (match(dtype="fp32"), "'fp32' is not"),
    (match(attr={"a": {}}), "wrong"),
    ({"version": 1, "loss_scale": {"mode": "dynamical"}}, "did you mean 'dynamic'"),
    ({"version": 1, "loss_scale": {"init": 0}}, "greater than 0"),
    ({"version": 1, "loss_scale": {"init": float("inf")}}, "finite"),
    ({"version": 1, "loss_scale": {"backoff_factor": 1.5}}, "less than 1"),
    ({"version": 1, "loss_scale": {"growth_interval": 1.5}}, "integer"),
    ({"version": 1, "loss_scale": {"min": 2, "max": 1}}, "above its 'max'"),
    ({"version": 1, "weights": {"master": "bf16"}}, "'bf16' is not"),
    ({"version": 1, "keep": {"size": True}}, "did you mean 'sizes'"),
    ({1: 2}, "not text"),
    ({"version": 1, "allow": {"matmul"}}, "type set"),
    ("version: 1\n", "looks like the text"),
    ("no/such.yaml", "cannot be read: No such file .*; check the path; use one of"),
    (Path("a\0b"), "cannot be read"),
    (Path(__file__).parent, "is no file"),
    (3, "type int"),
]


@pytest.mark.parametrize(("rules", "message"), WRONG, ids=lambda part: str(part)[:40])
def test_wrong_rules(rules, message):
    with pytest.raises(RuleError, match=f"(?s){message}"):
        load_rules(rules)


@pytest.mark.parametrize(
    ("text", "message", "line", "column"),
    [
        ("version: 1\nrulez: []\n", "unknown key 'rulez'", 2, 1),
        ("version: 1\nrules:\n- match: {op: aten.linar}\n  precision: low\n", "no known op", 3, 15),
        ("version: 1\nallow: [matmul,\n  softmaxx]\n", "no op family", 3, 3),
        ("version: 1\nallow: [matmul]\ndeny: [matmul]\n", "already in 'allow' at line 2", 3, 8),
        ("version: 1\nrules:\n- match: {node: [a, '(']}\n  precision: low\n", "regular expression", 3, 21),
        ("version: 1\nallow: [matmul\n", "not YAML", 3, 1),
        ("version: 1\nwhy: !!python/object:os.system x\n", "tag", 2, 6),
        ("version: 1\nextends: nothing\n", "no preset", 2, 10),
        ("- 1\n", "mapping", 1, 1),
        ("", "mapping, and this is empty", 1, 1),
        ("? [1]\n: 2\n", "key is not text", 1, 3),
        ("a: " + "[" * 40 + "]" * 40, "nested too deeply", 1, 35),
    ],
)
def test_mistakes_in_a_file_have_a_place(write, text, message, line, column):
    path = write(text)
    with pytest.raises(RuleError, match=message) as caught:
        load_rules(path)
    assert (caught.value.file, caught.value.line, caught.value.column) == (str(path), line, column)
    assert "; " in str(caught.value), "every error says its hint"


def test_circle_of_extends_names_the_chain(write):
    write("version: 1\nextends: ./b.yaml\n", "a.yaml")
    write("version: 1\nextends: ./a.yaml\n", "b.yaml")
    with pytest.raises(RuleError, match=r"circle: .*a\.yaml -> .*b\.yaml -> .*a\.yaml"):
        load_rules(write("version: 1\nextends: ./b.yaml\n", "a.yaml"))


def test_long_chain_of_extends_is_refused(write):
    for number in range(20):
        write(f"version: 1\nextends: ./{number + 1}.yaml\n", f"{number}.yaml")
    with pytest.raises(RuleError, match="more than 16 files"):
        load_rules(write("version: 1\nextends: ./0.yaml\n"))


def test_alias_bomb_and_large_files_are_refused(write):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    with pytest.raises(RuleError, match="aliases expanded"):
        load_rules(write("\n".join(lines)))
    with pytest.raises(RuleError, match=f"at most {MAX_BYTES} bytes"):
        load_rules(write("#" * (MAX_BYTES + 1)))


def test_text_that_is_not_utf8(tmp_path):
    path = tmp_path / "latin.yaml"
    path.write_bytes(b"version: 1\nallow: [\xe9]\n")
    with pytest.raises(RuleError, match="not UTF-8") as caught:
        load_rules(path)
    assert caught.value.line == 2


def test_deep_and_circular_dicts_are_refused():
    circle: dict = {"version": 1}
    circle["rules"] = [circle]
    with pytest.raises(RuleError, match="nested too deeply"):
        load_rules(circle)


# ---- schema


def test_committed_schema_is_current():
    committed = resources.files("amp_compiler.rules").joinpath("schema.json").read_text(encoding="utf-8")
    assert json.loads(committed) == json.loads(json.dumps(schema())), "write it again with amp-compiler rules schema"


# ---- whatever is written, the outcome is a rule set or a RuleError

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["low", "matmul", "> 3", "*"]),
)
words = st.sampled_from(
    [
        *RuleFileModel.model_fields,
        *RuleModel.model_fields,
        *RuleFileModel.model_json_schema()["$defs"]["MatchModel"]["properties"],
    ]
)
data = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(words | st.text(max_size=5), inner, max_size=5)
)


@given(st.dictionaries(words | st.text(max_size=5), data, max_size=6), st.booleans())
@settings(max_examples=150, deadline=None)
def test_any_dict_loads_or_is_refused(rules, versioned):
    try:
        assert isinstance(load_rules({"version": 1, **rules} if versioned else rules), RuleSet)
    except RuleError as error:
        assert str(error)


@given(st.text(alphabet="ab:- {}[]&*!|>'\"%@#,?\n\t\\x0u1.", max_size=60) | st.text(max_size=40))
@settings(max_examples=300, deadline=None)
def test_any_text_parses_or_is_refused(text):
    try:
        parse_yaml(text, "fuzz.yaml").plain()
    except RuleError as error:
        assert error.file == "fuzz.yaml"


@given(raw=st.binary(max_size=60))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_file_loads_or_is_refused(tmp_path, raw):
    path = tmp_path / "fuzz.yaml"
    path.write_bytes(b"version: 1\n" + raw)
    try:
        assert isinstance(load_rules(path), RuleSet)
    except RuleError as error:
        assert error.file == str(path)
