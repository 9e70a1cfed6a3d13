"""mlx_lm's own generation loop on a tiny Llama with random weights, prompts longer than the budget
and chunked prefill: against the stock cache below the budget, and above it against the model fed
with what a plain numpy cache under deferred eviction returns."""

import copy
import itertools

import mlx.core as mx
import mlx_lm.models.cache as mlx_cache
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models import gemma3_text, llama

import morphkv.mlx
from morphkv import CacheConfig
from streams import PlainCache

LAYERS, HEADS, KV_HEADS, DIM, VOCABULARY = 3, 4, 2, 16, 97


@pytest.fixture(scope="module", params=[mx.float16, mx.bfloat16], ids=str)
def model(request):
    mx.random.seed(5)
    args = llama.ModelArgs(
        model_type="llama",
        hidden_size=HEADS * DIM,
        num_hidden_layers=LAYERS,
        intermediate_size=96,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        rms_norm_eps=1e-5,
        vocab_size=VOCABULARY,
    )
    model = llama.Model(args)
    model.set_dtype(request.param)
    return model


class PlainMlxCache:
    """What mlx_lm asks of a cache, around the numpy model. Keys travel as float32, which holds
    both half types exactly."""

    def __init__(self, budget, n_sink, window):
        self.cache, self.offset = PlainCache(budget, n_sink, window), 0

    def update_and_fetch(self, keys, values):
        rows = [np.array(part.astype(mx.float32)) for part in (keys, values)]
        self.offset += keys.shape[2]
        return tuple(mx.array(part).astype(keys.dtype) for part in self.cache.update(*rows))

    def make_mask(self, n, return_array=False, window_size=None):
        assert not return_array and window_size is None
        return None if n == 1 else "causal"

    @property
    def state(self):
        return []


def prompt_of(tokens):
    return mx.array(np.random.default_rng(tokens).integers(0, VOCABULARY, tokens))


def generated(model, prompt, caches, tokens=25, chunk=32):
    """[token], [token, vocabulary] log-probabilities of mlx_lm's greedy loop."""
    steps = generate_step(
        prompt, model, max_tokens=tokens, prompt_cache=caches, prefill_step_size=chunk
    )
    chosen, logprobs = zip(*itertools.islice(steps, tokens))
    return list(map(int, chosen)), np.stack([np.array(p.astype(mx.float32)) for p in logprobs])


def test_below_the_budget_the_logits_are_the_stock_caches(model):
    prompt = prompt_of(100)
    caches = morphkv.mlx.make_prompt_cache(model, budget=128)
    tokens, logprobs = generated(model, prompt, caches)
    stock = mlx_cache.make_prompt_cache(model)
    expected_tokens, expected = generated(model, prompt, stock)
    assert tokens == expected_tokens
    np.testing.assert_array_equal(logprobs, expected)
    assert [cache.offset for cache in caches] == [cache.offset for cache in stock]
    assert caches[0].offset in (124, 125)  # mlx_lm runs a step ahead
    assert all(cache.compression_ratio == 1.0 for cache in caches)


@pytest.mark.parametrize("chunk", [1, 7, 32, 512])
def test_above_the_budget_the_logits_are_those_of_deferred_eviction(model, chunk):
    prompt = prompt_of(200)
    limits = {"budget": 48, "n_sink": 4, "window": 8}
    caches = morphkv.mlx.make_prompt_cache(model, **limits)
    tokens, logprobs = generated(model, prompt, caches, chunk=chunk)
    plain = [PlainMlxCache(**limits) for _ in range(LAYERS)]
    expected_tokens, expected = generated(model, prompt, plain, chunk=chunk)
    for cache, other in zip(caches, plain):
        np.testing.assert_array_equal(cache.positions, other.cache.positions)
        assert cache.offset == other.offset >= 224
        assert cache.size() == 48
    assert tokens == expected_tokens
    np.testing.assert_array_equal(logprobs, expected)


def test_a_guided_prompt_keeps_what_its_end_asks_for_and_the_guide_leaves_no_trace(model):
    prompt = prompt_of(300)
    caches = morphkv.mlx.make_prompt_cache(model, budget=64)
    rest = morphkv.mlx.guided_prefill(model, prompt, caches, guide=10, piece=40)
    assert len(rest) == 20 and [cache.offset for cache in caches] == [280] * LAYERS
    assert all(cache.size() == 64 for cache in caches)

    # The same with a copy of the caches for each guide.
    plain = morphkv.mlx.make_prompt_cache(model, budget=64)
    for done in range(0, 280, 40):
        with morphkv.mlx._each_call_is(morphkv.MorphKVCache.extend_and_fetch, plain):
            model(prompt[None, done : done + 40], cache=plain)
        asked = copy.deepcopy(plain)
        with morphkv.mlx._each_call_is(morphkv.MorphKVCache.guide_and_fetch, asked):
            model(prompt[None, -10:], cache=asked)
        for cache, with_guide in zip(plain, asked):
            with_guide._cache.evict()
            kept = set(with_guide.positions.flatten().tolist())
            assert kept <= set(range(done + 40)), "a row of the guide stayed"
            cache._cache = with_guide._cache
    for cache, other in zip(caches, plain):
        np.testing.assert_array_equal(cache.positions, other.positions)
        np.testing.assert_array_equal(np.array(cache.keys.astype(mx.float32)),
                                      np.array(other.keys.astype(mx.float32)))
    streamed = morphkv.mlx.make_prompt_cache(model, budget=64)
    model(prompt[None, :280], cache=streamed)
    assert any((a.positions != b.positions).any() for a, b in zip(caches, streamed))


def test_a_guided_prompt_within_the_budget_is_left_to_mlx_lm(model):
    caches = morphkv.mlx.make_prompt_cache(model, budget=64)
    prompt = prompt_of(64)
    assert morphkv.mlx.guided_prefill(model, prompt, caches) is prompt
    assert caches[0].empty()
    with pytest.raises(ValueError, match="layer 0 has a KVCache"):
        morphkv.mlx.guided_prefill(model, prompt, mlx_cache.make_prompt_cache(model))
    with pytest.raises(ValueError, match="guide 0"):
        morphkv.mlx.guided_prefill(model, prompt, caches, guide=0)


def test_a_saved_prompt_goes_on_as_the_uninterrupted_one(model, tmp_path):
    prompt = prompt_of(150)
    caches = morphkv.mlx.make_prompt_cache(model, budget=48)
    model(prompt[None, :100], cache=caches)
    path = str(tmp_path / "prompt.safetensors")
    mlx_cache.save_prompt_cache(path, caches)
    loaded = morphkv.mlx.load_prompt_cache(path)
    one = generated(model, prompt[100:], caches)
    other = generated(model, prompt[100:], loaded)
    assert one[0] == other[0]
    np.testing.assert_array_equal(one[1], other[1])


def test_quantisation_of_the_cache_does_not_lift_the_bound(model):
    caches = morphkv.mlx.make_prompt_cache(model, budget=48)
    steps = generate_step(
        prompt_of(100), model, max_tokens=5, prompt_cache=caches, kv_bits=4, quantized_kv_start=0
    )
    assert len(list(steps)) == 5
    assert all(type(c) is morphkv.mlx.MorphKVKVCache and c.size() == 48 for c in caches)


def test_make_prompt_cache_makes_one_cache_per_layer(model):
    caches = morphkv.mlx.make_prompt_cache(model, budget=64, n_sink=2, window=16)
    assert len(caches) == LAYERS and len(set(map(id, caches))) == LAYERS
    assert all(c.config == CacheConfig(budget=64, n_sink=2, window=16) for c in caches)
    config = CacheConfig(budget=32, policy="streaming")
    assert all(c.config == config for c in morphkv.mlx.make_prompt_cache(model, config=config))
    with pytest.raises(ValueError, match="budget 8"):
        morphkv.mlx.make_prompt_cache(model, budget=8)


def test_layers_that_are_bounded_anyway_keep_their_own_cache():
    args = gemma3_text.ModelArgs(
        model_type="gemma3_text",
        hidden_size=32,
        num_hidden_layers=6,
        intermediate_size=32,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        vocab_size=VOCABULARY,
        sliding_window=8,
        sliding_window_pattern=3,
    )
    model = gemma3_text.Model(args)
    caches = morphkv.mlx.make_prompt_cache(model, budget=24)
    kinds = [type(cache).__name__ for cache in caches]
    assert kinds == 2 * ["RotatingKVCache", "RotatingKVCache", "MorphKVKVCache"]
    model.set_dtype(mx.float16)
    tokens, _ = generated(model, prompt_of(60), caches, tokens=5, chunk=16)
    assert len(tokens) == 5 and caches[2].size() == 24


@pytest.mark.parametrize(
    "made, text",
    [
        (lambda: [mlx_cache.QuantizedKVCache()], "layer 0 wants a QuantizedKVCache"),
        (lambda: [mlx_cache.RotatingKVCache(8)], "no layer of this model"),
    ],
)
def test_a_bound_that_cannot_be_applied_is_an_error(made, text):  # field case 2
    class Model:
        make_cache = staticmethod(made)

    with pytest.raises(ValueError, match=text):
        morphkv.mlx.make_prompt_cache(Model())
