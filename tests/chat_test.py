"""`morphkv chat` as a user meets it: lines in, answers and commands out.

Needs MORPHKV_TOOL (the binary) and MORPHKV_TEST_MODEL (SmolLM2-135M-Instruct). Standard library
only.
"""

import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import tempfile
import time
import unittest

TOOL = os.environ["MORPHKV_TOOL"]
MODEL = os.environ["MORPHKV_TEST_MODEL"]
PATIENCE = 600  # seconds; the machine may be busy

LONG = "We talked about the harbour, the old ferry and the lamp on the pier. " * 30


class ChatTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="morphkv-chat-")
        self.addCleanup(shutil.rmtree, self.folder)

    def chat(self, *lines, flags=()):
        """Answers and errors of a chat with these lines."""
        process = subprocess.run(
            [TOOL, "chat", "-m", MODEL, "--budget", "128", "--temp", "0", "-n", "12", *flags],
            input="".join(line + "\n" for line in lines).encode(), capture_output=True,
            timeout=PATIENCE, check=False)
        return process.returncode, process.stdout.decode(), process.stderr.decode()

    def stats(self, text):
        found = re.findall(r"(\d+) tokens seen, (\d+) rows kept per KV head \(budget (\d+)\)", text)
        return [tuple(map(int, numbers)) for numbers in found]

    def test_goes_on_from_what_was_said_within_the_budget(self):
        code, out, err = self.chat(LONG, "/stats", "And the lamp?", "/stats", "/exit", "never read")
        self.assertEqual(code, 0, err)
        (first, rows, budget), (second, rows_later, _) = self.stats(out)
        self.assertEqual((rows, budget, rows_later), (128, 128, 128))
        self.assertGreater(first, 400)
        self.assertLess(second, first + 60)  # the long message was not read again
        reused = re.findall(r"(\d+) of (\d+) tokens of the prompt were seen before", out)
        self.assertGreater(int(reused[1][0]), 400)

    def test_a_saved_chat_goes_on_in_another_process(self):
        file = os.path.join(self.folder, "talk")
        code, out, err = self.chat(LONG, f"/save {file}", "/stats")
        self.assertEqual(code, 0, err)
        self.assertIn("saved", out)
        code, again, err = self.chat("/stats", "And the lamp?", "/stats", flags=["--load", file])
        self.assertEqual(code, 0, err)
        self.assertEqual(self.stats(again)[0], self.stats(out)[0])
        self.assertLess(self.stats(again)[1][0], self.stats(out)[0][0] + 60)

    def test_a_chat_goes_on_in_run_and_a_run_in_a_chat(self):
        file = os.path.join(self.folder, "talk")
        code, _, err = self.chat("My name is Ada.", f"/save {file}")
        self.assertEqual(code, 0, err)
        run = subprocess.run(
            [TOOL, "run", "-m", MODEL, "--temp", "0", "-n", "12", "--chat", "--load-session", file,
             "--save-session", file, "--json", file + ".json", "-p", "And yours?"],
            capture_output=True, timeout=PATIENCE, check=False)
        self.assertEqual(run.returncode, 0, run.stderr)
        with open(file + ".json", encoding="utf-8") as record:
            seen = json.load(record)
        self.assertGreater(seen["reused_tokens"], 30)
        code, out, err = self.chat("/stats", "What is my name?", "/stats", flags=["--load", file])
        self.assertEqual(code, 0, err)
        self.assertEqual(self.stats(out)[0][0], seen["tokens_seen"])
        reused = re.findall(r"(\d+) of (\d+) tokens of the prompt were seen before", out)
        self.assertEqual(int(reused[1][0]), seen["tokens_seen"])

    def test_reset_forgets(self):
        code, out, _ = self.chat("Name a colour.", "/reset", "/stats")
        self.assertEqual(code, 0)
        self.assertEqual(self.stats(out)[0][:2], (0, 0))

    def test_what_goes_wrong_is_said_and_the_chat_goes_on(self):
        missing = os.path.join(self.folder, "missing")
        damaged = os.path.join(self.folder, "damaged")
        with open(damaged, "wb") as file:
            file.write(b'[{"role": "user", "content": "x"}]\nrubbish')
        code, out, err = self.chat("Name a colour.", "/stats", f"/load {missing}",
                                   f"/load {damaged}", f"/save {missing}/no", "/save", "/nothing",
                                   "/stats")
        self.assertEqual(code, 0)
        for text in ("missing", "damaged", "/save needs a file name", "/reset"):
            self.assertIn(text, err)
        before, after = self.stats(out)
        self.assertEqual(before, after)

    def test_lines_may_be_joined(self):
        code, _, err = self.chat("Name \\", "a colour.", '"""', "One more,", "", "please.", '"""')
        self.assertEqual(code, 0, err)

    def test_bad_flags_are_refused_before_the_model_is_loaded(self):
        for flags, word in ((["--budget", "0"], "--budget"), (["--pool", "4"], "pool"),
                            (["--load", "/nowhere/at/all"], "nowhere"),
                            (["--policy", "h2o", "--prefill", "guided"], "takes no guide"),
                            (["--policy", "full"], "evicts nothing")):
            code, _, err = self.chat(flags=flags)
            self.assertIn(code, (1, 2), err)
            self.assertIn(word, err)

    def test_an_interrupt_stops_the_answer_and_not_the_program(self):
        master, slave = pty.openpty()
        process = subprocess.Popen(
            [TOOL, "chat", "-m", MODEL, "--budget", "128", "--temp", "0", "-t", "1"],
            stdin=slave, stdout=slave, stderr=slave, start_new_session=True)
        self.addCleanup(process.kill)
        os.close(slave)
        seen = b""

        def read_until(test, what):
            nonlocal seen
            end = time.monotonic() + PATIENCE
            while not test():
                self.assertLess(time.monotonic(), end, f"no {what} in {seen!r}")
                if select.select([master], [], [], 0.2)[0]:
                    seen += os.read(master, 65536)

        read_until(lambda: seen.rstrip().endswith(b">"), "prompt")
        os.write(master, b"Write a very long story about a lamp, at least ten pages.\n")
        start = len(seen)
        read_until(lambda: len(seen) > start + 160, "answer")
        process.send_signal(signal.SIGINT)
        read_until(lambda: b"(stopped)" in seen, "stop")
        seen = b""
        os.write(master, b"/stats\n")
        read_until(lambda: b"tokens seen" in seen, "figures")
        os.write(master, b"/exit\n")
        self.assertEqual(process.wait(timeout=60), 0)


if __name__ == "__main__":
    unittest.main()
