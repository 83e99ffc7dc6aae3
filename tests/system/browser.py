"""A headless Chromium, driven by its DevTools protocol over a pair of pipes; no package is needed for that."""

from __future__ import annotations

import base64
import json
import os
import select
import subprocess
import time
from pathlib import Path
from typing import Any

_ANSWER_WITHIN_S = 60.0
_FLAGS = (
    "--headless=new",
    "--no-sandbox",  # root, in containers too
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)


class Browser:
    """One browser, started once; close it."""

    def __init__(self, folder: Path) -> None:
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        # The protocol reads file descriptor 3 and writes 4, whatever they are here.
        program = f'exec chromium "$@" 3<&{to_browser} 4>&{from_browser}'
        self._log = (folder / "chromium.log").open("wb")
        self._process = subprocess.Popen(
            ["bash", "-c", program, "chromium", *_FLAGS, f"--user-data-dir={folder / 'profile'}", "about:blank"],
            pass_fds=(to_browser, from_browser),
            stdout=self._log,
            stderr=self._log,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._rest = b""
        self._number = 0
        self._events: list[dict[str, Any]] = []

    def close(self) -> None:
        """End the browser."""
        os.close(self._out)
        os.close(self._in)
        self._process.kill()
        self._process.wait()
        self._log.close()

    def send(self, method: str, session: str | None = None, /, **parameters: Any) -> dict[str, Any]:
        """One command and its answer; events that come before it are kept."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        os.write(self._out, json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0")
        deadline = time.monotonic() + _ANSWER_WITHIN_S
        while True:
            answer = self._receive(deadline)
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result
            self._events.append(answer)

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], max(deadline - time.monotonic(), 0.0))
            assert ready, "the browser does not answer"
            read = os.read(self._in, 1 << 20)
            assert read, f"the browser has ended: {Path(self._log.name).read_text(errors='replace')[-2000:]}"
            self._rest += read
        message, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def take_events(self, session: str) -> list[dict[str, Any]]:
        """The events of a page since the last call."""
        own = [event for event in self._events if event.get("sessionId") == session]
        self._events = [event for event in self._events if event.get("sessionId") != session]
        return own


class Page:
    """One tab."""

    def __init__(self, browser: Browser, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        self._browser = browser
        target = browser.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = browser.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._target = target
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the protocol to this tab."""
        return self._browser.send(method, self._session, **parameters)

    def open(self, address: str, ready: str = "document.body && document.body.dataset.ready === '1'") -> None:
        """Go there and wait until the page is drawn."""
        self.send("Page.navigate", url=address)
        self.wait(ready)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, awaited."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, expression: str, within_s: float = 60.0) -> None:
        """Wait until a JavaScript expression holds."""
        deadline = time.monotonic() + within_s
        while not self.evaluate(f"Boolean({expression})"):
            assert time.monotonic() < deadline, f"{expression} does not come true; {self.complaints()}"
            time.sleep(0.1)

    def complaints(self) -> list[str]:
        """Errors and warnings on the console and uncaught exceptions since last asked."""
        self.evaluate("1")  # takes in what has come so far
        found = []
        for event in self._browser.take_events(self._session):
            parameters = event["params"]
            if event["method"] == "Runtime.exceptionThrown":
                found.append(json.dumps(parameters["exceptionDetails"]))
            elif event["method"] == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
                found.append(json.dumps(parameters["args"]))
            elif event["method"] == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
                found.append(json.dumps(parameters["entry"]))
        return found

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        """A picture of the page, down to its end."""
        size = self.send("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        picture = self.send("Page.captureScreenshot", captureBeyondViewport=whole, **({"clip": clip} if whole else {}))
        path.write_bytes(base64.b64decode(picture["data"]))

    def close(self) -> None:
        """Close the tab."""
        self._browser.send("Target.closeTarget", targetId=self._target)
