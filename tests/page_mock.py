"""A stand-in for `morphkv serve` that the page's test can do without a model: scripted answers,
two slots that evict by a fixed rule, and the page's files as they are in the source tree.

Run by itself it serves until it is stopped: python3 tests/page_mock.py [PORT]
"""

import http.server
import json
import random
import re
import socket
import sys
import threading
import time
from pathlib import Path

PAGE = Path(__file__).resolve().parent.parent / "apps" / "server" / "page"
FILES = {"/": ("index.html", "text/html; charset=utf-8"),
         "/page.css": ("page.css", "text/css; charset=utf-8"),
         "/page.js": ("page.js", "text/javascript; charset=utf-8"),
         "/page.svg": ("page.svg", "image/svg+xml")}
POLICY = re.search(r'kPagePolicy =\s*((?:"[^"]*"\s*)+);', (PAGE.parent / "page.h").read_text())
POLICY = "".join(re.findall(r'"([^"]*)"', POLICY[1]))

LAYERS, HEADS = 30, 3
ROW_BYTES = LAYERS * HEADS * 2 * 64 * 2
SINKS, WINDOW, DEFAULT_BUDGET = 4, 8, 256

ANSWER = """The harbour of Lower Quay faces south-west, and in October the wind comes straight in \
from the sea. Twelve boats lie there in winter; the thirteenth berth is kept free for the pilot, \
who has not missed a tide since 1987.

The code of the blue locker is 4471. Mrs Adeyemi keeps it in her head and nowhere else, because \
the paper on which it once stood went into the water together with the old harbour book. Whoever \
needs the locker asks her, and she asks what for.

Behind the ice house stands a crane that nobody oils. It was bought for stone and has lifted \
mostly engines, once a horse, and on one Sunday morning the bell of the chapel, which rang the \
whole way down. The children say that it still rings when a ship is late. The engineers say that \
it is the wind in the lattice, and both are right on most nights.

At half past four the ferry leaves for the islands with letters, bread and a small number of \
people who know each other too well to talk. It returns after dark. The lamp at the end of the \
mole is lit by hand, for the switch was never agreed on, and so there is always somebody who \
knows exactly when the last boat came in."""


def split(text):
    return re.findall(r"</?\w+>|\n+| ?[A-Za-z]{1,7}|\d| ?[^\sA-Za-z\d]|\s", text)


def wants_of(token, position, head):
    """How much a head wants to keep a row: partly what all heads think of it, partly its own."""
    common = random.Random(f"{token} {position // 3}").random() ** 2
    own = random.Random(f"{token} {position} {head}").random()
    content = 0.35 * (token.strip().isdigit() or token.strip()[:1].isupper())
    return 1.2 * common + own + content


class Slot:
    def __init__(self, number):
        self.number, self.lock = number, threading.Lock()
        self.budget, self.busy = DEFAULT_BUDGET, False
        self.speed = 0.0
        self.clear()

    def clear(self):
        self.tokens = []
        self.state, self.reused, self.prompt, self.read, self.generated = "idle", 0, 0, 0, 0
        self.held = [{} for _ in range(LAYERS * HEADS)]  # of each head: position -> wants

    def see(self, token):
        with self.lock:
            position = len(self.tokens)
            self.tokens.append(token)
            for head, held in enumerate(self.held):
                held[position] = wants_of(token, position, head)
                if len(held) > self.budget:
                    free = [p for p in held if SINKS <= p <= position - WINDOW]
                    del held[min(free, key=lambda p: (held[p] - (position - p) / 1500, p))]

    def rows(self):
        return min(len(self.tokens), self.budget)

    def info(self):
        with self.lock:
            seen = len(self.tokens)
            return {"id": self.number, "state": self.state, "budget": self.budget,
                    "tokens_seen": seen, "rows_kept": self.rows(),
                    "rows_evicted": seen - self.rows(), "prompt_tokens": self.prompt,
                    "prompt_read": self.read, "reused_tokens": self.reused,
                    "generated_tokens": self.generated, "tokens_per_second": self.speed,
                    "kv_bytes_kept": self.rows() * ROW_BYTES, "kv_bytes_full": seen * ROW_BYTES,
                    "kv_bytes_allocated": (self.budget + 64) * ROW_BYTES}

    def picture(self, most):
        with self.lock:
            first = max(0, len(self.tokens) - most)
            held = [sorted(p for p in head) for head in self.held]
            return {"slot": self.number, "tokens_seen": len(self.tokens), "first_token": first,
                    "pieces": self.tokens[first:], "layers": list(range(LAYERS)), "heads": HEADS,
                    "held": [held[i:i + HEADS] for i in range(0, len(held), HEADS)]}


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments):
        pass

    def reply(self, status, body, kind="application/json"):
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Security-Policy", POLICY)
        self.end_headers()
        self.wfile.write(body)

    def refuse(self, status, message):
        self.reply(status, {"error": {"message": message, "type": "invalid_request_error"}})

    def parse_request(self):
        if self.server.gone:  # for connections that are still open
            self.close_connection = True
            return False
        return super().parse_request()

    def do_GET(self):
        path, _, query = self.path.partition("?")
        found = re.fullmatch(r"/slots/(\d+)/picture", path)
        if path in FILES:
            name, kind = FILES[path]
            self.reply(200, (PAGE / name).read_bytes(), kind)
        elif path == "/v1/models":
            self.reply(200, {"object": "list", "data": [{"id": "SmolLM2-135M-Instruct"}]})
        elif path == "/slots":
            self.reply(200, [slot.info() for slot in self.server.slots])
        elif found and int(found[1]) < len(self.server.slots):
            most = int(re.search(r"tokens=(\d+)", query)[1])
            self.reply(200, self.server.slots[int(found[1])].picture(most))
        else:
            self.refuse(404, f"{path}: there is nothing")

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append(body)
        if self.path != "/v1/chat/completions":
            return self.refuse(404, f"{self.path}: there is nothing")
        if body.get("temperature", 1) < 0:
            return self.refuse(400, f"temperature: {body['temperature']} is below 0")
        slots = self.server.slots
        with self.server.lock:
            wanted = [slots[body["slot"]]] if "slot" in body else slots
            slot = next((slot for slot in wanted if not slot.busy), None)
            if slot is None:
                return self.refuse(429, "the queue is full: 0 requests wait already")
            slot.busy = True
        try:
            self.answer(slot, body)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
        finally:
            slot.state, slot.busy = "idle", False

    def answer(self, slot, body):
        messages = body["messages"]
        prompt = split("".join(f"<{m['role']}>\n{m['content']}\n" for m in messages))
        prompt += split("<assistant>\n")
        slot.budget = body.get("budget", DEFAULT_BUDGET)
        if prompt[:len(slot.tokens)] != slot.tokens:
            slot.clear()
        slot.reused, slot.prompt, slot.generated = len(slot.tokens), len(prompt), 0
        slot.read, slot.state = slot.reused, "reading"
        for token in prompt[slot.reused:]:
            slot.see(token)
            slot.read += 1

        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        self.event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""},
                                 "finish_reason": None}],
                    "morphkv": {"slot": slot.number, "reused_tokens": slot.reused}})
        asked = messages[-1]["content"]
        words = [f" {n}" for n in range(1, 3000)] if asked.startswith("Count") else split(ANSWER)
        words = words[:body.get("max_tokens", 512)]
        slot.state, begun = "generating", time.monotonic()
        for n, word in enumerate(words, 1):
            self.left()
            slot.see(word)
            slot.generated = n
            slot.speed = n / max(time.monotonic() - begun, 1e-3)
            self.event({"choices": [{"index": 0, "delta": {"content": word},
                                     "finish_reason": None}]})
            if asked.startswith("Break") and n == 20:
                self.event({"error": {"message": "the engine failed: out of luck"}})
                return
            time.sleep(self.server.pace)
        slot.state = "idle"
        info = slot.info()
        names = ("tokens_seen", "rows_kept", "rows_evicted", "reused_tokens", "budget")
        self.event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        self.event({"choices": [],
                    "usage": {"prompt_tokens": len(prompt), "completion_tokens": len(words),
                              "total_tokens": len(prompt) + len(words)},
                    "morphkv": {"slot": slot.number, "profile": "morphkv"} |
                               {name: info[name] for name in names}})
        self.wfile.write(b"data: [DONE]\n\n")

    def event(self, data):
        self.wfile.write(b"data: " + json.dumps(data).encode() + b"\n\n")
        self.wfile.flush()

    def left(self):
        """Throws if the client is gone, which a write would notice only later."""
        self.connection.setblocking(False)
        try:
            if not self.connection.recv(1, socket.MSG_PEEK):
                raise BrokenPipeError
        except BlockingIOError:
            pass
        finally:
            self.connection.setblocking(True)


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, port=0, pace=0.01, slots=2):
        super().__init__(("127.0.0.1", port), Handler)
        self.pace, self.lock = pace, threading.Lock()
        self.slots = [Slot(number) for number in range(slots)]
        self.requests = []  # bodies
        self.gone = False
        self.url = f"http://127.0.0.1:{self.server_port}"

    def close(self):
        self.gone = True
        self.shutdown()
        self.server_close()


if __name__ == "__main__":
    server = Server(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
    print(server.url, flush=True)
    server.serve_forever()
