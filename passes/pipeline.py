"""The pipelines: named lists of passes, which are run, printed, stopped, skipped in and added to."""

from __future__ import annotations

import difflib
import html
import os
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, NamedTuple

from amp_compiler.errors import PassError
from amp_compiler.passes import PASSES, find_pass
from amp_compiler.passes.base import Pass, Texts


class Stage(NamedTuple):
    """The text of a graph behind one pass.

    Attributes:
        name: of the pass; `capture` is what came in.
        text: see `fx.text.format_fx`; decisions, labels and casts behind the neutral passes.
    """

    name: str
    text: str


class Stages(Sequence[Stage]):
    """The stages that a graph went through, in order; kept compressed, and a text that did not change only once."""

    def __init__(self) -> None:
        self._kept: list[tuple[str, bytes]] = []
        self._last = ""
        self._subgraphs: dict[int, bytes] = {}
        self.captured = self.compiling = 0.0  # when it was captured, when a backend first compiled
        self.texts = Texts()  # what writes them while they are made

    @property
    def last(self) -> str:
        """Name of the last stage so far; empty where there is none."""
        return self._kept[-1][0] if self._kept else ""

    @property
    def begun(self) -> bool:
        """Whether subgraphs are made for the backend."""
        return self.compiling > 0

    def note(self, name: str, text: str | None) -> None:
        """Add a stage; `None` stands for the text of the one before it."""
        self.captured = self.captured or time.perf_counter()
        text = self._last if text is None else text
        same = bool(self._kept) and text == self._last
        self._kept.append((name, self._kept[-1][1] if same else zlib.compress(text.encode(), 1)))
        self._last = text

    def begin_subgraph(self, text: str) -> None:
        """Say that the next stage is of a subgraph, and is to be compared with its text."""
        self.compiling = self.compiling or time.perf_counter()
        if text != self._last:
            self._subgraphs[len(self)] = zlib.compress(text.encode(), 1)

    def changed(self, name: str) -> bool:
        """Whether the pass of that name ran and changed the text."""
        place = next((place for place, (known, _) in enumerate(self._kept) if known == name), 0)
        before = self.before(place)
        return before is not None and before.text != self[place].text

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, place: Any) -> Any:
        """The stage at a place, or the first one of a name.

        Raises:
            PassError: there is no stage of this name.
        """
        if isinstance(place, slice):
            return [self[number] for number in range(*place.indices(len(self)))]
        if isinstance(place, str):
            place = _found(place, [name for name, _ in self._kept], "stage")
        name, packed = self._kept[place]
        return Stage(name, zlib.decompress(packed).decode())

    def before(self, place: int) -> Stage | None:
        """What the stage at a place is to be compared with: the one before it; for a graph, the last one."""
        if place in self._subgraphs:
            return Stage("subgraph", zlib.decompress(self._subgraphs[place]).decode())
        planned = self._kept[place][0] in PLAN.names
        places = range(place - 1, -1, -1)
        match = next((one for one in places if planned or self._kept[one][0] not in PLAN.names), None)
        return None if match is None else self[match]

    def diffs(self) -> Iterator[tuple[str, str]]:
        """Name of each stage with what its pass changed, as a unified diff; the first stage, and plans, as they are."""
        for place, stage in enumerate(self):
            before = self.before(place)
            if before is None or stage.name in PLAN.names:
                yield stage.name, stage.text
            else:
                lines = before.text.splitlines(keepends=True), stage.text.splitlines(keepends=True)
                yield stage.name, "".join(difflib.unified_diff(*lines, before.name, stage.name, n=0))

    def __repr__(self) -> str:
        return f"Stages({', '.join(name for name, _ in self._kept)})"

    def _repr_html_(self) -> str:
        changed = ((name, text.count("\n+") + text.count("\n-")) for name, text in self.diffs())
        rows = "".join(f"<tr><td>{html.escape(name)}</td><td>{count}</td></tr>" for name, count in changed)
        return f"<table><tr><th>stage</th><th>lines changed</th></tr>{rows}</table>"

    def __str__(self) -> str:
        return "".join(f"=== {name}\n{text}" for name, text in self.diffs())


@dataclass(frozen=True)
class Late:
    """An option of a pass that is known only when the pass runs.

    Args:
        of: gives it for the graph as it is then.
    """

    of: Any


@dataclass(frozen=True)
class Pipeline:
    """A list of passes, each by its name in `PASSES`, or as an object: a pass of one's own.

    Args:
        name: such as `FORWARD`; `PIPELINES` has them all.
        steps: the passes.
        about: what it makes of what, and who runs it.

    Example:
        >>> import amp_compiler as amp
        >>> shorter = amp.pipelines.FORWARD.skip("multiply_convolutions")
        >>> shorter.names[-3:]
        ('native_ops', 'legalize', 'protect_buffers')
    """

    name: str
    steps: tuple[str | Pass[Any], ...]
    about: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its passes, in order."""
        return tuple(step if isinstance(step, str) else step.name for step in self.steps)

    def insert_before(self, name: str, step: Pass[Any]) -> Pipeline:
        """With a pass of one's own in front of the one called `name`.

        Raises:
            PassError: no pass of the pipeline is called so, or `step` is no pass.
        """
        return self._with(_found(name, self.names, f"pass of the pipeline {self.name}"), step)

    def insert_after(self, name: str, step: Pass[Any]) -> Pipeline:
        """With a pass of one's own behind the one called `name`; raises as `insert_before` does."""
        return self._with(_found(name, self.names, f"pass of the pipeline {self.name}") + 1, step)

    def _with(self, place: int, step: Pass[Any]) -> Pipeline:
        if not isinstance(step, Pass):
            raise PassError(
                f"{step!r} is no pass", hint="give an object of a class derived from InPlacePass, such as MyPass()"
            )
        if not isinstance(getattr(step, "exact", None), bool):
            hint = "write it in its class: exact: ClassVar[bool] = False"
            raise PassError(f"the pass {type(step).__name__} lacks `exact`", hint=hint)
        if step.name in self.names:
            raise PassError(f"the pipeline {self.name} has a pass '{step.name}'", hint="give yours another name")
        return replace(self, steps=(*self.steps[:place], step, *self.steps[place:]))

    def skip(self, name: str) -> Pipeline:
        """Without the pass called `name`.

        Raises:
            PassError: no pass of the pipeline is called so, or what follows relies on it.
        """
        place = _found(name, self.names, f"pass of the pipeline {self.name}")
        step = self.steps[place]
        if not (find_pass(step) if isinstance(step, str) else step).skippable:
            raise PassError(f"pass '{name}' cannot be skipped: what follows relies on it", hint=_skippable(self.steps))
        return replace(self, steps=(*self.steps[:place], *self.steps[place + 1 :]))

    def stop_after(self, name: str) -> Pipeline:
        """Without the passes behind the one called `name`, for reading: what it gives may not be fit to run.

        Raises:
            PassError: no pass of the pipeline is called so.
        """
        return replace(self, steps=self.steps[: _found(name, self.names, f"pass of the pipeline {self.name}") + 1])

    def run(self, subject: Any, options: Mapping[str, Any], stages: Stages | None = None) -> Any:
        """Run every pass on the subject.

        Args:
            subject: a draft or a graph. Passes that work in place change it.
            options: by name of the field of a pass; a `Late` one is worked out when the pass runs.
            stages: takes the text behind each pass.

        Returns:
            What the last pass returned.

        Raises:
            PassError: a pass broke its contract, or an option is missing; its `stages` are those until then.
        """
        verifies = os.environ.get("AMP_VERIFY") == "1"
        texts = Texts() if stages is None else stages.texts
        state, written = None, False  # the state of the subject, as long as it is known
        for step in self.steps:
            run = self._made(step, options, subject)
            if isinstance(step, str) and stages is None and not verifies:
                subject, state = run.unchecked(subject).subject, None
                continue
            whole = not isinstance(step, str) and self._complaint(subject) is None
            try:
                if isinstance(step, str) and not verifies:
                    result, state = run.believed(subject), None
                else:
                    result, state = run.checked(subject, texts.state(subject) if state is None else state, texts)
            except PassError as error:
                error.stages = stages
                raise
            subject = result.subject
            if stages is not None:
                text = (
                    state if isinstance(state, str) else texts.of(subject) if result.modified or not written else None
                )
                stages.note(run.name, text)
                written = True
            if not isinstance(step, str):
                self._verify(subject, run.name, whole)
        if verifies:
            self._verify(subject, self.names[-1] if self.names else "")
        return subject

    def instances(self, options: Mapping[str, Any]) -> list[Pass[Any]]:
        """Its passes with their options, for a compiler that runs them itself; options as for `run`, none `Late`."""
        return [self._made(step, options, None) for step in self.steps]

    def _made(self, step: str | Pass[Any], options: Mapping[str, Any], subject: Any) -> Pass[Any]:
        if not isinstance(step, str):
            return step
        cls = find_pass(step)
        arguments = {}
        for option in fields(cls):  # type: ignore[arg-type]  # every pass is a dataclass
            if option.name in options:
                value = options[option.name]
                arguments[option.name] = value.of(subject) if isinstance(value, Late) else value
            elif option.default is MISSING and option.default_factory is MISSING:
                raise PassError(
                    f"pass '{step}' needs the option '{option.name}'",
                    where=f"pipeline {self.name}",
                    hint=f"put '{option.name}' into the options of the run",
                )
        return cls(**arguments)

    def _complaint(self, subject: Any, whole: bool = True) -> str | None:
        from amp_compiler.passes.spec import SPECS, complaint  # here: the neutral passes do without torch

        return complaint(subject, SPECS[self.name], whole) if self.name in SPECS else None

    def _verify(self, subject: Any, name: str, whole: bool = True) -> None:
        """Check that the graph is a legal one behind this pipeline; if not `whole`, what holds on the way there."""
        wrong = self._complaint(subject, whole)
        if wrong is not None:
            raise PassError(wrong, where=f"after pass '{name}'", hint=f"see SPECS['{self.name}'] in passes/spec.py")


def _skippable(steps: Sequence[str | Pass[Any]]) -> str:
    names = [
        s if isinstance(s, str) else s.name for s in steps if (find_pass(s) if isinstance(s, str) else s).skippable
    ]
    return f"those that can be are {', '.join(names)}" if names else "no pass of this pipeline can be"


def _found(name: str, names: Sequence[str], kind: str) -> int:
    if name in names:
        return list(names).index(name)
    near = difflib.get_close_matches(name, names, 1)
    known = "it belongs to another pipeline" if name in PASSES else f"there are {', '.join(names)}"
    raise PassError(f"'{name}' is no {kind}", hint=f"did you mean '{near[0]}'?" if near else known)


CAPTURE = Pipeline(
    "CAPTURE",
    (
        "name_modules",
        "inline_regions",
        "drop_type_checks",
        "write_out_types",
        "merge_results",
        "functionalize",
        "isolate_mutations",
        "open_cells",
        "fold_masks",
    ),
    "From a captured graph to its normal form. Run by every call.",
)
ONNX_PLAN = Pipeline(
    "ONNX_PLAN",
    (
        "find_masks",
        "pin_stored_numbers",
        "pin_overflows",
        "pin_differences",
        "pin_calibrated",
        "pin_whole_numbers",
        "pin_parameters",
        "pin_running_sums",
        "pin_norms",
        "pin_kernels",
    ),
    "What an ONNX model demands of its nodes, before PLAN: `amp.convert_onnx`, and `amp.explain` of a file.",
)
PLAN = Pipeline(
    "PLAN",
    ("classify", "assign_precision", "place_casts"),
    "From the neutral graph and rules to a plan. Run by every call, for FX and ONNX.",
)
FORWARD = Pipeline(
    "FORWARD",
    (
        "apply_plan",
        "scale_products",
        "type_backward",
        "widen_math",
        "native_ops",
        "legalize",
        "multiply_convolutions",
        "protect_buffers",
    ),
    "The plan carried out where gradients are wanted: `amp.compile` in training, and `amp.training_step`.",
)
INFERENCE = Pipeline(
    "INFERENCE",
    (
        "apply_plan",
        "scale_products",
        "widen_math",
        "native_ops",
        "legalize",
        "multiply_convolutions",
        "protect_buffers",
        "hoist_weight_casts",
        "place_operands",
    ),
    "The plan carried out where gradients are not wanted: `amp.compile` under `no_grad`.",
)
STEP = Pipeline(
    "STEP",
    (
        "separate_buffers",
        "split_complex",
        "place_weights",
        "native_ops",
        "synchronize_norms",
        "differentiate",
        "fold_loss_scale",
        "simplify_casts",
        "recompute_checkpoints",
        "sum_gradients",
        "gather_gradients",
        "shard_update",
        "reduce_gradients",
        "fuse_update",
        "gather_weights",
        "place_operands",
    ),
    "From the rewritten forward to a graph of the whole training step.",
)
UPDATE = Pipeline(
    "UPDATE",
    (
        "split_complex",
        "place_weights",
        "take_gradients",
        "gather_gradients",
        "shard_update",
        "reduce_gradients",
        "fuse_update",
        "gather_weights",
    ),
    "The check and the update alone, where a training step runs its model in subgraphs, each with its own backward.",
)
DEVICE = Pipeline(
    "DEVICE",
    ("recompute_cheap", "defer_gradients", "cut_step"),
    "The step fitted to the device that runs it.",
)
SUBGRAPH = Pipeline(
    "SUBGRAPH",
    ("reshape_views", "two_matrices", "native_ops"),
    "On each subgraph that a compiler is given.",
)
LATE = Pipeline(
    "LATE",
    ("native_ops", "keep_images_once"),
    "On each graph that Inductor has opened, forward and backward, before it makes code of it. That is inside of the"
    " compiler: no stage of ours, and no place for passes of your own; `TORCH_LOGS=post_grad_graphs` prints what comes"
    " out. Of a graph that stands in torch's cache nothing is made anew.",
)
COUNT = Pipeline(
    "COUNT",
    ("count_exponents",),
    "Behind a step without its update, for reading what goes through it: `amp.profile`.",
)
ONNX_CAPTURE = Pipeline(
    "ONNX_CAPTURE",
    ("zero_hidden_rows",),
    "From a captured graph to the normal form that is exported: `amp.export_onnx`.",
)
PIPELINES = (CAPTURE, ONNX_PLAN, PLAN, FORWARD, INFERENCE, STEP, UPDATE, DEVICE, SUBGRAPH, LATE, COUNT, ONNX_CAPTURE)


def pipelines_with(argument: Any, allowed: Sequence[Pipeline]) -> dict[str, Pipeline]:
    """The pipelines by name, with those in the place of ours that the user gave.

    Args:
        argument: a pipeline, several, or `None`.
        allowed: those that the call runs.

    Raises:
        PassError: something is no pipeline, or one that this call does not run, or one lacks a pass that must be there.
    """
    by_name = {one.name: one for one in allowed}
    several = [] if argument is None else [argument]
    if isinstance(argument, Iterable) and not isinstance(argument, Pipeline | str):
        several = [*argument]
    for one in several:
        if not isinstance(one, Pipeline):
            raise PassError(f"{one!r} is no pipeline", hint="give one such as amp.pipelines.FORWARD.insert_after(...)")
        if one.name not in by_name:
            raise PassError(f"the pipeline {one.name} is not run here", hint=f"those that are: {', '.join(by_name)}")
        for step in by_name[one.name].steps:
            if step not in one.steps and isinstance(step, str) and not find_pass(step).skippable:
                raise PassError(
                    f"the pipeline {one.name} lacks the pass '{step}'", hint="keep it: those behind it need it"
                )
        by_name[one.name] = one
    return by_name
