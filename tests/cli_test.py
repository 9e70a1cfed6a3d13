"""`morphkv run` as a user meets it: a process with arguments, streams, files and signals.

Needs MORPHKV_TOOL (the binary) and MORPHKV_TEST_MODEL (SmolLM2-135M-Instruct). Standard library
only. What an answer should say is left to recall_test.cc, but for the prompt that is shipped.
"""

import json
import os
import pathlib
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

TOOL = os.environ["MORPHKV_TOOL"]
MODEL = os.environ["MORPHKV_TEST_MODEL"]
EXAMPLES = pathlib.Path(__file__).resolve().parent.parent / "examples"

ROW_BYTES = 30 * 3 * 2 * 64 * 2  # layers, KV heads, K and V, dim, bytes of an f16
TRAINED = 8192
PATIENCE = 1200  # seconds; the machine may be busy

INTEGERS = """tokens_seen prompt_tokens generated_tokens rows_kept rows_evicted budget n_sink window
recent pool kv_bytes_kept kv_bytes_allocated kv_bytes_peak kv_bytes_full peak_rss_bytes""".split()
NUMBERS = """compression_ratio prefill_ms decode_ms evict_ms evict_decode_ms
tokens_per_second""".split()
STRINGS = """morphkv_version model policy queries fuse prefill cache_type_k cache_type_v
finish_reason text""".split()

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
        evaluated = seen - record["prompt_tokens"]
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
        self.assertGreaterEqual(record["recent"], record["window"])

        for word in ("prompt ", "answer ", "eviction ", "kept ", "KV cache ", "tokens/s"):
            self.assertIn(word, answer.err)
        for sign in ("\r", "\x1b", "loading [", "reading ["):
            self.assertNotIn(sign, answer.err, "progress without a terminal")


class HelpTest(CliTest):
    def show(self, *arguments):
        done = subprocess.run([TOOL, *arguments], capture_output=True, timeout=PATIENCE)
        self.assertEqual((done.returncode, done.stderr), (0, b""))
        return done.stdout.decode()

    def test_version_is_one_line_on_stdout(self):
        self.assertRegex(self.show("--version"), r"\Amorphkv \d+\.\d+\.\d+\n\Z")

    def test_help_names_the_command(self):
        for flag in ("--help", "-h"):
            self.assertIn("run", self.show(flag))

    def test_help_of_run_names_every_option(self):
        text = self.show("run", "--help")
        self.assertEqual(text, self.show("run", "-h"))
        for flag in """-m --model -p --prompt -f --file -sys --system-prompt --chat --json -v
                --verbose --budget --sinks --window --recent --pool --fuse --queries --policy
                --prefill
                --pin-system -ctk --cache-type-k -ctv --cache-type-v -n --predict --n-predict
                -t --threads -ub --ubatch-size -ngl --n-gpu-layers --gpu-layers -fa --flash-attn
                -s --seed --temp --temperature --top-k --top-p --min-p --repeat-penalty
                --repeat-last-n --ignore-eos --allow-past-training""".split():
            self.assertRegex(text, rf"(?<![\w-]){flag}(?![\w-])")
        for word in """morphkv streaming random full stream whole mean max attention keys f16 q8_0
                q4_0""".split():
            self.assertIn(word, text)


class BadInputTest(CliTest):
    """Each is told in one line on standard error, with code 2, before anything is computed."""

    slowest = 0.0

    @classmethod
    def tearDownClass(cls):
        print(f"slowest refusal: {cls.slowest:.2f} s", file=sys.stderr)

    def refuse(self, *arguments, says, model=MODEL, stdin=b"", command=("run",)):
        begin = time.monotonic()
        model_flag = () if model is None else ("-m", model)
        done = subprocess.run([TOOL, *command, *model_flag, *arguments], input=stdin,
                              capture_output=True, timeout=PATIENCE)
        seconds = time.monotonic() - begin
        BadInputTest.slowest = max(BadInputTest.slowest, seconds)
        err = done.stderr.decode("utf-8", "surrogateescape")
        what = f"{arguments} -> {err}"
        self.assertEqual(done.returncode, 2, what)
        self.assertEqual(done.stdout, b"", what)
        self.assertRegex(err, r"\Amorphkv: error: [^\n]+\n\Z", what)
        for part in says:
            self.assertIn(part, err)
        self.assertLess(seconds, 5, f"{what}: one second on an idle machine")

    def test_numbers_that_are_none_or_beyond_their_limits(self):
        legal = {"--sinks": "0", "--recent": "0", "--predict": "0 -1", "--threads": "0",
                 "--n-gpu-layers": "0 -1", "--seed": "0 -1", "--temp": "0", "--top-k": "0",
                 "--top-p": "0", "--min-p": "0", "--repeat-last-n": "0"}
        short = {"--predict": "-n", "--threads": "-t", "--ubatch-size": "-ub",
                 "--n-gpu-layers": "-ngl", "--seed": "-s"}
        for flag in """--budget --sinks --window --recent --pool --predict --threads --ubatch-size
                --n-gpu-layers --seed --temp --top-k --top-p --min-p --repeat-penalty
                --repeat-last-n""".split():
            for value in ("0", "-1", "abc", "1e3", "99999999999999999999", "nan", "inf", "", " 5",
                          "0x10", "5;"):
                if value in legal.get(flag, "").split():
                    continue
                with self.subTest(flag=flag, value=value):
                    self.refuse("-p", "x", short.get(flag, flag), value,
                                says=[f"{flag} '{value}' is not a", "number from", " to "])

    def test_cache_numbers_that_exclude_one_another(self):
        for arguments, says in (
                (("--sinks", "504"), ["n_sink 504 + window 8", "budget 512", "at least 513"]),
                (("--sinks", "512"), ["n_sink 512", "budget 512", "raise the budget"]),
                (("--window", "600"), ["window 600", "budget 512", "lower the window"]),
                (("--budget", "12"), ["n_sink 4 + window 8", "budget 12", "at least 13"]),
                (("--recent", "509"), ["n_sink 4 + recent 509", "budget 512", "at least 514"]),
                (("--recent", "7"), ["recent 7", "window 8", "raise recent or use 0"]),
                (("--pool", "4"), ["pool 4", "odd", "use 1 (off), 3, 5, 7"])):
            with self.subTest(arguments=arguments):
                self.refuse("-p", "x", *arguments, says=says)

    def test_words_that_are_no_choice(self):
        for flag, name, choices in (
                ("--policy", "--policy", "morphkv, streaming, random, full"),
                ("--fuse", "--fuse", "mean, max"), ("--queries", "--queries", "attention, keys"),
                ("--prefill", "--prefill", "stream, whole"),
                ("-ctk", "--cache-type-k", "f16, q8_0, q4_0"),
                ("-ctv", "--cache-type-v", "f16, q8_0, q4_0"),
                ("-fa", "--flash-attn", "on, auto, off")):
            for word in ("h2o", "", "F16"):
                with self.subTest(flag=flag, word=word):
                    self.refuse("-p", "x", flag, word,
                                says=[f"{name} '{word}' is not one of {choices}"])

    def test_flash_attention_off(self):
        self.refuse("-p", "x", "-fa", "off", says=["--flash-attn 'off'", "use on or auto"])

    def test_words_that_are_no_argument(self):
        self.refuse("--no-such-flag", says=["--no-such-flag", "not expected", "--help"])
        self.refuse("-p", "x", "stray", says=["stray", "not expected"])
        self.refuse("-p", "x", "--budget", says=["--budget", "missing"])
        self.refuse("-p", "x", "-p", "y", says=["--prompt"])
        self.refuse(model=None, command=(), says=["no command", "--help"])
        self.refuse(model=None, command=("walk",), says=["walk", "--help"])

    def test_system_prompt_without_chat(self):
        self.refuse("-p", "x", "-sys", "Be brief.", says=["--system-prompt", "add --chat"])
        self.refuse("-p", "x", "--pin-system", says=["--pin-system", "add --chat"])
        self.refuse("-p", "x", "--pin-system", "--chat", says=["--pin-system", "--system-prompt"])

    def test_pinned_system_message_beyond_the_budget(self):
        self.refuse("-p", "x", "--chat", "--pin-system", "-sys", "word " * 600,
                    says=["--pin-system", "system message takes 60", "budget 512"])

    def test_missing_model(self):
        self.refuse("-p", "x", model=None, says=["no model", "-m"])
        self.refuse("-p", "x", model="", says=["no model", "-m"])
        self.refuse("-p", "x", model=self.path("none.gguf"),
                    says=["none.gguf", "no such file", "-m"])
        self.refuse("-p", "x", model=self.folder, says=[self.folder, "directory", ".gguf"])

    def test_files_that_are_no_model(self):
        for name, content, says in (
                ("empty.gguf", b"", ["0 bytes", "no GGUF"]),
                ("short.gguf", b"GGU", ["3 bytes", "no GGUF"]),
                ("text.gguf", b"Dear reader, this is no model.", ["begin with 'GGUF'"]),
                ("magic.gguf", b"GGUF", ["header", "fetch the file again"]),
                ("noise.gguf", b"GGUF" + bytes(range(256)) * 8, ["header", "fetch the file"])):
            with self.subTest(name=name):
                self.refuse("-p", "x", model=self.path(name, content), says=[name, *says])

    def test_models_that_are_cut_short(self):
        with open(MODEL, "rb") as file:
            head = file.read(3_000_000)
        size = os.path.getsize(MODEL)
        for length in (8, 24, 100, 10_000, 1_000_000):
            with self.subTest(length=length):
                self.refuse("-p", "x", model=self.path("head.gguf", head[:length]),
                            says=["head.gguf", "header is damaged or cut short", "fetch the file"])
        with self.subTest("within the tensors"):
            self.refuse("-p", "x", model=self.path("cut.gguf", head),
                        says=["cut.gguf", f"3000000 of {size} bytes", "fetch the file again"])
        with self.subTest("the last byte is missing"):
            cut = self.path("last.gguf")
            shutil.copyfile(MODEL, cut)
            os.truncate(cut, size - 1)
            self.refuse("-p", "x", model=cut, says=[f"{size - 1} of {size} bytes"])

    def test_unreadable_model(self):
        if os.geteuid() == 0:
            self.skipTest("root may read everything")
        path = self.path("locked.gguf", b"GGUF....")
        os.chmod(path, 0)
        self.refuse("-p", "x", model=path, says=["locked.gguf", "permissions"])

    def test_empty_prompt(self):
        for arguments in (("-p", ""), (), ("-f", "-"), ("-f", self.path("empty.txt", b"")),
                          ("-f", self.path("newline.txt", b"\n"))):
            with self.subTest(arguments=arguments):
                self.refuse(*arguments, says=["the prompt is empty", "-p, -f or on standard input"])

    def test_prompt_that_is_no_text(self):
        broken = b"caf\xe9 au lait"
        file = self.path("latin1.txt", broken)
        for arguments, stdin in ((("-p", broken), b""), (("-f", file), b""), ((), broken),
                                 (("-f", "-"), broken)):
            with self.subTest(arguments=arguments):
                self.refuse(*arguments, stdin=stdin,
                            says=["no valid UTF-8 at byte 3", "convert the text to UTF-8"])
        self.refuse(stdin=b"cut at the end \xe2\x82", says=["no valid UTF-8 at byte 15"])
        self.refuse(stdin=b"a surrogate \xed\xa0\x80", says=["no valid UTF-8 at byte 12"])
        self.refuse("--chat", stdin=b"two\0words", says=["NUL character at byte 3"])
        self.refuse("-p", "x", "--chat", "-sys", broken, says=["--system-prompt", "byte 3"])

    def test_prompt_file_that_cannot_be_read(self):
        self.refuse("-f", self.path("none.txt"), says=["none.txt", "cannot be read", "-f"])
        self.refuse("-f", self.folder, says=[self.folder, "cannot be read"])
        self.refuse("-f", "", says=["prompt file ''", "cannot be read"])
        if os.geteuid() != 0:
            locked = self.path("locked.txt", b"text")
            os.chmod(locked, 0)
            self.refuse("-f", locked, says=["locked.txt", "cannot be read"])

    def test_record_that_cannot_be_written(self):
        for path, says in ((self.path("none/record.json"), ["none/record.json", "folder exists"]),
                           (self.folder, [self.folder, "is a directory"]), ("", ["names no file"]),
                           (self.path("x" * 300), ["cannot be written"])):
            with self.subTest(path=path):
                self.refuse("-p", "x", "--json", path, says=["--json", *says])

    def test_refusals_leave_an_older_record_alone(self):
        old = self.path("old.json", b"old")
        self.refuse("-p", "", "--json", old, says=["empty"])
        with open(old, "rb") as file:
            self.assertEqual(file.read(), b"old")
        self.assertEqual(os.listdir(self.folder), ["old.json"])

    def test_prompt_beyond_the_trained_length(self):
        for arguments in ((), ("--chat",)):
            self.refuse(*arguments, stdin=b"one two three " * 3000,
                        says=["the prompt has 90", f"trained for {TRAINED}", "shorten it",
                              "--allow-past-training"])


class RecordTest(CliTest):
    def test_a_full_cache_has_exactly_the_bytes_of_its_budget(self):
        for prefill in ("stream", "whole"):
            with self.subTest(prefill=prefill):
                record = self.run_tool("-p", LONG, "-n", "4", "--ignore-eos", "--temp", "0",
                                       "--prefill", prefill).record
                self.assertGreater(record["tokens_seen"], 512)
                self.assertEqual(record["kv_bytes_kept"], 11_796_480)
                self.assertLessEqual(record["kv_bytes_allocated"], (512 + 512) * ROW_BYTES)
                self.assertEqual((record["prefill"], record["finish_reason"]), (prefill, "length"))
                self.assertGreater(record["evict_ms"], 0)
                self.assertGreater(record["tokens_per_second"], 0)

    def test_names_what_was_asked_for(self):
        record = self.run_tool("-p", FILLER * 6, "-n", "3", "--ignore-eos", "--budget", "40",
                               "--sinks", "2", "--window", "6", "--recent", "12", "--pool", "3",
                               "--fuse", "max", "--queries", "keys").record
        expected = {"budget": 40, "n_sink": 2, "window": 6, "recent": 12, "pool": 3, "fuse": "max",
                    "queries": "keys", "policy": "morphkv", "prefill": "stream", "model": MODEL,
                    "rows_kept": 40, "generated_tokens": 3}
        self.assertEqual(record, record | expected)

    def test_below_the_budget_nothing_is_evicted(self):
        record = self.run_tool("-p", "Hello", "-n", "2", "--ignore-eos").record
        self.assertEqual((record["rows_evicted"], record["compression_ratio"]), (0, 1.0))
        self.assertEqual(record["evict_decode_ms"] <= record["decode_ms"], True)

    def test_no_tokens_are_generated_when_none_are_asked_for(self):
        answer = self.run_tool("-p", "Hello", "-n", "0")
        self.assertEqual((answer.out, answer.record["generated_tokens"]), (b"", 0))
        self.assertEqual(answer.record["finish_reason"], "length")

    def test_an_answer_that_the_model_ends_is_told_from_one_that_is_cut(self):
        question = ("--chat", "--temp", "0", "-p", "What is the capital of France?")
        whole = self.run_tool(*question, "-n", "50").record
        self.assertEqual(whole["finish_reason"], "stop")
        self.assertIn("Paris", whole["text"])
        cut = self.run_tool(*question, "-n", "2").record
        self.assertEqual((cut["finish_reason"], cut["generated_tokens"]), ("length", 2))
        on = self.run_tool(*question, "-n", "50", "--ignore-eos").record
        self.assertEqual((on["finish_reason"], on["generated_tokens"]), ("length", 50))

    def test_the_record_replaces_an_older_one_and_leaves_nothing_else(self):
        self.path("record.json", b"old")
        answer = self.finish(self.start("-p", "Hi", "-n", "1"))
        self.check(answer)
        self.assertEqual(os.listdir(self.folder), ["record.json"])

    def test_the_record_may_be_a_pipe(self):
        reader, writer = os.pipe()
        with open(reader, encoding="utf-8") as file:
            process = subprocess.Popen(
                [TOOL, "run", "-m", MODEL, "-p", "Hi", "-n", "1", "--json", f"/dev/fd/{writer}"],
                pass_fds=[writer], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            os.close(writer)
            self.assertEqual(json.load(file)["generated_tokens"], 1)
            self.assertEqual(process.wait(PATIENCE), 0)

    def test_a_path_that_is_no_utf8_does_not_break_the_record(self):
        path = os.path.join(self.folder.encode(), b"mod\xe9l.gguf")
        os.symlink(MODEL, path)
        command = [TOOL, "run", "-m", path, "-p", "Hi", "-n", "1", "--json", self.record_path]
        answer = self.finish(subprocess.Popen(command, stdout=subprocess.PIPE,
                                              stderr=subprocess.PIPE))
        self.assertEqual(answer.code, 0)
        self.assertIn("mod\ufffdl.gguf", answer.record["model"])


class PromptTest(CliTest):
    GREEDY = ("-n", "12", "--temp", "0")

    def ask(self, *arguments, stdin=None):
        record = self.run_tool(*self.GREEDY, *arguments, stdin=stdin).record
        return record["prompt_tokens"], record["text"]

    def test_the_sources_give_the_same_answer(self):
        text = "Once upon a time, in a caf\u00e9 by the sea, there lived"
        with_newline = self.path("prompt.txt", text + "\n")
        expected = self.ask("-p", text)
        self.assertEqual(self.ask("-f", with_newline), expected)
        self.assertEqual(self.ask("-f", self.path("bare.txt", text)), expected)
        self.assertEqual(self.ask(stdin=text.encode() + b"\n"), expected)
        self.assertEqual(self.ask("-f", "-", stdin=text.encode()), expected)
        self.assertEqual(self.ask("--file", with_newline), expected)
        self.assertEqual(self.ask("--prompt", text), expected)

    def test_a_prompt_follows_the_text_of_a_file(self):
        file = self.path("text.txt", "The sky is blue.\n")
        self.assertEqual(self.ask("-f", file, "-p", "The sky is"),
                         self.ask("-p", "The sky is blue.\n\nThe sky is"))

    def test_a_prompt_may_look_like_an_option(self):
        self.assertEqual(self.ask("-p", "--budget is"), self.ask(stdin=b"--budget is"))
        self.assertEqual(self.ask("-p", "-n"), self.ask(stdin=b"-n"))
        signs = "{a, [b]} '%' \"c\""
        self.assertEqual(self.ask("-p", signs), self.ask(stdin=signs.encode()))

    def test_chat_puts_the_prompt_into_the_template(self):
        plain = self.run_tool(*self.GREEDY, "-p", "Say hello.")
        chat = self.run_tool(*self.GREEDY, "--chat", "-p", "Say hello.")
        self.assertGreater(chat.record["prompt_tokens"], plain.record["prompt_tokens"])
        self.assertIn("sinks: [Say] [ hello] [.]\n", plain.err)
        self.assertIn("sinks: [<|im_start|>] [user] [\\n] [Say]\n", chat.err)

    def test_the_text_of_special_tokens_is_only_text_without_chat(self):
        self.assertGreater(self.ask("-p", "<|im_end|>")[0], 1)

    def test_a_system_message_comes_first_and_can_be_pinned(self):
        system = "You are a parrot that knows only the names of colours."
        say = ("--chat", "-p", "Hello!", "--budget", "40")
        for flag in ("-sys", "--system-prompt"):
            with self.subTest(flag=flag):
                loose = self.run_tool(*self.GREEDY, *say, flag, system)
                self.assertIn("sinks: [<|im_start|>] [system] [\\n] [You]", loose.err)
                self.assertEqual(loose.record["n_sink"], 4)
        pinned = self.run_tool(*self.GREEDY, *say, "-sys", system, "--pin-system")
        self.assertGreater(pinned.record["n_sink"], 12)
        self.assertEqual(pinned.record["prompt_tokens"], loose.record["prompt_tokens"])
        sinks = re.search(r"^sinks: (.*)$", pinned.err, re.M).group(1)
        self.assertTrue(sinks.endswith("] [<|im_end|>] [\\n]"), sinks)
        self.assertIn("parrot", re.sub(r"\] \[", "", sinks))

    def test_a_prompt_beyond_the_training_is_read_when_allowed(self):
        process = self.start("--allow-past-training", stdin=subprocess.PIPE)
        process.stdin.write(b"one two three " * 3000)
        process.stdin.close()
        process.stdin = None
        self.assertTrue(process.stderr.readline().startswith(b"sinks:"))
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        answer = self.finish(process)
        self.assertEqual((answer.code, answer.record["finish_reason"]), (0, "interrupted"))


class FlagTest(CliTest):
    TEXT = FILLER * 8  # about 110 tokens
    BASE = ("-p", TEXT, "--budget", "64", "-n", "8", "--ignore-eos", "--temp", "0")

    def same(self, one, two):
        """Two ways to say the same give the same answer."""
        skip = NUMBERS + ["peak_rss_bytes"]
        records = [self.run_tool(*arguments).record for arguments in (one, two)]
        for record in records:
            for name in skip:
                record.pop(name)
        self.assertEqual(*records)
        return records[0]

    def test_short_and_long_names_mean_the_same(self):
        record = self.same(
            ("-p", self.TEXT, "--budget", "64", "-n", "6", "-t", "2", "-ub", "48", "-s", "11",
             "-ctk", "q8_0", "-ctv", "q4_0", "-ngl", "0", "-fa", "on"),
            ("--prompt", self.TEXT, "--budget", "64", "--predict", "6", "--threads", "2",
             "--ubatch-size", "48", "--seed", "11", "--cache-type-k", "q8_0", "--cache-type-v",
             "q4_0", "--n-gpu-layers", "0", "--flash-attn", "auto"))
        self.same(self.BASE, ("-p", self.TEXT, "--budget", "64", "--n-predict", "8", "--ignore-eos",
                              "--temperature", "0", "--gpu-layers", "0"))
        self.assertEqual((record["cache_type_k"], record["cache_type_v"]), ("q8_0", "q4_0"))

    def test_values_may_stand_behind_an_equals_sign(self):
        self.same(self.BASE, ("--prompt=" + self.TEXT, "--budget=64", "--predict=8", "--ignore-eos",
                              "--temp=0"))

    def test_every_policy_answers(self):
        for policy in ("morphkv", "streaming", "random", "full"):
            for prefill in ("stream", "whole"):
                with self.subTest(policy=policy, prefill=prefill):
                    record = self.run_tool(*self.BASE, "--policy", policy,
                                           "--prefill", prefill).record
                    self.assertEqual((record["policy"], record["prefill"]), (policy, prefill))
                    self.assertEqual(record["generated_tokens"], 8)

    def test_every_choice_of_scoring_answers(self):
        for arguments in (("--queries", "keys"), ("--queries", "attention"), ("--fuse", "max"),
                          ("--pool", "1"), ("--pool", "15"), ("--window", "1"), ("--sinks", "0"),
                          ("--recent", "32")):
            with self.subTest(arguments=arguments):
                self.assertEqual(self.run_tool(*self.BASE, *arguments).record["rows_kept"], 64)

    def test_quantised_caches_answer_in_fewer_bytes(self):
        for kind, bytes_per_32 in (("f16", 64), ("q8_0", 34), ("q4_0", 18)):
            with self.subTest(kind=kind):
                record = self.run_tool(*self.BASE, "-ctk", kind, "-ctv", kind).record
                self.assertEqual(record["kv_bytes_kept"], 64 * (ROW_BYTES // 64) * bytes_per_32)
                self.assertTrue(record["text"].strip())

    def test_a_micro_batch_beyond_a_small_budget_is_lowered_with_one_notice(self):
        answer = self.run_tool(*self.BASE, "-ub", "512")
        self.assertEqual(answer.err.count("note:"), 1)
        self.assertIn("note: micro-batch lowered from 512 to 64 tokens", answer.err)
        self.assertEqual(self.run_tool(*self.BASE, "-ub", "64").err.count("note:"), 0)

    def test_sampling_repeats_with_its_seed_and_only_then(self):
        def sample(*arguments):
            return self.run_tool("-p", "My favourite thing is", "-n", "24", "--ignore-eos",
                                 "--temp", "0.8", *arguments).record["text"]

        self.assertEqual(sample("-s", "7"), sample("--seed", "7"))
        self.assertNotEqual(sample("-s", "7"), sample("-s", "8"))
        self.assertNotEqual(sample("-s", "-1"), sample("-s", "-1"))
        self.assertNotEqual(sample(), sample())

    def test_one_candidate_is_the_likeliest(self):
        greedy = self.run_tool(*self.BASE).record["text"]
        for arguments in (("--top-k", "1"), ("--top-p", "0"), ("--min-p", "1")):
            with self.subTest(arguments=arguments):
                self.assertEqual(self.run_tool(*self.BASE[:-1], "0.8", *arguments).record["text"],
                                 greedy)

    def test_a_repeat_penalty_changes_the_answer(self):
        greedy = ("-p", "la la la la la la la la la la", "-n", "16", "--temp", "0")
        loop = self.run_tool(*greedy).record["text"]
        other = self.run_tool(*greedy, "--repeat-penalty", "1.8", "--repeat-last-n", "32")
        self.assertNotEqual(other.record["text"], loop)
        off = self.run_tool(*greedy, "--repeat-penalty", "1.8", "--repeat-last-n", "0")
        self.assertEqual(off.record["text"], loop)

    def test_the_threads_change_nothing_about_the_rows(self):
        one, two = (self.run_tool(*self.BASE, "-t", t).record for t in ("1", "2"))
        self.assertEqual(one["text"], two["text"])

    def test_verbose_shows_the_log_of_the_engine_on_stderr(self):
        for flag in ("-v", "--verbose"):
            answer = self.finish(self.start("-p", "Hi", "-n", "1", flag))
            self.assertEqual(answer.code, 0)
            self.assertIn("llama_model_loader", answer.err)
            self.assertLess(len(answer.out), 40)


class InterruptTest(CliTest):
    READING = FILLER * 500  # about 7,000 tokens

    def interrupt(self, process, sign=signal.SIGINT):
        process.send_signal(sign)
        answer = self.finish(process)
        print(f"ended {answer.seconds:.2f} s after the signal", file=sys.stderr)
        self.assertLess(answer.seconds, 20, "two seconds on an idle machine")
        self.assertEqual(answer.code, 0, answer.err)
        return answer

    def start_reading(self, *arguments):
        process = self.start("-f", self.path("long.txt", self.READING), *arguments)
        sinks = process.stderr.readline()  # the model is loaded, the prompt is next
        self.assertTrue(sinks.startswith(b"sinks:"), sinks)
        time.sleep(1.5)
        return process

    def test_ctrl_c_while_the_prompt_is_read(self):
        for prefill in ("stream", "whole"):
            with self.subTest(prefill=prefill):
                answer = self.interrupt(self.start_reading("--prefill", prefill))
                self.check(answer)
                self.assertEqual(answer.out, b"")
                self.assertEqual(answer.record["finish_reason"], "interrupted")
                self.assertEqual(answer.record["generated_tokens"], 0)
                self.assertLess(answer.record["tokens_seen"], 6000)

    def test_a_signal_while_the_answer_is_written(self):
        for sign in (signal.SIGINT, signal.SIGTERM):
            with self.subTest(sign=sign):
                process = self.start("-p", LONG, "-n", "5000", "--ignore-eos", "--temp", "0")
                first = process.stdout.read(1)
                answer = self.interrupt(process, sign)
                answer.out = first + answer.out
                self.check(answer)
                self.assertEqual(answer.record["finish_reason"], "interrupted")
                self.assertGreater(answer.record["generated_tokens"], 0)

    def test_ctrl_c_while_the_prompt_is_typed_ends_the_process(self):
        process = self.start(stdin=subprocess.PIPE)
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        self.assertEqual(process.wait(20), -signal.SIGINT)
        self.assertFalse(os.path.exists(self.record_path))


class StreamTest(CliTest):
    def test_a_reader_that_leaves_ends_the_run_cleanly(self):
        process = self.start("-p", "Once upon a time", "-n", "5000", "--ignore-eos", "--temp", "0")
        self.assertEqual(len(process.stdout.read(10)), 10)
        process.stdout.close()
        process.stdout = None
        answer = self.finish(process)
        self.assertEqual(answer.code, 0, answer.err)
        self.assertEqual(answer.record["finish_reason"], "interrupted")
        self.assertLess(answer.record["generated_tokens"], 5000)
        self.assertIn("KV cache", answer.err)

    @unittest.skipUnless(os.path.exists("/dev/full"), "no /dev/full")
    def test_a_full_disk_is_a_failure_of_the_run(self):
        with open("/dev/full", "wb") as full:
            process = self.start("-p", "Once upon a time", "-n", "50", stdout=full)
            _, err = process.communicate(timeout=PATIENCE)
        self.assertEqual(process.returncode, 1)
        self.assertIn(b"morphkv: error: standard output cannot be written: No space left", err)

    def test_characters_of_several_bytes_come_out_whole(self):
        prompt = "\U0001F600 \U0001F603 \U0001F604 caf\u00e9 \u20ac \u4f60\u597d \U0001F600 " * 6
        process = self.start("-p", prompt.strip(), "-n", "60", "--ignore-eos", "--temp", "0")
        chunks = []
        while chunk := os.read(process.stdout.fileno(), 65536):
            chunks.append(chunk)
        answer = self.finish(process)
        answer.out = b"".join(chunks)
        self.assertGreater(len(chunks), 5, "the text does not come as it is made")
        for chunk in chunks:
            chunk.decode("utf-8")  # raises if a character is cut
        self.check(answer)
        self.assertTrue(any(ord(c) > 0xFFFF for c in answer.record["text"]), answer.record["text"])
        self.assertNotIn("\ufffd", answer.record["text"])

    def test_a_character_that_the_limit_cuts_is_replaced(self):
        prompt = "\U0001F600 \U0001F603 \U0001F604 \U0001F600 " * 6
        cut = 0
        for n in range(1, 7):
            text = self.run_tool("-p", prompt.strip(), "-n", str(n), "--temp", "0").record["text"]
            self.assertNotIn("\ufffd", text[:-1])
            cut += text.endswith("\ufffd")
        self.assertGreater(cut, 0, "no limit fell within a character")

    def test_a_terminal_sees_progress_and_nobody_else_does(self):
        terminal, stderr = pty.openpty()
        process = self.start("-p", LONG, "-n", "3", "--ignore-eos", "-ub", "128", stderr=stderr)
        os.close(stderr)
        shown = b""
        while True:
            select.select([terminal], [], [], PATIENCE)
            try:
                chunk = os.read(terminal, 65536)
            except OSError:  # the other side is closed
                break
            if not chunk:
                break
            shown += chunk
        os.close(terminal)
        out = process.stdout.read()
        self.assertEqual(process.wait(PATIENCE), 0)
        shown = shown.decode("utf-8")
        self.assertRegex(shown, r"loading \[[#.]{30}\] +\d+ %")
        self.assertRegex(shown, r"reading \[[#.]{30}\] +\d+ % \d+ / \d+ tokens")
        self.assertIn("KV cache", shown)
        # Each bar is taken away before anything else is shown.
        for line in shown.replace("\r\n", "\n").split("\n"):
            last = line.split("\r\x1b[K")[-1]
            self.assertNotIn("[#", last)
        self.assertNotIn(b"\x1b", out)
        self.assertNotIn(b"\r", out)


class DemoTest(CliTest):
    """The prompt of `make demo` needs a row that the most recent ones do not hold."""

    def ask(self, *arguments):
        return self.run_tool("--chat", "-f", str(EXAMPLES / "demo_prompt.txt"), "--budget", "512",
                             "-n", "64", "--temp", "0", "-t", "0", *arguments).record

    def test_a_bounded_cache_answers_like_the_full_one(self):
        self.assertIn("4817", self.ask("--prefill", "whole", "--policy", "full")["text"])
        bounded = self.ask("--prefill", "whole")
        self.assertIn("4817", bounded["text"])
        self.assertGreater(bounded["compression_ratio"], 2.5)
        self.assertTrue(1300 <= bounded["prompt_tokens"] <= 1800, bounded["prompt_tokens"])

    def test_the_most_recent_rows_alone_do_not_answer(self):
        record = self.ask("--prefill", "whole", "--policy", "streaming")
        self.assertNotIn("4817", record["text"])


if __name__ == "__main__":
    unittest.main(verbosity=2)
