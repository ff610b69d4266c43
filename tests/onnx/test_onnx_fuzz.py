"""Models damaged at random, seeded changes of bytes and of messages: each is converted or refused with an `OnnxError`.

They run in a process of their own, so that a crash or a loop without end in a library is a failure with its number, and
not the end of the tests.
"""

import logging
import random
import resource
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx_corpus import built
from onnx_models import masked, mlp, run_program

import amp_compiler as amp
from amp_compiler.errors import OnnxError

SECONDS = 20  # of processor time that one case may take


def bases() -> list[onnx.ModelProto]:
    """Small models of many kinds."""
    names = (
        "loop",
        "scan",
        "nested",
        "resize_with_shared_initializers",
        "local_function",
        "quantised",
        "existing_casts",
    )
    return [mlp(), masked(-1e9), *(built(name)[0] for name in names)]


# ---- changes of bytes


BYTES = ["flip", "flip", "flip", "cut", "drop", "insert", "repeat", "swap"]


def damage(data: bytearray, change: str, rng: random.Random) -> None:
    """Bits are turned, or a part goes, is doubled or turned, or other bytes come in."""
    start = rng.randrange(len(data))
    part = data[start : start + rng.randrange(1, 60)]
    if change == "flip":
        for _ in range(rng.choice([1, 1, 2, 8, 40])):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif change == "cut":
        del data[start:]
    else:
        others = {"drop": b"", "insert": part + rng.randbytes(20), "repeat": part * rng.randrange(2, 5)}
        data[start : start + len(part)] = others.get(change, part[::-1])


# ---- changes of messages

_STRINGS = [
    "",
    "nobody",
    "x" * 300,
    "a\0b",
    "ä",
    "Nothing",
    "Loop",
    "If",
    "com.microsoft",
    "../w.bin",
    "/etc/passwd",
    "-1",
]
_NUMBERS = [-1, 0, 1, 3, 7, 16, 22, 55, 99, 1000, 2**31 - 1]
_LONG = [2**40, 2**62, -(2**63)]


def _messages(message: Any) -> list[Any]:
    """A message and all that are in it."""
    result = [message]
    for one in result:
        for field, value in one.ListFields():
            if field.message_type:
                result += value if field.is_repeated else [value]
    return result


def _change(proto: onnx.ModelProto, rng: random.Random) -> None:
    """A field of a message within loses, doubles or mixes what it holds, or takes another number, name or message."""
    known = _messages(proto)
    kinds = sorted(
        {type(one).__name__ for one in known if one.DESCRIPTOR.fields}
    )  # so that the many shapes do not hide what is rare
    kind = rng.choice(kinds)
    message = rng.choice([one for one in known if type(one).__name__ == kind])
    used = [field for field, _ in message.ListFields()]
    field = rng.choice(used if used and rng.random() < 0.8 else list(message.DESCRIPTOR.fields))
    values = [
        getattr(one, field.name) for one in known if type(one) is type(message) and field in dict(one.ListFields())
    ]
    value = getattr(message, field.name)
    if not field.is_repeated:
        if field.message_type:
            message.ClearField(field.name)
            if values and rng.random() < 0.7:
                value.CopyFrom(rng.choice(values))
        else:
            setattr(message, field.name, _scalar(field, values, rng))
        return
    items = list(value)
    if field.message_type:
        items = [type(one).FromString(one.SerializeToString()) for one in items]
    change = rng.randrange(4)
    if change == 0 and items:
        del items[rng.randrange(len(items))]
    elif change == 1:
        rng.shuffle(items)
    elif change == 2 and items and not field.message_type:
        items[rng.randrange(len(items))] = _scalar(field, items, rng)
    else:
        others = [one for some in values for one in some] or ([] if field.message_type else [_scalar(field, [], rng)])
        items += rng.sample(others, min(1, len(others)))
    message.ClearField(field.name)
    getattr(message, field.name).extend(items)


def _scalar(field: Any, values: list[Any], rng: random.Random) -> Any:
    """A number, a text or bytes for a field, often as another message has it."""
    if values and rng.random() < 0.5:
        return rng.choice(values)
    if field.enum_type:
        return rng.choice(field.enum_type.values).number
    kind = field.cpp_type
    if kind == field.CPPTYPE_STRING:
        return rng.choice(_STRINGS) if field.type == field.TYPE_STRING else rng.randbytes(rng.randrange(40))
    if kind in (field.CPPTYPE_FLOAT, field.CPPTYPE_DOUBLE):
        return rng.choice([0.0, -1.5, 1e30, float("nan"), float("inf")])
    wide = kind in (field.CPPTYPE_INT64, field.CPPTYPE_UINT64)
    number = rng.choice([*_NUMBERS, *_LONG * wide])
    return abs(number) if kind in (field.CPPTYPE_UINT32, field.CPPTYPE_UINT64) else number


def case(number: int, known: list[onnx.ModelProto]) -> tuple[str, bytes | onnx.ModelProto]:
    """The case of a number, which makes it: what was done, and what came of it: bytes, or a message."""
    rng = random.Random(number)
    source = known[number % len(known)]
    if number % 2:
        data = bytearray(source.SerializeToString())
        change = rng.choice(BYTES)
        damage(data, change, rng)
        return change, bytes(data)
    result = onnx.ModelProto()
    result.CopyFrom(source)
    count = rng.choice([1, 1, 2, 3])
    for _ in range(count):
        _change(result, rng)
    return f"{count} changes", result


def outcome(way: Callable[[Any], Any], source: Any) -> str:
    """`made`, or `refused`; anything else is a fault, and told: a result that the checker refuses, too."""
    try:
        way(source)
    except OnnxError as error:
        return "refused" if error.what and error.hint else f"FAULT no hint: {error}"
    except Exception as error:  # noqa: BLE001  what this test is for
        return f"FAULT {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return "made"


def run(first: int, count: int, folder: Path) -> None:
    """Run cases and print a line for each: its number, what was done, and what each way in made of it."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    known = bases()
    ways: list[Callable[[Any], Any]] = [
        lambda source: onnx.checker.check_model(amp.convert_onnx(source).model, full_check=True),
        lambda source: amp.explain(source, dtype="bf16"),
        amp.onnx_to_fx,
        lambda source: amp.convert_onnx(source, check=False, opset=23),
        lambda source: amp.onnx_to_fx(source, check=False),
    ]
    for number in range(first, first + count):
        used = resource.getrusage(resource.RUSAGE_SELF)
        resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + SECONDS, resource.RLIM_INFINITY))
        print(number, end=" ", flush=True)
        done, source = case(number, known)
        if isinstance(source, bytes):
            path = folder / "case.onnx"
            path.write_bytes(source)
            result = [outcome(way, path) for way in ways]
        else:
            result = [outcome(way, source) for way in ways]
        print(done, *result, sep=" | ", flush=True)


@pytest.mark.parametrize(
    ("first", "count"),
    [
        pytest.param(0, 60, marks=pytest.mark.long),
        pytest.param(60, 140, marks=pytest.mark.slow),
        *(pytest.param(at, 300, marks=pytest.mark.slow) for at in range(200, 2000, 300)),
    ],
)
def test_a_damaged_model_is_made_or_refused(first, count, tmp_path):
    program = f"from test_onnx_fuzz import Path, run; run({first}, {count}, Path({str(tmp_path)!r}))"
    lines = run_program(program).splitlines()
    assert len(lines) == count
    faults = [line for line in lines if "FAULT" in line]
    assert not faults, f"{len(faults)} of {count}:\n" + "\n".join(faults[:20])
    result = Counter(part for line in lines for part in line.split(" | ")[1:])
    assert result["refused"] > count and result["made"] > count // 4, result
