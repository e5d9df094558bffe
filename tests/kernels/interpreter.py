"""What Triton's interpreter does otherwise in tests: sums, roundings, and quicker calls."""

import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from triton import language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


@contextmanager
def products_are_wide() -> Iterator[None]:
    """Products in float64, so that a row's bits do not depend on NumPy's library.

    The interpreter multiplies by `numpy.matmul` in float32, whose library orders the sums of a row
    by the shape of the whole product, on some processors. Float64 holds the products of float16
    numbers and nearly all of their sums as they are, so that rounding the result to float32 gives
    the same bits in any order.
    """
    multiply = interpreter.InterpreterBuilder.create_dot

    def wide(self: Any, a: Any, b: Any, add: Any, *options: Any) -> Any:
        nothing = interpreter.TensorHandle(np.zeros(1), tl.float64)
        product = multiply(self, a, b, nothing, *options).data
        return interpreter.TensorHandle(product.astype(add.data.dtype) + add.data, add.dtype.scalar)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpreterBuilder, "create_dot", wide)
        yield


@contextmanager
def floats_are_rounded_to_nearest() -> Iterator[None]:
    """Conversions to e4m3 as a GPU makes them: the interpreter rounds halves up, and loses the
    carry where a mantissa is rounded up to the next power of two."""
    convert = interpreter._convert_float

    def rounded(numbers: Any, source: Any, target: Any, mode: Any) -> Any:
        if target != tl.float8e4nv or numbers.dtype not in (np.float32, np.float16):
            return convert(numbers, source, target, mode)
        exact = torch.from_numpy(np.ascontiguousarray(numbers))
        return exact.to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_convert_float", rounded)
        yield


@cache
def quicken() -> None:
    """Skip most of the interpreter's work besides that of the kernels."""
    _list_builtins_once()
    _patch_for_whole_launches()
    _remember_shapes()
    _compare_types_at_once()
    _pass_operands_that_fit()
    _check_overflow_at_once()


@cache
def _builtins(package: Any) -> list[str]:
    return [name for name, member in inspect.getmembers(package) if tl.core.is_builtin(member)]


def _list_builtins_once() -> None:
    """At every call the interpreter goes through all names of the language, a third of its time, to
    replace those of built-in functions. Which names those are does not change."""

    def patch(package: Any, *rest: Any) -> None:
        for name in _builtins(package):
            member = getattr(package, name)
            if tl.core.is_builtin(member):
                rest[-1].set_attr(package, name, _direct(member))

    interpreter._patch_builtin = patch


@cache
def _direct(member: Any) -> Any:
    """A built-in function that knows its semantics, without two wrappers that copy arguments."""
    fn = member.__wrapped__ if member.__code__ is tl.core.builtin(len).__code__ else member

    def called(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = interpreter.interpreter_semantic
        return fn(*args, **kwargs)

    return called


def _patch_for_whole_launches() -> None:
    """Each function that a kernel calls patches the language again, though the launch has done so;
    and each array's type is looked up in a table that is built for it."""
    patch, numpy_type = interpreter._patch_lang, interpreter._get_np_dtype
    types: dict[str, Any] = {}

    @cache
    def languages(fn: Any) -> list[Any]:
        return [value for value in fn.__globals__.values() if value is tl or value is tl.core]

    def patch_once(fn: Any) -> Any:
        if any(tl.core.is_builtin(language.load) for language in languages(fn)):
            return patch(fn)
        return None  # a scope is kept by launches only, which begin with the language as it is

    def numpy_type_of(of: Any) -> Any:
        if of.name not in types:
            types[of.name] = numpy_type(of)
        return types[of.name]

    interpreter._patch_lang, interpreter._get_np_dtype = patch_once, numpy_type_of


def _remember_shapes() -> None:
    """Each result has a type and a shape that are built again, half of the interpreter's time, and
    there are few of them: tensors of one shape share them."""
    core = tl.core
    build, equal = core.block_type.__init__, core.tuple.__eq__
    types: dict[Any, dict[str, Any]] = {}
    shapes: dict[Any, Any] = {}

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        if type(element_ty) is not tl.dtype:  # pointers differ in more than their names
            build(self, element_ty, shape)
            return
        key = element_ty.name, *shape
        if key not in types:
            build(self, element_ty, shape)
            self.shape = shapes.setdefault(key[1:], self.shape)
            self.of_tensors = of_tensors(key[1:])
            types[key] = self.__dict__
        self.__dict__ = dict(types[key])

    @cache
    def of_tensors(sizes: tuple[int, ...]) -> tuple[Any, Any]:
        return core.constexpr(math.prod(sizes)), core.tuple([core.constexpr(it) for it in sizes])

    def tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        known = type.__dict__.get("of_tensors")
        self.numel, self.shape = known or of_tensors(tuple(type.shape) if type.is_block() else ())

    def same(self: Any, other: Any) -> Any:
        if type(other) in (core.tuple, list):  # shapes: of types, and as they are worked out
            values = other if type(other) is list else other.values
            return core.constexpr(values is self.values or self.values == values)
        return equal(self, other)

    for kind, name, member in (
        (core.block_type, "__init__", block_type),
        (core.tensor, "__init__", tensor),
        (core.tuple, "__eq__", same),
    ):
        setattr(kind, name, member)


def _compare_types_at_once() -> None:
    """Types are compared by their names, and taken out of constants that they are not: nearly all
    are one object. What type two of them give does not change."""
    core = tl.core
    unwrap, equal = core._unwrap_if_constexpr, core.dtype.__eq__
    promote = TritonSemantic.computation_type_impl
    promoted: dict[Any, Any] = {}
    whole = (core.tensor, core.dtype, int, bool, float, str, type(None))

    def unwrapped(value: Any) -> Any:
        kind = type(value)
        if kind is core.constexpr:
            return value.value
        return value if kind in whole else unwrap(value)

    def same(self: Any, other: Any) -> bool:
        return self is other or bool(equal(self, other))

    def promoted_type(self: Any, one: Any, one_scalar: bool, two: Any, *rest: bool) -> Any:
        key = one.name, one_scalar, two.name, *rest
        if key not in promoted:
            promoted[key] = promote(self, one, one_scalar, two, *rest)
        return promoted[key]

    core._unwrap_if_constexpr = unwrapped
    core.dtype.__eq__ = same
    TritonSemantic.computation_type_impl = promoted_type


def _pass_operands_that_fit() -> None:
    """Most operands are tensors of one type, and of one shape or scalars."""
    match = TritonSemantic.binary_op_type_checking_impl
    broadcast = TritonSemantic.broadcast_impl_value
    numbers, blocks = tl.core.dtype, tl.core.block_type

    def matched(self: Any, lhs: Any, rhs: Any, *rules: Any, **named: Any) -> Any:
        like = type(lhs) is type(rhs) is tl.core.tensor and lhs.dtype is rhs.dtype
        divides = named.get("div_or_mod") or len(rules) > 3  # floats of 16 bits become wider
        if like and type(lhs.dtype) is numbers and not divides:
            return self.broadcast_impl_value(lhs, rhs)
        return match(self, lhs, rhs, *rules, **named)

    def fitted(self: Any, lhs: Any, rhs: Any) -> Any:
        if type(lhs.type) is type(rhs.type) is blocks:
            left, right = lhs.type.shape.values, rhs.type.shape.values
            if left == right:
                return lhs, rhs
            if len(left) == len(right) and all(map(_fits, left, right)):
                shape = [b if a == 1 else a for a, b in zip(left, right, strict=True)]
                return _spread(self, lhs, shape), _spread(self, rhs, shape)
        elif type(lhs.type) is type(rhs.type) is numbers:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    TritonSemantic.binary_op_type_checking_impl = matched
    TritonSemantic.broadcast_impl_value = fitted


def _fits(size: int, other: int) -> bool:
    return size == other or 1 in (size, other)


def _spread(semantic: Any, block: Any, shape: list[int]) -> Any:
    if block.type.shape.values == shape:
        return block
    handle = semantic.builder.create_broadcast(block.handle, shape)
    return semantic.make_tensor(handle, tl.core.block_type(block.type.scalar, shape))


def _check_overflow_at_once() -> None:
    """The interpreter works out whether 32-bit numbers overflow in the language itself, a fifth of
    its time, and tells nobody. NumPy does it here: signed numbers are sizes and places."""
    of = {"add": np.add, "sub": np.subtract, "mul": np.multiply}

    def check(self: Any, lhs: Any, rhs: Any, operation: Any) -> None:
        kind = lhs.type.scalar
        if kind.is_int_signed() and kind.int_bitwidth < 64:
            exact = of[operation.__name__](*(it.handle.data.astype(np.int64) for it in (lhs, rhs)))
            if exact.min() < kind.get_int_min_value() or exact.max() > kind.get_int_max_value():
                raise OverflowError(f"{kind} overflows in {operation.__name__}")

    TritonSemantic.binary_op_sanitize_overflow_impl = check
