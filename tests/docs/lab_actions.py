"""Actions of the lab between the commands of a guide: what happens elsewhere meanwhile.

Each is the text of a comment ``<!-- lab: … -->``, as `LabActions.run` lists them.
"""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.docs.guide import FILE, read_guide
from tests.docs.lab_shell import LabShells
from tests.fixtures import hosted
from tests.waiting import wait_until
from treenail.api import annotations as key
from treenail.api.decode import Fields
from treenail.kube.api_client import Json
from treenail.kube.resources import (
    CONFIGMAPS,
    DAEMONSETS,
    MACHINECONFIGPOOLS,
    MACHINECONFIGS,
    NAMESPACES,
    NODES,
)
from treenail_lab.cluster import POOL, Lab
from treenail_lab.demo.pool import build_config
from treenail_lab.images import Image, derive_image, make_image

REGISTRY, REPOSITORY = "quay.io", "example/os"
GUIDES = Path(__file__).parents[2] / "docs/guides"
_IMAGE_BYTES = 50_000_000
_LIMIT_S = 300.0


def make_os_image(version: str) -> Image:
    """Return the image of the repository with this version."""
    return make_image(REPOSITORY, version, _IMAGE_BYTES, registry=REGISTRY)


class LabActions:
    """The actions on a lab."""

    def __init__(
        self, lab: Lab, shells: LabShells, more: Mapping[str, Callable[..., None]]
    ) -> None:
        self._lab = lab
        self._shells = shells
        self._more = more

    def run(self, text: str) -> None:
        """Run the action with this name. Raises LookupError for an unknown one."""
        for pattern, action in self._list_actions().items():
            if found := re.fullmatch(pattern, text):
                action(*found.groups())
                return
        raise LookupError(f"no action {text!r}; known: {', '.join(self._list_actions())}")

    def _list_actions(self) -> Mapping[str, Callable[..., None]]:
        return {
            r"(\S+) is (Done|Working|Degraded)": self._wait_for_state,
            r"(\S+) boots (\S+)": self._wait_for_boot,
            r"(\S+) is blocked": self._wait_until_blocked,
            r"the pool is rendered with (\S+)": self._wait_for_render_with,
            r"the pool is rendered without (\S+)": self._wait_for_render,
            r"the pool is (\w+)": self._wait_for_condition,
            r"the image of the nodes is in (\S+)": self._write_booted_digest,
            r"CI publishes (\S+)": self._publish,
            r"CI builds (\S+) with the files of (\S+)": self._build,
            r"a colleague requests (\S+)": self._request,
            r"(\S+) fails in (\S+)": self._break_unit,
            r"(\S+) works again": self._repair_unit,
            "the cluster has the DaemonSet of the Machine Config Daemon": self._create_daemonset,
            r"the cluster is as before, with the agent on (\S+)": self._restore_cluster,
            r"(\S+) has the file (\S+) of (\S+)": self._copy_file,
            "the nodes have managed a file": self._manage_file,
            "the cluster is one of kubeadm": self._create_kubelet_config,
            "the cluster is a management cluster of HyperShift": self._add_node_pools,
            **self._more,
        }

    def reset_pool(self) -> None:
        """Let the agents write files again: the pool of another guide may leave that to images."""
        self._lab.client.patch(MACHINECONFIGPOOLS, POOL, {"spec": {"imageFiles": "Write"}})

    def wait_until_at_rest(self) -> None:
        """Wait until every node reports Done and the pool is Updated."""
        for node in self._lab.machines:
            self._wait_for_state(node, "Done")
        self._wait_for_condition("Updated")

    def _write_booted_digest(self, path: str) -> None:
        booted = {each.booted_deployment for each in self._lab.machines.values()}
        (digest,) = {each.digest for each in booted if each is not None}
        (self._shells.workstation / path).write_text(f"{digest}\n", "utf-8")

    def _publish(self, version: str) -> None:
        self._add_image(make_os_image(version))

    def _add_image(self, image: Image) -> None:
        self._lab.add_image(image)
        (self._shells.workstation / "image.digest").write_text(f"{image.digest}\n", "utf-8")

    def _build(self, version: str, directory: str) -> None:
        """Publish an image with the files and links of a directory of the workstation."""
        tree = self._shells.workstation / directory
        files, links = {}, {}
        for path in tree.rglob("*"):
            name = f"/{path.relative_to(tree)}"
            if path.is_symlink():
                links[name] = str(path.readlink())
            elif path.is_file() and not name.startswith("/var/"):
                files[name] = path.read_text(encoding="utf-8")
        self._add_image(derive_image(make_os_image(version), files, links))

    def _request(self, version: str) -> None:
        self._publish(version)
        spec = {"spec": {"osImage": make_os_image(version).pull_spec}}
        self._lab.client.patch(MACHINECONFIGPOOLS, POOL, spec)

    def _break_unit(self, unit: str, version: str) -> None:
        self._shells.break_unit(unit, make_os_image(version).digest)

    def _repair_unit(self, unit: str) -> None:
        self._shells.break_unit(unit, "")

    def _copy_file(self, node: str, path: str, guide: str) -> None:
        for step in read_guide(GUIDES / guide):
            if step.kind == FILE and step.argument.endswith(f" {path}"):
                self._shells.write_file(node, path, step.text)
                return
        raise LookupError(f"{guide} has no file {path}")

    def _manage_file(self) -> None:
        """Write a file by a MachineConfig, and remove it again: its records stay on the nodes."""
        name = f"50-{POOL}-file"
        # A file that is written also in image mode.
        file: Json = {"path": "/var/lib/site", "contents": {"source": "data:,site"}}
        spec: Json = {"config": {"ignition": {"version": "3.4.0"}, "storage": {"files": [file]}}}
        self._lab.client.create(MACHINECONFIGS, build_config(name, spec))
        self._wait_for_render_with(name)
        self.wait_until_at_rest()
        self._lab.client.delete(MACHINECONFIGS, name)
        self._wait_for_render(name)
        self.wait_until_at_rest()

    def _add_node_pools(self) -> None:
        hosted.install_hosted_kinds(self._lab.client)
        pool = hosted.build_waiting_pool("first-token", "renewed-token")
        hosted.add_hosted_cluster(self._lab.client, *pool)

    def _create_kubelet_config(self) -> None:
        text = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n"
        body: Json = {"metadata": {"name": "kubelet-config"}, "data": {"kubelet": text}}
        self._lab.client.create(CONFIGMAPS, body, namespace="kube-system")

    def _create_daemonset(self) -> None:
        client, namespace = self._lab.client, "openshift-machine-config-operator"
        client.create(
            NAMESPACES, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}
        )
        labels: Json = {"k8s-app": "machine-config-daemon"}
        container: Json = {"name": "machine-config-daemon", "image": "quay.io/example/mcd"}
        daemonset: Json = {
            "apiVersion": "apps/v1",
            "kind": "DaemonSet",
            "metadata": {"name": "machine-config-daemon"},
            "spec": {
                "selector": {"matchLabels": labels},
                "template": {"metadata": {"labels": labels}, "spec": {"containers": [container]}},
            },
        }
        client.create(DAEMONSETS, daemonset, namespace=namespace)

    def _restore_cluster(self, node: str) -> None:
        annotations: Json = dict.fromkeys((key.DESIRED_IMAGE, key.CURRENT_IMAGE))
        self._lab.client.patch(NODES, node, {"metadata": {"annotations": annotations}})
        self._lab.machines[node].start_agent()

    def _wait_for_state(self, node: str, state: str) -> None:
        wait_until(
            lambda: self._lab.read_annotations(node).get(key.STATE) == state, limit_s=_LIMIT_S
        )

    def _wait_until_blocked(self, node: str) -> None:
        """Wait until the agent has undone everything and waits for a user."""

        def is_blocked() -> bool:
            live = self._lab.read_live_status(node)
            return str(live.get("activity", "")).startswith("blocked")

        wait_until(is_blocked, limit_s=_LIMIT_S)

    def _wait_for_boot(self, node: str, version: str) -> None:
        def is_booted() -> bool:
            booted = self._lab.machines[node].booted_deployment
            return booted is not None and booted.version == version

        wait_until(is_booted, limit_s=_LIMIT_S)

    def _wait_for_render_with(self, name: str) -> None:
        """Wait until the rendered config of the pool has this MachineConfig."""

        def has_it() -> bool:
            spec = self._lab.client.get(MACHINECONFIGPOOLS, POOL)["spec"]
            return f'"{name}"' in json.dumps(spec)

        wait_until(has_it, limit_s=_LIMIT_S)

    def _wait_for_render(self, name: str) -> None:
        """Wait until the rendered config of the pool no longer has this MachineConfig."""

        def is_without() -> bool:
            spec = self._lab.client.get(MACHINECONFIGPOOLS, POOL)["spec"]
            return f'"{name}"' not in json.dumps(spec)

        wait_until(is_without, limit_s=_LIMIT_S)

    def _wait_for_condition(self, kind: str) -> None:
        def is_true() -> bool:
            found = Fields.from_json(self._lab.client.get(MACHINECONFIGPOOLS, POOL), POOL)
            status, metadata = found.get_object("status"), found.get_object("metadata")
            # Before the controller has seen the present spec, conditions are those of the last one.
            return status.values.get("observedGeneration") == metadata.values["generation"] and any(
                each.get_text("type") == kind and each.get_text("status") == "True"
                for each in status.iter_objects("conditions")
            )

        wait_until(is_true, limit_s=_LIMIT_S)
