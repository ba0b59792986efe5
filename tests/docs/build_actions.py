"""Actions of the lab between the commands of a guide to image builds.

Its lab has a registry. Guides call it registry.example.com, and its users READER and WRITER.
"""

from collections.abc import Callable, Mapping

from tests.waiting import wait_until
from treenail.api.machineosconfig import MachineOSConfig
from treenail.kube.resources import MACHINEOSCONFIGS
from treenail_lab.cluster import POOL, Lab
from treenail_lab.controllers import ALL_CONTROLLERS, QUICK_OPTIONS, ControllerReplicas
from treenail_lab.image_builds import LabRegistry
from treenail_lab.registry.service import PULLER, PUSHER

REGISTRY_NAME = "registry.example.com"
BUILD_NAMESPACE = "treenail-builds"
_LIMIT_S = 300.0


def list_names(registry: LabRegistry) -> dict[str, str]:
    """Return the words of guides that mean this registry and its logins."""
    passwords = registry.service.passwords
    return {
        REGISTRY_NAME: registry.host,
        "READER_PASSWORD": passwords[PULLER],
        "WRITER_PASSWORD": passwords[PUSHER],
        "READER": PULLER,
        "WRITER": PUSHER,
    }


class BuildActions:
    """The actions on a lab with a registry."""

    def __init__(self, lab: Lab, controllers: ControllerReplicas) -> None:
        self._lab = lab
        self._installed = controllers
        self._with_builds = ControllerReplicas(
            lab,
            enable=(*ALL_CONTROLLERS, "build"),
            arguments=(*QUICK_OPTIONS, f"--build-namespace={BUILD_NAMESPACE}"),
        )

    def list_actions(self) -> Mapping[str, Callable[..., None]]:
        """Return the actions by the text of their comments."""
        return {
            "the Deployment is rolled out": self._restart_controllers,
            "the nodes have the built image": self._wait_for_built_image,
            "the rebuild has ended": self._wait_for_rebuild,
            "the nodes have the installed image": self._wait_for_installed_image,
        }

    def stop(self) -> None:
        """Stop the controllers that an action started."""
        self._with_builds.stop()

    def _restart_controllers(self) -> None:
        """Replace the controllers, as the Deployment does: the lab runs no pods of it."""
        self._installed.stop()
        self._with_builds.start_replica()

    def _wait_for_built_image(self) -> None:
        """Wait until each node has the image of the pool's present rendered config."""

        def is_there() -> bool:
            config = MachineOSConfig.from_json(self._lab.client.get(MACHINEOSCONFIGS, POOL))
            is_ready = any(
                (each.type, each.status) == ("ImageReady", "True") for each in config.conditions
            )
            return is_ready and self._have_booted(config.pull_spec.partition("@")[2])

        wait_until(is_there, limit_s=_LIMIT_S)

    def _wait_for_rebuild(self) -> None:
        def has_ended() -> bool:
            config = MachineOSConfig.from_json(self._lab.client.get(MACHINEOSCONFIGS, POOL))
            statuses = {each.type: each.status for each in config.conditions}
            return not config.needs_rebuild and statuses["ImageReady"] == "True"

        wait_until(has_ended, limit_s=_LIMIT_S)

    def _wait_for_installed_image(self) -> None:
        wait_until(lambda: self._have_booted(self._lab.installed_image.digest), limit_s=_LIMIT_S)

    def _have_booted(self, digest: str) -> bool:
        booted = [machine.booted_deployment for machine in self._lab.machines.values()]
        return all(each is not None and each.digest == digest for each in booted)
