"""`morphkv`: help, and every kind of bad input. See cli_support.py."""

import os
import shutil
import subprocess
import sys
import time
import unittest

from cli_support import MODEL, PATIENCE, TOOL, TRAINED, CliTest


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
                --verbose --profile --budget --sinks --window --recent --pool --fuse --queries --policy
                --prefill --guide --guide-text --messages --load-session --save-session
                --pin-system -ctk --cache-type-k -ctv --cache-type-v -n --predict --n-predict
                -t --threads -ub --ubatch-size -ngl --n-gpu-layers --gpu-layers -fa --flash-attn
                -s --seed --temp --temperature --top-k --top-p --min-p --repeat-penalty
                --repeat-last-n --ignore-eos --allow-past-training""".split():
            self.assertRegex(text, rf"(?<![\w-]){flag}(?![\w-])")
        for word in """morphkv h2o snapkv tova keydiff rkv streaming random full guided stream
                whole mean max attention keys f16 q8_0 q4_0 document chat reference paper""".split():
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
                ("--policy", "--policy",
                 "morphkv, h2o, snapkv, tova, keydiff, rkv, streaming, random, full"),
                ("--profile", "--profile", "document, chat, reference, paper"),
                ("--fuse", "--fuse", "mean, max"), ("--queries", "--queries", "attention, keys"),
                ("--prefill", "--prefill", "guided, stream, whole"),
                ("-ctk", "--cache-type-k", "f16, q8_0, q4_0"),
                ("-ctv", "--cache-type-v", "f16, q8_0, q4_0"),
                ("-fa", "--flash-attn", "on, auto, off")):
            for word in ("H2O", "", "F16"):
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

    def test_guides_that_nobody_would_ask(self):
        self.refuse("-p", "x", "--guide", "8", "--prefill", "stream",
                    says=["--guide", "--prefill guided", "stream"])
        self.refuse("-p", "x", "--guide-text", "y", "--prefill", "whole", says=["whole"])
        for flags in (("--prefill", "guided"), ("--guide", "8"), ("--guide-text", "y")):
            self.refuse("-p", "x", "--policy", "streaming", *flags,
                        says=["--policy 'streaming'", "takes no guide", "morphkv"])
        self.refuse("-p", "x", "--guide-text", "", says=["--guide-text ''", "empty"])
        self.refuse("-p", "x", "--guide-text", b"caf\xe9", says=["--guide-text", "byte 3"])
        self.refuse("-p", "x", "--guide-text", "word " * 600,
                    says=["a guide has 60", "the limit is 512", "shorten it"])

    def test_messages_that_are_none(self):
        for content, says in (
                ("", ["no JSON array"]), ("{}", ["no JSON array"]), ("[]", ["no JSON array"]),
                ("[1]", ["message 0", 'no text "role"']),
                ('[{"role": "user"}]', ["message 0", 'no text "content"']),
                ('[{"role": "user", "content": 1}]', ['no text "content"']),
                ('[{"role": "", "content": "x"}]', ['empty "role"']),
                ('[{"role": "user", "content": "a\\u0000b"}]', ["NUL character at byte 1"]),
                ('[{"role": "user", "content": "\xff"}]', ["no JSON array"])):
            with self.subTest(content=content):
                path = self.path("messages.json", content.encode("latin-1"))
                self.refuse("--messages", path, says=["--messages", "messages.json", *says])
        self.refuse("--messages", self.path("none.json"), says=["none.json", "cannot be read"])
        self.refuse("--messages", self.folder, says=["cannot be read"])
        system = self.path("system.json", '[{"role": "system", "content": "x"}]')
        self.refuse("--messages", system, "-p", "y", "-sys", "z", says=["system message beside"])

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

    def test_sessions_that_cannot_be_loaded_or_saved(self):
        for content, says in ((b"", ["ends too early"]), (b"no session at all, only text",
                                                           ["no saved morphkv session"])):
            path = self.path("bad.session", content)
            self.refuse("-p", "x", "--load-session", path,
                        says=["--load-session", "bad.session", *says])
        none = self.path("none.session")
        self.refuse("-p", "x", "--load-session", none,
                    says=["--load-session", "none.session", "No such file", "--save-session"])
        self.refuse("-p", "x", "--load-session", self.folder, says=["directory"])
        for path, says in ((self.path("none/a.session"), ["folder exists"]),
                           (self.folder, ["is a directory"]), ("", ["names no file"]),
                           ("/dev/null", ["device"])):
            self.refuse("-p", "x", "--save-session", path, says=["--save-session", *says])

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


if __name__ == "__main__":
    unittest.main(verbosity=2)
