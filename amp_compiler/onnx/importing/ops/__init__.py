"""ONNX operators as torch functions, one module per family; `registry` says how to add one.

Every module in this folder is imported here, so that an operator is known as soon as its function is written.
"""

from importlib import import_module
from pkgutil import iter_modules

from amp_compiler.onnx.importing.ops.registry import op

__all__ = ["op"]

for _module in sorted(iter_modules(__path__), key=lambda module: module.name):
    import_module(f"{__name__}.{_module.name}")
