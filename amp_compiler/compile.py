"""`amp.compile` and `amp.explain`: an `nn.Module` in, a drop-in `nn.Module` or a plan out."""

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
from amp_compiler.frontends.fx_capture import (
    autocast_off,
    captured_from_graph_module,
    capture_module,
    user_frame,
)
from amp_compiler.plan import PrecisionPlan
from amp_compiler.program import Program, build_program, plan_captured, rewrite_piece
from amp_compiler.settings import Settings, device_of, make_settings

logger = logging.getLogger("amp_compiler")
MANY_SIGNATURES = 16


def compile(
    model: nn.Module,
    *,
    rules: Any = "default",
    dtype: str = "auto",
    dynamic_shapes: Any = None,
    backend: str = "inductor",
) -> CompiledModule:
    """Compile a module for mixed precision.

    Args:
        model: any `nn.Module`; it is captured at the first call for each input signature.
        rules: a preset name, a path, a dict or a `RuleSet`.
        dtype: `"fp16"`, `"bf16"`, or `"auto"` (BF16 where the device computes it natively, else FP16).
        dynamic_shapes: as for `torch.export.export`; without it every new input shape is captured anew.
        backend: `"inductor"`, or `"eager"` (node by node: the oracle, and it allows double backward).

    Returns:
        A module with the same parameters (the same objects), the same `state_dict` keys and the same call signature.

    Raises:
        AmpError: a wrong option. At the first call: `CaptureError`, `LoweringError`.

    Example:
        >>> import torch, amp_compiler as amp
        >>> model = amp.compile(torch.nn.Linear(8, 4), dtype="bf16", backend="eager")
        >>> model(torch.ones(2, 8)).dtype
        torch.float32
    """
    if not isinstance(model, nn.Module):
        raise AmpError(
            f"amp.compile takes an nn.Module, not a {type(model).__name__}",
            mend="wrap a function in a module whose forward calls it",
        )
    if isinstance(model, CompiledModule):
        model = model.original
    return CompiledModule(model, make_settings(rules, dtype, backend, dynamic_shapes))


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

    @torch.compiler.disable(recursive=False)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the rewritten forward; captures first where the signature is new.

        Raises:
            CaptureError: the model cannot be captured, whole or in pieces.
            LoweringError: it cannot be rewritten or compiled.
        """
        if torch.compiler.is_exporting():
            raise CaptureError(
                "a compiled module cannot be exported by torch.export", mend="export `model.original`, the module behind it"
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
        program = self._programs.get(key)
        if program is not None:
            return program
        if self.settings.dynamic_shapes is not None:
            mode = self._mode_key(spec)
            for other_key, other in list(self._programs.items()):
                if other_key[0] == mode and other.accepts(leaves):
                    self._programs[key] = other
                    return other
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


def dynamo_backend(
    piece: fx.GraphModule, inputs: list[Any], *, options: dict[str, Any] | None = None, mode: str | None = None
) -> Callable[..., Any]:
    """The entry point behind `torch.compile(model, backend="amp_compiler", options={"rules": ..., "dtype": ...})`.

    Args:
        piece: Dynamo's graph.
        inputs: its example inputs.
        options: `rules`, `dtype` and `backend`, as for `amp.compile`.
        mode: not used by this backend.

    Raises:
        AmpError: an unknown option, or an autocast context around the call.
    """
    given = dict(options or {})
    unknown = sorted(set(given) - {"rules", "dtype", "backend"})
    if unknown:
        raise AmpError(f"unknown option {unknown[0]!r} of backend 'amp_compiler'", mend="use 'rules', 'dtype', 'backend'")
    if mode is not None:
        raise AmpError(f"backend 'amp_compiler' has no mode {mode!r}", mend="pass options={...} instead")
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        raise AmpError(
            "backend 'amp_compiler' was called inside torch.autocast", mend="leave the autocast context out: the rules decide"
        )
    return compile_piece(piece, inputs, make_settings(**given))[0]


def explain(
    model: Any,
    example_args: Any = None,
    *,
    rules: Any = "default",
    dtype: str = "auto",
    dynamic_shapes: Any = None,
) -> PrecisionPlan:
    """Plan the precision of a model without compiling or running it.

    Args:
        model: an `nn.Module`, or an FX `GraphModule` in ATen IR as `torch.export` gives.
        example_args: a tuple of positional arguments, a dict of keyword arguments, a pair of both, or one tensor.
        rules: as for `compile`.
        dtype: as for `compile`.
        dynamic_shapes: as for `torch.export.export`.

    Returns:
        The plan; `print(plan)` shows every node and cast.

    Raises:
        CaptureError: the model cannot be captured.
        RuleError: the rules cannot be loaded.

    Example:
        >>> import torch, amp_compiler as amp
        >>> plan = amp.explain(torch.nn.Linear(8, 4), (torch.ones(2, 8),), dtype="bf16")
        >>> [(node.op, node.precision) for node in plan.nodes]
        [('aten.linear', 'low')]
    """
    settings = make_settings(rules, dtype, "eager", dynamic_shapes)
    if isinstance(model, CompiledModule):
        model = model.original
    if isinstance(model, fx.GraphModule) and example_args is None:
        captured = captured_from_graph_module(copy.deepcopy(model))
        tensors = [node.meta.get("val") for node in captured.graph_module.graph.nodes]
        return plan_captured(captured, settings.rules, settings.low(device_of(tensors)))
    if not isinstance(model, nn.Module):
        raise AmpError(f"amp.explain cannot read a {type(model).__name__}", mend="pass an nn.Module or an FX GraphModule")
    args, kwargs = split_example(example_args)
    captured = capture_module(model, args, kwargs, dynamic_shapes)
    low = settings.low(device_of([*pytree.tree_leaves((args, kwargs)), *model.parameters()]))
    return plan_captured(captured, settings.rules, low)


def split_example(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Example arguments as `(args, kwargs)`.

    Raises:
        AmpError: where they are neither a tuple, a dict, a pair of both nor a tensor.
    """
    if example is None:
        return (), {}
    if isinstance(example, torch.Tensor):
        return (example,), {}
    if isinstance(example, dict):
        return (), dict(example)
    if isinstance(example, (tuple, list)):
        if len(example) == 2 and isinstance(example[0], (tuple, list)) and isinstance(example[1], dict):
            return tuple(example[0]), dict(example[1])
        return tuple(example), {}
    raise AmpError(
        f"example_args is a {type(example).__name__}", mend="pass a tuple of arguments, a dict of keyword arguments, or both"
    )
