"""`CompiledModule`: the drop-in module that `amp.compile` returns."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx, nn

from amp_compiler.errors import AmpError, CaptureError, HookError
from amp_compiler.forward.graph_breaks import Pieces
from amp_compiler.forward.program import Program, build_program
from amp_compiler.forward.program_table import ProgramTable
from amp_compiler.forward.settings import Settings, device_of
from amp_compiler.forward.signature import leaves_key, module_key
from amp_compiler.fx.capture import StandIn, autocast_off
from amp_compiler.ir.plan import PrecisionPlan
from amp_compiler.passes.pipeline import Stages
from amp_compiler.policy.unused import warn_of_unused

logger = logging.getLogger("amp_compiler")
MANY_SIGNATURES = 16


class CompiledModule(StandIn):
    """What `amp.compile` returns: it shares parameters, buffers and submodules with the module it was made of.

    Its other methods (`generate`, say) are those of the original and run the original.

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
        own["_programs"], own["_pieces"], own["_last"], own["_told"] = ProgramTable(), {}, None, False
        own["_lock"] = threading.RLock()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["original"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["original"], name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.__dict__["original"], name)

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
        for program in self._programs.values():
            program.weights.drop()

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
            leaves, spec = pytree.tree_flatten((args, kwargs))
            key = (spec, module_key(self.original)), leaves_key(leaves)
            runner = self._programs.find(key) or self._pieces.get(key[0])
            if runner is None:
                with self._lock:
                    runner = (
                        self._programs.find(key) or self._pieces.get(key[0]) or self._capture(key, args, kwargs, leaves)
                    )
            if isinstance(runner, Pieces):
                result = runner(args, kwargs)
                self._pieces[key[0]] = runner  # only now: a call that failed must not decide for later ones
            else:
                result = runner(leaves)
            self.__dict__["_last"] = runner
            if not self._told:
                self.__dict__["_told"] = True
                warn_of_unused(runner.plan.unused_rules, type(self.original).__name__)
            return result

    def _capture(self, key: Any, args: Any, kwargs: Any, leaves: Sequence[Any]) -> Program | Pieces:
        if self.settings.dynamic_shapes is not None:
            for (mode, _), other in list(self._programs.items()):
                if mode == key[0] and other.form.accepts(leaves) and other.values.hold():
                    self._programs.add(key, other)
                    return other  # type: ignore[no-any-return]
        keep = not torch.is_grad_enabled() and not self.original.training
        try:
            program = build_program(self.original, args, kwargs, self.settings, keep)
        except HookError:
            raise  # Dynamo's pieces would lose it as well
        except CaptureError as cause:
            return Pieces(self.original, self.settings, cause, device_of([*leaves, *self.original.parameters()]))
        self._programs.add(key, program)
        # A model may hang hooks on its modules when it first runs; they were in place while it was traced.
        self._programs.add(((key[0][0], module_key(self.original)), key[1]), program)
        if len({id(one) for one in self._programs.values()}) == MANY_SIGNATURES:
            logger.warning(
                "%s was captured for %d input signatures; pass dynamic_shapes= to amp.compile, or pad the inputs",
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
        return last.plans[-1][1] if isinstance(last, Pieces) else last.graph_module

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
        self._pieces.clear()
        return self
