"""Models that `torch.export` cannot take whole: Dynamo takes them in pieces, each planned and rewritten."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.utils.checkpoint
from torch import fx, nn

from amp_compiler.errors import AmpError, CaptureError, CustomFunctionError, ValuesReadError, first_line
from amp_compiler.forward.fallback import run_under_autocast
from amp_compiler.forward.program import build_run, rewrite_piece
from amp_compiler.forward.settings import AUTO, Settings, device_of
from amp_compiler.fx.attribute_writes import Saved
from amp_compiler.fx.capture_errors import name_of, user_frame
from amp_compiler.fx.checkpoints import compiled_checkpoints
from amp_compiler.fx.custom_functions import OpaqueFunctions
from amp_compiler.fx.dynamo import trace_piece
from amp_compiler.fx.garbage import without_full_collections
from amp_compiler.fx.generators import generators_kept, random_state, set_random_state
from amp_compiler.fx.graph import torch_dtype
from amp_compiler.fx.python_walk import python_state
from amp_compiler.fx.torch_layers import layers_taken
from amp_compiler.fx.torch_private import (
    BUILDING,
    broken_at_tensor_hooks,
    compile_in_pieces,
    dynamo_errors,
    forms_of_piece,
    functions_given_up,
    is_recompile_limit,
    no_saved_tensor_hooks,
    recompile_limit,
    recompile_reason,
    restart_with_plain_numbers,
    restored_transforms,
    unrolled_recurrence,
    unspecialised_integers,
    whole_powers,
)
from amp_compiler.ir.plan import PrecisionPlan
from amp_compiler.passes.pipeline import Stages

Run = Callable[..., Any]
logger = logging.getLogger("amp_compiler")
_TOLD_AFTER = 8  # calls in a row that compiled
_FEWER_FORMS = (
    "keep lists that grow and numbers that count out of it (return what they gather, or write them in a function under"
    " torch.compiler.disable), pass numbers that change as tensors, pad the inputs to fewer shapes or pass"
    " dynamic_shapes="
)
MOST_FORMS = 64  # of the inputs of one piece, each of which is compiled anew; layers of one kind may be one piece


class _TooManyForms(CaptureError):
    """One piece was compiled for as many forms as it may be."""


class Pieces:
    """A model run in the pieces that Dynamo gives.

    Where one of them was compiled `MOST_FORMS` times, as for a list that grows with every call, the model runs under
    `torch.autocast` from then on, and a warning says so: no plan holds for what no graph can be kept of.

    Args:
        model: the module.
        settings: the options.
        cause: why the model could not be taken whole.
        device: the device that it runs on.
        around: makes of each piece what is called in its place, from its name, its rewritten graph and what runs it.

    Attributes:
        plans: plan and rewritten graph of every piece, in the order in which they were made.
        stages: the text of every piece behind each pass; names carry the number of the piece.
        given_up: why it runs under `torch.autocast`; empty while it does not.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: Settings,
        cause: AmpError,
        device: torch.device,
        around: Callable[[str, fx.GraphModule, Run], Run] = lambda name, graph_module, run: run,
    ) -> None:
        self.cause, self._around = cause, around
        self.plans: list[tuple[PrecisionPlan, fx.GraphModule]] = []
        self.stages = Stages()
        self._told = False  # that functions run without a plan
        self._unplanned = 0  # pieces that no plan could be made for
        self._anew = 0  # calls in a row that compiled
        self._most = 0  # forms of the piece that has the most
        self._device, short = device, settings.low(device).short
        self._settings = replace(settings, dtype=short)
        self._model = name_of(model)
        self._forms = MOST_FORMS + max(Counter(map(type, model.modules())).values()) - 1
        functions = cause.functions if isinstance(cause, CustomFunctionError) else ()
        self._opaque = OpaqueFunctions(one for one in functions if one is not torch.utils.checkpoint.CheckpointFunction)
        self.given_up, self._original = "", model
        self._run = self._compile(model)
        self._checkpointed: dict[object, Callable[..., Any]] = {}
        logger.info("torch.export could not take %s whole, Dynamo takes it in pieces: %s", self._model, cause)

    def _compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        dynamic = (
            None if self._settings.dynamic_shapes in (None, AUTO) else True
        )  # Dynamo by itself does as `auto` says
        run = compile_in_pieces(function, self._backend, dynamic)

        def with_layers(*args: Any, **kwargs: Any) -> Any:
            # Here, because what is checkpointed runs again in the backward: in no thread while another one traces.
            with BUILDING, layers_taken(), self._dynamo():
                return run(*args, **kwargs)

        return with_layers

    def _compile_checkpointed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Compile what is checkpointed, once for all functions of the same code: most are made anew at every call."""
        code = _code_of(function)
        if code not in self._checkpointed:
            self._checkpointed[code] = self._compile(_call)
        return functools.partial(self._checkpointed[code], function)

    @contextlib.contextmanager
    def _dynamo(self) -> Iterator[None]:
        """Dynamo's settings while it may compile: in a call, and in a backward that computes anew."""
        with (
            unrolled_recurrence(),
            unspecialised_integers(),
            broken_at_tensor_hooks(),
            restored_transforms(),
            whole_powers(),
            recompile_limit(self._forms) as limit,
        ):
            try:
                yield
            except dynamo_errors() as error:
                if is_recompile_limit(error):
                    raise self._too_many_forms(limit, recompile_reason(error)) from error
                raise

    def _backend(self, piece: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self._most = max(self._most, forms_of_piece() or len(self.plans) + self._unplanned + 1)
        try:
            run, plan, rewritten, stages = compile_piece(piece, inputs, self._settings)
        except AmpError as cause:
            restart_with_plain_numbers(piece)
            if not isinstance(cause, ValuesReadError):
                raise
            logger.warning("a piece of %s runs in the model's types, without a plan: %s", self._model, cause)
            self._unplanned += 1
            return piece.forward
        self.plans.append((plan, rewritten))
        name = f"piece{len(self.plans) - 1}"
        for stage in stages:
            self.stages.note(f"{name}/{stage.name}", stage.text)
        return self._around(name, rewritten, run)

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the model.

        Raises:
            CaptureError: Dynamo cannot take any of it.
            LoweringError: a piece cannot be rewritten or compiled.
        """
        if self.given_up:
            return run_under_autocast(self._original, self._settings, self._device, args, kwargs)
        if self._most + 1 < self._forms:
            return self._in_pieces(args, kwargs)
        saved = Saved(python_state(self._original))  # pieces before the one that is not compiled write to it
        buffers = [(one, one.clone()) for one in self._original.buffers()]  # the next piece may be one too many
        drawn = random_state(self._device)
        try:
            return self._in_pieces(args, kwargs)
        except _TooManyForms as error:
            self.given_up = error.what
            logger.warning("%s: from now on it runs under torch.autocast, which knows no rules", error)
        saved.put_back()
        with torch.no_grad():
            for one, before in buffers:
                one.copy_(before)
        set_random_state(self._device, drawn)
        return run_under_autocast(self._original, self._settings, self._device, args, kwargs)

    def _in_pieces(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before, made = functions_given_up(), len(self.plans)
        try:
            with (
                BUILDING,  # what is set for Dynamo here is set for the process
                self._opaque.active(),
                compiled_checkpoints(self._compile_checkpointed),
                self._dynamo(),
            ):
                result = self._run(*args, **kwargs)
        except dynamo_errors() as error:
            raise self._error(error) from error
        if not self.plans and not self._unplanned:
            raise CaptureError(
                f"nothing of {self._model} was captured: Dynamo gave up on its forward; export: {self.cause.what}",
                where=self.cause.where,
                hint="call amp.compile on the submodules that can be captured, or change what export names",
            )
        self._tell_if_compiled_anew(made)
        if not self._told and functions_given_up() > before:
            self._told = True
            logger.warning(
                "Dynamo gave up %d functions of %s: what they compute themselves runs in the model's types, without"
                " a plan; TORCH_LOGS=graph_breaks names them",
                functions_given_up() - before,
                self._model,
            )
        return result

    def _too_many_forms(self, limit: int, reason: str) -> _TooManyForms:
        last = f", the last one because this no longer held: {reason}" if reason else ""
        return _TooManyForms(
            f"{self._model} runs in pieces, and one of them was compiled for {limit} forms of its inputs (Dynamo's"
            f" recompile_limit){last}",
            where=self.cause.where,
            hint=f"{_FEWER_FORMS}, or raise torch._dynamo.config.recompile_limit",
        )

    def _tell_if_compiled_anew(self, made: int) -> None:
        """Say once that every call compiles, with how many pieces there were before this one."""
        self._anew = self._anew + 1 if len(self.plans) > made else 0
        if self._anew == _TOLD_AFTER:
            logger.warning(
                "%s compiled pieces anew in each of its last %d calls: %s; TORCH_LOGS=recompiles says what changes",
                self._model,
                _TOLD_AFTER,
                _FEWER_FORMS,
            )

    def _error(self, error: BaseException) -> AmpError:
        inner: BaseException | None = error
        while inner is not None and not isinstance(inner, AmpError):
            inner = inner.__cause__ or getattr(inner, "inner_exception", None)
        if isinstance(inner, AmpError) and not isinstance(inner, CaptureError):
            return inner
        said = inner.what if isinstance(inner, CaptureError) else first_line(error)
        return CaptureError(
            f"neither torch.export nor Dynamo can take the model; export: {self.cause.what}; Dynamo: {said}",
            where=(inner.where if isinstance(inner, CaptureError) else "") or user_frame(error) or self.cause.where,
            hint="if the call is right, move that code out of forward or put it under torch.compiler.disable",
        )

    @property
    def plan(self) -> PrecisionPlan:
        """The plans of all pieces as one, empty where none has one; names carry the number of their piece."""
        if not self.plans:
            return PrecisionPlan(self._settings.dtype, self._settings.rules.name, self._device.type, (), ())
        first = self.plans[0][0]
        nodes = tuple(
            replace(
                n,
                name=f"piece{i}/{n.name}",
                inputs=tuple(f"piece{i}/{v}" for v in n.inputs),
                outputs=tuple((f"piece{i}/{v}", t) for v, t in n.outputs),
            )
            for i, (plan, _) in enumerate(self.plans)
            for n in plan.nodes
        )
        casts = tuple(
            replace(c, value=f"piece{i}/{c.value}", users=tuple((f"piece{i}/{u}", k) for u, k in c.users))
            for i, (plan, _) in enumerate(self.plans)
            for c in plan.casts
        )
        inputs = tuple((f"piece{i}/{v}", t) for i, (plan, _) in enumerate(self.plans) for v, t in plan.inputs)
        outputs = tuple(f"piece{i}/{v}" for i, (plan, _) in enumerate(self.plans) for v in plan.outputs)
        unmatched = [{rule.rule for rule in plan.unused_rules} for plan, _ in self.plans]
        unused = tuple(rule for rule in first.unused_rules if all(rule.rule in rules for rules in unmatched))
        return PrecisionPlan(first.dtype, first.rules, first.device, nodes, casts, inputs, outputs, unused)


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def _code_of(function: Callable[..., Any]) -> object:
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)
    return getattr(function, "__code__", type(function))


@without_full_collections()
def compile_piece(
    piece: fx.GraphModule, inputs: Sequence[Any], settings: Settings
) -> tuple[Callable[..., Any], PrecisionPlan, fx.GraphModule, Stages]:
    """Plan, rewrite and compile one of Dynamo's graphs.

    Args:
        piece: Dynamo's graph.
        inputs: its example inputs.
        settings: the options.

    Returns:
        A function for the piece, its plan, its rewritten graph, and the stages that it went through.

    Raises:
        CaptureError: it cannot be traced.
        LoweringError: it cannot be rewritten or compiled.
    """
    low = settings.low(device_of(inputs))
    with generators_kept(), no_saved_tensor_hooks():
        traced, kinds = trace_piece(piece, inputs, torch_dtype(low))
        plan, emulated, stages = rewrite_piece(traced, kinds, settings, low)
        return build_run(traced, list(inputs), settings, emulated, stages), plan, traced, stages
