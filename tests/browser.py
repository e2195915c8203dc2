"""A headless Chromium that a test can click in, through its debugging pipe: no package needed."""

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-sync"
FLAGS += " --disable-component-update --disable-quic --hide-scrollbars --remote-debugging-pipe"
PATIENCE = 60  # seconds


class Browser:
    """One page. `console` holds what it complained of."""

    def __init__(self, profile: Path, *, width: int = 1280, height: int = 900):
        there, here = os.pipe(), os.pipe()
        command = [str(CHROMIUM), *FLAGS.split(), f"--user-data-dir={profile}", "about:blank"]
        # Chromium reads commands from 3 and answers on 4: numbers that dup2 gives them after the fork.
        wire = f'exec 3<&{there[0]} 4>&{here[1]}; exec "$@"'
        self.process = subprocess.Popen(
            ["bash", "-c", wire, "bash", *command], pass_fds=(there[0], here[1]), stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(there[0]), os.close(here[1])
        self._out, self._in = there[1], os.fdopen(here[0], "rb")
        self._next, self._session, self.console = 0, None, []
        page = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.ask(f"{domain}.enable")
        self.resize(width, height)

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._out)
        self._in.close()

    def ask(self, method: str, **parameters: Any) -> dict:
        """A command of the DevTools protocol, and its result."""
        self._next += 1
        message = {"id": self._next, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            found = self._read()
            if found.get("id") == self._next:
                assert "error" not in found, found
                return found["result"]
            if found.get("method") in ("Runtime.consoleAPICalled", "Log.entryAdded", "Runtime.exceptionThrown"):
                self.console.append(json.dumps(found["params"]))

    def _read(self) -> dict:
        text = bytearray()
        while (byte := self._in.read(1)) != b"\0":
            assert byte, "the browser has gone"
            text += byte
        return json.loads(text)

    def resize(self, width: int, height: int, *, phone: bool = False) -> None:
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)

    def prefer(self, **features: str) -> None:
        """Media features, such as prefers_color_scheme="dark"."""
        wanted = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        self.ask("Emulation.setEmulatedMedia", features=wanted)

    def open(self, page: Path) -> None:
        self.ask("Page.navigate", url=page.as_uri())
        self.wait("document.readyState == 'complete' && document.body.dataset.media")

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression in the page."""
        found = self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, script: str) -> Any:
        """Until an expression is true."""
        until = time.monotonic() + PATIENCE
        while not (found := self.run(script)):
            assert time.monotonic() < until, f"never came: {script}"
            time.sleep(0.05)
        return found

    def click(self, selector: str, *, along: float = 0.5) -> None:
        """A real click on an element, at this part of its width."""
        query = f"document.querySelector({json.dumps(selector)})"
        box = self.run(
            f"(() => {{ {query}.scrollIntoView({{block: 'center'}}); const b = {query}.getBoundingClientRect();"
            " return [b.x, b.y, b.width, b.height] })()"
        )
        where = {"x": box[0] + along * box[2], "y": box[1] + box[3] / 2, "button": "left", "clickCount": 1}
        for kind in ("mousePressed", "mouseReleased"):
            self.ask("Input.dispatchMouseEvent", type=kind, **where)

    def press(self, *keys: str) -> None:
        """Real keys, by their names in KeyboardEvent.key."""
        for key in keys:
            text = {"text": key} if len(key) == 1 else {}
            code = {" ": 32, "ArrowLeft": 37, "ArrowRight": 39, "Home": 36, "End": 35, "Backspace": 8}.get(
                key, ord(key[0].upper())
            )
            for kind in ("keyDown", "keyUp"):
                more = text if kind == "keyDown" else {}
                self.ask("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **more)

    def enter(self) -> None:
        """The Enter key, which presses the button that has the focus."""
        for kind, more in (("keyDown", {"text": "\r"}), ("keyUp", {})):
            self.ask("Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", windowsVirtualKeyCode=13, **more)

    def picture(self, file: Path, *, clip: Sequence[float] | None = None) -> None:
        """A PNG of the whole page, or of (x, y, width, height)."""
        x, y, width, height = clip or (0, 0, *self.run("[document.body.clientWidth, document.body.scrollHeight]"))
        area = {"x": x, "y": y, "width": width, "height": height, "scale": 1}
        data = self.ask("Page.captureScreenshot", captureBeyondViewport=True, clip=area)["data"]
        file.write_bytes(base64.b64decode(data))
