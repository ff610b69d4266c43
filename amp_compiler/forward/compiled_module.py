"""`CompiledModule`: the drop-in module that `amp.compile` returns."""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Callable
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
import torch.utils._pytree as pytree
from torch import fx, nn
from torch.nn.utils import parametrize

from amp_compiler.errors import AmpError, CaptureError
from amp_compiler.forward.first_calls import end_watch, told_once, watch_call
from amp_compiler.forward.kinds import derived_class
from amp_compiler.forward.low_weights import refuse_training
from amp_compiler.forward.notices import tell_of_missing_masters
from amp_compiler.forward.settings import Settings
from amp_compiler.forward.subgraphs import Subgraph, Subgraphs, execution_of, plan_of, stages_of
from amp_compiler.forward.tensor_versions import tell_of_hidden_write
from amp_compiler.fx.capture.errors import name_of
from amp_compiler.fx.capture.frontend import captured_within
from amp_compiler.fx.stand_in import StandIn
from amp_compiler.fx.torch_private.dynamo import compiles_itself
from amp_compiler.fx.torch_private.tracing import captures_here, traced_elsewhere
from amp_compiler.ir.plan import PrecisionPlan
from amp_compiler.passes.pipeline import Stages
from amp_compiler.policy.unused import warn_of_unused

# Assigned to the wrapper itself, and not to what it wraps: tools that put themselves around a model write these.
_OWN = ("forward", "_original_forward", "__class__", "__dict__")  # the second is where Accelerate keeps the first
_OF_A_CALL = ("plan", "graph_module", "stages", "execution")  # of a module: there once it was called


if TYPE_CHECKING:
    from builtins import property as _OfOurs
else:

    class _OfOurs(property):
        """A property that the model's own member of that name goes before, which its methods mean."""

        def __get__(self, module: Any, owner: type | None = None) -> Any:
            model, name = getattr(module, "_amp_original", None), self.fget.__name__
            if model is not None and name in nn.Module.__dir__(model):
                return module.__getattr__(name)
            return super().__get__(module, owner)


class CompiledModule(StandIn):
    """What `amp.compile` returns: it shares parameters, buffers and submodules with the module it was made of.

    It is an instance of the original's class too, has the name of that class, and its `forward` the same signature, as
    tools ask for all of them. Its other methods are those of the original, and `self(…)` in them (`generate` of
    transformers) runs what was compiled; one that runs layers past that is told of once. What is assigned to it goes to
    the original, but for what tools write that put themselves around a model: `forward`, `__class__` and hooks.

    Any number of threads may call it. While one compiles, calls that have their code go on.
    """

    _amp_subgraphs: Subgraphs
    _amp_settings: Settings
    _AMP_SHARED = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_state_dict_hooks",
                   "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")  # fmt: skip

    def __new__(cls, model: nn.Module, settings: Settings) -> CompiledModule:
        """An object of the class for this kind of model."""
        return object.__new__(_class_for(model) if cls is CompiledModule else cls)  # type: ignore[return-value]

    def __init__(self, model: nn.Module, settings: Settings) -> None:
        own = self.__dict__
        own["_amp_original"], own["_amp_settings"] = model, settings
        nn.Module.__init__(self)  # a class that only stands among the bases is none to begin
        del own["training"]  # which is the original's, as all that is not its own
        for name in self._AMP_SHARED:
            own[name] = model.__dict__[name]
        own["_amp_warned"] = set()
        own["_amp_subgraphs"] = Subgraphs(model, settings, name_of(model), said=own["_amp_warned"])

    def __init_subclass__(cls) -> None:
        """Nothing of what the original's class does for each class that derives from it, such as registering it."""

    def __repr__(self) -> str:
        return f"amp.compile({self._amp_original!r}, dtype={self._amp_settings.dtype!r})"

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.__dict__["_amp_original"], name)  # parameters, buffers and submodules are the same
        return told_once(self, name, value) if isinstance(value, MethodType) else value

    def __setattr__(self, name: str, value: Any) -> None:
        if self._amp_is_own(name):
            object.__setattr__(self, name, value)
        else:
            setattr(self._amp_original, name, value)

    def __delattr__(self, name: str) -> None:
        if self._amp_is_own(name):
            object.__delattr__(self, name)
        else:
            delattr(self._amp_original, name)

    def _amp_is_own(self, name: str) -> bool:
        # What nn.Module keeps for each module, its hooks above all, is the wrapper's own.
        return name in _OWN or (name in self.__dict__ and name not in self._AMP_SHARED)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run `forward` with the hooks around it."""
        # While any thread traces, torch puts a wrapper in the place of `nn.Module.__call__` for the whole process.
        if "forward" in self.__dict__ and "forward" not in self._amp_warned and not captured_within():
            return watch_call(self, "forward", self._wrapped_call_impl, *args, **kwargs)
        return self._wrapped_call_impl(*args, **kwargs)

    def __dir__(self) -> list[str]:
        names = super().__dir__()  # tools read all of them: torch.jit.trace does
        return names if self._amp_subgraphs.last else [name for name in names if name not in _OF_A_CALL]

    def train(self, mode: bool = True) -> CompiledModule:
        """Set train or eval mode on the module and all below it; drops kept low-precision weights.

        Args:
            mode: true for training.
        """
        self._amp_original.train(mode)
        for subgraph in self._amp_subgraphs.graphs:
            subgraph.weights.drop()
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the rewritten forward; compiles first where nothing that was compiled holds for the call.

        Raises:
            CaptureError: the model cannot be captured.
            LoweringError: it cannot be rewritten or compiled.
        """
        return self._amp_run(args, kwargs)

    def _amp_run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if captured_within() or not self._amp_settings.enabled:  # what captures a model that holds this one decides
            return self._amp_original(*args, **kwargs)
        return self._amp_run_apart(args, kwargs)

    @compiles_itself
    def _amp_run_apart(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        end_watch()
        if captures_here():
            return self._amp_original._wrapped_call_impl(*args, **kwargs)
        if traced := traced_elsewhere(lambda: [args, *pytree.tree_leaves((args, kwargs))]):
            if torch.onnx.is_in_onnx_export():
                hint = "amp.export_onnx(model, example_args, path) writes it in mixed precision"
            else:
                hint = f"give torch.{traced.rpartition('.')[2]} the module that was compiled"
                hint += "; amp.export gives the rewritten graph" if "export" in traced else ""
            raise CaptureError(f"a compiled module cannot be {traced}", hint=hint)
        if self._amp_settings.weights == "low":
            refuse_training(self._amp_original)
        if "masters" not in self._amp_warned and torch.is_grad_enabled():
            self._amp_warned.add("masters")
            tell_of_missing_masters(self._amp_original)
        result = self._amp_subgraphs(args, kwargs)
        if ran := self._amp_subgraphs.last:
            self._amp_tell(ran)
        return result

    def _amp_tell(self, ran: tuple[Subgraph, ...]) -> None:
        """Say once which rules match nothing and which weight was written unseen."""
        if "written" not in self._amp_warned and (
            written := next((w for one in ran if (w := one.weights.written)), "")
        ):
            self._amp_warned.add("written")
            tell_of_hidden_write(written)
        if "unused" not in self._amp_warned:
            self._amp_warned.add("unused")
            warn_of_unused(plan_of(ran).unused_rules, name_of(self._amp_original))

    @property  # type: ignore[misc, override]
    def __class__(self) -> type[nn.Module]:
        """Its class; for torch's parametrizations, which put properties on the class of a module, the original's."""
        asks = sys._getframe(1).f_globals.get("__name__")
        return type(self._amp_original) if asks == parametrize.__name__ else type(self)

    @__class__.setter
    def __class__(self, kind: type[nn.Module]) -> None:
        if issubclass(kind, CompiledModule):  # as FSDP makes, whose hooks are the wrapper's
            object.__dict__["__class__"].__set__(self, kind)
        else:
            self._amp_original.__class__ = kind
            object.__dict__["__class__"].__set__(self, _class_for(self._amp_original))

    @_OfOurs
    def original(self) -> nn.Module:
        """The module that was compiled."""
        return self._amp_original  # type: ignore[no-any-return]

    @_OfOurs
    def settings(self) -> Settings:
        """The options."""
        return self._amp_settings

    @_OfOurs
    def plan(self) -> PrecisionPlan:
        """The plan of the last forward that ran a graph; where that broke, of all its subgraphs together.

        Raises:
            AmpError: before the first call.
        """
        return plan_of(self._amp_called())

    @_OfOurs
    def graph_module(self) -> fx.GraphModule:
        """The rewritten graph of the last forward; of the last of its subgraphs, where its graph broke."""
        return self._amp_called()[-1].graph_module

    @_OfOurs
    def stages(self) -> Stages:
        """The text of the last forward's graph behind each pass: `model.stages["apply_plan"].text`."""
        return stages_of(self._amp_called())

    @_OfOurs
    def execution(self) -> str:
        """How the last forward ran: as one graph, or as subgraphs, with what broke the first one and what to do."""
        return self._amp_without_graph() or execution_of(self._amp_called())

    @_OfOurs
    def compilations(self) -> int:
        """How many graphs were compiled so far."""
        return len(self._amp_subgraphs.graphs)

    def _amp_without_graph(self) -> str:
        return self._amp_subgraphs.without if self._amp_settings.enabled else "as it is written: enabled=False"

    def _amp_called(self) -> tuple[Subgraph, ...]:
        if self._amp_subgraphs.last:
            return self._amp_subgraphs.last
        if how := self._amp_without_graph():
            hint = "amp.explain names the line" if self._amp_settings.enabled else "leave enabled at True"
            raise AmpError(f"the model has no plan: it ran {how}", hint=hint)
        raise AmpError("the model has no plan: it has not been called yet", hint="call it, or use amp.explain")

    def __prepare_scriptable__(self) -> None:
        # torch.jit.script asks for it.
        raise CaptureError(
            "a compiled module cannot be scripted", hint="give torch.jit.script the module that was compiled"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledModule:
        result = memo[id(self)] = CompiledModule(copy.deepcopy(self._amp_original, memo), self._amp_settings)
        result.__setstate__(copy.deepcopy(self._amp_hooks(), memo))
        return result

    def __reduce__(self) -> Any:
        return CompiledModule, (self._amp_original, self._amp_settings), self._amp_hooks()

    def __setstate__(self, hooks: dict[str, Any]) -> None:
        self.__dict__.update(hooks)

    def _amp_hooks(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if "hook" in name and name not in self._AMP_SHARED}

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> CompiledModule:
        """`.to()`, `.cuda()`, `.float()`: done on the original; what was compiled for the old device is dropped."""
        self._amp_original._apply(fn, recurse)
        self._amp_subgraphs.forget()
        return self


_CLASSES: weakref.WeakKeyDictionary[type, weakref.ref[type[CompiledModule]]] = weakref.WeakKeyDictionary()


def _class_for(model: nn.Module) -> type[CompiledModule]:
    """The class of compiled modules for the class of a model; one of its own where the model has its own forward."""
    shared = "forward" not in vars(model)
    known = _CLASSES[type(model)]() if shared and type(model) in _CLASSES else None
    if known is None:
        known = derived_class(model, CompiledModule, CompiledModule._amp_run)
        if shared:
            _CLASSES[type(model)] = weakref.ref(known)
    return known
