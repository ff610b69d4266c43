"""`CompiledModule`: the drop-in module that `amp.compile` returns, whole or in Dynamo's pieces."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx, nn

from amp_compiler.backends import BACKENDS
from amp_compiler.errors import AmpError, CaptureError
from amp_compiler.frontends.dynamo import trace_piece
from amp_compiler.frontends.fx_capture import autocast_off, user_frame
from amp_compiler.plan import PrecisionPlan
from amp_compiler.program import Program, build_program, rewrite_piece
from amp_compiler.settings import Settings, device_of

logger = logging.getLogger("amp_compiler")
MANY_SIGNATURES = 16


class CompiledModule(nn.Module):
    """What `amp.compile` returns: it shares parameters, buffers, submodules and hooks with the module it was made of.

    Attributes:
        original: the module that was compiled.
        settings: the options.
    """

    _SHARED = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_state_dict_hooks",
               "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")  # fmt: skip

    def __init__(self, model: nn.Module, settings: Settings) -> None:
        super().__init__()
        own = self.__dict__
        own["original"], own["settings"] = model, settings
        for name in self._SHARED:
            own[name] = model.__dict__[name]
        own["_programs"], own["_pieces"], own["_last"] = {}, [], None
        own["_fallback"] = None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["original"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["original"], name, value)

    # Python looks these up on the class, past __getattr__; nn.Sequential and nn.ModuleList have them.
    def __getitem__(self, index: Any) -> Any:
        return self.original[index]

    def __len__(self) -> int:
        return len(self.original)

    def __iter__(self) -> Any:
        return iter(self.original)

    def __bool__(self) -> bool:
        return True

    @property
    def training(self) -> bool:  # type: ignore[override]
        """Train or eval mode: the original's."""
        return bool(self.__dict__["original"].training)

    @training.setter
    def training(self, mode: bool) -> None:
        # nn.Module.__init__ sets it before there is an original.
        if "original" in self.__dict__:
            self.__dict__["original"].training = mode

    def train(self, mode: bool = True) -> CompiledModule:
        """Set train or eval mode on the module and all below it; drops kept low-precision weights."""
        self.__dict__["original"].train(mode)
        for program in self._programs.values():
            program.weights.drop()
        return self

    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the rewritten forward; captures first where the signature is new.

        Raises:
            CaptureError: the model cannot be captured, whole or in pieces.
            LoweringError: it cannot be rewritten or compiled.
        """
        if torch.compiler.is_exporting():
            raise CaptureError(
                "a compiled module cannot be exported by torch.export",
                mend="export `model.original`, the module behind it",
            )
        kwargs = dict(sorted(kwargs.items()))
        with autocast_off():
            if self._fallback is not None:
                return self._run_pieces(args, kwargs)
            leaves, spec = pytree.tree_flatten((args, kwargs))
            program = self._program(args, kwargs, leaves, spec)
            if program is None:
                return self._run_pieces(args, kwargs)
            self.__dict__["_last"] = program
            return program(leaves)

    def _program(self, args: Any, kwargs: Any, leaves: Sequence[Any], spec: Any) -> Program | None:
        key = self._key(leaves, spec)
        program: Program | None = self._programs.get(key)
        if program is not None:
            return program
        if self.settings.dynamic_shapes is not None:
            mode = self._mode_key(spec)
            for other_key, other in list(self._programs.items()):
                if other_key[0] == mode and other.accepts(leaves):
                    self._programs[key] = program = other
                    return program
        keep = not torch.is_grad_enabled() and not self.original.training
        try:
            program = build_program(self.original, args, kwargs, self.settings, keep)
        except CaptureError as cause:
            self._fall_back(cause)
            return None
        self._programs[key] = program
        if len(self._programs) == MANY_SIGNATURES:
            logger.warning(
                "%s was captured for %d input signatures; pass dynamic_shapes= to amp.compile, or pad the inputs",
                type(self.original).__name__,
                MANY_SIGNATURES,
            )
        return program

    def _mode_key(self, spec: Any) -> tuple[Any, ...]:
        modes = tuple(module.training for module in self.original.modules())
        grads = tuple(parameter.requires_grad for parameter in self.original.parameters())
        return spec, torch.is_grad_enabled(), modes, grads

    def _key(self, leaves: Sequence[Any], spec: Any) -> tuple[Any, ...]:
        return self._mode_key(spec), tuple(_leaf_key(leaf) for leaf in leaves)

    def _fall_back(self, cause: CaptureError) -> None:
        logger.info("torch.export could not take the model whole, Dynamo takes it in pieces: %s", cause)
        low = self.settings.low(device_of(self.original.parameters()))
        settings = replace(self.settings, dtype="fp16" if low.short == "fp16" else "bf16")

        def backend(piece: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
            run, plan = compile_piece(piece, inputs, settings)
            self._pieces.append((plan, piece))
            return run

        dynamic = None if self.settings.dynamic_shapes is None else True
        self.__dict__["_fallback"] = (torch.compile(self.original, backend=backend, dynamic=dynamic), cause)

    def _run_pieces(self, args: Any, kwargs: Any) -> Any:
        run, cause = self._fallback
        try:
            return run(*args, **kwargs)
        except torch._dynamo.exc.TorchDynamoException as error:
            inner = error.__cause__ or error
            if isinstance(inner, AmpError) and not isinstance(inner, CaptureError):
                raise inner from error
            raise CaptureError(
                f"neither torch.export nor Dynamo can take the model; export: {cause.what}; Dynamo: {_first(error)}",
                where=user_frame(error) or cause.where,
                mend="move that code out of forward, or put it in a function under torch.compiler.disable",
            ) from error

    @property
    def plan(self) -> PrecisionPlan:
        """The plan of the last forward; for a model in pieces, that of all pieces together.

        Raises:
            AmpError: before the first call.
        """
        if self._fallback is not None and self._pieces:
            return _merged([plan for plan, _ in self._pieces])
        return self._last_program().plan

    @property
    def graph_module(self) -> fx.GraphModule:
        """The rewritten graph of the last forward (of the last piece, for a model in pieces)."""
        if self._fallback is not None and self._pieces:
            return self._pieces[-1][1]  # type: ignore[no-any-return]
        return self._last_program().graph_module

    def _last_program(self) -> Program:
        if self._last is None:
            raise AmpError("the model has not been called yet", mend="call it once, or use amp.explain")
        return self._last  # type: ignore[no-any-return]

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledModule:
        return CompiledModule(copy.deepcopy(self.original, memo), self.settings)

    def __reduce__(self) -> Any:
        return CompiledModule, (self.original, self.settings)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> CompiledModule:
        """`.to()`, `.cuda()`, `.float()`: done on the original; what was captured for the old device is dropped."""
        self.original._apply(fn, recurse)
        self._programs.clear()
        return self


def _leaf_key(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad
    return type(leaf), leaf


def _first(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _merged(plans: Sequence[PrecisionPlan]) -> PrecisionPlan:
    first = plans[0]
    nodes = tuple(replace(n, name=f"piece{i}/{n.name}") for i, plan in enumerate(plans) for n in plan.nodes)
    casts = tuple(replace(c, value=f"piece{i}/{c.value}") for i, plan in enumerate(plans) for c in plan.casts)
    return PrecisionPlan(first.dtype, first.rules, first.device, nodes, casts)


def compile_piece(
    piece: fx.GraphModule, inputs: Sequence[Any], settings: Settings
) -> tuple[Callable[..., Any], PrecisionPlan]:
    """Plan, rewrite and compile one of Dynamo's graphs.

    Args:
        piece: Dynamo's graph.
        inputs: its example inputs.
        settings: the options.

    Returns:
        A function for the piece, and its plan.

    Raises:
        CaptureError, LoweringError: it cannot be traced or compiled.
    """
    traced, kinds = trace_piece(piece, inputs)
    plan, emulated = rewrite_piece(traced, kinds, settings.rules, settings.low(device_of(inputs)))
    return BACKENDS[settings.backend](traced, list(inputs), emulated), plan
