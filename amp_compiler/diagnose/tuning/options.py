"""The options of a call of `amp.tune`, and its subject with the batches."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path
from typing import Any, Literal

from torch import nn

from amp_compiler.diagnose.losses import (
    Arguments,
    LossFunction,
    arguments,
    batches_of,
    check_given,
    loss_step,
    positional,
)
from amp_compiler.diagnose.tuning.subject import Subject
from amp_compiler.diagnose.tuning.torch_model import Goal, TorchSubject
from amp_compiler.errors import AmpError
from amp_compiler.forward.api import is_onnx
from amp_compiler.forward.compiled_module import CompiledModule
from amp_compiler.forward.program import EAGER
from amp_compiler.forward.settings import AUTO, Settings, make_settings
from amp_compiler.ir.dtypes import low_type
from amp_compiler.ir.files import output_file
from amp_compiler.policy.loader import load_rules
from amp_compiler.policy.rules import RuleSet
from amp_compiler.training.loss_module import ROOT
from amp_compiler.training.step import TrainingStep

LEAST_RUNS = 5  # in FP32, of a file twice; with nothing kept and with all; and of the rules as a file


@dataclass(frozen=True)
class TuneOptions:
    """The options of a call, which `tune` tells.

    Args:
        rules: what is extended; `None` for the subject's own.
        dtype: `fp16`, `bf16` or `auto`.
        tolerance: the largest error; `None` for that of the type.
        output: the file to write.
        budget: in seconds.
        max_runs: runs of the model.
    """

    rules: Any
    dtype: Literal["fp16", "bf16", "auto"]
    tolerance: float | None
    output: Path | None
    budget: float | None
    max_runs: int | None

    def check(self) -> None:
        """Refuse what cannot be.

        Raises:
            AmpError: an option is none of those that there are, or the output cannot be written.
        """
        if self.tolerance is not None and not (_is_above_zero(self.tolerance) and math.isfinite(self.tolerance)):
            raise AmpError(f"tolerance={self.tolerance!r} is no error", hint="pass a number above 0, such as 0.01")
        if self.budget is not None and not _is_above_zero(self.budget):
            raise AmpError(f"budget={self.budget!r} is no time", hint="pass seconds, or leave it out")
        if self.max_runs is not None and (type(self.max_runs) is not int or self.max_runs < LEAST_RUNS):
            raise AmpError(
                f"max_runs={self.max_runs!r} is too few runs",
                hint=f"pass {LEAST_RUNS} or more (profile, both ends of the search, the file), or leave it out",
            )
        if self.output is not None:
            if not isinstance(self.output, Path):
                raise AmpError(f"output={self.output!r} is no path", hint="pass the name of the rule file to write")
            target = output_file(self.output)
            rules = Path(self.rules) if isinstance(self.rules, (str, Path)) else None
            if rules is not None and rules.is_file() and rules.resolve() == target:
                raise AmpError("the output is the rule file", where=str(self.output), hint="name another output")

    def over(self, settings: Settings) -> Settings:
        """Those of a subject that has its own, with the rules of the call."""
        return settings if self.rules is None else replace(settings, rules=load_rules(self.rules))


def _is_above_zero(number: Any) -> bool:
    return isinstance(number, Real) and not isinstance(number, bool) and float(number) > 0


def subject_of(
    subject: Any, batches: Any, options: TuneOptions, loss_fn: LossFunction | None, loss_scale: float
) -> tuple[Subject, RuleSet]:
    """What is tuned, and its rules.

    Args:
        subject: as for `tune`.
        batches: as for `tune`.
        options: the options.
        loss_fn: as for `tune`.
        loss_scale: as for `tune`.

    Raises:
        AmpError: it cannot be tuned, or its batches do not fit.
    """
    check_given(subject, loss_fn, loss_scale, options.dtype, rules=False)
    rules = "default" if options.rules is None else options.rules
    if isinstance(subject, TrainingStep):
        return _of_step(subject, batches, options)
    if isinstance(subject, nn.Module):
        if isinstance(subject, CompiledModule):
            model, settings = subject._amp_original, options.over(subject._amp_settings)
        else:
            model, settings = subject, make_settings(rules, options.dtype, EAGER)
        args = [arguments(batch) for batch in _listed(batches)]
        if loss_fn is None:
            return TorchSubject(model, args, settings), settings.rules
        by_name = any(named for _, named in args)
        step = loss_step(model, settings, loss_fn, loss_scale, by_name=by_name)
        return _of_step(step, [(named,) if by_name else plain for plain, named in args], options)
    if not is_onnx(subject):
        raise AmpError(
            f"a {type(subject).__name__} cannot be tuned",
            hint="pass what amp.training_step gave, a module or an ONNX model",
        )
    if loss_fn is not None:
        raise AmpError("an ONNX model has no backward", hint="train it with amp.training_step, and pass the step")
    from amp_compiler.diagnose.tuning.onnx_model import OnnxSubject  # here, so that nobody else waits for ONNX

    low = low_type("fp16" if options.dtype == AUTO else options.dtype)
    return OnnxSubject(subject, batches, low), load_rules(rules)


def _of_step(step: TrainingStep, batches: Any, options: TuneOptions) -> tuple[Subject, RuleSet]:
    if not step._setup.enabled:
        raise AmpError("this step runs in FP32 (enabled=False)", hint="leave enabled at True")
    settings = options.over(step._settings)
    goal = Goal(float(step.loss_scale), step._scale_config.constant is None)
    args: list[Arguments] = [(positional(batch), {}) for batch in _listed(batches)]
    return TorchSubject(step._module, args, settings, goal, step._in_fp32, ROOT), settings.rules


def _listed(batches: Any) -> list[Any]:
    listed = list(batches_of(batches))
    if not listed:
        raise AmpError("there is no batch to tune on", hint="pass at least one")
    return listed
