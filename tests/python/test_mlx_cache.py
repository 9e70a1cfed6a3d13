"""morphkv.mlx.MorphKVKVCache: the reference's names, and mlx_lm's protocol."""

import copy
import pickle
import warnings
from types import SimpleNamespace

import mlx.core as mx
import mlx_lm.models.cache as mlx_cache
import numpy as np
import pytest

import morphkv.mlx
from morphkv import CacheConfig, MorphKVCache
from morphkv.mlx import MorphKVKVCache
from streams import gen, random_rows

SMALL = {"morphkv_budget": 16, "morphkv_n_sink": 2, "morphkv_window": 4}


def fed(rows=None, dtype=mx.float16):
    cache = MorphKVKVCache(SMALL)
    rows = mx.array(random_rows((2, 3, 60, 8)) if rows is None else rows).astype(dtype)
    for part in mx.split(rows, [31, 32], axis=2):
        cache.update_and_fetch(part, -part)
    return cache


def assert_same_from_here(cache, other):
    for part in np.split(random_rows((2, 3, 50, 8), 9), [1, 2, 30], axis=2):
        part = mx.array(part).astype(cache.keys.dtype)
        for a, b in zip(cache.update_and_fetch(part, part), other.update_and_fetch(part, part)):
            assert a.dtype == b.dtype and mx.array_equal(a, b).item()
        np.testing.assert_array_equal(cache.positions, other.positions)
        assert cache.offset == other.offset


@pytest.mark.parametrize(
    "config, limits",
    [
        (None, (512, 4, 8)),
        ({}, (512, 4, 8)),
        (SMALL, (16, 2, 4)),
        (SimpleNamespace(morphkv_budget=32), (32, 4, 8)),
        (CacheConfig(budget=64, n_sink=1, window=2), (64, 1, 2)),
    ],
)
def test_every_kind_of_config_is_understood(config, limits):
    cache = MorphKVKVCache(config)
    assert (cache._budget, cache._n_sink, cache._window) == limits
    assert (cache.config.budget, cache.config.n_sink, cache.config.window) == limits


def test_a_config_that_mlx_lm_cannot_serve_is_refused():
    with pytest.raises(ValueError, match="n_sink 4 \\+ window 4 is not below budget 8"):
        MorphKVKVCache({"morphkv_budget": 8, "morphkv_window": 4})
    with pytest.raises(ValueError, match="use queries 'keys'"):
        MorphKVKVCache(CacheConfig(queries="attention"))


def test_it_keeps_what_the_numpy_cache_keeps():
    rows = gen(300, 2, 8)
    plain = MorphKVCache(CacheConfig(budget=16, n_sink=2, window=4))
    plain.update_and_fetch(rows, -rows)
    cache = fed(rows)
    np.testing.assert_array_equal(cache.positions, plain.positions)
    np.testing.assert_array_equal(np.array(cache.keys), plain.keys)
    np.testing.assert_array_equal(np.array(cache.values), plain.values)
    assert cache.morphkv_kept_bytes == plain.kept_bytes
    assert cache.full_seq_bytes == plain.full_seq_bytes
    assert cache.compression_ratio == plain.compression_ratio
    assert (cache.tokens_seen, cache.tokens_kept, cache.offset) == (600, 16, 300)


def test_an_empty_cache_says_so():
    cache = MorphKVKVCache(SMALL)
    assert cache.empty() and cache.size() == cache.nbytes == cache.offset == 0
    assert cache.keys is None and cache.values is None and cache.state[:2] == (None, None)
    assert cache.compression_ratio == 1.0
    cache = fed()
    assert not cache.empty() and cache.size() == 16
    assert cache.nbytes >= cache.morphkv_kept_bytes


def test_servers_that_batch_or_quantise_leave_it_alone():  # field case 2
    class Mine(MorphKVKVCache):
        pass

    for cache in (MorphKVKVCache(SMALL), Mine(SMALL), copy.deepcopy(fed())):
        for name in ("merge", "bits", "to_quantized"):
            assert not hasattr(cache, name)
    caches = [fed()]
    assert mlx_cache.can_trim_prompt_cache(caches) is False
    assert mlx_cache.trim_prompt_cache(caches, 5) == 0
    assert [caches[0].trim(n) for n in (0, 3, 10**6, -1)] == [0] * 4
    assert caches[0].offset == 60


def test_state_and_meta_state_are_live_after_each_call():
    cache = MorphKVKVCache(SMALL)
    for t in range(30):
        row = mx.array(random_rows((1, 2, 1, 8), t))
        cache.update_and_fetch(row, row)
        mx.eval([c.state for c in [cache]])
        keys, values = cache.state[:2]
        assert keys.shape == values.shape == (1, 2, min(t + 1, 16), 8)
        assert mx.array_equal(keys[:, :, -1:], row).item()
        assert cache.meta_state[0] == str(t + 1)
    assert all(isinstance(text, str) for text in cache.meta_state)
    assert cache.meta_state[1:4] == ("16", "2", "4")
    cache.meta_state = cache.meta_state
    with pytest.raises(ValueError, match="set `state`"):
        cache.meta_state = ("0", "16")


@pytest.mark.parametrize(
    "copied",
    [
        copy.deepcopy,
        lambda c: pickle.loads(pickle.dumps(c)),
        lambda c: MorphKVKVCache.from_state(c.state),
        lambda c: MorphKVKVCache.from_state(list(c.state), c.meta_state),
    ],
    ids=["deepcopy", "pickle", "from_state", "from_state with meta_state"],
)
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_a_copy_goes_on_as_the_original(copied, dtype):
    cache = fed(dtype=dtype)
    assert_same_from_here(cache, copied(cache))


def test_a_state_can_be_set_on_a_cache_of_the_same_configuration_only():
    other = MorphKVKVCache(SMALL)
    other.state = fed().state
    assert_same_from_here(fed(), other)
    other = MorphKVKVCache()
    with pytest.raises(ValueError, match="another configuration"):
        other.state = fed().state
    assert other.empty()
    for wrong in ((), (1, 2, 3), (*fed().state[:4], "{}"), (*fed().state[:4], "no json")):
        with pytest.raises(ValueError, match="no state of a MorphKVKVCache"):
            other.state = wrong


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_mlx_lm_saves_and_our_loader_loads(tmp_path, dtype):
    caches = [fed(dtype=dtype), MorphKVKVCache(SMALL), fed()]
    path = tmp_path / "cache.safetensors"
    mlx_cache.save_prompt_cache(str(path), caches, {"note": "a"})
    loaded, metadata = morphkv.mlx.load_prompt_cache(path, return_metadata=True)
    assert metadata == {"note": "a"} and [type(c) for c in loaded] == [MorphKVKVCache] * 3
    for cache, other in zip(caches, loaded):
        if not cache.empty():
            assert_same_from_here(cache, other)
    assert loaded[1].empty() and loaded[1].config == caches[1].config


def test_mlx_lms_own_loader_works_once_the_class_is_registered(tmp_path, monkeypatch):
    path = str(tmp_path / "cache.safetensors")
    mlx_cache.save_prompt_cache(path, [fed()])
    monkeypatch.delattr(mlx_cache, "MorphKVKVCache", raising=False)
    with pytest.raises(KeyError):
        mlx_cache.load_prompt_cache(path)
    morphkv.mlx.register_with_mlx_lm()
    assert_same_from_here(fed(), mlx_cache.load_prompt_cache(path)[0])


def test_masks_without_a_window_are_mlx_lms():
    cache, stock = fed(), mlx_cache.KVCache()
    for n in (1, 5):
        for return_array in (False, True):
            mask, expected = cache.make_mask(n, return_array), stock.make_mask(
                n, return_array=return_array, window_size=None
            )
            if isinstance(expected, mx.array):
                assert mask.shape == (n, 16 + n)
                assert mask[:, :16].all().item()
                assert mx.array_equal(mask[:, 16:], expected).item()
            else:
                assert mask == expected


def expected_window_mask(cache, n, window):
    """[batch, head, query, row] from the token positions."""
    new = np.broadcast_to(np.arange(60, 60 + n), (2, 3, n))
    rows = np.concatenate([cache.positions, new], axis=2)[:, :, None, :]
    queries = np.arange(60, 60 + n)[:, None]
    return (rows <= queries) & (rows > queries - window)


def test_window_masks_fit_every_query_head_when_asked():
    cache = fed()
    for n, window in ((1, 7), (4, 20)):
        mask = np.array(cache.make_mask(n, window_size=window, heads=6))
        expected = expected_window_mask(cache, n, window)
        np.testing.assert_array_equal(mask, expected.repeat(2, axis=1))
        queries = mx.zeros((2, 6, n, 8), mx.float16)
        new = mx.array(random_rows((2, 3, n, 8)))
        k, v = copy.deepcopy(cache).update_and_fetch(new, new)
        out = mx.fast.scaled_dot_product_attention(queries, k, v, scale=1.0, mask=mx.array(mask))
        assert out.shape == queries.shape


def test_a_window_mask_for_all_heads_is_head_0s_and_warns_where_heads_differ():
    cache = fed()
    with pytest.warns(RuntimeWarning, match="pass heads="):
        mask = cache.make_mask(4, window_size=20)
    np.testing.assert_array_equal(np.array(mask), expected_window_mask(cache, 4, 20)[:, :1])
    alike = MorphKVKVCache(SMALL)
    rows = mx.repeat(mx.array(gen(40, 1, 8)), 3, axis=1)
    alike.update_and_fetch(rows, rows)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert alike.make_mask(4, window_size=20).shape == (1, 1, 4, 20)


def test_window_masks_that_hide_nothing():
    cache = MorphKVKVCache(SMALL)
    rows = mx.array(random_rows((1, 2, 3, 8)))
    cache.update_and_fetch(rows, rows)
    assert cache.make_mask(1, window_size=50) is None
    assert cache.make_mask(1, return_array=True, window_size=50).tolist() == [[True] * 4]
