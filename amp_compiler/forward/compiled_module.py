"""`CompiledModule`: the drop-in module that `amp.compile` returns."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx, nn

from amp_compiler.errors import AmpError, CaptureError, HookError, UnknownFormError
from amp_compiler.forward.captures import Captures
from amp_compiler.forward.fallback import run_under_autocast
from amp_compiler.forward.graph_breaks import Pieces
from amp_compiler.forward.kinds import forwarding_members, kinds_of
from amp_compiler.forward.notices import logger
from amp_compiler.forward.program import Program, build_program, captures_whole
from amp_compiler.forward.program_table import ProgramTable
from amp_compiler.forward.settings import AUTO, Settings, device_of
from amp_compiler.forward.signature import leaves_key, like_forward_of, module_key
from amp_compiler.forward.tensor_versions import tell_of_hidden_write
from amp_compiler.fx.autocast_state import autocast_off
from amp_compiler.fx.capture_errors import shapes_do_not_fit
from amp_compiler.fx.stand_in import StandIn
from amp_compiler.fx.torch_private import (
    BUILDING,
    TENSORS,
    building,
    captures_here,
    exports_here,
    skipped_by_dynamo,
    transforms_here,
)
from amp_compiler.ir.plan import PrecisionPlan
from amp_compiler.passes.pipeline import Stages
from amp_compiler.policy.unused import warn_of_unused

MANY_SIGNATURES = 16
# Assigned to the wrapper itself, and not to what it wraps: tools that put themselves around a model write these.
_OWN = ("forward", "__class__", "__dict__")


class CompiledModule(StandIn):
    """What `amp.compile` returns: it shares parameters, buffers and submodules with the module it was made of.

    Its other methods (`generate`, say) are those of the original and run the original. What is assigned to it goes to
    the original too, but for what tools write that put themselves around a model: `forward`, `__class__`, hooks, and
    names that begin with an underscore and that the original does not have. Its class is made for the class of the
    original and has its name, by which some tools decide what to do, and `forward` has the same signature; for a
    `PreTrainedModel` of transformers it is one too, by which the Trainer saves it as such.

    Any number of threads may call it. While one captures, calls for signatures that were captured before go on; only
    models in pieces are called one at a time.

    Attributes:
        original: the module that was compiled.
        settings: the options.
    """

    _SHARED = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_state_dict_hooks",
               "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")  # fmt: skip

    def __new__(cls, model: nn.Module, settings: Settings) -> CompiledModule:
        """An object of the class for this kind of model."""
        return super().__new__(_class_for(model) if cls is CompiledModule else cls)

    def __init__(self, model: nn.Module, settings: Settings) -> None:
        nn.Module.__init__(self)  # a class that only stands among the bases is none to begin
        own = self.__dict__
        own["original"], own["settings"] = model, settings
        for name in self._SHARED:
            own[name] = model.__dict__[name]
        own["_programs"], own["_pieces"], own["_last"], own["_told"] = ProgramTable(), {}, None, False
        own["_transforms_told"] = own["_write_told"] = False
        own["_captures"] = Captures(type(model).__name__, settings, "args")

    def __getattr__(self, name: str) -> Any:
        try:
            return nn.Module.__getattr__(self, name)
        except AttributeError:
            return getattr(self.__dict__["original"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if self._is_own(name):
            object.__setattr__(self, name, value)
        else:
            setattr(self.__dict__["original"], name, value)

    def __delattr__(self, name: str) -> None:
        if self._is_own(name):
            object.__delattr__(self, name)
        else:
            delattr(self.__dict__["original"], name)

    def _is_own(self, name: str) -> bool:
        if name in _OWN:
            return True
        note = name.startswith("_") and not isinstance(getattr(type(self), name, None), property)
        if not note or name in self._SHARED:
            return False
        # What nn.Module keeps for each module, its hooks above all, is the wrapper's own.
        return name in self.__dict__ or not hasattr(self.__dict__["original"], name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run `forward` with the hooks around it."""
        # While any thread traces, torch puts a wrapper in the place of `nn.Module.__call__` for the whole process.
        return self._wrapped_call_impl(*args, **kwargs)

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
        self._drop_weights()
        return self

    def _drop_weights(self) -> None:
        for program in list(self._programs.values()):
            program.weights.drop()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The original's, by its own method."""
        return self.original.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load into the original, by its own method."""
        return self.original.load_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any) -> None:
        self.original._load_from_state_dict(*args)  # when a module that holds this one is loaded

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the rewritten forward; captures first where the signature is new.

        Raises:
            CaptureError: the model cannot be captured, whole or in pieces.
            LoweringError: it cannot be rewritten or compiled.
        """
        return self._run(args, kwargs)

    @skipped_by_dynamo
    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if captures_here():  # of a model that holds this one: what captures it decides
            return self.original._wrapped_call_impl(*args, **kwargs)
        kwargs = dict(sorted(kwargs.items()))
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if exports_here(leaves):
            raise CaptureError(
                "a compiled module cannot be exported by torch.export",
                hint="export `model.original`, the module behind it",
            )
        if transforms_here():
            return self._transformed(args, kwargs, leaves)
        with autocast_off():
            try:
                with TENSORS:
                    mode = spec, module_key(self.original)
                    key = mode, leaves_key(leaves)
                    runner = self._programs.find(key, leaves)
                    inputs = None if runner is None else runner.inputs(leaves)
            except UnknownFormError as cause:  # of a dataclass, an array: Dynamo looks into them
                unknown = cause
                return self._run_in_pieces(mode, args, kwargs, lambda: self._in_pieces(unknown, leaves))
            if runner is None or inputs is None:
                return self._build_and_run(key, args, kwargs, leaves)
            return self._noted(runner, runner.run_on(inputs))

    def _transformed(self, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: Sequence[Any]) -> Any:
        """A call that torch.func or `torch.autograd.forward_ad` is around: compiled code knows no such way."""
        if not self._transforms_told:
            self.__dict__["_transforms_told"] = True
            logger.warning(
                "%s runs under torch.autocast, which knows no rules, where torch.func or forward_ad is around the call;"
                " compile a module whose forward has the transform in it",
                type(self.original).__name__,
            )
        device = device_of([*leaves, *self.original.parameters()])
        return run_under_autocast(self.original, self.settings, device, args, kwargs)

    def _build_and_run(self, key: Any, args: Any, kwargs: Any, leaves: Sequence[Any]) -> Any:
        """A call for which there is no program, or none alone: one thread at a time."""
        with BUILDING:
            runner = (
                self._programs.find(key, leaves) or self._pieces.get(key[0]) or self._capture(key, args, kwargs, leaves)
            )
            if isinstance(runner, Pieces):
                return self._run_in_pieces(key[0], args, kwargs, lambda: runner)
        return self._noted(runner, runner(leaves))

    def _run_in_pieces(self, mode: Any, args: Any, kwargs: Any, made: Callable[[], Pieces]) -> Any:
        with BUILDING:
            runner = self._pieces.get(mode) or made()
            result = runner(args, kwargs)
            self._pieces[mode] = runner  # only now: a call that failed must not decide for later ones
            return self._noted(runner, result)

    def _in_pieces(self, cause: CaptureError, leaves: Sequence[Any]) -> Pieces:
        return Pieces(self.original, self.settings, cause, device_of([*leaves, *self.original.parameters()]))

    def _noted(self, runner: Program | Pieces, result: Any) -> Any:
        """Remember what ran, and say once which rules match nothing and which weight was written unseen."""
        self.__dict__["_last"] = runner
        if isinstance(runner, Program) and runner.weights.written and not self._write_told:
            self.__dict__["_write_told"] = True
            tell_of_hidden_write(runner.weights.written)
        if not self._told:
            self.__dict__["_told"] = True
            warn_of_unused(runner.plan.unused_rules, type(self.original).__name__)
        return result

    def _capture(self, key: Any, args: Any, kwargs: Any, leaves: Sequence[Any]) -> Program | Pieces:
        if self.settings.dynamic_shapes is not None:
            for (mode, _), other in list(self._programs.items()):
                if mode == key[0] and other.form.accepts(leaves) and other.values.hold(leaves):
                    self._programs.add(key, other, leaves)
                    return other  # type: ignore[no-any-return]
        keep = not torch.is_grad_enabled() and not self.original.training
        try:
            with building():
                program: Program = self._captures.make(
                    key[0],
                    (args, kwargs),
                    leaves,
                    lambda s, stages, changing: build_program(self.original, args, kwargs, s, keep, stages, changing),
                    self._programs.changed(),
                )
        except HookError:
            raise  # Dynamo's pieces would lose it as well
        except CaptureError as cause:
            asked_for = self.settings.dynamic_shapes not in (None, AUTO)
            if asked_for and captures_whole(self.original, args, kwargs):
                name = type(self.original).__name__
                logger.warning("%s runs in pieces: %s", name, shapes_do_not_fit("the model", cause))
            return self._in_pieces(cause, leaves)
        self._programs.add(key, program, leaves)
        # A model may hang hooks on its modules when it first runs; they were in place while it was traced.
        self._programs.add(((key[0][0], module_key(self.original)), key[1]), program, leaves)
        if len({id(one) for one in self._programs.values()}) == MANY_SIGNATURES:
            logger.warning(
                "%s was captured for %d input signatures; pad the inputs, or pass dynamic_shapes= to amp.compile",
                type(self.original).__name__,
                MANY_SIGNATURES,
            )
        return program

    @property
    def plan(self) -> PrecisionPlan:
        """The plan of the last forward; for a model in pieces, that of all pieces together.

        Raises:
            AmpError: before the first call.
        """
        return self._called().plan

    @property
    def graph_module(self) -> fx.GraphModule:
        """The rewritten graph of the last forward (of the last piece, for a model in pieces)."""
        last = self._called()
        if not isinstance(last, Pieces):
            return last.graph_module
        if not last.plans:
            raise AmpError(
                "the model runs as it is written: there is no graph of any piece",
                hint="do what the warning of the logger 'amp_compiler' names",
            )
        return last.plans[-1][1]

    @property
    def stages(self) -> Stages:
        """The text of the last forward's graph behind each pass: `model.stages["apply_plan"].text`."""
        return self._called().stages

    @property
    def in_pieces(self) -> bool:
        """Whether the last forward ran in Dynamo's pieces rather than as one graph."""
        return isinstance(self._called(), Pieces)

    def _called(self) -> Program | Pieces:
        if self._last is None:
            raise AmpError("the model has not been called yet", hint="call it once, or use amp.explain")
        return self._last  # type: ignore[no-any-return]

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledModule:
        return CompiledModule(copy.deepcopy(self.original, memo), self.settings)

    def __reduce__(self) -> Any:
        return CompiledModule, (self.original, self.settings)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> CompiledModule:
        """`.to()`, `.cuda()`, `.float()`: done on the original; what was captured for the old device is dropped."""
        self.original._apply(fn, recurse)
        self._programs.clear()
        self._pieces.clear()
        return self


_CLASSES: weakref.WeakKeyDictionary[type, type[CompiledModule]] = weakref.WeakKeyDictionary()


def _class_for(model: nn.Module) -> type[CompiledModule]:
    """The class of compiled modules whose `forward` is called as that of a model."""
    known = _CLASSES.get(type(model)) if "forward" not in vars(model) else None
    if known is not None:
        return known
    forward = like_forward_of(model, CompiledModule._run, CompiledModule.forward.__doc__)
    kinds = kinds_of(type(model))
    members: dict[str, Any] = {}
    for kind in kinds:
        members |= forwarding_members(kind, CompiledModule)
    members |= {"forward": forward, "__doc__": CompiledModule.__doc__, "__module__": __name__}
    # Tools tell models by the name of their class: the Trainer's label smoothing, whether it has to shift the labels.
    made = type(type(model).__name__, (CompiledModule, *kinds), members)
    if "forward" not in vars(model):
        _CLASSES[type(model)] = made
    return made
