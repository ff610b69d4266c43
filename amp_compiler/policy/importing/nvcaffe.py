"""A net or a solver of NVCaffe as a rule file: the types of its layers, its gradient scale, the type of its weights.

Types are those that `Net::Init` of NVCaffe 0.17.4 gives a layer: its own, else the net's default, else FLOAT. Each
field that asks for what no rule can ask for is an error that names its line; so is one that NVCaffe does not know. What
the step takes instead of a rule, and layers of types that are not known, are notes.
"""

from __future__ import annotations

import dataclasses
import glob
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from amp_compiler.policy.exclusions import Imported
from amp_compiler.policy.importing.facts import LEAST, MOST, facts, read_text
from amp_compiler.policy.importing.text_format import Field, named, parse_text
from amp_compiler.policy.loader import load_rules
from amp_compiler.policy.marks import Mark, nearest

_FORMS = ("net", "solver")
_TRUE, _FALSE = ("true", "1", "t", "True"), ("false", "0", "f", "False")
_LOSS_FUNCTION = "<loss_fn>"
_FOR_THE_STEP = (
    "type", "solver_type", "base_lr", "momentum", "momentum2", "rms_decay", "delta", "weight_decay",
    "regularization_type", "larc", "lr_policy", "momentum_policy", "weight_decay_policy", "rampup_interval",
    "iter_size", "clip_gradients",
)  # fmt: skip
_NETS = ("train_net_param", "net_param", "train_net", "net")


def import_nvcaffe(path: Path, *, extends: str | None = None) -> Imported:
    """Make a rule file of a net, or of a solver and the net that it names where that lies beside it.

    Args:
        path: the prototxt.
        extends: what the rules stand on; `None` for nothing, since a net says the type of everything.

    Raises:
        RuleError: it cannot be read, has a field that NVCaffe does not have, or asks for arithmetic in 16 bits, for
            FP64, or for another thing that no rule can ask for.

    Example:
        ```python
        Path("net.prototxt").write_text("default_forward_type: FLOAT16\\ndefault_backward_type: FLOAT16\\n")
        print(import_nvcaffe(Path("net.prototxt")).to_text())
        ```
    """
    message = Message.read(path)
    notes: list[str] = []
    rules = _of_solver(message, notes) if message.form == "solver" else _Net(message, notes).rules()
    imported = Imported({"version": 1, **({"extends": extends} if extends else {}), **rules}, notes)
    load_rules(imported.rules)
    return imported


@dataclass(frozen=True)
class Message:
    """The fields of a net, a layer or a solver.

    Args:
        form: which of them.
        file: its file, for messages.
        fields: as they stand there.
        line: where it begins.
    """

    form: str
    file: Path
    fields: tuple[Field, ...]
    line: int = 1

    @staticmethod
    def read(path: Path) -> Message:
        """The message in a file: a net, or a solver where its fields are a solver's."""
        fields = parse_text(read_text(path), str(path))
        names = {field.name for field in fields}
        own = [names & set(_known(form)) - set(_known(other)) for form, other in (_FORMS, _FORMS[::-1])]
        form = "solver" if len(own[1]) > len(own[0]) else "net"
        return Message(form, path, fields).checked()

    def checked(self) -> Message:
        """Itself.

        Raises:
            RuleError: it has a field that NVCaffe does not have.
        """
        known = _known(self.form)
        for field in self.fields:
            if field.name == "layers":
                raise self.place(field).error(
                    "it is of the format before Caffe 1.0", "use upgrade_net_proto_text on it"
                )
            if field.name not in known:
                what = f"NVCaffe {facts('caffe')['version']} has no field '{field.name}' of a {self.form}"
                raise self.place(field).error(what, nearest(field.name, known, "correct or remove it"))
        return self

    def place(self, field: Field) -> Mark:
        """Where a field stands."""
        return Mark(str(self.file), field.line, key=field.name)

    def text_of(self, field: Field) -> str:
        """A field as it is written, with its place."""
        return f"{field.name}: {field.value} ({self.file.name}:{field.line})"

    def one(self, name: str) -> Field | None:
        """The only field of a name.

        Raises:
            RuleError: there are several.
        """
        fields = named(self.fields, name)
        if len(fields) > 1:
            raise self.place(fields[1]).error("it is given twice", f"remove it: line {fields[0].line} has it")
        return fields[0] if fields else None

    def word(self, name: str, otherwise: str = "") -> str:
        """The text of a field."""
        field = self.one(name)
        return field.value if field is not None and isinstance(field.value, str) else otherwise

    def flag(self, name: str) -> bool:
        """Whether a field is true."""
        field = self.one(name)
        if field is None:
            return False
        if field.value not in (*_TRUE, *_FALSE):
            raise self.place(field).error(f"it is {field.value}", "write true or false")
        return field.value in _TRUE

    def number(self, name: str, otherwise: float) -> float:
        """The number in a field."""
        field = self.one(name)
        if field is None:
            return otherwise
        try:
            result = float(str(field.value).removesuffix("f"))
        except ValueError as cause:
            raise self.place(field).error(f"it is {field.value}, and no number", "write a number") from cause
        return result

    def type(self, name: str) -> tuple[str, Field] | None:
        """The precision that a field of a type asks for, `low` or `fp32`, with the field.

        Raises:
            RuleError: it is a type that no rule can ask for.
        """
        field = self.one(name)
        if field is None:
            return None
        if field.fields:
            raise self.place(field).error("it is a message", "write FLOAT or FLOAT16")
        types: dict[str, int] = facts("caffe")["types"]
        word = next((word for word, number in types.items() if str(number) == field.value), field.value)
        if word not in types:
            raise self.place(field).error(f"there is no type '{word}'", nearest(str(word), types))
        if word not in ("FLOAT", "FLOAT16"):
            raise self.place(field).error(f"no rule can say {word}", "write FLOAT or FLOAT16")
        return ("low" if word == "FLOAT16" else "fp32"), field

    def check_math(self, name: str) -> None:
        """Refuses arithmetic in 16 bits, which no 16-bit kernel that is called here has."""
        math_type = self.type(name)
        if math_type is not None and math_type[0] == "low":
            what = "arithmetic in 16 bits is asked for, and 16-bit kernels here compute in FP32 and round at the end"
            raise self.place(math_type[1]).error(what, "write FLOAT, or remove the line")


def _known(form: str) -> tuple[str, ...]:
    fields = facts("caffe")["fields"][form]
    return (*fields["read"], *fields["passed"])


@dataclass(frozen=True)
class _Types:
    """What a layer returns forward and backward, and the words that say so.

    Args:
        forward: `low` or `fp32`.
        backward: likewise.
        why: the fields that decide.
    """

    forward: str
    backward: str
    why: str = dataclasses.field(compare=False)

    def actions(self) -> dict[str, Any]:
        """The actions of a rule. FP32 arithmetic stands between 16-bit inputs and outputs."""
        math = {"math": "fp32"} if self.forward == "low" else {}
        backward = {"precision": self.backward, "math": "fp32"}
        return {"precision": self.forward, **math, "backward": backward, "why": self.why}


@dataclass(frozen=True)
class _Layer:
    """A layer that is trained.

    Args:
        name: of it.
        is_loss: whether it computes a loss.
        types: that it has.
        line: where it begins.
    """

    name: str
    is_loss: bool
    types: _Types
    line: int


class _Net:
    """Makes rules of a net.

    Args:
        net: its message.
        notes: takes what is no rule.
    """

    def __init__(self, net: Message, notes: list[str]) -> None:
        self.net, self.notes = net, notes
        for name in ("default_forward_math", "default_backward_math"):
            net.check_math(name)
        forward, backward = net.type("default_forward_type"), net.type("default_backward_type")
        messages = [net.text_of(item[1]) for item in (forward, backward) if item is not None]
        why = ", ".join(messages) or "FLOAT is the default of default_forward_type and default_backward_type"
        self.default = _Types(forward[0] if forward else "fp32", backward[0] if backward else "fp32", why)

    def rules(self) -> dict[str, Any]:
        """The sections of a rule file."""
        layers = []
        for field in named(self.net.fields, "layer"):
            if not isinstance(field.value, tuple):
                raise self.net.place(field).error(f"it is {field.value}", "write layer { … }")
            layers.append(Message("layer", self.net.file, field.fields, field.line).checked())
        for layer in layers:
            for name in ("forward_math", "backward_math"):
                layer.check_math(name)
        if self.net.one("default_cudnn_math_override") is not None:
            self.notes.append("default_cudnn_math_override: which kernels are called is up to the library")
        trained = [rule for layer in layers if (rule := self.layer(layer)) is not None]
        self.check_names(trained)
        self.tell_training([layer for layer in layers if not _tests_only(layer)])
        kept, wide = facts("caffe")["kept"], facts("caffe")["wide"]
        rules = [
            {"match": {}, **self.default.actions()},
            *self.named_once(trained),
            {
                "match": {"family": kept},
                "precision": "keep",
                "why": "its type is named by the model or by what it works on",
            },
            {"match": {"family": wide}, "precision": "fp32", "why": "no layer of NVCaffe computes it"},
        ]
        return {"rules": rules, "loss_scale": self.scale()}

    def layer(self, layer: Message) -> _Layer | None:
        """A layer that is trained, and notes of what is told of it; `None` for one that is not."""
        forward, backward = layer.type("forward_type"), layer.type("backward_type")
        types: dict[str, list[str]] = facts("caffe")["layers"]
        name, kind = layer.word("name"), layer.word("type")
        place = f"{self.net.file.name}:{layer.line}"
        if kind not in (known for names in types.values() for known in names):
            close = nearest(kind, [known for names in types.values() for known in names])
            near = f" ({close})" if close.startswith("did") else ""
            self.notes.append(f"layer '{name}' ({place}): '{kind}' is no layer type of NVCaffe's own{near}")
        if layer.one("cudnn_math_override") is not None:
            self.notes.append(f"layer '{name}' ({place}): cudnn_math_override has no counterpart")
        fields = [layer.text_of(item[1]) for item in (forward, backward) if item is not None]
        if kind in types["data"] or layer.one("transform_param") is not None or _tests_only(layer):
            if fields:
                what = "is for tests alone" if _tests_only(layer) else "makes the batch, which the step takes as it is"
                self.notes.append(f"layer '{name}' {what}: {', '.join(fields)} is no rule")
            return None
        own = _Types(
            forward[0] if forward else self.default.forward,
            backward[0] if backward else self.default.backward,
            ", ".join(fields),
        )
        if not name and own != self.default:
            mark = Mark(str(self.net.file), layer.line, key="layer")
            raise mark.error("it has types of its own and no name", "name it")
        return _Layer(name, kind in types["losses"], own, layer.line)

    def check_names(self, layers: Sequence[_Layer]) -> None:
        """Refuses layers of one name that are to have different types: no rule can tell them apart.

        Raises:
            RuleError: names the line of the later one.
        """
        first: dict[str, _Layer] = {}
        for layer in layers:
            other = first.setdefault(layer.name, layer)
            if layer.name and layer.types != other.types:
                place = Mark(str(self.net.file), layer.line, key="layer")
                what = f"a layer of the same name, '{layer.name}', has other types at line {other.line}"
                raise place.error(what, "give each a name of its own, here and in the model")

    def named_once(self, layers: Sequence[_Layer]) -> list[dict[str, Any]]:
        """A rule for each name of its own types. The loss function stands for the loss layers where all agree."""
        losses = [layer for layer in layers if layer.is_loss]
        agree = all(layer.types == losses[0].types for layer in losses)
        if not agree:
            self.notes.append("the loss layers differ in their types: a rule on '<loss_fn>' is yours to write")
        rules: dict[str, dict[str, Any]] = {}
        for layer in layers:
            if layer.types != self.default:
                name = glob.escape(layer.name)
                modules = [name, f"*.{name}", *([_LOSS_FUNCTION] if layer.is_loss and agree else [])]
                rules.setdefault(layer.name, {"match": {"module": modules}, **layer.types.actions()})
        return list(rules.values())

    def tell_training(self, layers: Sequence[Message]) -> None:
        """Notes what layers say of the loss and of the rates of their parameters, which is no rule."""
        weighted = [layer.text_of(field) for layer in layers for field in named(layer.fields, "loss_weight")]
        if weighted:
            self.notes.append(f"the loss function weighs its terms: {', '.join(weighted)}")
        rated = [
            layer.word("name")
            for layer in layers
            if {"lr_mult", "decay_mult"} & {field.name for one in named(layer.fields, "param") for field in one.fields}
        ]
        if rated:
            more = f" and {len(rated) - 3} more" if len(rated) > 3 else ""
            self.notes.append(
                f"lr_mult and decay_mult of {', '.join(rated[:3])}{more} are factors of lr and weight_decay in a"
                " param_group of the optimizer"
            )

    def scale(self) -> dict[str, Any]:
        """The section `loss_scale`."""
        coefficient = self.net.number("global_grad_scale", 1.0)
        field = self.net.one("global_grad_scale")
        if field is not None and not LEAST <= coefficient <= MOST:
            raise self.net.place(field).error(f"it is {field.value}", "write a positive number of FP32's normal range")
        if self.net.flag("global_grad_scale_adaptive"):
            self.notes.append(
                "global_grad_scale_adaptive: K * 4 / max|g|, as from NVCaffe 0.17.1 on; `formula: l2` is the K * norm"
                " of those before"
            )
            return {"mode": "nvcaffe", "coefficient": coefficient, "formula": "max"}
        return {"mode": "static", "init": coefficient} if coefficient != 1.0 else {"mode": "none"}


def _of_solver(solver: Message, notes: list[str]) -> dict[str, Any]:
    """The sections of a rule file that a solver and its net ask for; notes what is for the optimizer and the step."""
    stored = solver.type("solver_data_type")
    low = stored is not None and stored[0] == "low"
    weights = {"master": "low", "rounding": "nearest", "overflow": "clip"} if low else {"master": "fp32"}
    net = _net_of(solver, notes)
    fields = [solver.text_of(field) for field in solver.fields if field.name in _FOR_THE_STEP]
    if fields:
        notes.append(f"no rules, but for the optimizer, its scheduler and the step: {', '.join(fields)}")
    return {**(_Net(net, notes).rules() if net is not None else {}), "weights": weights}


def _net_of(solver: Message, notes: list[str]) -> Message | None:
    """The net that is trained: written out in the solver, or in a file beside it, or a folder above."""
    fields = [field for name in _NETS if (field := solver.one(name)) is not None]
    if not fields:
        return None
    if len(fields) > 1:
        what = f"{fields[0].name} at line {fields[0].line} says already which net is trained"
        raise solver.place(fields[1]).error(what, "name one net, as NVCaffe asks for")
    (field,) = fields
    if field.name in _NETS[:2]:
        return Message("net", solver.file, field.fields, field.line).checked()
    path, folder = solver.word(field.name), solver.file.parent
    if not path:
        return None
    places = [folder / path, folder / Path(path).name, *(above / path for above in folder.absolute().parents)]
    here = next((place for place in places if place.is_file()), None)
    if here is None:
        notes.append(f"{field.name}: {path} is not there; import it for the types of its layers")
        return None
    notes.append(f"the types of layers are those of {here.name}")
    return Message.read(here)


def _tests_only(layer: Message) -> bool:
    """Whether a layer is in no net that is trained: all that includes it is for tests, or training excludes it."""
    included = [_phase(rule) for rule in named(layer.fields, "include")]
    excluded = [_phase(rule) for rule in named(layer.fields, "exclude") if len(rule.fields) == 1]
    return (bool(included) and all(phase == "TEST" for phase in included)) or "TRAIN" in excluded


def _phase(rule: Field) -> str:
    phase = next((field.value for field in named(rule.fields, "phase")), "")
    return {"0": "TRAIN", "1": "TEST"}.get(str(phase), str(phase))
