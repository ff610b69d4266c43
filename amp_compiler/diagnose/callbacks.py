"""`amp.callbacks`: what can be given to a training step as `callbacks=`, to watch it."""

from __future__ import annotations

from amp_compiler.diagnose.writers import JSONLines, TensorBoard, Terminal
from amp_compiler.ir.run_file import Run, StepRecord, read_run
from amp_compiler.training.reporting.log import Callback

__all__ = ["Callback", "JSONLines", "Run", "StepRecord", "TensorBoard", "Terminal", "read_run"]
