"""The sizes of the benchmark models: on a GPU they are models as they are trained, and no other size has changed."""

import pytest
import torch

PARAMETERS = {
    "gpt2": 354_823_168,
    "bert": 335_174_458,
    "llama": 1_235_814_400,
    "t5": 222_903_552,
    "vit": 304_326_632,
    "resnet50": 25_557_032,
    "lstm": 82_361_600,
    "mlp": 138_347_496,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_models_for_a_gpu_have_the_parameters_that_they_are_known_for(bench, name):
    with torch.device("meta"):
        model, batch = bench["cases"].build_of(name, bench["models"].size_of(name, "cuda"))
    assert model.training
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]
    assert all(value.device.type == "meta" for value in batch.values())
