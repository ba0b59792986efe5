"""treenail's controller updates a node whose pod runs a real Machine Config Daemon."""

import base64
import gzip
import json
import os
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.controllers.hosted.conduct.site import open_management
from tests.controllers.hosted.conduct.test_controller_lab import install
from tests.controllers.hosted.in_place.test_controller_lab import ENABLE, open_own_site
from tests.controllers.hosted.in_place.world import CONFIG_MAP, HASHES, NAMESPACE
from tests.controllers.test_run import running
from tests.mco import programs
from tests.mco.daemon_machine import DaemonMachine
from tests.mco.operator import Json, build_config, build_file, build_ignition
from tests.waiting import wait_until
from treenail.api import annotations as key
from treenail.kube.resources import CONFIGMAPS, PODS
from treenail.kube.transport.kubeconfig import read_kubeconfig
from treenail_lab.lifetime.owner import owner

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(os.geteuid() != 0, reason="the daemon needs root"),
]
SERVED = "etc/mcs-machine-config-content.json"
DIRECTORY = "etc/machine-config-daemon-desired-config"
LIMIT_S = 120.0


def make_config(*files: Json) -> str:
    """Return a rendered MachineConfig, as the server writes it to a machine."""
    ignition = build_ignition(storage={"files": [*files]})
    return json.dumps(build_config("worker", "rendered-worker", config=ignition))


def make_payload(config: str) -> str:
    ignition = build_ignition(storage={"files": [build_file(f"/{SERVED}", config)]})
    return base64.b64encode(gzip.compress(json.dumps(ignition).encode())).decode()


def test_daemon_is_updated_by_treenail(tmp_path: Path) -> None:
    program = programs.DAEMON.read()
    base = build_file("/etc/treenail-test/base", "base\n")
    with (
        open_management(tmp_path / "management") as (server, client),
        open_own_site(client, tmp_path / "guest", 1, has_control_plane=False) as (site, guest),
        owner.temporary_directory() as directory,
    ):
        install(server, "clusters-one")
        site.set_service("m0", None)
        port = urlsplit(read_kubeconfig(str(guest.admin_kubeconfig)).server).port or 0
        machine = DaemonMachine(
            program, directory, "m0", kubeconfig=guest.admin_kubeconfig, port=port,
            argument=f"--desired-configmap=/{DIRECTORY}",
        )  # fmt: skip
        (machine.root / SERVED).write_text(make_config(base))
        (machine.root / "etc/treenail-test").mkdir()
        (machine.root / "etc/treenail-test/base").write_text("base\n")
        guest_client = site.apis[1].client

        def has_pod() -> bool:
            return bool(guest_client.list(PODS, namespace=NAMESPACE).items)

        try:
            target = HASHES[0]
            added = build_file("/etc/treenail-test/a", "a\n", 0o600)
            site.set_config(target, payload=make_payload(make_config(base, added)))
            with running(server.admin_kubeconfig, tmp_path / "one.log", *ENABLE):
                wait_until(has_pod, limit_s=LIMIT_S)
                found = guest_client.get(CONFIGMAPS, CONFIG_MAP, namespace=NAMESPACE)
                (machine.root / DIRECTORY).mkdir()
                for name, text in found["data"].items():  # type: ignore[attr-defined]
                    (machine.root / DIRECTORY / name).write_text(text)
                machine.start()
                wait_until(
                    lambda: site.is_updated(target) and site.is_namespace_gone(), limit_s=LIMIT_S
                )
            assert (machine.root / "etc/treenail-test/a").read_text() == "a\n"
            notes = site.notes("m0")
            assert notes[key.CURRENT_CONFIG] == notes[key.DESIRED_CONFIG] == target
            assert notes[key.STATE] == "Done"
            assert notes[key.LAST_APPLIED_DRAIN] == f"uncordon-{target}"
            assert not site.nodes()["m0"].unschedulable
        except BaseException:
            sys.stdout.write(f"{site.notes('m0')}\n")
            if machine.log.exists():
                sys.stdout.write(machine.log.read_text("utf-8", "replace")[-8000:])
            raise
        finally:
            machine.stop()
