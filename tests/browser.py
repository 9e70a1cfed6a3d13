"""Headless Chromium by way of chromedriver, which speaks JSON over HTTP (W3C WebDriver). Standard
library only."""

import base64
import json
import re
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the standard's name of an element's id
PATIENCE = 60  # seconds; the machine may be busy

ENTER, ESCAPE, TAB, SHIFT, CONTROL = "\ue007", "\ue00c", "\ue004", "\ue008", "\ue009"
LEFT, UP, RIGHT, DOWN, HOME, END = "\ue012", "\ue013", "\ue014", "\ue015", "\ue011", "\ue010"


class Browser:
    def __init__(self):
        self.profile = tempfile.mkdtemp(prefix="morphkv-page-")
        self.driver = subprocess.Popen([DRIVER, "--port=0"], stdout=subprocess.PIPE,
                                       stderr=subprocess.DEVNULL, text=True)
        self.session = None
        try:
            self.start()
        except BaseException:
            self.close()
            raise

    def start(self):
        for line in self.driver.stdout:
            if found := re.search(r"successfully on port (\d+)", line):
                break
        else:
            raise RuntimeError("chromedriver does not start")
        self.url = f"http://127.0.0.1:{found[1]}"
        options = {"binary": CHROMIUM,
                   "args": ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run",
                            "--disable-dev-shm-usage", "--hide-scrollbars",
                            "--disable-background-networking",
                            f"--user-data-dir={self.profile}", "--window-size=1360,900"]}
        wanted = {"goog:chromeOptions": options,
                  "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"}}
        made = self.call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self.session = f"/session/{made['sessionId']}"

    def close(self):
        try:
            if self.session:
                self.call("DELETE", self.session)
        finally:
            self.driver.terminate()
            try:
                self.driver.wait(20)
            except subprocess.TimeoutExpired:
                self.driver.kill()
                self.driver.wait()
            self.driver.stdout.close()
            shutil.rmtree(self.profile, ignore_errors=True)

    def call(self, method, path, body=None):
        data = json.dumps(body or {}).encode() if method == "POST" else None
        request = urllib.request.Request(self.url + path, data, method=method,
                                         headers={"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE) as response:
                return json.load(response)["value"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(json.load(error)["value"]["message"]) from None

    def post(self, path, **body):
        return self.call("POST", self.session + path, body)

    def open(self, url):
        self.post("/url", url=url)

    def run(self, script, *arguments):
        """What the body of a function returns in the page."""
        return self.post("/execute/sync", script=script, args=list(arguments))

    def command(self, name, **parameters):
        """A command of the DevTools protocol."""
        return self.post("/goog/cdp/execute", cmd=name, params=parameters)

    def press(self, *keys):
        """Keys go to what has the focus; a key of more than one character is a chord."""
        actions = []
        for key in keys:
            actions += [{"type": "keyDown", "value": k} for k in key]
            actions += [{"type": "keyUp", "value": k} for k in reversed(key)]
        self.post("/actions", actions=[{"type": "key", "id": "keyboard", "actions": actions}])

    def point(self, selector):
        found = self.post("/element", using="css selector", value=selector)
        move = {"type": "pointerMove", "duration": 0, "x": 0, "y": 0,
                "origin": {ELEMENT: found[ELEMENT]}}
        self.post("/actions", actions=[{"type": "pointer", "id": "mouse", "actions": [move]}])

    def wait(self, script, *arguments, patience=PATIENCE):
        """What the script returns as soon as that is true in JavaScript's sense."""
        end = time.monotonic() + patience
        while time.monotonic() < end:
            if value := self.run(script, *arguments):
                return value
            time.sleep(0.05)
        raise AssertionError(f"in vain for {patience} s: {script}")

    def log(self, kind):
        """What was logged since the last call: browser (the console) or performance."""
        return self.call("POST", f"{self.session}/se/log", {"type": kind})

    def emulate(self, scheme="light", motion="no-preference", width=1360, height=900):
        features = [{"name": "prefers-color-scheme", "value": scheme},
                    {"name": "prefers-reduced-motion", "value": motion}]
        self.command("Emulation.setEmulatedMedia", features=features)
        self.command("Emulation.setDeviceMetricsOverride", width=width, height=height,
                     deviceScaleFactor=1, mobile=False)

    def screenshot(self, path, whole=False):
        taken = self.command("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(taken["data"]))
