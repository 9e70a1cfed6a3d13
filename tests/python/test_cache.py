"""MorphKVCache: the contract, and field cases 1, 2, 4, 7 and 14."""

import subprocess
import sys

import numpy as np
import pytest

import morphkv
from morphkv import CacheBuilder, CacheConfig, MorphKVCache
from streams import PlainCache, gen, random_rows

SMALL = CacheConfig(budget=16, n_sink=2, window=4)
KEEP_SETS = [  # of GEN(300, 2, 8) with SMALL, from the field cases
    [0, 1, 258, 269, 280, 281, 282, 286, 289, 290, 293, 295, 296, 297, 298, 299],
    [0, 1, 215, 276, 280, 286, 287, 290, 291, 292, 293, 294, 296, 297, 298, 299],
]


def fed(config=SMALL, rows=None, split=None):
    cache = MorphKVCache(config)
    rows = gen(300, 2, 8) if rows is None else rows
    for part in np.split(rows, split if split is not None else [], axis=2):
        cache.update_and_fetch(part, part)
    return cache


def test_gen_is_the_generator_of_the_field_cases():
    first = [0.546875, -0.015625, 0.0078125, -0.1640625, -0.4140625, 0.9609375, 0.765625, 0.9609375]
    assert gen(3, 2, 8)[0, 0, 0].tolist() == first


@pytest.mark.parametrize("split", [[], range(1, 300), [50, 51, 180], range(7, 300, 7)])
def test_the_keep_sets_are_those_of_the_field_cases_for_every_split(split):
    cache = fed(split=list(split))
    assert cache.positions.dtype == np.int64
    assert cache.positions.tolist() == [KEEP_SETS]
    kept = np.stack([gen(300, 2, 8)[0, h, keep] for h, keep in enumerate(KEEP_SETS)])
    np.testing.assert_array_equal(cache.keys[0], kept)
    np.testing.assert_array_equal(cache.values[0], kept)


def test_offset_is_the_number_of_tokens_and_never_the_number_of_rows():  # field case 1
    rows, cache = gen(300, 2, 8), MorphKVCache(SMALL)
    sizes = [50] + [1] * 250
    seen = 0
    for size in sizes:
        part = rows[:, :, seen : seen + size]
        cache.update_and_fetch(part, part)
        seen += size
        assert cache.offset == seen
        assert cache.tokens_kept == cache.keys.shape[2] == 16
    assert cache.copy().offset == 300
    other = MorphKVCache(SMALL)
    other.state = cache.state
    assert other.offset == 300
    cache.reset()
    assert (cache.offset, cache.tokens_kept, cache.keys, cache.values) == (0, 0, None, None)


def test_a_call_returns_the_rows_held_before_and_all_new_ones():
    rows, cache, plain = random_rows((2, 3, 90, 8), 5), MorphKVCache(SMALL), PlainCache(16, 2, 4)
    for part in np.split(rows, [1, 20, 21, 60, 64], axis=2):
        k, v = cache.update_and_fetch(part, -part)
        expected_k, expected_v = plain.update(part, -part)
        np.testing.assert_array_equal(k, expected_k)
        np.testing.assert_array_equal(v, expected_v)
        np.testing.assert_array_equal(cache.positions, plain.positions)


def test_no_object_of_this_class_has_merge_or_bits():  # field case 2
    class Mine(MorphKVCache):
        pass

    for cache in (MorphKVCache(), Mine(), Mine().copy(), fed().copy()):
        assert not hasattr(cache, "merge") and not hasattr(cache, "bits")


@pytest.mark.parametrize("n", [0, 3, 10**6, -1])
def test_trim_changes_nothing(n):  # field case 4
    cache = fed()
    before = cache.state
    assert cache.is_trimmable() is False
    assert cache.trim(n) == 0
    after = cache.state
    np.testing.assert_array_equal(before["keys"], after["keys"])
    assert cache.offset == 300 and cache.positions.tolist() == [KEEP_SETS]


def test_nothing_leaves_at_the_budget_and_one_row_at_one_more():  # field case 7
    rows = random_rows((1, 2, 17, 8))
    cache = MorphKVCache(SMALL)
    cache.update_and_fetch(rows[:, :, :16], rows[:, :, :16])
    np.testing.assert_array_equal(cache.keys, rows[:, :, :16])
    assert cache.compression_ratio == 1.0
    cache.update_and_fetch(rows[:, :, 16:], rows[:, :, 16:])
    assert cache.positions.shape == (1, 2, 16)
    assert cache.compression_ratio == 17 / 16


def feed_rows(config, keys):
    keys = np.array(keys, np.float16)[None, None]
    cache = MorphKVCache(config)
    cache.update_and_fetch(keys, keys)
    return cache


def test_scores_are_scaled():  # field case 14
    keys = [(0, 0, 0, 0), (3, -3, 0, 0), (1, 1, 0, 0), (3, 3, 0, 0), (0.5, 0, 0, 0), (0, 0.5, 0, 0)]
    cache = feed_rows(CacheConfig(budget=5, n_sink=1, window=2), keys)
    assert cache.positions.tolist() == [[[0, 2, 3, 4, 5]]]


def test_among_equal_scores_the_lowest_position_leaves():  # field case 14
    cache = feed_rows(CacheConfig(budget=6, n_sink=1, window=2), np.ones((12, 4)))
    assert cache.positions.tolist() == [[[0, 7, 8, 9, 10, 11]]]


def test_values_beyond_float16_are_stored_as_its_largest_and_counted():  # field case 14
    rows = np.ones((1, 1, 3, 4), np.float32)
    rows[0, 0, 1] = [1e5, -1e5, 65504, 1]
    cache = MorphKVCache()
    k, _ = cache.update_and_fetch(rows, np.ones_like(rows))
    assert k[0, 0, 1].tolist() == [65504, -65504, 65504, 1]
    assert cache.saturated == 2


@pytest.mark.parametrize("which", ["keys", "values"])
def test_nan_is_refused_and_leaves_the_cache_as_it_was(which):  # field case 14
    cache = fed()
    before = cache.state
    rows = {"keys": np.ones((1, 2, 40, 8)), "values": np.ones((1, 2, 40, 8))}
    rows[which][0, 1, 39, 7] = np.nan
    with pytest.raises(ValueError, match=f"{which} of batch 0, head 1 contain NaN"):
        cache.update_and_fetch(**rows)
    np.testing.assert_array_equal(cache.keys, before["keys"])
    assert cache.offset == 300
    part = random_rows((1, 2, 30, 8))
    twin = fed()
    for c in (cache, twin):
        c.update_and_fetch(part, part)
    np.testing.assert_array_equal(cache.positions, twin.positions)


def test_bytes_count_what_is_held():
    cache = fed(CacheConfig(), random_rows((1, 3, 700, 64)))
    assert cache.kept_bytes == 2 * 3 * 64 * 512 * 2
    assert cache.full_seq_bytes == 2 * 3 * 64 * 700 * 2
    assert cache.compression_ratio == 700 / 512
    assert cache.tokens_seen == 3 * 700
    # At rest the memory is the budget's and a fixed slack's, however long the calls were.
    assert cache.kept_bytes <= cache.allocated_bytes <= 1.2 * cache.kept_bytes
    assert MorphKVCache().compression_ratio == 1.0 and MorphKVCache().allocated_bytes == 0


def test_masks_come_from_token_positions_head_by_head():
    cache = fed()
    assert cache.make_mask(1) is None
    mask = cache.make_mask(3)
    assert mask.dtype == np.bool_ and mask.shape == (3, 19)
    np.testing.assert_array_equal(mask[:, 16:], np.tril(np.ones((3, 3), bool)))
    assert mask[:, :16].all()
    for n, window in ((1, 7), (3, 20)):
        mask = cache.make_mask(n, window_size=window)
        assert mask.shape == (1, 2, n, 16 + n)
        for head, keep in enumerate(KEEP_SETS):
            rows = np.array(keep + list(range(300, 300 + n)))
            queries = np.arange(300, 300 + n)[:, None]
            expected = (rows <= queries) & (rows > queries - window)
            np.testing.assert_array_equal(mask[0, head], expected)


def test_masks_of_an_empty_cache_are_causal():
    np.testing.assert_array_equal(MorphKVCache().make_mask(4), np.tril(np.ones((4, 4), bool)))
    with pytest.raises(ValueError, match="0 tokens"):
        MorphKVCache().make_mask(0)


def test_query_source_attention_takes_the_queries():
    config = CacheConfig(budget=16, n_sink=2, window=4, queries="attention")
    rows, queries = random_rows((1, 2, 40, 8)), random_rows((1, 6, 40, 8), 1)
    cache = MorphKVCache(config)
    with pytest.raises(ValueError, match="needs the queries"):
        cache.update_and_fetch(rows, rows)
    with pytest.raises(ValueError, match="do not fit"):
        cache.update_and_fetch(rows, rows, queries[:, :5])
    cache.update_and_fetch(rows, rows, queries)
    # The paper's rule: one scoring by the window's queries at the call's end.
    scores = np.zeros((2, 40))
    for head in range(2):
        for g in range(3):
            for t in range(36, 40):
                logits = rows[0, head, : t + 1].astype(float) @ queries[0, 3 * head + g, t]
                weights = np.exp(logits / np.sqrt(8) - (logits / np.sqrt(8)).max())
                scores[head, : t + 1] += weights / weights.sum()
        scores[head, :2] = scores[head, 36:] = np.inf
        keep = np.sort(np.argsort(scores[head], kind="stable")[24:])
        assert cache.positions[0, head].tolist() == keep.tolist()


def test_a_guide_ranks_the_rows_and_leaves_no_trace():
    rows, guide = random_rows((1, 2, 40, 8)), random_rows((1, 2, 5, 8), 1)
    cache = MorphKVCache(SMALL)
    k, v = cache.extend_and_fetch(rows, -rows)
    np.testing.assert_array_equal(k, rows)
    np.testing.assert_array_equal(v, -rows)
    assert cache.positions.tolist() == [[list(range(40))] * 2]
    with pytest.raises(ValueError, match=r"evict\(\)"):
        cache.state
    k, v = cache.guide_and_fetch(guide, -guide)
    np.testing.assert_array_equal(k, np.concatenate([rows, guide], axis=2))
    np.testing.assert_array_equal(v, -np.concatenate([rows, guide], axis=2))
    assert cache.offset == 40 and cache.positions.shape == (1, 2, 40)
    np.testing.assert_array_equal(cache.keys, rows)

    cache.evict()
    for head in range(2):
        scores = np.zeros(40)
        seen = np.concatenate([rows, guide], axis=2)[0, head].astype(float)
        for t in range(40, 45):
            logits = seen[: t + 1] @ seen[t] / np.sqrt(8)
            weights = np.exp(logits - logits.max())
            scores = np.maximum(scores, (weights / weights.sum())[:40])
        scores[:2] = scores[36:] = np.inf
        keep = np.sort(np.argsort(scores, kind="stable")[24:])
        assert cache.positions[0, head].tolist() == keep.tolist()
        np.testing.assert_array_equal(cache.keys[0, head], rows[0, head, keep])
    # The guide's queries have the say where they are the source.
    asked = MorphKVCache(CacheConfig(budget=16, n_sink=2, window=4, queries="attention"))
    asked.extend_and_fetch(rows, rows, rows)
    with pytest.raises(ValueError, match="needs the queries"):
        asked.guide_and_fetch(guide, guide)
    asked.guide_and_fetch(guide, guide, guide)
    asked.evict()
    np.testing.assert_array_equal(asked.positions, cache.positions)


def test_only_policy_morphkv_takes_a_guide():
    cache = MorphKVCache(CacheConfig(budget=16, n_sink=2, window=4, policy="streaming"))
    rows = random_rows((1, 2, 20, 8))
    cache.extend_and_fetch(rows, rows)
    with pytest.raises(ValueError, match="'streaming' takes no guide"):
        cache.guide_and_fetch(rows, rows)
    cache.evict()
    assert cache.positions.tolist() == [[[0, 1, *range(6, 20)]] * 2]


def test_the_builder_makes_one_cache_per_layer():
    class Model:
        layers = [None] * 3

    class Spec:
        n_layers = 4

    for model, n in ((2, 2), (Model(), 3), (Spec(), 4)):
        caches = CacheBuilder.for_model(model, SMALL)
        assert [cache.layer for cache in caches] == list(range(n))
        assert all(cache.config == SMALL for cache in caches)
    assert CacheBuilder.for_model(1)[0].config == CacheConfig()
    with pytest.raises(ValueError, match="n_layers 0"):
        CacheBuilder.for_model(0)
    with pytest.raises(TypeError, match="number of layers"):
        CacheBuilder.for_model("llama")


def test_the_builder_makes_a_cache_by_the_name_of_its_policy():
    cache = CacheBuilder.create("streaming", SMALL)
    assert cache.config == CacheConfig(budget=16, n_sink=2, window=4, policy="streaming")
    rows = gen(60, 1, 4)
    cache.update_and_fetch(rows, rows)
    assert cache.positions.tolist() == [[[0, 1, *range(46, 60)]]]
    with pytest.raises(ValueError, match="policy 'lru' is not known"):
        CacheBuilder.create("lru")


def test_the_repr_tells_budget_and_offset():
    assert "budget=16" in repr(fed()) and "offset 300" in repr(fed())


def test_the_version_is_the_installed_packages():
    from importlib.metadata import version

    assert morphkv.__version__ == version("morphkv")


def test_the_package_is_typed():
    from importlib.resources import files

    assert files("morphkv").joinpath("py.typed").is_file()
    stub = files("morphkv").joinpath("_core.pyi").read_text()
    compile(stub, "_core.pyi", "exec")
    assert "def update_and_fetch(self, keys: ArrayT, values: ArrayT" in stub


def test_importing_the_package_imports_no_mlx():
    code = "import sys, morphkv; sys.exit('mlx' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
