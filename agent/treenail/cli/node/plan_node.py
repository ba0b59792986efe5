"""The plan of this node: from what it has to what it is asked to be."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from treenail.api.disruptionpolicy import DEFAULTS, DisruptionPolicy
from treenail.api.machineconfig import MachineConfig
from treenail.api.meta import ObjectMeta
from treenail.cli.node.local_machine import survey_and_runner
from treenail.cli.node.own_node import own_node, settings_of
from treenail.clock import Clock
from treenail.config.wanted import wanted
from treenail.daemon.configuration.config_cache import Configs
from treenail.daemon.reconcile.observe import deployed
from treenail.daemon.settings.settings import Drain, ImageFiles, Reboots
from treenail.errors import ClusterError, HostError, UsageError
from treenail.host.filesystem.files import Files
from treenail.host.filesystem.root import Root
from treenail.host.system.kernel import Kernel
from treenail.host.system.state_file import Ledger
from treenail.update.impact.impact import in_image_mode
from treenail.update.impact.os_change import Running, os_change
from treenail.update.impact.preview import Machine, Preview, preview
from treenail.update.state import record as records
from treenail.update.state.record import Record, Target
from treenail.update.steps.plan import plan
from treenail.update.steps.steps import Keep, Remember

T = TypeVar("T")


def node_plan(
    root: Root, config: str | None, policy: DisruptionPolicy | None, clock: Clock
) -> tuple[Preview, tuple[str, ...]]:
    """What the agent would do next, and what that could not take into account, in sentences.

    Raises `UsageError` and `HostError` when too little is known.

    It works without the API server, as far as the agent has read the configs before.
    """
    settings = settings_of(root, config)
    images_bake = settings.image_files is ImageFiles.BAKED
    record = records.from_json(Ledger(root).read())
    target = asked(root, record)
    if not target.config:
        raise UsageError(
            "nothing is known of what this node is asked to be",
            remedy="start the agent, which reads it: systemctl start treenail",
        )
    reader = _Reader(root, config, clock)
    refused = record.refused
    if refused is not None and refused.target == target:
        reader.notes.append(f"it is not tried again: {refused.reason}; {refused.remedy}")
    new = reader.config(target.config)
    if new is None:
        raise HostError(
            f"there is no copy of {target.config} on this machine, and the API server is away",
            remedy="plan between two files instead: treenail plan OLD NEW",
        )
    current = record.current
    old = reader.config(current.config) if current.config else None
    if old is None and current.config:
        reader.notes.append(f"there is no copy of {current.config}: what it wrote is not known")
    old = old or MachineConfig(metadata=ObjectMeta(name=current.config))
    machine = _machine(root, old, new, target, reader.notes, clock, images_bake=images_bake)
    if machine is not None and target == current:
        # Drift alone moves no node; what is done about it is the policy's to say.
        left = [step for step in machine.steps if not isinstance(step, Keep | Remember)]
        if left:
            reader.notes.append("something has drifted; see: treenail drift")
        machine = None
    found = preview(
        old,
        new,
        policy or reader.policy(),
        images=(current.image, target.image),
        images_bake=images_bake,
        machine=machine,
    )
    if settings.reboot is Reboots.AUTO and found.reboots and found.keeps_kernel:
        reader.notes.append(
            "it is a soft reboot if the kernel and its initramfs stay what they are: user space "
            "alone is started anew"
        )
    if found.drains and settings.drain is Drain.NEVER:
        reader.notes.append("nobody is asked for the drain, as drain is never: drain it before")
    return found, tuple(reader.notes)


def asked(root: Root, record: Record) -> Target:
    """What the node is asked to be, as the agent saw it last."""
    from treenail.cli.node.status import LIVE

    if record.update is not None:
        return record.update.target
    content = Files(root).read(LIVE)
    try:
        live = json.loads(content) if content else {}
        desired = live.get("desired") or {}
        return Target(str(desired["config"]), str(desired["image"]))
    except (ValueError, KeyError, TypeError, AttributeError):
        return record.refused.target if record.refused else record.current


class _Reader:
    """Configs and policy, of this machine or of the API server, which is asked once."""

    def __init__(self, root: Root, config: str | None, clock: Clock) -> None:
        self._root = root
        self._config = config
        self._clock = clock
        self._away = ""
        self.notes: list[str] = []

    def config(self, name: str) -> MachineConfig | None:
        """The config, kept or asked for; None when neither is to be had."""
        kept = Configs(Files(self._root), self).kept(name)
        return kept or self._asked(lambda: self.machine_config(name))

    def machine_config(self, name: str) -> MachineConfig:
        """The config as the cluster has it; raises `ClusterError` and `ConfigError`."""
        with own_node(self._root, self._config, self._clock) as node:
            return node.machine_config(name)

    def policy(self) -> DisruptionPolicy:
        """The cluster's, or the defaults, with a note."""
        found = self._asked(self._policy)
        if found is None:
            self.notes.append(
                f"the node disruption policy is taken to be the default: {self._away}"
            )
        return found or DEFAULTS

    def _policy(self) -> DisruptionPolicy:
        with own_node(self._root, self._config, self._clock) as node:
            return node.policy()

    def _asked(self, question: Callable[[], T]) -> T | None:
        if self._away:
            return None
        try:
            return question()
        except (ClusterError, UsageError) as error:
            self._away = str(error)
            return None


def _machine(
    root: Root,
    old: MachineConfig,
    new: MachineConfig,
    target: Target,
    notes: list[str],
    clock: Clock,
    *,
    images_bake: bool,
) -> Machine | None:
    """What this machine needs; less, with a note, when it can't be looked at."""
    wish = wanted(new)
    wish = in_image_mode(wish) if target.image and images_bake else wish
    try:
        survey, _ = survey_and_runner(root, running=root.prefix == Path("/"))
        managed = survey.managed()
        steps = plan(managed, wish, survey.see(managed, wish), config=new.name).steps
    except HostError as error:
        notes.append(f"only the configs are compared, not this machine: {error}")
        return None
    try:
        running = _running(root, clock)
    except HostError as error:
        notes.append(f"what is booted is taken to be as the config says: {error}")
        return Machine(steps, None)
    return Machine(steps, os_change(wanted(old).os, wish.os, running, image=target.image))


def _running(root: Root, clock: Clock) -> Running:
    from treenail.cli.node.choose_backend import deployments

    return deployed(deployments(root, clock), Kernel(root).command_line()).running
