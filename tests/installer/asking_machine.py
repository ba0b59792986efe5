"""A machine that asks the bootstrap host for its config, and pulls nothing."""

import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any

from tests.installer.pool_builds import InstallSite
from tests.provisioning.serving import fetch_config
from treenail.config.bootstrap_registry import MIRROR_FILE, RECORD_FILE

LIMIT_S = 120.0


@dataclass(slots=True)
class AskingMachine:
    """Asks for its config, and keeps every one that it got."""

    site: InstallSite
    port: int
    configs: set[str] = field(default_factory=set)
    _ended: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def run(self) -> Iterator[None]:
        thread = threading.Thread(target=self._ask, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join(LIMIT_S)

    def _ask(self) -> None:
        while not self._ended.wait(0.1):
            with suppress(OSError, HTTPException, ssl.SSLError):
                ca = self.site.directory.ca_certificate.read_bytes()
                status, config = fetch_config(self.port, ca, "/config/master")
                if status == 200:
                    self.configs.add(describe_config(config))


def describe_config(config: dict[str, Any]) -> str:
    """Return the config without the mirror, which only machines before the hand-over get."""
    files = {
        each["path"]: each["contents"]["source"]
        for each in config["storage"]["files"]
        if not each["path"].startswith(("/etc/containers/", "/etc/docker/"))
        and each["path"] not in (MIRROR_FILE, RECORD_FILE)
    }
    return json.dumps([files, config.get("systemd"), config.get("passwd")], sort_keys=True)
