"""What is private of autograd, of dispatch modes and of devices."""

import contextlib
import inspect
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.utils.checkpoint
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from amp_compiler.errors import AmpError

# Where C code lies that gives the address of a tensor of Python's, as Inductor's own code has it; 0 without it.
ADDRESS_OF_TENSOR: int = getattr(torch._C._dynamo.guards, "_torchinductor_pyobject_tensor_data_ptr", 0)


def saved_tensor_hooks() -> tuple[Any, Any] | None:
    """The hooks that autograd would give a tensor to save now; `None` where there are none."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def shares_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors, fake ones too, lie in one storage."""
    return bool(torch._C._is_alias_of(one, other))  # type: ignore[attr-defined]


@contextlib.contextmanager
def modes_apart() -> Iterator[Sequence[TorchDispatchMode]]:
    """Within it no `TorchDispatchMode` of the user's is active; gives those that are around it, the innermost first.

    `_disable_current_modes` would touch the modes of tracing too, which are those of all threads.
    """
    from torch.utils._python_dispatch import _pop_mode, _push_mode

    modes = [_pop_mode() for _ in range(torch._C._len_torch_dispatch_stack())]
    try:
        yield modes
    finally:
        for mode in reversed(modes):
            _push_mode(mode)


@contextlib.contextmanager
def modes_again(modes: Sequence[TorchDispatchMode]) -> Iterator[None]:
    """Within it modes that `modes_apart` has given are active again."""
    from torch.utils._python_dispatch import _pop_mode, _push_mode

    for mode in reversed(modes):
        _push_mode(mode)
    try:
        yield
    finally:
        for _ in modes:
            _pop_mode()


def modes_around() -> bool:
    """Whether any `TorchDispatchMode` is active."""
    return bool(torch._C._len_torch_dispatch_stack())


def mode_around() -> TorchDispatchMode | None:
    """The innermost `TorchDispatchMode` that is active."""
    modes = _get_current_dispatch_mode_stack()
    return modes[-1] if modes else None


def transforms_here(levels: bool = True) -> bool:
    """Whether this call stands within a transform of torch.func, or a level of forward-mode differentiation.

    Args:
        levels: whether such a level counts, which is the process's: another thread may have opened it.
    """
    within = torch._C._functorch.peek_interpreter_stack() is not None
    return within or (levels and torch.autograd.forward_ad._current_level >= 0)


@contextlib.contextmanager
def exchanged(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Within it a name of torch's stands for another value."""
    theirs = inspect.getattr_static(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, theirs)


def no_saved_tensor_hooks() -> contextlib.AbstractContextManager[Any]:
    """Within it, what is saved for a backward passes no hook: those of a user or of checkpointing are not for tracing.

    Where there is none nothing is done: torch.func does not work within hooks, not even within idle ones.
    """
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is None:
        return contextlib.nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


def end_failed_capture(device: torch.device, pool: Any) -> None:
    """Tell the allocator that the capture of a CUDA graph which failed is over, and that its memory may go.

    torch does so at the end of a capture that succeeds. Without it the allocator would keep memory that several streams
    used until a capture ends that is none, and all memory of the failed one for ever.
    """
    end, release = (getattr(torch._C, name, None) for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"))
    if end is None or release is None:
        return
    index = torch.cuda.current_device() if device.index is None else device.index
    with contextlib.suppress(RuntimeError):  # torch had told it already, and then the pool is not ours to release
        end(index, pool)
        release(index, pool)


def clear_cublas_workspaces() -> None:
    """Give the workspaces of cuBLAS back to the allocator; the next product takes new ones, where it runs."""
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        clear()


def without_owning(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements at the same address as a tensor that does not keep the memory; itself where torch cannot.

    Whoever holds it must know that the memory stays what it is, as that of a captured graph does.
    """
    make = getattr(torch._C, "_construct_storage_from_data_pointer", None)
    if make is None:
        return tensor
    kept = tensor.untyped_storage()
    storage = make(kept.data_ptr(), tensor.device, kept.nbytes())
    alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return alias.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def global_module_hooks(backward: bool = False) -> tuple[int, ...]:
    """The hooks that are registered for all modules, forward or backward ones, by their numbers."""
    names = ("_global_backward_hooks", "_global_backward_pre_hooks") if backward else (
        "_global_forward_hooks", "_global_forward_pre_hooks"
    )  # fmt: skip
    return tuple(number for name in names for number in getattr(torch.nn.modules.module, name, ()))


def autograd_sequence() -> int:
    """The number that autograd gives the next backward function that it makes."""
    return int(torch._C._autograd._get_sequence_nr())


def function_sequence(function: Any) -> int:
    """The number that a backward function was given; -1 where this torch does not tell."""
    read = getattr(function, "_sequence_nr", None)
    return int(read()) if read is not None else -1


def has_native_bf16(device: torch.device) -> bool:
    """True where the device multiplies BF16 matrices in hardware."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    if device.type == "cpu":
        probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported", "_is_arm_bf16_supported")
        return any(bool(getattr(torch.cpu, probe)()) for probe in probes if hasattr(torch.cpu, probe))
    return False


def has_bf16_kernels() -> bool:
    """Whether torch has fast BF16 products for this CPU; without them they take 10 to 100 times as long as FP32's.

    oneDNN has them from AVX-512 and from NEON with BF16 on. `AMP_PLAIN_CPU` in the environment, 0 or 1, takes this CPU
    for one that has or lacks them.

    Raises:
        AmpError: `AMP_PLAIN_CPU` is neither.
    """
    setting = os.environ.get("AMP_PLAIN_CPU", "")
    if setting not in ("", "0", "1"):
        raise AmpError(f"AMP_PLAIN_CPU={setting!r} is neither 0 nor 1", hint="unset it, or use one of them")
    if setting:
        return setting == "0"
    probe = (
        getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None) if torch.backends.mkldnn.is_available() else None
    )
    return has_native_bf16(torch.device("cpu")) or (probe is not None and bool(probe()))
