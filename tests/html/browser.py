"""A headless Chromium, driven over its own debugging protocol through two pipes.

Nothing is downloaded and nothing listens on a port. The browser is the one that
JFLEET_BROWSER names, or the first of NAMES on the path.
"""

import base64
import contextlib
import json
import os
import pathlib
import select
import shutil
import signal
import subprocess
import sys
import time

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    *(
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
    ),
    *("--disable-background-networking", "--disable-component-update"),
    *("--disable-sync", "--disable-extensions", "--hide-scrollbars"),
    "--remote-debugging-pipe",
)
TIMEOUT_SECS = 60
# Puts the pipes where the browser looks for them, then becomes the browser.
_START = """
import fcntl, os, sys
out_of_the_way = [fcntl.fcntl(int(n), fcntl.F_DUPFD, 10) for n in sys.argv[1:3]]
os.dup2(out_of_the_way[0], 3)
os.dup2(out_of_the_way[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


def find() -> str:
    """Return the path of the browser.

    Raises:
        FileNotFoundError: there is none.
    """
    for name in (os.environ.get("JFLEET_BROWSER"), *NAMES):
        path = shutil.which(name) if name else None
        if path:
            return path
    raise FileNotFoundError(
        "the pages are tested in a real browser and none is here: install Chromium"
        " (Debian: apt-get install chromium), or name one in JFLEET_BROWSER"
    )


class Browser:
    """One tab of a headless browser; a context manager."""

    def __init__(self, profile: pathlib.Path):
        self._profile = profile
        self._number = 0
        self._buffer = b""
        self.problems: list[str] = []
        """What the console or the log complained of, and uncaught errors."""
        self.requests: list[str] = []
        """Every address that was asked for."""

    def __enter__(self):
        from_us, self._write = os.pipe()
        self._read, to_us = os.pipe()
        command = [find(), *FLAGS, f"--user-data-dir={self._profile}", "about:blank"]
        start = [sys.executable, "-I", "-S", "-c", _START, str(from_us), str(to_us)]
        self._process = subprocess.Popen(
            [*start, *command],
            pass_fds=(from_us, to_us),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            process_group=0,
        )
        os.close(from_us)
        os.close(to_us)
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *_):
        with contextlib.suppress(Exception):
            self._send("Browser.close", {}, None)
            self._process.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._read)
        os.close(self._write)

    def call(self, method, **params):
        """Call a method of the protocol for this tab."""
        return self._call(method, session=self._session, **params)

    def open(self, page: pathlib.Path, *, width=1100, height=900, scheme="light"):
        """Show a file in a window of this size, and wait until it is there."""
        self.problems.clear()
        self.requests.clear()
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)
        url = page.resolve().as_uri()
        self.call("Page.navigate", url=url)
        end = time.monotonic() + TIMEOUT_SECS
        ready = "document.readyState === 'complete' && location.href"
        while self.value(ready) != url:
            assert time.monotonic() < end, f"{url} was not loaded"

    def value(self, expression):
        """Evaluate JavaScript."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def press(self, key):
        """Press and release a key."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def screenshot(self, path: pathlib.Path):
        """Save the whole page as a picture."""
        found = self.call(
            "Page.captureScreenshot", format="png", captureBeyondViewport=True
        )
        path.write_bytes(base64.b64decode(found["data"]))

    def _call(self, method, session=None, **params):
        number = self._send(method, params, session)
        end = time.monotonic() + TIMEOUT_SECS
        while True:
            message = self._receive(end)
            if message.get("id") == number:
                assert "error" not in message, f"{method}: {message['error']}"
                return message["result"]
            self._note(message)

    def _send(self, method, params, session):
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        return self._number

    def _receive(self, end):
        while b"\0" not in self._buffer:
            left = end - time.monotonic()
            ready, _, _ = select.select([self._read], [], [], max(left, 0))
            assert ready, "the browser does not answer"
            data = os.read(self._read, 1 << 20)
            assert data, f"the browser ended with code {self._process.poll()}"
            self._buffer += data
        text, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(text)

    def _note(self, message):
        params = message.get("params", {})
        match message.get("method"):
            case "Runtime.consoleAPICalled":
                values = [str(a.get("value")) for a in params["args"]]
                self.problems.append(f"console: {' '.join(values)}")
            case "Runtime.exceptionThrown":
                self.problems.append(f"uncaught: {params['exceptionDetails']}")
            case "Log.entryAdded":
                self.problems.append(f"log: {params['entry']['text']}")
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
