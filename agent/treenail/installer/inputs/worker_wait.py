"""Says whether the installation lets workers wait for their image, for the config server."""

import logging
import threading

from treenail.clock import Clock
from treenail.errors import ClusterError, ConfigError, ForbiddenError, NotFoundError
from treenail.installer.inputs.image_mode import CONFIGMAP, NAMESPACE, WorkerMode
from treenail.kube.client import Client
from treenail.kube.resources import CONFIGMAPS

log = logging.getLogger(__name__)

_CHECK_S = 30.0


class WorkerWait:
    """Reads the settings of the installation every 30 s at most. Thread-safe."""

    def __init__(self, client: Client, clock: Clock, *, namespace: str = NAMESPACE) -> None:
        self._client = client
        self._clock = clock
        self._namespace = namespace
        self._lock = threading.Lock()
        self._next_check = float("-inf")
        self._waits = False

    def has_waiting_workers(self) -> bool:
        """Return whether workers wait; the last known answer while the API server has none."""
        with self._lock:
            if self._clock.monotonic() >= self._next_check:
                try:
                    self._waits = self._read_mode() is WorkerMode.WAIT
                except (ClusterError, ConfigError) as error:
                    log.warning("cannot read whether workers wait for their image: %s", error)
                self._next_check = self._clock.monotonic() + _CHECK_S
            return self._waits

    def _read_mode(self) -> WorkerMode | None:
        try:
            document = self._client.get(CONFIGMAPS, CONFIGMAP, namespace=self._namespace)
        except (NotFoundError, ForbiddenError):
            # A cluster without such an installation, or a role of an older version.
            return None
        # Imported late: it loads PyYAML, 2 MiB in the server of a cluster without the ConfigMap.
        from treenail.installer.inputs.image_mode_codec import (  # noqa: PLC0415
            read_settings_configmap,
        )

        settings = read_settings_configmap(document, where=f"ConfigMap {CONFIGMAP}")
        return settings.workers if settings.is_enabled else None
