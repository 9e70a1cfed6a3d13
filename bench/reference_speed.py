"""One decode step and a 2,048-token prefill of one layer: the reference implementation (MLX on the
CPU) against the rule written plainly in numpy and against morphkv through C++, numpy and
morphkv.mlx, and a deep copy of 30 layers; same run, one core. All must keep the same positions.

Run by `make bench`, or: tests/python/run WORK install python bench/reference_speed.py --cpp BINARY
"""

import argparse
import copy
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[variable] = "1"

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402
from veloxquant_mlx.cache.base import KVCacheConfig  # noqa: E402
from veloxquant_mlx.cache.morphkv_cache import MorphKVKVCache as ReferenceCache  # noqa: E402

import morphkv  # noqa: E402
import morphkv.mlx  # noqa: E402
import report  # noqa: E402

BUDGET, SINKS, WINDOW, HEADS, DIM, PREFILL = 512, 4, 8, 8, 128, 2048
STEPS, REFERENCE_STEPS = 500, 60
TARGETS = {  # at least so many times faster than the reference: decode step, prefill
    "morphkv, C++": (100, 200),
    "morphkv.mlx": (8, 40),
}
COPY_TARGET_MS = 100


def timed(work) -> float:
    start = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - start)


class NumpyArm:
    name = "morphkv, numpy"

    def __init__(self, rows: np.ndarray) -> None:
        self.rows = rows
        self.cache = None

    def fresh(self) -> None:
        config = morphkv.CacheConfig(budget=BUDGET, n_sink=SINKS, window=WINDOW)
        self.cache = morphkv.MorphKVCache(config)

    def feed(self, first: int, last: int) -> None:
        part = self.rows[:, :, first:last]
        self.cache.update_and_fetch(part, part)

    def positions(self) -> list[list[int]]:
        return self.cache.positions[0].tolist()


class PlainArm(NumpyArm):
    """The rule as ARCHITECTURE.md has it, in float32, all heads at once: what one writes first."""

    name = "numpy, straightforward"

    def fresh(self) -> None:
        self.keys = self.values = np.empty((HEADS, 0, DIM), np.float32)
        self.kept = np.empty((HEADS, 0), np.int64)
        self.offset = 0

    def feed(self, first: int, last: int) -> None:
        for row in self.rows[0, :, first:last].swapaxes(0, 1):
            self.append(row[:, None].astype(np.float32))

    def append(self, row: np.ndarray) -> None:
        self.keys = np.concatenate([self.keys, row], axis=1)
        self.values = np.concatenate([self.values, row], axis=1)
        self.kept = np.concatenate([self.kept, np.full((HEADS, 1), self.offset)], axis=1)
        self.offset += 1
        rows = self.keys.shape[1]
        if rows <= BUDGET:
            return
        logits = self.keys[:, -WINDOW:] @ self.keys.swapaxes(1, 2) / np.sqrt(np.float32(DIM))
        weights = np.exp(logits - logits.max(axis=2, keepdims=True))
        scores = (weights / weights.sum(axis=2, keepdims=True)).mean(axis=1)
        scores[:, :SINKS] = scores[:, -WINDOW:] = np.inf
        stay = np.arange(rows) != scores.argmin(axis=1)[:, None]
        self.keys = self.keys[stay].reshape(HEADS, rows - 1, DIM)
        self.values = self.values[stay].reshape(HEADS, rows - 1, DIM)
        self.kept = self.kept[stay].reshape(HEADS, rows - 1)

    def positions(self) -> list[list[int]]:
        return self.kept.tolist()


class MlxArm(NumpyArm):
    name = "morphkv.mlx"

    def __init__(self, rows: np.ndarray) -> None:
        super().__init__(mx.array(rows))

    def fresh(self) -> None:
        self.cache = morphkv.mlx.MorphKVKVCache(
            {"morphkv_budget": BUDGET, "morphkv_window": WINDOW}
        )

    def feed(self, first: int, last: int) -> None:
        part = self.rows[:, :, first:last]
        mx.eval(self.cache.update_and_fetch(part, part))


class ReferenceArm(MlxArm):
    name = "reference (MLX, CPU)"

    def fresh(self) -> None:
        config = KVCacheConfig(method="morphkv", morphkv_budget=BUDGET, morphkv_window=WINDOW)
        self.cache = ReferenceCache(config)

    def feed(self, first: int, last: int) -> None:
        part = self.rows[:, :, first:last]
        mx.eval(self.cache.update_and_fetch(part, part), self.cache.state)

    def positions(self) -> list[list[int]]:
        return np.array(self.cache._positions)[0].tolist()


def measure(arm: NumpyArm, steps: int, repeats: int) -> tuple[dict, list[list[int]]]:
    """Prefills, then decode steps; the figures, and the positions kept after REFERENCE_STEPS."""
    arm.fresh()
    arm.feed(0, 64)  # warm
    prefill = []
    for _ in range(repeats):
        arm.fresh()
        prefill.append(timed(lambda: arm.feed(0, PREFILL)))
    decode, positions = [], []
    for t in range(PREFILL, PREFILL + steps):
        decode.append(timed(lambda t=t: arm.feed(t, t + 1)))
        if len(decode) == REFERENCE_STEPS:
            positions = arm.positions()
    return {"decode_step": report.spread(decode), "prefill": report.spread(prefill)}, positions


def measure_cpp(binary: str, rows: np.ndarray, steps: int) -> tuple[dict, list[list[int]]]:
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "rows"
        np.ascontiguousarray(rows[0, :, : PREFILL + steps]).tofile(path)
        sizes = {"budget": BUDGET, "window": WINDOW, "heads": HEADS, "dim": DIM,
                 "prefill": PREFILL, "steps": steps}
        options = [f"--{name}={value}" for name, value in sizes.items()]
        run = subprocess.run([binary, f"--rows={path}", *options], check=True, capture_output=True)
    measured = json.loads(run.stdout)
    return measured, np.array(measured.pop("positions")).reshape(HEADS, -1).tolist()


def measure_deep_copy() -> dict[str, float]:
    rows = mx.array(np.random.default_rng(2).standard_normal((1, 3, 600, 64)).astype(np.float16))
    layers = [morphkv.mlx.MorphKVKVCache({"morphkv_budget": 512}) for _ in range(30)]
    for layer in layers:
        layer.update_and_fetch(rows, rows)
    return report.spread([timed(lambda: copy.deepcopy(layers)) for _ in range(11)])


def print_table(figures: dict) -> None:
    base = figures["arms"]["reference (MLX, CPU)"]
    print("| cache | decode step, ms (p10-p90) | faster | target | prefill of 2,048, ms | faster "
          "| target |")
    print("|---|---|---|---|---|---|---|")
    for name, arm in figures["arms"].items():
        cells = []
        for figure, target in zip(("decode_step", "prefill"), TARGETS.get(name, (None, None))):
            a = arm[figure]
            cells += [f"{a['median_ms']:.3f} ({a['p10_ms']:.3f}-{a['p90_ms']:.3f})",
                      f"{base[figure]['median_ms'] / a['median_ms']:.1f}x",
                      f"{target}x" if target else ""]
        print(f"| {name} | {' | '.join(cells)} |")
    for name, copies in figures["deep_copy_30_layers"].items():
        print(f"\ndeep copy of 30 layers (budget 512, H 3, D 64), {name}: "
              f"{copies['median_ms']:.1f} ms, target below {COPY_TARGET_MS}", end="")
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--cpp", required=True, help="the binary cache_speed")
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--prefills", type=int, default=2, help="reference prefills [%(default)s]")
    options = parser.parse_args()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    mx.set_default_device(mx.cpu)

    rows = np.random.default_rng(1).standard_normal((1, HEADS, PREFILL + STEPS, DIM))
    rows = rows.astype(np.float16)
    arms, kept = {}, {}
    reference = ReferenceArm(rows)
    arms[reference.name], kept[reference.name] = measure(
        reference, REFERENCE_STEPS, options.prefills
    )
    plain = PlainArm(rows)
    arms[plain.name], kept[plain.name] = measure(plain, STEPS // 4, 2)
    for arm in (NumpyArm(rows), MlxArm(rows)):
        arms[arm.name], kept[arm.name] = measure(arm, STEPS, 7)
    name = "morphkv, C++"
    _, kept[name] = measure_cpp(options.cpp, rows, REFERENCE_STEPS)
    arms[name], _ = measure_cpp(options.cpp, rows, STEPS)
    for name, positions in kept.items():
        if positions != kept[reference.name]:
            sys.exit(f"reference_speed: error: {name} keeps other positions than the reference")

    figures = {
        **report.head("reference_speed"),
        "morphkv_version": morphkv.__version__,
        "reference": "veloxquant-mlx 0.94.15",
        "mlx_version": mx.__version__,
        "simd_target": arms["morphkv, C++"]["simd_target"],
        "threads": 1,
        "openblas_coretype": os.environ.get("OPENBLAS_CORETYPE"),
        "budget": BUDGET, "window": WINDOW, "heads": HEADS, "dim": DIM, "prefill_tokens": PREFILL,
        "same_positions": True,
        "targets": TARGETS, "deep_copy_target_ms": COPY_TARGET_MS,
        "arms": arms,
        "deep_copy_30_layers": {
            "C++": arms["morphkv, C++"]["deep_copy_30_layers"],
            "morphkv.mlx": measure_deep_copy(),
        },
    }
    print_table(figures)
    report.write(figures, options.json)


if __name__ == "__main__":
    main()
