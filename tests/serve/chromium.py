"""A headless Chromium, driven by its DevTools protocol over a pipe: open, ask, click, picture."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
WIDTH, HEIGHT = 1280, 900
"""CSS pixels of the page."""
PATIENCE = 30.0
"""Seconds within which the browser answers a command."""


def find_browser() -> str | None:
    """The first Chromium in PATH."""
    return next((path for name in BROWSERS if (path := shutil.which(name))), None)


class BrowserError(Exception):
    """An error of the browser or of a script in a page."""


class Chromium:
    """One page of a browser that ends with the `with` block."""

    def __init__(self, program: str) -> None:
        """Start a browser with an empty page."""
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        (theirs, self._to), (self._from, theirs_back) = os.pipe(), os.pipe()
        self._process = subprocess.Popen(
            # The protocol's pipes are 3 and 4 there, whatever numbers they have here.
            [
                "bash", "-c", f'exec "$@" 3<&{theirs} 4>&{theirs_back}', "bash", program,
                "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                "--no-first-run", "--disable-dev-shm-usage", "--disable-background-networking",
                f"--user-data-dir={self._profile.name}", "--remote-debugging-pipe",
            ],
            pass_fds=(theirs, theirs_back),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(theirs)
        os.close(theirs_back)
        self._numbers = 0
        self._rest = b""
        self._session: str | None = None
        self.errors: list[str] = []
        """What pages complained of: exceptions, and resources that did not come."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        size = {"width": WIDTH, "height": HEIGHT, "deviceScaleFactor": 1}
        self.call("Emulation.setDeviceMetricsOverride", **size, mobile=False)
        scheme = [{"name": "prefers-color-scheme", "value": "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)

    def __enter__(self) -> Chromium:
        return self

    def __exit__(self, *raised: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._to)
        os.close(self._from)
        self._profile.cleanup()

    # -- the page --------------------------------------------------------------------------------

    def open(self, url: str) -> None:
        """Open a page and wait until it is loaded."""
        self.call("Page.navigate", url=url)
        self.wait(f"document.readyState === 'complete' && location.href === {json.dumps(url)}")

    def evaluate(self, script: str) -> Any:
        """What an expression is in the page."""
        done = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        if "exceptionDetails" in done:
            raise BrowserError(f"{script}: {_complaint(done['exceptionDetails'])}")
        return done["result"].get("value")

    def wait(self, script: str, seconds: float = PATIENCE) -> None:
        """Until an expression is true."""
        until = time.monotonic() + seconds
        while not self.evaluate(f"Boolean({script})"):
            if time.monotonic() > until:
                raise BrowserError(f"not true within {seconds:g} s: {script}; {self.errors}")
            time.sleep(0.02)

    def click(self, selector: str) -> None:
        """Press and release the mouse in the middle of an element, scrolled to if need be."""
        x, y = self.evaluate(f"""(() => {{
            const element = document.querySelector({json.dumps(selector)});
            element.scrollIntoView({{block: "center"}});
            const box = element.getBoundingClientRect();
            return [box.x + box.width / 2, box.y + box.height / 2];
        }})()""")
        button: dict[str, Any] = {"x": x, "y": y, "button": "left", "clickCount": 1}
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, **button)

    def type(self, selector: str, text: str) -> None:
        """Replace the content of a field."""
        self.evaluate(f"document.querySelector({json.dumps(selector)}).select()")
        self.call("Input.insertText", text=text)

    def picture(self, path: Path) -> None:
        """The whole page as a PNG."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        shot = self.call(
            "Page.captureScreenshot",
            format="png",
            captureBeyondViewport=True,
            clip={"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1},
        )
        path.write_bytes(base64.b64decode(shot["data"]))

    # -- the protocol ----------------------------------------------------------------------------

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command of the protocol; returns its result."""
        self._numbers += 1
        message: dict[str, Any] = {"id": self._numbers, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            heard = self._read(method)
            if heard.get("id") == self._numbers:
                break
            self._note(heard)
        if "error" in heard:
            raise BrowserError(f"{method}: {heard['error']['message']}")
        return heard["result"]

    def _read(self, method: str) -> dict[str, Any]:
        until = time.monotonic() + PATIENCE
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._from], [], [], max(until - time.monotonic(), 0))
            part = os.read(self._from, 1 << 20) if ready else b""
            if not part:
                raise BrowserError(f"{method}: the browser does not answer")
            self._rest += part
        message, self._rest = self._rest.split(b"\0", 1)
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event["method"] == "Runtime.exceptionThrown":
            self.errors.append(_complaint(params["exceptionDetails"]))
        elif event["method"] == "Log.entryAdded" and params["entry"]["level"] == "error":
            entry = params["entry"]
            self.errors.append(f"{entry['text']} {entry.get('url', '')}".strip())


def _complaint(details: dict[str, Any]) -> str:
    exception = details.get("exception", {})
    return str(exception.get("description") or details.get("text"))
