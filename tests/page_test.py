"""The server's page in headless Chromium, by keyboard as a user has one.

MORPHKV_PAGE_URL names a running server; without it a mock is asked, which needs no model. The
screenshots go to MORPHKV_ARTEFACTS, build/page if that is not set. Skipped (77) without Chromium.
"""

import json
import os
import sys
import threading
import time
import unittest
import urllib.parse
import urllib.request
from pathlib import Path

import browser
from browser import DOWN, END, ENTER, ESCAPE, HOME, LEFT, RIGHT, SHIFT, TAB
from page_mock import Server

PROJECT = Path(__file__).resolve().parent.parent
ARTEFACTS = Path(os.environ.get("MORPHKV_ARTEFACTS") or PROJECT / "build" / "page")
URL = os.environ.get("MORPHKV_PAGE_URL")
BUDGET = 64

TEXT = "return document.querySelector(arguments[0]).textContent"
FOCUS = "return document.activeElement.id"
ANSWERED = """
  const last = [...document.querySelectorAll('article.assistant')].at(-1);
  return last?.querySelector('.foot, .error') ? last.textContent : '';"""
LEVELS = """
  return [...document.querySelectorAll('#tokens .t')]
      .map((t) => Number(t.className.match(/h(\\d)/)[1]));"""
# Contrast of each text that is on the page with the nearest ground behind it, the lowest first.
CONTRASTS = """
  const numbers = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const light = (colour) => {
    const [r, g, b] = numbers(colour).map((v) => v / 255)
        .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (element) => {
    for (; element; element = element.parentElement) {
      const colour = getComputedStyle(element).backgroundColor;
      if ((numbers(colour)[3] ?? 1) === 1) return colour;
    }
  };
  const found = [];
  for (const element of document.querySelectorAll('body *')) {
    const own = [...element.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
    if (!own || element.disabled || !element.checkVisibility()) continue;
    const style = getComputedStyle(element);
    const colour = element.namespaceURI.endsWith('svg') ? style.fill : style.color;
    const [high, low] = [light(colour), light(ground(element))].sort((a, b) => b - a);
    found.push([(high + 0.05) / (low + 0.05), element.textContent.slice(0, 40), element.className]);
  }
  return found.sort((a, b) => a[0] - b[0]);"""


def get(url, path):
    with urllib.request.urlopen(url + path, timeout=60) as response:
        return json.load(response)


class PageTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        ARTEFACTS.mkdir(parents=True, exist_ok=True)
        cls.url = (URL or "").rstrip("/")
        if not cls.url:
            cls.server = Server()
            threading.Thread(target=cls.server.serve_forever, daemon=True).start()
            cls.addClassCleanup(cls.server.close)
            cls.url = cls.server.url
        cls.browser = browser.Browser()
        cls.addClassCleanup(cls.browser.close)

    def setUp(self):
        self.browser.emulate()
        self.browser.open("about:blank")
        for kind in ("browser", "performance"):
            self.browser.log(kind)
        self.browser.open(self.url + "/")
        self.browser.wait("return document.querySelector('#slot').options.length > 1")

    # --- What a user does -----------------------------------------------------------------------

    def text(self, selector):
        return self.browser.run(TEXT, selector)

    def go_to(self, name):
        """Tabs on to the element with this id."""
        seen = []
        for _ in range(60):
            if self.browser.run(FOCUS) == name:
                return
            self.browser.press(TAB)
            seen.append(self.browser.run(FOCUS))
        self.fail(f"Tab does not reach {name}: {seen}")

    def open_settings(self):
        for _ in range(60):
            self.browser.press(TAB)
            if self.browser.run("return document.activeElement.tagName") == "SUMMARY":
                break
        self.browser.press(ENTER)

    def set(self, name, value):
        self.go_to(name)
        self.browser.press(*[browser.CONTROL + "a", *value])

    def say(self, text):
        self.go_to("message")
        self.browser.press(*text, ENTER)

    def ask(self, text):
        """Says it and returns the answer with what is under it, after the last look at the slot."""
        before = self.browser.run("return document.querySelectorAll('article.assistant').length")
        self.say(text)
        self.browser.wait(
            "return document.querySelectorAll('article.assistant').length > arguments[0]", before)
        answer = self.browser.wait(ANSWERED, patience=300)
        time.sleep(2)
        return answer

    def ask_with_small_budget(self):
        self.open_settings()
        self.set("max-tokens", "200")
        self.set("budget", str(BUDGET))
        return self.ask("Tell me about a harbour, its boats and the people who work there, please.")

    def slot(self):
        """Of this chat, as the server tells it."""
        number = int(self.text("#activity").split()[1].rstrip(":"))
        return next(slot for slot in get(self.url, "/slots") if slot["id"] == number)

    def choose(self, name, key, *more):
        self.browser.run("document.getElementById(arguments[0]).focus()", name)
        self.browser.press(key, *more)

    def assert_quiet(self):
        """No error in the console, and nobody but the server was asked."""
        errors = [e for e in self.browser.log("browser") if e["level"] in ("SEVERE", "WARNING")]
        self.assertEqual(errors, [])
        for entry in self.browser.log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] in ("Network.requestWillBeSent", "Network.webSocketCreated"):
                url = message["params"].get("request", message["params"])["url"]
                if url.startswith(("http", "ws", "ftp")):
                    self.assertEqual(urllib.parse.urlsplit(url).netloc,
                                     urllib.parse.urlsplit(self.url).netloc, url)

    # --- Tests ----------------------------------------------------------------------------------

    def test_chats_by_keyboard_alone_and_asks_only_its_own_server(self):
        self.browser.press(TAB)
        self.assertIn("Skip", self.browser.run("return document.activeElement.textContent"))
        self.browser.press(ENTER)
        self.assertEqual(self.browser.run(FOCUS), "message")
        self.browser.press(*"Hello", SHIFT + ENTER, *"there")
        self.assertEqual(self.browser.run("return document.querySelector('#message').value"),
                         "Hello\nthere")
        self.assertIsNone(self.browser.run("return document.querySelector('article')"))
        answer = self.ask(".")
        self.assertEqual(self.text("article.user .text"), "Hello\nthere.")
        self.assertGreater(len(self.text("article.assistant .text")), 5)
        self.assertRegex(
            answer, r"tokens · prompt: \d+ read, 0 reused · [\d,]+ of [\d,]+ rows kept")
        self.assertEqual(self.browser.run(FOCUS), "message")
        self.assertFalse(self.browser.run("return !!document.querySelector('[aria-busy]')"))
        self.assert_quiet()

    def test_the_next_message_goes_on_in_the_same_slot(self):
        self.ask_with_small_budget()
        first = self.slot()
        answer = self.ask("And then?")
        self.assertIn(f"slot {first['id']}", answer)
        self.assertGreater(self.slot()["tokens_seen"], first["tokens_seen"])
        if not URL:
            sent = self.server.requests[-1]
            self.assertEqual(sent["slot"], first["id"])
            self.assertEqual([m["role"] for m in sent["messages"]], ["user", "assistant", "user"])
            self.assertIs(sent["stream"], True)
            self.assertEqual(sent["stream_options"], {"include_usage": True})
            self.assertEqual((sent["max_tokens"], sent["budget"]), (200, BUDGET))
            self.assertNotIn("temperature", sent)
        self.go_to("new")
        self.browser.press(ENTER)
        self.assertIsNone(self.browser.run("return document.querySelector('article')"))
        self.assertEqual(self.browser.run(LEVELS), [])
        self.assertIn("0 reused", self.ask("Hello"))
        if not URL:
            self.assertNotIn("slot", self.server.requests[-1])

    def test_shades_each_token_by_the_heads_that_hold_it(self):
        self.ask_with_small_budget()
        slot = self.slot()
        picture = get(self.url, f"/slots/{slot['id']}/picture?tokens=4000")
        self.assertGreater(slot["tokens_seen"], BUDGET)
        self.assertEqual(self.text("#seen").replace(",", ""), str(slot["tokens_seen"]))
        self.assertEqual(self.text("#kept"), str(slot["rows_kept"]))
        shown = self.browser.run(
            "return [...document.querySelectorAll('#tokens .t')].map((t) => t.textContent)")
        self.assertEqual(shown, picture["pieces"])

        heads = [set(head) for layer in picture["held"] for head in layer]
        counts = [sum(at in head for head in heads) for at in range(slot["tokens_seen"])]
        levels = self.browser.run(LEVELS)
        self.assertEqual([level == 0 for level in levels], [count == 0 for count in counts])
        self.assertGreaterEqual(len(set(levels)), 3, "tokens differ in how many heads hold them")
        darker = sorted(zip(counts, levels))
        self.assertEqual([level for _, level in darker], sorted(levels))

        self.choose("layer", DOWN)
        one = self.browser.run(LEVELS)
        self.assertNotEqual(one, levels)
        self.choose("head", DOWN)
        held = set(picture["held"][0][0])
        self.assertEqual(self.browser.run(LEVELS),
                         [5 if at in held else 0 for at in range(len(counts))])
        self.assertEqual(len(held), slot["rows_kept"])
        self.assertIn("of 1 head", self.text("#legend-title"))
        self.choose("layer", HOME)
        self.choose("head", HOME)
        self.assertEqual(self.browser.run(LEVELS), levels)

        self.browser.press(TAB)  # into the tokens, at the first
        self.browser.press(RIGHT, RIGHT, LEFT)
        self.assertIn(f"position 1: held by {counts[1]} of {len(heads)} heads",
                      self.text("#readout"))
        self.browser.press(END)
        self.assertIn(f"held by {counts[-1]} of {len(heads)} heads", self.text("#readout"))
        self.browser.press(HOME, DOWN)
        self.assertGreater(self.browser.run("return document.activeElement.position"), 1)
        self.browser.run("document.querySelectorAll('#tokens .t')[9].scrollIntoView()")
        self.browser.point("#tokens .t:nth-of-type(10)")
        self.assertIn(f"position 9: held by {counts[9]} of {len(heads)} heads",
                      self.text("#readout"))

        for plot in ("rows-plot", "speed-plot"):
            self.assertGreater(self.browser.run(
                "return document.querySelectorAll(`#${arguments[0]} .kept`).length", plot), 0, plot)
        self.assertIn(f"{slot['rows_kept']} rows per head are kept", self.browser.run(
            "return document.querySelector('#rows-plot').getAttribute('aria-label')"))
        self.assertEqual(self.browser.run("return !document.querySelector('#memory').hidden"),
                         "kv_bytes_kept" in slot)
        self.assert_quiet()

    def test_stops_an_answer_and_the_slot_is_free(self):
        for way in ("button", "escape"):
            with self.subTest(way):
                self.say("Count from 1 to 1000.")
                self.browser.wait("""
                  return [...document.querySelectorAll('article.assistant .text')].at(-1)
                      ?.textContent.length > 10""")
                if way == "button":
                    self.browser.press(TAB)
                    self.assertEqual(self.browser.run(FOCUS), "stop")
                    self.browser.press(ENTER)
                else:
                    self.browser.press(ESCAPE)
                self.assertIn("stopped", self.browser.wait(ANSWERED))
                self.assertEqual(self.browser.run(FOCUS), "message")
                self.assertTrue(self.browser.run("return document.querySelector('#stop').hidden"))
                end = time.monotonic() + 10
                while any(slot["state"] != "idle" for slot in get(self.url, "/slots")):
                    self.assertLess(time.monotonic(), end, "the slot is still busy")
                    time.sleep(0.1)
                self.go_to("new")
                self.browser.press(ENTER)
        self.assert_quiet()

    def test_shows_what_the_server_refuses_and_goes_on(self):
        self.open_settings()
        self.set("temperature", "-1")
        self.say("Hello")
        self.assertRegex(self.browser.wait(ANSWERED), "400: .*temperature")
        self.assertEqual(self.browser.run("return document.querySelector('#message').value"),
                         "Hello")
        self.go_to("new")
        self.browser.press(ENTER)
        self.browser.run("document.querySelector('#temperature').value = ''")
        self.browser.press(ENTER)
        self.assertIn("rows kept", self.browser.wait(ANSWERED))

    @unittest.skipIf(URL, "only the mock breaks off")
    def test_shows_an_error_in_the_middle_of_an_answer(self):
        self.assertIn("the engine failed: out of luck", self.ask("Break off"))
        self.assertIn("harbour", self.text("article.assistant .text"))

    @unittest.skipIf(URL, "only the mock is taken away")
    def test_says_that_the_server_is_gone(self):
        gone = Server()
        threading.Thread(target=gone.serve_forever, daemon=True).start()
        self.browser.open(gone.url)
        self.browser.wait("return document.querySelector('#slot').options.length > 1")
        gone.close()
        self.say("Hello")
        self.assertIn("cannot be reached", self.browser.wait(ANSWERED))

    def test_text_stays_text(self):
        attack = "<img src=x onerror=alert(1)><b>bold</b>"
        self.ask(attack)
        self.assertEqual(self.text("article.user .text"), attack)
        self.assertIn("<b>bold</b>", self.text("#tokens"))
        self.assertEqual(self.browser.run(
            "return document.querySelectorAll('#log b, #tokens b, #tokens img').length"), 0)
        self.assert_quiet()

    def test_is_readable_light_dark_and_narrow(self):
        self.ask_with_small_budget()
        self.ask("And who knows the code of the locker?")
        self.browser.run(
            "document.querySelectorAll('#tokens .t')[60].scrollIntoView({block: 'center'})")
        self.browser.point("#tokens .t:nth-of-type(61)")
        grounds = []
        shots = (("light", "light", 1360, 900), ("dark", "dark", 1360, 900),
                 ("narrow", "light", 360, 760))
        for name, scheme, width, height in shots:
            with self.subTest(name):
                self.browser.emulate(scheme, motion="reduce", width=width, height=height)
                time.sleep(0.5)
                self.browser.screenshot(ARTEFACTS / f"page-{name}.png", whole=name == "narrow")
                worst = self.browser.run(CONTRASTS)[0]
                self.assertGreaterEqual(worst[0], 4.5, worst)
                wide, inner = self.browser.run(
                    "return [document.documentElement.scrollWidth, innerWidth]")
                self.assertEqual(inner, width)
                self.assertLessEqual(wide, inner)
                grounds.append(self.browser.run(
                    "return getComputedStyle(document.body).backgroundColor"))
        self.assertNotEqual(grounds[0], grounds[1])
        self.assertEqual(self.browser.run(
            "return getComputedStyle(document.querySelector('.t')).transitionProperty"), "none")

    def test_every_control_has_a_name(self):
        self.open_settings()
        tree = self.browser.command("Accessibility.getFullAXTree")["nodes"]
        role = lambda node: node.get("role", {}).get("value", "").lower()
        roles = {role(node) for node in tree}
        self.assertLessEqual({"main", "banner", "region", "log", "heading"}, roles)
        named = ("textbox", "button", "combobox", "spinbutton", "region", "log", "image")
        for node in tree:
            if role(node) in named and not node.get("ignored"):
                self.assertTrue(node.get("name", {}).get("value"), node)


if __name__ == "__main__":
    if not (browser.CHROMIUM and browser.DRIVER):
        print("skipped: chromium or chromedriver is not here (scripts/setup browser)")
        sys.exit(77)
    unittest.main(verbosity=2)
