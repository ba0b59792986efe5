"""treenail's controllers render, assign and drain; the real machine-config-daemon obeys."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.client import Cluster
from tests.mco import operator, programs
from tests.mco.daemon_machine import DaemonMachine
from tests.mco.nodes import create_node, report_ready
from tests.mco.operator import MCO, build_file, build_ignition
from tests.realcluster import RealCluster, RealClusterError, find_programs
from tests.waiting import wait_until
from treenail.api import annotations as key
from treenail.daemon.configuration.mcd_state import FIRST_BOOT_ANNOTATIONS
from treenail.manifests import installation
from treenail_lab.controllers import CONTROLLER_COMMAND
from treenail_lab.lifetime.owner import owner

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(os.geteuid() != 0, reason="the daemon needs root"),
]

NODE, POOL = "n1", "worker"
PATH = f"{MCO}/machineconfigpools/{POOL}"
LIMIT_S = 240.0


class Site:
    """The cluster, and the node with the daemon."""

    def __init__(self, server: RealCluster, directory: Path) -> None:
        self.cluster = Cluster.of_kubeconfig(server.kubeconfig)
        self._server, self._directory = server, directory
        self._controllers: subprocess.Popen[bytes] | None = None
        self.log = directory / "treenail-controller.log"

    def start(self, program: Path) -> None:
        self.cluster.post("/api/v1/namespaces", {"metadata": {"name": "treenail"}}).ok()
        self.cluster.post(f"{MCO}/machineconfigpools", operator.build_pool(POOL)).ok()
        self.apply("00-base", files=[build_file("/etc/treenail-test/base", "base\n")])
        self._start_controllers()
        target = wait_until(self.read_target, limit_s=LIMIT_S)
        create_node(self.cluster, NODE, POOL)
        report_ready(self.cluster, NODE, is_ready=True, boot_id="")
        self.machine = DaemonMachine(
            program,
            self._directory / NODE,
            NODE,
            kubeconfig=self._server.kubeconfig,
            port=self._server.port,
        )
        self._provision(target)
        self.machine.start()

    def stop(self) -> None:
        if hasattr(self, "machine"):
            self.machine.stop()
        if self._controllers is not None:
            self._controllers.terminate()
            try:
                self._controllers.wait(30.0)
            except subprocess.TimeoutExpired:
                self._controllers.kill()
                self._controllers.wait()

    def apply(self, name: str, *, files: list[operator.Json]) -> None:
        """Create a MachineConfig of the pool."""
        config = build_ignition(storage={"files": files})
        document = operator.build_config(POOL, name, config=config)
        self.cluster.post(f"{MCO}/machineconfigs", document).ok()

    def read_target(self) -> str:
        spec = self.cluster.get(PATH).ok()["spec"]
        return str(spec.get("configuration", {}).get("name", ""))

    def read_notes(self) -> dict[str, str]:
        node = self.cluster.get(f"/api/v1/nodes/{NODE}").ok()
        found: dict[str, str] = node["metadata"].get("annotations") or {}
        return found

    def is_updated(self, target: str) -> bool:
        """Return whether node and pool report the target, and the node is in service."""
        node = self.cluster.get(f"/api/v1/nodes/{NODE}").ok()
        notes = node["metadata"].get("annotations") or {}
        conditions = self.cluster.get(PATH).ok().get("status", {}).get("conditions") or []
        return (
            notes.get(key.STATE) == "Done"
            and notes.get(key.CURRENT_CONFIG) == target
            and not node["spec"].get("unschedulable")
            and {each["type"]: each["status"] for each in conditions}.get("Updated") == "True"
        )

    def wait_updated(self, before: str) -> str:
        """Wait until the pool has another target than before, and the node is there."""

        def find_target() -> str:
            target = self.read_target()
            return target if target != before and self.is_updated(target) else ""

        return wait_until(find_target, limit_s=LIMIT_S)

    def read_story(self) -> str:
        logs = [self.log, *([self.machine.log] if hasattr(self, "machine") else [])]
        texts = [each.read_text("utf-8", "replace")[-8000:] for each in logs if each.exists()]
        return "\n".join([str(self.read_notes()), *texts])

    def _start_controllers(self) -> None:
        with self.log.open("ab") as log:
            self._controllers = subprocess.Popen(
                [
                    *CONTROLLER_COMMAND,
                    "run",
                    "--enable=render,rollout,drain",
                    f"--kubeconfig={self._server.kubeconfig}",
                    "--metrics=127.0.0.1:0",
                    "--settle=0.2",
                ],
                env={
                    **os.environ,
                    **owner.mark_environment(),
                    "POD_NAME": "treenail-controller-0",
                    "POD_NAMESPACE": "treenail",
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _provision(self, target: str) -> None:
        """Write what Ignition and the MCO's server leave on a new machine."""
        notes = {key.CURRENT_CONFIG: target, key.DESIRED_CONFIG: target, key.STATE: "Done"}
        place = self.machine.root / FIRST_BOOT_ANNOTATIONS[1:]
        place.write_text(json.dumps(notes))
        base = self.machine.root / "etc/treenail-test/base"
        base.parent.mkdir()
        base.write_text("base\n")


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    program, kinds = programs.DAEMON.read(), programs.KINDS.read()
    try:
        found = find_programs(os.environ)
    except RealClusterError as error:
        pytest.skip(str(error))
    with RealCluster(found) as server, owner.temporary_directory() as directory:
        cluster = Cluster.of_kubeconfig(server.kubeconfig)
        operator.install_kinds(cluster, kinds)
        for document in installation.load_crds():
            if document["metadata"]["name"].endswith("treenail.io"):  # type: ignore[index,call-overload]
                cluster.post(operator.DEFINITIONS, document).ok()
        operator.create_objects(cluster, "v1", server.authority)
        site = Site(server, directory)
        try:
            site.start(program)
            yield site
        except BaseException:
            sys.stdout.write(site.read_story())
            raise
        finally:
            site.stop()


def test_daemon_takes_over_and_obeys_the_controllers(site: Site) -> None:
    try:
        target = site.read_target()
        wait_until(lambda: site.is_updated(target), limit_s=LIMIT_S)
        boots = site.machine.boot_count
        site.apply("50-file", files=[build_file("/etc/treenail-test/a", "a\n", 0o600)])
        after = site.wait_updated(target)
        found = site.machine.root / "etc/treenail-test/a"
        assert found.read_text() == "a\n"
        assert site.machine.boot_count == boots + 1
        assert site.read_notes()[key.LAST_APPLIED_DRAIN] == f"uncordon-{after}"

        site.cluster.delete(f"{MCO}/machineconfigs/50-file")
        assert site.wait_updated(after) == target
        assert not found.exists()
    except BaseException:
        sys.stdout.write(site.read_story())
        raise
