"""Copies, pickles, states and files: each goes on bit for bit (field case 3)."""

import copy
import pickle
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from morphkv import CacheConfig, MorphKVCache
from streams import gen, random_rows

SMALL = CacheConfig(budget=16, n_sink=2, window=4)


def update(cache, rows, values):
    asks = cache.config.queries == "attention"
    queries = (np.concatenate([rows, 1 - rows], axis=1),) if asks else ()
    return cache.update_and_fetch(rows, values, *queries)


def fed(config=SMALL, dtype=np.float16):
    cache = MorphKVCache(config, layer=3)
    for part in np.split(random_rows((2, 3, 60, 8)), [31, 32], axis=2):
        update(cache, part.astype(dtype), -part.astype(dtype))
    return cache


def assert_same_from_here(cache, other):
    assert other.config == cache.config and other.layer == cache.layer
    for part in np.split(random_rows((2, 3, 50, 8), 9), [1, 2, 30], axis=2):
        part = part.astype(cache.keys.dtype)
        for a, b in zip(update(cache, part, part), update(other, part, part)):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(cache.positions, other.positions)
        assert cache.offset == other.offset


def through_state(cache):
    other = MorphKVCache(cache.config, cache.layer)
    other.state = cache.state
    return other


COPIES = {
    "copy()": lambda c: c.copy(),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda c: pickle.loads(pickle.dumps(c)),
    "pickle 2": lambda c: pickle.loads(pickle.dumps(c, protocol=2)),
    "state": through_state,
}
copies = pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)


@copies
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("queries", ["keys", "attention"])
@pytest.mark.parametrize("policy", [
    "morphkv", "h2o", "snapkv", "tova", "keydiff", "rkv", "streaming", "random", "full"])
def test_a_copy_goes_on_as_the_original(copied, dtype, policy, queries):
    config = CacheConfig(budget=16, n_sink=2, window=4, policy=policy, queries=queries, seed=7)
    cache = fed(config, dtype)
    assert_same_from_here(cache, copied(cache))


@copies
def test_a_copy_of_an_empty_cache_is_empty(copied):
    cache = MorphKVCache(SMALL, layer=3)
    other = copied(cache)
    assert other.offset == 0 and other.keys is None
    rows = random_rows((2, 3, 30, 8))
    for c in (cache, other):
        c.update_and_fetch(rows, rows)
    assert_same_from_here(cache, other)


@copies
def test_a_copy_shares_nothing(copied):
    cache = fed()
    other = copied(cache)
    before = cache.keys
    other.update_and_fetch(*2 * [random_rows((2, 3, 30, 8), 4)])
    other.reset()
    np.testing.assert_array_equal(cache.keys, before)
    assert cache.offset == 60


class Mine(MorphKVCache):
    pass


@pytest.mark.parametrize("copied", [c for name, c in COPIES.items() if name != "state"])
def test_a_copy_of_a_subclass_keeps_class_and_attributes(copied):
    mine = Mine(SMALL)
    mine.notes = ["a"]
    other = copied(mine)
    assert type(other) is Mine and other.notes == ["a"]
    assert (other.notes is mine.notes) == (copied in (COPIES["copy"], COPIES["copy()"]))


def test_deepcopy_keeps_cycles():
    mine = Mine(SMALL)
    mine.me = mine
    other = copy.deepcopy(mine)
    assert other.me is other is not mine


@pytest.mark.filterwarnings("ignore:nanobind:RuntimeWarning")
def test_an_uninitialised_object_is_an_error_and_no_crash():
    with pytest.raises((RuntimeError, TypeError)):
        MorphKVCache.__new__(MorphKVCache).offset


BAD_STATES = {
    "no dict": (lambda s: 3, TypeError),
    "lacks keys": (lambda s: s.pop("keys") and s, ValueError),
    "other config": (lambda s: s | {"config": CacheConfig()}, ValueError),
    "config of another type": (lambda s: s | {"config": {"budget": 16}}, TypeError),
    "fewer rows": (
        lambda s: s
        | {k: s[k][:, :, :9] for k in ("keys", "values")}
        | {"positions": s["positions"][:, :, :9]},
        ValueError,
    ),
    "values of another shape": (lambda s: s | {"values": s["values"][..., :4]}, ValueError),
    "float32 rows": (
        lambda s: s | {k: s[k].astype(np.float32) for k in ("keys", "values")},
        ValueError,
    ),
    "positions descend": (lambda s: s | {"positions": s["positions"][..., ::-1]}, ValueError),
    "position not yet seen": (lambda s: s | {"positions": s["positions"] + 100}, ValueError),
    "offset below the rows": (lambda s: s | {"offset": 3}, ValueError),
    "offset of another type": (lambda s: s | {"offset": "60"}, TypeError),
    "memory of fewer heads": (lambda s: s | {"memory": s["memory"][:-1]}, ValueError),
}


@pytest.mark.parametrize("spoil, error", BAD_STATES.values(), ids=BAD_STATES)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(spoil, error):
    cache = fed()
    twin = fed()
    with pytest.raises(error):
        cache.state = spoil(cache.state)
    assert_same_from_here(cache, twin)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
def test_a_saved_cache_goes_on_as_the_original(tmp_path, dtype):
    cache = fed(dtype=dtype)
    cache.save(tmp_path / "cache")
    other = MorphKVCache(SMALL, layer=3)
    other.load(str(tmp_path / "cache"))
    assert other.keys.dtype == cache.keys.dtype
    assert_same_from_here(cache, other)


def test_a_fresh_process_goes_on_as_the_original(tmp_path):  # field case 3
    rows = gen(300, 2, 8)
    cache = MorphKVCache(SMALL)
    cache.update_and_fetch(rows[:, :, :170], rows[:, :, :170])
    cache.save(tmp_path / "cache")
    np.save(tmp_path / "rest.npy", rows[:, :, 170:])
    code = """if True:
        import sys
        import numpy as np
        from morphkv import CacheConfig, MorphKVCache
        cache = MorphKVCache(CacheConfig(budget=16, n_sink=2, window=4))
        cache.load("cache")
        rest = np.load("rest.npy")
        for t in range(rest.shape[2]):
            cache.update_and_fetch(rest[:, :, t:t+1], rest[:, :, t:t+1])
        cache.save("end")
    """
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    end = MorphKVCache(SMALL)
    end.load(tmp_path / "end")
    cache.update_and_fetch(rows[:, :, 170:], rows[:, :, 170:])
    assert end.offset == 300
    np.testing.assert_array_equal(end.positions, cache.positions)
    np.testing.assert_array_equal(end.keys, cache.keys)


def test_a_damaged_or_foreign_file_is_refused_and_changes_nothing(tmp_path):
    fed().save(tmp_path / "cache")
    whole = (tmp_path / "cache").read_bytes()
    cache, twin = fed(), fed()
    for i in (0, len(whole) // 2, len(whole) - 1):
        (tmp_path / "bad").write_bytes(whole[:i] + bytes([whole[i] ^ 1]) + whole[i + 1 :])
        with pytest.raises(ValueError):
            cache.load(tmp_path / "bad")
    (tmp_path / "bad").write_bytes(whole[:-1])
    with pytest.raises(ValueError):
        cache.load(tmp_path / "bad")
    fed(CacheConfig(budget=17, n_sink=2, window=4)).save(tmp_path / "other")
    with pytest.raises(ValueError, match="budget 17"):
        cache.load(tmp_path / "other")
    assert_same_from_here(cache, twin)


def test_what_the_system_refuses_is_an_os_error(tmp_path):
    with pytest.raises(OSError, match="missing"):
        fed().load(tmp_path / "missing")
    with pytest.raises(OSError):
        fed().save(tmp_path / "no such folder" / "cache")
    with pytest.raises(TypeError):
        fed().save(3)
