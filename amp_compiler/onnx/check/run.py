"""Running ONNX models for calibration and verification: sessions, and what can have one.

Models run in ONNX Runtime on the CPU with graph optimisations off, so that every value of the file exists. Weights in
external files stay there: ONNX Runtime maps them itself.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto

from amp_compiler.errors import OnnxError
from amp_compiler.onnx.check import memory
from amp_compiler.onnx.check.memory import LimitError, Limits
from amp_compiler.onnx.model.external import external_files, is_external
from amp_compiler.onnx.model.infer import with_small_data
from amp_compiler.onnx.model.model import OnnxFile, Source, open_model

Batch = Mapping[str, Any]
ORT, REFERENCE = "onnxruntime", "onnx.reference"
FREE_INITIALIZERS = 4  # IR version from which an initializer need not be an input too
LIMIT = 2**31 - 1  # bytes that one protobuf message can hold
FLOAT_TYPES = (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16)


@dataclass(frozen=True)
class Engine:
    """What a model runs in.

    Args:
        providers: execution providers of ONNX Runtime, the first choice first: `CUDAExecutionProvider`, say.
        custom_ops: libraries with kernels of custom ops, as ONNX Runtime's `register_custom_ops_library` takes them.
    """

    providers: tuple[str, ...] = ("CPUExecutionProvider",)
    custom_ops: tuple[str, ...] = ()


def make_engine(providers: Sequence[str] | None = None, custom_ops: Sequence[str | Path] | None = None) -> Engine:
    """The engine that a user asks for.

    Args:
        providers: names of execution providers; the CPU's by default.
        custom_ops: paths of libraries.

    Raises:
        OnnxError: the installed ONNX Runtime has no such provider, or a library is not there.
    """
    if providers is None and custom_ops is None:
        return Engine()
    import onnxruntime as ort

    chosen = Engine().providers if providers is None else tuple(_listed(providers))
    known = tuple(ort.get_available_providers())
    for name in chosen:
        if name not in known:
            raise OnnxError(
                f"the installed onnxruntime has no execution provider '{name}'",
                where="providers",
                hint=f"use one of {', '.join(known)}, or install the onnxruntime that has it",
            )
    libraries = tuple(str(path) for path in _listed(custom_ops or ()))
    for path in libraries:
        if not Path(path).is_file():
            raise OnnxError("there is no such library", where=path, hint="give the path of a shared library")
    return Engine(chosen or Engine().providers, libraries)


def _listed(items: Sequence[Any] | str | Path) -> Sequence[Any]:
    return [items] if isinstance(items, str | Path) else items


def session_options(engine: Engine, folder: Path | None) -> Any:
    """Options of a session of ONNX Runtime.

    It runs on as many threads as `OMP_NUM_THREADS` says, which ONNX Runtime does not read; unset, on its own choice.

    Args:
        engine: the libraries of ops.
        folder: where the external data of the model lie.

    Raises:
        OnnxError: a library cannot be loaded.
    """
    import onnxruntime as ort

    options = ort.SessionOptions()
    threads = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()  # "4,2" is for nested loops
    if threads.isdecimal():
        options.intra_op_num_threads = int(threads)
    if folder is not None:
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder.absolute()))
    for path in engine.custom_ops:
        try:
            options.register_custom_ops_library(path)
        except Exception as cause:
            raise OnnxError(
                f"onnxruntime cannot load the ops in it: {_one_line(cause)}",
                where=path,
                hint="give a library that was built for this onnxruntime",
            ) from cause
    return options


def check_providers(session: Any, engine: Engine) -> None:
    """Refuse a session that runs elsewhere than the user asked: ONNX Runtime takes the CPU without an error.

    Raises:
        OnnxError: the first provider that was asked for did not start.
    """
    running = session.get_providers()
    if engine.providers and engine.providers[0] not in running:
        raise OnnxError(
            f"the execution provider '{engine.providers[0]}' does not start on this machine; onnxruntime would run on"
            f" {', '.join(running)}",
            where="providers",
            hint="install what it needs (drivers and libraries of the device), or leave it out",
        )


def open_to_run(source: Source) -> OnnxFile:
    """Open a model that is going to run, with the numbers that shapes and types follow from read in.

    Args:
        source: as for `open_model`.

    Raises:
        OnnxError: the file is missing or no ONNX model, or a message refers to external files.
    """
    opened = open_model(source)
    if opened.path is None and any(is_external(tensor) for tensor in opened.proto.graph.initializer):
        raise OnnxError(
            "the ModelProto refers to external data, and not to where it is",
            hint="give the model's path, or load it with onnx.load(path)",
        )
    return replace(opened, proto=with_small_data(opened.proto, opened.folder))


def stored_bytes(opened: OnnxFile) -> int:
    """Size of a model's file and of the external files that it refers to, in bytes; 0 of a model in memory."""
    files = [] if opened.path is None else [opened.path, *external_files(opened.proto, opened.path.parent)]
    return sum(file.stat().st_size for file in files if file.is_file())


class Runner:
    """Runs one model again and again, in ONNX Runtime, or where it lacks an operator in ONNX's reference evaluator.

    Args:
        proto: the model.
        folder: where its external weights are.
        name: what error messages call it.
        engine: execution providers and libraries of ops.
        limits: let the values between take no more than these or `memory.MEMORY` (weights do not count), and stop a
            run that takes `memory.SLACK` times the seconds.

    Raises:
        OnnxError: neither can run the model, or it is over 2 GB and given as one proto.
    """

    def __init__(
        self,
        proto: onnx.ModelProto,
        folder: Path | None,
        name: str = "<model>",
        engine: Engine | None = None,
        *,
        limits: Limits | None = None,
    ) -> None:
        import onnxruntime as ort

        self.name, self.engine = name, ORT
        used = engine or Engine()
        options = session_options(used, folder)
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        # Nodes run in the file's order: a tap then reads its value at once, and the value is freed (see `taps`).
        options.execution_order = ort.ExecutionOrder.PRIORITY_BASED
        options.log_severity_level = 4
        options.enable_mem_pattern = False
        self._run_options: Any = None
        self._estimated: onnx.ModelProto | None = None  # what no arena limits, so that its values are added up before
        self._limits = limits
        own = limits is not None and limits.memory <= memory.MEMORY and memory.limited_arena()
        if own:
            options.add_session_config_entry("session.use_env_allocators", "1")
            options.add_session_config_entry("session.use_device_allocator_for_initializers", "1")
        if limits is not None:
            self._run_options = ort.RunOptions()
        if own:
            self._run_options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
        proto = with_small_data(_without_duplicate_names(proto), folder)
        self._session: Any
        try:
            self._session = ort.InferenceSession(
                _bytes(proto, name), options, providers=list(used.providers), enable_fallback=0
            )
        except OnnxError:
            raise
        except Exception as cause:  # noqa: BLE001  ORT's errors share no base class but Exception
            self._session = self._reference(proto, folder, cause)
        else:
            check_providers(self._session, used)
        if limits is not None and (self.engine == REFERENCE or (limits.memory <= memory.MEMORY and not own)):
            self._estimated = proto

    def _reference(self, proto: onnx.ModelProto, folder: Path | None, why: Exception) -> Any:
        from onnx.reference import ReferenceEvaluator

        self.engine = REFERENCE
        try:
            if any(is_external(tensor) for tensor in proto.graph.initializer):
                raise NotImplementedError("external data")
            return ReferenceEvaluator(proto)
        except Exception as cause:
            raise OnnxError(
                f"the model cannot be run: {_one_line(why)}",
                where=self.name,
                hint="check it with onnx.checker, or use a newer onnxruntime",
            ) from cause

    def run(self, batch: Batch) -> dict[str, Any]:
        """All outputs of one batch, by name.

        Raises:
            LimitError: it takes more memory or time than it may.
            OnnxError: an operator failed on these values.
        """
        names = [output.name for output in self._session.get_outputs()] if self.engine == ORT else None
        limits = self._limits
        estimated = self._estimated
        if limits is not None and estimated is not None and memory.kept_bytes(estimated, batch) > limits.memory:
            raise LimitError.on_batch(self.name, memory.memory_text(limits.memory))
        # A NumPy scalar, which arithmetic makes of an array without dimensions, is an array here.
        feeds = {name: np.asarray(value) if isinstance(value, np.generic) else value for name, value in batch.items()}
        try:
            if self.engine == REFERENCE or limits is None:
                result = self._session.run(names, feeds)
            else:
                with memory.stopped_after(self._run_options, memory.SLACK * limits.seconds):
                    result = self._session.run(names, feeds, self._run_options)
        except Exception as cause:
            if limits is not None and memory.NO_ROOM in str(cause):
                raise LimitError.on_batch(self.name, memory.memory_text(memory.MEMORY)) from cause
            if limits is not None and memory.STOPPED in str(cause):
                raise LimitError.on_batch(self.name, f"{memory.SLACK * limits.seconds:g} s") from cause
            raise OnnxError(
                f"the model cannot be run on this batch: {_one_line(cause)}",
                where=self.name,
                hint="give inputs of the shapes and values that the model is made for",
            ) from cause
        numbers = [_numbers_of_maps(value) for value in result]
        return dict(zip(names or self._session.output_names, numbers, strict=True))


def _numbers_of_maps(value: Any) -> Any:
    """The numbers in a list of maps, as a `ZipMap` makes, a row each; any other value as it is."""
    maps = isinstance(value, list) and bool(value) and all(isinstance(one, dict) for one in value)
    return np.array([list(one.values()) for one in value]) if maps else value


def _without_duplicate_names(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The model, or where two nodes have one name, which ONNX Runtime refuses, a copy in which they have none."""
    counts = Counter(node.name for node in proto.graph.node)
    if all(count == 1 or not name for name, count in counts.items()):
        return proto
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    for node in copy.graph.node:
        if counts[node.name] > 1:
            node.name = ""
    return copy


def _bytes(proto: onnx.ModelProto, name: str) -> bytes:
    try:
        data: bytes = proto.SerializeToString()
    except Exception as cause:  # protobuf raises its own error over 2 GB
        raise OnnxError("it is too large for one proto", where=name, hint="save it with external data") from cause
    if len(data) > LIMIT:
        raise OnnxError("it is over 2 GB", where=name, hint="save it with external data, and give its path")
    return data


def _one_line(error: Exception) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) < 400 else f"{text[:400]}…"
