"""The course of a tuning: profile, search, write the rules, and run with what was written."""

from __future__ import annotations

import hashlib
import logging
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from amp_compiler.diagnose.tuning.deviation import Measured
from amp_compiler.diagnose.tuning.given import Asked
from amp_compiler.diagnose.tuning.journal import Journal
from amp_compiler.diagnose.tuning.result import TunedNode, TuneResult
from amp_compiler.diagnose.tuning.search import Found, OutOfReachError, find_kept, run_limit
from amp_compiler.diagnose.tuning.sensitivity import Estimate, in_order, likely_prefix
from amp_compiler.diagnose.tuning.subject import Subject, searched
from amp_compiler.diagnose.tuning.writing import FP32, LOW, Base, Entry, all_fp32, entries_for, rules_file, with_kept
from amp_compiler.errors import AmpError
from amp_compiler.ir.files import write_atomically
from amp_compiler.ir.plan import PrecisionPlan
from amp_compiler.policy.loader import load_rules
from amp_compiler.policy.rules import RuleSet
from amp_compiler.policy.sources import FROM_DICT

logger = logging.getLogger("amp_compiler")
TOLERANCES = {"fp16": 1e-2, "bf16": 8e-2}  # those of `amp-compiler convert --verify`
_WRITTEN = 2  # runs that the written file may take: once as it is, once with every node by its name


class Tuning:
    """One call of `tune`.

    Args:
        subject: what is tuned.
        rules: what is extended.
        asked: the options.

    Raises:
        AmpError: the rules came as a dict that is not at hand, and a file is to extend them.
    """

    def __init__(self, subject: Subject, rules: RuleSet, asked: Asked) -> None:
        self.subject, self.rules, self.asked = subject, rules, asked
        self.plan: PrecisionPlan = subject.plan(rules)
        self.names = [node.name for node in searched(self.plan, rules.ops)]
        self.tolerance = TOLERANCES[self.plan.dtype] if asked.tolerance is None else asked.tolerance
        data = asked.rules if isinstance(asked.rules, Mapping) else None
        self.base = Base(rules.name, data if rules.name == FROM_DICT else None)
        if self.base.is_open and asked.output is not None:
            raise AmpError(
                "the rules came as a dict, which no file can extend",
                where=str(asked.output),
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
        place = self.asked.output
        path = None if place is None else place.with_name(f"{place.name}.journal")
        journal = Journal(path, self._digest() if path is not None else "")
        if journal.resumed:
            logger.info("amp.tune goes on from %d measurements in %s", journal.resumed, path)
        console = Console(stderr=True)
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        with Progress(*columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal) as progress:
            task = progress.add_task("profile", total=self.limit)
            estimates = self._estimates(journal)
            order = in_order(estimates, self.names)
            places = {name: at for at, name in enumerate(self.names)}

            def measure(kept: frozenset[str]) -> float:
                known = journal.get(key := sorted(places[name] for name in kept))
                found = known if known is not None else self._measure(kept)
                if known is None:
                    journal.note(key, found)
                else:
                    self.subject.runs += 1  # of the run that was killed
                self.worst[kept] = found.worst
                told = f"{len(kept)} of {len(order)} in FP32: {found.error:.2g}"
                progress.update(task, advance=1, description=told)
                return found.error

            found = self._searched(order, estimates, measure)
            result = self._written(found, estimates)
        if not result.stopped:
            journal.close()
        return result

    def _digest(self) -> str:
        rules = [replace(rule, where="", text="") for rule in self.rules.rules]
        made = hashlib.blake2b(self.subject.digest().encode(), digest_size=16)
        made.update(repr((rules, sorted(self.rules.keep.items()), self.asked.start, self.names)).encode())
        return made.hexdigest()

    def _estimates(self, journal: Journal) -> dict[str, Estimate]:
        if journal.estimates and self.names:
            self.subject.reference()
            journal.check_fingerprint(self.subject.fingerprint())
            self.subject.runs = journal.profiled  # a run that goes on counts as the one that it goes on from
            return journal.estimates
        estimates = self.subject.profile(self.plan, frozenset(self.names))
        journal.note_estimates(estimates, self.subject.runs, self.subject.fingerprint())
        return estimates

    def _measure(self, kept: frozenset[str]) -> Measured:
        return self.subject.measure(with_kept(self.rules, self.plan, self.names, kept, self.asked.start))

    def _searched(
        self, order: list[str], estimates: Mapping[str, Estimate], measure: Callable[[frozenset[str]], float]
    ) -> Found:
        spent, budget, most = self.subject.runs + _WRITTEN, self.asked.budget, self.asked.max_runs
        first = likely_prefix(estimates, order, self.tolerance)
        try:
            return find_kept(
                order,
                measure,
                self.tolerance,
                first=first,
                allowance=self.limit - spent,
                most=None if most is None else max(most - spent, 2),
                expired=lambda: budget is not None and time.monotonic() - self.begun > budget,
            )
        except OutOfReachError as out:
            worst = self.worst.get(frozenset(order), "")
            raise AmpError(
                f"with every node that the rules put low in FP32 the error is still {out.error:.3g}"
                f"{f' ({worst})' if worst else ''}, and the tolerance is {self.tolerance:g}",
                hint="pass a tolerance above that; what the model itself casts, or computes from other random numbers, "
                "no rule changes",
            ) from out

    # ---- what was found

    def _written(self, found: Found, estimates: Mapping[str, Estimate]) -> TuneResult:
        """Write the rules, and run with them; with every node by its name where more general rules do not do."""
        kept = frozenset(found.kept)
        chosen = [name for name in self.names if (name in kept) == (self.asked.start == LOW)]
        nodes = self._nodes(found, estimates)
        result = self._result(found, nodes)
        told = {node.name: node.reason for node in nodes}
        told |= {name: estimates[name].told for name in chosen if name in estimates and name not in told}
        for by_name in (False, True):
            entries = entries_for(self.plan, chosen, by_name=by_name)
            measured, plan = self._tried(entries)
            if measured.error <= self.tolerance:
                break
        else:
            raise AmpError(
                f"with the rules read from the file the error is {measured.error:.3g} ({measured.worst}), and "
                f"{found.error:.3g} was measured for the same nodes",
                hint="if the model gives other numbers from run to run, use deterministic kernels "
                "(torch.use_deterministic_algorithms); else report this as a bug, with the model",
            )
        counts = [sum(node.precision == one for node in plan.nodes) for one in (FP32, LOW)]
        result = replace(
            result, error=measured.error, worst=measured.worst, fp32=counts[0], low=counts[1], runs=self.subject.runs,
        )  # fmt: skip
        place = self.asked.output
        head = ["Made by amp.tune.", *result.summary().splitlines()]
        text = self._text(entries, told, head, None if place is None else place.parent)
        if place is not None:
            write_atomically(place, text)
            self._check_written(place, plan)
        return replace(result, rules=text, path=place)

    def _text(self, entries: list[Entry], told: Mapping[str, str], head: Sequence[str], folder: Path | None) -> str:
        lowers = self.asked.start == FP32
        why = f"amp.tune: {'allowed by' if lowers else 'needed for'} the tolerance {self.tolerance:g}"
        first = all_fp32(self.plan) if lowers else []
        return rules_file(self.base, entries, told, head, why, first, LOW if lowers else FP32, folder)

    def _check_written(self, place: Path, measured: PrecisionPlan) -> None:
        """Plan with the file where it lies now: it must be what was measured."""
        found = self.subject.plan(load_rules(place))
        if [(one.name, one.precision) for one in found.nodes] != [(one.name, one.precision) for one in measured.nodes]:
            raise AmpError(
                "the rules that were written make another plan than those that were measured",
                where=str(place),
                hint="report this as a bug, with the model and the rules",
            )

    def _tried(self, entries: list[Entry]) -> tuple[Measured, PrecisionPlan]:
        """What a run gives with the rules as they are read back from a file, and the plan that they make."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "tuned.yaml"
            text = self._text(entries, {}, [], None)
            file.write_text(text if not self.base.is_open else f"version: 1\n{text}", encoding="utf-8")
            read = load_rules(file)
        if self.base.is_open:
            read = replace(self.rules, rules=(*self.rules.rules, *read.rules))
        return self.subject.measure(read), self.subject.plan(read)

    def _nodes(self, found: Found, estimates: Mapping[str, Estimate]) -> tuple[TunedNode, ...]:
        kept = set(found.kept)
        return tuple(
            TunedNode(
                node.name, node.op, node.module, node.source, found.needed.get(node.name),
                estimates[node.name].error if node.name in estimates else None,
                estimates[node.name].told if node.name in estimates else "",
            )
            for node in self.plan.nodes
            if node.name in kept
        )  # fmt: skip

    def _result(self, found: Found, nodes: tuple[TunedNode, ...]) -> TuneResult:
        """What is known before the rules are written."""
        return TuneResult(
            nodes=nodes,
            what=self.subject.what,
            before=found.before,
            worst_before=self.worst.get(frozenset(), ""),
            error=found.error,
            worst=self.worst.get(frozenset(found.kept), ""),
            tolerance=self.tolerance,
            dtype=self.plan.dtype,
            start=self.asked.start,
            searched=len(self.names),
            fp32=0,
            low=0,
            runs=self.subject.runs,
            limit=self.limit + len(nodes),
            batches=self.subject.batches,
            stopped=found.stopped,
            rules="",
        )
