"""What the tests of `morphkv serve` share: the process, plain HTTP, and sockets for bad clients.

Standard library only.
"""

import http.client
import json
import os
import re
import select
import signal
import socket
import struct
import subprocess
import tempfile
import time

PATIENCE = 300  # seconds; the machine may be busy
FILLER = "The quick brown fox walks along the river and looks at the boats. "  # 14 tokens


class Reply:
    def __init__(self, status, headers, body):
        self.status, self.headers, self.body = status, headers, body

    @property
    def json(self):
        return json.loads(self.body)

    @property
    def error(self):
        return self.json["error"]


class Server:
    """A process of `morphkv serve` on a free port."""

    def __init__(self, tool, model, *options, threads=1):
        self.log = tempfile.TemporaryFile()
        command = [tool, "serve", "-m", model, "--port", "0", *options]
        if not {"-t", "--threads"} & set(options):
            command += ["-t", str(threads)]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL,
                                        stdout=subprocess.DEVNULL, stderr=self.log)
        self.port = self._wait_for_port()
        self.url = f"http://127.0.0.1:{self.port}"

    def errors(self):
        size = os.fstat(self.log.fileno()).st_size
        return os.pread(self.log.fileno(), size, 0).decode("utf-8", "replace")

    def _wait_for_port(self):
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            found = re.search(r"listening on http://\S+:(\d+),", self.errors())
            if found:
                return int(found[1])
            if self.process.poll() is not None:
                break
            time.sleep(0.05)
        self.kill()
        raise RuntimeError(f"the server did not start:\n{self.errors()}")

    def kill(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def close(self):
        self.kill()
        self.log.close()

    def terminate(self, patience=PATIENCE):
        """SIGTERM; returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(patience)

    def call(self, method, path, body=None, headers=None, patience=PATIENCE):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=patience)
        try:
            if body is not None and not isinstance(body, (bytes, str)):
                body = json.dumps(body)
            headers = {"Content-Type": "application/json", "Connection": "close"} | (headers or {})
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            return Reply(response.status, response.headers, response.read())
        finally:
            connection.close()

    def get(self, path, **options):
        return self.call("GET", path, **options)

    def post(self, path, body, **options):
        return self.call("POST", path, body, **options)

    def slots(self):
        return self.get("/slots").json

    def metrics(self):
        lines = self.get("/metrics").body.decode().splitlines()
        pairs = [line.rsplit(" ", 1) for line in lines if line and line[0] != "#"]
        return {name.removeprefix("morphkv_"): float(value) for name, value in pairs}

    def wait_until(self, condition, patience):
        """Seconds until `condition` held, or None."""
        begin = time.monotonic()
        while time.monotonic() - begin < patience:
            if condition():
                return time.monotonic() - begin
            time.sleep(0.02)
        return None

    def wait_idle(self, patience):
        def idle():
            metrics = self.metrics()
            return metrics["slots_busy"] == 0 and metrics["requests_waiting"] == 0
        return self.wait_until(idle, patience)

    def memory(self, name):
        """A line of /proc/PID/status as a number: VmRSS and VmHWM in kB, Threads."""
        with open(f"/proc/{self.process.pid}/status", encoding="ascii") as file:
            return int(re.search(rf"^{name}:\s+(\d+)", file.read(), re.M)[1])

    def open_files(self):
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def raw(self, patience=PATIENCE):
        return Raw(self.port, patience)


class Raw:
    """A connection that sends whatever it likes."""

    def __init__(self, port, patience):
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=patience)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()

    def send(self, data):
        self.socket.sendall(data)

    def send_json(self, path, body):
        data = json.dumps(body).encode()
        self.send(b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                  b"Content-Length: %d\r\n\r\n" % (path.encode(), len(data)) + data)

    def status(self):
        """Of the reply; None when the connection ended without one."""
        data = b""
        try:
            while b"\r\n" not in data:
                piece = self.socket.recv(4096)
                if not piece:
                    return None
                data += piece
        except ConnectionError:
            return None
        return int(data.split()[1])

    def has_data(self, patience):
        return bool(select.select([self.socket], [], [], patience)[0])

    def leave(self, reset=False):
        if reset:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()


def events(body):
    """The data of server-sent events: JSON, and True for the end mark."""
    out = []
    for event in body.decode("utf-8").split("\n\n"):
        if event:
            data = event.removeprefix("data: ")
            out.append(True if data == "[DONE]" else json.loads(data))
    return out
