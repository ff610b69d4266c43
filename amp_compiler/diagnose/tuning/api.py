"""`amp.tune`: the few nodes that have to stay in FP32 for a tolerance, as a rule file."""

from __future__ import annotations

import hashlib
import logging
import math
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from torch import Tensor, nn

from amp_compiler.diagnose.tuning.deviation import Measured
from amp_compiler.diagnose.tuning.journal import Journal
from amp_compiler.diagnose.tuning.result import TunedNode, TuneResult
from amp_compiler.diagnose.tuning.search import Found, OutOfReachError, find_kept, run_limit
from amp_compiler.diagnose.tuning.sensitivity import Estimate, in_order, likely_prefix
from amp_compiler.diagnose.tuning.subject import Subject, searched
from amp_compiler.diagnose.tuning.torch_model import Batch, Goal, TorchSubject
from amp_compiler.diagnose.tuning.writing import FP32, LOW, Base, Entry, all_fp32, entries_for, rules_file, with_kept
from amp_compiler.errors import AmpError
from amp_compiler.forward.api import is_onnx
from amp_compiler.forward.compiled_module import CompiledModule
from amp_compiler.forward.program import EAGER
from amp_compiler.forward.settings import AUTO, Settings, make_settings
from amp_compiler.ir.dtypes import low_type
from amp_compiler.ir.files import output_file, write_atomically
from amp_compiler.ir.plan import PrecisionPlan
from amp_compiler.policy.loader import load_rules
from amp_compiler.policy.rules import RuleSet
from amp_compiler.policy.sources import FROM_DICT
from amp_compiler.training.program import ROOT
from amp_compiler.training.step import TrainingStep

logger = logging.getLogger("amp_compiler")
TOLERANCES = {"fp16": 1e-2, "bf16": 8e-2}  # those of `amp-compiler convert --verify`
_WRITTEN = 2  # runs that the written file may take: once as it is, once with every node by its name
_STARTS = (LOW, FP32)


def tune(
    subject: Any,
    batches: Any,
    *,
    rules: Any = None,
    dtype: str = AUTO,
    tolerance: float | None = None,
    output: str | Path | None = None,
    start: str = LOW,
    budget: float | None = None,
    max_runs: int | None = None,
    loss_fn: Callable[[Any], Tensor] | None = None,
    loss_scale: float = 1.0,
) -> TuneResult:
    """Find the few nodes that have to stay in FP32 for a tolerance, and write them as a rule file.

    One run in FP32 measures what rounding each node makes of the results, to first order. Then a search runs the model
    with some of the most sensitive nodes in FP32, at most 4 log2(nodes) times and once for each node that it keeps, and
    drops from these what is not needed. The rules that come of it are read back from the file, and the model is run
    with them once more: `error` is what that gave. Nothing is changed: no weight, buffer, optimizer or random number.

    Args:
        subject: a training step (loss and gradients are compared); a module, of `amp.compile` or plain (outputs, or
            with `loss_fn` loss and gradients); or an ONNX model, a path or a `ModelProto` (outputs, run as 16-bit
            hardware rounds).
        batches: for a step or a module each a tuple of arguments, or a single one; for a module also a dict of
            arguments by name. For an ONNX model dicts from input name to array, an npz file, or a folder of them.
        rules: what is extended: a preset's name, a path or a dict. Without it those of the step or of the compiled
            module, else `default`.
        dtype: `fp16`, `bf16` or `auto`, of a plain module or an ONNX model; `auto` is FP16 for an ONNX model.
        tolerance: the largest relative L2 error of a result that is allowed: 0.01 in FP16 and 0.08 in BF16 by default.
            Gradients are results each; one below a thousandth of the norm of all is measured against that.
        output: where the rule file is written, atomically. Beside it stands `<output>.journal` until all is done, from
            which a run that was killed, or stopped by a budget, goes on.
        start: `low` keeps nodes in FP32 and leaves the others to the rules; `fp32` keeps everything in FP32, and puts
            low what the tolerance allows of what the rules would put low.
        budget: seconds after which the search stops, with nodes that meet the tolerance.
        max_runs: runs of the model after which it does.
        loss_fn: makes the loss of what a module returns.
        loss_scale: what that is multiplied by for the backward. A step has its own, which counts as fallen to where the
            gradients fit, if it can fall.

    Returns:
        The nodes, the errors before and after, and the rules; print it.

    Raises:
        AmpError: what FP32 gives is not finite; the tolerance is not met even with all in FP32; `subject` is none of
            these, is no one graph, or its batches do not fit; the journal is of another model, rules or batches.

    Source: delta debugging: Zeller and Hildebrandt, Simplifying and Isolating Failure-Inducing Input, 2002. Signs for
    the length of a vector: Hutchinson, 1990.

    Example:
        >>> import torch, amp_compiler as amp
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
        >>> _ = torch.nn.init.constant_(model[0].weight, 3e4)
        >>> _ = torch.nn.init.constant_(model[1].weight, 1e-4)
        >>> found = amp.tune(model, [torch.ones(2, 4)], dtype="fp16")
        >>> [node.module for node in found.nodes], found.error < found.tolerance < found.before
        (['0', '1'], True)
    """
    asked = _Asked(rules, dtype, tolerance, None if output is None else Path(output), start, budget, max_runs)
    asked.check()
    made, rule_set = _subject_of(subject, batches, asked, loss_fn, loss_scale)
    return _Tuning(made, rule_set, asked).run()


@dataclass(frozen=True)
class _Asked:
    """The options of a call."""

    rules: Any
    dtype: str
    tolerance: float | None
    output: Path | None
    start: str
    budget: float | None
    max_runs: int | None

    def check(self) -> None:
        """Refuse what cannot be."""
        if self.start not in _STARTS:
            raise AmpError(f"start={self.start!r} is not known", mend="use 'low' or 'fp32'")
        if self.tolerance is not None and not (self.tolerance > 0 and math.isfinite(self.tolerance)):
            raise AmpError(f"tolerance={self.tolerance!r} is no error", mend="pass a number above 0, such as 0.01")
        if self.budget is not None and not self.budget > 0:
            raise AmpError(f"budget={self.budget!r} is no time", mend="pass seconds, or leave it out")
        if self.max_runs is not None and self.max_runs < 1:
            raise AmpError(f"max_runs={self.max_runs!r} is no number of runs", mend="pass one above 0, or leave it out")
        if self.output is not None:
            target = output_file(self.output)
            given = Path(self.rules) if isinstance(self.rules, (str, Path)) else None
            if given is not None and given.is_file() and given.resolve() == target:
                raise AmpError("the output is the rule file", where=str(self.output), mend="name another output")

    def settings(self) -> Settings:
        """Those of a module that is not compiled yet."""
        return make_settings("default" if self.rules is None else self.rules, self.dtype, EAGER)


def _subject_of(
    subject: Any, batches: Any, asked: _Asked, loss_fn: Callable[[Any], Tensor] | None, loss_scale: float
) -> tuple[Subject, RuleSet]:
    """What is tuned, and its rules."""
    if isinstance(subject, TrainingStep):
        if loss_fn is not None:
            raise AmpError("a training step has its own loss", mend="leave loss_fn away")
        return _of_step(subject, batches, asked)
    goal_of = None if loss_fn is None else Goal(lambda output: _loss(loss_fn(output)), loss_scale)
    if isinstance(subject, CompiledModule):
        settings = subject.settings
        settings = settings if asked.rules is None else replace(settings, rules=load_rules(asked.rules))
        return TorchSubject(subject.original, _arguments(batches), settings, goal_of), settings.rules
    if isinstance(subject, nn.Module):
        settings = asked.settings()
        return TorchSubject(subject, _arguments(batches), settings, goal_of), settings.rules
    if not is_onnx(subject):
        raise AmpError(
            f"a {type(subject).__name__} cannot be tuned",
            mend="pass what amp.training_step gave, a module or an ONNX model",
        )
    if loss_fn is not None:
        raise AmpError("an ONNX model has no backward", mend="train it with amp.training_step, and pass the step")
    from amp_compiler.diagnose.tuning.onnx_model import OnnxSubject  # here, so that nobody else waits for ONNX

    low = low_type("fp16" if asked.dtype == AUTO else asked.dtype)
    return OnnxSubject(subject, batches, low), load_rules("default" if asked.rules is None else asked.rules)


def _of_step(step: TrainingStep, batches: Any, asked: _Asked) -> tuple[Subject, RuleSet]:
    if not step._enabled:
        raise AmpError("this step runs in FP32 (enabled=False)", mend="leave enabled at True")
    settings = step._settings
    settings = settings if asked.rules is None else replace(settings, rules=load_rules(asked.rules))
    falls = step._scale_config.constant is None
    goal = Goal(lambda output: output[0], float(step.loss_scale), falls, lambda name: name.partition(".")[2])
    given: list[Batch] = [(_positional(batch), {}) for batch in _listed(batches)]
    return TorchSubject(step._module, given, settings, goal, step._in_fp32, ROOT), settings.rules


def _listed(batches: Any) -> list[Any]:
    if not isinstance(batches, Iterable) or isinstance(batches, (Tensor, np.ndarray, Mapping, str)):
        raise AmpError(
            f"there are no batches in a {type(batches).__name__}", mend="pass a list of batches, or what gives them"
        )
    found = list(batches)
    if not found:
        raise AmpError("there is no batch to tune on", mend="pass at least one")
    return found


def _positional(batch: Any) -> tuple[Any, ...]:
    return tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)


def _arguments(batches: Any) -> list[Batch]:
    found: list[Batch] = []
    for batch in _listed(batches):
        named = dict(sorted(batch.items())) if isinstance(batch, Mapping) else {}
        args = () if isinstance(batch, Mapping) else _positional(batch)
        found.append(
            pytree.tree_map(lambda one: torch.from_numpy(one) if isinstance(one, np.ndarray) else one, (args, named))
        )
    return found


def _loss(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        raise AmpError(
            f"loss_fn returned a {type(loss).__name__}" if not isinstance(loss, Tensor) else "loss_fn returned no loss",
            mend="return one floating-point number",
        )
    return loss.float().reshape(())


class _Tuning:
    """One call of `tune`."""

    def __init__(self, subject: Subject, rules: RuleSet, asked: _Asked) -> None:
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
                mend="pass rules= with the dict, or write it to a file",
            )
        self.limit = run_limit(len(self.names))
        self.worst: dict[frozenset[str], str] = {}
        self.begun = time.monotonic()

    def run(self) -> TuneResult:
        """Profile, search, write, and run with what was written."""
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
            self.subject.runs = journal.profiled  # a run that goes on counts as the one that it goes on from
            return journal.estimates
        estimates = self.subject.profile(self.plan, frozenset(self.names))
        journal.note_estimates(estimates, self.subject.runs)
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
                mend="pass a tolerance above that; what the model itself casts, or computes from other random numbers, "
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
                mend="if the model gives other numbers from run to run, use deterministic kernels "
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
                mend="report this as a bug, with the model and the rules",
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
