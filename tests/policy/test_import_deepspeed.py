"""Configurations of DeepSpeed as rule files, and what cannot be one told by line."""

import json
from pathlib import Path

import pytest
from ruamel.yaml import YAML
from test_import_nvcaffe import imported as imported_file

from amp_compiler.errors import RuleError
from amp_compiler.policy.importing.facts import facts
from amp_compiler.policy.loader import load_rules

LISTS = Path(__file__).parent.parent / "rules" / "lists"
FACTS = YAML(typ="safe").load(LISTS / "deepspeed.yaml")
ON = {"enabled": True}


def imported(tmp_path, config, **options):
    text = config if isinstance(config, str) else json.dumps(config, indent=1)
    return imported_file(tmp_path, text, "ds_config.json", **options)


def test_the_preset_and_the_reader_are_held_to_the_facts():
    assert load_rules("deepspeed").loss_scale == FACTS["scaler"]
    assert facts("deepspeed")["sections"] == {name: FACTS[name] for name in ("fp16", "bf16")}
    assert facts("deepspeed")["version"] == FACTS["version"]


@pytest.mark.parametrize(
    ("fp16", "stage", "expected"),
    [
        ({}, 2, FACTS["scaler"]),
        ({"loss_scale": 128}, 2, {"mode": "static", "init": 128}),
        ({"hysteresis": 4, "consecutive_hysteresis": True}, 3,
         FACTS["scaler"] | {"hysteresis": 4, "consecutive_hysteresis": True}),
        ({"initial_scale_power": 32, "loss_scale_window": 100, "min_loss_scale": 64}, 1,
         FACTS["scaler"] | {"init": 2**32, "growth_interval": 100, "min": 64}),
        # without ZeRO its optimizers back off at every overflow, and never raise
        ({"hysteresis": 4}, 0, FACTS["scaler"] | {"hysteresis": 1, "patience": 20}),
    ],
)  # fmt: skip
def test_the_section_fp16_is_a_loss_scale(fp16, stage, expected, tmp_path):
    rules, result = imported(tmp_path, {"fp16": ON | fp16, "zero_optimization": {"stage": stage}})
    assert rules.loss_scale == expected
    assert 'the step takes: dtype="fp16"' in result.notes
    assert any("know no hysteresis" in note for note in result.notes) == (stage == 0)


@pytest.mark.parametrize(
    ("bf16", "stage", "checks", "message"),
    [
        ({}, 2, True, "not given: true as from DeepSpeed 0.19.3 on"),
        ({"check_grad_overflow": False}, 2, False, ""),
        ({"check_grad_overflow": True}, 1, True, ""),
        ({}, 3, False, "looks for no overflow"),
        ({"check_grad_overflow": True}, 0, False, "looks for no overflow"),
    ],
)
def test_the_section_bf16_says_whether_gradients_are_looked_at(bf16, stage, checks, message, tmp_path):
    rules, result = imported(tmp_path, {"bf16": ON | bf16, "zero_optimization": {"stage": stage}})
    assert rules.loss_scale == {"mode": "none", "check_finite": checks}
    notes = "\n".join(result.notes)
    assert message in notes and bool(message) == ("bf16" in notes.replace('dtype="bf16"', ""))


def test_masters_in_16_bits_and_what_stands_beside_the_sections(tmp_path):
    config = {
        "bfloat16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True},
        "zero_optimization": {"stage": 1}, "gradient_clipping": 0.5, "gradient_accumulation_steps": 8,
        "optimizer": {"type": "AdamW", "params": {}}, "data_types": {"grad_accum_dtype": "bf16"}, "scheduler": {},
        "train_batch_sise": 4,
    }  # fmt: skip
    rules, result = imported(tmp_path, config)
    assert (rules.weights["master"], rules.weights["rounding"]) == ("low", "nearest")
    notes = "\n".join(result.notes)
    assert 'the step takes: dtype="bf16", clip_norm=0.5, accumulate=8' in notes
    for word in ("bf16_optimizer_states", "AdamW", "grad_accum_dtype", "stage 1"):
        assert word in notes
    assert "'train_batch_sise' (line 20)" in notes and "did you mean 'train_batch_size'" in notes
    assert all(f"# {note}" in result.to_text() for note in result.notes)


def test_extends_stands_in_the_place_of_the_preset(tmp_path):
    _, result = imported(tmp_path, {"fp16": ON}, extends="fast")
    assert result.rules["extends"] == "fast"


def test_of_both_names_of_bf16_deepspeed_reads_the_new_one(tmp_path):
    rules, result = imported(tmp_path, {"bf16": ON, "bfloat16": {"enabled": False}})
    assert rules.loss_scale["mode"] == "none" and any("'bfloat16' (line 5)" in note for note in result.notes)
    with pytest.raises(RuleError, match="no mixed precision"):
        imported(tmp_path, {"bf16": {"enabled": False}, "bfloat16": ON})
    rules, _ = imported(tmp_path, {"bf16": None, "bfloat16": ON})
    assert rules.loss_scale["mode"] == "none"


@pytest.mark.parametrize("name", ["torch_autocast", "amp"])
def test_what_is_asked_for_beside_the_sections_is_told(name, tmp_path):
    _, result = imported(tmp_path, {"fp16": ON, name: ON})
    (note,) = [note for note in result.notes if note.startswith(name)]
    assert "(line 5)" in note and "beside fp16" in note
    _, result = imported(tmp_path, {"fp16": ON, name: {"enabled": False}})
    assert not any(name in note for note in result.notes)


def test_a_scale_that_begins_below_its_minimum_is_told(tmp_path):
    fp16 = ON | {"initial_scale_power": 1, "min_loss_scale": 8}
    _, result = imported(tmp_path, {"fp16": fp16, "zero_optimization": {"stage": 1}})
    assert "2**1 is below min_loss_scale: the scale begins at 8" in "\n".join(result.notes)


def test_tabs_between_values_are_json(tmp_path):
    rules, _ = imported(tmp_path, '{\n\t"fp16": {\n\t\t"enabled": true,\t"loss_scale": 8\n\t}\n}')
    assert rules.loss_scale == {"mode": "static", "init": 8}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"fp16": {"enabled": "auto"}}, r":3:.*'auto' is for the Trainer.*fp16\.enabled.*false"),
        ({"fp16": ON | {"loss_scal": 0}}, r":4:.*no fp16 option 'loss_scal'.*did you mean 'loss_scale'"),
        ({"fp16": ON, "bf16": ON}, "both enabled"),
        ({"fp16": {"enabled": False}}, "no mixed precision"),
        ({"fp16": {"enabled": 1}}, "write true or false"),
        ({"fp16": ON | {"loss_scale": -1}}, r"fp16\.loss_scale.*write 0"),
        ({"fp16": ON | {"loss_scale_window": 0}}, "a whole number from 1"),
        ({"fp16": ON | {"initial_scale_power": 200}}, "no fp32"),
        ({"fp16": ON, "zero_optimization": {"stage": 4}}, "write 0, 1, 2 or 3"),
        ({"fp16": ON, "gradient_clipping": "much"}, "gradient_clipping"),
        ({"fp16": [1]}, "no mapping"),
        ({"fp16": ON, "gradient_accumulation_steps": 2.5}, "gradient_accumulation_steps.*a whole number from 1"),
        ({"fp16": ON | {"loss_scale": 1e300}}, r"fp16\.loss_scale.*a number of FP32's"),
        ({"torch_autocast": ON}, "no mixed precision.*the preset default"),
        ('{"fp16": {"enabled": true}, "fp16": {}}', "a second time"),
        ('{"fp16": {"enabled": true}', r":1:.*no JSON"),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_read_is_refused(config, message, tmp_path):
    with pytest.raises(RuleError, match=message) as raised:
        imported(tmp_path, config)
    assert raised.value.hint and "ds_config.json" in raised.value.where
