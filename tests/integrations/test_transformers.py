"""`AmpTrainer` beside the Trainer's own BF16: losses, clipping, accumulation, schedules, resuming."""

import pytest
import torch
from toys import gpt2

import amp_compiler as amp

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytestmark = [pytest.mark.long, pytest.mark.usefixtures("own_accelerate")]

IDS = torch.randint(0, 32, (14, 8), generator=torch.Generator().manual_seed(0))
# Which needs one program: none for gathered batches, nor for the end of an epoch.
EVEN = {"per_device_train_batch_size": 7, "gradient_accumulation_steps": 1}
TEXT = [{"input_ids": row, "labels": row} for row in IDS]


def model():
    torch.manual_seed(0)
    return gpt2(dropout=0.1)


def trainer(folder, ours=True, cls=None, amp_options=None, **options):
    from amp_compiler.integrations.transformers import AmpTrainer

    arguments = transformers.TrainingArguments(
        output_dir=str(folder), use_cpu=True, report_to=[], logging_steps=1,
        disable_tqdm=True, learning_rate=0.01, max_grad_norm=0.5,
        **{"bf16": not ours, "max_steps": 12, "save_strategy": "no", "gradient_accumulation_steps": 2,
           "per_device_train_batch_size": 3, **options},
    )  # fmt: skip
    extra = {"amp_options": {"dtype": "bf16", "backend": "eager", **(amp_options or {})}} if ours else {}
    kind = cls or (AmpTrainer if ours else transformers.Trainer)
    return kind(model(), arguments, train_dataset=TEXT, eval_dataset=TEXT, **extra)


def curves(built):
    return [[one[key] for one in built.state.log_history if key in one] for key in ("loss", "grad_norm")]


@pytest.mark.parametrize("others", [{}, {"label_smoothing_factor": 0.1, **EVEN}])  # 100 steps: test_framework_recipes
def test_it_trains_as_the_trainers_own_mixed_precision(tmp_path, others, recwarn):
    ours = trainer(tmp_path, **others)
    ours.train()
    theirs = trainer(tmp_path, ours=False, **others)  # which draws what the first one drew
    theirs.train()
    (losses, norms), (expected, reference) = curves(ours), curves(theirs)
    assert len(losses) == 12 and losses == pytest.approx(expected, rel=0.02)  # an epoch ends in a batch of its own
    assert norms == pytest.approx(reference, rel=0.2)  # of gradients in BF16
    assert ours.evaluate()["eval_loss"] == pytest.approx(theirs.evaluate()["eval_loss"], rel=0.02)
    assert ours._amp_step.execution.startswith("as one graph") and ours._amp_step.plan.low_nodes
    assert not [one for one in recwarn if "lr_scheduler" in str(one.message)]


@pytest.mark.parametrize("others", [EVEN, {}])  # with gathered batches too, of which an epoch ends in one alone
def test_it_resumes_bit_for_bit_with_its_loss_scale(tmp_path, others):
    options = {"save_strategy": "steps", "save_steps": 4, "max_steps": 8, "amp_options": {"dtype": "fp16"}, **others}
    whole = trainer(tmp_path / "whole", **options)
    whole.train()
    resumed = trainer(tmp_path / "resumed", **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-4"))
    assert resumed._amp_step.state_dict() == whole._amp_step.state_dict()
    assert all(map(torch.equal, resumed.model.parameters(), whole.model.parameters()))


def test_what_it_cannot_do_is_refused(tmp_path):
    with pytest.raises(amp.AmpError, match=r"torch\.autocast's.*amp_options"):
        trainer(tmp_path, bf16=True)
