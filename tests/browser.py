"""A headless Chromium, driven through its remote debugging protocol: what a person sees, clicks and reads.

Debian's browser and the websocket client that comes with Ray's dashboard are enough: no driver has to be installed.
"""

from __future__ import annotations

import asyncio
import base64
import json
import re
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import aiohttp

CHROMIUM = (
    shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")
)
START_S, CALL_S = 60.0, 60.0


class PageError(AssertionError):
    """What a script in the page raised."""


class Browser:
    """One browser with one page.

    Args:
        profile: an empty folder for what it keeps.
    """

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        profile.mkdir(parents=True)
        self._log = profile / "chromium.log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run",
                 "--disable-dev-shm-usage", "--no-proxy-server", "--disable-background-networking", "--hide-scrollbars",
                 "--remote-debugging-port=0", f"--user-data-dir={profile / 'data'}", "about:blank"],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        self._loop = asyncio.new_event_loop()
        self._number, self._http, self._socket, self._session = 0, None, None, ""
        self.errors: list[str] = []
        try:
            self._loop.run_until_complete(self._connect(self._address()))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the browser."""
        self.process.terminate()
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._loop.run_until_complete(self._disconnect())
        self._loop.close()

    # ---- what a person does ---------------------------------------------------------------------

    def open(self, url: str) -> None:
        """Goes to a page."""
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def size(self, width: int, height: int, *, phone: bool = False) -> None:
        """Sets the window's size, pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone
        )  # fmt: skip

    def scheme(self, name: str) -> None:
        """Light or dark, as the person prefers."""
        feature = {"name": "prefers-color-scheme", "value": name}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def cookie(self, url: str, name: str, value: str) -> None:
        """Is signed in."""
        self.call("Network.setCookie", url=url, name=name, value=value)

    def click(self, selector: str) -> None:
        """Clicks the first element that fits."""
        self.js(f"document.querySelector({json.dumps(selector)}).click()")

    # ---- what a person sees ---------------------------------------------------------------------

    def js(self, expression: str) -> Any:
        """The value of an expression in the page; of a promise, what came of it."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise PageError(json.dumps(answer["exceptionDetails"])[:2000])
        return answer["result"].get("value")

    @property
    def text(self) -> str:
        """All that can be read on the page."""
        return str(self.js("document.body ? document.body.innerText : ''"))

    def wait(self, expression: str, timeout_s: float = 30.0) -> Any:
        """Waits until an expression holds; what it gave then."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                # An element as a value is an empty object.
                if value := self.js(f"(v => v instanceof Node ? true : v)({expression})"):
                    return value
            except PageError:
                pass  # the page is just loading
            if time.monotonic() > deadline:
                raise AssertionError(
                    f"{expression!r} did not hold within {timeout_s:g} s; the page says:\n{self.text[:4000]}"
                )
            time.sleep(0.1)

    def wait_text(self, text: str, timeout_s: float = 30.0) -> None:
        """Waits until something can be read on the page."""
        self.wait(f"document.body.innerText.includes({json.dumps(text)})", timeout_s)

    def shot(self, path: Path, *, whole: bool = True) -> None:
        """Takes a picture of the page, from top to bottom."""
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        if whole:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
            answer = self.call(
                "Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip
            )
        path.write_bytes(base64.b64decode(answer["data"]))

    # ---- the protocol ---------------------------------------------------------------------------

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Calls a method of the protocol in the page."""
        return self._loop.run_until_complete(
            asyncio.wait_for(self._call(method, self._session, params), CALL_S)
        )

    def _address(self) -> str:
        deadline = time.monotonic() + START_S
        while True:
            said = self._log.read_text(errors="replace")
            if found := re.search(r"DevTools listening on (ws://\S+)", said):
                return found[1]
            assert self.process.poll() is None, said[-3000:]
            assert time.monotonic() < deadline, said[-3000:]
            time.sleep(0.05)

    async def _connect(self, address: str) -> None:
        self._http = aiohttp.ClientSession()
        self._socket = await self._http.ws_connect(address, max_msg_size=0, proxy=None)
        target = await self._call("Target.createTarget", "", {"url": "about:blank"})
        attached = await self._call(
            "Target.attachToTarget", "", {"targetId": target["targetId"], "flatten": True}
        )
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network"):
            await self._call(f"{domain}.enable", self._session, {})

    async def _disconnect(self) -> None:
        if self._socket is not None:
            await self._socket.close()
        if self._http is not None:
            await self._http.close()

    async def _call(self, method: str, session: str, params: dict[str, Any]) -> dict[str, Any]:
        assert self._socket is not None
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        await self._socket.send_json(message)
        while True:
            answer = json.loads((await self._socket.receive()).data)
            if answer.get("method") == "Runtime.exceptionThrown":
                self.errors.append(json.dumps(answer["params"])[:2000])
            if answer.get("id") == message["id"]:
                assert "error" not in answer, f"{method}: {answer.get('error')}"
                return dict(answer["result"])
