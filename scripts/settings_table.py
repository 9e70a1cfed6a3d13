"""Puts the table that `morphkv settings` prints into a page, between its two <!-- settings --> marks.

Usage: settings_table.py TOOL PAGE.md [--check]
With --check nothing is written: the exit status is 1 where the page has another table.
"""

import argparse
import pathlib
import subprocess
import sys

MARK = "<!-- settings -->"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tool")
    parser.add_argument("page", type=pathlib.Path)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    table = subprocess.run([args.tool, "settings"], capture_output=True, text=True, check=True).stdout
    page = args.page.read_text()
    parts = page.split(MARK)
    if len(parts) != 3:
        parser.error(f"{args.page} has {len(parts) - 1} {MARK} marks, 2 are needed")
    made = f"{parts[0]}{MARK}\n\n{table}\n{MARK}{parts[2]}"
    if args.check and made != page:
        sys.exit(f"{args.page} has another table than `morphkv settings`: run this without --check")
    if not args.check:
        args.page.write_text(made)


if __name__ == "__main__":
    main()
