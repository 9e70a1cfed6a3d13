"""What the tests of the tool share: a process of `morphkv run`, and what holds for every good end.

Needs MORPHKV_TOOL (the binary) and MORPHKV_TEST_MODEL (SmolLM2-135M-Instruct). Standard library
only.
"""

import json
import os
import shutil
import subprocess
import tempfile
import time
import unittest

TOOL = os.environ["MORPHKV_TOOL"]
MODEL = os.environ["MORPHKV_TEST_MODEL"]

ROW_BYTES = 30 * 3 * 2 * 64 * 2  # layers, KV heads, K and V, dim, bytes of an f16
TRAINED = 8192
PATIENCE = 1200  # seconds; the machine may be busy

INTEGERS = """tokens_seen reused_tokens prompt_tokens generated_tokens rows_kept rows_evicted budget n_sink window
recent pool guide_tokens kv_bytes_kept kv_bytes_allocated kv_bytes_peak kv_bytes_full peak_rss_bytes""".split()
NUMBERS = """compression_ratio prefill_ms guide_ms decode_ms evict_ms evict_decode_ms
tokens_per_second""".split()
STRINGS = """morphkv_version model policy queries fuse prefill prefill_mode cache_type_k
cache_type_v
finish_reason text profile rule""".split()

FILLER = "The quick brown fox walks along the river and looks at the boats. "
LONG = FILLER * 50  # about 700 tokens


class Answer:
    """What a finished process left behind."""

    def __init__(self, process, out, err, seconds, record_path):
        self.code, self.out, self.seconds = process.returncode, out, seconds
        self.err = err.decode("utf-8")  # standard error is valid UTF-8 as well
        self.record = None
        if os.path.exists(record_path):
            with open(record_path, encoding="utf-8") as file:
                self.record = json.load(file)


class CliTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="morphkv-cli-")
        self.addCleanup(shutil.rmtree, self.folder)
        self.record_path = self.path("record.json")

    def path(self, name, content=None):
        path = os.path.join(self.folder, name)
        if content is not None:
            with open(path, "wb") as file:
                file.write(content if isinstance(content, bytes) else content.encode())
        return path

    def start(self, *arguments, **streams):
        """A process of `morphkv run` with the model and --json.

        One thread unless asked: the engine's threads spin while they wait for one another, which
        takes ages on a machine that is busy with other tests.
        """
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE,
                   "stderr": subprocess.PIPE} | streams
        if not {"-t", "--threads"} & set(arguments):
            arguments += ("-t", "1")
        command = [TOOL, "run", "-m", MODEL, "--json", self.record_path, *arguments]
        process = subprocess.Popen(command, bufsize=0, **streams)
        self.addCleanup(self.end, process)
        return process

    def end(self, process):
        if process.poll() is None:
            process.kill()
            process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream:
                stream.close()

    def finish(self, process, stdin=None):
        begin = time.monotonic()
        out, err = process.communicate(stdin, timeout=PATIENCE)
        return Answer(process, out, err, time.monotonic() - begin, self.record_path)

    def run_tool(self, *arguments, stdin=None):
        """Runs to a good end and returns the answer, whose record is consistent."""
        if os.path.exists(self.record_path):
            os.remove(self.record_path)
        streams = {} if stdin is None else {"stdin": subprocess.PIPE}
        answer = self.finish(self.start(*arguments, **streams), stdin)
        self.assertEqual(answer.code, 0, answer.err)
        self.check(answer)
        return answer

    def check(self, answer):
        """What holds for every record and both streams."""
        record, text = answer.record, answer.out.decode("utf-8")
        self.assertIsNotNone(record, "no record was written")
        self.assertEqual(set(record), set(INTEGERS + NUMBERS + STRINGS))
        for name in INTEGERS:
            self.assertIs(type(record[name]), int, name)
            self.assertGreaterEqual(record[name], 0, name)
        for name in NUMBERS:
            self.assertIn(type(record[name]), (int, float), name)
            self.assertGreaterEqual(record[name], 0, name)
        for name in STRINGS:
            self.assertIs(type(record[name]), str, name)

        newline = "" if record["text"].endswith("\n") or not record["text"] else "\n"
        self.assertEqual(text, record["text"] + newline)
        seen, generated = record["tokens_seen"], record["generated_tokens"]
        evaluated = seen - record["reused_tokens"] - record["prompt_tokens"]
        # The last token of an answer that ends for its length needs no evaluation.
        ends = {"stop": [generated], "length": [max(generated - 1, 0)],
                "trained_length": [generated - 1], "interrupted": [generated, generated - 1]}
        self.assertIn(evaluated, ends[record["finish_reason"]])
        self.assertEqual(record["rows_kept"] + record["rows_evicted"], seen)
        if record["policy"] == "full":
            self.assertEqual(record["rows_evicted"], 0)
        else:
            self.assertLessEqual(record["rows_kept"], record["budget"])
            self.assertEqual(record["rows_kept"], min(seen, record["budget"]))
        if record["cache_type_k"] == record["cache_type_v"] == "f16":
            self.assertEqual(record["kv_bytes_kept"], record["rows_kept"] * ROW_BYTES)
            self.assertEqual(record["kv_bytes_full"], seen * ROW_BYTES)
        if record["kv_bytes_kept"]:
            self.assertAlmostEqual(record["compression_ratio"],
                                   record["kv_bytes_full"] / record["kv_bytes_kept"])
        self.assertLessEqual(record["kv_bytes_kept"], record["kv_bytes_allocated"])
        self.assertLessEqual(record["kv_bytes_allocated"], record["kv_bytes_peak"])
        self.assertLess(record["kv_bytes_peak"], record["peak_rss_bytes"])
        self.assertLessEqual(record["evict_decode_ms"], record["evict_ms"])
        self.assertLessEqual(record["guide_ms"], record["prefill_ms"])
        guided = record["prefill_mode"] == "guided"
        self.assertEqual(record["guide_tokens"] > 0, guided)
        # A prompt of two pieces needs its own end only.
        if record["finish_reason"] != "interrupted" and record["prompt_tokens"] > 2 * record["budget"]:
            self.assertEqual(record["guide_ms"] > 0, guided)
        self.assertGreaterEqual(record["recent"], record["window"])

        for word in ("prompt ", "answer ", "eviction ", "kept ", "KV cache ", "tokens/s"):
            self.assertIn(word, answer.err)
        for sign in ("\r", "\x1b", "loading [", "reading ["):
            self.assertNotIn(sign, answer.err, "progress without a terminal")
        self.assertNotRegex(answer.err, "error|failed", "a good end looks like a failure")
