"""morphkv for mlx_lm: a prompt cache of constant size.

    cache = morphkv.mlx.make_prompt_cache(model, budget=512)
    mlx_lm.generate(model, tokenizer, prompt, prompt_cache=cache)

mlx_lm itself is imported only by the functions that need it. The rule, the shapes and the errors
are those of morphkv.MorphKVCache.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import numpy as np

from ._core import CacheConfig, MorphKVCache

__all__ = [
    "MorphKVKVCache",
    "guided_prefill",
    "load_prompt_cache",
    "make_prompt_cache",
    "register_with_mlx_lm",
]

_FIELDS = ("budget", "n_sink", "window", "recent", "pool", "fusion", "queries", "policy", "seed")


def _config_of(config: Any) -> CacheConfig:
    """A CacheConfig as it is; else morphkv_budget, morphkv_n_sink and morphkv_window of a dict or
    an object, each with its default."""
    if config is None:
        return CacheConfig()
    if isinstance(config, CacheConfig):
        if config.queries != "keys":
            raise ValueError(
                f"queries '{config.queries}': mlx_lm shows a cache no queries; use queries 'keys'"
            )
        return config

    def field(name: str, default: int) -> int:
        if isinstance(config, dict):
            return int(config.get(name, default))
        return int(getattr(config, name, default))

    return CacheConfig(
        budget=field("morphkv_budget", 512),
        n_sink=field("morphkv_n_sink", 4),
        window=field("morphkv_window", 8),
    )


@dataclasses.dataclass
class _Meta:
    """What a saved state holds beside arrays; JSON in `state`, so that mlx_lm can store it."""

    config: dict[str, Any]
    layer: int
    offset: int
    saturated: int
    memory: list[int]  # floats that the policy remembers, per head; the floats lie in one array

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: Any) -> _Meta:
        try:
            return _Meta(**json.loads(text))
        except (TypeError, ValueError) as error:
            raise ValueError(f"this is no state of a MorphKVKVCache: {error}") from None


class MorphKVKVCache:
    """The cache of one layer for mlx_lm. It has no `merge` and no `bits`: servers that batch must
    not swap it for an unbounded cache, nor quantise it.

    config: a morphkv.CacheConfig, or a dict or an object with morphkv_budget (512),
    morphkv_n_sink (4) and morphkv_window (8).
    """

    # What a call of the model is to the cache.
    _part = staticmethod(MorphKVCache.update_and_fetch)

    def __init__(self, config: Any = None, layer: int = 0) -> None:
        self._cache = MorphKVCache(_config_of(config), layer)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Stores [B, H, S, D] and returns the rows held before plus the new ones. Evaluates both
        arrays: which rows leave depends on their values."""
        mx.eval(keys, values)
        rows: tuple[mx.array, mx.array] = self._part(self._cache, keys, values)
        return rows

    @property
    def _budget(self) -> int:
        return self._cache.config.budget

    @property
    def _n_sink(self) -> int:
        return self._cache.config.n_sink

    @property
    def _window(self) -> int:
        return self._cache.config.window

    @property
    def config(self) -> CacheConfig:
        return self._cache.config

    @property
    def keys(self) -> mx.array | None:
        """A copy of the rows held now, [B, H, rows, D]; None before the first call."""
        keys: mx.array | None = self._cache.keys
        return keys

    @property
    def values(self) -> mx.array | None:
        values: mx.array | None = self._cache.values
        return values

    @property
    def positions(self) -> np.ndarray:
        """Token position of each row, ascending: numpy int64 [B, H, rows]."""
        positions: np.ndarray = self._cache.positions
        return positions

    @property
    def offset(self) -> int:
        """Tokens seen so far: the position at which the next one is rotated."""
        return self._cache.offset

    @property
    def morphkv_kept_bytes(self) -> int:
        return self._cache.kept_bytes

    @property
    def full_seq_bytes(self) -> int:
        return self._cache.full_seq_bytes

    @property
    def compression_ratio(self) -> float:
        return self._cache.compression_ratio

    @property
    def tokens_seen(self) -> int:
        return self._cache.tokens_seen

    @property
    def tokens_kept(self) -> int:
        return self._cache.tokens_kept

    # --- mlx_lm's protocol ---

    def size(self) -> int:
        """Rows held per head."""
        return self._cache.tokens_kept

    @property
    def nbytes(self) -> int:
        return self._cache.allocated_bytes

    def empty(self) -> bool:
        return self._cache.offset == 0

    def is_trimmable(self) -> bool:
        return False

    def trim(self, n: int) -> int:
        return 0

    def make_mask(
        self,
        N: int,
        return_array: bool = False,
        window_size: int | None = None,
        heads: int | None = None,
        **_: Any,
    ) -> mx.array | str | None:
        """Mask for the next N tokens, in mlx_lm's convention: None, "causal", or booleans over the
        rows that update_and_fetch will return.

        With `window_size`, heads that keep different rows need different masks. `heads`, the
        number of query heads, gives [B, heads, N, rows + N], right for every head. Models of
        mlx_lm do not pass it and want one mask for all heads: that of KV head 0,
        [B, 1, N, rows + N], with a RuntimeWarning where it is wrong for another head.
        """
        if window_size is None and not return_array:
            return None if N == 1 else "causal"
        mask = self._cache.make_mask(N, window_size)
        if mask is None:
            all_seen = return_array and (N > 1 or window_size is not None)
            return mx.ones((N, self.size() + N), dtype=mx.bool_) if all_seen else None
        mask = mx.array(mask)
        if mask.ndim == 2:
            return mask
        if heads is not None:
            return mx.repeat(mask, heads // mask.shape[1], axis=1)
        shared = mask[:, :1]
        if not mx.all(mask == shared).item():
            warnings.warn(
                f"window_size {window_size}: the heads keep different rows, and this mask is that "
                "of head 0; pass heads=<number of query heads> for one that fits every head, or "
                "leave sliding-window layers to mlx_lm's RotatingKVCache",
                RuntimeWarning,
                stacklevel=2,
            )
        return shared

    @property
    def state(self) -> tuple[Any, ...]:
        """(keys, values, positions, memory, meta): enough to go on bit for bit. Keys and values
        are None before the first call."""
        state = self._cache.state
        meta = _Meta(
            config={name: getattr(self.config, name) for name in _FIELDS},
            layer=self._cache.layer,
            offset=state["offset"],
            saturated=state["saturated"],
            memory=[len(floats) for floats in state["memory"]],
        )
        memory = np.concatenate([np.zeros(0, np.float32), *state["memory"]])
        return (
            state["keys"],
            state["values"],
            mx.array(state["positions"]),
            mx.array(memory),
            meta.to_json(),
        )

    @state.setter
    def state(self, state: Any) -> None:
        if not isinstance(state, (list, tuple)) or len(state) != 5:
            raise ValueError("this is no state of a MorphKVKVCache")
        keys, values, positions, memory, text = state
        meta = _Meta.from_json(text)
        ends = np.cumsum(meta.memory, dtype=np.int64)[:-1]
        restored = MorphKVCache(CacheConfig(**meta.config), meta.layer)
        cache = getattr(self, "_cache", restored)  # absent in an object from from_state()
        cache.state = {
            "keys": keys,
            "values": values,
            "positions": np.array(positions),
            "offset": meta.offset,
            "saturated": meta.saturated,
            "config": restored.config,
            "memory": np.split(np.array(memory), ends) if meta.memory else [],
        }
        self._cache = cache

    @property
    def meta_state(self) -> tuple[str, ...]:
        """offset and the configuration, as text. `state` alone is enough to restore a cache."""
        return (str(self.offset), *(str(getattr(self.config, name)) for name in _FIELDS))

    @meta_state.setter
    def meta_state(self, meta: Any) -> None:
        if tuple(meta) != self.meta_state:
            raise ValueError(f"meta_state {tuple(meta)} is not that of the state: set `state`")

    @classmethod
    def from_state(cls, state: Any, meta_state: Any = None) -> MorphKVKVCache:
        cache = cls.__new__(cls)
        cache.state = state
        return cache


def make_prompt_cache(
    model: Any,
    budget: int = 512,
    n_sink: int = 4,
    window: int = 8,
    config: CacheConfig | None = None,
) -> list[Any]:
    """One cache per layer of a model of mlx_lm; `config` replaces the three numbers.

    Layers for which the model asks a cache that is bounded anyway (sliding windows, recurrent
    state) keep it. ValueError when a layer's cache would grow without limit, or when there is no
    layer left to bound."""
    from mlx_lm.models import cache as mlx_cache

    if config is None:
        config = CacheConfig(budget=budget, n_sink=n_sink, window=window)
    caches = mlx_cache.make_prompt_cache(model)
    bounded = tuple(
        getattr(mlx_cache, name)
        for name in ("RotatingKVCache", "ArraysCache", "ChunkedKVCache")
        if hasattr(mlx_cache, name)
    )
    for layer, cache in enumerate(caches):
        if type(cache) is mlx_cache.KVCache:
            caches[layer] = MorphKVKVCache(config, layer)
        elif not isinstance(cache, bounded):
            raise ValueError(
                f"layer {layer} wants a {type(cache).__name__}, which this cache cannot replace: "
                "the model's memory would not be bounded"
            )
    if not any(isinstance(cache, MorphKVKVCache) for cache in caches):
        raise ValueError("no layer of this model has a KV cache that a budget could bound")
    return caches


@contextlib.contextmanager
def _each_call_is(part: Callable[..., Any], caches: list[MorphKVKVCache]) -> Iterator[None]:
    for cache in caches:
        cache._part = part
    try:
        yield
    finally:
        for cache in caches:
            del cache._part


def guided_prefill(
    model: Any, prompt: mx.array, prompt_cache: list[Any], guide: int = 24, piece: int = 488
) -> mx.array:
    """Reads a long prompt [tokens] with its end in mind, in constant memory: after each piece the last
    `guide` tokens ask which rows matter, and leave no trace. Returns the tokens still to be read,
    for mlx_lm to go on with:

        rest = morphkv.mlx.guided_prefill(model, prompt, caches)
        mlx_lm.generate(model, tokenizer, rest, prompt_cache=caches)

    Reads nothing when the prompt fits into the budget. ValueError when a layer has another cache,
    which could not take a guide back."""
    if guide < 1 or piece < 1:
        raise ValueError(f"guide {guide}, piece {piece}: give at least 1 token")
    for layer, cache in enumerate(prompt_cache):
        if not isinstance(cache, MorphKVKVCache):
            raise ValueError(
                f"layer {layer} has a {type(cache).__name__}, which cannot take a guide back: "
                "read the prompt without one"
            )
    rows = prompt_cache[0].size() + len(prompt)
    if rows <= prompt_cache[0].config.budget:
        return prompt
    asking = prompt[-guide:]
    done = 0
    while len(prompt) - done > piece + len(asking):
        with _each_call_is(MorphKVCache.extend_and_fetch, prompt_cache):
            model(prompt[None, done : done + piece], cache=prompt_cache)
        with _each_call_is(MorphKVCache.guide_and_fetch, prompt_cache):
            model(asking[None], cache=prompt_cache)
        for cache in prompt_cache:
            cache._cache.evict()
        done += piece
    return prompt[done:]


def register_with_mlx_lm() -> None:
    """Lets mlx_lm's own load_prompt_cache, which looks classes up by name in its module, read
    files that hold a MorphKVKVCache."""
    from mlx_lm.models import cache as mlx_cache

    setattr(mlx_cache, "MorphKVKVCache", MorphKVKVCache)


def load_prompt_cache(file_name: str | os.PathLike[str], return_metadata: bool = False) -> Any:
    """What mlx_lm's save_prompt_cache wrote: the caches, or (caches, metadata)."""
    from mlx_lm.models import cache as mlx_cache

    register_with_mlx_lm()
    return mlx_cache.load_prompt_cache(os.fspath(file_name), return_metadata=return_metadata)
