"""A model that does not fit here is planned on the meta device, for a GPU that is not there."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

LLAMA_7B = """
import torch, transformers

def model():
    config = transformers.LlamaConfig(
        hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32, vocab_size=32000
    )
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(config).eval(), {"input_ids": torch.ones(1, 2048, dtype=torch.long)}
"""


@pytest.mark.slow
def test_a_llama_of_7b_is_planned_within_a_gigabyte(tmp_path: Path) -> None:
    (tmp_path / "llama.py").write_text(LLAMA_7B, encoding="utf-8")
    program = f"import atexit, sys\nsys.path.append({str(Path(__file__).parents[1])!r})\nfrom own_memory import peak\n"
    program += "import amp_compiler.cli.main as m\natexit.register(lambda: print(peak()))\nm.main()"
    spec, output = f"{tmp_path / 'llama.py'}:model", tmp_path / "plan.json"
    arguments = ["explain", spec, "--device", "cuda", "--format", "json", "--output", str(output)]
    done = subprocess.run([sys.executable, "-c", program, *arguments], check=True, capture_output=True, text=True)
    plan = json.loads(output.read_text(encoding="utf-8"))
    assert (plan["device"], plan["dtype"]) == ("cuda", "bf16")
    assert sum(node["op"] == "aten.linear" for node in plan["nodes"]) == 32 * 7 + 1
    assert int(done.stdout.split()[-1]) < 1e9
