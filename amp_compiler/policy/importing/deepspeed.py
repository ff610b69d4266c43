"""A JSON configuration of DeepSpeed as a rule file: its sections `fp16` and `bf16`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from amp_compiler.policy.exclusions import Imported
from amp_compiler.policy.importing.facts import LEAST, MOST, facts, read_text
from amp_compiler.policy.loader import load_rules
from amp_compiler.policy.marks import Mark, nearest
from amp_compiler.policy.yaml_tree import Tree, parse_yaml

PRESET = "deepspeed"
_OLD = "bfloat16"  # read where there is no bf16
_BESIDE = ("torch_autocast", "amp")
_READ = ("fp16", "bf16", "bfloat16", "amp", "torch_autocast", "zero_optimization", "gradient_clipping",
         "gradient_accumulation_steps", "optimizer", "data_types")  # fmt: skip
_OWN = (*_READ[:7], "train_batch_size", "train_micro_batch_size_per_gpu")  # no option of a converter has such a name


def is_deepspeed(path: Path) -> bool:
    """Whether a JSON file is a mapping with a key that only DeepSpeed's have.

    Raises:
        RuleError: the file cannot be read.
    """
    text = read_text(path)
    return text.lstrip().startswith("{") and any(f'"{key}"' in text for key in _OWN)


def import_deepspeed(path: Path, *, extends: str | None = None) -> Imported:
    """Make a rule file of a configuration.

    What the step takes (clipping, accumulation) and what has no counterpart are notes.

    Args:
        path: the JSON file.
        extends: what the rules stand on; `None` for the preset `deepspeed`.

    Raises:
        RuleError: it is no JSON, a key of `fp16` or `bf16` is unknown or has no fitting value (`"auto"` neither), or no
            mixed precision is asked for.

    Example:
        ```python
        Path("ds_config.json").write_text('{"bf16": {"enabled": true}}')
        print(import_deepspeed(Path("ds_config.json")).to_text())
        ```
    """
    imported = _Config(path, _parsed(path)).imported(extends)
    load_rules(imported.rules)
    return imported


def _parsed(path: Path) -> Tree:
    """The JSON with the lines of its keys, for which it is read as the YAML that it is too."""
    text = read_text(path)
    try:
        json.loads(text)
    except (ValueError, RecursionError) as cause:
        line = getattr(cause, "lineno", None)
        raise Mark(str(path), line).error(f"it is no JSON: {cause}", "correct the syntax there") from cause
    return parse_yaml(text.replace("\t", " "), str(path))  # YAML takes no tabs, and a string of JSON has none


class _Config:
    """Reads a configuration.

    Args:
        path: its file.
        tree: of its JSON.
    """

    def __init__(self, path: Path, tree: Tree) -> None:
        self.file, self.tree = str(path), tree
        self.notes: list[str] = []
        if not isinstance(tree.value, dict):
            raise self.place().error("it is no mapping", "name a configuration of DeepSpeed")
        self.data: dict[str, Any] = dict(tree.plain())
        self.old = self.data.get("bf16") is None and _OLD in self.data
        if self.old:
            self.data["bf16"] = self.data[_OLD]
        elif _OLD in self.data:
            self.notes.append(f"'{_OLD}' (line {self.place(_OLD).line}) is not read beside 'bf16', as in DeepSpeed")

    def imported(self, extends: str | None) -> Imported:
        """The rules and notes."""
        fp16, bf16 = self.section("fp16"), self.section("bf16")
        if fp16["enabled"] and bf16["enabled"]:
            raise self.place("bf16", "enabled").error("fp16 and bf16 are both enabled", "enable one of them")
        if fp16["enabled"]:
            rules = self.fp16(fp16)
        elif bf16["enabled"]:
            rules = self.bf16(bf16)
        else:
            where = self.place("fp16", "enabled") if "fp16" in self.data else self.place()
            hint = 'enable "fp16" or "bf16"; torch_autocast is the preset default, amp is apex-o1 to apex-o3'
            raise where.error("it asks for no mixed precision of DeepSpeed's own", hint)
        rules = {"version": 1, **rules, **({"extends": extends} if extends else {})}
        named = "fp16" if fp16["enabled"] else "bf16"
        self.tell_step(named)
        for name in _BESIDE:
            options = self.data.get(name)
            if isinstance(options, dict) and options.get("enabled"):
                line = self.place(name).line
                self.notes.append(
                    f"{name} (line {line}) stands beside {named}, of which the rules are, and is not read"
                )
        self.tell_rest()
        return Imported(rules, self.notes)

    def place(self, *keys: str) -> Mark:
        """Where a key stands."""
        keys = tuple(_OLD if key == "bf16" and self.old else key for key in keys)
        at = self.tree.locate(keys, key=True) if keys else self.tree
        return Mark(self.file, at.line, at.column, ".".join(keys))

    def section(self, name: str) -> dict[str, Any]:
        """A section's settings, those that are not given by their defaults.

        Raises:
            RuleError: it has a key that DeepSpeed does not know, or a value of another type.
        """
        options = self.data.get(name)
        options = {} if options is None else options
        if not isinstance(options, dict):
            raise self.place(name).error("it is no mapping", 'write {"enabled": true}')
        defaults: dict[str, Any] = facts("deepspeed")["sections"][name]
        for key, value in options.items():
            if key not in defaults:
                raise self.place(name, key).error(f"DeepSpeed has no {name} option '{key}'", nearest(key, defaults))
            self.check(name, key, value, defaults[key])
        return {**defaults, **options}

    def check(self, section: str, key: str, value: Any, default: Any) -> None:
        """Refuses what is of another type than the default."""
        place = self.place(section, key)
        if value == "auto":
            hint = f"write the value that the Trainer would fill in, such as {str(default).lower()}"
            raise place.error("'auto' is for the Trainer of transformers to fill in", hint)
        if isinstance(default, bool):
            if not isinstance(value, bool):
                raise place.error(f"it is {value!r}", "write true or false")
        else:
            _number(place, value, math.isfinite, "a number")
            if isinstance(default, int) and value != int(value):
                raise place.error(f"it is {value!r}", "write a whole number")

    @property
    def stage(self) -> int:
        """The stage of ZeRO, 0 without it."""
        zero = self.data.get("zero_optimization")
        if not (zero is None or isinstance(zero, (bool, dict))):
            raise self.place("zero_optimization").error("it is no mapping", 'write {"stage": 2}')
        stage = zero.get("stage", 0) if isinstance(zero, dict) else int(zero is True)
        if stage == "auto" or isinstance(stage, bool) or not isinstance(stage, int) or not 0 <= stage <= 3:
            raise self.place("zero_optimization", "stage").error(f"it is {stage!r}", "write 0, 1, 2 or 3")
        return stage

    def fp16(self, options: dict[str, Any]) -> dict[str, Any]:
        """What the section `fp16` asks for."""
        if options["auto_cast"]:
            self.notes.append("fp16.auto_cast: batches are cast where the first layer reads them, always")
        scale = float(options["loss_scale"])
        if scale < 0:
            raise self.place("fp16", "loss_scale").error(f"it is {scale:g}", "write 0 for a dynamic scale, or a number")
        if scale and not LEAST <= scale <= MOST:
            raise self.place("fp16", "loss_scale").error(f"it is {scale:g}", "write a number of FP32's normal range")
        section = {"mode": "static", "init": scale} if scale else self.dynamic(options)
        return {"extends": PRESET, "loss_scale": section, **self.weights("fp16", options)}

    def dynamic(self, options: dict[str, Any]) -> dict[str, Any]:
        """The dynamic scale of the section `fp16`: its scaler counts in another way without ZeRO."""
        power = self.whole(options, "initial_scale_power", -126)
        if power > 127:
            raise self.place("fp16", "initial_scale_power").error("2**initial_scale_power is no fp32", "write 16")
        least = self.whole(options, "min_loss_scale", 1)
        section = {
            "mode": "dynamic",
            "init": float(2**power),
            "growth_interval": self.whole(options, "loss_scale_window", 1),
            "growth_delay": 1,
            "min": float(least),
        }
        if least & (least - 1):
            self.notes.append(f"fp16.min_loss_scale: {least} is no power of two, the scale stays at the next one above")
        if 2**power < least:
            self.notes.append(
                f"fp16.initial_scale_power: 2**{power} is below min_loss_scale: the scale begins at {least}, and not"
                " only behind the first overflow"
            )
        if self.stage:
            count = {"hysteresis": self.whole(options, "hysteresis", 1)}
            return {**section, **count, "consecutive_hysteresis": options["consecutive_hysteresis"], "patience": 1}
        keys = [key for key in ("hysteresis", "consecutive_hysteresis") if key in (self.data["fp16"] or {})]
        if keys:
            self.notes.append(
                f"fp16.{keys[0]}: without ZeRO DeepSpeed's optimizers know no hysteresis, nor do the rules"
            )
        return {**section, "hysteresis": 1, "patience": 20}

    def whole(self, options: dict[str, Any], key: str, least: int) -> int:
        """A whole number of the section `fp16`."""
        number = _number(
            self.place("fp16", key), options[key], lambda it: it >= least, f"a whole number from {least} on"
        )
        return int(number)

    def bf16(self, options: dict[str, Any]) -> dict[str, Any]:
        """What the section `bf16` asks for: whether gradients are looked at depends on the stage of ZeRO too."""
        checks = options["check_grad_overflow"] and self.stage in (1, 2)
        if self.stage in (1, 2) and "check_grad_overflow" not in (self.data["bf16"] or {}):
            self.notes.append("bf16.check_grad_overflow is not given: true as from DeepSpeed 0.19.3 on, false before")
        elif options["check_grad_overflow"] and not checks:
            self.notes.append(
                f"bf16: at ZeRO stage {self.stage} DeepSpeed looks for no overflow; `check_finite: true` skips"
                " steps with gradients that are not finite"
            )
        if options["immediate_grad_update"]:
            self.notes.append("bf16.immediate_grad_update has no counterpart: gradients are never stored a second time")
        return {
            "extends": PRESET,
            "loss_scale": {"mode": "none", "check_finite": checks},
            **self.weights("bf16", options),
        }

    def weights(self, section: str, options: dict[str, Any]) -> dict[str, Any]:
        """The section `weights`: only where it is not the preset's."""
        if options.get("bf16_optimizer_states"):
            self.notes.append("bf16.bf16_optimizer_states: Adam's moments stay FP32; a momentum of SGD has 16 bits")
        key = f"{section}_master_weights_and_grads"
        if not options[key]:
            return {}
        self.notes.append(f"{section}.{key}: rounding to nearest loses small updates; see `weights.rounding`")
        return {"weights": {"master": "low", "rounding": "nearest"}}

    def tell_step(self, dtype: str) -> None:
        """Notes what is an argument of `amp.training_step`."""
        taken = [f'dtype="{dtype}"']
        for key, name in (("gradient_clipping", "clip_norm"), ("gradient_accumulation_steps", "accumulate")):
            value = self.data.get(key)
            if value == "auto":
                self.notes.append(f"{key} is 'auto', for the Trainer to fill in; the step takes {name}=")
            elif value is not None and not (key == "gradient_clipping" and value == 0):
                if name == "accumulate":
                    known = "a whole number from 1 on"
                    value = int(_number(self.place(key), value, lambda it: it >= 1 and it == int(it), known))
                else:
                    _number(self.place(key), value, lambda it: it > 0, "a positive number")
                taken.append(f"{name}={value!r}")
        self.notes.append(f"the step takes: {', '.join(taken)}")
        optimizer = self.data.get("optimizer")
        if isinstance(optimizer, dict):
            self.notes.append(f"optimizer: make a torch.optim object of {optimizer.get('type')!r} and its params")

    def tell_rest(self) -> None:
        """Notes what has no counterpart, and what is not known."""
        if self.stage:
            self.notes.append(
                f"zero_optimization: stage {self.stage} parts states between processes, which no rule does"
            )
        types = self.data.get("data_types")
        if isinstance(types, dict) and types.get("grad_accum_dtype") not in (None, "fp32"):
            self.notes.append("data_types.grad_accum_dtype: gradients of several batches are added in FP32")
        known = (*_READ, *facts("deepspeed")["passed"])
        for key, at in self.tree.keys.items():
            if key not in known:
                hint = nearest(key, known).removesuffix("?")
                near = f" ({hint}?)" if hint.startswith("did") else ""
                what = f"'{key}' (line {at.line}) is no key that is known of DeepSpeed"
                self.notes.append(f"{what}, and is passed over{near}")


def _number(mark: Mark, value: Any, good: Callable[[float], bool], must: str) -> float:
    """A number that fits, as it was given."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not good(value):
        raise mark.error(f"it is {value!r}", f"write {must}")
    return value
