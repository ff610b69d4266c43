"""`Terminal`: a training watched where it was started."""

from __future__ import annotations

from amp_compiler.diagnose.writers import Writer
from amp_compiler.ir.run_file import StepRecord

_MIB = 1 << 20


class Terminal(Writer):
    """Prints the numbers of a record on one line of the standard output.

    Args:
        every: after how many updates a line is printed.
    """

    def __init__(self, every: int = 1) -> None:
        super().__init__(every, "the terminal")

    def _write(self, record: StepRecord) -> None:
        texts = {
            "loss": f"{record.loss:.4g}",
            **{name: f"{value:.4g}" for name, value in record.aux.items()},
            "grad norm": f"{record.grad_norm:.3g}",
            "scale": f"{record.loss_scale:.10g}",
            "skipped": str(record.skipped_steps),
            f"{record.dtype}: zero": f"{record.zero:.1%}",
            "subnormal": f"{record.subnormal:.1%}",
            "infinite": f"{record.infinite:.1%}",
        }
        if record.milliseconds is not None:
            texts["ms"] = f"{record.milliseconds:.1f}"
        if record.memory is not None:
            texts["MiB"] = f"{record.memory / _MIB:.0f}"
        line = "  ".join(f"{name} {value}" for name, value in texts.items())
        print(f"step {record.step:>6}  {line}", flush=True)
