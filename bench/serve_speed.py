"""`morphkv serve` against llama.cpp's own server with full caches, built from the same source, on
the same machine in the same run: tokens per second of many sessions at once, the time to the first
token of a short request while a long prompt of another is read, and peak memory.

A session is one prompt and its answer at temperature 0, each prompt another text. Every answer is
checked: exactly the tokens that were asked for, none reused, and as many by the server's own count.

Run by `make bench`, or: bench/serve_speed.py --tool build/release/morphkv
    --llama-server "$(scripts/setup llama-server)" -m MODEL -f TEXT
"""

import argparse
import contextlib
import dataclasses
import functools
import http.client
import json
import os
import pathlib
import random
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator

import report

MORPHKV, LLAMA = "morphkv serve", "llama-server, full caches"
SHORT = 20  # tokens of the short request
SHORT_ANSWER = 8
PAUSE_S = (0.1, 0.6)  # between two short requests, so that they come at any point of a step
CONTEXT_STEP = 256  # llama.cpp rounds a context up to this


def fail(what: str) -> None:
    sys.exit(f"serve_speed: error: {what}")


def progress(what: str) -> None:
    print(f"serve_speed: {what}", file=sys.stderr, flush=True)


@dataclasses.dataclass
class Answer:
    text: str
    usage: dict
    sent: float  # seconds of the monotonic clock, as the others
    arrivals: list[float]  # of the events that brought text
    cpu_s: float  # of the server, when the first came

    def first_token_s(self) -> float:
        return self.arrivals[0] - self.sent


class Server:
    """A server in a process of its own; both speak OpenAI's completions."""

    def __init__(self, name: str, command: list[str], port: int) -> None:
        self.name, self.command, self.port = name, command, port
        self.log = tempfile.TemporaryFile()
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log)

    def wait_until_ready(self, seconds: float = 120) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.process.poll() is None:
            with contextlib.suppress(OSError, http.client.HTTPException):
                if self.request("GET", "/health")[0] == 200:
                    return
            time.sleep(0.1)
        self.log.seek(0)
        fail(f"{self.name} does not start: {self.log.read()[-2000:].decode(errors='replace')}")

    def request(self, method: str, path: str, body: dict | None = None) -> tuple[int, dict]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        connection.request(method, path, json.dumps(body) if body else None,
                           {"Content-Type": "application/json"})
        with contextlib.closing(connection), connection.getresponse() as reply:
            return reply.status, json.loads(reply.read() or "{}")

    def tokens(self, text: str) -> list[int]:
        return self.request("POST", "/tokenize", {"content": text})[1]["tokens"]

    def complete(self, prompt: list[int], tokens: int) -> Answer:
        """Streamed, so that it can be seen when each token comes."""
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
                "stream": True, "stream_options": {"include_usage": True}, "cache_prompt": False}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        lines, cpu = [], 0.0
        sent = time.monotonic()
        connection.request("POST", "/v1/completions", json.dumps(body),
                           {"Content-Type": "application/json"})
        with contextlib.closing(connection), connection.getresponse() as reply:
            if reply.status != 200:
                fail(f"{self.name} answers {reply.status}: {reply.read()[:500]}")
            for line in reply:  # looked at later: the servers want the cores now
                if line.startswith(b"data: {"):
                    lines.append((time.monotonic(), line))
                    cpu = cpu or self.cpu_seconds()
        text, usage, arrivals = "", {}, []
        for arrival, line in lines:
            event = json.loads(line[6:])
            usage = event.get("usage") or usage
            if piece := "".join(c.get("text") or "" for c in event.get("choices", [])):
                text += piece
                arrivals.append(arrival)
        self.check(usage, len(prompt), tokens, len(arrivals))
        return Answer(text, usage, sent, arrivals, cpu)

    def check(self, usage: dict, prompt: int, answer: int, events: int) -> None:
        got = (usage.get("prompt_tokens"), usage.get("completion_tokens"))
        cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
        if got != (prompt, answer) or cached or not 0 < events <= answer:
            fail(f"{self.name}: {prompt} and {answer} tokens were asked for, and it says {usage}, "
                 f"in {events} events")

    def peak_rss_bytes(self) -> int:
        status = pathlib.Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024

    def cpu_seconds(self) -> float:
        fields = pathlib.Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1]
        return sum(map(int, fields.split()[11:13])) / os.sysconf("SC_CLK_TCK")

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def command_of(arm: str, options: argparse.Namespace, slots: int, context: int) -> list[str]:
    """Without port: each server at its own defaults but for what the measurement is about."""
    if arm == MORPHKV:
        command = [options.tool, "serve", "--slots", slots, "--budget", options.budget,
                   *options.serve_options.split()]
    else:
        command = [options.llama_server, "--parallel", slots, "-c", slots * context, "-fa", "on",
                   "--cont-batching", "--no-kv-unified", "--cache-ram", 0, "--no-cache-prompt",
                   "--fit", "off", *options.llama_options.split()]
    return [str(word) for word in [*command, "-m", options.model, "-t", options.threads]]


@contextlib.contextmanager
def running(arm: str, options: argparse.Namespace, slots: int, tokens: int) -> Iterator[Server]:
    context = -(-(tokens + 1) // CONTEXT_STEP) * CONTEXT_STEP
    port = free_port()
    command = command_of(arm, options, slots, context)
    server = Server(arm, [*command, "--host", "127.0.0.1", "--port", str(port)], port)
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.stop()


def prompt_of(server: Server, text: str, tokens: int, seed: int) -> list[int]:
    """The text's sentences in an order of the seed's own, as often as it takes."""
    sentences = re.split(r"(?<=[.!?])\s+", text)
    generator, words = random.Random(seed), ""
    while len(words) < 8 * tokens:  # a token has fewer letters
        generator.shuffle(sentences)
        words += " ".join(sentences) + " "
    prompt = server.tokens(words)[:tokens]
    if len(prompt) != tokens:
        fail(f"the text has only {len(prompt)} tokens")
    return prompt


def check_sense(server: Server) -> None:
    answer = server.complete(server.tokens("The capital of France is"), SHORT_ANSWER)
    if "Paris" not in answer.text:
        fail(f"{server.name}: the capital of France is{answer.text}")


def at_once(calls: list) -> list:
    """What the calls return, each in a thread of its own."""
    results: list = [None] * len(calls)

    def call(i: int) -> None:
        results[i] = calls[i]()

    threads = [threading.Thread(target=call, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if None in results:
        fail("a session got no answer")
    return results


def decode_per_second(answers: list[Answer], tokens: int) -> float:
    """Tokens per second of all sessions while all of them generate."""
    begin = max(a.arrivals[0] for a in answers)
    end = min(a.arrivals[-1] for a in answers)
    if end <= begin:
        return 0.0  # they never did all at once
    # An event brings a token, but for one that ends within a character.
    done = sum(sum(begin < t <= end for t in a.arrivals) * tokens / len(a.arrivals)
               for a in answers)
    return done / (end - begin)


@dataclasses.dataclass
class Shape:
    """Of a session."""

    prompt: int  # tokens
    answer: int

    @classmethod
    def parse(cls, text: str) -> "Shape":
        if not (found := re.fullmatch(r"([1-9]\d*)\+([1-9]\d*)", text)):
            raise argparse.ArgumentTypeError(f"'{text}' is not like 2700+300")
        return cls(*map(int, found.groups()))


def sessions(arm: str, options: argparse.Namespace, shape: Shape, seed: int) -> dict:
    tokens = shape.prompt + shape.answer
    progress(f"{arm}: {options.sessions} sessions of {shape.prompt} + {shape.answer} tokens")
    with running(arm, options, options.sessions, tokens) as server:
        check_sense(server)
        prompts = [prompt_of(server, options.text, shape.prompt, 1000 * seed + i)
                   for i in range(options.sessions)]
        cpu, start = server.cpu_seconds(), time.monotonic()
        answers = at_once([lambda p=p: server.complete(p, shape.answer) for p in prompts])
        wall = time.monotonic() - start
        figures = {
            "wall_s": wall,
            "read_s": max(a.arrivals[0] for a in answers) - start,
            "generated_per_second": options.sessions * shape.answer / wall,
            "tokens_per_second": options.sessions * tokens / wall,
            "decode_per_second": decode_per_second(answers, shape.answer),
            # Of the server's own threads: what other work on the machine disturbs less.
            "cpu_s": server.cpu_seconds() - cpu,
            "read_cpu_s": max(a.cpu_s for a in answers) - cpu,
            "peak_rss_bytes": server.peak_rss_bytes(),
        }
    progress(f"{arm}: {wall:.1f} s, {figures['tokens_per_second']:.0f} tokens per second, "
             f"{figures['decode_per_second']:.0f} while all generate")
    return figures


def first_tokens(arm: str, options: argparse.Namespace, seed: int) -> dict:
    """Milliseconds to the first token of short requests, alone and beside a long prompt."""
    progress(f"{arm}: first token, idle and while {options.long} tokens are read")
    generator = random.Random(seed)
    idle, answers, long = [], [], []
    with running(arm, options, 2, options.long + 1) as server:
        check_sense(server)
        prompts = iter([prompt_of(server, options.text, SHORT, 1000 * seed + i)
                        for i in range(2 * options.shorts)])
        for _ in range(options.shorts):
            time.sleep(generator.uniform(*PAUSE_S) / 4)
            idle.append(1000 * server.complete(next(prompts), SHORT_ANSWER).first_token_s())
        prompt = prompt_of(server, options.text, options.long, 1000 * seed - 1)
        reader = threading.Thread(target=lambda: long.append(server.complete(prompt, 1)))
        reader.start()
        time.sleep(PAUSE_S[1])
        for short in prompts:
            if long:
                break
            answers.append(server.complete(short, SHORT_ANSWER))
            time.sleep(generator.uniform(*PAUSE_S))
        reader.join()
        if not long:
            fail(f"{arm}: the long prompt got no answer")
        busy = [1000 * a.first_token_s() for a in answers if a.sent < long[0].arrivals[0]]
    if not busy:
        fail(f"{arm}: the long prompt was read before a short request came")
    figures = {"idle_ms": idle, "busy_ms": busy, "long_s": long[0].first_token_s()}
    progress(f"{arm}: idle {statistics.median(idle):.0f} ms, beside the long prompt "
             f"{statistics.median(busy):.0f} ms ({len(busy)} requests, worst {max(busy):.0f} ms)")
    return figures


def times_of(ms: list[float]) -> dict:
    return {"requests": len(ms), **report.spread(ms), "worst_ms": max(ms)}


def runs_of(arm: str, runs: list[dict]) -> dict:
    figures = {"arm": arm, "rounds": runs}
    figures |= {key: statistics.median(r[key] for r in runs) for key in runs[0]}
    figures["peak_rss_bytes"] = max(r["peak_rss_bytes"] for r in runs)
    return figures


def firsts_of(arm: str, firsts: list[dict]) -> dict:
    idle, busy = (times_of([ms for f in firsts for ms in f[key]])
                  for key in ("idle_ms", "busy_ms"))
    return {"arm": arm, "idle": idle, "beside_long": busy,
            "ratio": busy["median_ms"] / idle["median_ms"],
            "worst_ratio": busy["worst_ms"] / idle["median_ms"],
            "long_s": statistics.median(f["long_s"] for f in firsts)}


def ratio(arms: list[dict], key: str) -> float | None:
    values = {a["arm"]: a.get(key) for a in arms}
    if not values.get(LLAMA) or not values.get(MORPHKV):
        return None
    return values[MORPHKV] / values[LLAMA]


def print_tables(figures: dict) -> None:
    for shape in figures["shapes"]:
        print(f"\n{figures['sessions']} sessions of {shape['prompt_tokens']} + "
              f"{shape['answer_tokens']} tokens: "
              + ", ".join(f"{n} {v:.2f}x" for n, v in shape["ratios"].items() if v))
        print("| server | all answers, s | tokens per second | generated per second "
              "| while all generate | CPU (to the last first token), s | peak memory |")
        print("|---|---|---|---|---|---|---|")
        for a in shape["arms"]:
            print(f"| {a['arm']} | {a['wall_s']:.1f} | {a['tokens_per_second']:.0f} "
                  f"| {a['generated_per_second']:.1f} | {a['decode_per_second']:.1f} "
                  f"| {a['cpu_s']:.0f} ({a['read_cpu_s']:.0f}) "
                  f"| {a['peak_rss_bytes'] / 2**20:.0f} MiB |")
    print("\n| server | first token, idle, ms | beside the long prompt, ms | worst | ratio |")
    print("|---|---|---|---|---|")
    for f in figures["first_token"]:
        idle, busy = f["idle"], f["beside_long"]
        print(f"| {f['arm']} | {idle['median_ms']:.0f} | {busy['median_ms']:.0f} "
              f"| {busy['worst_ms']:.0f} | {f['ratio']:.2f} (worst {f['worst_ratio']:.2f}) |")
    print(f"\nCPU: {figures['cpu']}, {figures['threads']} threads")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--tool", required=True, help="the binary morphkv")
    parser.add_argument("--llama-server", help="llama.cpp's server; without it only morphkv's")
    parser.add_argument("-m", "--model", required=True, help="GGUF model")
    parser.add_argument("-f", "--file", required=True, type=pathlib.Path,
                        help="text that the prompts are made of")
    parser.add_argument("-t", "--threads", type=int, default=os.cpu_count(), help="[%(default)s]")
    parser.add_argument("--sessions", type=int, default=8, help="at once [%(default)s]")
    parser.add_argument("--budget", type=int, default=256, help="of each slot [%(default)s]")
    parser.add_argument("--shapes", nargs="+", type=Shape.parse, metavar="PROMPT+ANSWER",
                        default=[Shape(2700, 300), Shape(1500, 1500), Shape(300, 2700)],
                        help="tokens of a session [2700+300 1500+1500 300+2700]")
    parser.add_argument("--long", type=int, default=6000,
                        help="tokens of the long prompt [%(default)s]")
    parser.add_argument("--shorts", type=int, default=15,
                        help="short requests, idle and beside the long one [%(default)s]")
    parser.add_argument("--rounds", type=int, default=1, help="[%(default)s]")
    parser.add_argument("--serve-options", default="", help="more options of morphkv serve")
    parser.add_argument("--llama-options", default="", help="more options of llama-server")
    parser.add_argument("--parts", nargs="+", choices=["sessions", "first"],
                        default=["sessions", "first"], help="what to measure [%(default)s]")
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args()
    options.text = options.file.read_text()
    return options


def main() -> None:
    options = parse()
    names = [MORPHKV, *([LLAMA] if options.llama_server else [])]
    def in_turns(measure) -> dict[str, list]:
        """Of each server, the order turned round from one round to the next."""
        results: dict[str, list] = {name: [] for name in names}
        for i in range(options.rounds):
            for arm in names if i % 2 == 0 else names[::-1]:
                results[arm].append(measure(arm, options, seed=1 + i))
        return results

    shapes, first = [], []
    for shape in options.shapes if "sessions" in options.parts else []:
        runs = in_turns(functools.partial(sessions, shape=shape))
        arms = [runs_of(name, runs[name]) for name in names]
        shapes.append({"prompt_tokens": shape.prompt, "answer_tokens": shape.answer,
                       "ratios": {"aggregate": ratio(arms, "tokens_per_second"),
                                  "while all generate": ratio(arms, "decode_per_second"),
                                  "peak memory": ratio(arms, "peak_rss_bytes")},
                       "arms": arms})
    if "first" in options.parts:
        firsts = in_turns(first_tokens)
        first = [firsts_of(name, firsts[name]) for name in names]
    version = subprocess.run([options.tool, "--version"], check=True, capture_output=True,
                             text=True).stdout.split()
    figures = {
        **report.head("serve_speed"),
        "morphkv_version": version[1] if len(version) > 1 else version[0],
        "threads": options.threads, "model": pathlib.Path(options.model).name,
        "sessions": options.sessions, "budget": options.budget,
        "short_tokens": SHORT, "long_tokens": options.long, "rounds": options.rounds,
        "serve_options": options.serve_options, "llama_options": options.llama_options,
        "shapes": shapes, "first_token": first,
    }
    print_tables(figures)
    report.write(figures, options.json)


if __name__ == "__main__":
    main()
