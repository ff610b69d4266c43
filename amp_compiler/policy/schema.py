"""The shape of a rule file as pydantic models: what `json_schema` is made from and what every file is checked against.

Only shapes and plain words are checked here. What needs the op table or another file (families, op globs, `extends`) is
checked by `loader`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag, create_model, model_validator

from amp_compiler.ir.arithmetic import Format, Scaling, Word
from amp_compiler.ir.dtypes import LowName
from amp_compiler.policy.forms import Finite, Strict, Text
from amp_compiler.policy.forms import optional as _optional
from amp_compiler.policy.matchers import MATCHERS


def _whole(value: Any) -> Any:
    """`Literal[1]` alone takes `true` and `1.0`, which are equal to it."""
    if type(value) is not int:
        raise ValueError("the version is the whole number 1")
    return value


_Conditions: Any = create_model(
    "_Conditions",
    __base__=Strict,
    **{key: (kind.form, _optional(kind.about)) for key, kind in MATCHERS.items()},  # type: ignore[call-overload]
)


class MatchModel(_Conditions):  # type: ignore[misc]
    """The conditions of a rule: all that are given must hold; of a list, one item must."""


class MathModel(Strict):
    """Products of FP8 operands, as `ir.arithmetic.Fp8` explains them; `math: fp8` leaves all to their defaults."""

    format: Format = _optional("e4m3, or hybrid: e5m2 for incoming gradients")
    scaling: Scaling = _optional("what shares a scale: the tensor, a row, or 32 numbers; delayed: of steps before")
    history: Annotated[int, Field(strict=True, ge=1, le=1024)] = _optional("steps whose amaxes a delayed scale is of")
    power_of_2: Annotated[bool, Field(strict=True)] = _optional("scales are rounded down to powers of two")
    weight_gradient: Literal["fp8", "low"] = _optional("operands of the product that makes the weight's gradient")
    unfit: Literal["low", "refuse"] = _optional("what a node does that has no such product")

    @model_validator(mode="after")
    def _agrees(self) -> MathModel:
        if self.power_of_2 is False and self.scaling == "mx":
            raise ValueError("scales of mx are powers of two")
        if self.history is not None and self.scaling != "delayed":
            raise ValueError("history is for scaling: delayed")
        return self


Arithmetic = Annotated[
    Annotated[Literal["fp32", "float32", Word, LowName], Tag("word")] | Annotated[MathModel, Tag("fp8")],
    Discriminator(lambda said: "fp8" if isinstance(said, (dict, MathModel)) else "word"),
]


class BackwardModel(Strict):
    """What the gradients of a node run in."""

    precision: Literal["low", "fp32"] = _optional("precision of the gradients")
    math: Arithmetic = _optional("type that the gradients are computed in: fp32, or fp8")


class RuleModel(Strict):
    """One rule: conditions and what to do where they hold."""

    match: MatchModel = Field(description="conditions; {} matches every node")
    precision: Literal["low", "fp32", "widest", "between", "follow", "keep"] = _optional("what the node runs in")
    math: Arithmetic = _optional("type that a node computes in between 16-bit inputs and outputs: fp32, or fp8")
    backward: BackwardModel = _optional("precision of the gradients, where it differs")
    refuse: Text = _optional("no precision: a model that holds such a node is an error, and this is its hint")
    why: Text = _optional("the reason, shown with every decision of this rule")


class LossScaleModel(Strict):
    """How gradients are kept inside the range of fp16."""

    mode: Literal["none", "static", "dynamic", "norm_adaptive", "nvcaffe"] = _optional("kind of loss scale")
    init: Annotated[Finite, Field(gt=0)] = _optional("first scale")
    growth_factor: Annotated[Finite, Field(gt=1)] = _optional("factor after growth_interval good steps")
    backoff_factor: Annotated[Finite, Field(gt=0, lt=1)] = _optional("factor after an overflow")
    growth_interval: Annotated[int, Field(ge=1)] = _optional("good steps until the scale grows")
    min: Annotated[Finite, Field(gt=0)] = _optional("floor of the scale")
    max: Annotated[Finite, Field(gt=0)] = _optional("ceiling of the scale")
    hysteresis: Annotated[int, Field(ge=1)] = _optional("overflows until the scale backs off")
    consecutive_hysteresis: bool = _optional("whether those must be in a row; else they add up until the scale grows")
    growth_delay: Annotated[int, Field(ge=0)] = _optional(
        "good steps, after an overflow too, that do not count for growth"
    )
    patience: Annotated[int, Field(ge=1)] = _optional("overflows in a row at the floor until training stops")
    target_norm: Annotated[Finite, Field(gt=0)] = _optional("norm_adaptive: norm that scaled gradients are brought to")
    coefficient: Annotated[Finite, Field(gt=0)] = _optional("nvcaffe: global_grad_scale, the K of its formulas")
    formula: Literal["max", "l2"] = _optional("nvcaffe: K * 4 / max|g| (0.17.1 to 0.17.4) or K * norm (before)")
    check_finite: bool = _optional("none: skip steps with gradients that are not finite all the same")


class WeightsModel(Strict):
    """How the optimizer holds the parameters."""

    master: Literal["fp32", "low"] = _optional("type of the weights that the optimizer updates")
    rounding: Literal["nearest", "stochastic", "kahan"] = _optional(
        "how an update is rounded where there is no FP32 master"
    )
    overflow: Literal["clip", "skip"] = _optional(
        "where an update makes a number that a weight or momentum without an FP32 master cannot hold:"
        " store the largest finite one, or skip the step"
    )


class KeepModel(Strict):
    """Numbers that stay as captured whatever the rules say."""

    sizes: bool = _optional("what becomes a whole number, a size, an index, a coordinate or is compared")
    angles: bool = _optional("what is made of positions alone, up to a sine or another function with bounds")
    running_sums: bool = _optional("ONNX: what a state of Loop or Scan is added up by")
    powers: bool = _optional("ONNX in FP16: powers, summed squares and exponentials, up to what brings them back")
    differences: bool = _optional("ONNX: differences of nearly equal numbers, with what makes their operands")
    quantized: bool = _optional("ONNX: what quantises, what stands beside it, and its scales")
    batch_norm: bool = _optional("parameters and running statistics of batch norm, beside 16-bit data")
    normalization: bool = _optional("parameters of other norms, beside 16-bit data")


class ReduceModel(Strict):
    """How gradients are summed over the processes that train one model."""

    precision: Literal["low", "fp32"] = _optional("type of the sums: low, as the gradients are made; or fp32")
    bucket_mb: Annotated[Finite, Field(gt=0)] = _optional("megabytes (2**20 bytes) of gradients that are sent together")
    shard: Literal["none", "update"] = _optional(
        "what is split over the processes: nothing, or masters, moments and the update of weights that are read in 16"
        " bits alone"
    )


class RuleFileModel(Strict):
    """A rule file of amp_compiler."""

    model_config = ConfigDict(title="amp_compiler rules")

    version: Annotated[Literal[1], BeforeValidator(_whole)] = Field(description="version of the rule language")
    extends: Text = _optional("a built-in preset, or a path relative to this file")
    allow: Annotated[list[Text], Field(min_length=1)] = _optional("families and op globs to run low")
    whitelist: Annotated[list[Text], Field(min_length=1)] = _optional("another name of allow")
    deny: Annotated[list[Text], Field(min_length=1)] = _optional("families and op globs to run in FP32")
    blacklist: Annotated[list[Text], Field(min_length=1)] = _optional("another name of deny")
    rules: list[RuleModel] = _optional("rules, read top to bottom; the last match wins")
    loss_scale: LossScaleModel = _optional("loss scale, merged over the extended file's")
    weights: WeightsModel = _optional("weights, merged over the extended file's")
    keep: KeepModel = _optional("numbers that stay as captured, merged over the extended file's")
    buffers: Literal["always", "skip_nonfinite"] = _optional(
        "amp.compile: whether a forward writes its buffers (the statistics of BatchNorm) always, or where all that it"
        " returns and writes is finite; a training step skips them with the batch"
    )
    reduce: ReduceModel = _optional("sums of gradients over processes, merged over the extended file's")


MODELS: dict[str, type[Strict]] = {
    "": RuleFileModel,
    "rules": RuleModel,
    "match": MatchModel,
    "backward": BackwardModel,
    "math": MathModel,
    "loss_scale": LossScaleModel,
    "weights": WeightsModel,
    "keep": KeepModel,
    "reduce": ReduceModel,
}


def known_keys(path: tuple[str | int, ...]) -> tuple[str, ...]:
    """The keys that may stand in the mapping at `path`, for naming the nearest one."""
    names = [part for part in path if isinstance(part, str)]
    model = MODELS.get(names[-1] if names else "")
    return () if model is None else tuple(model.model_fields)
