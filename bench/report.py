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


def spread(ms: list[float]) -> dict[str, float]:
    """Median, 10th and 90th percentile."""
    ms = sorted(ms)
    shares = {"median_ms": 0.5, "p10_ms": 0.1, "p90_ms": 0.9}
    return {name: ms[int(share * (len(ms) - 1))] for name, share in shares.items()}


def write(report: dict, path: str | None) -> None:
    if path:
        pathlib.Path(path).write_text(json.dumps(report, indent=2) + "\n")
