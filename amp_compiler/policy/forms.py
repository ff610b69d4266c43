"""Types of what stands in a rule file, as pydantic takes them: texts, types, devices and bounds, alone or in a list."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from amp_compiler.ir.dtypes import LowName

COMPARISON = r"^\s*(<=|>=|==|!=|<|>)\s*[0-9]*\.?[0-9]+([eE][-+]?[0-9]+)?\s*$"

Text = Annotated[str, Field(min_length=1)]
Scalar = bool | int | float | str | None
Float = Literal[LowName, "fp32", "fp64", "float32", "float64"]
Device = Literal["cpu", "cuda", "xpu", "mps", "hpu", "xla", "mtia", "maia", "ipu", "meta", "privateuseone", "onnx"]

PartName = Literal["layer_norm", "rms_norm", "gelu", "local_response_norm", "multilabel_soft_margin_loss"]


def _as_list(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


def _listed(item: Any) -> Any:
    """A list, or one item where a list may stand: the two mean the same."""
    alone_or_listed = BeforeValidator(_as_list, json_schema_input_type=item | list[item])
    return Annotated[list[item], Field(min_length=1), alone_or_listed]


Texts, Floats, LowTypes, Devices, Parts = map(_listed, (Text, Float, LowName, Device, PartName))
Attributes = Annotated[dict[Text, Scalar | list[Scalar]], Field(min_length=1)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Bound = Annotated[str, Field(pattern=COMPARISON)] | Annotated[float, Field(ge=0, allow_inf_nan=False)]


def optional(description: str) -> Any:
    """A key that may be left out, which gives `None`.

    The field's own type does not say so, because an empty `family:` is a mistake and not a condition left out.
    """
    return Field(None, description=description)


class Strict(BaseModel):
    """Base of all: no unknown key, no silent conversion, no change afterwards."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
