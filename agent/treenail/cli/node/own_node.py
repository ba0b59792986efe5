"""The Node of this machine, and its plan from the current target to the desired one.

Commands also work without the Node.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from treenail import errors
from treenail.api import annotations as key
from treenail.api import disruptionpolicy, machineconfig, object_meta
from treenail.api.node import Node
from treenail.cli.node import local_machine
from treenail.config import image_content
from treenail.config.wanted_state import ParsedConfig
from treenail.daemon import agent_settings
from treenail.daemon.configuration import config_cache
from treenail.daemon.configuration.image_content import read_image_content
from treenail.daemon.reconcile.observe import summarize_deployments
from treenail.host.filesystem.root_directory import open_booted_tree
from treenail.host.machine import Machine
from treenail.kube import resources
from treenail.update.impact import os_change, preview
from treenail.update.state import ledger_record
from treenail.update.steps import step_types

if TYPE_CHECKING:
    from treenail.kube.api_client import Client


Json = dict[str, object]
_CALL_TIMEOUT_S = 5.0


class OwnNode:
    """The Node of this machine; its methods raise `ClusterError`."""

    def __init__(self, client: "Client", name: str) -> None:
        self._client = client
        self.name = name

    def machine_config(self, name: str) -> machineconfig.MachineConfig:
        """Fetch a MachineConfig; raise also `ConfigError`."""
        return machineconfig.MachineConfig.from_json(
            self._client.get(resources.MACHINECONFIGS, name)
        )

    def fetch_policy(self) -> disruptionpolicy.DisruptionPolicy:
        """Fetch the node disruption policy of the cluster, or return the default policy."""
        try:
            return disruptionpolicy.ClusterDisruptionPolicy.from_json(
                self._client.get(resources.MACHINECONFIGURATIONS, "cluster")
            ).policy
        except errors.NotFoundError:
            return disruptionpolicy.DEFAULT_POLICY

    def read_node(self) -> Json:
        """Fetch the Node."""
        return self._client.get(resources.NODES, self.name)

    def annotate_node(self, changes: Mapping[str, str | None]) -> None:
        """Set these annotations; None removes one."""
        body: Json = {"metadata": {"annotations": dict(changes)}}
        self._client.patch(resources.NODES, self.name, body)


@contextmanager
def connect_own_node(machine: Machine, config: str | None) -> Iterator[OwnNode]:
    """Connect to the API server with a short timeout.

    Raises `UsageError` for the settings, `ClusterError` while the Node's name is uncertain.
    """
    # Imported late: most commands do not need TLS.
    from treenail.daemon.cluster.node_identity import make_unnamed_error, read_access
    from treenail.kube.api_client import Client
    from treenail.kube.transport.native import HttpTransport

    access = read_access(local_machine.load_node_settings(machine.root, config), machine.root)
    if access.connection is None or not access.identity.name:
        raise make_unnamed_error(access.identity)
    with closing(HttpTransport(access.connection, machine.clock)) as transport:
        yield OwnNode(Client(transport, limit_s=_CALL_TIMEOUT_S), access.identity.name)


T = TypeVar("T")


def plan_node(
    machine: Machine, config: str | None, policy: disruptionpolicy.DisruptionPolicy | None
) -> tuple[preview.Preview, tuple[str, ...]]:
    """Plan the next update of this node; also return notes on what the plan does not consider.

    Works without the API server for configs that the agent has read before. Raises `UsageError`
    and `HostError` if a config is missing.
    """
    settings = local_machine.load_node_settings(machine.root, config)
    has_files_in_image = settings.image_files is agent_settings.ImageFiles.BAKED
    record = ledger_record.from_json(machine.ledger.read_document())
    target = read_desired_target(machine, record)
    if not target.config:
        raise errors.UsageError(
            "cannot plan: the desired target of this node is not known",
            remedy="start the agent, which reads it: systemctl start treenail",
        )
    sources = _PlanSources(machine, config)
    if target.image:
        has_files_in_image = sources.must_image_have_files(default=has_files_in_image)
    quarantined = record.quarantined
    if quarantined is not None and quarantined.target == target:
        sources.notes.append(
            f"the target is quarantined: {quarantined.reason}; {quarantined.remedy}"
        )
    new = sources.find_config(target.config)
    if new is None:
        raise errors.HostError(
            f"cannot plan: this machine stores no copy of {target.config}, and the API server is "
            "unreachable",
            remedy="plan between two files instead: treenail plan OLD NEW",
        )
    current = record.current
    old = sources.find_config(current.config) if current.config else None
    if old is None and current.config:
        sources.notes.append(
            f"this machine stores no copy of {current.config}: its files are not considered"
        )
    old = old or ParsedConfig(
        machineconfig.MachineConfig(metadata=object_meta.ObjectMeta(name=current.config))
    )
    machine_plan = _inspect_machine(machine, record, old, new, target, sources.notes)
    if machine_plan and machine_plan.split and machine_plan.split.missing and has_files_in_image:
        error = image_content.make_missing_error(
            target.config, target.image, machine_plan.split.missing
        )
        sources.notes.append(f"the agent will reject the update: {error}; {error.remedy}")
    if machine_plan is not None and target == current:
        # Drift alone starts no update; the drift policy decides about it.
        if any(
            not isinstance(step, step_types.BackUpEntry | step_types.RecordOwnership)
            for step in machine_plan.steps
        ):
            sources.notes.append("something has drifted; see: treenail drift")
        machine_plan = None
    update = preview.preview_update(
        old,
        new,
        policy or sources.find_policy(),
        images=(current.image, target.image),
        has_files_in_image=has_files_in_image,
        machine=machine_plan,
    )
    if (
        settings.reboot is agent_settings.RebootMode.AUTO
        and update.needs_reboot
        and update.can_keep_kernel
    ):
        sources.notes.append(
            "the reboot is a soft reboot, of user space only, if kernel and initramfs stay the same"
        )
    if update.needs_drain and settings.drain is agent_settings.DrainMode.NEVER:
        sources.notes.append(
            'the setting drain is "never": drain the node yourself before the update'
        )
    return update, tuple(sources.notes)


def read_desired_target(
    machine: Machine, record: ledger_record.LedgerRecord
) -> ledger_record.Target:
    """Return the desired target that the agent read last."""
    if record.update is not None:
        return record.update.target
    match local_machine.find_agent_status(machine):
        case {"desired": {"config": config, "image": image}}:
            return ledger_record.Target(str(config), str(image))
        case _:
            return record.quarantined.target if record.quarantined else record.current


class _PlanSources:
    """Configs and policy, from this machine or the API server.

    After one error the API server is skipped, so that a command waits for one timeout only.
    """

    def __init__(self, machine: Machine, config: str | None) -> None:
        self._machine = machine
        self._config = config
        self._unreachable_reason = ""
        self.notes: list[str] = []

    def find_config(self, name: str) -> ParsedConfig | None:
        """Return the stored or the fetched config; None if neither is available."""
        cached = config_cache.ConfigCache(
            self._machine.files, self.fetch_machine_config
        ).read_cached(name)
        return cached or self._query_cluster(lambda node: ParsedConfig(node.machine_config(name)))

    def fetch_machine_config(self, name: str) -> machineconfig.MachineConfig:
        """Fetch the config from the API server; raise `ClusterError` or `ConfigError`."""
        with connect_own_node(self._machine, self._config) as node:
            return node.machine_config(name)

    def must_image_have_files(self, *, default: bool) -> bool:
        """Return whether the image must contain the files: by the Node, or by the settings."""
        chosen = self._query_cluster(
            lambda node: Node.from_json(node.read_node()).annotations.get(key.IMAGE_FILES, "")
        )
        return (
            chosen == agent_settings.ImageFiles.BAKED
            if chosen in set(agent_settings.ImageFiles)
            else default
        )

    def find_policy(self) -> disruptionpolicy.DisruptionPolicy:
        """Return the policy of the cluster, or the default policy with a note."""
        policy = self._query_cluster(OwnNode.fetch_policy)
        if policy is None:
            self.notes.append(
                f"the plan assumes the default node disruption policy: {self._unreachable_reason}"
            )
        return policy or disruptionpolicy.DEFAULT_POLICY

    def _query_cluster(self, query: Callable[[OwnNode], T]) -> T | None:
        if self._unreachable_reason:
            return None
        try:
            with connect_own_node(self._machine, self._config) as node:
                return query(node)
        except (errors.ClusterError, errors.UsageError) as error:
            self._unreachable_reason = str(error)
            return None


def _inspect_machine(
    machine: Machine,
    record: ledger_record.LedgerRecord,
    old: ParsedConfig,
    new: ParsedConfig,
    target: ledger_record.Target,
    notes: list[str],
) -> preview.MachinePlan | None:
    """Plan the steps for this machine; add a note if it cannot be inspected."""
    wanted = new.wanted
    try:
        booted = _read_deployment_state(machine, record)
        change = os_change.compute_os_change(old.wanted.os, wanted.os, booted, image=target.image)
        notes += os_change.describe_kept_arguments(old.wanted.os, wanted.os, booted)
    except errors.HostError as error:
        notes.append(f"the plan assumes that the booted deployment matches the config: {error}")
        change = None
    split = image_content.ImageSplit(wanted)
    try:
        configuration = local_machine.create_configuration(
            machine, is_running=machine.root.prefix == Path("/")
        )
        if target.image and (change is None or change.image):
            split = image_content.assume_provided(wanted)
        elif target.image:
            content = read_image_content(open_booted_tree(machine.root), wanted)
            split = image_content.compare_with_image(wanted, content)
        steps = configuration.plan_steps(split.wanted, new.config.name, split.provided).steps
    except errors.HostError as error:
        notes.append(f"the plan compares the configs only, not this machine: {error}")
        return None
    is_image_booted = bool(target.image) and change is not None and not change.image
    return preview.MachinePlan(steps, change, split if is_image_booted else None)


def _read_deployment_state(
    machine: Machine, record: ledger_record.LedgerRecord
) -> os_change.DeploymentState:
    from treenail.cli.node.backend import read_deployments

    return summarize_deployments(
        read_deployments(machine), machine.kernel, record.machine_arguments
    )
