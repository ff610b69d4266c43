"""`AmpPrecision`: the whole training step of a LightningModule as one graph, by a plugin of its Trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from amp_compiler.errors import AmpError
from amp_compiler.forward.settings import AUTO, make_settings
from amp_compiler.ir.dtypes import DTypeArgument
from amp_compiler.training.api import training_step
from amp_compiler.training.step import TrainingStep

try:
    from lightning.pytorch.plugins.precision import Precision
except ImportError as missing:
    try:
        from pytorch_lightning.plugins.precision import Precision
    except ImportError:
        raise AmpError("Lightning is not installed", hint="pip install lightning") from missing


class _Logged:
    """Stands for `self.log` while a step is captured and runs: what is logged is handed on behind it."""

    def __init__(self) -> None:
        self.calls: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {}

    def log(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        self.calls[name] = (value.detach() if isinstance(value, Tensor) else value, args, options)

    def log_dict(self, dictionary: Mapping[str, Any], *args: Any, **options: Any) -> None:
        for name, value in dictionary.items():
            self.log(name, value, *args, **options)


def _loss_of(module: nn.Module, *batch: Any) -> Any:
    result: Any = type(module).training_step(module, *batch)  # type: ignore[attr-defined]
    if isinstance(result, Mapping):
        return result["loss"], {name: value for name, value in result.items() if name != "loss"}
    return result


class AmpPrecision(Precision):  # type: ignore[misc]
    """Trains a LightningModule by `amp.training_step`: `Trainer(plugins=AmpPrecision("bf16"))`, without `precision=`.

    Its `training_step`, the backward, clipping by norm and the update are one graph. Automatic optimization by one
    optimizer, `accumulate_grad_batches`, `gradient_clip_val`, schedulers, loggers, callbacks, checkpoints and
    `strategy="ddp"` work as ever; hooks that look at `.grad` find none. Validation, test and prediction run under
    `torch.autocast`.

    Args:
        dtype: as for `amp.training_step`.
        **options: further options of `amp.training_step`, such as `rules`, `loss_scale` and `backend`.

    Raises:
        AmpError: Lightning is not installed; behind `fit`: the module or the Trainer asks for what it cannot do.

    Example:
        ```python
        trainer = Trainer(plugins=AmpPrecision("bf16", rules="default"), gradient_clip_val=1.0)
        trainer.fit(module, loader)
        ```
    """

    def __init__(self, dtype: DTypeArgument = AUTO, **options: Any) -> None:
        self._dtype, self._options = dtype, options
        self._settings = make_settings(dtype=dtype)
        self._step: TrainingStep | None = None
        self._module: Any = None
        self._updates, self._logged = False, _Logged()

    def connect(self, model: Any, optimizers: list[Any], lr_schedulers: list[Any]) -> tuple[Any, list[Any], list[Any]]:
        """Make the training step, where the Trainer fits."""
        ranks: dict[str, Any] = {}
        if isinstance(model, DistributedDataParallel):  # whose work on gradients is part of the step
            model, ranks = model.module, {"process_group": model.process_group}
        self._module, self._step = model, None
        if optimizers:
            _refuse(model, optimizers, bool(ranks))
            trainer = model.trainer
            options = {
                **ranks,
                "dtype": self._dtype,
                "accumulate": trainer.accumulate_grad_batches,
                "clip_norm": trainer.gradient_clip_val or None,
                **self._options,
            }
            self._step = training_step(model, _loss_of, optimizers[0], **options)
        return model, optimizers, lr_schedulers

    def forward_context(self) -> AbstractContextManager[Any]:
        """Validation, test and prediction."""
        return self._settings.autocast(self._module.device)

    @contextmanager
    def train_step_context(self) -> Iterator[None]:
        """Within it the module's `training_step` is the whole step."""
        self._module.training_step = self._train
        try:
            yield
        finally:
            del self._module.training_step

    def _train(self, *batch: Any) -> Any:
        step: Any = self._step  # made, as Lightning connects before it trains
        module, logged = self._module, self._logged
        logged.calls.clear()
        if self._updates:
            step.update_next()
        module.log, module.log_dict = logged.log, logged.log_dict
        try:
            result = step(*batch)
        finally:
            del module.log, module.log_dict
        for name, (value, args, options) in logged.calls.items():
            module.log(name, value, *args, **options)
        return {**result[1], "loss": result[0]} if isinstance(result, tuple) else result

    def backward(self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Nothing: it is part of the step."""

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Run the step, which updates the weights."""
        self._updates = True
        try:
            result = closure()
        finally:
            self._updates = False
        self._after_closure(model, optimizer)
        return result

    def clip_gradients(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: it is part of the step."""

    def state_dict(self) -> dict[str, Any]:
        """The state of the loss scale."""
        return {} if self._step is None else self._step.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with a state of the loss scale."""
        if self._step is not None:
            self._step.load_state_dict(state_dict)


def _refuse(module: Any, optimizers: list[Any], spread: bool) -> None:
    trainer = module.trainer
    if not module.automatic_optimization or len(optimizers) > 1:
        raise AmpError(
            "AmpPrecision trains with automatic optimization and one optimizer",
            hint="call amp.training_step in your own training_step, with self.automatic_optimization = False"
            " and without the plugin",
        )
    if trainer.world_size > 1 and not spread:
        raise AmpError(
            f"AmpPrecision trains several processes by DDPStrategy, and this is {type(trainer.strategy).__name__}",
            hint="use strategy='ddp', or compile the net in the module (self.net = amp.compile(net)), which every"
            " strategy takes",
        )
    if str(getattr(trainer, "gradient_clip_algorithm", None) or "norm").rpartition(".")[2].lower() != "norm":
        raise AmpError("AmpPrecision clips by the norm", hint="leave gradient_clip_algorithm out")
