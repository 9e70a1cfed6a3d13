"""`morphkv eval` as a user meets it: small runs on the real model."""

import json
import signal
import subprocess
import tempfile
import unittest
from pathlib import Path

from cli_support import MODEL, TOOL

ONE = ["--documents", "1"]
SMALL = ["--task", "passkey", "--tokens", "300", "--budget", "64", "-t", "1"]


def run_eval(*arguments, model=MODEL, timeout=300):
    return subprocess.run([TOOL, "eval", "-m", model, *map(str, arguments)],
                          capture_output=True, text=True, timeout=timeout)


def trials(folder):
    lines = (Path(folder) / "trials.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines[1:]]


def identity(trial):
    names = ("task", "mode", "tokens", "arm", "budget", "document", "question")
    return tuple(trial[name] for name in names)


class EvalTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.out = Path(self.folder.name) / "out"

    def test_modes_write_trials_a_record_a_page_and_a_table(self):
        done = run_eval(*SMALL, *ONE, "--mode", "whole", "guided", "stream", "--arm", "morphkv",
                        "-o", self.out)
        self.assertEqual(done.returncode, 0, done.stderr)
        found = {identity(t): t for t in trials(self.out)}
        arms = {(t["mode"], t["arm"]) for t in found.values()}
        for mode in ("whole", "guided", "stream"):
            for arm in ("streaming", "random", "morphkv"):
                self.assertIn((mode, arm), arms)
        self.assertIn(("whole", "full"), arms)
        by_arm = {t["arm"]: t for t in found.values() if t["mode"] == "whole"}
        self.assertEqual(by_arm["control"]["score"], by_arm["full"]["score"])
        self.assertEqual(by_arm["control"]["measures"], by_arm["full"]["measures"])
        self.assertEqual(by_arm["full"]["score"], 1.0, "the full cache finds a key in 300 tokens")
        for trial in found.values():
            if trial["budget"]:
                self.assertLessEqual(trial["rows_kept"], trial["budget"])
            right, judged = trial["measures"]["tokens_right"], trial["tokens_judged"]
            self.assertLessEqual(right, judged)
            self.assertEqual(trial["score"] == 1.0, right == judged)
        row = by_arm["morphkv"]["kv_bytes_kept"] / by_arm["morphkv"]["rows_kept"]
        self.assertEqual(by_arm["full"]["kv_bytes_kept"], row * by_arm["full"]["rows_kept"])
        self.assertEqual(by_arm["full"]["kv_bytes_allocated"], row * 512, "of 300 tokens and a question")
        for arm in ("streaming", "morphkv"):
            self.assertEqual(found["passkey", "guided", 300, arm, 64, 0, 0]["kv_bytes_allocated"], row * 256,
                             "budget and micro-batch, as morphkv run has it")
        record = json.loads((self.out / "results.json").read_text())
        self.assertEqual({c["arm"] for c in record["cells"]},
                         {"full", "control", "streaming", "random", "morphkv"})
        self.assertIn("<svg", (self.out / "report.html").read_text())
        self.assertIn("passkey, whole, 300 tokens", done.stdout)

        again = run_eval(*SMALL, *ONE, "--mode", "whole", "guided", "stream", "--arm", "morphkv",
                         "-o", self.out)
        self.assertEqual(again.returncode, 0, again.stderr)
        self.assertEqual(len(trials(self.out)), len(found), "nothing was left to do")
        self.assertEqual(again.stdout, done.stdout)

    def test_text_holds_every_token_against_the_full_cache(self):
        done = run_eval("--mode", "text", "--text-tokens", "500", "--budget", "128", "--arm", "morphkv",
                        "--text", self.text(), "-t", "1", "-o", self.out)
        self.assertEqual(done.returncode, 0, done.stderr)
        by_key = {(t["arm"], t["question"]): t for t in trials(self.out)}
        self.assertEqual(len(by_key), 2 * 5, "two stretches of full, control, streaming, random and morphkv")
        for stretch in (0, 1):
            full, control = by_key["full", stretch], by_key["control", stretch]
            self.assertEqual((full["score"], full["measures"]), (control["score"], control["measures"]))
            self.assertEqual(full["measures"]["kl"], 0.0)
            self.assertEqual(full["measures"]["top1"], 1.0)
        self.assertGreater(by_key["random", 1]["measures"]["kl"], 0.01)
        self.assertGreater(by_key["random", 1]["score"], by_key["full", 1]["score"])

    def test_an_interrupted_run_goes_on_to_the_same_results(self):
        arguments = [*SMALL, "--mode", "whole", "stream", "--arm", "morphkv", "snapkv", "--documents", "2"]
        process = subprocess.Popen([TOOL, "eval", "-m", MODEL, *arguments, "-o", self.out],
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.addCleanup(process.stdout.close)
        self.addCleanup(process.stderr.close)
        file = self.out / "trials.jsonl"
        while process.poll() is None and not (file.exists() and file.read_text().count("\n") > 4):
            pass
        process.send_signal(signal.SIGINT)
        self.assertEqual(process.wait(120), 130, process.stderr.read())
        part = len(trials(self.out))
        done = run_eval(*arguments, "-o", self.out)
        self.assertEqual(done.returncode, 0, done.stderr)
        other = Path(self.folder.name) / "other"
        whole = run_eval(*arguments, "-o", other)
        self.assertEqual(whole.returncode, 0, whole.stderr)
        scores = lambda folder: {identity(t): (t["score"], t["measures"]) for t in trials(folder)}
        self.assertEqual(scores(self.out), scores(other))
        self.assertLess(part, len(trials(other)), "it was interrupted before its end")
        self.assertEqual(done.stdout, whole.stdout)

    def text(self):
        path = Path(self.folder.name) / "own.txt"
        path.write_text("The tide table hangs beside the door, and nobody reads it twice. " * 60)
        return path


class EvalRefusalTest(unittest.TestCase):
    def refuses(self, *arguments, words, model=MODEL):
        with tempfile.TemporaryDirectory() as folder:
            done = run_eval(*arguments, "-o", Path(folder) / "out", model=model, timeout=60)
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertEqual(done.stdout, "")
        self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
        for word in words:
            self.assertIn(word, done.stderr)

    def test_names_what_is_wrong(self):
        self.refuses("--task", "passkeys", words=["passkeys", "passkey, "])
        self.refuses("--mode", "fast", words=["fast", "whole"])
        self.refuses("--arm", "morphkv window=0", words=["window", "0"])
        self.refuses("--arm", "foo", words=["foo", "streaming"])
        self.refuses("--budget", "0", words=["0"])
        self.refuses("--budget", "8", words=["8"])
        self.refuses("--tokens", "10", words=["--tokens", "'10'", "100"])
        self.refuses("--text-tokens", "7", words=["--text-tokens", "250"])
        self.refuses("--text", "/nowhere/text", words=["/nowhere/text"])
        self.refuses(model="/nowhere/model.gguf", words=["/nowhere/model.gguf"])

    def test_a_text_that_is_too_short_is_refused_with_both_lengths(self):
        with tempfile.TemporaryDirectory() as folder:
            text = Path(folder) / "short.txt"
            text.write_text("A few words.")
            self.refuses("--mode", "text", "--text", str(text), words=["short", "6001", "--text-tokens"])

    def test_results_of_another_model_are_left_alone(self):
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "trials.jsonl"
            file.write_text("not ours\n")
            done = run_eval("-o", folder, timeout=60)
            self.assertNotEqual(done.returncode, 0)
            self.assertIn("trials.jsonl", done.stderr)
            self.assertEqual(file.read_text(), "not ours\n")

    def test_help_and_list_say_what_there_is(self):
        shown = subprocess.run([TOOL, "eval", "--help"], capture_output=True, text=True, timeout=60)
        self.assertEqual(shown.returncode, 0)
        for word in ("--task", "--mode", "--arm", "--budget", "--quick", "guided"):
            self.assertIn(word, shown.stdout)
        listed = subprocess.run([TOOL, "eval", "--list"], capture_output=True, text=True, timeout=60)
        self.assertEqual(listed.returncode, 0)
        for word in ("passkey", "few-shot", "dialogue", "keydiff"):
            self.assertIn(word, listed.stdout)


if __name__ == "__main__":
    unittest.main()
