"""The hosted cluster: an API server without kinds of treenail, and machines that fetch a config.

A machine runs no Ignition. The provider downloads the config that the user data names, as Ignition
does, and writes its files before the machine boots for the first time.
"""

import ssl
import threading
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

from treenail.api.decode import load_json
from treenail.api.ignition.model import Contents
from treenail.api.ignition.parser import parse_ignition
from treenail.errors import ClusterError, ConfigError, HostError, NotFoundError
from treenail.kube.resources import NODES, PODS
from treenail_lab.cluster import Lab
from treenail_lab.images import Image
from treenail_lab.machine.node.machine import LabMachine

Json = dict[str, Any]
_ACCEPT = "application/vnd.coreos.ignition+json;version=3.4.0, */*;q=0.1"
_RETRY_S, _REQUEST_S = 0.5, 10.0


class GuestLab(Lab):
    """A lab whose machines join after their first boot, without access to kinds of treenail."""

    def _install_kinds(self) -> None:
        """The hosted cluster has no kind of treenail."""

    def _may_run_kubelet(self, machine: LabMachine) -> bool:
        """Let the kubelet join when the first boot is done; its certificate is not requested."""
        if machine.name not in self._admitted:
            if not self._is_past_first_boot(machine):
                return False
            self._admit_machine(machine)
        return True

    def remove_machine(self, name: str) -> None:
        """Power a machine off and delete its Node."""
        if (machine := self.machines.pop(name, None)) is not None:
            machine.stop()
        with suppress(NotFoundError):
            self.client.delete(NODES, name)
        self._admitted.discard(name)


class GuestMachines:
    """A `treenail_lab.hosted.cluster_api.MachineProvider` of machines with one first image."""

    def __init__(self, lab: GuestLab, image: Image) -> None:
        self._lab = lab
        self.image = image
        self.fetched: dict[str, list[int]] = {}
        """The status of each answer that a machine got, by its name."""
        self._threads: list[threading.Thread] = []
        self._stop_event = threading.Event()

    def stop(self) -> None:
        """End the boots in progress; the lab stops the machines."""
        self._stop_event.set()
        for thread in self._threads:
            thread.join(_REQUEST_S)

    def create_machine(self, name: str, user_data: bytes) -> None:
        """Boot a machine, without waiting for it."""
        machine = self._lab.create_machine(name, self.image, has_first_boot=True)
        thread = threading.Thread(
            target=self._boot_machine, args=(machine, user_data), name=f"boot-{name}", daemon=True
        )
        self._threads.append(thread)
        thread.start()

    def _boot_machine(self, machine: LabMachine, user_data: bytes) -> None:
        answers = self.fetched.setdefault(machine.name, [])
        while not self._stop_event.is_set() and machine.name in self._lab.machines:
            status, content = fetch_config(user_data)
            answers.append(status)
            if status == 200:
                write_config(content, machine.root)
                machine.start()
                return
            self._stop_event.wait(_RETRY_S)

    def has_joined(self, name: str) -> bool:
        """Return whether the Node of a machine is Ready."""
        try:
            node: Any = self._lab.client.get(NODES, name)
        except NotFoundError:
            return False
        conditions = node.get("status", {}).get("conditions", [])
        return ("Ready", "True") in [(each["type"], each["status"]) for each in conditions]

    def remove_machine(self, name: str) -> bool:
        """Drain a machine and remove it; return whether it is gone."""
        client = self._lab.client
        with suppress(NotFoundError):
            client.patch(NODES, name, {"spec": {"unschedulable": True}})
        selector = {"fieldSelector": f"spec.nodeName={name}"}
        pods: Any = client.list(PODS, params=selector).items
        for pod in pods:
            meta = pod["metadata"]
            with suppress(ClusterError):  # a budget may refuse; the next step tries again
                client.evict(meta["namespace"], meta["name"])
        if pods:
            return False
        self._lab.remove_machine(name)
        return True


def fetch_config(user_data: bytes) -> tuple[int, bytes]:
    """Follow the pointer config of a machine; return status and body, 0 without an answer."""
    document: Any = load_json(user_data, where="user data")
    [source] = document["ignition"]["config"]["merge"]
    security = document["ignition"].get("security", {}).get("tls", {})
    authorities = [
        Contents(each["source"]).decode_bytes().decode()
        for each in security.get("certificateAuthorities", [])
    ]
    context = ssl.create_default_context(cadata="\n".join(authorities) or None)
    headers = {each["name"]: each["value"] for each in source.get("httpHeaders", [])}
    request = urllib.request.Request(  # noqa: S310  # https by the context
        source["source"], headers={"Accept": _ACCEPT, **headers}
    )
    try:
        with urllib.request.urlopen(request, timeout=_REQUEST_S, context=context) as answer:  # noqa: S310  # https
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, b""
    except OSError:
        return 0, b""


def write_config(content: bytes, root: Path) -> None:
    """Write the files and units of an Ignition config; raise `HostError`."""
    try:
        config = parse_ignition(load_json(content, where="config"))
        files = {
            file.path: (file.contents.decode_bytes(), file.mode or 0o644) for file in config.files
        }
    except ConfigError as error:
        raise HostError(f"cannot provision {root}: {error}") from error
    for unit in config.units:
        if unit.contents is not None:
            path = f"/etc/systemd/system/{unit.name}"
            files[path] = unit.contents.encode(), 0o644
    for path, (data, mode) in files.items():
        place = root / path[1:]
        place.parent.mkdir(parents=True, exist_ok=True)
        place.touch(mode=mode)
        place.write_bytes(data)
