"""The plan of this node: from what it has to what it is asked to be."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from treenail.api.disruptionpolicy import DEFAULT_POLICY, DisruptionPolicy
from treenail.api.machineconfig import MachineConfig
from treenail.api.meta import ObjectMeta
from treenail.cli.node.local_machine import create_inspector_and_runner
from treenail.cli.node.own_node import connect_own_node, load_node_settings
from treenail.clock import Clock
from treenail.config.wanted import read_wanted_state
from treenail.daemon.configuration.config_cache import ConfigCache
from treenail.daemon.reconcile.observe import summarize_deployments
from treenail.daemon.settings.settings import DrainMode, ImageFiles, RebootMode
from treenail.errors import ClusterError, HostError, UsageError
from treenail.host.filesystem.files import HostFiles
from treenail.host.filesystem.root import Root
from treenail.host.system.kernel import HostKernel
from treenail.host.system.state_file import Ledger
from treenail.update.impact.impact import apply_image_mode
from treenail.update.impact.os_change import RunningOS, compute_os_change
from treenail.update.impact.preview import MachinePlan, Preview, preview_update
from treenail.update.state import record as records
from treenail.update.state.record import LedgerRecord, Target
from treenail.update.steps.plan import plan_steps
from treenail.update.steps.steps import BackUpEntry, RecordOwnership

T = TypeVar("T")


def plan_node(
    root: Root, config: str | None, policy: DisruptionPolicy | None, clock: Clock
) -> tuple[Preview, tuple[str, ...]]:
    """What the agent would do next, and what that could not take into account, in sentences.

    Raises `UsageError` and `HostError` when too little is known.

    It works without the API server, as far as the agent has read the configs before.
    """
    settings = load_node_settings(root, config)
    images_bake = settings.image_files is ImageFiles.BAKED
    record = records.from_json(Ledger(root).read_document())
    target = read_desired_target(root, record)
    if not target.config:
        raise UsageError(
            "nothing is known of what this node is asked to be",
            remedy="start the agent, which reads it: systemctl start treenail",
        )
    reader = _PlanSources(root, config, clock)
    refused = record.quarantined
    if refused is not None and refused.target == target:
        reader.notes.append(f"it is not tried again: {refused.reason}; {refused.remedy}")
    new = reader.find_config(target.config)
    if new is None:
        raise HostError(
            f"there is no copy of {target.config} on this machine, and the API server is away",
            remedy="plan between two files instead: treenail plan OLD NEW",
        )
    current = record.current
    old = reader.find_config(current.config) if current.config else None
    if old is None and current.config:
        reader.notes.append(f"there is no copy of {current.config}: what it wrote is not known")
    old = old or MachineConfig(metadata=ObjectMeta(name=current.config))
    machine = _inspect_machine(root, old, new, target, reader.notes, clock, images_bake=images_bake)
    if machine is not None and target == current:
        # Drift alone moves no node; what is done about it is the policy's to say.
        left = [
            step for step in machine.steps if not isinstance(step, BackUpEntry | RecordOwnership)
        ]
        if left:
            reader.notes.append("something has drifted; see: treenail drift")
        machine = None
    found = preview_update(
        old,
        new,
        policy or reader.find_policy(),
        images=(current.image, target.image),
        has_files_in_image=images_bake,
        machine=machine,
    )
    if settings.reboot is RebootMode.AUTO and found.needs_reboot and found.can_keep_kernel:
        reader.notes.append(
            "it is a soft reboot if the kernel and its initramfs stay what they are: user space "
            "alone is started anew"
        )
    if found.needs_drain and settings.drain is DrainMode.NEVER:
        reader.notes.append("nobody is asked for the drain, as drain is never: drain it before")
    return found, tuple(reader.notes)


def read_desired_target(root: Root, record: LedgerRecord) -> Target:
    """What the node is asked to be, as the agent saw it last."""
    from treenail.cli.node.status import STATUS_PATH

    if record.update is not None:
        return record.update.target
    content = HostFiles(root).read_file(STATUS_PATH)
    try:
        live = json.loads(content) if content else {}
        desired = live.get("desired") or {}
        return Target(str(desired["config"]), str(desired["image"]))
    except (ValueError, KeyError, TypeError, AttributeError):
        return record.quarantined.target if record.quarantined else record.current


class _PlanSources:
    """Configs and policy, of this machine or of the API server, which is asked once."""

    def __init__(self, root: Root, config: str | None, clock: Clock) -> None:
        self._root = root
        self._config = config
        self._clock = clock
        self._unreachable_reason = ""
        self.notes: list[str] = []

    def find_config(self, name: str) -> MachineConfig | None:
        """The config, kept or asked for; None when neither is to be had."""
        kept = ConfigCache(HostFiles(self._root), self).read_cached(name)
        return kept or self._query_cluster(lambda: self.fetch_machine_config(name))

    def fetch_machine_config(self, name: str) -> MachineConfig:
        """The config as the cluster has it; raises `ClusterError` and `ConfigError`."""
        with connect_own_node(self._root, self._config, self._clock) as node:
            return node.machine_config(name)

    def find_policy(self) -> DisruptionPolicy:
        """The cluster's, or the defaults, with a note."""
        found = self._query_cluster(self._fetch_policy)
        if found is None:
            self.notes.append(
                f"the node disruption policy is taken to be the default: {self._unreachable_reason}"
            )
        return found or DEFAULT_POLICY

    def _fetch_policy(self) -> DisruptionPolicy:
        with connect_own_node(self._root, self._config, self._clock) as node:
            return node.fetch_policy()

    def _query_cluster(self, query: Callable[[], T]) -> T | None:
        if self._unreachable_reason:
            return None
        try:
            return query()
        except (ClusterError, UsageError) as error:
            self._unreachable_reason = str(error)
            return None


def _inspect_machine(
    root: Root,
    old: MachineConfig,
    new: MachineConfig,
    target: Target,
    notes: list[str],
    clock: Clock,
    *,
    images_bake: bool,
) -> MachinePlan | None:
    """What this machine needs; less, with a note, when it can't be looked at."""
    wish = read_wanted_state(new)
    wish = apply_image_mode(wish) if target.image and images_bake else wish
    try:
        survey, _ = create_inspector_and_runner(root, is_running=root.prefix == Path("/"))
        managed = survey.read_ownership()
        steps = plan_steps(
            managed, wish, survey.inspect_machine(managed, wish), config=new.name
        ).steps
    except HostError as error:
        notes.append(f"only the configs are compared, not this machine: {error}")
        return None
    try:
        running = _read_running_os(root, clock)
    except HostError as error:
        notes.append(f"what is booted is taken to be as the config says: {error}")
        return MachinePlan(steps, None)
    return MachinePlan(
        steps, compute_os_change(read_wanted_state(old).os, wish.os, running, image=target.image)
    )


def _read_running_os(root: Root, clock: Clock) -> RunningOS:
    from treenail.cli.node.choose_backend import read_deployments

    return summarize_deployments(
        read_deployments(root, clock), HostKernel(root).read_command_line()
    ).running
