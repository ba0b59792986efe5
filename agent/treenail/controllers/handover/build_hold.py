"""Holds the first builds of a control plane whose image the bootstrap host has built.

The manifests of an installation reach the cluster before the image does, and a build of the same
inputs would be the second one.
"""

import logging

from treenail.api.decode import Json
from treenail.api.machineconfigpool import ARBITER, MASTER
from treenail.clock import Clock, parse_rfc3339
from treenail.controllers.handover.handover_objects import RESULT_CONFIGMAP, read_result_configmap
from treenail.errors import ConfigError, ForbiddenError, NotFoundError
from treenail.installer.inputs.image_mode import CONFIGMAP, NAMESPACE
from treenail.installer.inputs.image_mode_codec import read_settings_configmap
from treenail.kube.client import Client
from treenail.kube.resources import CONFIGMAPS

log = logging.getLogger(__name__)

BOOTSTRAP_POOLS = (MASTER, ARBITER)
"""Pools whose machines join before the cluster can build."""
_SETTLE_S = 30.0
"""Time for which the watch of builds may be behind the result of the hand-over."""


class InstallHold:
    """Says which pools wait for the installation. Thread-safe."""

    def __init__(self, client: Client, clock: Clock, *, namespace: str = NAMESPACE) -> None:
        self._client = client
        self._clock = clock
        self._namespace = namespace

    def find_hold(self, pool: str) -> str:
        """Return why the first build of a pool must wait; empty if it can begin.

        Raises `ClusterError`.
        """
        if pool not in BOOTSTRAP_POOLS:
            return ""
        settings = self._find_configmap(CONFIGMAP)
        if settings is None or self._is_complete():
            return ""
        try:
            if not read_settings_configmap(settings, where=f"ConfigMap {CONFIGMAP}").is_enabled:
                return ""
        except ConfigError as error:
            log.warning("%s; pool %s does not wait for the installation", error, pool)
            return ""
        return (
            "waiting for the image that the bootstrap host built; to build it in the cluster "
            f"instead, run: kubectl delete configmap -n {self._namespace} {CONFIGMAP}"
        )

    def _is_complete(self) -> bool:
        """Return whether the images were handed over, and the caches show the adopted builds."""
        document = self._find_configmap(RESULT_CONFIGMAP)
        if document is None:
            return False
        try:
            completed = parse_rfc3339(read_result_configmap(document).completed)
        except ConfigError as error:
            log.warning("%s; the control plane does not wait for the installation", error)
            return True
        return completed is None or self._clock.now() - completed > _SETTLE_S

    def _find_configmap(self, name: str) -> Json | None:
        try:
            return self._client.get(CONFIGMAPS, name, namespace=self._namespace)
        except (NotFoundError, ForbiddenError):
            # A role of an older version does not permit it.
            return None
