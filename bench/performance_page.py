"""Writes docs/performance.md and its plots from the figures that the benchmarks left in
docs/data/performance/. What a missing file or arm would say is left out, with a note.

Run by `make bench`, or: "$(scripts/setup bench)" bench/performance_page.py
"""

import argparse
import dataclasses
import json
import pathlib
import sys
from collections.abc import Iterator

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402

BENCHMARKS = ("decode_speed", "prefill_speed", "openvino_speed", "memory", "serve_speed",
              "reference_speed", "kernel_speed")
MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"  # of `make model`
LONG = 7500  # tokens from which a context counts as long
# Rules are found by what the benchmarks say of their settings, whatever their names are.
DEFAULT, KEYS = {"default": True}, {"queries": "keys", "window": 8}
EVICT_SHARES = ((KEYS, 0.03), (DEFAULT, 0.06), ({"queries": "attention", "window": 32}, 0.10))
OVER_STREAMING, PREFILL_EVICT_SHARE, FLAT, PASSES = 1.08, 0.08, 0.03, 1.5
OVER_FULL, OVER_OPENVINO = 3.0, 1.5
SERVE, OVER_SERVER, FIRST_TOKEN = "morphkv serve", 1.5, 2.0

Table = list[str]
Figures = dict[str, dict]  # by benchmark; a missing one is {}


def note(text: str) -> None:
    print(f"performance_page: {text}", file=sys.stderr)


def table(header: str, rows: list[list[str]]) -> Table:
    lines = [f"| {header} |", "|" + "---|" * (header.count("|") + 1)]
    return ["", *lines, *(f"| {' | '.join(row)} |" for row in rows)]


def spread(point: dict, digits: int = 1) -> str:
    median, low, high = (f"{point[name]:.{digits}f}" for name in ("median_ms", "p10_ms", "p90_ms"))
    return f"{median} ({low}-{high})"


def times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}x"


def percent(share: float | None) -> str:
    return f"{100 * share:.1f} %" if share else ""


def mib(size: float | None) -> str:
    return "" if size is None else f"{size / 2**20:.1f} MiB"


def is_rule(entry: dict, wanted: dict) -> bool:
    rule = entry.get("rule", {})
    return rule.get("policy") == "morphkv" and wanted.items() <= rule.items()


def arms_with(figures: dict, wanted: dict) -> list[dict]:
    return [a for a in figures.get("arms", []) if is_rule(a, wanted)]


def first_long(points: list[dict]) -> dict | None:
    """The shortest of the long contexts."""
    long = [p for p in points if p["context_tokens"] >= LONG]
    return min(long, key=lambda p: p["context_tokens"], default=None)


# --- Targets --------------------------------------------------------------------------------------


@dataclasses.dataclass
class Target:
    what: str
    wanted: str
    measured: str
    met: bool

    def row(self) -> list[str]:
        return [self.what, self.wanted, self.measured, "met" if self.met else "**not met**"]


def at_most(what: str, value: float, limit: float, form=percent) -> Target:
    wanted = f"at most {100 * limit:.0f} %" if form is percent else f"at most {limit:g}x"
    return Target(what, wanted, form(value) or "0", value <= limit)


def at_least(what: str, value: float, limit: float) -> Target:
    return Target(what, f"at least {limit:g}x", times(value), value >= limit)


def serve_targets(serve: dict) -> Iterator[Target]:
    for shape in serve.get("shapes", []):
        if value := shape["ratios"]["aggregate"]:
            yield at_least(f"tokens per second of {serve['sessions']} sessions at once, "
                           f"{shape['prompt_tokens']:,} tokens of prompt and "
                           f"{shape['answer_tokens']:,} of answer each, over llama.cpp's server "
                           "with full caches", value, OVER_SERVER)
    for first in serve.get("first_token", []):
        if first["arm"] == SERVE:
            yield at_most("first token of a short request while a prompt of "
                          f"{serve['long_tokens']:,} tokens is read, over an idle server (median)",
                          first["ratio"], FIRST_TOKEN, times)


def step_targets(kernels: dict) -> Iterator[Target]:
    for step in kernels.get("steps", []):
        if step["heads"] > 1 or not is_rule(step, {"window": 8}):
            continue
        sizes = ", ".join(f"{name} {step[name]}" for name in ("dim", "rows", "group"))
        yield at_most(f"one step over its passes over the keys: {step['step']} ({sizes})",
                      step["ratio"], PASSES, times)


def worst(points: list[dict], key: str) -> tuple[float, str] | None:
    """The greatest value at any context length, and where that was."""
    values = [(p[key], f"worst, at {p['context_tokens']:,} tokens") for p in points if key in p]
    return max(values, default=None)


def decode_targets(decode: dict, openvino: dict) -> Iterator[Target]:
    for wanted, limit in EVICT_SHARES:
        for arm in arms_with(decode, wanted):
            if found := worst(arm["points"], "evict_share"):
                yield at_most(f"eviction's share of a decode step: {arm['arm']} ({found[1]})",
                              found[0], limit)
    for arm in arms_with(decode, {}):
        if found := worst(arm["points"], "against_streaming"):
            yield at_most(f"slower than streaming: {arm['arm']} ({found[1]})", found[0] - 1,
                          OVER_STREAMING - 1)
    rival = next((a for a in openvino.get("arms", []) if "eviction" in a["arm"]), {})
    beaten = first_long(rival.get("points", []))
    for arm in arms_with(decode, DEFAULT) + arms_with(decode, KEYS):
        point = first_long(arm["points"])
        if point is None:
            continue
        where = f"at {point['context_tokens']:,} tokens of context"
        if "against_full" in point:
            yield at_least(f"faster than full {where}: {arm['arm']}", point["against_full"],
                           OVER_FULL)
        if beaten:
            yield at_least(f"faster than {rival['arm']} (at {beaten['context_tokens']:,}) {where}: "
                           f"{arm['arm']}", beaten["median_ms"] / point["median_ms"],
                           OVER_OPENVINO)
    for flat in decode.get("flatness", []):
        yield Target(f"a step at {flat['long_tokens']:,} tokens over one at "
                     f"{flat['short_tokens']:,}: {flat['arm']}",
                     f"at most {100 * FLAT:.0f} % more", f"{flat['ratio']:.3f}",
                     flat["ratio"] <= 1 + FLAT)


def prefill_targets(prefill: dict) -> Iterator[Target]:
    for a in prefill.get("arms", []):
        if a["arm"] != "llama.cpp":
            yield at_most(f"eviction's share of reading {a['tokens']:,} tokens: {a['arm']}",
                          a["evict_share"], PREFILL_EVICT_SHARE)


def reference_targets(reference: dict) -> Iterator[Target]:
    arms = reference.get("arms", {})
    base = next((a for name, a in arms.items() if name.startswith("reference")), None)
    for name, limits in reference.get("targets", {}).items():
        for figure, limit in zip(("decode_step", "prefill"), limits):
            if base and name in arms and limit:
                ratio = base[figure]["median_ms"] / arms[name][figure]["median_ms"]
                yield at_least(f"faster than the reference, {figure.replace('_', ' ')}: {name}",
                               ratio, limit)
    limit = reference.get("deep_copy_target_ms")
    for name, ms in reference.get("deep_copy_30_layers", {}).items() if limit else ():
        yield Target(f"a deep copy of 30 layers: {name}", f"below {limit} ms",
                     f"{ms['median_ms']:.1f} ms", ms["median_ms"] < limit)


def target_section(figures: Figures) -> Table:
    targets = [*decode_targets(figures["decode_speed"], figures["openvino_speed"]),
               *prefill_targets(figures["prefill_speed"]),
               *serve_targets(figures["serve_speed"]),
               *reference_targets(figures["reference_speed"]),
               *step_targets(figures["kernel_speed"])]
    if not targets:
        return []
    met = sum(t.met for t in targets)
    return ["## Targets", "", f"{met} of {len(targets)} are met.",
            *table("what | target | measured | ", [t.row() for t in targets])]


# --- One section for each benchmark ---------------------------------------------------------------


def decode_section(figures: Figures) -> Table:
    decode, openvino = figures["decode_speed"], figures["openvino_speed"]
    arms = decode.get("arms", []) + openvino.get("arms", [])
    if not arms:
        return []
    lengths = sorted({p["context_tokens"] for a in arms for p in a["points"]})
    rows = []
    for a in arms:
        at = {p["context_tokens"]: spread(p) for p in a["points"]}
        rows.append([a["arm"], *(at.get(length, "") for length in lengths)])
    lines = ["## A decode step", "",
             "Milliseconds per token against the tokens of context before it.", "",
             "![Milliseconds per token against context length](performance/decode.svg)",
             *table("cache | " + " | ".join(f"{n:,}" for n in lengths), rows)]
    if openvino:
        default = openvino.get("default_kv_precision", "unknown")
        lines += ["", f"OpenVINO keeps K and V in {openvino['kv_precision']} (its default here: "
                  f"{default}) and computes in {openvino.get('inference_precision', 'unknown')}; "
                  "llama.cpp and morphkv keep f16. Its eviction begins after the whole prompt has "
                  "been read."]
    rows = [[a["arm"], f"{p['context_tokens']:,}", f"{1000 / p['median_ms']:.0f}",
             percent(p.get("evict_share")), times(p.get("against_full")),
             times(p.get("against_streaming")), mib(p.get("kv_bytes_allocated"))]
            for a in arms for p in a["points"]]
    lines += ["", "`speed-up`: how many times as fast as the full cache; `over streaming`: time "
              "in that of streaming; `KV memory`: allocated.",
              *table("cache | context | tokens per second | eviction | speed-up | over streaming "
                     "| KV memory", rows)]
    return lines


def prefill_rows(figures: Figures) -> list[dict]:
    """Every arm's time to read a prompt, OpenVINO's too: arm, tokens, median_ms and what it has."""
    rows = list(figures["prefill_speed"].get("arms", []))
    for a in figures["openvino_speed"].get("arms", []):
        rows += [{"arm": a["arm"], "tokens": p["context_tokens"], "median_ms": p["prefill_ms"]}
                 for p in a["points"]]
    return rows


def prefill_section(figures: Figures) -> Table:
    rows = prefill_rows(figures)
    if not rows:
        return []
    plain = {a["tokens"]: a["median_ms"] for a in rows if a["arm"] == "llama.cpp"}
    cells = []
    for a in sorted(rows, key=lambda a: -a["tokens"]):
        ms = a["median_ms"]
        against = plain[a["tokens"]] / ms if a["tokens"] in plain else None
        cells.append([a["arm"], f"{a['tokens']:,}", f"{ms / 1000:.1f}",
                      f"{1000 * a['tokens'] / ms:.0f}", times(against),
                      percent(a.get("guide_share")), percent(a.get("evict_share")),
                      mib(a.get("kv_bytes"))])
    return ["## Reading a prompt", "",
            "![Seconds to read the longest prompt](performance/prefill.svg)",
            *table("cache | tokens | seconds | tokens per second | speed-up over llama.cpp | guide "
                   "| eviction | KV memory", cells)]


def memory_section(figures: Figures) -> Table:
    memory = figures["memory"]
    if not memory:
        return []
    rows = [[r["arm"], f"{r['tokens']:,}", mib(r["peak_rss_bytes"]), mib(r["kv_bytes_peak"])]
            for r in memory["runs"]]
    return ["## Memory", "", "`morphkv run` that reads a prompt and answers with a few tokens.", "",
            "![Peak memory of the process](performance/memory.svg)",
            *table("cache | tokens of prompt | peak memory of the process | KV memory at most",
                   rows)]


def serve_section(figures: Figures) -> Table:
    serve = figures["serve_speed"]
    if not serve:
        return []
    lines = ["## Many sessions at once", ""]
    if serve["shapes"]:
        lines += [f"{serve['sessions']} sessions at once over HTTP, each with a prompt of its own; "
                  f"morphkv at a budget of {serve['budget']}, llama.cpp's server built from the "
                  "same source and with a full cache for each session, reuse of prompts off. `in "
                  "all`: tokens read and generated, from the first request to the last answer; "
                  "`all generate`: while every session does."]
    for shape in serve["shapes"]:
        lines += ["", f"A prompt of {shape['prompt_tokens']:,} tokens, an answer of "
                  f"{shape['answer_tokens']:,}:",
                  *table("server | seconds | tokens per second, in all | generated per second, in "
                         "all | generated per second, all generate | peak memory",
                         [[a["arm"], f"{a['wall_s']:.1f}", f"{a['tokens_per_second']:.0f}",
                           f"{a['generated_per_second']:.1f}", f"{a['decode_per_second']:.1f}",
                           mib(a["peak_rss_bytes"])] for a in shape["arms"]])]
        if ratios := [f"{times(value)} ({name})" for name, value in shape["ratios"].items()
                      if value]:
            lines += ["", f"morphkv over llama.cpp's server: {', '.join(ratios)}."]
    if rows := [[f["arm"], spread(f["idle"], 0), spread(f["beside_long"], 0),
                 f"{f['beside_long']['worst_ms']:.0f}", times(f["ratio"]),
                 times(f["worst_ratio"])] for f in serve["first_token"]]:
        lines += ["", f"Milliseconds to the first token of a request of {serve['short_tokens']} "
                  f"tokens, with nothing else to do and while a prompt of {serve['long_tokens']:,} "
                  "tokens of another session is read.",
                  *table("server | idle | beside the long prompt | worst | ratio | worst ratio",
                         rows)]
    return lines


def reference_section(figures: Figures) -> Table:
    reference = figures["reference_speed"]
    if not reference:
        return []
    arms = reference["arms"]
    base = next((a for name, a in arms.items() if name.startswith("reference")), None)
    rows = []
    for name, a in arms.items():
        row = [name]
        for figure in ("decode_step", "prefill"):
            row.append(spread(a[figure], 3 if figure == "decode_step" else 1))
            row.append(times(base[figure]["median_ms"] / a[figure]["median_ms"]) if base else "")
        rows.append(row)
    lines = ["## The cache class", "",
             f"One layer, {reference['heads']} heads of {reference['dim']}, budget "
             f"{reference['budget']}, keys, window {reference['window']}, one thread: a decode "
             f"step, and {reference['prefill_tokens']:,} tokens at once. The reference is "
             f"{reference['reference']} on MLX {reference['mlx_version']}; all keep the same "
             "positions.",
             *table("cache | decode step, ms | speed-up | prefill, ms | speed-up", rows)]
    rows = [[name, spread(ms)] for name, ms in reference.get("deep_copy_30_layers", {}).items()]
    return lines + (table("deep copy of 30 layers | ms", rows) if rows else [])


def kernel_section(figures: Figures) -> Table:
    kernels = figures["kernel_speed"]
    if not kernels:
        return []
    lines = ["## Kernels", ""]
    if rows := [[s["step"], str(s["dim"]), str(s["heads"]), str(s["group"]), f"{s['ns']:,.0f}",
                 f"{s['pass_ns']:,.0f}", f"{s['passes']:g}", times(s["ratio"])]
                for s in kernels.get("steps", [])]:
        lines += [f"One step of one KV head of {kernels['rows']:,} rows against as many plain passes "
                  "over its keys as the rule cannot do without, one thread. A head by itself stays in "
                  f"the cache: there the target is {PASSES:g}x at window 8. The 90 heads of 30 layers "
                  "come from memory, as in a model, whose weights pass by between two steps; so do "
                  "the rows of their passes.", "",
                  "![One step over its passes](performance/steps.svg)",
                  *table("step | dim | heads | group | ns per head | ns of a pass | passes | ratio", rows)]
    if rows := [[k["kernel"], k["dtype"], str(k["dim"]), str(k["queries"]), f"{k['ns']:,.0f}",
                 f"{k['scalar_ns']:,.0f}", times(k["scalar_ns"] / k["ns"]),
                 f"{k['gb_per_second']:.1f}", f"{k['max_relative_error']:.1e}"]
                for k in kernels.get("kernels", [])]:
        size = f", {kernels['rows']:,} rows" if "rows" in kernels else ""
        lines += ["", f"Single kernels{size}: against plain C++, and the greatest relative error "
                  "against a sum in double.",
                  *table("kernel | type | dim | queries | ns | ns, scalar | speed-up | GB/s "
                         "| relative error", rows)]
    return lines


def list_of(values: dict[str, str]) -> str:
    """One value as it is; several with the benchmarks that have them."""
    found: dict[str, list[str]] = {}
    for benchmark, value in values.items():
        found.setdefault(value, []).append(benchmark)
    if len(found) == 1:
        return next(iter(found))
    return "; ".join(f"{value} ({', '.join(names)})" for value, names in found.items())


def head_section(figures: Figures) -> Table:
    def values(key: str) -> dict[str, str]:
        return {name: str(f[key]) for name, f in figures.items() if key in f}

    model = next(iter(values("model").values()), MODEL).removesuffix(".gguf")
    machine = [f"{name}: {list_of(values(key))}." for name, key in (
        ("CPU", "cpu"), ("SIMD target", "simd_target"), ("Threads", "threads")) if values(key)]
    versions = [f"{name} {list_of(values(key))}" for name, key in (
        ("morphkv", "morphkv_version"), ("llama.cpp", "llama_version"),
        ("OpenVINO GenAI", "openvino_version")) if values(key)]
    lines = ["# Performance", "",
             f"Written by `make bench` ([the figures](data/performance)), "
             f"{list_of(values('date'))}. {' '.join(machine)} {model}; {', '.join(versions)}. "
             "Medians, with the 10th to 90th percentile in brackets."]
    differ = [what for what, key in (("dates", "date"), ("CPUs", "cpu"))
              if len(set(values(key).values())) > 1]
    if differ:
        lines += ["", f"**The benchmarks ran on different {' and '.join(differ)}**: compare only "
                  "figures of the same ones."]
    return lines


# --- Plots ----------------------------------------------------------------------------------------

COLOURS = {"full": "#222222", "llama.cpp": "#222222", "streaming": "#7a7a7a",
           "stream (streaming)": "#7a7a7a"}
FAMILIES = {"keys": "#1f6fb4", "attention": "#d1490c", "morphkv": "#d1490c", "OpenVINO": "#2b8a3e"}
WINDOWS = {1: ":", 8: "-", 32: "--"}


def colour(arm: str) -> str:
    family = next((c for word, c in FAMILIES.items() if word in arm), "#555555")
    return COLOURS.get(arm, family)


def line_style(arm: dict) -> str:
    if "rule" not in arm:
        return "--" if arm["arm"] == "OpenVINO GenAI, full" else "-"
    return WINDOWS.get(arm["rule"]["window"], "-.")


def save(figure: plt.Figure, path: pathlib.Path) -> None:
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None, "Creator": None})
    plt.close(figure)
    lines = path.read_text().splitlines()
    path.write_text("".join(f"{line.rstrip()}\n" for line in lines))


def plot_decode(figures: Figures, path: pathlib.Path) -> None:
    figure, axes = plt.subplots(figsize=(6.6, 4.2))
    for a in figures["decode_speed"].get("arms", []) + figures["openvino_speed"].get("arms", []):
        axes.plot([p["context_tokens"] for p in a["points"]], [p["median_ms"] for p in a["points"]],
                  line_style(a), marker="o", markersize=3, color=colour(a["arm"]),
                  label=a["arm"])
    axes.set(xlabel="tokens of context", ylabel="milliseconds per token", ylim=(0, None))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    save(figure, path)


def plot_bars(names: list[str], values: list[float], label: str, colours: list[str],
              path: pathlib.Path, limit: float | None = None, form: str = "%.1f") -> None:
    figure, axes = plt.subplots(figsize=(6.6, 0.5 + 0.32 * len(names)))
    bars = axes.barh(range(len(names)), values, color=colours)
    axes.bar_label(bars, fmt=form, padding=3)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set(xlabel=label)
    axes.margins(x=0.12)
    axes.grid(visible=False, axis="y")
    if limit:
        axes.axvline(limit, color="#b00020", linestyle="--")
    save(figure, path)


def draw(figures: Figures, folder: pathlib.Path) -> None:
    plt.rcParams.update({
        "svg.hashsalt": "morphkv", "svg.fonttype": "none", "font.family": "sans-serif",
        "font.size": 9, "figure.facecolor": "white", "savefig.facecolor": "white",
        "axes.grid": True, "grid.color": "#dddddd", "axes.axisbelow": True,
        "axes.spines.top": False, "axes.spines.right": False,
    })
    folder.mkdir(parents=True, exist_ok=True)
    if figures["decode_speed"] or figures["openvino_speed"]:
        plot_decode(figures, folder / "decode.svg")
    if rows := prefill_rows(figures):
        longest = max(r["tokens"] for r in rows)
        rows = [r for r in rows if r["tokens"] == longest]
        plot_bars([r["arm"] for r in rows], [r["median_ms"] / 1000 for r in rows],
                  f"seconds to read {longest:,} tokens", [colour(r["arm"]) for r in rows],
                  folder / "prefill.svg")
    if runs := figures["memory"].get("runs"):
        plot_bars([f"{r['arm']}, {r['tokens']:,} tokens" for r in runs],
                  [r["peak_rss_bytes"] / 2**20 for r in runs], "peak memory of the process, MiB",
                  [colour(r["arm"]) for r in runs], folder / "memory.svg")
    if steps := figures["kernel_speed"].get("steps"):
        steps = [s for s in steps if s["heads"] == 1]
        plot_bars([f"{s['step']}, dim {s['dim']}" for s in steps], [s["ratio"] for s in steps],
                  "one step over its passes over the keys", [colour(s["step"]) for s in steps],
                  folder / "steps.svg", PASSES, "%.2f")


def load(folder: pathlib.Path) -> Figures:
    figures: Figures = {}
    for name in BENCHMARKS:
        path = folder / f"{name}.json"
        figures[name] = json.loads(path.read_text()) if path.exists() else {}
        if not figures[name]:
            note(f"no {path}: what it would say is left out")
    decode = figures["decode_speed"]
    for wanted in (DEFAULT, *(rule for rule, _ in EVICT_SHARES)) if decode else ():
        if not arms_with(decode, wanted):
            note(f"decode_speed.json has no rule with {wanted}: what it would say is left out")
    return figures


def main() -> None:
    docs = pathlib.Path(__file__).resolve().parent.parent / "docs"
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--data", type=pathlib.Path, default=docs / "data" / "performance",
                        help="folder of the JSON files [docs/data/performance]")
    parser.add_argument("--docs", type=pathlib.Path, default=docs,
                        help="folder to write performance.md and performance/ into [docs]")
    options = parser.parse_args()
    figures = load(options.data)
    if not any(figures.values()):
        sys.exit(f"performance_page: error: no figures in {options.data}")
    draw(figures, options.docs / "performance")
    sections = [head_section(figures), target_section(figures), decode_section(figures),
                prefill_section(figures), memory_section(figures), serve_section(figures),
                reference_section(figures), kernel_section(figures)]
    text = "\n\n".join("\n".join(s).strip() for s in sections if s)
    (options.docs / "performance.md").write_text(text + "\n")


if __name__ == "__main__":
    main()
