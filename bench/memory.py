"""Peak memory of `morphkv run` that reads a prompt and answers with a few tokens: the full cache
and the default policy, at a short and a long prompt, each in a process of its own.

Run by `make bench`, or: bench/memory.py --tool build/release/morphkv -m MODEL -f TEXT
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

import report

ANSWER = 8  # tokens
LETTERS = 4.2  # of English text in a token, about; the record has the exact number of tokens
ARMS = {"full": ["--policy", "full"], "morphkv, default": []}


def measure(options: argparse.Namespace, arm: str, tokens: int, folder: pathlib.Path) -> dict:
    """The run's own record of a prompt of about that many tokens."""
    text = options.file.read_text()
    letters = int(tokens * LETTERS)
    prompt, record = folder / "prompt", folder / "record"
    prompt.write_text((text * (letters // len(text) + 1))[:letters])
    threads = ["-t", str(options.threads)] if options.threads else []
    subprocess.run(
        [options.tool, "run", "-m", options.model, "-f", prompt, "-n", str(ANSWER), "--temp", "0",
         "--ignore-eos", "--json", record, *threads, *ARMS[arm]],
        check=True, stdout=subprocess.DEVNULL,
    )
    return json.loads(record.read_text())


def check(arm: str, record: dict) -> None:
    seen = record["prompt_tokens"] + ANSWER - 1
    due = seen if arm == "full" else min(seen, record["budget"])
    if record["rows_kept"] != due:
        sys.exit(f"memory: error: {arm} keeps {record['rows_kept']} rows, due {due}")


def print_table(runs: list[dict]) -> None:
    print("| cache | tokens of prompt | peak memory of the process | KV memory at most |")
    print("|---|---|---|---|")
    for r in runs:
        print(f"| {r['arm']} | {r['tokens']:,} | {r['peak_rss_bytes'] / 2**20:.1f} MiB "
              f"| {r['kv_bytes_peak'] / 2**20:.1f} MiB |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--tool", required=True, help="the binary morphkv")
    parser.add_argument("-m", "--model", required=True, help="GGUF model")
    parser.add_argument("-f", "--file", required=True, type=pathlib.Path,
                        help="text to read, repeated as needed")
    parser.add_argument("-t", "--threads", type=int, help="[one per core]")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2000, 7000],
                        help="tokens of prompt, about %(default)s")
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args()

    runs = []
    with tempfile.TemporaryDirectory() as folder:
        for arm in ARMS:
            for tokens in options.lengths:
                print(f"{arm} at {tokens} tokens", file=sys.stderr)
                record = measure(options, arm, tokens, pathlib.Path(folder))
                check(arm, record)
                runs.append({
                    "arm": arm,
                    "tokens": record["prompt_tokens"],
                    "peak_rss_bytes": record["peak_rss_bytes"],
                    "kv_bytes_peak": record["kv_bytes_peak"],
                })

    figures = {
        **report.head("memory"),
        "morphkv_version": record["morphkv_version"],
        "budget": record["budget"],
        "answer_tokens": ANSWER,
        "runs": runs,
    }
    print_table(runs)
    report.write(figures, options.json)


if __name__ == "__main__":
    main()
