"""What every benchmark in Python says of itself, and how it sums up its times."""

import json
import pathlib
import time


def cpu_name() -> str:
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return "unknown"


def head(benchmark: str) -> dict[str, str]:
    date = time.strftime("%Y-%m-%d", time.gmtime())
    return {"benchmark": benchmark, "cpu": cpu_name(), "date": date}


def quantile(ms: list[float], share: float) -> float:
    """Of sorted values; between two of them in proportion, as eval/measure.h has it."""
    below = int(at := share * (len(ms) - 1))
    above = min(below + 1, len(ms) - 1)
    return ms[below] + (at - below) * (ms[above] - ms[below])


def spread(ms: list[float]) -> dict[str, float]:
    """Median, 10th and 90th percentile."""
    shares = {"median_ms": 0.5, "p10_ms": 0.1, "p90_ms": 0.9}
    return {name: quantile(sorted(ms), share) for name, share in shares.items()}


def write(report: dict, path: str | None) -> None:
    if path:
        pathlib.Path(path).write_text(json.dumps(report, indent=2) + "\n")
