"""What may come in and what goes out: field case 13, for numpy, ml_dtypes, MLX and others."""

import gc

import ml_dtypes
import mlx.core as mx
import numpy as np
import pytest

from morphkv import CacheConfig, MorphKVCache
from streams import random_rows

SMALL = CacheConfig(budget=16, n_sink=2, window=4)
ROWS = random_rows((2, 3, 40, 8))


def contiguous(dtype):
    return np.ascontiguousarray(ROWS.astype(dtype))


def every_other(rows):
    wide = np.zeros((*rows.shape[:3], 16), rows.dtype)
    wide[..., ::2] = rows
    return wide[..., ::2]


def reversed_view(rows):
    return np.ascontiguousarray(rows[::-1, ::-1, ::-1, ::-1])[::-1, ::-1, ::-1, ::-1]


def transposed(rows):
    return np.ascontiguousarray(rows.transpose(3, 0, 2, 1)).transpose(1, 3, 2, 0)


def read_only(rows):
    rows = rows.copy()
    rows.flags.writeable = False
    return rows


def one_field_of_records(rows):
    records = np.zeros(rows.shape, [("odd", np.int8), ("row", rows.dtype)])
    records["row"] = rows
    return records["row"]


LAYOUTS = [
    every_other,
    reversed_view,
    transposed,
    np.asfortranarray,
    read_only,
    one_field_of_records,
]
DTYPES = [np.float16, np.float32, np.float64, ml_dtypes.bfloat16]


def results(keys, values):
    cache = MorphKVCache(SMALL)
    k, v = cache.update_and_fetch(keys, values)
    return k, v, cache.keys, cache.values, cache.positions


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__)
def test_strides_do_not_change_the_answer(layout, dtype):
    rows = contiguous(dtype)
    laid = layout(rows)
    for got, expected in zip(results(laid, layout(-rows)), results(rows, -rows)):
        np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(laid, rows)


def test_broadcast_axes_do_not_change_the_answer():
    row = ROWS[:, :1, :, :1]
    wide = np.broadcast_to(row, ROWS.shape)
    assert 0 in wide.strides
    for got, expected in zip(results(wide, wide), results(wide.copy(), wide.copy())):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_rows_are_float16_or_bfloat16_when_both_inputs_are(dtype):
    rows = contiguous(dtype)
    stored = ml_dtypes.bfloat16 if dtype is ml_dtypes.bfloat16 else np.float16
    k, v, *_ = results(rows, rows)
    assert k.dtype == v.dtype == stored and k.shape == ROWS.shape
    np.testing.assert_array_equal(k, rows.astype(stored))
    k, v, *_ = results(rows, ROWS)
    assert k.dtype == v.dtype == np.float16


def test_a_foreign_byte_order_does_not_change_the_answer():
    k, *_ = results(ROWS.astype(">f4"), ROWS.astype(">f4"))
    np.testing.assert_array_equal(k, ROWS)


@pytest.mark.parametrize("dtype", [mx.float16, mx.float32, mx.bfloat16], ids=str)
def test_mlx_in_gives_mlx_out(dtype):
    rows = mx.array(ROWS).astype(dtype)
    cache = MorphKVCache(SMALL)
    k, v = cache.update_and_fetch(rows.transpose(0, 1, 2, 3), rows)
    stored = mx.bfloat16 if dtype == mx.bfloat16 else mx.float16
    assert type(k) is type(v) is type(cache.keys) is mx.array
    assert k.dtype == v.dtype == cache.values.dtype == stored
    assert mx.array_equal(k, rows.astype(stored)).item()
    assert type(cache.make_mask(3)) is mx.array


def test_mlx_views_do_not_change_the_answer():
    rows = mx.array(ROWS)
    view = mx.contiguous(rows.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
    lazy = (rows * 2) / 2
    for other in (view, lazy, mx.array(every_other(ROWS))):
        for got, expected in zip(results(other, other), results(rows, rows)):
            np.testing.assert_array_equal(np.array(got), np.array(expected))


def test_the_buffer_protocol_alone_gives_numpy():
    rows = memoryview(ROWS.astype(np.float32))
    k, *_ = results(rows, rows)
    assert type(k) is np.ndarray
    np.testing.assert_array_equal(k, ROWS)


def test_any_library_of_the_array_standard_gets_its_own_kind():
    class Foreign:
        """An array of a library that only DLPack and its namespace are known of."""

        def __init__(self, array):
            self.array = array

        def __dlpack__(self, **options):
            return self.array.__dlpack__(**options)

        def __dlpack_device__(self):
            return self.array.__dlpack_device__()

        def __array_namespace__(self):
            return np  # from_dlpack makes numpy arrays here

    k, *_ = results(Foreign(ROWS), Foreign(ROWS))
    assert type(k) is np.ndarray
    np.testing.assert_array_equal(k, ROWS)


@pytest.mark.parametrize("kind", [np.array, mx.array], ids=["numpy", "mlx"])
def test_results_outlive_later_calls_and_the_cache(kind):
    rows = kind(ROWS)
    cache = MorphKVCache(SMALL)
    k, v = cache.update_and_fetch(rows, rows)
    held = cache.keys
    expected = np.array(held).copy()
    for i in range(50):
        other = kind(random_rows((2, 3, 1 + i % 20, 8), i))
        cache.update_and_fetch(other, other)
    del cache
    gc.collect()
    np.testing.assert_array_equal(np.array(k), ROWS)
    np.testing.assert_array_equal(np.array(v), ROWS)
    np.testing.assert_array_equal(np.array(held), expected)


def test_results_are_the_callers_to_change():
    cache = MorphKVCache(SMALL)
    k, _ = cache.update_and_fetch(ROWS, ROWS)
    before = cache.keys.copy()
    k[:] = 9
    cache.keys[:] = 9
    np.testing.assert_array_equal(cache.keys, before)


WRONG_TYPES = [
    ROWS.astype(np.int32),
    ROWS.astype(np.complex64),
    ROWS.astype(object),
    ROWS.astype(bool),
    ROWS.astype(np.longdouble),
    ROWS.tolist(),
    "rows",
    3.0,
    mx.array(ROWS).astype(mx.int32),
]
WRONG_SHAPES = [
    (ROWS[0], ROWS[0], r"3 axes: give the 4 of \[B, H, S, D\]"),
    (ROWS[None], ROWS[None], "5 axes"),
    (ROWS, ROWS[:, :, :39], "must have the shape of keys"),
    (ROWS, ROWS[..., :4], "must have the shape of keys"),
    (ROWS[:, :, :0], ROWS[:, :, :0], "at least 1"),
    (ROWS[..., :4], ROWS[..., :4], "D 8"),
    (ROWS[:1], ROWS[:1], "B 2"),
    (ROWS[:, :2], ROWS[:, :2], "H 3"),
]


def unchanged_after(error, text, *arrays):
    cache, twin = MorphKVCache(SMALL), MorphKVCache(SMALL)
    for c in (cache, twin):
        c.update_and_fetch(ROWS, ROWS)
    with pytest.raises(error, match=text):
        cache.update_and_fetch(*arrays)
    assert cache.offset == 40
    np.testing.assert_array_equal(cache.positions, twin.positions)
    more = random_rows((2, 3, 9, 8), 3)
    for got, expected in zip(cache.update_and_fetch(more, more), twin.update_and_fetch(more, more)):
        np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(cache.positions, twin.positions)


@pytest.mark.parametrize("wrong", WRONG_TYPES, ids=lambda w: str(getattr(w, "dtype", type(w))))
def test_what_is_no_float_array_is_a_type_error(wrong):
    unchanged_after(TypeError, "keys are .*: give an array of float16", wrong, ROWS)
    unchanged_after(TypeError, "values are .*: give an array of float16", ROWS, wrong)


@pytest.mark.parametrize("keys, values, text", WRONG_SHAPES)
def test_a_shape_that_does_not_fit_is_a_value_error(keys, values, text):
    unchanged_after(ValueError, text, keys, values)


def test_a_missing_argument_is_a_type_error():
    with pytest.raises(TypeError):
        MorphKVCache().update_and_fetch(ROWS)
    with pytest.raises(TypeError):
        MorphKVCache(config=16)
