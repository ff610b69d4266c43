"""What is tuned, as the search sees it: nodes, a profiled run in FP32, and measurements under other rules."""

from __future__ import annotations

from abc import ABC, abstractmethod

from amp_compiler.diagnose.tuning.deviation import Measured
from amp_compiler.diagnose.tuning.sensitivity import Estimate
from amp_compiler.ir.plan import PlannedNode, PrecisionPlan
from amp_compiler.policy.rules import OpTable, RuleSet

NOT_FINITE = "no precision fixes that: the model or its batches have to; amp.find_nonfinite names the node"
SEED = 0  # of the random numbers that a batch draws, in FP32 and in 16 bits


class Subject(ABC):
    """A model with its batches.

    Attributes:
        what: what is compared, in words.
        runs: how often the batches went through the model, in any precision.
        batches: how many there are.
    """

    what = "outputs"

    def __init__(self) -> None:
        self.runs = 0
        self.batches = 0

    @abstractmethod
    def plan(self, rules: RuleSet) -> PrecisionPlan:
        """The plan under some rules."""

    @abstractmethod
    def digest(self) -> str:
        """What tells it from another model with other batches."""

    @abstractmethod
    def profile(self, plan: PrecisionPlan, names: frozenset[str]) -> dict[str, Estimate]:
        """One run in FP32, with the rounding of some nodes measured beside it; keeps what FP32 gives.

        Args:
            plan: the plan.
            names: the nodes that would be rounded.

        Raises:
            AmpError: what FP32 gives is not finite.
        """

    @abstractmethod
    def measure(self, rules: RuleSet) -> Measured:
        """All batches under some rules, against FP32."""


def searched(plan: PrecisionPlan, ops: OpTable) -> list[PlannedNode]:
    """The nodes that round: what runs low, but for what follows its neighbours and rounds nothing that they do not.

    Args:
        plan: the plan.
        ops: says with which ops rounding commutes.
    """
    low = [node for node in plan.nodes if node.precision == "low"]
    return [node for node in low if node.requested != "follow" or not ops.info(node.op).exact]
