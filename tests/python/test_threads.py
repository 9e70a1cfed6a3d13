"""The GIL is released while a cache works, and one cache may be used from several threads."""

import sys
import threading
import time

import numpy as np

from morphkv import CacheConfig, MorphKVCache
from streams import random_rows


def run(threads):
    errors = []

    def guarded(work):
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - shown below
            errors.append(error)

    started = [threading.Thread(target=guarded, args=(work,)) for work in threads]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    assert errors == []


def test_other_threads_run_while_a_cache_works():
    rows = random_rows((1, 8, 4096, 128))
    cache = MorphKVCache(CacheConfig(budget=512))
    done = threading.Event()
    beats = []

    def beat():
        while not done.is_set():
            beats.append(time.perf_counter())
            time.sleep(0.0005)

    def work():
        try:
            start.append(time.perf_counter())
            cache.update_and_fetch(rows, rows)
            start.append(time.perf_counter())
        finally:
            done.set()

    start: list[float] = []
    interval = sys.getswitchinterval()
    run([beat, work])
    assert sys.getswitchinterval() == interval
    during = [t for t in beats if start[0] < t < start[1]]
    # Held, the GIL would let the other thread run at the call's two ends only.
    assert start[1] - start[0] > 0.02, "the call was too short to tell"
    assert len(during) >= 5, f"{len(during)} beats in {start[1] - start[0]:.3f} s"


def test_threads_with_caches_of_their_own_get_what_one_thread_gets():
    config = CacheConfig(budget=32, n_sink=2, window=4)
    streams = [random_rows((1, 2, 200, 16), seed) for seed in range(4)]

    def feed(cache, rows):
        for part in np.split(rows, range(1, 200, 3), axis=2):
            cache.update_and_fetch(part, part)

    alone = [MorphKVCache(config) for _ in streams]
    for cache, rows in zip(alone, streams):
        feed(cache, rows)
    together = [MorphKVCache(config) for _ in streams]
    run([lambda c=c, r=r: feed(c, r) for c, r in zip(together, streams)])
    for a, b in zip(alone, together):
        np.testing.assert_array_equal(a.positions, b.positions)
        np.testing.assert_array_equal(a.keys, b.keys)


def test_threads_that_share_a_cache_see_whole_calls():
    cache = MorphKVCache(CacheConfig(budget=32, n_sink=2, window=4))
    rows = random_rows((1, 2, 8, 16))

    def write():
        for _ in range(100):
            k, v = cache.update_and_fetch(rows, rows)
            np.testing.assert_array_equal(k, v)
            np.testing.assert_array_equal(k[:, :, -8:], rows)

    def read():
        for _ in range(100):
            state = cache.state
            np.testing.assert_array_equal(state["keys"], state["values"]) if cache.offset else None
            positions = cache.copy().positions
            assert (np.diff(positions) > 0).all()

    run([write, write, read])
    assert cache.offset == 2 * 100 * 8
