"""One profile means the same wherever it is named: in run, chat, serve and Python's Session.

Each host is told a profile and a text beyond the budget, and must say that it runs by the same rule
and has read the text in the same way. (`morphkv eval` is held against the same profiles in
eval_arm_test.cc.) Needs MORPHKV_TOOL, MORPHKV_TEST_MODEL, and the Python package, which the runner
tests/python/run installs.
"""

import json
import os
import re
import subprocess
import tempfile
import unittest
import urllib.error
import urllib.request

import morphkv

TOOL = os.environ["MORPHKV_TOOL"]
MODEL = os.environ["MORPHKV_TEST_MODEL"]
PATIENCE = 600  # seconds; the machine may be busy
BUDGET = 96
TEXT = "The ferry brings letters, bread and rope to the island every morning. " * 12

PROFILES = {
    "document": ("n_sink 4, window 8, recent 24, pool 31, fusion mean, queries attention", "guided"),
    "chat": ("n_sink 4, window 8, recent 24, pool 21, fusion mean, queries attention", "guided"),
    "reference": ("n_sink 4, window 8, recent 0, pool 1, fusion mean, queries keys", "stream"),
    "paper": ("n_sink 4, window 32, recent 0, pool 1, fusion mean, queries attention", "whole"),
}


def run(profile):
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "record.json")
        subprocess.run(
            [TOOL, "run", "-m", MODEL, "--budget", str(BUDGET), "-n", "1", "-t", "1", "-p", TEXT,
             "--profile", profile, "--json", path],
            check=True, capture_output=True, timeout=PATIENCE)
        with open(path, encoding="utf-8") as file:
            record = json.load(file)
    return record["rule"], record["prefill_mode"]


def chat(profile):
    done = subprocess.run(
        [TOOL, "chat", "-m", MODEL, "--budget", str(BUDGET), "-n", "1", "-t", "1", "--profile",
         profile],
        input=f"{TEXT}\n/stats\n", check=True, capture_output=True, text=True, timeout=PATIENCE)
    return re.search(r"rule: (.*); the last prompt was read (\w+)", done.stdout).groups()


def session(profile):
    with morphkv.Session(MODEL, budget=BUDGET, profile=profile, threads=1) as one:
        "".join(one.generate(TEXT, max_tokens=1))
        return one.rule, one.stats.prefill_mode


class Server:
    """`morphkv serve` with the default profile, or with one of its own."""

    def __init__(self, *flags):
        self.process = subprocess.Popen(
            [TOOL, "serve", "-m", MODEL, "--budget", str(BUDGET), "--slots", "2", "-t", "1",
             "--port", "0", *flags], stderr=subprocess.PIPE, text=True)
        for line in self.process.stderr:
            if found := re.search(r"listening on (http://\S+),", line):
                self.url = found[1]
                break

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.process.terminate()
        self.process.communicate(timeout=PATIENCE)

    def ask(self, **fields):
        body = {"prompt": TEXT, "max_tokens": 1, **fields}
        request = urllib.request.Request(self.url + "/v1/completions", json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            told = json.load(answer)["morphkv"]
        return told["rule"], told["prefill_mode"]


class HostsTest(unittest.TestCase):
    def expected(self, profile):
        rule, prefill = PROFILES[profile]
        return (f"profile {profile}, budget {BUDGET}, {rule}, policy morphkv, seed 0, "
                f"prefill {prefill}", prefill)

    def test_every_profile_is_known_here(self):
        self.assertEqual([profile.name for profile in morphkv.profiles()], list(PROFILES))

    def test_run_chat_and_session(self):
        for host in (run, chat, session):
            for profile in PROFILES:
                with self.subTest(host=host.__name__, profile=profile):
                    self.assertEqual(host(profile), self.expected(profile))

    def test_a_server_by_its_requests(self):
        with Server("--prefill", "whole") as server:  # or "paper" would be refused
            for profile in PROFILES:
                with self.subTest(profile=profile):
                    self.assertEqual(server.ask(profile=profile), self.expected(profile))

    def test_a_server_that_reserves_nothing_for_whole_prompts_refuses_them(self):
        with Server() as server, self.assertRaises(urllib.error.HTTPError) as refused:
            server.ask(profile="paper")
        self.assertEqual(refused.exception.code, 400)
        self.assertIn("--prefill whole", refused.exception.read().decode())

    def test_a_server_by_its_own_profile(self):
        for profile in PROFILES:
            with self.subTest(profile=profile), Server("--profile", profile) as server:
                self.assertEqual(server.ask(), self.expected(profile))


if __name__ == "__main__":
    unittest.main()
