#!/usr/bin/env python3
"""A soak of `morphkv serve`: random clients for some minutes, and every answer is checked.

An oracle, a fresh process with two slots of which only one is used, answers the same requests
beforehand, one by one, at temperature 0. (A single slot reads more tokens at once than slots that
share their steps.) Batches of another size round otherwise, so an answer may leave the oracle's at
a near tie: its first other token must be within 0.05 of the likeliest there. `--memory` measures
the peak memory after 10 and after 200 requests instead. Standard library only.
"""

import argparse
import collections
import http.client
import json
import os
import random
import sys
import tempfile
import threading
import time

from serve_support import FILLER, Server, events

NEAR_TIE = 0.05  # in logprob
MEMORY_LIMIT = 1.02
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
TOPICS = """rivers lamps bridges clocks gardens ships letters mountains violins bakers comets wells
trains maps kettles""".split()


class Case:
    """A request and what the oracle says to it, by the number of tokens that were reused."""

    def __init__(self, name, path, body):
        self.name, self.path = name, path
        top = {"logprobs": True, "top_logprobs": 20} if path == CHAT else {"logprobs": 5}
        self.top = top
        self.body = {"temperature": 0, "ignore_eos": True, "max_tokens": 12} | body
        self.expected = {}


class Turn:
    """An answer as the checks see it."""

    def __init__(self, text, tokens, top, finish, usage, kept):
        self.text, self.tokens, self.top = text, tokens, top
        self.finish, self.usage, self.kept = finish, usage, kept


def parts_of(choice):
    """Token texts and their alternatives {text: logprob}, or None without logprobs."""
    logprobs = choice.get("logprobs")
    if not logprobs:
        return None
    if "content" in logprobs:
        return [(t["token"], {a["token"]: a["logprob"] for a in t["top_logprobs"]})
                for t in logprobs["content"]]
    return list(zip(logprobs["tokens"], logprobs["top_logprobs"]))


def turn_of(body, streamed):
    chunks = events(body) if streamed else [json.loads(body)]
    text, parts, finish, usage, kept = "", None, None, None, None
    if streamed:
        if chunks.pop() is not True:
            raise ValueError("the stream has no end mark")
    for chunk in chunks:
        if "error" in chunk:
            raise ValueError(chunk["error"]["message"])
        usage, kept = chunk.get("usage", usage), chunk.get("morphkv", kept)
        for choice in chunk["choices"]:
            said = choice.get("delta") or choice.get("message") or choice
            text += said.get("content") or said.get("text") or ""
            found = parts_of(choice)
            parts = parts if found is None else (parts or []) + found
            finish = choice["finish_reason"] or finish
    tokens, top = (None, None) if parts is None else ([t for t, _ in parts], [a for _, a in parts])
    return Turn(text, tokens, top, finish, usage, kept)


def near_tie(expected, k, chosen):
    likeliest = max(expected.top[k].values())
    return likeliest - expected.top[k].get(chosen, -1e9) <= NEAR_TIE


def compare(expected, turn):
    """'exact', 'near' or a text that says what is wrong."""
    if turn.tokens is not None:
        pairs = zip(expected.tokens, turn.tokens)
        k = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if k is not None:
            if near_tie(expected, k, turn.tokens[k]):
                return "near"
            gap = max(expected.top[k].values()) - expected.top[k].get(turn.tokens[k], -99)
            return (f"token {k} is {turn.tokens[k]!r}, not {expected.tokens[k]!r}; "
                    f"it is {gap:.3f} below the likeliest")
        if len(expected.tokens) != len(turn.tokens):
            return f"{len(turn.tokens)} tokens, not {len(expected.tokens)}"
    if (turn.text, turn.finish) == (expected.text, expected.finish):
        return "exact"
    said = ""
    for k, token in enumerate(expected.tokens):  # by the text alone
        rest = turn.text[len(said):]
        if any(rest.startswith(other) and near_tie(expected, k, other)
               for other in expected.top[k] if other != token):
            return "near"
        said += token
        if not turn.text.startswith(said):
            break
    return f"text {turn.text!r}, not {expected.text!r}"


WHO = "The baker,A sailor,My aunt,The mayor,An old clerk,The nurse,A tired farmer".split(",")
DID = "carried,sold,painted,forgot,repaired,counted,borrowed,hid".split(",")
WHAT = "a copper lamp,three letters,the heavy gate,some apples,a torn map,an iron key".split(",")
WHERE = "near the harbour,behind the mill,in the tower,on the train,under the stairs".split(",")


def prose(seed, sentences):
    """Sentences that differ: repeated ones would tie when rows are chosen."""
    rng = random.Random(seed)
    return "".join(f"{rng.choice(WHO)} {rng.choice(DID)} {rng.choice(WHAT)} {rng.choice(WHERE)} "
                   f"and paid {rng.randrange(2, 900)} coins. " for _ in range(sentences))


def cases():
    """Chats of two turns and completions, short and far beyond the budget. Each begins alone."""
    for i, topic in enumerate(TOPICS):
        size = (0, 0, 4, 12, 26)[i % 5]
        story = f"This is a story of {topic}. " + prose(i, size)
        question = f"{story}Tell me about {topic} in a few words."
        if i % 3 == 2:
            yield Case(f"completion {topic}", COMPLETION,
                       {"prompt": f"{topic.capitalize()} are old. {story}And so the {topic}"}
                       | ({"budget": 96} if i % 2 else {"stop": [","]}))
        else:
            extra = {"pin_system": True} if i % 4 == 1 else {}
            messages = [{"role": "system", "content": f"You know all about {topic}."},
                        {"role": "user", "content": question}]
            yield Case(f"chat {topic}", CHAT, {"messages": messages} | extra)


class Oracle:
    def __init__(self, server):
        self.server = server

    def ask(self, case):
        reply = self.server.post(case.path, case.body | case.top | {"slot": 0})
        if reply.status != 200:
            raise RuntimeError(f"the oracle refused '{case.name}': {reply.body.decode()}")
        turn = turn_of(reply.body, False)
        case.expected[turn.kept["reused_tokens"]] = turn
        return turn

    def fill(self, wanted):
        """The cases, and a second turn for every other chat."""
        conversations = []
        for case in wanted:
            self.server.post("/slots/0?action=erase", {})
            turn = self.ask(case)
            conversation = [case]
            if case.path == CHAT and len(conversations) % 2 == 0:
                messages = [*case.body["messages"], {"role": "assistant", "content": turn.text},
                            {"role": "user", "content": "And what else is there to say?"}]
                more = Case(f"{case.name}, second turn", CHAT, case.body | {"messages": messages})
                self.ask(more)  # goes on from the first turn
                self.server.post("/slots/0?action=erase", {})
                self.ask(more)  # from nothing
                conversation.append(more)
            conversations.append(conversation)
        return conversations


class Soak:
    def __init__(self, server, conversations, slot_dir, options):
        self.server, self.conversations = server, conversations
        self.slot_dir, self.options = slot_dir, options
        self.counts = collections.Counter()
        self.violations = []
        self.examples = []
        self.lock = threading.Lock()
        self.stop_at = 0.0
        self.seeds = random.Random(options.seed)

    def count(self, name):
        with self.lock:
            self.counts[name] += 1

    def violate(self, what):
        with self.lock:
            self.counts["violations"] += 1
            if len(self.violations) < 50:
                self.violations.append(what)
                print(f"soak: VIOLATION: {what}", file=sys.stderr, flush=True)

    # --- clients ------------------------------------------------------------------------------
    def checked(self, rng, case, patience=300):
        """One request whose answer is compared with the oracle's."""
        streamed = rng.random() < 0.5
        body = dict(case.body)
        if rng.random() < 0.7:
            body |= case.top
        if streamed:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        reply = self.server.post(case.path, body, patience=patience)
        if reply.status == 429:
            self.count("refused")
            if not 1 <= int(reply.headers.get("Retry-After", 0)) <= 60:
                self.violate("429 without a useful Retry-After")
            return None
        if reply.status != 200:
            self.violate(f"{case.name}: status {reply.status}: {reply.body[:300]!r}")
            return None
        self.count("answers")
        try:
            turn = turn_of(reply.body, streamed)
        except ValueError as error:
            self.violate(f"{case.name}: {error}")
            return None
        self.judge(case, turn)
        return turn

    def judge(self, case, turn):
        reused = turn.kept["reused_tokens"]
        expected = case.expected.get(reused)
        if expected is None:
            self.violate(f"{case.name}: reused {reused} tokens, the oracle {list(case.expected)}")
            return
        if reused:
            self.count("reused")
        verdict = compare(expected, turn)
        if verdict in ("exact", "near"):
            self.count(verdict)
        else:
            self.count("wrong")
            self.violate(f"wrong answer to {case.name} (reused {reused}, slot "
                         f"{turn.kept['slot']}): {verdict}")
        kept, usage = turn.kept, turn.usage
        if kept["rows_kept"] + kept["rows_evicted"] != kept["tokens_seen"] or (
                kept["rows_kept"] > kept["budget"]):
            self.violate(f"{case.name}: rows do not add up: {kept}")
        if usage["prompt_tokens"] != expected.usage["prompt_tokens"] or (
                verdict == "exact" and usage != expected.usage):
            self.violate(f"{case.name}: usage {usage}, not {expected.usage}")

    def converse(self, rng):
        for case in rng.choice(self.conversations):
            if self.checked(rng, case) is None:
                time.sleep(rng.random())

    def leave(self, rng):
        """Goes away while it waits, while its prompt is read or while it is answered."""
        word = f"Guest {rng.randrange(10**9)} left. "  # begins like nothing else
        body = {"prompt": word + FILLER * rng.choice((0, 3, 20, 90)), "max_tokens": 200,
                "ignore_eos": True, "stream": rng.random() < 0.5}
        with self.server.raw() as client:
            client.send_json(COMPLETION, body)
            time.sleep(rng.choice((0.0, 0.05, 0.3, 1.0, 2.0)) * rng.random())
            client.leave(reset=rng.random() < 0.5)
        self.count("left")

    def late(self, rng):
        body = {"prompt": f"Late {rng.randrange(10**9)}. " + FILLER * 20, "max_tokens": 100,
                "ignore_eos": True, "timeout": 0.02 + 0.5 * rng.random()}
        reply = self.server.post(COMPLETION, body)
        good = reply.status in (429, 504) or (
            reply.status == 200 and reply.json["morphkv"]["finish_detail"] in ("timeout", "length"))
        if not good:
            self.violate(f"late request: {reply.status} {reply.body[:200]!r}")
        self.count("late")

    BAD_BODIES = (b"", b"{", b"[]", b"\xff\xfe", b'{"prompt": 5}', b'{"prompt": "a", "n": 2}',
                  b'{"prompt": "a", "temperature": NaN}', b'{"prompt": "a", "max_tokens": 1e99}',
                  b'{"prompt": "a", "budget": 100000}', b'{"prompt": [9999999]}',
                  b'{"prompt": "\\ud800"}', b"[" * 100000, b'{"prompt": "a\\u0000b"}',
                  b'{"prompt": "caf\xe9"}', b'{"prompt": "a", "seed": "x"}')

    def malformed(self, rng):
        reply = self.server.post(rng.choice((CHAT, COMPLETION)), rng.choice(self.BAD_BODIES))
        if reply.status != 400 or not reply.error["message"]:
            self.violate(f"malformed body: {reply.status} {reply.body[:200]!r}")
        self.count("malformed")

    BAD_STREAMS = (b"\x00\x01\x02\r\n\r\n", b"GET\r\n\r\n",
                   b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
                   b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
                   b"POST /v1/completions HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n",
                   b"POST /v1/completions HTTP/1.1\r\n\r\n",
                   b"GET /%s HTTP/1.1\r\n\r\n" % (b"a" * 20000),
                   b"GET / HTTP/1.1\r\nX: %s\r\n\r\n" % (b"a" * 20000))

    def malformed_bytes(self, rng):
        with self.server.raw(60) as client:
            try:
                client.send(rng.choice(self.BAD_STREAMS))
                if client.has_data(0.5):
                    status = client.status()
                    if status is not None and not 400 <= status < 500:
                        self.violate(f"malformed bytes: status {status}")
            except ConnectionError:
                pass
        self.count("malformed bytes")

    def bad_restore(self, rng):
        names = ("../bad", "/etc/passwd", ".hidden", "absent", "bad-empty", "bad-junk", "bad-long")
        slot = rng.randrange(self.options.slots + 1)
        reply = self.server.post(f"/slots/{slot}?action=restore", {"filename": rng.choice(names)})
        if reply.status not in (400, 404, 409):
            self.violate(f"bad restore: {reply.status} {reply.body[:200]!r}")
        self.count("bad restores")

    def look(self, rng):
        path = rng.choice(("/metrics", "/slots", "/health", "/v1/models", "/",
                           f"/slots/{rng.randrange(self.options.slots)}/picture"))
        if self.server.get(path).status != 200:
            self.violate(f"{path} failed")
        self.count("looks")

    def burst(self, rng):
        """More at once than run and wait."""
        short = [c[0] for c in self.conversations if len(json.dumps(c[0].body)) < 600]
        seeds = [rng.random() for _ in range(self.options.slots + self.options.max_queue)]
        threads = [threading.Thread(target=self.guarded, args=(
            lambda r: self.checked(r, r.choice(short)), random.Random(s))) for s in seeds]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.count("bursts")

    ACTIONS = ((converse, 50), (leave, 16), (late, 5), (malformed, 8), (malformed_bytes, 5),
               (bad_restore, 6), (look, 8), (burst, 2))

    def guarded(self, action, rng):
        try:
            action(rng)
        except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
            self.violate(f"{getattr(action, '__name__', 'request')}: {error!r}")

    def client(self, seed):
        rng = random.Random(seed)
        actions = [a for a, _ in self.ACTIONS]
        if not self.options.restore:
            actions = [a for a in actions if a is not Soak.bad_restore]
        weights = [w for a, w in self.ACTIONS if a in actions]
        while time.monotonic() < self.stop_at and self.server.process.poll() is None:
            action = rng.choices(actions, weights)[0]
            self.guarded(action.__get__(self), rng)
            time.sleep(rng.choice((0, 0, 0, 3)) * rng.random())  # so that slots are idle at times

    # --- phases -------------------------------------------------------------------------------
    def run(self, seconds, label):
        self.stop_at = time.monotonic() + seconds
        threads = [threading.Thread(target=self.client, args=(self.seeds.random(),))
                   for _ in range(self.options.clients)]
        for thread in threads:
            thread.start()
        begin = last = time.monotonic()
        while any(t.is_alive() for t in threads):
            time.sleep(0.2)
            if time.monotonic() - last < 10:
                continue
            last = time.monotonic()
            with self.lock:
                said = ", ".join(f"{v} {k}" for k, v in sorted(self.counts.items()))
            rss = self.server.memory("VmRSS") if self.server.process.poll() is None else 0
            print(f"soak: {label} {last - begin:.0f} s, {rss // 1024} MiB: {said}", file=sys.stderr,
                  flush=True)
        if self.server.process.poll() is not None:
            self.violate(f"the server ended with {self.server.process.returncode}")
            raise SystemExit(1)

    def touch_every_thread(self):
        """Each thread of the server keeps what it once took from the heap: that is no leak."""
        names = ("bad-empty", "bad-junk", "bad-long") if self.options.restore else ()
        for name in names:
            for _ in range(100):
                self.server.post("/slots/0?action=restore", {"filename": name})

    def quiet(self):
        """All slots idle; then what the process holds, once its spare threads are gone."""
        if self.server.wait_idle(2) is None:
            self.violate(f"slots are stuck: {self.server.slots()}")
        time.sleep(10)  # connections kept alive end after 5 s, spare threads after 3 s more
        return {"rss_kb": self.server.memory("VmRSS"), "files": self.server.open_files(),
                "threads": self.server.memory("Threads")}

    def check_end(self, first, before, after):
        if after["rss_kb"] > before["rss_kb"] * MEMORY_LIMIT:
            self.violate(f"memory grew from {before['rss_kb']} to {after['rss_kb']} kB")
        if after["files"] > first["files"]:
            self.violate(f"open files grew from {first['files']} to {after['files']}")
        if after["threads"] > max(before["threads"], first["threads"]):
            self.violate(f"threads grew from {before['threads']} to {after['threads']}")
        m, c = self.server.metrics(), self.counts
        ended = m["requests_finished_total"] + m["requests_failed_total"]
        cancelled = m["requests_cancelled_total"]
        good = (m["requests_failed_total"] == 0 and ended >= c["answers"] and
                ended <= m["requests_begun_total"] <= ended + cancelled and
                m["requests_refused_total"] >= c["refused"] and
                m["slots_busy"] == m["requests_waiting"] == 0)
        if not good:
            self.violate(f"the metrics do not add up: {m}, {dict(c)}")
        if c["answers"] == 0:
            self.violate("nothing was answered")
        if self.server.get("/health").status != 200:
            self.violate("the server does not answer at the end")
        if self.server.terminate(60) != 0:
            self.violate(f"SIGTERM: exit code {self.server.process.returncode}")
        return m


def make_bad_files(folder):
    for name, content in (("bad-empty", b""), ("bad-junk", os.urandom(5000)),
                          ("bad-long", b"MORPHKV" * 100000)):
        with open(os.path.join(folder, name), "wb") as file:
            file.write(content)


def soak(options):
    common = ["--budget", str(options.budget)]
    if options.batch_size:
        common += ["-b", str(options.batch_size)]
    print("soak: the oracle answers first", file=sys.stderr, flush=True)
    oracle = Server(options.tool, options.model, *common, "--slots", "2", threads=options.threads)
    try:
        begin = time.monotonic()
        conversations = Oracle(oracle).fill(cases())
        print(f"soak: {len(conversations)} conversations, {time.monotonic() - begin:.0f} s",
              file=sys.stderr, flush=True)
    finally:
        oracle.close()
    with tempfile.TemporaryDirectory(prefix="morphkv-soak-") as slot_dir:
        make_bad_files(slot_dir)
        server = Server(options.tool, options.model, *common, "--slots", str(options.slots),
                        "--max-queue", str(options.max_queue), "--slot-dir", slot_dir,
                        threads=options.threads)
        try:
            run = Soak(server, conversations, slot_dir, options)
            seconds = options.minutes * 60
            first = {"files": server.open_files(), "threads": server.memory("Threads")}
            run.run(max(20, 0.2 * seconds if seconds < 600 else 120), "warm-up")
            run.touch_every_thread()
            before = run.quiet()
            run.run(seconds, "soak")
            after = run.quiet()
            metrics = run.check_end(first, before, after)
        except BaseException:
            print(server.errors()[-4000:], file=sys.stderr)
            raise
        finally:
            server.close()
    return {"minutes": options.minutes, "slots": options.slots, "budget": options.budget,
            "counts": dict(run.counts), "at_start": first, "after_warm_up": before,
            "at_end": after, "metrics": metrics, "violations": run.violations}


def memory(options):
    """Peak memory after 10 requests and after 200, as many at once as there are slots."""
    server = Server(options.tool, options.model, "--budget", str(options.budget), "--slots",
                    str(options.slots), threads=options.threads)
    done = [0]
    lock = threading.Lock()
    failed = []

    def ask(upto, seed):
        rng = random.Random(seed)
        while True:
            with lock:
                if done[0] >= upto:
                    return
                done[0] += 1
                n = done[0]
            size = 30 if n <= 10 else rng.choice((2, 5, 15, 30))
            reply = server.post(CHAT, {"messages": [
                {"role": "user", "content": f"Request {n}. " + FILLER * size}],
                "max_tokens": 8, "stream": rng.random() < 0.5})
            if reply.status != 200:
                failed.append(f"request {n}: {reply.status} {reply.body[:200]!r}")

    def upto(count):
        threads = [threading.Thread(target=ask, args=(count, i)) for i in range(options.slots)]
        for thread in threads:
            thread.start()
        while any(t.is_alive() for t in threads):
            for thread in threads:
                thread.join(10 / len(threads))
            print(f"memory: {done[0]} requests, peak {server.memory('VmHWM')} kB",
                  file=sys.stderr, flush=True)
        return server.memory("VmHWM")

    try:
        early, late = upto(10), upto(options.requests)
    finally:
        server.close()
    if late > early * MEMORY_LIMIT:
        failed.append(f"peak memory grew from {early} to {late} kB")
    return {"slots": options.slots, "budget": options.budget, "requests": options.requests,
            "peak_kb_after_10": early, "peak_kb": late, "ratio": round(late / early, 4),
            "violations": failed}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tool", required=True, help="the binary")
    parser.add_argument("-m", "--model", required=True, help="a GGUF file")
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--slots", type=int, help="4; with --memory 8")
    parser.add_argument("--budget", type=int, default=256)
    parser.add_argument("--max-queue", type=int, default=8)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1, help="of the engine")
    parser.add_argument("--batch-size", type=int, help="of the engine, its own if not given")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-restore", dest="restore", action="store_false",
                        help="leave the clients out that restore bad files")
    parser.add_argument("--memory", action="store_true", help="measure the peak memory instead")
    parser.add_argument("--requests", type=int, default=200, help="with --memory")
    options = parser.parse_args()
    options.slots = options.slots or (8 if options.memory else 4)
    result = memory(options) if options.memory else soak(options)
    print(json.dumps(result, indent=1))
    return 1 if result["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
