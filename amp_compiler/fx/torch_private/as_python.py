"""Where Dynamo would capture otherwise than Python computes: functions of torch's, each with one of ours around it."""

import collections
import contextlib
import functools
import importlib
import math
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import torch

from amp_compiler.fx.torch_private.dynamo import source_text
from amp_compiler.fx.torch_private.runtime import exchanged

_Ours = Callable[..., Any]
_AROUND: list[tuple[str, str, _Ours]] = []
_THREAD = threading.local()
_OPERATORS = str(Path(__file__).parents[2] / "ops")
_FOLDER = torch.nn.__file__.rpartition("/")[0]
# Layers that hold products. Others have nothing to plan, or numbers that change at every call, as BatchNorm has.
_KINDS = ("activation", "adaptive", "conv", "linear", "rnn", "sparse", "transformer")
_LAYERS = frozenset(f"{_FOLDER}/modules/{kind}.py" for kind in _KINDS)
# How Dynamo writes `x.data = y`, the last since torch 2.14: of parameters and buffers a copy stands for the exchange.
_EXCHANGES = torch.Tensor.set_, "set_", getattr(torch.ops.aten, "shallow_copy_data_", None)
_BREAKS: dict[Any, str] = {
    **dict.fromkeys(_EXCHANGES, "the memory of a tensor is exchanged"),
    torch._VF._pad_packed_sequence: "pad_packed_sequence",  # whose lengths are numbers of tensors
}


@contextlib.contextmanager
def captures_as_python() -> Iterator[None]:
    """Within it Dynamo captures what Python would compute, or breaks its graph; for one thread at a time."""
    with contextlib.ExitStack() as stack:
        for owner, name, ours in _AROUND:
            module, _, kind_name = owner.partition(":")
            kind: Any = importlib.import_module(module)
            kind = getattr(kind, kind_name, None) if kind_name else kind
            if (theirs := getattr(kind, name, None)) is not None:
                stack.enter_context(exchanged(kind, name, _given(ours, theirs)))
        _THREAD.within = True
        stack.callback(setattr, _THREAD, "within", False)
        yield


def within() -> bool:
    """Whether Dynamo captures for us in this thread."""
    return getattr(_THREAD, "within", False)


def _given(ours: _Ours, theirs: _Ours) -> _Ours:
    @functools.wraps(theirs)
    def run(*args: Any, **kwargs: Any) -> Any:
        return ours(theirs, *args, **kwargs)

    return run


def _around(owner: str, name: str) -> Callable[[_Ours], _Ours]:
    """Puts a function around one of torch's, which it is given in front of the arguments; a torch may lack that one."""

    def add(ours: _Ours) -> _Ours:
        _AROUND.append((f"torch.{owner}", name, ours))
        return ours

    return add


def _break(what: str) -> Any:
    raise torch._dynamo.exc.Unsupported(what)


@_around("_dynamo.output_graph:OutputGraph", "create_proxy")
def _break_at(theirs: _Ours, self: Any, kind: str, target: Any, *args: Any, **kwargs: Any) -> Any:
    if target in _BREAKS and not (target in _EXCHANGES[:2] and _is_of_model(args[0][0].node)):
        _break(_BREAKS[target])
    return theirs(self, kind, target, *args, **kwargs)


def _is_of_model(node: torch.fx.Node) -> bool:
    return isinstance(node.meta.get("example_value"), torch.nn.Parameter) or "_buffers" in source_text(node)


@_around("_dynamo.trace_rules", "check")
def _take_layers(theirs: _Ours, looked_at: Any, is_inlined_call: bool = False, *rest: Any, **options: Any) -> Any:
    """Torch's layers are captured by themselves too, behind a break in an `nn.Sequential`, and our operators never.

    Autograd runs an operator's backward as Python, which Dynamo would look into like any of the user's functions.
    """
    if not is_inlined_call and isinstance(looked_at, CodeType):
        if looked_at.co_filename.startswith(_OPERATORS):
            return True
        if within() and looked_at.co_filename in _LAYERS:
            return False
    return theirs(looked_at, is_inlined_call, *rest, **options)


@_around("_dynamo.utils", "_get_dynamo_config_for_logging")
def _log_no_settings(theirs: _Ours) -> None:
    """Before torch 2.13 that fails at functions in `ignore_logging_functions`."""


@_around("_dynamo.guards", "profile_guard_manager")
def _time_no_guards(theirs: _Ours, *args: Any) -> float:
    """Each capture would time them with the caches of the processor emptied, 25 ms; where its log is read it does."""
    return float(theirs(*args)) if _is_logged() else 0.0


@_around("_dynamo.utils", "_scrubbed_inductor_config_for_logging")
def _write_no_settings(theirs: _Ours) -> Any:
    return theirs() if _is_logged() else None


def _is_logged() -> bool:
    return not os.environ.keys().isdisjoint({"TORCH_TRACE", "TORCH_LOGS"})


@_around("_dynamo.variables.misc:RandomVariable", "is_supported_random_obj")
def _break_at_generators(theirs: _Ours, *args: Any) -> bool:
    """A `random.Random` would draw the same number at every call."""
    return False


@_around("_dynamo.variables.tensor:TensorVariable", "method_attr_retain_grad")
def _break_behind_attribute(theirs: _Ours, *args: Any) -> None:
    """It is its call that breaks: else Dynamo gives up the whole function."""


@_around("_dynamo.variables.tensor:TensorVariable", "call_method")
def _break_at_hooks(theirs: _Ours, self: Any, tx: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    """A hook on a tensor that a graph makes is hung really; Dynamo's acts only while the graph is traced."""
    hangs = name in ("register_hook", "register_post_accumulate_grad_hook") and not self.source
    if hangs or name == "retain_grad":
        _break(f"{name} on a tensor of the graph")
    return theirs(self, tx, name, *args, **kwargs)


@_around("_dynamo.symbolic_convert:InstructionTranslatorBase", "_format_value")
def _text_of_number(theirs: _Ours, self: Any, spec: Any, flags: int) -> None:
    """An f-string of nothing but a number that is an input is a text; Dynamo gives the number itself."""
    variables: Any = torch._dynamo.variables
    if isinstance(self.stack[-1], variables.SymNodeVariable) and not flags & 3:  # else it is read anew
        text = "{:" + spec.as_python_constant() + "}"
        self.push(variables.misc.StringFormatVariable.create(text, [self.pop()], {}))
    else:
        theirs(self, spec, flags)


@_around("_dynamo.guards:GuardBuilder", "CONSTANT_MATCH")
def _guard_signs(theirs: _Ours, self: Any, guard: Any) -> None:
    """A guard on the number 0 tells -0.0 from 0.0, which are equal."""
    theirs(self, guard)
    value = self.get(guard)
    if type(value) is float and value == 0.0:
        sign, guards = math.copysign(1.0, value), torch._dynamo.guards
        code = guards.get_verbose_code_parts([f"copysign(1.0, {self.arg_ref(guard)}) == {sign}"], guard)
        manager = self.get_guard_manager(guard)
        manager.add_lambda_guard(lambda now: math.copysign(1.0, now) == sign, code, guard.user_stack)


@_around("_dynamo.variables.dicts:ConstDictVariable", "getitem_const_raise_exception_if_absent")
def _guard_absent_keys(theirs: _Ours, self: Any, tx: Any, arg: Any) -> Any:
    """A key that a dict lacks is guarded where the dict is asked for it and raises, as in `os.getenv`."""
    try:
        return theirs(self, tx, arg)
    except torch._dynamo.exc.ObservedKeyError:
        self.install_dict_contains_guard(tx, [arg])
        raise


@_around("_dynamo.symbolic_convert:InliningInstructionTranslator", "get_globals_source_and_value")
def _globals_of_no_module(theirs: _Ours, self: Any, name: str) -> tuple[Any, Any, Any]:
    """The globals of code that is no module's: of `exec`, `runpy.run_path` and doctest.

    Dynamo looks them up in the module of the name `__name__`, which has others, or is none at all. And it guards no
    global of a standard module, of which the environment changes.
    """
    from torch._dynamo.source import DictGetItemSource, GlobalSource, SkipGuardSource
    from torch._dynamo.variables.builder import VariableBuilder

    module = sys.modules.get(self.f_globals.get("__name__", ""))
    if getattr(module, "__dict__", None) is self.f_globals:
        values, variable, source = theirs(self, name)
        skips = isinstance(source, SkipGuardSource) and vars(module).get(name) is os.environ
        return values, variable, source.base if skips else source
    if self.current_instruction.opname == "STORE_GLOBAL":
        _break(f"the global '{name}' is written by code that is of no module")
    source = GlobalSource(self.output.install_global_by_id("___unnamed_scope", self.f_globals))
    return self.f_globals, VariableBuilder(self, source)(self.f_globals), DictGetItemSource(source, name)


@_around("_dynamo.side_effects:SideEffects", "track_mutable")
def _keep_bound(theirs: _Ours, self: Any, item: Any, variable: Any, *rest: Any, **options: Any) -> Any:
    """A deque keeps the length that it is bounded to."""
    if type(item) is collections.deque:
        variable.maxlen = torch._dynamo.variables.ConstantVariable.create(item.maxlen)
    return theirs(self, item, variable, *rest, **options)


@_around("_dynamo.side_effects:SideEffects", "codegen_update_mutated")
def _replay_bounded(theirs: _Ours, self: Any, *args: Any, **options: Any) -> None:
    variables: Any = torch._dynamo.variables
    for one in self._get_modified_vars():
        if isinstance(one, variables.lists.DequeVariable) and one.source is not None:
            one.maxlen = variables.ConstantVariable.create(None)  # its items are no more than it takes
    theirs(self, *args, **options)


@_around("_dynamo.variables.lists:DequeVariable", "call_method")
def _copy_bound(theirs: _Ours, self: Any, tx: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    result = theirs(self, tx, name, *args, **kwargs)
    if name in ("copy", "__copy__"):
        result.maxlen = self.maxlen
    return result


@_around("_dynamo.variables.lists:BaseListVariable", "call_method")
def _extend_in_place(theirs: _Ours, self: Any, tx: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    """`__iadd__` called by its name changes a list for good; Dynamo does not replay it."""
    if name == "__iadd__" and self.is_mutable():
        self.call_method(tx, "extend", *args, **kwargs)
        return self
    return theirs(self, tx, name, *args, **kwargs)


@_around("_dynamo.variables.builtin:ListBuiltinVariable", "call_method")
def _extend_by_class(theirs: _Ours, self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
    if name != "__iadd__" or not args:
        return theirs(self, tx, name, args, kwargs)
    one, base = args[0], getattr(args[0], "_base_vt", None)  # of a subclass, whose own method may have called this
    (base or one).call_method(tx, name, args[1:], kwargs)
    if base is not None and base.is_mutable():
        tx.output.side_effects.mutation(base)
    return one


def _note_order(theirs: _Ours, self: Any, tx: Any, name: str, *args: Any, **options: Any) -> Any:
    """An order that alone has changed is replayed."""
    result = theirs(self, tx, name, *args, **options)
    if name in ("move_to_end", "popitem"):
        getattr(self, "_base_vt", self).should_reconstruct_all = True
    return result


@_around("_dynamo.variables.higher_order_ops:CheckpointHigherOrderVariable", "_call_function")
def _break_at_idle_checkpoints(theirs: _Ours, self: Any, tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """A reentrant checkpoint none of whose tensors requires a gradient has none for its parameters, in eager torch."""

    def learn(values: Iterable[Any]) -> bool:
        kind = torch._dynamo.variables.TensorVariable
        tensors = (one for one in (value.realize() for value in values) if isinstance(one, kind))
        return any(one.as_proxy().node.meta["example_value"].requires_grad for one in tensors)

    option = kwargs.get("use_reentrant")
    reentrant = option is None or not option.is_python_constant() or option.as_python_constant() in (None, True)
    idle = reentrant and torch.is_grad_enabled() and not learn(args[1:])
    result = theirs(self, tx, args, kwargs)
    if idle and learn(getattr(result, "items", None) or [result]):
        _break("a reentrant checkpoint of inputs that require no gradient")
    return result


for _owner in ("dicts:ConstDictVariable", "user_defined:OrderedDictVariable"):  # the second since torch 2.13
    _around(f"_dynamo.variables.{_owner}", "call_method")(_note_order)
