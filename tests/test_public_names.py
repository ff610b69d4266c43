"""The names of `amp.*`: each is there, is imported when it is first asked for, and no room hides it."""

import ast
import inspect
import pkgutil
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import get_args

import pytest

import amp_compiler as amp
from amp_compiler.backends import BACKENDS, BackendArgument
from amp_compiler.backends.backend import DEFAULT, Mode
from amp_compiler.cli.options import TargetOption
from amp_compiler.ir import dtypes
from amp_compiler.ops.loss_scale import make
from amp_compiler.policy.schema import LossScaleModel
from amp_compiler.policy.targets import TARGETS

SOURCE = Path(amp.__file__)


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_the_three_lists_of_names_agree():
    """What type checkers read, what a star imports, and what is found at run time."""
    homes = {}
    for node in ast.walk(ast.parse(SOURCE.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("amp_compiler."):
            room = node.module.removeprefix("amp_compiler.")
            homes.update({one.asname or one.name: f"{room}.{one.name}:" if one.asname else room for one in node.names})
    assert homes == amp._HOMES
    assert sorted(homes) == amp.__all__


# By parameter, how a public function may declare it, so that an editor offers what there is.
DECLARED = {
    "dtype": {"DTypeArgument", "LowArgument"},
    "backend": {"BackendArgument"},
    "mode": {"Mode"},
    "target": {"Target | None"},
    "loss_scale": {"LossScaleArgument", "float"},
}


def test_choices_are_declared_in_every_signature():
    result = set()
    for name in amp.__all__:
        if not inspect.isfunction(getattr(amp, name)):
            continue
        for parameter in inspect.signature(getattr(amp, name)).parameters.values():
            if parameter.name in DECLARED:
                assert parameter.annotation in DECLARED[parameter.name], f"{parameter} of amp.{name}"
                result.add((name, parameter.name))
    assert {("compile", "backend"), ("training_step", "loss_scale"), ("convert_onnx", "target")} < result


def test_what_is_declared_is_what_is_taken():
    assert set(get_args(dtypes.LowName)) == {name for name in dtypes._BY_NAME if is_taken(dtypes.low_type, name)}
    names, torch_dtype = get_args(dtypes.DTypeArgument)
    assert set(get_args(names)) == {*get_args(dtypes.LowName), "auto"}
    assert torch_dtype.__forward_arg__ == "torch.dtype"
    assert get_args(get_args(BackendArgument)[0]) == tuple(BACKENDS)
    assert set(get_args(Mode)) == {DEFAULT}.union(*(backend.modes for backend in BACKENDS.values()))
    assert get_args(make.LossScaleMode) == tuple(make._KINDS)
    assert get_args(TargetOption)[1].metavar == f"<{'|'.join(TARGETS)}>"
    assert get_args(LossScaleModel.model_fields["mode"].annotation) == get_args(make.LossScaleMode)


def is_taken(function: Callable[[str], object], argument: str) -> bool:
    try:
        function(argument)
    except amp.AmpError:
        return False
    return True


@pytest.mark.parametrize("name", amp.__all__)
def test_a_name_is_that_of_its_module(name):
    home, itself, _ = amp._HOMES[name].partition(":")
    module = import_module(f"amp_compiler.{home}")
    assert getattr(amp, name) is (module if itself else getattr(module, name))


def test_an_editor_offers_the_api_alone():
    assert dir(amp) == sorted([*amp.__all__, "__version__"])


def test_no_room_has_the_name_of_a_function():
    """Importing a room sets an attribute of the package, which must not hide a function of the API."""
    rooms = {module.name for module in pkgutil.iter_modules([str(SOURCE.parent)])} | {"passes", "rules"}
    assert "training" in rooms
    assert not rooms & {*amp.__all__, "__version__"}


@pytest.mark.long
def test_importing_the_package_imports_no_other_library():
    """Not torch, nor anything beside it: what `import torch` had not brought is the package itself or Python's own.

    A user without ONNX models must not wait for ONNX, nor need it; what is ONNX is imported when it is first used.
    """
    code = (
        "import sys\n"
        "import torch\n"
        "before = set(sys.modules)\n"
        "import amp_compiler\n"
        "dir(amp_compiler)\n"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "print(*sorted(new - sys.stdlib_module_names))\n"
        "onnx = {'Conversion', 'convert_onnx', 'export_onnx'}\n"
        "assert onnx <= set(amp_compiler.__all__)\n"
        "for name in set(amp_compiler.__all__) - onnx:\n"
        "    getattr(amp_compiler, name)\n"
        "print(*[name for name in sys.modules if name.startswith('onnx')])\n"
        "amp_compiler.convert_onnx\n"
        "print('onnx' in sys.modules)\n"
    )
    assert run_python(code).splitlines() == ["amp_compiler", "", "True"]
    code = (
        "import sys\n"
        "import amp_compiler as amp\n"
        "amp.__version__\n"
        "print(*sorted(sys.modules))\n"
        "print(amp.passes.__name__, amp.errors.AmpError.__name__, amp.onnx.__name__)\n"
    )
    names, rooms = run_python(code).splitlines()
    assert not {"torch", "numpy", "networkx", "rich"} & set(names.split())
    assert rooms.split() == ["amp_compiler.passes", "AmpError", "amp_compiler.onnx"]  # found without an import


def test_an_unknown_name_is_an_error_with_the_nearest():
    with pytest.raises(AttributeError, match="'amp_compiler' has no attribute 'complie'") as caught:
        amp.complie  # noqa: B018
    assert caught.value.name == "complie"
    done = subprocess.run(
        [sys.executable, "-c", "import amp_compiler as amp; amp.complie"], capture_output=True, text=True, check=False
    )
    assert "Did you mean: 'compile'?" in done.stderr
    with pytest.raises(ImportError, match="trainign_step"):
        from amp_compiler import trainign_step  # noqa: F401
