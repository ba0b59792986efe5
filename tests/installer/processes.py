"""``treenail-controller install bootstrap`` as a process of its own, and a client of its server."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.installer.directories import make_config, make_pool, write_manifest
from tests.provisioning.serving import LIMIT_S, fetch_config
from tests.waiting import PATIENCE, wait_until
from treenail_lab.lifetime.fork_server import LabProcess, run_process

COMMAND = "import sys; from treenail.cli.controller.main import main; sys.exit(main())"
ADDRESS = re.compile(r"serving Ignition configs at https://127\.0\.0\.1:(\d+)/")


def make_directory(root: Path) -> Path:
    """Write an install directory with nothing to build."""
    write_manifest(root, "manifests/pools.yaml", make_pool("master"), make_pool("worker"))
    write_manifest(
        root,
        "manifests/configs.yaml",
        make_config("00-master", "master"),
        make_config("00-worker", "worker"),
    )
    return root


def run_install(*arguments: str | Path, limit_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    """Run a command of the group to its end."""
    return run_process(
        [sys.executable, "-c", COMMAND, "install", *map(str, arguments)],
        env=make_environment(),
        capture_output=True,
        text=True,
        timeout=limit_s * PATIENCE,
    )


def make_environment(**more: str) -> dict[str, str]:
    found = {name: value for name, value in os.environ.items() if name != "JOURNAL_STREAM"}
    return {**found, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **more}


class Bootstrapping:
    """The process, its log and its config server."""

    def __init__(self, process: "subprocess.Popen[bytes]", root: Path, log: Path) -> None:
        self.process = process
        self.root = root
        self.log = log

    @property
    def port(self) -> int:
        found = wait_until(lambda: ADDRESS.search(self.log.read_text()), limit_s=LIMIT_S)
        return int(found[1])

    @property
    def ca(self) -> bytes:
        return (self.root / ".treenail" / "ca.crt").read_bytes()

    def read_status(self) -> dict[str, Any]:
        return json.loads((self.root / ".treenail/status.json").read_text())

    def wait_for_status(self, **expected: object) -> dict[str, Any]:
        """Wait until the status has these values; return it."""

        def find() -> dict[str, Any] | None:
            path = self.root / ".treenail/status.json"
            found = self.read_status() if path.exists() else {}
            has_all = all(found.get(name) == value for name, value in expected.items())
            return found if has_all and self.log.exists() else None

        found = wait_until(find, limit_s=LIMIT_S)
        assert found is not None
        return found

    def fetch(self, path: str = "/config/master") -> tuple[int, dict[str, Any]]:
        return fetch_config(self.port, self.ca, path)

    def end(self, number: int) -> int:
        self.process.send_signal(number)
        return self.process.wait(LIMIT_S)


@contextmanager
def bootstrap(root: Path, *arguments: str, **environment: str) -> Iterator[Bootstrapping]:
    """Run the stage; its end kills the process."""
    log = root.parent / f"{root.name}-bootstrap.log"
    command = [
        *(sys.executable, "-c", COMMAND, "install", "bootstrap", f"--dir={root}"),
        *("--listen=127.0.0.1:0", "--host=localhost", *arguments),
    ]
    with log.open("wb") as output:
        process = LabProcess(
            command, env=make_environment(**environment), stdout=output, stderr=output
        )
    try:
        yield Bootstrapping(process, root, log)
    except BaseException:
        sys.stdout.write(log.read_text())
        raise
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(LIMIT_S)
