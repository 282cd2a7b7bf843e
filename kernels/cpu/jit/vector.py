"""Sixteen float32 as one value in numba, so that every sum has the order that is written here.

In plain loops LLVM either may not reorder a sum, and then does not vectorize it, or may reorder it
in any way. These types lower to LLVM's own vectors: one register with AVX-512, two with AVX2, four
with NEON. Positions count float32 from a pointer.
"""

import operator
from typing import Any

from llvmlite import ir
from numba import njit
from numba.core import types
from numba.core.datamodel import models
from numba.core.typing import signature
from numba.core.typing.templates import ConcreteTemplate, infer_global
from numba.extending import intrinsic, lower_builtin, register_model

from kernels.cpu.jit.compiled import INLINED

LANES = 16

FLOATS = types.CPointer(types.float32)

_FLOAT, _INT = ir.FloatType(), ir.IntType(32)
_VECTOR, _INTS = ir.VectorType(_FLOAT, LANES), ir.VectorType(_INT, LANES)


class _Vector(types.Type):
    def __init__(self) -> None:
        super().__init__("Vector")


VECTOR = _Vector()


@register_model(_Vector)
class _Model(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: types.Type) -> None:
        super().__init__(dmm, fe_type, _VECTOR)


def _define_operator(function: Any, instruction: str) -> None:
    case = signature(VECTOR, VECTOR, VECTOR)
    infer_global(function)(type(f"_{instruction}", (ConcreteTemplate,), {"cases": [case]}))

    @lower_builtin(function, VECTOR, VECTOR)
    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return getattr(builder, instruction)(*args)


for _function, _instruction in (
    (operator.add, "fadd"),
    (operator.iadd, "fadd"),
    (operator.sub, "fsub"),
    (operator.mul, "fmul"),
    (operator.truediv, "fdiv"),
):
    _define_operator(_function, _instruction)


# ---- memory ----


def _pointer_of(kind: types.CPointer) -> Any:
    @intrinsic
    def at(typingctx, address):
        def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(kind))

        return kind(types.int64), emit

    return at


floats = _pointer_of(FLOATS)
"""Pointer to the float32 at an address; `ints` and `longs` are the same for int32 and int64."""
ints = _pointer_of(types.CPointer(types.int32))
longs = _pointer_of(types.CPointer(types.int64))


@intrinsic
def after(typingctx, pointer, position):
    """Pointer to a position."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.gep(args[0], [args[1]])

    return FLOATS(FLOATS, types.int64), emit


def _place(builder: Any, args: Any) -> Any:
    """Pointer to the vector at a position, which need not be aligned."""
    return builder.bitcast(builder.gep(args[0], [args[1]]), _VECTOR.as_pointer())


@intrinsic
def load(typingctx, pointer, position):
    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.load(_place(builder, args), align=4)

    return VECTOR(FLOATS, types.int64), emit


@intrinsic
def store(typingctx, pointer, position, value):
    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        builder.store(args[2], _place(builder, args), align=4)
        return context.get_dummy_value()

    return types.none(FLOATS, types.int64, VECTOR), emit


@intrinsic
def load_part(typingctx, pointer, position, count):
    """Load the first `count` lanes; the others are 0, and their memory is not touched."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        pointer, mask = _place(builder, args), _below(builder, args[2])
        kinds = (pointer.type, _INT, mask.type, _VECTOR)
        masked = _declare(builder, "llvm.masked.load.v16f32.p0", _VECTOR, kinds)
        return builder.call(masked, [pointer, _INT(4), mask, _VECTOR([_FLOAT(0.0)] * LANES)])

    return VECTOR(FLOATS, types.int64, types.int64), emit


@intrinsic
def store_part(typingctx, pointer, position, value, count):
    """Store the first `count` lanes only."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        pointer, mask = _place(builder, args), _below(builder, args[3])
        kinds = (_VECTOR, pointer.type, _INT, mask.type)
        masked = _declare(builder, "llvm.masked.store.v16f32.p0", ir.VoidType(), kinds)
        builder.call(masked, [args[2], pointer, _INT(4), mask])
        return context.get_dummy_value()

    return types.none(FLOATS, types.int64, VECTOR, types.int64), emit


@intrinsic
def prefetch(typingctx, pointer, position):
    """Start to fetch the memory at a position into the L2 cache; any address is allowed."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        place = builder.bitcast(builder.gep(args[0], [args[1]]), ir.IntType(8).as_pointer())
        fetch = _declare(builder, "llvm.prefetch.p0", ir.VoidType(), (place.type, _INT, _INT, _INT))
        builder.call(fetch, [place, _INT(0), _INT(2), _INT(1)])
        return context.get_dummy_value()

    return types.none(FLOATS, types.int64), emit


# ---- lanes ----


@intrinsic
def splat(typingctx, value):
    """The same number in every lane."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _splat(builder, args[0], _VECTOR)

    return VECTOR(types.float32), emit


@intrinsic
def fma(typingctx, a, b, c):
    """a * b + c, rounded once, on every machine."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        function = _declare(builder, "llvm.fma.v16f32", _VECTOR, (_VECTOR,) * 3)
        return builder.call(function, args)

    return VECTOR(VECTOR, VECTOR, VECTOR), emit


@intrinsic
def larger(typingctx, a, b):
    """a where a is larger, else b; so a NaN in b stays."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", *args), *args)

    return VECTOR(VECTOR, VECTOR), emit


@intrinsic
def within(typingctx, first, end, inside, outside):
    """Lanes [first, end) of `inside`, the others of `outside`."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        below = _below(builder, args[1])
        chosen = builder.select(below, args[2], args[3])
        return builder.select(_below(builder, args[0]), args[3], chosen)

    return VECTOR(types.int64, types.int64, VECTOR, VECTOR), emit


@intrinsic
def sum_lanes(typingctx, value):
    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _fold(builder, args[0], builder.fadd)

    return types.float32(VECTOR), emit


@intrinsic
def largest_lane(typingctx, value):
    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _fold(
            builder,
            args[0],
            lambda a, b: builder.select(builder.fcmp_ordered(">", a, b), a, b),
        )

    return types.float32(VECTOR), emit


@intrinsic
def _power_of_two(typingctx, value):
    """2^n of lanes that hold 1.5 * 2^23 + n: n lies in their lowest bits."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        biased = builder.add(builder.bitcast(args[0], _INTS), _INTS([_INT(127)] * LANES))
        return builder.bitcast(builder.shl(biased, _INTS([_INT(23)] * LANES)), _VECTOR)

    return VECTOR(VECTOR), emit


@njit(**INLINED)
def exp(x):
    """e^x to 2 units in the last place in [-87, 88]; below as at -87, above infinite; NaN stays.

    2^n * e^r with |r| <= ln(2) / 2: Cody and Waite's reduction, then Taylor's polynomial to r^7.
    """
    x = larger(splat(-87.0), x)
    x = splat(0.0) - larger(splat(-89.0), splat(0.0) - x)
    shifted = fma(x, splat(1.44269504), splat(12582912.0))
    n = shifted - splat(12582912.0)
    r = fma(n, splat(-0.693145752), x)
    r = fma(n, splat(-1.42860677e-6), r)
    p = fma(r, splat(1.98412698e-4), splat(1.38888889e-3))
    p = fma(p, r, splat(8.33333333e-3))
    p = fma(p, r, splat(4.16666667e-2))
    p = fma(p, r, splat(1.66666667e-1))
    p = fma(p, r, splat(0.5))
    p = fma(p, r, splat(1.0))
    p = fma(p, r, splat(1.0))
    return p * _power_of_two(shifted)


def _declare(builder: Any, name: str, result: ir.Type, kinds: Any) -> Any:
    """LLVM's intrinsic `name`, declared in the module."""
    module = builder.module
    return module.globals.get(name) or ir.Function(module, ir.FunctionType(result, kinds), name)


def _splat(builder: Any, value: Any, kind: ir.VectorType) -> Any:
    one = builder.insert_element(kind(ir.Undefined), value, _INT(0))
    return builder.shuffle_vector(one, kind(ir.Undefined), _INTS([_INT(0)] * LANES))


def _below(builder: Any, count: Any) -> Any:
    """Mask of the first `count` lanes: [16] bits.   count: int64."""
    lanes = _INTS([_INT(i) for i in range(LANES)])
    return builder.icmp_signed("<", lanes, _splat(builder, builder.trunc(count, _INT), _INTS))


def _fold(builder: Any, vector: Any, combine: Any) -> Any:
    """Combine the upper half of the lanes with the lower half until one lane is left."""
    width = LANES // 2
    while width:
        lanes, nothing = ir.VectorType(_INT, width), vector.type(ir.Undefined)
        low = builder.shuffle_vector(vector, nothing, lanes([_INT(i) for i in range(width)]))
        high = builder.shuffle_vector(
            vector, nothing, lanes([_INT(width + i) for i in range(width)])
        )
        vector, width = combine(low, high), width // 2
    return builder.extract_element(vector, _INT(0))
