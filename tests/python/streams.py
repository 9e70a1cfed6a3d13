"""Inputs and the rule, written plainly in numpy, for the tests of this directory."""

import numpy as np


def gen(tokens: int, heads: int, dim: int) -> np.ndarray:
    """GEN of the field cases, [1, head, token, dim] float16; exact."""
    x, numbers = 1, []
    for _ in range(tokens * heads * dim):
        x = (1103515245 * x + 12345) % 2**31
        numbers.append(((x >> 16) & 255) / 128 - 1)
    stream = np.array(numbers).reshape(tokens, heads, dim)
    return stream.transpose(1, 0, 2)[None].astype(np.float16)


def random_rows(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float16)


def relevance(keys: np.ndarray, window: int) -> np.ndarray:
    """[row] what the last `window` of the keys [row, dim] attend to on average."""
    k = keys.astype(np.float64)
    logits = k[-window:] @ k.T / np.sqrt(k.shape[1])
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    return (weights / weights.sum(axis=1, keepdims=True)).mean(axis=0)


class PlainHead:
    """One head under deferred eviction: plain lists, one eviction per token over budget."""

    def __init__(self, budget: int, n_sink: int, window: int) -> None:
        self.budget, self.n_sink, self.window = budget, n_sink, window
        self.keys: list[np.ndarray] = []
        self.values: list[np.ndarray] = []
        self.positions: list[int] = []
        self.seen = 0
        self.margins: list[tuple[float, float]] = []  # each victim's score and the next one's

    def step(self, keys: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        visible = np.array([*self.keys, *keys]), np.array([*self.values, *values])
        for key, value in zip(keys, values):
            self.keys.append(key)
            self.values.append(value)
            self.positions.append(self.seen)
            self.seen += 1
            if len(self.keys) > self.budget:
                self._evict()
        return visible

    def _evict(self) -> None:
        scores = relevance(np.array(self.keys), self.window)
        scores[: self.n_sink] = scores[-self.window :] = np.inf
        victim = int(np.argmin(scores))
        rest = np.delete(scores, victim).min()
        if np.isfinite(rest):
            self.margins.append((scores[victim], rest))
        for held in (self.keys, self.values, self.positions):
            del held[victim]


class PlainCache:
    """PlainHead for every batch row and head."""

    def __init__(self, budget: int, n_sink: int, window: int) -> None:
        self.limits = budget, n_sink, window
        self.heads: dict[tuple[int, int], PlainHead] = {}

    def update(self, keys: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        batch, heads = keys.shape[:2]
        for key in np.ndindex(batch, heads):
            self.heads.setdefault(key, PlainHead(*self.limits))
        rows = [self.heads[key].step(keys[key], values[key]) for key in np.ndindex(batch, heads)]
        k, v = (np.array(part) for part in zip(*rows))
        return k.reshape(batch, heads, *k.shape[1:]), v.reshape(batch, heads, *v.shape[1:])

    @property
    def positions(self) -> np.ndarray:
        batch, heads = max(self.heads)
        held = [self.heads[key].positions for key in np.ndindex(batch + 1, heads + 1)]
        return np.array(held).reshape(batch + 1, heads + 1, -1)
