"""`amp.training_step`: forward, backward, check, clipping, update and 16-bit weights as one graph."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor

from amp_compiler.backends import BackendArgument
from amp_compiler.backends.backend import DEFAULT, Mode
from amp_compiler.backends.cuda_capture import TorchGraphs
from amp_compiler.backends.cuda_graph import GraphSettings
from amp_compiler.distributed.group import ranks_of
from amp_compiler.distributed.ranks import Ranks
from amp_compiler.errors import AmpError, CaptureError, HookError, LoweringError, OptimizerError, UnknownFormError
from amp_compiler.forward.captures import Captures
from amp_compiler.forward.counting import CountingProgram
from amp_compiler.forward.notices import silent
from amp_compiler.forward.program import EAGER
from amp_compiler.forward.settings import AUTO, device_of, make_settings
from amp_compiler.forward.signature import leaves_key
from amp_compiler.forward.unwrap import refuse_spread, unwrapped_model
from amp_compiler.fx.autocast_state import autocast_off
from amp_compiler.fx.capture_errors import shapes_do_not_fit
from amp_compiler.fx.graph import torch_dtype
from amp_compiler.fx.synchronized_norms import joins_ranks
from amp_compiler.fx.torch_private import TENSORS, building, saved_tensor_hooks
from amp_compiler.ir.dtypes import DTypeArgument
from amp_compiler.ir.nonfinite import NonfiniteReport
from amp_compiler.ir.plan import AutocastTotals
from amp_compiler.onnx.importing.api import trained_module
from amp_compiler.ops.loss_scale import LossScale, LossScaleArgument, NoLossScale, make_loss_scale
from amp_compiler.ops.update.rounding import WeightStorage
from amp_compiler.passes.pipeline import CAPTURE, DEVICE, FORWARD, PIECE, PLAN, STEP, UPDATE
from amp_compiler.passes.step.reduce_gradients import SharedGradient
from amp_compiler.policy.unused import warn_of_unused
from amp_compiler.training.arguments import (
    check_call,
    check_enabled,
    check_loss_function,
    check_numbers,
    shapes_of_batch,
)
from amp_compiler.training.autocast import autocast_of
from amp_compiler.training.build import (
    PARALLEL,
    Reduction,
    StepOptions,
    StepState,
    build_step,
    check_parameters,
    is_one_graph,
)
from amp_compiler.training.counting import build_counting
from amp_compiler.training.dry import DryStep, build_dry
from amp_compiler.training.events import events_on
from amp_compiler.training.fused_optimizers import check_optimizers, check_storage
from amp_compiler.training.held_scale import HeldScale
from amp_compiler.training.hidden_writes import HiddenWrites
from amp_compiler.training.inputs import KeptTensors
from amp_compiler.training.joining import joined
from amp_compiler.training.log import STEPS_KEY, StepLog
from amp_compiler.training.parts import UNSPLIT, Parts
from amp_compiler.training.piece_program import PieceProgram
from amp_compiler.training.piece_trial import PieceTrials
from amp_compiler.training.pieces import PieceStep
from amp_compiler.training.program import LossModule, StepOutput, StepProgram
from amp_compiler.training.readings import StepReadings
from amp_compiler.training.scale_watch import StuckWatch
from amp_compiler.training.standing import Standing
from amp_compiler.training.state import GradientSums, LowWeights
from amp_compiler.training.step_hooks import check_hooks, hooks_before, hooks_behind
from amp_compiler.training.step_programs import StepPrograms
from amp_compiler.training.together import Offer, Together, batch_form, settings_of
from amp_compiler.training.trial import StepTrials
from amp_compiler.training.weights import OWN_KEY, WeightState, weight_storage, widened

logger = logging.getLogger("amp_compiler")
MOST_SIGNATURES = 64
_TENSORS_ALONE = {Tensor}
RUN = (CAPTURE, PLAN, FORWARD, STEP, UPDATE, DEVICE, PIECE)  # the pipelines of a step


def training_step(
    model: Any,
    loss_fn: Callable[..., Any],
    optimizer: Any,
    *,
    rules: Any = "default",
    dtype: DTypeArgument = "auto",
    loss_scale: LossScaleArgument = "rules",
    clip_norm: float | None = None,
    accumulate: int = 1,
    dynamic_shapes: Any = "auto",
    backend: BackendArgument = "inductor",
    enabled: bool = True,
    passes: Any = None,
    mode: Mode = "default",
    process_group: Any = None,
    mesh: Any = None,
    broadcast_buffers: bool = True,
    callbacks: Any = (),
) -> TrainingStep:
    """Make a training step: one compiled graph that runs forward, backward and update.

    Where one graph cannot hold the loss, forward and backward run in pieces; `step.execution` says so and why.

    Args:
        model: an `nn.Module`, an ONNX model (a path or a `ModelProto`), or a dict, list or tuple of them.
            `step.model` is the module that is trained.
        loss_fn: `loss_fn(model, *batch)` returns the loss (one floating-point number), or `(loss, aux)`.
        optimizer: a `torch.optim` optimizer, a dict of them, or a function that makes one from a list of parameters,
            as an ONNX path needs: `lambda parameters: torch.optim.AdamW(parameters, 1e-4)`. AdamW, Adam and SGD have a
            fused update, and take L1 decay as the key `l1_decay` of a group; of others but LBFGS and SparseAdam the own
            code is traced. Its state and `param_groups` stay the single truth: schedulers, `state_dict()` and
            checkpoints work as always.
        rules: a preset name, a path, a dict or a `RuleSet`. Their `weights` section says how the optimizer holds the
            parameters. `{master: fp32}`: FP32 parameters are their own masters; parameters that come in as FP16 or BF16
            get FP32 masters in `optimizer.state[p]["master"]`. `{master: low}`: at the first call every parameter that
            the plan reads in the low type is converted in place, the same object in 16 bits, with no master; one that
            is read in FP32 alone (the weight of a norm under `default`) stays FP32, and buffers stay as they are.
            Momentum of SGD is 16-bit then, moments of Adam are FP32. `rounding` is `nearest`, `stochastic` or `kahan`.
            Make the step before `optimizer.load_state_dict`: from then on that loads FP32 state of 16-bit parameters
            unrounded.
        dtype: `"fp16"`, `"bf16"`, a `torch.dtype` or its name, or `"auto"`, as for `amp.compile`.
        loss_scale: `"dynamic"` or another mode, a number, `None`, or a `LossScale`. A mode has the settings of the
            `loss_scale` section of the rules where that is of the same mode. By default the section in FP16, and mode
            `"none"` in BF16. One `LossScale` object given to several steps is one scale, as one GradScaler for the two
            optimizers of a GAN.
        clip_norm: largest global L2 norm of the unscaled gradients.
        accumulate: number of calls whose gradients are averaged, in FP32, before the weights are updated.
        dynamic_shapes: `"auto"`: the first shape is captured as it is, and where a second one differs from it, what
            differs becomes dynamic. `None`: every new shape is captured anew. Or as for `torch.export.export`, one
            entry for each tensor or container of `*batch`.
        backend: `"inductor"` or `"eager"`.
        enabled: mixed precision; without it the same step in plain FP32, whatever the rules say of weights. Parameters
            that came in as FP16 or BF16 are refused then.
        passes: pipelines with passes of your own put in, such as
            `amp.pipelines.STEP.insert_after("simplify_casts", MyPass())`; one or several.
        mode: `"default"`, or `"max-autotune"`: Inductor times several kernels for a product and several sizes of blocks
            for a loop, as under torch.compile's mode of that name, and the first call takes longer by that. On a
            GPU the step is replayed as one CUDA graph in both.
        process_group: of `torch.distributed`: its ranks train one model, each on batches of its own, and gradients are
            averaged over them; see `docs/ranks.md`. All ranks make the step, call it, and have the weights of the first
            one. A group of this rank alone trains by itself. Has to be given where the default group has several ranks.
        mesh: a `DeviceMesh` of one dimension, in the place of a group.
        broadcast_buffers: all ranks take the first one's buffers, such as BatchNorm's statistics, at every update; else
            each has its own.
        callbacks: `amp.callbacks`, a list, such as `[amp.callbacks.JSONLines("run.jsonl", every=10)]`. Each is told the
            numbers of every so many steps; other steps are not read from.

    Returns:
        A callable: `loss = step(*batch)`, detached, without a device sync.

    Raises:
        AmpError: a wrong option. At the first call: `CaptureError`, `LoweringError`.

    Example:
        >>> import torch, amp_compiler as amp
        >>> model = torch.nn.Linear(4, 1)
        >>> step = amp.training_step(model, lambda m, x, y: (m(x) - y).square().mean(),
        ...                          torch.optim.SGD(model.parameters(), 0.1), dtype="bf16", backend="eager")
        >>> losses = [float(step(torch.ones(2, 4), torch.zeros(2, 1))) for _ in range(5)]
        >>> losses[-1] < losses[0]
        True
    """
    ranks = ranks_of(process_group, mesh)
    make = functools.partial(
        TrainingStep,
        model,
        loss_fn,
        optimizer,
        rules=rules,
        dtype=dtype,
        loss_scale=loss_scale,
        clip_norm=clip_norm,
        accumulate=accumulate,
        dynamic_shapes=dynamic_shapes,
        backend=backend,
        enabled=enabled,
        passes=passes,
        mode=mode,
        process_group=process_group,
        broadcast_buffers=broadcast_buffers,
        callbacks=callbacks,
    )
    if ranks is None:
        return make(ranks=None)
    with ranks.telling():
        return make(ranks=ranks)


class TrainingStep(StepReadings):
    """What `amp.training_step` returns. Call it with a batch."""

    def __init__(
        self,
        model: Any,
        loss_fn: Callable[..., Any],
        optimizer: Any,
        *,
        rules: Any,
        dtype: DTypeArgument,
        loss_scale: LossScaleArgument,
        clip_norm: float | None,
        accumulate: int,
        dynamic_shapes: Any,
        backend: BackendArgument,
        enabled: bool,
        passes: Any,
        mode: Mode,
        process_group: Any,
        broadcast_buffers: bool = True,
        callbacks: Any = (),
        ranks: Ranks | None = None,
    ) -> None:
        check_enabled(enabled)
        self._group = process_group
        model, optimizer = trained_module(unwrapped_model(model, PARALLEL), optimizer)
        self.model = model
        check_numbers(clip_norm, accumulate)
        self._accumulate, self._gathered = accumulate, 0
        self._settings = make_settings(rules, dtype, backend, shapes_of_batch(dynamic_shapes), passes, RUN, mode)
        self._module = LossModule(model, loss_fn)
        refuse_spread(self._module, PARALLEL)
        self._optimizers = check_optimizers(optimizer)
        check_loss_function(loss_fn)
        self._clip_norm, self._enabled = clip_norm, enabled
        self._device = device_of(self._module.parameters())
        self._held = HeldScale.of(self._choose_scale(loss_scale), loss_scale, self._device)
        self._lows = LowWeights()
        storage = weight_storage(self._settings.rules.weights) if enabled else WeightStorage()
        check_storage(self._optimizers, storage.low)
        self._weights = WeightState(storage, self._device, self._optimizers, Parts(ranks))
        graphs = GraphSettings(TorchGraphs())
        kept = KeptTensors(lambda: self._scale, self._lows, GradientSums(), self._weights, lambda: len(graphs.live) > 0)
        self._state = StepState(kept, graphs, events_on(self._device))
        self._standing = Standing(self._module, self._optimizers, kept)
        self._hidden = HiddenWrites(self._module, self._optimizers, kept)
        self._low = self._settings.low(self._device)
        self._log = StepLog(callbacks if ranks is None or ranks.is_first else (), self._low.short)
        low = torch_dtype(self._low)
        check_parameters(self._module, self._optimizers, low, enabled)
        self._watch = StuckWatch(self._device)
        self._captures = Captures("the training step", self._settings, "batch")
        self._programs = StepPrograms(self._settings.dynamic_shapes is not None)
        self._pieces: PieceStep | None = None
        self._told = False  # which rules match nothing
        self._specs: dict[int, Any] = {}  # trees of batches of tensors alone, by their number
        self._last, self._leaves, self._spec = None, [], None
        self._ranks = ranks
        self._together: Together | None = None
        self._reduction: Reduction | None = None
        if ranks is not None:
            told = {
                "dtype": self._low.short,
                "loss_scale": self._scale_config,
                "clip_norm": clip_norm,
                "accumulate": accumulate,
                "enabled": enabled,
            }
            self._together, self._reduction = joined(
                ranks,
                self._module,
                self._optimizers,
                self._weights,
                self._held,
                self._settings,
                told,
                broadcast_buffers,
            )

    def _choose_scale(self, loss_scale: Any) -> LossScale:
        section = self._settings.rules.loss_scale
        if not self._enabled:
            return NoLossScale(check_finite=False)
        if loss_scale != "rules":
            return make_loss_scale(loss_scale, section)
        if self._settings.low(self._device).short != "fp16":  # BF16 has FP32's range
            return make_loss_scale("none", section)
        return make_loss_scale(section or "dynamic")

    def __call__(self, *batch: Any, **named: Any) -> Any:
        """Train on one batch.

        Args:
            batch: what stands behind `model` in `loss_fn`.
            named: refused; a batch may be a dict.

        Returns:
            The detached loss, or `(loss, aux)`.

        Raises:
            AmpError: there are named arguments, or `torch.inference_mode()` is around the call.
            CaptureError: the loss cannot be captured, neither as one graph nor in pieces.
            LoweringError: the graph cannot be compiled.
            LossScaleError: the gradients stay non-finite at the lowest loss scale; on a GPU some calls later.
        """
        check_call(named)
        if self._last is None and self._together is None:
            ranks_of(self._group)
        hooks = hooks_behind(self._optimizers)
        if hooks is not None:
            hooks.begin(self._scale_config, self._scale)
        with autocast_off(), silent(not self._speaks):
            if self._together is None:
                program, leaves, spec = self._chosen(batch)
                output = program(leaves, self._standing)
            else:
                with self._together.call():
                    program, leaves, spec = self._chosen(batch)
                output = self._together.ranks.guarded(lambda: program(leaves, self._standing))
        self._note(program, output, leaves, spec)
        if hooks is not None and self._gathered == 0:
            hooks.run(self._scale_config, self._scale)
        if self._gathered == 0 and self._watch.note(self._scale_config, self._scale):
            self.check()
        return output.loss if output.aux is None else (output.loss, output.aux)

    def _note(self, program: StepProgram | PieceProgram, output: StepOutput, leaves: list[Any], spec: Any) -> None:
        """What a call has changed, and what others want to know of it."""
        self._standing.left(program.replayed if isinstance(program, StepProgram) else None)
        if self._together is not None:
            self._together.values.left()
        if isinstance(program, PieceProgram) and self._pieces is None:  # only now: a call that failed decides nothing
            self._pieces = program.step
            if self._speaks:
                logger.warning("the training step runs %s", program.execution)
        self._gathered = (self._gathered + 1) % self._accumulate
        if program.update.found_anew:
            program.update.settle(self._lows)
            for group in program.update.groups:
                self._weights.settle(group.parameters, group.optimizer.state)
        sums = self._state.kept.sums
        if self._gathered:
            sums.note(program.update.trained)
        else:
            sums.gathered = frozenset()
        for parameter in program.update.behind:
            self._lows.follow(parameter)
        for optimizer in self._optimizers:
            optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers ask whether a step came before theirs
        if not self._told and program.plan is not None:
            self._told = True
            if self._speaks:
                warn_of_unused(program.plan.unused_rules, "the training step")
        self._last = (program, output, self._scale_config.constant)
        self._leaves, self._spec = leaves, spec
        self._log.note(
            output, self._gathered == 0, lambda: self._seen()[2], self._scale.skipped_steps, lambda: self.grad_norm
        )

    def _chosen(self, batch: tuple[Any, ...]) -> tuple[StepProgram | PieceProgram, list[Any], Any]:
        """What runs a batch, and its leaves and tree."""
        if self._watch.arrived() and self._last is not None:
            self.check()
        before = hooks_before(self._optimizers)
        if before:
            check_hooks(self._optimizers, self._between)
        leaves, spec = self._flat(batch)
        self._look()
        if self._together is not None:
            self._together.look(self._standing.generation)
        program = self._program(batch, leaves, spec, hooked=bool(before))
        self._last = None  # last step's gradients must not live through this one
        return program, leaves, spec

    def _look(self) -> None:
        """Notice what was changed and written since the last call."""
        with TENSORS:
            self._standing.look()
            if self._hidden.look(self._standing.generation):
                self._standing.look()

    def _flat(self, batch: tuple[Any, ...]) -> tuple[list[Any], Any]:
        """The leaves of a batch and its tree; one of tensors alone is its own list of leaves."""
        if set(map(type, batch)) == _TENSORS_ALONE:
            spec = self._specs.get(len(batch))
            if spec is None:
                spec = self._specs[len(batch)] = pytree.tree_flatten((batch, {}))[1]
            return list(batch), spec
        return pytree.tree_flatten((batch, {}))

    def _program(
        self, batch: tuple[Any, ...], leaves: list[Any], spec: Any, hooked: bool
    ) -> StepProgram | PieceProgram:
        """What runs a batch: the program of the call before, one of a batch like this one, a new one, or pieces."""
        gather = "" if self._accumulate == 1 else "use" if self._gathered == self._accumulate - 1 else "add"
        around = self._why_in_pieces(hooked) if self._pieces is None else None
        if around is not None:
            return self._piece_program(self._in_pieces(around), spec, gather, leaves)
        if self._pieces is not None:
            return self._piece_program(self._pieces, spec, gather, leaves)
        built_for = (self._scale_config, self._gathered_before(gather))
        mark = (self._standing.generation, gather, *built_for, spec)
        again = self._programs.again(mark, leaves)
        if again is not None and again.flags_changed(self._standing):
            again = None
        if again is not None and self._may_run(again, leaves, gather):
            return again
        try:
            with TENSORS:
                form = leaves_key(leaves)
        except UnknownFormError as cause:  # of a dataclass, an array: Dynamo looks into them
            return self._piece_program(self._in_pieces(cause), spec, gather, leaves)
        standing = self._standing
        key = (spec, standing.module, standing.owners, gather, built_for, form)
        program = self._programs.find(key, leaves)
        whole = program is not None and not program.flags_changed(self._standing)
        # The other ranks are asked once: what was found again is the one that is found here.
        if program is not None and whole and again is None and self._may_run(program, leaves, gather):
            self._programs.remember(mark, leaves, program)
            return program
        return self._captured(batch, leaves, key, program)

    def _captured(
        self, batch: tuple[Any, ...], leaves: list[Any], key: tuple[Any, ...], stale: StepProgram | None
    ) -> StepProgram | PieceProgram:
        """A new program, or pieces where no graph takes the step.

        Args:
            batch: what is captured.
            leaves: of it.
            key: what the program is found by, as `_program` makes it.
            stale: the one that was found by it and is to be replaced.
        """
        spec, gather = key[0], key[3]
        if stale is None and len(self._programs) >= MOST_SIGNATURES:
            many = CaptureError(
                f"the step was captured for {MOST_SIGNATURES} signatures (shapes and types of the batch, model modes, "
                "Python values that loss and model read)",
                mend="pad the batches to fewer shapes, and pass numbers that change as tensors",
            )
            if self._together is not None:
                raise many
            return self._piece_program(self._in_pieces(many), spec, gather, leaves)
        options = self._options(gather, leaves)
        if self._together is not None:
            self._together.builds()
        try:
            with building():
                program = self._captures.make(
                    key[:-1],
                    (batch, {}),
                    leaves,
                    lambda settings, stages, changing: build_step(
                        self._module, batch, replace(options, settings=settings, changing=changing), self._state, stages
                    ),
                    self._programs.changed(),
                )
        except (CaptureError, LoweringError) as cause:
            if isinstance(cause, (HookError, OptimizerError)) or (
                self._together is not None and self._together.has_agreed
            ):
                raise
            asked_for = self._settings.dynamic_shapes not in (None, AUTO)
            if asked_for and isinstance(cause, CaptureError) and is_one_graph(self._module, batch):
                raise shapes_do_not_fit("the step", cause) from cause
            return self._piece_program(self._in_pieces(cause), spec, gather, leaves)
        self._keep(program, leaves, key, stale)
        return program

    def _keep(self, program: StepProgram, leaves: list[Any], key: tuple[Any, ...], stale: StepProgram | None) -> None:
        """Have a new program found again, and the ranks know what goes with it."""
        self._standing.begin()
        spec, before, *rest = key
        now = self._standing.module
        if now != before:  # weights were converted for storage without masters: earlier programs will never fit again
            self._programs.clear()
        if stale is not None:  # one of dynamic shapes stands under another shape
            self._programs.drop(stale)
        self._programs.add((spec, now, *rest), program, leaves)
        if self._together is not None:
            offer = self._offer(program.offered, program.written, leaves, key[3], program.norms)
            self._together.settle(offer, program.shared)

    def _gathered_before(self, gather: str) -> frozenset[int]:
        """Of which parameters the update that is built finds gradients of batches before its own."""
        return self._state.kept.sums.gathered if gather == "use" else frozenset()

    def _why_in_pieces(self, hooked: bool) -> CaptureError | None:
        """What around the step one graph would lose; `None` where there is nothing."""
        if saved_tensor_hooks() is not None:
            return CaptureError(
                "hooks for saved tensors stand around the step (saved_tensors_hooks, save_on_cpu), which the backward"
                " of one graph would lose",
                mend="leave them out: a step keeps no more than it needs",
            )
        if hooked:
            return CaptureError(
                "an optimizer has hooks that run before its steps, for which gradients have to stand in `.grad`",
                mend="write what they do to the loss, clip by clip_norm=, and read step.gradients()",
            )
        return None

    def _may_run(self, program: StepProgram, leaves: list[Any], gather: str) -> bool:
        """Whether the other ranks have what goes with a program."""
        if self._together is None:
            return True
        offer = self._offer(program.offered, program.written, leaves, gather, program.norms)
        if not self._together.keeps(offer, program.shared):
            return False
        self._together.settle(offer, program.shared)
        return True

    def _offer(
        self,
        gradients: tuple[SharedGradient, ...],
        buffers: tuple[str, ...],
        leaves: list[Any],
        gather: str,
        norms: tuple[str, ...] = (),
    ) -> Offer:
        shown = buffers if self._reduction is not None and self._reduction.broadcast_buffers else ()
        settings = settings_of(self._optimizers)
        held = () if self._together is None else self._together.values.parameters
        parts = self._weights.parts.names
        return Offer(gradients, shown, batch_form(leaves), gather, settings, parts, norms, held)

    @property
    def _between(self) -> str:
        """What is done to gradients behind the backward of a call, inside of its graph."""
        accumulates = "accumulate=" if self._accumulate > 1 else ""
        clips = "clip_norm=" if self._clip_norm is not None else ""
        ranks = "the sum over the ranks" if self._ranks is not None else ""
        return accumulates or clips or ranks

    @property
    def _speaks(self) -> bool:
        """Whether notices are this process's to give: of several ranks the first one gives them."""
        return self._ranks is None or self._ranks.is_first

    def _piece_program(self, step: PieceStep, spec: Any, gather: str, leaves: list[Any]) -> PieceProgram:
        options, together = self._options(gather, leaves), self._together
        if together is None or options.reduction is None:
            return PieceProgram(step, spec, options, self._standing.owners)
        if joined := joins_ranks(self._module):
            raise CaptureError(
                f"a step in pieces cannot take the statistics of the SyncBatchNorm '{joined[0].partition('.')[2]}' over"
                f" the ranks, and this one is no one graph: {step.cause}",
                mend="do what that says, or use BatchNorm with broadcast_buffers=",
            ) from step.cause

        def decide(gradients: tuple[SharedGradient, ...], buffers: tuple[str, ...]) -> tuple[SharedGradient, ...]:
            return together.decide(self._offer(gradients, buffers, leaves, gather))

        reduction = replace(options.reduction, agree=Reduction.agree)  # of the update: all is there then
        options = replace(options, reduction=reduction)
        program = PieceProgram(step, spec, options, self._standing.owners, decide)
        program.prepare(leaves)
        return program

    def _in_pieces(self, cause: AmpError) -> PieceStep:
        if self._reduction is not None and self._reduction.shards:
            raise CaptureError(
                f"a step in pieces cannot split its update over the ranks, and this one is no one graph: {cause}",
                mend=UNSPLIT,
            ) from cause
        return PieceStep(self._module, self._settings, cause, self._state, self._enabled)

    def _options(self, gather: str, leaves: list[Any] | None = None) -> StepOptions:
        """What a program is built for.

        Args:
            gather: as for `GatherGradients`.
            leaves: a batch for which the ranks sum their gradients; without one, this process is by itself.
        """
        options = StepOptions(
            self._settings,
            self._optimizers,
            self._scale_config,
            self._clip_norm,
            self._enabled,
            self._accumulate,
            gather,
            gathered=self._gathered_before(gather),
        )
        together, reduction = self._together, self._reduction
        if together is None or reduction is None or leaves is None:
            return options

        def agree(
            gradients: tuple[SharedGradient, ...], norms: tuple[str, ...], buffers: tuple[str, ...]
        ) -> tuple[SharedGradient, ...]:
            return together.agree(self._offer(gradients, buffers, leaves, gather, norms))

        reduction = replace(reduction, agree=agree, agree_on_parts=together.agree_on_parts)
        ranks = 1 if gather == "add" else reduction.ranks
        return replace(options, divisor=self._accumulate * ranks, reduction=reduction)

    def graph_for(self, *batch: Any) -> DryStep:
        """The graph of a step for a batch, which is neither compiled nor run; for reading, of any size.

        Model and batch may lie on torch's meta device. Weights are converted as the first call does it. Of several
        ranks nothing is sent, so that the others may be those of a fake process group.

        Args:
            batch: what stands behind `model` in `loss_fn`.

        Raises:
            CaptureError: the loss cannot be captured as one graph.

        Example:
            >>> import torch, amp_compiler as amp
            >>> model = torch.nn.Linear(4096, 4096, device="meta")
            >>> step = amp.training_step(model, lambda m, x: m(x).mean(), torch.optim.SGD(model.parameters(), 0.1),
            ...                          dtype="bf16")
            >>> graph = step.graph_for(torch.empty(8, 4096, device="meta")).graph_module.graph
            >>> sum(node.target is torch.ops.amp_compiler.sgd_update.default for node in graph.nodes)
            1
        """
        check_hooks(self._optimizers, self._between)
        with autocast_off(), building():
            return build_dry(self._module, batch, self._options("", []), self._state)

    def _counting(self, batch: tuple[Any, ...], *, with_weights: bool = False) -> CountingProgram:
        """What counts exponents for batches like this one, see `diagnose.run` and `training.counting`."""
        check_hooks(self._optimizers, self._between)
        with autocast_off(), building():
            options = self._options("")
            return build_counting(self._module, batch, options, self._state, with_weights=with_weights)

    def _trials(self, batch: tuple[Any, ...]) -> StepTrials:
        check_hooks(self._optimizers, self._between)
        return StepTrials(self._module, batch, self._options(""), self._state)

    def _autocast(self, batch: tuple[Any, ...]) -> AutocastTotals | None:
        return autocast_of(self._module, batch, self._settings)

    def _find_in_pieces(self, batch: tuple[Any, ...], cause: CaptureError) -> NonfiniteReport:
        """What is not finite in a batch of a loss that is no one graph."""
        if not self._enabled:
            raise cause
        settings = replace(self._settings, dynamic_shapes=None, backend=EAGER, mode=DEFAULT)
        pieces = PieceStep(self._module, settings, cause, self._state, enabled=True)
        return PieceTrials(pieces, batch, self._optimizers, self.loss_scale).report()

    @contextmanager
    def _in_fp32(self) -> Iterator[LossModule]:
        """Within it the loss as a module, all of its parameters in FP32, as it is captured."""
        check_hooks(self._optimizers, self._between)
        self._module.adopt(self._optimizers)
        with self._module.as_parameters(), widened(self._module.parameters()):
            yield self._module

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise AmpError(
            "a training step can be neither copied nor pickled, as it holds compiled code and the optimizer itself",
            mend="save model, optimizer and step.state_dict(), or use amp.save_checkpoint; for a copy make a step of"
            " copy.deepcopy((model, optimizer))",
        )

    def state_dict(self) -> dict[str, Any]:
        """The loss scale, with the keys of `torch.amp.GradScaler.state_dict()`.

        With stochastic rounding its random state is there too, under the key `amp_compiler`, which GradScaler ignores,
        and with callbacks the number of steps.
        """
        state = self._scale_config.state_dict(self._scale)
        self._hidden.tell()
        own = {**self._weights.rounding.state_dict(), **self._log.state_dict()}
        return {**state, OWN_KEY: {**state.get(OWN_KEY, {}), **own}} if own else state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the loss scale of another step or of a `torch.amp.GradScaler`, and what else `state_dict` holds.

        Raises:
            AmpError: keys are missing or do not fit the kind of loss scale.
        """
        if not isinstance(state, Mapping):
            raise AmpError(
                f"the saved state of a step is a {type(state).__name__}",
                mend="give what step.state_dict(), or that of a torch.amp.GradScaler, has returned",
            )
        before = self._scale_config
        self._held.load(state)
        if before != self._scale_config:  # none of them will fit again
            self._programs.clear()
        self._weights.rounding.load_state_dict(state.get(OWN_KEY, {}))
        self._log.load_state_dict(state.get(OWN_KEY, {}))
        if STEPS_KEY in state.get(OWN_KEY, {}):
            self._state.events.go_on_from(self._log.steps)
        self._watch.forget()
