"""The course of a tuning: profile, search, write the rules, and run with what was written."""

from __future__ import annotations

import hashlib
import logging
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from amp_compiler.diagnose.tuning.deviation import Measured
from amp_compiler.diagnose.tuning.journal import Journal
from amp_compiler.diagnose.tuning.options import TuneOptions
from amp_compiler.diagnose.tuning.result import TunedNode, TuneResult
from amp_compiler.diagnose.tuning.search import Found, OutOfReachError, find_kept, run_limit
from amp_compiler.diagnose.tuning.sensitivity import Estimate, in_order, likely_prefix
from amp_compiler.diagnose.tuning.subject import Subject, searched
from amp_compiler.diagnose.tuning.writing import Entry, entries_for, rules_file, with_chosen
from amp_compiler.errors import AmpError
from amp_compiler.ir.arithmetic import Fp8
from amp_compiler.ir.files import write_atomically
from amp_compiler.ir.plan import PrecisionPlan
from amp_compiler.policy.loader import load_rules
from amp_compiler.policy.rule_text import head_lines
from amp_compiler.policy.rules import Precision, RuleSet
from amp_compiler.policy.sources import FROM_DICT

logger = logging.getLogger("amp_compiler")
TOLERANCES = {"fp16": 1e-2, "bf16": 8e-2}  # those of `amp-compiler convert --verify`
_WRITTEN = 1  # run that the written file takes


class Tuning:
    """One call of `tune`.

    Args:
        subject: what is tuned.
        rules: what is extended.
        options: of the call.

    Raises:
        AmpError: the rules came as a dict that is not at hand, and a file is to extend them.
    """

    def __init__(self, subject: Subject, rules: RuleSet, options: TuneOptions) -> None:
        self.subject, self.rules, self.options = subject, rules, options
        self.plan: PrecisionPlan = subject.plan(rules)
        products = [node.name for node in self.plan.nodes if Fp8.parse(node.math) is not None]
        self.in_fp8 = bool(products)
        self.names = products if self.in_fp8 else [node.name for node in searched(self.plan, rules.ops)]
        self.wide = "16 bits" if self.in_fp8 else "FP32"
        self.precision = Precision.LOW if self.in_fp8 else Precision.FP32
        self.tolerance = TOLERANCES[self.plan.dtype] if options.tolerance is None else options.tolerance
        self.data = options.rules if isinstance(options.rules, Mapping) else None
        self.is_open = rules.name == FROM_DICT and self.data is None  # no file can extend them
        if self.is_open and options.output is not None:
            raise AmpError(
                "the rules came as a dict, which no file can extend",
                where=str(options.output),
                hint="pass rules= with the dict, or write it to a file",
            )
        self.limit = run_limit(len(self.names))
        self.worst: dict[frozenset[str], str] = {}
        self.begun = time.monotonic()

    def run(self) -> TuneResult:
        """Profile, search, write, and run with what was written.

        Raises:
            AmpError: see `tune`.
        """
        place = self.options.output
        path = None if place is None else place.with_name(f"{place.name}.journal")
        journal = Journal(path, self._digest() if path is not None else "")
        try:
            return self._run(journal, path)
        except KeyboardInterrupt:
            if path is not None and path.exists():
                logger.warning("stopped; what was measured stands in %s, and the same command goes on from it", path)
            raise

    def _run(self, journal: Journal, path: Path | None) -> TuneResult:
        if journal.resumed:
            logger.info("amp.tune goes on from %d measurements in %s", journal.resumed, path)
        console = Console(stderr=True)
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        with Progress(*columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal) as progress:
            task = progress.add_task("profile", total=self.limit)
            estimates = self.subject.profile(self.plan, frozenset(self.names))
            order = in_order(estimates, self.names)
            places = {name: at for at, name in enumerate(self.names)}

            def measure(kept: frozenset[str]) -> float:
                measured = journal.get(key := sorted(places[name] for name in kept))
                if measured is None:
                    measured = self.subject.measure(with_chosen(self.rules, kept, self.precision))
                    journal.note(key, measured)
                else:
                    self.subject.runs += 1  # of the run that was killed
                self.worst[kept] = measured.worst
                description = f"{len(kept)} of {len(order)} in {self.wide}: {measured.error:.2g}"
                progress.update(task, advance=1, description=description)
                return measured.error

            result = self._written(self._searched(order, estimates, measure), estimates)
        if not result.stopped:
            journal.close()
        return result

    def _digest(self) -> str:
        rules = [replace(rule, where="", text="") for rule in self.rules.rules]
        digest = hashlib.blake2b(self.subject.digest().encode(), digest_size=16)
        digest.update(repr((rules, sorted(self.rules.keep.items()), self.names)).encode())
        return digest.hexdigest()

    def _searched(
        self, order: list[str], estimates: Mapping[str, Estimate], measure: Callable[[frozenset[str]], float]
    ) -> Found:
        spent, budget, most = self.subject.runs + _WRITTEN, self.options.budget, self.options.max_runs
        try:
            return find_kept(
                order,
                measure,
                self.tolerance,
                first=likely_prefix(estimates, order, self.tolerance),
                allowance=self.limit - spent,
                most=None if most is None else max(most - spent, 2),
                expired=lambda: budget is not None and time.monotonic() - self.begun > budget,
            )
        except OutOfReachError as out:
            worst = self.worst.get(frozenset(order), "")
            raise AmpError(
                f"with every {'FP8 product' if self.in_fp8 else 'node that the rules put low'} in {self.wide} the error"
                f" is still {out.error:.3g}"
                f"{f' ({worst})' if worst else ''}, and the tolerance is {self.tolerance:g}",
                hint="pass a tolerance above that; what the model itself casts, or computes from other random numbers, "
                "no rule changes",
            ) from out

    # ---- what was found

    def _written(self, search: Found, estimates: Mapping[str, Estimate]) -> TuneResult:
        """Write the rules, and run with them as they are read back from a file."""
        kept = set(search.kept)
        chosen = [name for name in self.names if name in kept]
        entries = entries_for(self.plan, chosen)
        measured, plan = self._tried(entries)
        if measured.error > self.tolerance:
            raise AmpError(
                f"with the rules read from the file the error is {measured.error:.3g} ({measured.worst}), and "
                f"{search.error:.3g} was measured for the same nodes",
                hint="if the model gives other numbers from run to run, use deterministic kernels "
                "(torch.use_deterministic_algorithms); else report this as a bug, with the model",
            )
        counts = Counter(node.precision for node in plan.nodes)
        place, nodes = self.options.output, self._nodes(search, estimates)
        result = TuneResult(
            nodes=nodes, what=self.subject.what, before=search.before, worst_before=self.worst.get(frozenset(), ""),
            error=measured.error, worst=measured.worst, tolerance=self.tolerance, dtype=self.plan.dtype,
            searched=len(self.names), fp32=counts["fp32"], low=counts["low"], runs=self.subject.runs,
            limit=self.limit + len(nodes), batches=self.subject.batches, stopped=search.stopped, rules="", path=place,
            in_fp8=self.in_fp8,
        )  # fmt: skip
        reasons = {name: estimates[name].summary for name in chosen if name in estimates}
        reasons |= {node.name: node.reason for node in nodes}
        head = ["Made by amp.tune.", *result.summary().splitlines()]
        text = self._text(entries, reasons, head, None if place is None else place.parent)
        if place is not None:
            write_atomically(place, text)
        return replace(result, rules=text)

    def _text(self, entries: list[Entry], reasons: Mapping[str, str], head: Sequence[str], folder: Path | None) -> str:
        base = head_lines(self.rules.name, self.data, folder)
        return rules_file(base, entries, reasons, head, self.tolerance, self.precision)

    def _tried(self, entries: list[Entry]) -> tuple[Measured, PrecisionPlan]:
        """What a run gives with the rules as they are read back from a file, and the plan that they make."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "tuned.yaml"
            text = self._text(entries, {}, [], None)
            file.write_text(text if not self.is_open else f"version: 1\n{text}", encoding="utf-8")
            read = load_rules(file)
        if self.is_open:
            read = replace(self.rules, rules=(*self.rules.rules, *read.rules))
        return self.subject.measure(read), self.subject.plan(read)

    def _nodes(self, search: Found, estimates: Mapping[str, Estimate]) -> tuple[TunedNode, ...]:
        kept = set(search.kept)
        return tuple(
            TunedNode(
                node.name, node.op, node.module, node.source, search.needed.get(node.name),
                estimates[node.name].error if node.name in estimates else None,
                estimates[node.name].summary if node.name in estimates else "",
            )
            for node in self.plan.nodes
            if node.name in kept
        )  # fmt: skip
