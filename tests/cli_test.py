"""`morphkv run` as a user meets it: a process with arguments, streams, files and signals.

Bad input has its own file, cli_refusal_test.py. What an answer should say is left to recall_test.cc,
but for the prompt that is shipped. See cli_support.py.
"""

import json
import os
import pathlib
import pty
import re
import select
import signal
import subprocess
import sys
import time
import unittest

from cli_support import FILLER, LONG, MODEL, NUMBERS, PATIENCE, ROW_BYTES, TOOL, CliTest

EXAMPLES = pathlib.Path(__file__).resolve().parent.parent / "examples"


class RecordTest(CliTest):
    def test_a_full_cache_has_exactly_the_bytes_of_its_budget(self):
        for prefill in ("guided", "stream", "whole"):
            with self.subTest(prefill=prefill):
                record = self.run_tool("-p", LONG, "-n", "4", "--ignore-eos", "--temp", "0",
                                       "--prefill", prefill).record
                self.assertGreater(record["tokens_seen"], 512)
                self.assertEqual(record["kv_bytes_kept"], 11_796_480)
                self.assertLessEqual(record["kv_bytes_allocated"], (512 + 512) * ROW_BYTES)
                self.assertEqual((record["prefill"], record["finish_reason"]), (prefill, "length"))
                self.assertEqual(record["prefill_mode"], prefill)
                self.assertGreater(record["evict_ms"], 0)
                self.assertGreater(record["tokens_per_second"], 0)

    def test_names_what_was_asked_for(self):
        record = self.run_tool("-p", FILLER * 6, "-n", "3", "--ignore-eos", "--budget", "40",
                               "--sinks", "2", "--window", "6", "--recent", "12", "--pool", "3",
                               "--fuse", "max", "--queries", "keys").record
        expected = {"budget": 40, "n_sink": 2, "window": 6, "recent": 12, "pool": 3, "fuse": "max",
                    "queries": "keys", "policy": "morphkv", "prefill": "guided", "model": MODEL,
                    "rows_kept": 40, "generated_tokens": 3}
        self.assertEqual(record, record | expected)

    def test_below_the_budget_nothing_is_evicted(self):
        record = self.run_tool("-p", "Hello", "-n", "2", "--ignore-eos").record
        self.assertEqual((record["rows_evicted"], record["compression_ratio"]), (0, 1.0))
        self.assertEqual(record["prefill_mode"], "at_once")
        self.assertEqual(record["evict_decode_ms"] <= record["decode_ms"], True)

    def test_no_tokens_are_generated_when_none_are_asked_for(self):
        answer = self.run_tool("-p", "Hello", "-n", "0")
        self.assertEqual((answer.out, answer.record["generated_tokens"]), (b"", 0))
        self.assertEqual(answer.record["finish_reason"], "length")

    def test_an_answer_that_the_model_ends_is_told_from_one_that_is_cut(self):
        question = ("--chat", "--temp", "0", "-p",
                    "What is the capital of France? Answer in one sentence.")
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
        # The template begins with a system message of its own.
        self.assertIn("sinks: [<|im_start|>] [system] [\\n] [You]\n", chat.err)

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


    def test_earlier_messages_come_before_the_newest_question(self):
        history = [{"role": "system", "content": "Be brief."},
                   {"role": "user", "content": "My name is Ada."},
                   {"role": "assistant", "content": "Hello Ada!"}]
        question = {"role": "user", "content": "What is my name?"}
        path = self.path("messages.json", json.dumps(history))
        answer = self.ask("--messages", path, "-p", question["content"])
        whole = self.path("whole.json", json.dumps(history + [question]))
        self.assertEqual(self.ask("--messages", whole), answer)
        without_system = self.path("short.json", json.dumps(history[1:]))
        self.assertEqual(self.ask("--messages", without_system, "-sys", "Be brief.", "-p",
                                  question["content"]), answer)


class GuideTest(CliTest):
    """What a guide is, and what it costs; whether it helps is left to DemoTest and morphkv eval."""
    BASE = ("-p", FILLER * 20 + "What do we walk along?", "--budget", "64", "-n", "4",
            "--ignore-eos", "--temp", "0")

    def guide(self, *arguments):
        return self.run_tool(*self.BASE, *arguments).record

    def test_the_end_of_the_prompt_is_the_guide(self):
        self.assertEqual(self.guide("--guide", "12")["guide_tokens"], 12)
        self.assertEqual(self.guide()["guide_tokens"], 8)  # an eighth of a micro-batch of 64
        self.assertEqual(self.guide("--guide", "100000")["guide_tokens"], 64)  # one micro-batch

    def test_texts_guide_in_its_place_and_the_end_joins_them(self):
        one = self.guide("--guide-text", "the river")["guide_tokens"]
        two = self.guide("--guide-text", "the river", "--guide-text", "boats")["guide_tokens"]
        self.assertTrue(8 < one < two, (one, two))
        self.guide("--guide-text", "<|im_end|> -p")  # only text

    def test_only_the_newest_question_of_a_chat_is_the_guide(self):
        history = [{"role": "user", "content": FILLER * 20}, {"role": "assistant", "content": "Yes."}]
        record = self.run_tool("--messages", self.path("m.json", json.dumps(history)), "-p", "Why?",
                               "--budget", "64", "--guide", "60", "-n", "2", "--temp", "0").record
        self.assertEqual(record["prefill_mode"], "guided")
        self.assertLess(record["guide_tokens"], 16)

    def test_a_policy_without_guides_reads_a_stream(self):
        record = self.run_tool(*self.BASE, "--policy", "streaming").record
        self.assertEqual((record["prefill_mode"], record["guide_tokens"]), ("stream", 0))

    def test_reading_needs_no_more_memory_than_a_stream(self):
        for text in (LONG, LONG * 3):
            peaks = [self.run_tool("-p", text, "-n", "1", "--prefill", prefill).record["kv_bytes_peak"]
                     for prefill in ("guided", "stream")]
            self.assertEqual(peaks, [(512 + 512) * ROW_BYTES] * 2)


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

    def test_a_profile_sets_the_defaults_and_what_is_given_beside_it_has_the_last_word(self):
        def settings(*arguments):
            record = self.run_tool(*self.BASE, *arguments).record
            return tuple(record[n] for n in ("queries", "window", "pool", "prefill", "budget"))

        default = settings()
        self.assertEqual(settings("--profile", "document"), default)
        self.assertEqual(settings("--profile", "reference"), ("keys", 8, 1, "stream", 64))
        self.assertEqual(settings("--profile", "paper", "--window", "16"),
                         ("attention", 16, 1, "whole", 64))
        self.assertEqual(settings("--window", "16", "--pool", "3", "--profile", "paper"),
                         ("attention", 16, 3, "whole", 64))
        self.assertEqual(settings("--profile", "paper", "--prefill", "stream", "--queries", "keys"),
                         ("keys", 32, 1, "stream", 64))

    def test_the_chat_profile_asks_with_a_general_question_beside_the_prompts_end(self):
        long = ("-p", LONG, "--budget", "128", "-n", "2", "--temp", "0")
        document = self.run_tool(*long).record
        chat = self.run_tool(*long, "--profile", "chat").record
        self.assertEqual((document["prefill_mode"], chat["prefill_mode"]), ("guided", "guided"))
        self.assertGreater(chat["guide_tokens"], document["guide_tokens"] + 10)
        own = self.run_tool(*long, "--profile", "chat", "--guide-text", "Where?").record
        self.assertLess(own["guide_tokens"], chat["guide_tokens"], "texts given replace the general one")

    def test_every_policy_answers(self):
        for policy in ("morphkv", "h2o", "snapkv", "tova", "keydiff", "rkv", "streaming", "random",
                       "full"):
            for prefill in ("stream", "whole"):
                with self.subTest(policy=policy, prefill=prefill):
                    record = self.run_tool(*self.BASE, "--policy", policy,
                                           "--prefill", prefill).record
                    self.assertEqual((record["policy"], record["prefill"]), (policy, prefill))
                    mode = "at_once" if policy == "full" else prefill
                    self.assertEqual(record["prefill_mode"], mode)
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


class SessionTest(CliTest):
    """--save-session and --load-session; what is in the file is left to saved_text_test.cc."""
    GREEDY = ("--temp", "0", "--ignore-eos")

    def save(self, name, *arguments):
        path = self.path(name)
        return path, self.run_tool(*self.GREEDY, *arguments, "--save-session", path).record

    def refuse(self, *arguments, says):
        before = {name: self.read(name) for name in os.listdir(self.folder)}
        answer = self.finish(self.start(*arguments))
        self.assertEqual((answer.code, answer.out), (2, b""), answer.err)
        for word in says:
            self.assertIn(word, answer.err)
        self.assertEqual({name: self.read(name) for name in os.listdir(self.folder)}, before)

    def read(self, name):
        with open(os.path.join(self.folder, name), "rb") as file:
            return file.read()

    def test_text_goes_on_where_it_ended(self):
        path, first = self.save("a.session", "-p", "Once upon a time", "-n", "6")
        self.assertEqual(first["reused_tokens"], 0)
        on = self.run_tool(*self.GREEDY, "-p", " and then", "-n", "6", "--load-session", path)
        self.assertEqual(on.record["reused_tokens"], first["tokens_seen"])
        self.assertEqual(on.record["prompt_tokens"], 2 + 1, "the last token had not been evaluated")
        self.assertIn("sinks: [Once] [ upon] [ a] [ time]\n", on.err)
        self.assertIn("seen before", on.err)
        whole = self.run_tool(*self.GREEDY, "-n", "6",
                              "-p", "Once upon a time" + first["text"] + " and then").record
        self.assertEqual(on.record["text"], whole["text"])
        self.assertEqual(on.record["tokens_seen"], whole["tokens_seen"])

    def test_a_chat_goes_on_as_if_its_messages_were_given(self):
        ask = ("--chat", "--temp", "0", "-n", "40")
        path = self.path("chat.session")
        question = "What is the capital of France? Answer in one sentence."
        first = self.run_tool(*ask, "-p", question, "--save-session", path).record
        self.assertEqual(first["finish_reason"], "stop")
        on = self.run_tool(*ask, "-p", "And of Italy?", "--load-session", path).record
        messages = self.path("messages.json", json.dumps(
            [{"role": "user", "content": question}, {"role": "assistant", "content": first["text"]}]))
        whole = self.run_tool(*ask, "-p", "And of Italy?", "--messages", messages).record
        self.assertEqual(on["reused_tokens"] + on["prompt_tokens"], whole["prompt_tokens"])
        self.assertEqual(on["text"], whole["text"])

    def test_a_session_beyond_its_budget_keeps_its_rule_and_its_memory(self):
        rule = ("--budget", "64", "--window", "6", "--policy", "rkv", "-s", "5")
        path, first = self.save("long.session", "-p", FILLER * 20, "-n", "4", *rule)
        size = os.path.getsize(path)
        for _ in range(2):  # into the same file
            seen = first["tokens_seen"]
            first = self.run_tool(*self.GREEDY, "-p", FILLER * 10, "-n", "4", "--load-session",
                                  path, "--save-session", path).record
            self.assertEqual(first["reused_tokens"], seen)
            self.assertEqual((first["budget"], first["window"], first["policy"]), (64, 6, "rkv"))
            self.assertEqual((first["rows_kept"], first["prefill_mode"]), (64, "guided"))
            self.assertLess(os.path.getsize(path), size + 4 * 300)
        self.assertEqual(sorted(os.listdir(self.folder)), ["long.session", "record.json"])
        same = [self.run_tool(*self.GREEDY, "-p", "So", "-n", "8", "--load-session", path).record["text"]
                for _ in range(2)]
        self.assertEqual(same[0], same[1])

    def test_what_contradicts_the_session_is_refused(self):
        path, _ = self.save("a.session", "-p", "Once upon a time", "-n", "2", "--budget", "128")
        load = ("-p", "x", "--load-session", path)
        self.run_tool(*load, "--budget", "128", "-n", "1")
        self.run_tool(*load, "--profile", "document", "-n", "1")
        self.refuse(*load, "--budget", "64", says=["a.session", "budget 128 (here 64)"])
        self.refuse(*load, "--profile", "reference", says=["queries attention (here keys)"])
        self.refuse(*load, "-ctk", "q8_0", says=["a.session", "K f16 (here K q8_0)"])
        self.refuse(*load, "--chat", "-sys", "Be brief.", says=["--load-session", "leave them out"])
        self.refuse("--load-session", path, "-p", "one two three " * 3000,
                    says=["behind a session of", "trained for", "--allow-past-training"])

    def test_a_damaged_file_is_refused(self):
        path, _ = self.save("a.session", "-p", "Once upon a time", "-n", "2")
        whole = self.read("a.session")
        for at in (0, 9, 15, 24, 40, len(whole) // 2, len(whole) - 1):
            damaged = bytearray(whole)
            damaged[at] ^= 0x10
            bad = self.path("bad.session", bytes(damaged))
            self.refuse("-p", "x", "--load-session", bad, says=["bad.session"])
            self.refuse("-p", "x", "--load-session", self.path("cut.session", whole[:at]),
                        says=["cut.session"])

    def test_the_older_file_stays_when_the_new_one_cannot_be_written(self):
        path, _ = self.save("a.session", "-p", "Once upon a time", "-n", "2")
        old = self.read("a.session")
        # The disk is full after 64 KiB, which the record fits into.
        command = ["prlimit", "--fsize=65536", TOOL, "run", "-m", MODEL, "-t", "1", "-p", FILLER,
                   "-n", "1", "--save-session", path]
        done = subprocess.run(command, capture_output=True, timeout=PATIENCE,
                              preexec_fn=lambda: signal.signal(signal.SIGXFSZ, signal.SIG_IGN))
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn(b"a.session' cannot be written: File too large", done.stderr)
        self.assertEqual(self.read("a.session"), old)
        self.assertEqual(sorted(os.listdir(self.folder)), ["a.session", "record.json"])

    def test_a_prompt_that_was_not_read_to_its_end_is_not_saved(self):
        path = self.path("a.session", b"old")
        process = self.start("-f", self.path("long.txt", FILLER * 500), "--save-session", path)
        self.assertTrue(process.stderr.readline().startswith(b"sinks:"))
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        answer = self.finish(process)
        self.assertEqual(answer.code, 0)
        self.assertIn("the session was not saved", answer.err)
        self.assertEqual(self.read("a.session"), b"old")


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
        for prefill in ("guided", "stream", "whole"):
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
        self.assertEqual(len([process.stdout.read(1) for _ in range(10)]), 10)
        process.stdout.close()
        process.stdout = None
        answer = self.finish(process)
        self.assertEqual(answer.code, 0, answer.err)
        self.assertEqual(answer.record["finish_reason"], "interrupted")
        self.assertLess(answer.record["generated_tokens"], 5000)
        self.assertIn("KV cache", answer.err)
        self.assertNotRegex(answer.err, "error|failed")

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
        self.assertRegex(shown, r"reading \[[#.]{30}\] +\d+ % \d+ / \d+ tokens, \d+ rows kept")
        self.assertIn("KV cache", shown)
        # Each bar is taken away before anything else is shown.
        for line in shown.replace("\r\n", "\n").split("\n"):
            last = line.split("\r\x1b[K")[-1]
            self.assertNotIn("[#", last)
        self.assertNotIn(b"\x1b", out)
        self.assertNotIn(b"\r", out)


class DemoTest(CliTest):
    """The prompt of `make demo` needs a row that the most recent ones do not hold."""

    def ask(self, *arguments, budget="256"):
        return self.run_tool("--chat", "-f", str(EXAMPLES / "demo_prompt.txt"), "--budget", budget,
                             "-n", "24", "--temp", "0", "-t", "0", *arguments).record

    def test_a_bounded_cache_answers_like_the_full_one(self):
        self.assertIn("4817", self.ask("--policy", "full")["text"])
        self.assertIn("4817", self.ask("--prefill", "whole", budget="512")["text"])
        guided = self.ask()
        self.assertIn("4817", guided["text"])
        self.assertEqual(guided["prefill_mode"], "guided")
        self.assertGreater(guided["compression_ratio"], 5)

    def test_neither_the_most_recent_rows_nor_reading_without_the_question_answer(self):
        self.assertNotIn("4817", self.ask("--policy", "streaming")["text"])
        self.assertNotIn("4817", self.ask("--prefill", "stream")["text"])


if __name__ == "__main__":
    unittest.main(verbosity=2)
