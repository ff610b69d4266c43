"""A compiled module is one of its original's class: its methods run what was compiled, or tell what does not."""

import copy
import gc
import pickle
import types
import weakref
from typing import ClassVar

import pytest
import torch
from torch import nn

import amp_compiler as amp

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


class Base(nn.Module):
    """What a framework brings: it notes the classes that derive from it."""

    known: ClassVar[dict[str, type]] = {}
    flag = "of the class"

    def __init_subclass__(cls) -> None:
        Base.known[cls.__name__] = cls

    def predict(self, x):
        return self(x).argmax(1)


class Net(Base):
    """Methods of all kinds around a forward."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.width, self.flag = width, "of the object"
        self.encoder, self.heads = nn.Linear(8, width), nn.ModuleList([nn.Linear(width, 4)])

    def forward(self, x):
        return self.heads[0](self.encoder(x)) * getattr(self, "_factor", 1.0)

    def predict(self, x):
        return super().predict(x), self.flag

    def encode(self, x):
        return self.encoder(x)

    def head(self, x):
        return self.heads[0](x)

    def scale_by(self, factor):
        self._factor = factor
        return self

    def twin(self):
        return type(self)(self.width)

    @property
    def device(self):
        return self.encoder.weight.device

    @classmethod
    def of_width(cls, width):
        return cls(width)

    def half_encoded(self, x):
        y = self(x)
        return self.encoder(x), y


def doubled(module, args, result):
    return 2 * result


def compiled() -> amp.CompiledModule:
    torch.manual_seed(0)
    return amp.compile(Net(), dtype="bf16", backend="eager")


def test_methods_run_what_was_compiled(caplog):
    model = compiled()
    labels, flag = model.predict(X)
    assert model.compilations == 1 and flag == model.flag == "of the object"
    assert torch.equal(labels, model(X).argmax(1))
    before = model(X)
    assert model.scale_by(2.0) is model and model.original._factor == 2.0
    assert torch.equal(model(X), 2 * before)
    model.half_encoded(X)
    Net().encode(X)  # layers of another model
    assert not caplog.records and not torch.nn.modules.module._global_forward_pre_hooks


def test_a_method_that_runs_layers_past_it_is_told_once(caplog):
    model = compiled()
    model.other = model.original.encode  # found on the object, or by a `__getattr__` of its class
    for _ in range(2):
        assert torch.equal(model.encode(X), model.encoder(X))
        model.head(X), model.other(X)
    model.forward = types.MethodType(lambda self, x: self.encode(x), model)
    model(X), model(X)
    assert [record.getMessage() for record in caplog.records] == [
        f"Net.{name} runs `{path}` as it is, not compiled and in its own types: to compile that, write"
        f" model.{place} = amp.compile(model.{place})"
        for name, path, place in (
            ("encode", "encoder", "encoder"),
            ("head", "heads.0", "heads[0]"),
            ("other", "encoder", "encoder"),
            ("forward", "encoder", "encoder"),
        )
    ]
    model.encoder = amp.compile(model.encoder, dtype="bf16", backend="eager")
    expected = model.original.encoder.original(X)
    assert torch.allclose(model.encode(X), expected, atol=2e-2) and not torch.equal(model.encode(X), expected)


def test_it_is_one_of_its_originals_class():
    model = compiled()
    assert isinstance(model, Net) and isinstance(model, amp.CompiledModule) and type(model).__module__ == __name__
    assert Base.known["Net"] is Net
    assert repr(model).startswith("amp.compile(Net(\n  (encoder)") and repr(model).endswith("), dtype='bf16')")
    for result in (model.twin(), model.of_width(8), type(model)(width=8)):
        assert type(result) is Net
    assert model.device.type == "cpu"
    model.original.encode, model.stages = lambda x: "the object's own", nn.ReLU()
    assert model.stages is model.original.stages  # and not ours, as ConvNeXt has some that its methods call
    assert model.encode(X) == "the object's own"
    (hooked := compiled()).register_forward_hook(doubled)
    for twin in (copy.deepcopy(hooked), pickle.loads(pickle.dumps(hooked))):
        assert isinstance(twin, Net) and torch.equal(twin(X), 2 * compiled()(X))


@pytest.mark.parametrize(
    "module", [nn.Linear(8, 4), nn.Sequential(nn.Linear(8, 4)), nn.LSTM(8, 4), torch.fx.symbolic_trace(nn.Linear(8, 4))]
)
def test_it_is_one_of_torchs_classes(module):
    model = amp.compile(module, dtype="bf16", backend="eager")
    assert isinstance(model, nn.LSTM if isinstance(module, nn.LSTM) else nn.Module) and model(X) is not None
    if isinstance(module, nn.Sequential):
        assert isinstance(model[:1], nn.Sequential) and model[0] is module[0] and len(model.append(nn.ReLU())) == 2


@pytest.mark.usefixtures("few_objects")
def test_classes_that_are_made_go_with_their_models():
    class Local(nn.Linear):
        pass

    model = amp.compile(Local(8, 4), dtype="bf16", backend="eager")
    gone = weakref.ref(type(model)), weakref.ref(Local)
    del model, Local
    gc.collect()
    assert [one() for one in gone] == [None, None]


@pytest.mark.parametrize(
    ("cache", "weights"), [pytest.param("static", "fp32", marks=pytest.mark.slow), ("dynamic", "low")]
)
def test_a_transformer_generates_by_what_was_compiled(cache, weights, caplog):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    plain = transformers.LlamaForCausalLM(config).eval()
    model = amp.compile(copy.deepcopy(plain), dtype="bf16", backend="eager", weights=weights)
    prompt = torch.randint(2, 64, (2, 5))
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "cache_implementation": cache,
               "return_dict_in_generate": True, "output_logits": True}  # fmt: skip
    result, expected = model.generate(prompt, **options), plain.generate(prompt, **options)
    assert model.compilations in (2, 3) and model.plan.low_nodes and model.execution == "as one graph"
    for ours, theirs in zip(result.logits[:1], expected.logits[:1], strict=True):
        assert 0 < float((ours - theirs).abs().max()) < 2e-2 * float(theirs.abs().max())
    assert not [record for record in caplog.records if "as it is" in record.getMessage()]
