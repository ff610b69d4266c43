"""`amp-compiler diff`, and plans for a device that is not there."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import amp_compiler as amp


@pytest.fixture
def plans(tmp_path: Path) -> tuple[Path, Path]:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), (torch.ones(2, 8),)
    for name, rules in (("a", "default"), ("b", "fast")):
        amp.explain(model, x, rules=rules, dtype="bf16").to_json(tmp_path / f"{name}.json")
    return tmp_path / "a.json", tmp_path / "b.json"


def test_what_differs_is_shown_and_told_by_the_exit_code(plans: Any, shell: Any) -> None:
    code, out, _ = shell("diff", *map(str, plans))
    assert code == 1 and out.startswith(f"--- {plans[0]}\n+++ {plans[1]}\n")
    assert "\n-bf16 layer_norm = " in out and "\n+bf16 layer_norm = " in out and "rule=fast.yaml" in out
    assert shell("diff", str(plans[0]), str(plans[0])) == (0, "", "")


def test_it_is_written_to_a_file(plans: Any, shell: Any) -> None:
    place = plans[0].with_name("out.diff")
    assert shell("diff", *map(str, plans), "--output", str(place))[0] == 1
    assert "layer_norm" in place.read_text(encoding="utf-8")
    code, _, err = shell("diff", *map(str, plans), "--output", str(plans[0]))
    assert code == 2 and "first plan" in err


def test_a_page_shows_both(plans: Any, shell: Any) -> None:
    page = plans[0].with_name("page.html")
    assert shell("diff", *map(str, plans), "--html", str(page))[0] == 1
    text = page.read_text(encoding="utf-8")
    assert all(f'<b class="plan">{one}</b>' in text for one in plans)
    code, _, err = shell("diff", *map(str, plans), "--html", str(plans[1]))
    assert code == 2 and "second plan" in err


@pytest.mark.parametrize("content", ["", "[1]", '{"version": 77}', None])
def test_what_is_no_plan_is_refused(plans: Any, content: str | None, shell: Any) -> None:
    wrong = plans[0].with_name("wrong.json")
    if content is not None:
        wrong.write_text(content, encoding="utf-8")
    code, _, err = shell("diff", str(wrong), str(plans[1]))
    assert code in (1, 2) and str(wrong) in err and "\n  hint: " in err


def test_a_laptop_shows_the_plan_of_a_gpu() -> None:
    rules = {
        "version": 1,
        "extends": "default",
        "rules": [{"match": {"op": "aten.linear", "device": "cuda"}, "precision": "fp32"}],
    }
    model, x = nn.Linear(8, 8), (torch.ones(2, 8),)
    here, there = amp.explain(model, x, rules=rules, dtype="bf16"), amp.explain(model, x, rules=rules, device="cuda")
    assert (here.device, here.nodes[0].precision) == ("cpu", "low")
    assert (there.device, there.dtype, there.nodes[0].precision) == ("cuda", "bf16", "fp32")
    with torch.device("meta"):
        meta = amp.explain(nn.Linear(8, 8), (torch.ones(2, 8),), rules=rules, device="cuda")
    assert meta == there
    with pytest.raises(amp.AmpError, match="tpu"):
        amp.explain(model, x, device="tpu")


def test_a_device_that_is_there_has_the_type_of_models_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` is FP16 on a CPU that does not multiply BF16, whether the device is named or not."""
    for probe in ("_is_avx512_bf16_supported", "_is_amx_tile_supported", "_is_arm_bf16_supported"):
        if hasattr(torch.cpu, probe):
            monkeypatch.setattr(torch.cpu, probe, lambda: False)
    model, x = nn.Linear(8, 8), (torch.ones(2, 8),)
    assert amp.explain(model, x) == amp.explain(model, x, device="cpu")
    assert amp.explain(model, x, device="cpu").dtype == "fp16"
