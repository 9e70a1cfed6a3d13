"""Sums up what bench/recall wrote, as Markdown tables: one for each length of text and number of facts.

Usage: recall_table.py FILE.jsonl... [--into PAGE.md]
With --into, the part of the page between its two <!-- recall --> marks is replaced.
"""

import argparse
import collections
import json
import pathlib
import re

MARK = "<!-- recall -->"


def tables(answers):
    tasks = collections.defaultdict(lambda: collections.defaultdict(dict))
    for a in answers:
        tasks[a["tokens"], a["facts"]][a["arm"]][a["document"], a["question"]] = a
    for (tokens, facts), arms in sorted(tasks.items(), key=lambda task: (task[0][1], task[0][0])):
        yield f"\n**{tokens:,} tokens, {'one fact' if facts == 1 else f'{facts} facts, one asked'}**\n"
        yield "| cache | right | answer tokens right | of the full cache | KV kept | KV at most |"
        yield "|---|---|---|---|---|---|"
        full = arms.get("full", {})
        for arm, asked in sorted(arms.items(), key=lambda entry: (entry[0] != "full", entry[0])):
            right = sum(a["right"] for a in asked.values())
            tokens_right = sum(a["tokens_right"] for a in asked.values())
            expected = sum(a["tokens_expected"] for a in asked.values())
            # Against the full cache on the same questions only.
            same = [full[key]["tokens_right"] for key in asked if key in full]
            share = f"{100 * tokens_right / sum(same):.0f} %" if len(same) == len(asked) else ""
            mib = [max(a[name] for a in asked.values()) / 2**20
                   for name in ("kv_bytes_kept", "kv_bytes_peak")]
            yield (f"| {arm} | {right} of {len(asked)} | {tokens_right} of {expected} | {share} "
                   f"| {mib[0]:.1f} MiB | {mib[1]:.1f} MiB |")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=pathlib.Path)
    parser.add_argument("--into", type=pathlib.Path, metavar="PAGE")
    args = parser.parse_args()
    answers = [json.loads(line) for file in args.files for line in file.read_text().splitlines()]
    text = "\n".join(tables(answers)) + "\n"
    if args.into is None:
        print(text)
        return
    page = args.into.read_text()
    if page.count(MARK) != 2:
        parser.error(f"{args.into} has {page.count(MARK)} {MARK} marks, 2 are needed")
    pattern = f"{re.escape(MARK)}.*{re.escape(MARK)}"
    args.into.write_text(re.sub(pattern, lambda _: f"{MARK}\n{text}{MARK}", page, flags=re.DOTALL))


if __name__ == "__main__":
    main()
