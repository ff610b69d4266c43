"""`Terminal`: a training watched where it was started."""

from __future__ import annotations

import atexit
import math
from collections import deque
from collections.abc import Sequence

from rich.console import Console
from rich.errors import LiveError
from rich.live import Live
from rich.table import Table

from amp_compiler.diagnose.writers import Writer
from amp_compiler.ir.run_file import StepRecord

_BARS = "▁▂▃▄▅▆▇█"
_KEPT = 40  # records of which the losses are drawn
_MIB = 1 << 20


class Terminal(Writer):
    """Shows the numbers in the terminal: a table that is renewed in place; where there is none, a line a record.

    What else the program prints stands above the table. At the end of the program, or by `close()`, it stays as it is.

    Args:
        every: after how many updates it is renewed.
        console: where to; by default the standard output.
    """

    def __init__(self, every: int = 1, console: Console | None = None) -> None:
        super().__init__(every, "the terminal")
        self._console = Console() if console is None else console
        self._live: Live | None = None
        self._losses: deque[float] = deque(maxlen=_KEPT)

    def _write(self, record: StepRecord) -> None:
        self._losses.append(record.loss)
        if self._live is None:
            self._live = self._start()
        if self._live is None:
            print(line_of(record), file=self._console.file, flush=True)
            return
        bars = "" if self._console.options.ascii_only else sparkline(self._losses)
        self._live.update(table_of(record, bars), refresh=True)

    def _start(self) -> Live | None:
        """A table; `None` where there is no terminal, or it is taken by a display of the user's own."""
        if not self._console.is_terminal or self._console.is_dumb_terminal:
            return None
        live = Live(console=self._console, auto_refresh=False)
        try:
            live.start()
        except LiveError:
            return None
        atexit.register(self.close)
        return live

    def close(self) -> None:
        """Leave the table as it is, and give the terminal back."""
        if self._live is not None:
            live, self._live = self._live, None
            atexit.unregister(self.close)
            live.stop()


def line_of(record: StepRecord) -> str:
    """A record as one line of text."""
    return f"step {record.step:>6}  " + "  ".join(f"{name} {value}" for name, value in _texts(record).items())


def table_of(record: StepRecord, bars: str = "") -> Table:
    """A record as a table.

    Args:
        record: the numbers.
        bars: stands behind the loss.
    """
    table = Table.grid(padding=(0, 2))
    table.add_row("[bold]step", f"[bold]{record.step}", "")
    for name, value in _texts(record).items():
        table.add_row(name, value, bars if name == "loss" else "")
    return table


def _texts(record: StepRecord) -> dict[str, str]:
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
    return texts


def sparkline(values: Sequence[float] | deque[float]) -> str:
    """Numbers as bars of text, from the least to the greatest; `x` where one is not finite.

    Example:
        >>> sparkline([1.0, 4.5, 8.0, float("inf")])
        '▁▅█x'
    """
    finite = [value for value in values if math.isfinite(value)]
    low, width = (min(finite), max(finite) - min(finite)) if finite else (0.0, 0.0)
    signs = [
        _BARS[round((len(_BARS) - 1) * (value - low) / width) if width else 0] if math.isfinite(value) else "x"
        for value in values
    ]
    return "".join(signs)
