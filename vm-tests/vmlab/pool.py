"""The pool of the node, whose image controllers beside the lab build and roll out."""

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from treenail.api import annotations as key
from treenail.kube.api_client import PatchType
from treenail.kube.resources import (
    CONTROLLERCONFIGS,
    JOBS,
    MACHINECONFIGPOOLS,
    MACHINECONFIGS,
    MACHINEOSBUILDS,
    MACHINEOSCONFIGS,
    SECRETS,
)
from treenail.manifests.installation import InstallOptions
from treenail_lab.cluster import POOL
from treenail_lab.controllers import ControllerReplicas
from treenail_lab.demo import pool
from treenail_lab.image_builds import BUILDER, BuilderNode, build_login_secret
from vmlab import registry
from vmlab.configs import with_files
from vmlab.site import Site
from vmlab.tools import ToolError, say

Json = dict[str, Any]
# The registry has one name for controllers, builds and the node, which forwards this port.
REPOSITORY = f"{registry.LOCAL}/os/{POOL}"
_NAMESPACE = InstallOptions().namespace
_PUSH, _PULL = "vm-push", "vm-pull"
_ARGUMENTS = ("--settle=0", "--report-blockers-after=2")
_BUILD_LIMIT_S = 900.0
_ROLLOUT_LIMIT_S = 900.0
_FORWARD = {
    "vm-registry.socket": f"[Socket]\nListenStream=127.0.0.1:{registry.PORT}\n"
    "[Install]\nWantedBy=sockets.target\n",
    "vm-registry.service": f"[Service]\nExecStart=/usr/lib/systemd/systemd-socket-proxyd "
    f"{registry.ADDRESS}\n",
}


class BuiltPool:
    """The pool, a Node for builds on this host, and the controllers, between start and stop."""

    def __init__(self, site: Site, certificate: Path) -> None:
        self._site = site
        self._client = site.lab.client
        self._certificate = certificate
        self._is_started = False
        self._controllers = ControllerReplicas(
            site.lab, enable=("render", "rollout", "build"), arguments=_ARGUMENTS
        )
        self._builder = BuilderNode(
            site.lab.directory, self._client, registry.LOCAL, hidden=(certificate.parents[1],)
        )

    def start(self) -> None:
        """Return once the node is at the pool's first config, out of image mode."""
        self._forward_registry()
        self._builder.create_node()
        lab = self._site.lab
        self._builder.start(lab.open_client(lab.server.write_node_kubeconfig(BUILDER)))
        self._controllers.create_manifests()
        login = registry.pull_secret().encode()
        for name in (_PUSH, _PULL):
            secret = build_login_secret(name, _NAMESPACE, login)
            self._client.create(SECRETS, secret, namespace=_NAMESPACE)
        self._client.create(CONTROLLERCONFIGS, self._make_controller_config())
        self.add_config("00-worker", {"osImageURL": self.base})
        manifest: Json = pool.build_pool("")
        for field in ("osImage", "rolloutPolicy"):
            del manifest["spec"][field]
        pool.apply_pool(lab, manifest)
        self._controllers.start_replica()
        self._is_started = True
        self._site.machine.sh("systemctl restart kubelet; systemctl restart --no-block treenail")
        self.wait_without_image()

    def stop(self) -> None:
        self._controllers.stop()
        self._builder.stop()

    @property
    def base(self) -> str:
        """The image that the node was installed from."""
        return f"{registry.LOCAL}/os/node@{self._site.first.digest}"

    # Actions of a user

    def add_config(self, name: str, spec: Json) -> None:
        """Create a MachineConfig of the pool; return once the pool's config contains it.

        Before the pool exists, nothing renders.
        """
        self._client.create(MACHINECONFIGS, pool.build_config(name, spec))
        if self._is_started:
            self._site.wait(lambda: name in self._read_sources(), f"{name} is rendered")

    def add_files(self, name: str, files: Mapping[str, str]) -> None:
        """Create a MachineConfig with these files, by path."""
        self.add_config(name, with_files(files))

    def request_image(self, containerfile: str) -> None:
        """Create the MachineOSConfig; without text the image only gets the config."""
        spec: Json = {
            "machineConfigPool": {"name": POOL},
            "imageBuilder": {"imageBuilderType": "Job"},
            "baseImagePullSecret": {"name": _PULL},
            "renderedImagePushSecret": {"name": _PUSH},
            "renderedImagePushSpec": f"{REPOSITORY}:latest",
        }
        if containerfile:
            spec["containerFile"] = [{"containerfileArch": "NoArch", "content": containerfile}]
        document: Json = {
            "apiVersion": MACHINEOSCONFIGS.api_version,
            "kind": MACHINEOSCONFIGS.kind,
            "metadata": {"name": POOL},
            "spec": spec,
        }
        self._client.patch(MACHINEOSCONFIGS, POOL, document, PatchType.APPLY)

    def pause(self, *, is_paused: bool = True) -> None:
        """Hold the rollout back, or continue it."""
        self._client.patch(MACHINECONFIGPOOLS, POOL, {"spec": {"paused": is_paused}})

    def leave_image_mode(self) -> None:
        """Delete the MachineOSConfig."""
        self._client.delete(MACHINEOSCONFIGS, POOL)

    # Observed state

    def wait_image(self, but: str = "") -> str:
        """Wait until the pool has a built image; return its pull spec."""
        site = self._site
        site.wait(lambda: self._read_image(but), "the image is built", _BUILD_LIMIT_S)
        image = self._read_image(but)
        say(f"built {image[-71:][:19]}")
        return image

    def wait_node(self, image: str) -> None:
        """Wait until the node runs the image with the pool's config, and is in service."""
        self._site.wait(lambda: self._is_at(image), f"{image} runs", _ROLLOUT_LIMIT_S)

    def wait_without_image(self) -> None:
        """Wait until the node runs the base image, out of image mode, and is in service."""
        self._site.wait(lambda: self._is_at(""), "the node is out of image mode", _ROLLOUT_LIMIT_S)

    def count_jobs(self) -> int:
        return len(self._client.list(JOBS).items)

    def read_config(self) -> str:
        """Return the name of the pool's rendered config."""
        found: Json = self._client.get(MACHINECONFIGPOOLS, POOL)
        return str(found["spec"].get("configuration", {}).get("name", ""))

    def _read_sources(self) -> set[str]:
        found: Json = self._client.get(MACHINECONFIGPOOLS, POOL)
        source = found["spec"].get("configuration", {}).get("source") or []
        return {str(each["name"]) for each in source}

    def _read_image(self, but: str) -> str:
        self._check_builds()
        found: Json = self._client.get(MACHINEOSCONFIGS, POOL)
        image = str((found.get("status") or {}).get("currentImagePullSpec", ""))
        return "" if image == but else image

    def _check_builds(self) -> None:
        for build in self._client.list(MACHINEOSBUILDS).items:
            status: Json = build.get("status") or {}  # type: ignore[assignment]
            for each in status.get("conditions") or ():
                if (each["type"], each["status"]) == ("Failed", "True"):
                    raise ToolError(f"the build failed: {each['reason']}: {each['message']}")

    def _is_at(self, image: str) -> bool:
        site = self._site
        notes, config = site.notes(), self.read_config()
        digest = (image or self.base).partition("@")[2]
        return (
            config != ""
            and notes.get(key.STATE) == "Done"
            and notes.get(key.CURRENT_CONFIG) == config == notes.get(key.DESIRED_CONFIG)
            and (notes.get(key.CURRENT_OS_IMAGE) or "") == image
            and notes.get(key.DESIRED_DRAIN) == notes.get(key.LAST_APPLIED_DRAIN)
            and not site.node()["spec"].get("unschedulable")
            and site.story.digest == digest
        )

    # Installation

    def _forward_registry(self) -> None:
        """Let the node reach the registry under the name that this host has for it."""
        machine = self._site.machine
        for name, text in _FORWARD.items():
            machine.sh(f"cat > /etc/systemd/system/{name}", stdin=text)
        machine.sh("systemctl daemon-reload; systemctl enable --now vm-registry.socket; sync")

    def _make_controller_config(self) -> Json:
        """Build the ControllerConfig by which builds and the node trust the registry."""
        pem = base64.b64encode(self._certificate.read_bytes()).decode()
        # ConfigMap keys allow no colon, so the MCO writes host..port.
        bundle = {"file": registry.LOCAL.replace(":", ".."), "data": pem}
        return {
            "apiVersion": CONTROLLERCONFIGS.api_version,
            "kind": CONTROLLERCONFIGS.kind,
            "metadata": {"name": "machine-config-controller"},
            "spec": {"imageRegistryBundleUserData": [bundle]},
        }
