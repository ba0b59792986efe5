"""Chromium without a window, controlled through a pipe (the DevTools protocol)."""

import base64
import fcntl
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any, Self

Json = dict[str, Any]

BROWSER = "TREENAIL_TEST_BROWSER"
"""Variable with the path of a Chromium."""
_ARGUMENTS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-first-run",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    # As root, which tests in containers are, it does not start with its sandbox.
    "--no-sandbox",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)


class Browser:
    """One page; use it as a context manager."""

    def __init__(self, program: str, profile: Path) -> None:
        commands_read, self._commands = _open_pipe()
        self._answers, answers_write = _open_pipe()

        def place_pipes() -> None:
            # The protocol is spoken on file descriptors 3 and 4.
            os.dup2(commands_read, 3)
            os.dup2(answers_write, 4)

        self._process = subprocess.Popen(
            [program, *_ARGUMENTS, f"--user-data-dir={profile}"],
            preexec_fn=place_pipes,  # noqa: PLW1509  # two system calls, no lock
            # All other descriptors of Python are closed by exec.
            close_fds=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(commands_read)
        os.close(answers_write)
        self._number = 0
        self._buffer = b""
        self._session = ""
        self.problems: list[str] = []
        """Errors of scripts, and what the content security policy refused."""

    def __enter__(self) -> Self:
        try:
            self._attach()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _attach(self) -> None:
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Accessibility"):
            self.send(f"{domain}.enable")

    def __exit__(self, *_: object) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._commands)
        os.close(self._answers)

    def open(self, address: str, *, width: int, height: int, scheme: str = "light") -> None:
        """Open a page of this size, and wait for its pools."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height,
                  deviceScaleFactor=1, mobile=False)  # fmt: skip
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.send("Emulation.setEmulatedMedia", features=features)
        self.send("Page.navigate", url=address)
        self.evaluate("""new Promise(resolve => (function look() {
            document.querySelector('#pools > *, #problem:not(:empty)') ? resolve(true)
                : setTimeout(look, 20);
        })())""")

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression, awaited."""
        found = self.send("Runtime.evaluate", expression=expression, awaitPromise=True,
                          returnByValue=True)  # fmt: skip
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def press(self, key: str, text: str = "") -> None:
        codes = {"Tab": 9, "Enter": 13, " ": 32}
        more: Json = {"windowsVirtualKeyCode": codes.get(key, 0)}
        self.send("Input.dispatchKeyEvent", type="keyDown", key=key, text=text, **more)
        self.send("Input.dispatchKeyEvent", type="keyUp", key=key, **more)

    def take_picture(self, path: Path) -> None:
        found = self.send("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(found["data"]))

    def list_accessible(self) -> set[tuple[str, str]]:
        """Role and name of everything that a screen reader reads."""
        nodes = self.send("Accessibility.getFullAXTree")["nodes"]
        return {
            (node["role"]["value"], node.get("name", {}).get("value", ""))
            for node in nodes
            if not node["ignored"]
        }

    def send(self, method: str, **parameters: Any) -> Json:
        """Send a command; return its result."""
        self._number += 1
        message: Json = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read_message()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return dict(answer["result"])
            if answer.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.problems.append(json.dumps(answer["params"]))

    def _read_message(self) -> Json:
        while b"\0" not in self._buffer:
            data = os.read(self._answers, 1 << 20)
            assert data, "the browser ended"
            self._buffer += data
        text, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(text))


def _open_pipe() -> tuple[int, int]:
    """A pipe whose ends are none of the first descriptors."""
    ends = os.pipe()
    high = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends]
    for end in ends:
        os.close(end)
    return high[0], high[1]
