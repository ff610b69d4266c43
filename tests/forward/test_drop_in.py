"""A compiled module among tools that put themselves around a model: Accelerate, the Trainer of transformers, FSDP2."""

import copy
import inspect
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from toys import gpt2

import amp_compiler as amp

pytestmark = pytest.mark.long

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
BF16_ERROR = 2e-2  # a few roundings of 2**-9 each


class Net(nn.Module):
    """A model whose forward has names, a keyword and an answer for labels."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 4)

    def forward(self, features: torch.Tensor, labels: torch.Tensor | None = None, *, scale: float = 1.0):
        logits = self.fc(features) * scale
        return logits if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}


def compiled(model: nn.Module | None = None) -> amp.CompiledModule:
    torch.manual_seed(0)
    return amp.compile(model or Net(), dtype="bf16", backend="eager")


def close(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    with torch.no_grad():
        return bool((actual.double() - expected.double()).norm() <= BF16_ERROR * expected.double().norm())


def test_forward_has_the_signature_of_the_originals():
    model = compiled()
    assert inspect.signature(model.forward) == inspect.signature(model.original.forward)
    assert list(inspect.signature(type(model).forward).parameters)[1:] == ["features", "labels", "scale"]
    assert isinstance(model, amp.CompiledModule) and type(model).__name__ == "Net"
    assert type(compiled()) is type(model) and type(copy.deepcopy(model)) is type(model)
    model.__class__ = kind = type("Other", (Net,), {})
    assert isinstance(model, kind) and type(model.original) is kind
    own = Net()
    own.forward = lambda features: features  # type: ignore[method-assign, assignment]
    assert str(inspect.signature(compiled(own).forward)) == "(features)"


def test_a_replaced_forward_is_the_wrappers_and_can_be_taken_back():
    model = compiled()
    before = model.forward
    expected = model(X)

    def doubled(self, *args, **kwargs):
        return 2 * before(*args, **kwargs)

    model._original_forward = before
    model.forward = types.MethodType(doubled, model)
    assert torch.equal(model(X), 2 * expected)
    assert "forward" not in vars(model.original) and not hasattr(model.original, "_original_forward")
    assert close(model.original(X), expected)
    assert model.__dict__.pop("_original_forward") == before
    del model.forward
    assert model.forward == before and torch.equal(model(X), expected)


KINDS = ("forward_hook", "full_backward_hook", "full_backward_pre_hook", "backward_hook")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:Full backward hook is firing", "ignore:Using a non-full backward hook")
def test_hooks_on_the_wrapper_run_around_it(kind):
    model, seen = compiled(), []

    def hook(module, *inputs):
        seen.append((module, (inputs[-1] if "back" not in kind else inputs[-1][0]).shape))

    handle = getattr(model, f"register_{kind}")(hook)
    model(X).sum().backward()
    assert seen == [(model, (4, 4))] and model.execution == "as one graph"
    assert model.original._is_full_backward_hook is None  # nothing was written to what it wraps
    model.original(X).sum().backward()
    handle.remove()
    model(X).sum().backward()
    assert len(seen) == 1


class Counted(nn.Linear):
    """Keeps a number that is no tensor in its state."""

    seen = 0

    def get_extra_state(self):
        return {"seen": self.seen}

    def set_extra_state(self, state):
        self.seen = state["seen"]


def test_extra_state_is_saved_and_loaded():
    model = compiled(Counted(8, 4))
    model.seen = 3
    state = model.state_dict()
    assert state["_extra_state"] == {"seen": 3} and list(state) == list(model.original.state_dict())
    other = compiled(Counted(8, 4))
    other.load_state_dict(state)
    assert other.seen == 3
    holder = nn.Sequential(compiled(Counted(8, 4)))
    holder.load_state_dict({f"0.{name}": value for name, value in state.items()})
    assert holder[0].seen == 3


def train_both(model, plain, backward, optimizer=None):
    """Three steps of two loops, whose losses are close."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.1)
    reference, labels = torch.optim.SGD(plain.parameters(), 0.1), torch.arange(4)
    for _ in range(3):
        loss, expected = model(X, labels)["loss"], plain(X, labels)["loss"]
        assert close(loss, expected)
        backward(loss)
        expected.backward()
        for one in (optimizer, reference):
            one.step()
            one.zero_grad()


@pytest.mark.usefixtures("own_accelerate")
def test_accelerate_wraps_and_unwraps_it():
    import accelerate

    model = compiled()
    plain = copy.deepcopy(model.original)
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    wrapped, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    train_both(wrapped, plain, accelerator.backward, optimizer)
    assert model.plan.low_nodes > 0
    taken = accelerator.unwrap_model(wrapped, keep_fp32_wrapper=False)
    assert taken is model and close(taken(X), plain(X))
    assert list(inspect.signature(taken.forward).parameters) == ["features", "labels", "scale"]
    assert type(taken.original) is Net and close(taken.original(X), plain(X))


IDS = torch.randint(0, 32, (16, 8), generator=torch.Generator().manual_seed(0))
TEXT = [{"input_ids": row, "labels": row, "note": "not for forward"} for row in IDS]


def tied() -> nn.Module:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    torch.manual_seed(0)
    return gpt2()


def test_the_trainer_saves_and_resumes_tied_weights(tmp_path):
    """As a model that is not compiled: by its own `save_pretrained`, under its own names."""
    transformers = pytest.importorskip("transformers")
    safetensors = pytest.importorskip("safetensors.torch")

    def trainer(folder, **options):
        arguments = transformers.TrainingArguments(
            output_dir=str(folder), use_cpu=True, bf16=True, max_steps=4, per_device_train_batch_size=4, report_to=[],
            save_strategy="steps", save_steps=2, disable_tqdm=True, learning_rate=0.05, **options,
        )  # fmt: skip
        return transformers.Trainer(compiled(tied()), arguments, train_dataset=TEXT)

    whole = trainer(tmp_path / "whole")
    whole.train()
    whole.save_model(str(tmp_path / "saved"))
    assert isinstance(whole.model, amp.CompiledModule) and whole.model.plan.low_nodes > 0
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "saved")
    assert again.config.architectures == ["GPT2LMHeadModel"] and again.lm_head.weight is again.transformer.wte.weight
    for name, value in tied().state_dict().items():
        assert torch.equal(again.state_dict()[name], whole.model.state_dict()[name]) and value.dtype is torch.float32
    saved = safetensors.load_file(str(tmp_path / "whole" / "checkpoint-2" / "model.safetensors"))
    assert {"transformer.wte.weight"} <= set(saved) <= set(tied().state_dict())

    resumed = trainer(tmp_path / "resumed")
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    torch.testing.assert_close(list(resumed.model.parameters()), list(whole.model.parameters()), rtol=1e-5, atol=1e-6)


def test_what_a_pretrained_model_has_is_the_originals():
    transformers = pytest.importorskip("transformers")
    model = compiled(tied())
    assert isinstance(model, transformers.GPT2LMHeadModel)
    assert model.config is model.original.config and model.get_input_embeddings() is model.original.transformer.wte
    assert model.save_pretrained.__self__ is model and model.generate.__self__ is model
    assert model.num_parameters() == model.original.num_parameters() and model.dtype is torch.float32
    model.resize_token_embeddings(40)
    assert model(IDS[:2]).logits.shape == (2, 8, 40)
    model.to(torch.float32)
    assert not model.compilations  # moved by our own way, which drops what was compiled
    twin = copy.deepcopy(model)
    assert type(twin) is type(model) and torch.equal(twin(IDS[:2]).logits, model(IDS[:2]).logits)


@pytest.fixture
def alone():
    """A process group of this process alone."""
    dist = pytest.importorskip("torch.distributed")
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("this torch has no gloo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist
    dist.destroy_process_group()


def test_fully_shard_takes_it(alone):
    from torch.distributed.fsdp import FSDPModule, fully_shard

    model = compiled()
    plain = copy.deepcopy(model.original)
    fully_shard(model, mesh=alone.device_mesh.init_device_mesh("cpu", (1,)))
    assert isinstance(model, FSDPModule) and type(model.original) is Net
    train_both(model, plain, lambda loss: loss.backward())
    assert model.plan.low_nodes > 0 and model.execution == "as one graph"
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert close(ours.full_tensor(), theirs)  # type: ignore[attr-defined]


def test_blocks_are_compiled_and_sharded_one_by_one(alone):
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    model = copy.deepcopy(plain)
    mesh = alone.device_mesh.init_device_mesh("cpu", (1,))
    for place in (0, 2):
        model[place] = fully_shard(amp.compile(model[place], dtype="bf16", backend="eager"), mesh=mesh)
    fully_shard(model, mesh=mesh)
    model(X).sum().backward()
    plain(X).sum().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert close(ours.grad.full_tensor(), theirs.grad)  # type: ignore[attr-defined]
    assert model[0].plan.low_nodes == 1


def test_a_model_that_is_sharded_already_is_named(alone):
    from torch.distributed.fsdp import fully_shard

    mesh = alone.device_mesh.init_device_mesh("cpu", (1,))
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    fully_shard(model[0], mesh=mesh)
    with pytest.raises(amp.CaptureError, match=r"module '0' is sharded.*fully_shard\(amp\.compile"):
        compiled(model)(X)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(amp.AmpError, match=r"the model is sharded.*fully_shard\(amp\.compile"):
        amp.training_step(model, lambda m, x: m(x).mean(), optimizer, backend="eager")


def test_update_bn_takes_a_compiled_module_without_a_warning(compiler, caplog, recwarn):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))
    model, batches = amp.compile(copy.deepcopy(plain), dtype="bf16"), [torch.randn(16, 8) for _ in range(4)]
    model(batches[0]).sum().backward()
    recwarn.clear()
    for one in (plain, model):
        torch.optim.swa_utils.update_bn(batches, one)
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(dict(model.named_buffers())[name], buffer, rtol=BF16_ERROR, atol=BF16_ERROR)
    assert [record for record in caplog.records if record.levelname == "WARNING"] == []
    assert [str(one.message) for one in recwarn if "amp" in str(one.filename) or "dynamo" in str(one.filename)] == []


@pytest.mark.parametrize("name", ["original", "settings", "plan", "_run", "_subgraphs"])
@pytest.mark.parametrize("make", [lambda: nn.Parameter(2 * torch.ones(4)), lambda: 3])
def test_a_models_own_names_go_before_ours(name, make):
    class Named(Net):
        def twice(self, features):
            return 2 * self(features) * getattr(self, name)

    own = Named()
    setattr(own, name, make())
    plain = copy.deepcopy(own)
    model = compiled(own)
    assert close(model.twice(X), plain.twice(X)) and close(copy.deepcopy(model).twice(X), plain.twice(X))
    setattr(model, name, value := make())
    assert getattr(own, name) is getattr(model, name) is value


def test_parametrizations_of_torch_reach_the_original():
    parametrize, norms = nn.utils.parametrize, nn.utils.parametrizations
    plain = nn.Linear(8, 4)
    model = compiled(copy.deepcopy(plain))
    model(X)
    for change in (
        norms.weight_norm,
        norms.spectral_norm,
        lambda layer: parametrize.register_parametrization(layer, "bias", nn.Tanh()),
        lambda layer: parametrize.remove_parametrizations(layer, "weight"),
    ):
        for layer in (model, plain):
            torch.manual_seed(0)
            change(layer)
        assert close(model(X), plain(X)) and [*model.state_dict()] == [*plain.state_dict()]
        assert parametrize.is_parametrized(model.original)
