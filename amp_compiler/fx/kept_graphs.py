"""Graphs that were traced from other graphs, kept from process to process, so that a second one need not trace.

What a trace gives follows from the graph it starts from, from torch and its settings, and from our own source. All
three are in the name of the file, exactly; where one of them cannot be told, nothing is kept. A file is written only
after it was read back into the same graph, node for node. It holds no code: module names and source lines come from
the graph at hand.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import hashlib
import inspect
import json
import logging
import os
import sys
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from amp_compiler.errors import AmpError
from amp_compiler.fx.cache_file import keep
from amp_compiler.fx.graph_record import Unrecordable, graph_of, record_of
from amp_compiler.fx.torch_private.inductor import keeps_compiled
from amp_compiler.fx.torch_private.tracing import trace_settings
from amp_compiler.ir.files import write_atomically
from amp_compiler.ops.cache_folder import cache_folder

_LOG = logging.getLogger(__name__)
_MOST = 400  # files: the one that was read or written longest ago goes first
_ROOMS = ("fx", "ops")  # of this package: all that says what an operator is and how it is traced


@dataclass(frozen=True)
class KeptGraph:
    """Where a graph is kept that is traced from another one; it may not be there yet.

    Args:
        file: its file.
        sources: the nodes of the graph that it is traced from.
        mode: of the examples.
    """

    file: Path
    sources: list[fx.Node]
    mode: FakeTensorMode

    @classmethod
    def of(cls, graph: fx.Graph, options: Any, identity: str) -> KeptGraph | None:
        """The place of what is traced from a graph; `None` where it may not be kept.

        That is a graph with inner graphs, sizes that are symbols or operators of the user's; one that is traced under
        modes or kernels of the user's; any, where torch is told to keep nothing either.

        Args:
            graph: what is traced.
            options: what else the trace depends on, as data for JSON.
            identity: name of the module that traces.
        """
        settings = trace_settings() if keeps_compiled() else None
        source = _own_source(identity)
        examples = [node.meta.get("val") for node in graph.find_nodes(op="placeholder")]
        mode = next((value.fake_mode for value in examples if isinstance(value, FakeTensor)), None)
        if settings is None or mode is None or not source:
            return None
        try:
            content = json.dumps([record_of(graph), options, settings, source])
            folder = cache_folder()
        except (Unrecordable, OSError, ValueError) as cause:
            _LOG.debug("the joint graph is not kept: %s", cause)
            return None
        name = f"joint_{hashlib.sha256(content.encode()).hexdigest()[:32]}.json.gz"
        return cls(folder / name, list(graph.nodes), mode)

    def load(self) -> fx.Graph | None:
        """The graph, where it is kept."""
        try:
            graph = graph_of(json.loads(gzip.decompress(self.file.read_bytes())), self.sources, self.mode)
            keep(self.file)
            with contextlib.suppress(OSError):  # another user's cache may be read, and not be marked as read
                os.utime(self.file)
        except FileNotFoundError:
            return None
        except (OSError, EOFError, ValueError, zlib.error, Unrecordable) as cause:
            _LOG.warning("%s cannot be read, and is made anew: %s", self.file, cause)
            return None
        return graph

    def store(self, graph: fx.Graph, origins: Mapping[str, int]) -> None:
        """Keep a graph; nothing is done where it has no exact form.

        Args:
            graph: what was traced.
            origins: by name of its nodes, the place in `sources` of the node that each was made for.
        """
        try:
            record = record_of(graph, origins, self.sources)
            text = json.dumps(record)  # compared as text, for NaN is no number that equals itself
            back = graph_of(json.loads(text), self.sources, self.mode)
            if json.dumps(record_of(back, origins, self.sources)) != text:
                raise Unrecordable("what is read back is another graph")
            write_atomically(self.file, gzip.compress(text.encode(), 1))
            keep(self.file)
            _drop_oldest(self.file.parent)
        except (AmpError, OSError, ValueError) as cause:
            _LOG.debug("the joint graph is not kept: %s", cause)


def _drop_oldest(folder: Path) -> None:
    """Let the oldest go where there are too many."""
    ages: list[tuple[float, Path]] = []
    for other in folder.glob("joint_*"):
        with contextlib.suppress(OSError):  # another process may have removed it
            ages.append((other.stat().st_mtime, other))
    for _, oldest in sorted(ages)[:-_MOST]:
        oldest.unlink(missing_ok=True)


@functools.cache
def _own_source(tracer: str) -> str:
    """Stands for all that this package says about operators and how they are traced; empty where it has no source.

    Args:
        tracer: name of the module that traces.
    """
    digest = hashlib.sha256()
    pending: list[Any] = [resources.files("amp_compiler") / room for room in _ROOMS]
    found_any = False
    while pending:
        entry = pending.pop()
        if entry.is_dir():
            pending += sorted(entry.iterdir(), key=lambda one: one.name)
        elif entry.name.endswith(".py"):
            found_any = True
            digest.update(entry.name.encode() + b"\0" + entry.read_bytes())
    try:
        digest.update(inspect.getsource(sys.modules[tracer]).encode())
    except OSError:  # as in a program that was frozen into one file
        return ""
    return digest.hexdigest() if found_any else ""
