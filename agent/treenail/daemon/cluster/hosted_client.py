"""The API server of a hosted cluster: the config of this node comes from one ConfigMap.

The in-place upgrader writes the ConfigMap of a NodePool and then the Node's ``desiredConfig``. The
agent neither reads nor writes the guest's objects of the Machine Config Operator.
"""

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated

from treenail import clocks, errors
from treenail.api import annotations as key
from treenail.api import decode, disruptionpolicy, machineconfig, object_meta
from treenail.api.hosted import annotations as hosted_key
from treenail.api.hosted import node_mode
from treenail.api.node import Node
from treenail.config import node_paths
from treenail.config.ignition import hosted_payload
from treenail.daemon.cluster.node_client import NodeClient
from treenail.daemon.configuration import config_cache, mcd_state
from treenail.encoding import codec
from treenail.host.filesystem import atomic_files, root_directory
from treenail.kube import api_client, event_recorder, resources
from treenail.update import status

log = logging.getLogger(__name__)

Json = dict[str, object]

MCD_CONFIG = "/etc/mcd-currentconfig.json"
"""The last config that an agent applied in place, as the Machine Config Daemon keeps it."""
_LIMIT = 64 * 1024 * 1024
_OWN_HASH = re.compile(r"[0-9a-f]{16}")
"""Name of a config by treenail. Names of HyperShift's Ignition payloads mean nothing to it."""


def read_mode(root: root_directory.Root) -> node_mode.HostedMode | None:
    """Read how this node is hosted; None for an ordinary node. Raises `UsageError`."""
    for path in (node_mode.INSTALLED_PATH, node_mode.PATH):
        try:
            content = atomic_files.HostFiles(root).read_file(path)
            if content is not None:
                return node_mode.HostedMode.from_json(decode.load_json(content, where=path), path)
        except (errors.ConfigError, errors.FileError) as error:
            raise errors.UsageError(
                f"cannot use the settings of a hosted node: {error}",
                remedy="correct the file in the NodePool's config, or install the same treenail",
            ) from error
    return None


class HostedMCDState(mcd_state.MCDState):
    """The first annotations of a machine that treenail's own server provisioned."""

    def read_annotations(self) -> dict[str, str]:
        """Read them; empty for a machine of HyperShift, whose Node has none until an update."""
        annotations = super().read_annotations()
        is_own = _OWN_HASH.fullmatch(annotations.get(key.CURRENT_CONFIG, ""))
        return annotations if is_own else {}


class _UpgradeConfigMap(codec.Shape, where="ConfigMap"):
    """The fields of ``data``. HyperShift writes the first two."""

    config: Annotated[str, codec.Key("data.config")] = ""
    hash: Annotated[str, codec.Key("data.hash")] = ""
    mode: Annotated[str, codec.Key("data.mode")] = ""

    def decode_config(self, name: str) -> machineconfig.MachineConfig:
        """Return the config under this name; its annotation says that it is a refresh."""
        if self.mode not in {"", node_mode.REFRESH}:
            raise errors.ConfigError(
                f"mode: expected {node_mode.REFRESH} or none, found {self.mode!r:.40}"
            )
        notes = {hosted_key.REFRESH: ""} if self.mode else {}
        metadata = object_meta.ObjectMeta(name=name, annotations=notes)
        document = hosted_payload.unpack_payload(self.config, _LIMIT)
        return replace(machineconfig.MachineConfig.from_json(document), metadata=metadata)


def drop_pull_secret(config: machineconfig.MachineConfig) -> machineconfig.MachineConfig:
    """Leave the kubelet's pull secret to HyperShift's global pull secret."""
    content = config.config or {}
    storage = content.get("storage")
    files = storage.get("files") if isinstance(storage, dict) else None
    if not (isinstance(storage, dict) and isinstance(files, list)):
        return config
    path = node_paths.PULL_SECRET
    kept = [file for file in files if not (isinstance(file, dict) and file.get("path") == path)]
    return replace(config, config={**content, "storage": {**storage, "files": kept}})


def check_delivery(name: str, delivered: str, where: str, *, desired: str, applied: str) -> None:
    """Raise unless the ConfigMap with this hash delivers the config.

    The upgrader writes ConfigMap and Node one after the other, so that they may differ for a while.
    Raises `ConfigPendingError` for the desired config, `ClusterError` for the current one of the
    ledger, of which the agent has a copy, and `NotFoundError` for any other.
    """
    if delivered == name:
        return
    found = f"cannot read config {name}: {where} has {repr(delivered)[:80]}"
    if name == applied:
        raise errors.ClusterError(found)
    if name != desired:
        raise errors.NotFoundError(found)
    raise errors.ConfigPendingError(
        found, remedy="wait for the program that updates the NodePool; start it if it does not run"
    )


@dataclass(frozen=True, slots=True)
class HostedMachine:
    """Mode, files and records of the machine of a hosted node."""

    mode: node_mode.HostedMode
    files: atomic_files.HostFiles
    read_applied: Callable[[], str]
    """Returns the current config of the ledger."""
    read_service_boot: Callable[[], str] | None = None
    """Returns the boot ID for an agent that each boot starts, as that of the image; None for one
    that an upgrade pod installed."""


class HostedClient(NodeClient):
    """The Node client of a hosted node; the upgrader's config H is a config named H."""

    def __init__(
        self,
        client: api_client.Client,
        recorder: event_recorder.EventRecorder,
        *,
        node_name: str,
        clock: clocks.Clock,
        on_change: Callable[[], None],
        machine: HostedMachine,
    ) -> None:
        super().__init__(client, recorder, node_name=node_name, clock=clock, on_change=on_change)
        self._machine, self._mode, self._files = machine, machine.mode, machine.files
        self._drain_keys = {
            key.DESIRED_DRAIN: self._mode.drain_annotation,
            key.LAST_APPLIED_DRAIN: self._mode.applied_drain_annotation,
        }

    def fetch_machine_config(self, name: str) -> machineconfig.MachineConfig:
        node, applied = self.get_cached_node(), self._machine.read_applied()
        annotations: Mapping[str, str] = {} if node is None else node.annotations
        # Once the ledger knows better, nothing that the Node shows can name what is on disk.
        if not applied and name == annotations.get(key.CURRENT_CONFIG):
            config = self.find_unnamed_config()
            if config is not None:
                return replace(config, metadata=object_meta.ObjectMeta(name=name))
        return self._read_config_map(name, annotations.get(key.DESIRED_CONFIG, ""), applied)

    def find_unnamed_config(self) -> machineconfig.MachineConfig | None:
        """Return the config that another agent applied, else the one that the machine was served.

        Raises `FileError` and `ConfigError`.
        """
        for path in (MCD_CONFIG, node_paths.SERVED_CONFIG):
            content = self._files.read_file(path, limit=_LIMIT)
            if content is not None:
                return machineconfig.MachineConfig.from_json(decode.load_json(content, where=path))
        return None

    def fetch_disruption_policy(self) -> disruptionpolicy.ClusterDisruptionPolicy:
        """Return the default policy: the guest's own must not decide about reboots."""
        return disruptionpolicy.ClusterDisruptionPolicy(node_mode.DISRUPTION_POLICY)

    def write_report(self, report: status.StatusReport) -> None:
        """Write the report; before a new current config, keep it where the MCD looks for it.

        The Node also gets the boot ID, by which the upgrader knows that it needs no pod.
        """
        if (read_boot := self._machine.read_service_boot) is not None:
            boot = {hosted_key.SERVICE_BOOT: read_boot()}
            report = replace(report, annotations={**report.annotations, **boot})
        node, name = self.get_cached_node(), report.annotations.get(key.CURRENT_CONFIG)
        if name and node is not None and node.annotations.get(key.CURRENT_CONFIG) != name:
            try:
                content = self._files.read_file(config_cache.cache_path(name), limit=_LIMIT)
                if content is not None:
                    self._files.write_file(MCD_CONFIG, content, mode=0o600)
            except errors.FileError as error:
                log.warning("cannot keep %s for another agent: %s", name, error)
        super().write_report(report)

    # The argument has the name of the overridden method.
    def _write_conditions(self, report: status.StatusReport) -> bool:  # noqa: ARG002
        """Write none: a guest has no MachineConfigNode that means anything."""
        return False

    def _decode_node(self, document: Json) -> Node:
        node = super()._decode_node(document)
        known = {name: text for name, text in node.annotations.items() if name not in _IGNORED}
        renamed = {name: node.annotations.get(own, "") for name, own in self._drain_keys.items()}
        return replace(node, annotations=known | renamed)

    def _encode_annotations(self, changes: Mapping[str, str | None]) -> Json:
        return {self._drain_keys.get(name, name): value for name, value in changes.items()}

    def _read_config_map(
        self, name: str, desired: str, applied: str
    ) -> machineconfig.MachineConfig:
        """Read config and hash with one request, so that they belong together."""
        namespace, config_map = self._mode.upgrade_namespace, self._mode.config_map
        where = f"ConfigMap {namespace}/{config_map}"
        try:
            document = self._client.get(resources.CONFIGMAPS, config_map, namespace=namespace)
        except errors.NotFoundError:
            document = {}
        except errors.ForbiddenError as error:
            # The node authorizer allows it once a pod of this node mounts the ConfigMap.
            raise errors.ConfigPendingError(
                f"cannot read config {name}: cannot read {where}: {error}",
                remedy="wait for the upgrade pod of this node, or let the node read the ConfigMap: "
                f"kubectl get rolebindings -n {namespace}",
            ) from error
        try:
            delivered = _UpgradeConfigMap.from_json(document)
            check_delivery(name, delivered.hash, where, desired=desired, applied=applied)
            config = delivered.decode_config(name)
        except errors.ConfigError as error:
            raise errors.ConfigError(
                f"cannot read config {name}: {where}: {error}",
                remedy=f"let it be written again: kubectl delete configmap -n {namespace} "
                f"{config_map}",
            ) from error
        node = self.get_cached_node()
        has_label = node is not None and hosted_key.GLOBAL_PULL_SECRET in node.labels
        return drop_pull_secret(config) if has_label else config


_IGNORED = {*key.IMAGE_SPELLINGS, key.PRESTAGE_IMAGE, key.REMOVE_BOOTSTRAP_REGISTRY}
"""The config names the image: only a user of the guest writes these."""
