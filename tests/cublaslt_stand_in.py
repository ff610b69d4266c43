"""What cuBLASLt's documentation says of its calls, in NumPy: descriptors are decoded from what is set, memory is read.

Nothing of `ops/cuda/cublaslt.py` is used here, neither its numbers nor its idea of rows and columns: matrices lie by
columns, element (i, j) at i + j * ld.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

import numpy as np

HALF, BFLOAT16, FLOAT = 2, 14, 0  # CUDA_R_16F, CUDA_R_16BF, CUDA_R_32F
COMPUTE_32F = 68
TRANSA, TRANSB, EPILOGUE, BIAS_POINTER, AUX_POINTER, AUX_LD, AUX_TYPE, BIAS_TYPE = 3, 4, 7, 8, 11, 12, 22, 26
SIZES = {
    TRANSA: 4, TRANSB: 4, EPILOGUE: 4, BIAS_POINTER: 8, AUX_POINTER: 8, AUX_LD: 8, AUX_TYPE: 4, BIAS_TYPE: 4
}  # fmt: skip
MAX_WORKSPACE, REDUCTION_MASK, MIN_ALIGNMENTS = 1, 3, (5, 6, 7, 8)
PREFERENCES = {MAX_WORKSPACE: 8, REDUCTION_MASK: 4, **dict.fromkeys(MIN_ALIGNMENTS, 4)}
NAMES = {
    2 | 128: "RELU_AUX", 2 | 128 | 4: "RELU_AUX_BIAS", 8 | 128: "DRELU", 8 | 128 | 16: "DRELU_BGRAD",
    32 | 128: "GELU_AUX", 32 | 128 | 4: "GELU_AUX_BIAS", 64 | 128: "DGELU", 64 | 128 | 16: "DGELU_BGRAD",
    256: "BGRADA", 512: "BGRADB",
}  # fmt: skip
SUCCESS, INVALID_VALUE, NOT_SUPPORTED = 0, 7, 15


def widened(raw, code):
    """16-bit numbers as FP32."""
    if code == HALF:
        return raw.view(np.float16).astype(np.float32)
    return (raw.astype(np.uint32) << 16).view(np.float32)


def narrowed(values, code):
    """FP32 numbers rounded to the nearest 16-bit ones, to even where two are as near."""
    values = np.asarray(values, np.float32)
    if code == HALF:
        return values.astype(np.float16).view(np.uint16)
    bits = values.view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


@dataclass
class Layout:
    """A matrix that lies by columns."""

    code: int
    rows: int
    columns: int
    ld: int

    def memory(self, address):
        """A view of [rows, columns]; what lies between the columns is not part of it."""
        assert self.ld >= self.rows, "the leading dimension is at least the number of rows"
        size = self.ld * (self.columns - 1) + self.rows
        flat = np.frombuffer((ctypes.c_uint16 * size).from_address(address), np.uint16)
        return np.lib.stride_tricks.as_strided(flat, (self.rows, self.columns), (2, 2 * self.ld))


@dataclass
class Ran:
    """A product that was computed."""

    epilogue: str
    algorithm: int
    handle: int


@dataclass
class StandIn:
    """The functions that are called.

    Args:
        refuses: names of epilogues that no algorithm is found for.
        algorithms: number of algorithms that are found.
        silent: algorithms, by their number, that write nothing beside the result.
        breaks: `breaks(name, algorithm, values)` changes what an algorithm writes, for trials that have to find it.
    """

    refuses: tuple[str, ...] = ()
    algorithms: int = 2
    silent: tuple[int, ...] = ()
    breaks: object = None
    ran: list[Ran] = field(default_factory=list)
    asked: int = 0
    _objects: list = field(default_factory=lambda: [None])

    def _new(self, pointer, made):
        self._objects.append(made)
        pointer._obj.value = len(self._objects) - 1
        return SUCCESS

    def _of(self, pointer):
        return self._objects[pointer.value]

    def cublasLtCreate(self, handle):
        return self._new(handle, "handle")

    def cublasLtMatmulDescCreate(self, product, compute, scale):
        assert (compute, scale) == (COMPUTE_32F, FLOAT)
        return self._new(product, {TRANSA: 0, TRANSB: 0, EPILOGUE: 1, BIAS_POINTER: 0, AUX_POINTER: 0, AUX_LD: 0})

    def cublasLtMatmulDescSetAttribute(self, product, attribute, value, size):
        return self._put(self._of(product), SIZES, attribute, value, size)

    def cublasLtMatrixLayoutCreate(self, layout, code, rows, columns, ld):
        assert (type(rows), type(columns), type(ld)) == (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64)
        return self._new(layout, Layout(code, rows.value, columns.value, ld.value))

    def cublasLtMatmulPreferenceCreate(self, preference):
        return self._new(preference, {})

    def cublasLtMatmulPreferenceSetAttribute(self, preference, attribute, value, size):
        return self._put(self._of(preference), PREFERENCES, attribute, value, size)

    def cublasLtMatmulPreferenceDestroy(self, preference):
        self._objects[preference.value] = None
        return SUCCESS

    def _put(self, where, sizes, attribute, value, size):
        assert type(size) is ctypes.c_size_t
        if sizes.get(attribute) != size.value or ctypes.sizeof(value._obj) != size.value:
            return INVALID_VALUE
        where[attribute] = value._obj.value or 0
        return SUCCESS

    def cublasLtMatmulAlgoGetHeuristic(self, handle, product, a, b, c, d, preference, most, found, count):
        assert self._of(handle) == "handle"
        self.asked += 1
        given, wanted = self._of(product), self._of(preference)
        name = NAMES[given[EPILOGUE]]
        if name in self.refuses:
            return NOT_SUPPORTED
        assert wanted[REDUCTION_MASK] & 4 == 0, "partial sums are never rounded to the type of the result"
        number = min(self.algorithms, most)
        for place in range(number):
            found[place].algorithm[0] = place + 1
            vectors = [given[key] & -given[key] for key in (BIAS_POINTER, AUX_POINTER) if given[key]]
            found[place].algorithm[1] = min(*(wanted[key] for key in MIN_ALIGNMENTS), *vectors)
            found[place].workspace, found[place].state = 64 * place, SUCCESS
            assert found[place].workspace <= wanted[MAX_WORKSPACE]
        count._obj.value = number
        return SUCCESS

    def cublasLtMatmul(
        self, handle, product, alpha, a, a_layout, b, b_layout, beta, c, c_layout, d, d_layout, algorithm, workspace,
        size, stream,
    ):  # fmt: skip
        assert self._of(handle) == "handle"
        given = self._of(product)
        a_layout, b_layout, c_layout, d_layout = map(self._of, (a_layout, b_layout, c_layout, d_layout))
        assert alpha._obj.value == 1 and beta._obj.value == 0 and (c.value, c_layout) == (d.value, d_layout)
        assert size.value == 0 or workspace.value, "a workspace of the size that the algorithm wants"
        vectors = [given[key] for key in (BIAS_POINTER, AUX_POINTER) if given[key]]
        aligned, addresses = algorithm._obj[1], (a.value, b.value, c.value, d.value, *vectors)
        assert all(address % aligned == 0 for address in addresses), "as aligned as the heuristic was told"
        left, right = (
            widened(layout.memory(pointer.value), layout.code).T if given[key] else
            widened(layout.memory(pointer.value), layout.code)
            for layout, pointer, key in ((a_layout, a, TRANSA), (b_layout, b, TRANSB))
        )  # fmt: skip
        name = NAMES[given[EPILOGUE]]
        values = left @ right
        assert values.shape == (d_layout.rows, d_layout.columns)
        writes = algorithm._obj[0] not in self.silent
        values = self._epilogue(name, values, left, right, given, d_layout, writes)
        if self.breaks is not None:
            values = self.breaks(name, algorithm._obj[0], values)
        d_layout.memory(d.value)[:] = narrowed(values, d_layout.code)
        self.ran.append(Ran(name, algorithm._obj[0], handle.value))
        return SUCCESS

    def _epilogue(self, name, values, left, right, given, out, writes):
        vector = None
        if any(part in name for part in ("BIAS", "BGRAD")):
            length = out.columns if name == "BGRADB" else out.rows
            assert given.get(BIAS_TYPE, out.code) == out.code
            vector = Layout(out.code, length, 1, length).memory(given[BIAS_POINTER])[:, 0]
        if name in ("BGRADA", "BGRADB"):  # over the inner dimension
            if writes:
                vector[:] = narrowed(left.sum(1) if name == "BGRADA" else right.sum(0), out.code)
            return values
        if name.endswith("BIAS"):
            values = values + widened(vector, out.code)[:, None]
        if "GELU" in name:
            assert given[AUX_LD] % 8 == 0 and given[AUX_LD] >= out.rows and given[AUX_TYPE] == out.code
            kept = Layout(out.code, out.rows, out.columns, given[AUX_LD]).memory(given[AUX_POINTER])
            if name.startswith("GELU"):
                if writes:
                    kept[:] = narrowed(values, out.code)
                return gelu(values)
            values = values * gelu_slope(widened(kept, out.code))
        else:
            assert given[AUX_LD] % 128 == 0 and given[AUX_LD] >= out.rows and AUX_TYPE not in given
            bits = Bits(given[AUX_POINTER], out.rows, out.columns, given[AUX_LD])
            if name.startswith("RELU"):
                if writes:
                    bits.write(~(values <= 0))
                return np.where(values <= 0, np.float32(0), values)
            values = np.where(bits.read(), values, np.float32(0))
        if name.endswith("BGRAD") and writes:  # the gradient of a bias that was added to every column
            vector[:] = narrowed(values.sum(1), out.code)
        return values


@dataclass
class Bits:
    """A matrix of bits that lies by columns, each beginning at a multiple of the leading dimension."""

    address: int
    rows: int
    columns: int
    ld: int

    def _bytes(self):
        size = self.ld // 8 * self.columns
        flat = np.frombuffer((ctypes.c_uint8 * size).from_address(self.address), np.uint8)
        return flat.reshape(self.columns, self.ld // 8)

    def write(self, bits):
        padded = np.zeros((self.columns, self.ld), bool)
        padded[:, : self.rows] = bits.T
        self._bytes()[:] = np.packbits(padded, axis=1, bitorder="little")

    def read(self):
        return np.unpackbits(self._bytes(), axis=1, bitorder="little")[:, : self.rows].T.astype(bool)


def gelu(x):
    """By the hyperbolic tangent."""
    return np.float32(0.5) * x * (1 + np.tanh(np.sqrt(2 / np.pi, dtype=np.float32) * (x + np.float32(0.044715) * x**3)))


def gelu_slope(x):
    """Its derivative, written out."""
    root, cubic = np.sqrt(2 / np.pi, dtype=np.float32), np.float32(0.044715)
    tanh = np.tanh(root * (x + cubic * x**3))
    return 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh**2) * root * (1 + 3 * cubic * x**2)
