"""`morphkv serve` as its clients meet it: the official openai client, plain HTTP, and bad sockets.

Needs MORPHKV_TOOL (the binary), MORPHKV_TEST_MODEL (SmolLM2-135M-Instruct) and the package openai
(`scripts/setup python`). The soak is serve_soak.py.
"""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
import unittest

import openai

from serve_support import FILLER, PATIENCE, Server

TOOL = os.environ["MORPHKV_TOOL"]
MODEL = os.environ["MORPHKV_TEST_MODEL"]
NAME = os.path.basename(MODEL).removesuffix(".gguf")
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"

WITHIN = 2.0  # seconds until a slot is idle: one batch, and the machine may be busy
TRAINED = 8192
SYSTEM = {"role": "system", "content": "You answer in a few words."}
FRANCE = [{"role": "user",
           "content": "What is the capital of France? Answer in one sentence."}]
LONG = "The lost key lies under the third stone. " + FILLER * 24  # about 350 tokens


class ServeCase(unittest.TestCase):
    """One server for the class."""
    options = ("--slots", "2", "--budget", "256")

    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.mkdtemp(prefix="morphkv-serve-")
        cls.addClassCleanup(shutil.rmtree, cls.folder)
        cls.server = cls.another(*cls.options)

    @classmethod
    def another(cls, *options):
        server = Server(TOOL, MODEL, *options)
        cls.addClassCleanup(server.close)
        return server

    @classmethod
    def path(cls, name, content=b""):
        path = os.path.join(cls.folder, name)
        with open(path, "wb") as file:
            file.write(content)
        return path

    def client(self, **options):
        options = {"api_key": "unused", "max_retries": 0, "timeout": PATIENCE} | options
        client = openai.OpenAI(base_url=f"{self.server.url}/v1", **options)
        self.addCleanup(client.close)
        return client

    def ask(self, body, server=None):
        """A request at temperature 0 that is answered."""
        path = CHAT if "messages" in body else COMPLETION
        reply = (server or self.server).post(path, {"temperature": 0, "max_tokens": 8} | body)
        self.assertEqual(reply.status, 200, reply.body)
        return reply.json

    def refusal(self, path, body, status=400):
        reply = self.server.post(path, body)
        self.assertEqual(reply.status, status, reply.body)
        self.assertTrue(reply.error["message"])
        return reply.error


def said(answer):
    choice = answer["choices"][0]
    return choice["message"]["content"] if "message" in choice else choice["text"]


class ServeClientTest(ServeCase):
    """The official client, unmodified."""

    def setUp(self):
        self.openai = self.client()

    def chat(self, **options):
        options = {"model": NAME, "messages": FRANCE, "temperature": 0, "max_tokens": 10} | options
        return self.openai.chat.completions.create(**options)

    def complete(self, **options):
        options = {"model": NAME, "prompt": "Once upon a time", "temperature": 0,
                   "max_tokens": 8} | options
        return self.openai.completions.create(**options)

    def test_a_chat_is_answered(self):
        answer = self.chat()
        self.assertEqual((answer.object, answer.model), ("chat.completion", NAME))
        self.assertTrue(answer.id.startswith("chatcmpl-"))
        choice, = answer.choices
        self.assertIn("Paris", choice.message.content)
        self.assertEqual((choice.message.role, choice.index), ("assistant", 0))
        self.assertIn(choice.finish_reason, ("stop", "length"))
        self.assertEqual(answer.usage.total_tokens,
                         answer.usage.prompt_tokens + answer.usage.completion_tokens)
        extra = answer.model_extra["morphkv"]
        self.assertEqual(extra["rows_kept"] + extra["rows_evicted"], extra["tokens_seen"])
        self.assertEqual(extra["profile"], "document")

    def test_a_streamed_chat_says_the_same(self):
        whole = self.chat()
        chunks = list(self.chat(stream=True, stream_options={"include_usage": True}))
        self.assertEqual(chunks[-1].usage, whole.usage)
        self.assertEqual(chunks[-1].choices, [])
        deltas = [c.choices[0] for c in chunks[:-1]]
        self.assertEqual(deltas[0].delta.role, "assistant")
        text = "".join(d.delta.content or "" for d in deltas)
        self.assertEqual(text, whole.choices[0].message.content)
        self.assertEqual([d.finish_reason for d in deltas],
                         [None] * (len(deltas) - 1) + [whole.choices[0].finish_reason])
        self.assertEqual({c.id for c in chunks}, {chunks[0].id})
        self.assertTrue(all(c.usage is None for c in chunks[:-1]))
        self.assertTrue(all(c.usage is None for c in self.chat(stream=True, max_tokens=2)))

    def test_a_completion_is_the_same_plain_and_streamed(self):
        whole = self.complete()
        chunks = list(self.complete(stream=True, stream_options={"include_usage": True}))
        text = "".join(c.choices[0].text for c in chunks[:-1])
        self.assertEqual(text, whole.choices[0].text)
        self.assertEqual((chunks[-1].usage, whole.object), (whole.usage, "text_completion"))
        self.assertEqual(chunks[-2].choices[0].finish_reason, "length")

    def test_logprobs_tell_the_tokens_and_what_else_was_likely(self):
        choice = self.chat(logprobs=True, top_logprobs=4).choices[0]
        tokens = choice.logprobs.content
        self.assertEqual("".join(t.token for t in tokens), choice.message.content)
        for token in tokens:
            self.assertEqual(bytes(token.bytes).decode(), token.token)
            self.assertEqual(len(token.top_logprobs), 4)
            self.assertEqual(token.logprob, max(t.logprob for t in token.top_logprobs))
            self.assertLessEqual(token.logprob, 0)
        streamed = [t for c in self.chat(logprobs=True, top_logprobs=4, stream=True)
                    if c.choices[0].logprobs for t in c.choices[0].logprobs.content]
        self.assertEqual([t.token for t in streamed], [t.token for t in tokens])
        self.assertEqual(self.chat(logprobs=True, max_tokens=1).choices[0].logprobs.content[0]
                         .top_logprobs, [])
        self.assertIsNone(self.chat(max_tokens=1).choices[0].logprobs)

        choice = self.complete(logprobs=3).choices[0]
        self.assertEqual("".join(choice.logprobs.tokens), choice.text)
        self.assertEqual([len(t) for t in choice.logprobs.top_logprobs], [3] * 8)
        self.assertEqual(choice.logprobs.token_logprobs,
                         [max(t.values()) for t in choice.logprobs.top_logprobs])

    def test_a_stop_text_ends_the_answer_and_is_no_part_of_it(self):
        whole = self.complete(max_tokens=12).choices[0].text
        stop = whole[6:9]
        wanted = whole[:whole.index(stop)]
        for stops in (stop, ["never said", stop]):
            choice = self.complete(stop=stops, max_tokens=12).choices[0]
            self.assertEqual((choice.text, choice.finish_reason), (wanted, "stop"))
        chunks = list(self.complete(stop=stop, max_tokens=12, stream=True))
        self.assertEqual("".join(c.choices[0].text for c in chunks), wanted)

    def test_a_seed_repeats_an_answer(self):
        def say(seed):
            return self.complete(seed=seed, temperature=1.2, max_tokens=12).choices[0].text
        self.assertEqual(say(7), say(7))
        self.assertGreater(len({say(1), say(2), say(3)}), 1)

    def test_max_tokens_counts_generated_tokens(self):
        for limit in (0, 1, 5):
            answer = self.complete(max_tokens=limit, extra_body={"ignore_eos": True})
            self.assertEqual(answer.usage.completion_tokens, limit)
            self.assertEqual(answer.choices[0].finish_reason, "length")
        answer = self.chat(max_tokens=openai.omit, max_completion_tokens=3)
        self.assertEqual(answer.usage.completion_tokens, 3)

    def test_models_are_listed(self):
        self.assertEqual([m.id for m in self.openai.models.list()], [NAME])

    def test_content_may_come_in_parts(self):
        parts = [{"type": "text", "text": "What is the capital"},
                 {"type": "text", "text": " of France? Answer in one sentence."}]
        answer = self.chat(messages=[{"role": "user", "content": parts}])
        self.assertEqual(answer.choices[0].message.content, self.chat().choices[0].message.content)

    def test_bad_fields_are_refused_by_name(self):
        for name, value in (("temperature", -1), ("top_p", 2), ("max_tokens", -1), ("n", 2),
                            ("seed", 0.5), ("stop", [""]), ("top_logprobs", 3),
                            ("logit_bias", {"5": 1}), ("presence_penalty", 9),
                            ("stream_options", 5), ("tools", [{"type": "function"}])):
            with self.subTest(name), self.assertRaises(openai.BadRequestError) as raised:
                self.chat(extra_body={name: value})
            self.assertEqual(raised.exception.param, name)
        for name in ("budget", "n_sink", "window", "pool", "recent", "timeout", "slot", "top_k"):
            for value in (-1, 1 << 40, "many", True, [1]):
                with self.subTest(f"{name} {value}"), \
                        self.assertRaises(openai.BadRequestError) as raised:
                    self.chat(extra_body={name: value})
                self.assertEqual(raised.exception.param, name)
        with self.assertRaises(openai.BadRequestError) as raised:
            self.chat(messages=[SYSTEM, {"role": "user", "content": 5}])
        self.assertEqual(raised.exception.param, "messages[1].content")
        with self.assertRaises(openai.NotFoundError):
            self.openai.embeddings.create(model=NAME, input="a")

    def test_more_requests_than_slots_are_all_answered(self):
        prompts = [f"The number after {n} is" for n in (3, 7, 12, 20, 31, 44)]
        alone = [self.complete(prompt=p, max_tokens=6).choices[0].text for p in prompts]
        together = [None] * len(prompts)

        def ask(i):
            together[i] = self.complete(prompt=prompts[i], max_tokens=6).choices[0].text
        threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(together, alone)


class ServeTruthTest(ServeCase):
    """What is said about tokens and rows, and what is refused for them."""
    # Steps below 64 tokens: the engine's attention rounds alike then, however steps are shared.
    options = ("--slots", "2", "--budget", "256", "-b", "56")

    def tokens(self, text, **options):
        return self.server.post("/tokenize", {"content": text} | options).json["tokens"]

    def test_usage_is_what_was_evaluated(self):
        text = "Six green bottles stand on the wall."
        count = len(self.tokens(text))
        answer = self.ask({"prompt": text, "ignore_eos": True, "max_tokens": 5})
        usage, kept = answer["usage"], answer["morphkv"]
        self.assertEqual((usage["prompt_tokens"], usage["completion_tokens"]), (count, 5))
        self.assertEqual(kept["tokens_seen"], count + 4)  # the last one needs no evaluation
        self.assertEqual((kept["rows_kept"], kept["rows_evicted"]), (count + 4, 0))
        self.assertEqual(usage["prompt_tokens_details"]["cached_tokens"], 0)

    def test_token_ids_make_the_same_prompt(self):
        text = "Rain fell on the hills"
        self.assertEqual(said(self.ask({"prompt": self.tokens(text)})),
                         said(self.ask({"prompt": text})))
        back = self.server.post("/detokenize", {"tokens": self.tokens(text)}).json["content"]
        self.assertEqual(back, text)
        pieces = self.tokens(text, with_pieces=True)
        self.assertEqual("".join(p["piece"] for p in pieces), text)

    def test_the_budget_is_per_request(self):
        prompt = FILLER * 8
        for budget in (64, 96):
            kept = self.ask({"prompt": prompt, "budget": budget, "max_tokens": 3,
                             "ignore_eos": True})["morphkv"]
            self.assertEqual((kept["budget"], kept["rows_kept"]), (budget, budget))
            self.assertEqual(kept["rows_evicted"], kept["tokens_seen"] - budget)
        self.assertEqual(self.refusal(COMPLETION, {"prompt": "a", "budget": 257})["param"],
                         "budget")

    def test_strict_refuses_rather_than_evict(self):
        with self.assertRaises(openai.BadRequestError) as raised:
            self.client().chat.completions.create(
                model=NAME, messages=[{"role": "user", "content": LONG}],
                extra_body={"strict": True})
        error = raised.exception.body
        self.assertEqual(error["type"], "exceed_context_size_error")
        self.assertEqual(error["n_ctx"], 256)
        self.assertGreater(error["n_prompt_tokens"], 300)
        for number in (error["n_ctx"], error["n_prompt_tokens"]):
            self.assertIn(str(number), error["message"])
        kept = self.ask({"prompt": FILLER * 2, "budget": 32, "strict": True, "max_tokens": 50,
                         "ignore_eos": True})
        self.assertEqual(kept["morphkv"]["rows_evicted"], 0)
        self.assertEqual(kept["choices"][0]["finish_reason"], "length")

    def test_a_prompt_beyond_the_trained_length_is_refused(self):
        error = self.refusal(COMPLETION, {"prompt": [28] * (TRAINED + 1)})
        self.assertEqual(error["type"], "exceed_context_size_error")
        self.assertEqual((error["n_prompt_tokens"], error["n_ctx"]), (TRAINED + 1, TRAINED))
        for path, body in ((COMPLETION, {"prompt": "word " * 3_000_000}),
                           (CHAT, {"messages": [{"role": "user", "content": "word " * 3_000_000}]})):
            error = self.refusal(path, body)  # by its bytes, before it is cut into tokens
            self.assertEqual(error["type"], "exceed_context_size_error")
            self.assertIn("15000", error["message"])
            self.assertGreater(error["n_prompt_tokens"], TRAINED)
        error = self.refusal(CHAT, {"messages": FRANCE, "allow_past_training": True})
        self.assertEqual(error["param"], "allow_past_training")

    def test_a_pinned_system_message_is_never_evicted(self):
        system = {"role": "system", "content": "Your name is Zephyr. " + FILLER}
        messages = [system, {"role": "user", "content": FILLER * 12 + "What is your name?"}]
        held = {}
        for pin in (False, True):
            body = {"messages": messages, "budget": 96, "max_tokens": 3, "pin_system": pin}
            slot = self.ask(body)["morphkv"]["slot"]
            picture = self.server.get(f"/slots/{slot}/picture").json
            heads = [set(head) for layer in picture["held"] for head in layer]
            held[pin] = set.intersection(*heads)
        pinned = len(self.tokens("<|im_start|>system\n" + system["content"]))
        self.assertLessEqual(set(range(pinned)), held[True])
        self.assertFalse(set(range(pinned)) <= held[False])
        self.assertEqual(self.refusal(CHAT, {"messages": FRANCE, "pin_system": True})["param"],
                         "pin_system")
        body = {"messages": messages, "budget": 20, "pin_system": True}
        self.assertEqual(self.refusal(CHAT, body)["param"], "pin_system")

    def test_the_second_turn_of_a_chat_goes_on_from_the_first(self):
        first = [{"role": "user", "content": LONG + "Where does the key lie?"}]
        one = self.ask({"messages": first, "ignore_eos": True})
        self.assertGreater(one["morphkv"]["rows_evicted"], 0)
        messages = [*first, {"role": "assistant", "content": said(one)},
                    {"role": "user", "content": "Say it again."}]
        two = self.ask({"messages": messages})
        self.assertEqual(two["morphkv"]["slot"], one["morphkv"]["slot"])
        self.assertEqual(two["morphkv"]["reused_tokens"], one["morphkv"]["tokens_seen"])
        self.assertEqual(two["usage"]["prompt_tokens_details"]["cached_tokens"],
                         one["morphkv"]["tokens_seen"])
        # Anything else starts empty, and says what a fresh process says.
        changed = [{"role": "user", "content": first[0]["content"] + "!"}, *messages[1:]]
        again = self.ask({"messages": changed})
        self.assertEqual(again["morphkv"]["reused_tokens"], 0)
        fresh = self.another("--slots", "1", "--budget", "256", "-b", "56")
        asked = {"logprobs": True, "top_logprobs": 3, "temperature": 0, "max_tokens": 8}
        for slot in (0, 1):
            here = self.ask({"messages": first, "slot": slot} | asked)
            self.assertEqual(here["morphkv"]["reused_tokens"], 0)
            if slot == 0:
                there = self.ask({"messages": first} | asked, fresh)
            self.assertEqual(here["choices"], there["choices"])
            self.assertEqual(here["usage"], there["usage"])


class ServeLimitTest(ServeCase):
    """Clients that are too many, leave, are late or send nonsense."""
    options = ("--slots", "2", "--budget", "256", "--max-queue", "1", "-b", "32")

    BUSY = {"prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True, "stream": True}

    def hold(self, **body):
        """A client whose request is under way."""
        begun = self.server.metrics()["requests_begun_total"]
        raw = self.server.raw()
        self.addCleanup(raw.leave)
        raw.send_json(COMPLETION, self.BUSY | body)
        self.assertIsNotNone(self.server.wait_until(
            lambda: self.server.metrics()["requests_begun_total"] > begun, 30))
        return raw

    def wait(self):
        """A client whose request waits for a slot."""
        raw = self.server.raw()
        self.addCleanup(raw.leave)
        raw.send_json(COMPLETION, self.BUSY)
        self.assertIsNotNone(self.server.wait_until(
            lambda: self.server.metrics()["requests_waiting"] == 1, 30))
        return raw

    def state(self, slot):
        return self.server.slots()[slot]["state"]

    def assert_soon(self, condition):
        self.assertIsNotNone(self.server.wait_until(condition, WITHIN), self.server.slots())

    def test_beyond_the_queue_requests_are_refused(self):
        clients = [self.hold(slot=0), self.hold(slot=1), self.wait()]
        with self.assertRaises(openai.RateLimitError) as raised:
            self.client().completions.create(model=NAME, prompt="a", max_tokens=1)
        self.assertIn(int(raised.exception.response.headers["retry-after"]), range(1, 61))
        self.assertEqual(self.server.metrics()["requests_refused_total"], 1)
        clients[2].leave()  # in the queue
        self.assert_soon(lambda: self.server.metrics()["requests_waiting"] == 0)
        self.assertEqual(self.state(0), "generating")
        clients[0].leave()
        clients[1].leave(reset=True)
        self.assert_soon(lambda: self.server.metrics()["slots_busy"] == 0)

    def test_a_client_that_leaves_changes_no_other_answer(self):
        body = {"prompt": "The mill by the river", "max_tokens": 12, "ignore_eos": True,
                "slot": 1}
        alone = said(self.ask(body))
        for streamed in (True, False):
            for prompt in (FILLER * 100, "Once"):  # in its prefill, and while it is answered
                with self.subTest(streamed=streamed, prompt=len(prompt)):
                    client = self.hold(slot=0, prompt=prompt, stream=streamed)
                    reading = len(prompt) > 100
                    if not reading:
                        self.assertIsNotNone(self.server.wait_until(
                            lambda: self.state(0) == "generating", 30))
                    answer = {}
                    other = threading.Thread(target=lambda: answer.update(self.ask(body)))
                    other.start()
                    self.server.wait_until(lambda: self.state(1) != "idle", 5)
                    client.leave(reset=streamed)
                    self.assert_soon(lambda: self.state(0) == "idle")
                    other.join()
                    self.assertEqual(said(answer), alone)
                    if reading:  # a prompt read in part leaves nothing behind
                        self.assertEqual(self.server.slots()[0]["tokens_seen"], 0)

    def test_a_time_out_ends_a_request(self):
        with self.assertRaises(openai.InternalServerError) as raised:
            self.client().completions.create(model=NAME, prompt=FILLER * 100,
                                             extra_body={"timeout": 0.3})
        self.assertEqual(raised.exception.status_code, 504)
        self.assert_soon(lambda: self.server.metrics()["slots_busy"] == 0)
        answer = self.ask({"prompt": "Hi", "max_tokens": 5000, "ignore_eos": True, "timeout": 4})
        self.assertEqual(answer["morphkv"]["finish_detail"], "timeout")
        self.assertEqual(answer["choices"][0]["finish_reason"], "length")
        self.assertGreater(answer["usage"]["completion_tokens"], 0)

    def test_malformed_bodies_are_refused(self):
        for body in (b"", b"{", b"[1]", b"\xff", b'{"prompt": "a", "temperature": NaN}',
                     b'{"prompt": "a", "top_k": 1e400}', b'{"prompt": "caf\xe9"}',
                     b'{"prompt": "\\ud800"}', b'{"prompt": "a\\u0000"}', b"[" * 50_000,
                     b'{"a":' * 50_000, b'{"prompt": {}}', b'{"prompt": []}', b'{"prompt": [-1]}',
                     b'{"prompt": ["a", "b"]}', b'{"prompt": "a", "stop": 3}'):
            with self.subTest(body[:40]):
                self.assertEqual(self.refusal(COMPLETION, body)["type"], "invalid_request_error")
        for path in (CHAT, "/tokenize", "/detokenize"):
            self.refusal(path, b"{}")
        self.refusal("/v1/nothing", {}, 404)
        self.assertEqual(self.server.get(CHAT).status, 405)

    def test_malformed_http_is_refused(self):
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
        for data, wanted in (
                (b"GET / HTTP/1.1\r\nX: %b\r\n\r\n" % (b"a" * 100_000), (400, 413, 431, None)),
                (b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 5000 + b"\r\n", (400, 431, None)),
                (b"GET /%b HTTP/1.1\r\n\r\n" % (b"a" * 100_000), (414, None)),
                (head + b"\r\n", (400, 411)),
                (head + b"Content-Length: -5\r\n\r\n", (400, 411, 413)),
                (head + b"Content-Length: 99999999999999999999\r\n\r\n", (400, 413)),
                (head + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n", (400,)),
                (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", (400, None)),
                (b"nonsense\r\n\r\n", (400, None))):
            with self.subTest(data[:60]), self.server.raw(60) as raw:
                try:
                    raw.send(data)
                except ConnectionError:
                    pass  # refused before all of it was sent
                self.assertIn(raw.status(), wanted)
        self.assertEqual(self.server.get("/health").status, 200)

    def test_a_body_that_is_too_long_is_refused(self):
        size = 17 << 20
        with self.server.raw(60) as raw:
            raw.send(b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % size)
            try:
                for _ in range(17):
                    raw.send(b"x" * (1 << 20))
            except ConnectionError:
                pass
            self.assertIn(raw.status(), (413, None))
        self.assertEqual(self.server.get("/health").status, 200)

    def test_slow_connections_hold_up_nobody(self):
        slow = [self.server.raw(60) for _ in range(12)]
        for i, raw in enumerate(slow):
            self.addCleanup(raw.leave)
            raw.send((b"", b"POST /v1/completions HT", b"POST /tokenize HTTP/1.1\r\n"
                      b"Content-Length: 90\r\n\r\n{")[i % 3])
        begin = time.monotonic()
        self.assertEqual(self.server.get("/health").status, 200)
        self.assertLess(time.monotonic() - begin, 5)
        end = time.monotonic() + 20  # the silent ones are sent away
        self.assertTrue(all(raw.has_data(max(0.1, end - time.monotonic())) for raw in slow[::3]))
        self.assertEqual(self.server.get("/health").status, 200)


class ServeSavedSlotTest(ServeCase):
    """Slots on disk."""

    @classmethod
    def setUpClass(cls):
        cls.slot_dir = tempfile.mkdtemp(prefix="morphkv-slots-")
        cls.addClassCleanup(shutil.rmtree, cls.slot_dir)
        cls.options = ("--slots", "2", "--budget", "96", "-b", "32", "--slot-dir", cls.slot_dir)
        super().setUpClass()

    FIRST = [{"role": "user", "content": FILLER * 9 + "What walks along the river?"}]

    def act(self, action, name=None, slot=0, server=None):
        body = {} if name is None else {"filename": name}
        return (server or self.server).post(f"/slots/{slot}?action={action}", body)

    def first_turn(self):
        return self.ask({"messages": self.FIRST, "slot": 0, "ignore_eos": True})

    def second_turn(self, first, server=None, slot=0):
        messages = [*self.FIRST, {"role": "assistant", "content": said(first)},
                    {"role": "user", "content": "And where?"}]
        return self.ask({"messages": messages, "slot": slot, "logprobs": True}, server)

    def held(self, server, slot):
        return server.get(f"/slots/{slot}/picture").json["held"]

    def logprobs(self, answer):
        return [t["logprob"] for t in answer["choices"][0]["logprobs"]["content"]]

    def test_a_saved_slot_goes_on_as_if_nothing_had_happened(self):
        first = self.first_turn()
        self.assertGreater(first["morphkv"]["rows_evicted"], 0)
        self.assertEqual(self.act("save", "talk-1.slot").status, 200)
        self.assertEqual(os.listdir(self.slot_dir), ["talk-1.slot"])
        held = self.held(self.server, 0)
        wanted = self.second_turn(first)
        self.assertEqual(wanted["morphkv"]["reused_tokens"], first["morphkv"]["tokens_seen"])

        another = self.another(*self.options)
        for server, slot in ((self.server, 0), (self.server, 1), (another, 1)):
            with self.subTest(slot=slot, fresh=server is another):
                self.assertEqual(self.act("erase", None, slot, server).status, 200)
                self.assertEqual(server.slots()[slot]["tokens_seen"], 0)
                self.assertEqual(self.act("restore", "talk-1.slot", slot, server).status, 200)
                self.assertEqual(server.slots()[slot]["tokens_seen"],
                                 first["morphkv"]["tokens_seen"])
                self.assertEqual(self.held(server, slot), held)
                there = self.second_turn(first, server, slot)
                # The rows lie in other cells now, so sums are rounded otherwise.
                self.assertEqual(said(there), said(wanted))
                for a, b in zip(self.logprobs(there), self.logprobs(wanted), strict=True):
                    self.assertAlmostEqual(a, b, delta=0.1)
                self.assertEqual(there["usage"], wanted["usage"])

    def test_bad_names_are_refused(self):
        for action in ("save", "restore"):
            for name in ("", "../x", "a/b", "/tmp/x", ".hidden", "..", "a b", "a\\b", "x" * 129,
                         "caf\u00e9", "a\n", 5, None):
                with self.subTest(action, name=name):
                    reply = self.act(action, name)
                    self.assertEqual((reply.status, reply.error["param"]), (400, "filename"))
        self.assertEqual(self.act("restore", "absent").status, 404)
        for action in ("", "delete", "SAVE"):
            self.assertEqual(self.act(action, "a").status, 400)
        for slot in (2, -1, "x", 99999999999):
            self.assertEqual(self.act("erase", None, slot).status, 400)

    def test_damaged_files_leave_the_slot_as_it_is(self):
        first = self.first_turn()
        self.assertEqual(self.act("save", "whole").status, 200)
        with open(os.path.join(self.slot_dir, "whole"), "rb") as file:
            whole = file.read()
        self.addCleanup(os.remove, os.path.join(self.slot_dir, "whole"))
        damaged = {"empty": b"", "junk": b"junk" * 1000, "cut": whole[:-1], "half":
                   whole[:len(whole) // 2], "more": whole + b"\0"}
        for at in (0, 5, 20, len(whole) // 3, len(whole) // 2, len(whole) - 1):
            damaged[f"bit{at}"] = whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1:]
        for name, content in damaged.items():
            with self.subTest(name):
                path = os.path.join(self.slot_dir, name)
                with open(path, "wb") as file:
                    file.write(content)
                self.addCleanup(os.remove, path)
                self.assertEqual(self.act("restore", name).status, 400)
        self.assertEqual(self.server.slots()[0]["tokens_seen"], first["morphkv"]["tokens_seen"])
        second = self.second_turn(first)
        self.assertEqual(second["morphkv"]["reused_tokens"], first["morphkv"]["tokens_seen"])

    def test_a_busy_slot_is_left_alone(self):
        with self.server.raw() as raw:
            raw.send_json(COMPLETION, {"prompt": "a", "max_tokens": 500, "ignore_eos": True,
                                       "slot": 0})
            self.server.wait_until(lambda: self.server.slots()[0]["state"] != "idle", 30)
            for action in ("save", "erase"):
                reply = self.act(action, "busy")
                self.assertEqual((reply.status, reply.error["type"]), (409, "conflict_error"))
        self.assertIsNotNone(self.server.wait_idle(WITHIN))


class ServeProcessTest(unittest.TestCase):
    """Start, keys and signals."""

    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="morphkv-serve-")
        self.addCleanup(shutil.rmtree, self.folder)

    def start(self, *options):
        server = Server(TOOL, MODEL, "--budget", "64", "--slots", "1", *options)
        self.addCleanup(server.close)
        return server

    def refused(self, *options):
        """Exit code and message of a server that does not start."""
        port = () if "--port" in options else ("--port", "0")
        process = subprocess.run([TOOL, "serve", "-m", MODEL, "--slots", "1", "--budget", "64",
                                  *port, *options], capture_output=True, timeout=PATIENCE)
        return process.returncode, process.stderr.decode()

    def keys(self, content):
        path = os.path.join(self.folder, "keys")
        with open(path, "wb") as file:
            file.write(content)
        return path

    def test_keys_are_asked_for(self):
        server = self.start("--api-key-file", self.keys(b"# keys\nfirst-secret\n\nsecond-secret\n"))

        def models(key):
            with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as client:
                return [m.id for m in client.models.list()]
        for key in ("first-secret", "second-secret"):
            self.assertEqual(models(key), [NAME])
        for key in ("wrong-secret", "first-secre", "first-secret2", "# keys"):
            with self.subTest(key), self.assertRaises(openai.AuthenticationError):
                models(key)
        for path in ("/slots", "/metrics", "/v1/models", "/slots/0/picture"):
            self.assertEqual(server.get(path).status, 401)
        for path in (CHAT, COMPLETION, "/tokenize", "/slots/0?action=erase"):
            self.assertEqual(server.post(path, {}).status, 401)
        self.assertEqual(server.get("/health").status, 200)
        self.assertEqual(server.terminate(), 0)
        self.assertNotIn("secret", server.errors())

    def test_listening_beyond_loopback_takes_a_key_or_a_word(self):
        code, message = self.refused("--host", "0.0.0.0")
        self.assertEqual(code, 2)
        self.assertIn("--insecure", message)
        for content in (b"", b"short\n", b"with space inside\n"):
            code, message = self.refused("--host", "0.0.0.0", "--api-key-file", self.keys(content))
            self.assertEqual(code, 2, message)
        server = self.start("--host", "0.0.0.0", "--insecure")
        self.assertEqual(server.get("/health").status, 200)

    def test_a_port_that_is_taken_is_named(self):
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = str(taken.getsockname()[1])
            code, message = self.refused("--port", port)
        self.assertEqual(code, 1, message)
        self.assertIn(port, message)
        code, message = self.refused("--slot-dir", os.path.join(self.folder, "absent"))
        self.assertEqual(code, 2, message)

    def test_sigterm_finishes_what_runs(self):
        server = self.start("--max-queue", "4")
        answers = [server.raw(), server.raw()]
        for raw in answers:  # one runs, one waits
            self.addCleanup(raw.leave)
            raw.send_json(COMPLETION, {"prompt": "Once", "max_tokens": 40, "ignore_eos": True,
                                       "stream": True, "temperature": 0})
        server.wait_until(lambda: server.metrics()["requests_waiting"] == 1, 30)
        server.process.send_signal(signal.SIGTERM)
        server.wait_until(lambda: "stopping" in server.errors(), 5)
        try:
            refused = server.post(COMPLETION, {"prompt": "a", "max_tokens": 1}).status
        except ConnectionError:
            refused = 503
        self.assertEqual(refused, 503)
        self.assertEqual(server.process.wait(PATIENCE), 0)
        for raw in answers:
            data = b""
            while piece := raw.socket.recv(65536):
                data += piece
            self.assertEqual(data.count(b'"text":'), 41)
            self.assertIn(b"data: [DONE]", data)

    def test_a_second_signal_ends_at_once(self):
        server = self.start()
        with server.raw() as raw:
            raw.send_json(COMPLETION, {"prompt": "Once", "max_tokens": 4000, "ignore_eos": True,
                                       "stream": True})
            server.wait_until(lambda: server.metrics()["slots_busy"] == 1, 30)
            server.process.send_signal(signal.SIGTERM)
            server.wait_until(lambda: "stopping" in server.errors(), 5)
            server.process.send_signal(signal.SIGTERM)
            self.assertNotEqual(server.process.wait(5), 0)

    def test_an_idle_server_ends_soon(self):
        server = self.start()
        begin = time.monotonic()
        server.get("/health")
        self.assertEqual(server.terminate(), 0)
        self.assertLess(time.monotonic() - begin, 10)


if __name__ == "__main__":
    unittest.main()
