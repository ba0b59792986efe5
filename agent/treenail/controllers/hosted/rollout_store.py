"""The records of hosted rollouts: one ConfigMap in the namespace of each control plane.

Each key is a NodePool, its value what the status of a MachineConfigPool contains. HyperShift owns
the status of NodePools, so treenail writes none there.
"""

import json
import threading

from treenail import errors
from treenail.api import component_names, decode
from treenail.kube import api_client, resources

DRAIN_EXPIRED = "DrainTimedOut"
"""Reason of an Event, and condition of the record: pods were left when a drain ended."""
_NAME = component_names.HOSTED_ROLLOUTS


class RolloutStore:
    """Reads and writes the records. Thread-safe. Raises `ClusterError`.

    Only the leader writes, so it reads a ConfigMap once, and again after an error.
    """

    def __init__(self, client: api_client.Client) -> None:
        self._client = client
        self._lock = threading.Lock()
        self._config_maps: dict[str, api_client.Json] = {}

    def read(self, namespace: str, pool: str) -> decode.Json:
        """Return the record of a NodePool, empty without one; raise `ConfigError` if invalid."""
        with self._lock:
            text = str(self._load(namespace).get(pool, "{}"))
        where = f"key {pool} of ConfigMap {_NAME} in namespace {namespace}"
        try:
            return decode.Fields.from_json(decode.load_json(text, where=where), where).values
        except errors.ConfigError as error:
            raise errors.ConfigError(
                str(error),
                remedy=f"delete the key, and the rollout of NodePool {pool} begins again: kubectl "
                f"edit configmap {_NAME} -n {namespace}",
            ) from error

    def write(self, namespace: str, pool: str, record: decode.Json | None) -> None:
        """Replace the record of a NodePool; None removes it."""
        text = None if record is None else json.dumps(record, sort_keys=True)
        with self._lock:
            if self._load(namespace).get(pool) == text:
                return
            # Read again after an error: the write may have happened.
            known = self._config_maps.pop(namespace)
            metadata = resources.get_object(known, "metadata")
            body: decode.Json = {"apiVersion": "v1", "kind": "ConfigMap", "data": {pool: text}}
            if known:
                body["metadata"] = {"resourceVersion": metadata.get("resourceVersion")}
                known = self._client.patch(resources.CONFIGMAPS, _NAME, body, namespace=namespace)
            else:
                body["metadata"] = {"name": _NAME, "labels": {**component_names.PART_OF_LABELS}}
                known = self._client.create(resources.CONFIGMAPS, body, namespace=namespace)
            self._config_maps[namespace] = known

    def _load(self, namespace: str) -> api_client.Json:
        """Return the data of the ConfigMap; empty while it does not exist."""
        if namespace not in self._config_maps:
            found = self._client.find(resources.CONFIGMAPS, _NAME, namespace=namespace)
            self._config_maps[namespace] = found or {}
        return resources.get_object(self._config_maps[namespace], "data")
