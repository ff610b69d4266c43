"""The search for nodes that FP32 fixes, on plans made by hand, and the rules that it writes."""

import pytest

from amp_compiler.ir.nonfinite import INPUT, NonfiniteNode, ValueRange
from amp_compiler.ir.plan import PlannedCast, PlannedNode, PrecisionPlan
from amp_compiler.planner.cures import MOST_NODES, MOST_TRIALS, Trial, find_cure, rules_text, spoilt_inputs
from amp_compiler.policy.loader import load_rules

RULES = load_rules("default")


def planned(name: str, *inputs: str, precision: str = "low", module: str = "") -> PlannedNode:
    dtype = "fp16" if precision == "low" else "fp32"
    return PlannedNode(
        name, "aten.mul", "elementwise", module, precision, "", "", outputs=((name, dtype),), inputs=inputs
    )


def plan_of(fp32: set[str], names=("a", "b", "c", "d")) -> PrecisionPlan:
    """A chain, with a cast wherever an FP32 node is read by a low one."""
    nodes, casts, before = [], [], "x"
    for name in names:
        nodes.append(planned(name, before, precision="fp32" if name in fp32 else "low"))
        if before in fp32 and name not in fp32:
            casts.append(PlannedCast(before, "fp32", "fp16", 0, ((name, 0),)))
        before = name
    return PrecisionPlan("fp16", "default", "cpu", tuple(nodes), tuple(casts))


def broken(name: str, *, rounding: bool = False, phase: str = "forward") -> NonfiniteNode:
    return NonfiniteNode(name, "aten.mul", "", phase, planned=name, rounding=rounding)


class Runs:
    """A model of a chain, which is finite when `needed` are FP32.

    Args:
        needed: these nodes.
        shown: which node breaks, for the FP32 ones of a run.
    """

    def __init__(self, needed, shown, names=("a", "b", "c", "d")) -> None:
        self.needed, self.shown, self.names = needed, shown, names
        self.tried: list[set[str]] = []

    def __call__(self, rules) -> Trial:
        own = rules.rules[len(RULES.rules) :]
        patterns = [pattern for rule in own for pattern in rule.match.get("node")]
        everywhere = any(not rule.match.conditions for rule in own)
        fp32 = {name for name in self.names if everywhere or any(one.search(name) for one in patterns)}
        self.tried.append(fp32)
        return Trial(plan_of(fp32, self.names), () if self.needed <= fp32 else (self.shown(fp32),))


def cure_of(needed, shown, names=("a", "b", "c", "d")):
    runs = Runs(needed, shown, names)
    return find_cure(RULES, runs(RULES), runs), runs


def test_one_node_that_overflows_is_enough():
    cure, runs = cure_of({"b"}, lambda fp32: broken("b", rounding=True))
    assert 'node: "^b$"' in cure.rule and cure.rule.count("match") == 1 and "1 node in FP32 fixes it" in cure.message
    assert runs.tried == [set(), {"b"}]


def test_fp32_spreads_down_to_readers_of_what_does_not_fit():
    def shown(fp32):
        return broken("b" if "c" not in fp32 else "c", rounding=True)

    cure, runs = cure_of({"b", "c", "d"}, shown)
    assert cure.rule.count("match") == 3 and {"b", "c"} in runs.tried and runs.tried[-1] == {"b", "c", "d"}


def test_fp32_spreads_up_to_makers_of_what_is_too_small():
    cure, runs = cure_of({"b", "c"}, lambda fp32: broken("c"))
    assert cure.rule.count("match") == 2 and runs.tried[-1] == {"b", "c"}
    cure, runs = cure_of({"a", "b"}, lambda fp32: broken("b", rounding=True, phase="backward"))
    assert runs.tried[-1] == {"a", "b"}


def test_where_fp32_makes_it_too_two_trials_tell():
    cure, runs = cure_of({"nothing"}, lambda fp32: broken("b"))
    assert cure.rule == "" and "FP32 makes it too" in cure.message and len(runs.tried) == 3


def test_the_search_ends():
    names = tuple(f"n{number}" for number in range(3 * MOST_NODES))
    needed = set(names[5:])
    cure, runs = cure_of(needed, lambda fp32: broken(max((*fp32, "n5"), key=names.index), rounding=True), names)
    assert (
        cure.rule == "" and "with FP32 everywhere it is finite" in cure.message and len(runs.tried) <= MOST_TRIALS + 2
    )


def test_a_node_is_matched_by_module_and_op_where_it_is_alone():
    nodes = (planned("a", module="one"), planned("b", "a", module="two"), planned("c", "b", module="two"))
    first = Trial(PrecisionPlan("fp16", "default", "cpu", nodes, ()), (broken("a"), broken("c")))
    cure = find_cure(RULES, first, lambda rules: Trial(first.plan, ()))
    assert '{module: "one", op: "aten.mul"}' in cure.rule and '{node: "^c$"}' in cure.rule


@pytest.mark.parametrize("module", ["layers.*", "a[0]"])
def test_a_module_whose_name_is_a_glob_is_not_matched_by_it(module):
    plan = PrecisionPlan("fp16", "default", "cpu", (planned("a.1", module=module),), ())
    cure = find_cure(RULES, Trial(plan, (broken("a.1"),)), lambda rules: Trial(plan, ()))
    assert r'{node: "^a\\.1$"}' in cure.rule


def test_rules_of_a_file_are_extended_wherever_the_new_file_lies(tmp_path, monkeypatch):
    (tmp_path / "mine.yaml").write_text("version: 1\nextends: default\ndeny: [aten.relu]\n")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    entry = {"match": {"node": "^a$"}, "precision": "fp32", "why": 'it says "inf": so'}
    (tmp_path / "other" / "more.yaml").write_text(rules_text(load_rules("mine.yaml"), [entry]))
    result = load_rules(tmp_path / "other" / "more.yaml")
    assert len(result.rules) == len(load_rules("mine.yaml").rules) + 1 and result.rules[-1].why == entry["why"]


def test_inputs_that_are_not_finite_themselves():
    data = NonfiniteNode("x", INPUT, "", "forward", output=ValueRange(1.0, 2.0, 1, 3, "fp32"))
    copy = NonfiniteNode("w_low", INPUT, "", "forward", planned="w", rounding=True)
    assert spoilt_inputs([copy], {}) is None
    message = spoilt_inputs([copy, data], {"x": "the batch"})
    assert message is not None and message.message == "the batch holds 1 infinite, 3 NaN: no precision fixes that"


def test_a_rule_that_no_kernel_takes_ends_the_search_in_words():
    runs = Runs({"b"}, lambda fp32: broken("b", rounding=True))

    def attempt(rules):
        raise RuntimeError("no kernel for 'Half'\nand more")

    assert find_cure(RULES, runs(RULES), attempt).message == "no rule was found: no kernel for 'Half'"
