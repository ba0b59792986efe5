"""``treenail-controller serve`` as a process of its own."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.provisioning.samples import Json
from tests.provisioning.serving import LIMIT_S, fetch_config, write_certificate
from tests.waiting import wait_until
from treenail_lab.apiserver.access.certificates import CertificateAuthority
from treenail_lab.lifetime.fork_server import LabProcess

COMMAND = "import sys; from treenail.cli.controller.main import main; sys.exit(main())"
ADDRESS = re.compile(r"serving Ignition configs at https://127\.0\.0\.1:(\d+)/")


class Running:
    """The process, its log and its port."""

    def __init__(self, process: "subprocess.Popen[bytes]", log: Path, ca: bytes) -> None:
        self.process = process
        self.log = log
        self.ca = ca
        address = wait_until(lambda: ADDRESS.search(log.read_text()), limit_s=LIMIT_S)
        self.port = int(address[1])

    def fetch(self, pool: str = "worker", token: str = "") -> tuple[int, Json]:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        return fetch_config(self.port, self.ca, f"/config/{pool}", **headers)


@contextmanager
def run_server(directory: Path, *arguments: str, **more: str) -> Iterator[Running]:
    authority = CertificateAuthority(directory)
    certificate, log = directory / "serving.pem", directory / "serve.log"
    write_certificate(authority, certificate)
    command = [
        *(sys.executable, "-c", COMMAND, "serve", "--listen=127.0.0.1:0"),
        *(f"--certificate={certificate}", f"--key={certificate}", "--metrics=127.0.0.1:0"),
        *arguments,
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **more}
    with log.open("wb") as output:
        process = LabProcess(command, env=environment, stdout=output, stderr=output)
    try:
        yield Running(process, log, authority.pem)
    except BaseException:
        sys.stdout.write(log.read_text())
        raise
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(LIMIT_S)
