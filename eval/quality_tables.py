"""Puts the figures of `morphkv eval` into Markdown pages.

Usage: quality_tables.py PAGE.md... [--check]
Each part of a page between a line `<!-- figures FILE key=value ... -->` and the next `<!-- end -->` is replaced by
the table that the line asks for. FILE is a results.json, beside the page or below its folder. Keys:
  mode    whole, guided, stream, generate, text
  tokens  length of the documents; left out: all that the file has
  task    a task, or several with commas between; left out: all
  budget  with it, rows are arms and columns tasks; left out: columns are budgets
  table   answers: of one task, how many answers and how many of their tokens are right, and the memory; rows are arms
          and budgets
An arm that was not asked the same questions as streaming has no figure there, and the full cache's is that of those
questions. With --check nothing is written, and the exit code is 1 when the page is out of date.
"""

import argparse
import collections
import json
import pathlib
import re
import sys

MARK = re.compile(r"(<!-- figures (?P<file>\S+) (?P<keys>[^>]*?)-->\n).*?(<!-- end -->)", re.DOTALL)
BASELINES = ["full", "streaming", "random"]


def percent(estimate):
    if "low" not in estimate:
        return f"{100 * estimate['mean']:.0f}"
    return f"{100 * estimate['mean']:.0f} ({100 * estimate['low']:.0f}-{100 * estimate['high']:.0f})"


def table(header, rows):
    yield "| " + " | ".join(header) + " |"
    yield "|" + "---|" * len(header)
    for row in rows:
        yield "| " + " | ".join(row) + " |"


def arms_of(cells):
    names = list(dict.fromkeys(cell["arm"] for cell in cells if cell["arm"] != "control"))
    return [name for name in BASELINES if name in names] + [name for name in names if name not in BASELINES]


def full_mode(mode):
    return "whole" if mode in ("guided", "stream") else mode


class Figures:
    """The cells of one mode and length, by task, arm and budget; the full cache's belong to every mode."""

    def __init__(self, path, keys):
        record = json.loads(path.read_text())
        mode = keys["mode"]
        chosen = [
            cell for cell in record["cells"]
            if (cell["mode"] == mode or cell["arm"] == "full" and cell["mode"] == full_mode(mode))
            and keys.get("tokens") in (None, str(cell["tokens"]))
            and ("task" not in keys or cell["task"] in keys["task"].split(","))
        ]
        asked = {cell["task"] for cell in chosen if cell["mode"] == mode and cell["arm"] != "full"}
        self.cells = [cell for cell in chosen if cell["task"] in asked]
        if not self.cells:
            sys.exit(f"{path} has nothing of {keys}")
        self.tasks = list(dict.fromkeys(cell["task"] for cell in self.cells))
        self.budgets = sorted({cell["budget"] for cell in self.cells if cell["budget"] > 0})
        self.by_key = {(c["task"], c["arm"], c["budget"]): c for c in self.cells}
        self.arms = [arm for arm in arms_of(self.cells)
                     if any(self.cell(task, arm, budget) for task in self.tasks for budget in self.budgets)]

    def asked(self, task, budget):
        """How many questions streaming was asked."""
        cell = self.by_key.get((task, "streaming", budget))
        return cell["trials"] if cell else 0

    def cell(self, task, arm, budget):
        if arm == "full":
            return self.full(task, budget)
        cell = self.by_key.get((task, arm, budget))
        return cell if cell and cell["trials"] == self.asked(task, budget) else None

    def full(self, task, budget):
        """On the questions that streaming was asked: others tell their share of its score."""
        cell = self.by_key.get((task, "full", 0))
        if cell is None or cell["trials"] == self.asked(task, budget):
            return cell
        for arm in dict.fromkeys(key[1] for key in self.by_key if key[1] != "full"):
            other = self.cell(task, arm, budget)
            if other and other["of_full"] and other["of_full"]["mean"] > 0:
                return {"score": {"mean": other["score"]["mean"] / other["of_full"]["mean"]}}
        return None

    def questions(self, task, budgets):
        """How many were asked of each cache, "2-5" where not the same at all budgets."""
        counts = [self.asked(task, budget) for budget in budgets]
        return "-".join(str(count) for count in sorted({min(counts), max(counts)}))

    def mean(self, arm, budget):
        """Over the tasks, if the arm has all of them."""
        cells = [self.cell(task, arm, budget) for task in self.tasks]
        if not all(cells):
            return "-"
        return f"{100 * sum(cell['score']['mean'] for cell in cells) / len(cells):.0f}"


def scores_by_budget(figures):
    header = ["cache"] + [f"{budget} rows" for budget in figures.budgets]
    one = len(figures.tasks) == 1
    def entry(arm, budget):
        if not one:
            return figures.mean(arm, budget)
        cell = figures.cell(figures.tasks[0], arm, budget)
        return percent(cell["score"]) if cell else "-"
    rows = [[arm] + [entry(arm, budget) for budget in figures.budgets] for arm in figures.arms]
    yield from table(header, [row for row in rows if set(row[1:]) != {"-"}])
    counts = ", ".join(figures.questions(task, figures.budgets) for task in figures.tasks)
    what = figures.tasks[0] if one else f"mean over {len(figures.tasks)} tasks ({', '.join(figures.tasks)})"
    yield f"\nPer cent; {what}; questions: {counts}."


def scores_by_task(figures, budget):
    rows = []
    for arm in figures.arms:
        cells = [figures.cell(task, arm, budget) for task in figures.tasks]
        if 2 * sum(map(bool, cells)) >= len(cells):
            rows.append([arm] + [percent(c["score"]) if c else "-" for c in cells] + [figures.mean(arm, budget)])
    yield from table(["cache"] + figures.tasks + ["mean"], rows)
    counts = ", ".join(figures.questions(task, [budget]) for task in figures.tasks)
    yield f"\nPer cent at {budget} rows, with 95 % intervals; questions: {counts}."


def text_figures(figures, budget):
    header = ["cache"] + [f"{task.removeprefix('text-')}" for task in figures.tasks] + ["KL", "same top token", "ms"]
    rows = []
    for arm in figures.arms:
        cells = [figures.cell(task, arm, budget) for task in figures.tasks]
        if not all(cells):
            continue
        mean = lambda name: sum(c["measures"][name]["mean"] for c in cells) / len(cells)
        rows.append([arm] + [f"{c['score']['mean']:.3f}" for c in cells]
                    + [f"{mean('kl'):.4f}", f"{100 * mean('top1'):.1f} %", f"{cells[0]['step_ms']:.1f}"])
    yield from table(header, rows)
    tokens = ", ".join(f"{figures.cell(task, 'full', budget)['tokens']:,}" for task in figures.tasks)
    yield f"\nPerplexity at {budget} rows over {tokens} tokens; KL divergence from the full cache in nats a token."


def counted(cell):
    """Of a task whose answers have one part."""
    return f"{cell['score']['mean'] * cell['trials']:.0f} of {cell['trials']}"


def mib(size):
    return f"{size / 2**20:.1f} MiB"


def by_rule(cells):
    """The full cache first, the simplest rules last, most rows first."""
    place = {"full": 0, "streaming": 2, "random": 3}
    return sorted((c for c in cells if c["arm"] != "control"),
                  key=lambda c: (place.get(c["arm"], 1), -c["budget"], c["tokens"]))


def answers(figures):
    rows = [[cell["arm"], str(cell["budget"] or "all"), counted(cell),
             f"{cell['measures']['tokens_right']['mean'] * cell['trials']:.0f} of {cell['tokens_judged']}",
             mib(cell["kv_bytes_kept"]), mib(cell["kv_bytes_allocated"])]
            for cell in by_rule(figures.cells)]
    yield from table(["cache", "rows", "right", "answer tokens right", "KV kept", "KV at most"], rows)


def figures_for(path, keys):
    figures = Figures(path, keys)
    if keys.get("table") == "answers":
        return answers(figures)
    budget = int(keys["budget"]) if "budget" in keys else None
    if keys["mode"] == "text":
        return text_figures(figures, budget)
    return scores_by_task(figures, budget) if budget else scores_by_budget(figures)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pages", type=pathlib.Path, nargs="+", metavar="PAGE.md")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    outdated = []
    for page in args.pages:
        text = page.read_text()

        def replace(match):
            keys = dict(word.split("=", 1) for word in match["keys"].split())
            lines = figures_for(page.parent / match["file"], keys)
            return match[1] + "\n" + "\n".join(lines) + "\n\n" + match[4]

        updated = MARK.sub(replace, text)
        if args.check:
            outdated += [str(page)] if updated != text else []
        else:
            page.write_text(updated)
    if outdated:
        sys.exit(f"out of date: {', '.join(outdated)}; run {sys.argv[0]} {' '.join(outdated)}")


if __name__ == "__main__":
    main()
