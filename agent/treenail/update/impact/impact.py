"""The impact of an update on its machine, computed before anything changes.

It includes the disruption: the least one that brings a change of configs into effect, and its
causes. The order is: nothing < daemon-reload < reload < restart < drain < reboot.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Annotated, TypeVar, assert_never

from treenail import deployment_change
from treenail.api import disruptionpolicy, machineconfig
from treenail.config import node_paths, provenance, wanted_state
from treenail.config.diff import ConfigDiff, EntryChange, OSAspect, compare_configs
from treenail.encoding import codec
from treenail.update.impact import os_change
from treenail.update.steps import step_types

IMAGE_SOURCE = "the image beside the config"
"""Names the request for an image that no MachineConfig has."""


class DisruptionLevel(IntEnum):
    """The level of disruption of an action."""

    NONE = 0
    DAEMON_RELOAD = 1
    RELOAD = 2
    RESTART = 3
    DRAIN = 4
    REBOOT = 5


@dataclass(frozen=True, slots=True)
class DisruptionReason:
    """A difference of configs, and the rule of the policy for it."""

    subject: str
    rule: str
    source: str = ""
    """The MachineConfig behind it; empty if unknown."""

    def __str__(self) -> str:
        source = f", from {self.source}" if self.source else ""
        return f"{self.subject} ({self.rule}){source}"


@dataclass(frozen=True, slots=True)
class DisruptionCost:
    """An action and the differences that require it."""

    action: disruptionpolicy.PolicyAction
    reasons: tuple[DisruptionReason, ...]

    @property
    def level(self) -> DisruptionLevel:
        return rank_action(self.action)


@dataclass(frozen=True, slots=True)
class ConfigDisruption:
    """The actions, the least disruptive first; a reboot replaces all others."""

    costs: tuple[DisruptionCost, ...] = ()
    harmless: tuple[DisruptionReason, ...] = ()
    """The differences that disrupt nothing."""

    @property
    def level(self) -> DisruptionLevel:
        return self.costs[-1].level if self.costs else DisruptionLevel.NONE

    @property
    def needs_drain(self) -> bool:
        """The node must be drained."""
        return self.level >= DisruptionLevel.DRAIN

    @property
    def needs_reboot(self) -> bool:
        return self.level is DisruptionLevel.REBOOT


class ConfigSources:
    """The MachineConfig that decided each difference that `compute_disruption` names."""

    def __init__(
        self,
        diff: ConfigDiff,
        old: machineconfig.MachineConfig,
        new: machineconfig.MachineConfig,
        *,
        image_source: str = "",
    ) -> None:
        """Find the sources; ``image_source`` requested the image if no MachineConfig did.

        Raises `ConfigError` when the provenance in a config's annotation is invalid.
        """
        self._by_subject = dict(_find_sources(diff, _read_provenance(old), _read_provenance(new)))
        if image_source:
            self._by_subject[f"{OSAspect.IMAGE} changed"] = image_source

    def find_cause(self, reason: DisruptionReason) -> DisruptionReason:
        """Return the reason with its source."""
        return replace(reason, source=self._by_subject.get(reason.subject, ""))


def compute_disruption(
    diff: ConfigDiff, policy: disruptionpolicy.DisruptionPolicy
) -> ConfigDisruption:
    """Return the disruption that the policy requires for the differences."""
    reasons_by_action: dict[disruptionpolicy.PolicyAction, list[DisruptionReason]] = {}
    for action, reason in _find_actions(diff, policy):
        reasons_by_action.setdefault(action, []).append(reason)
    harmless = tuple(reasons_by_action.pop(disruptionpolicy.NonePolicyAction(), ()))
    if disruptionpolicy.RebootPolicyAction() in reasons_by_action:
        reasons_by_action = {
            disruptionpolicy.RebootPolicyAction(): reasons_by_action[
                disruptionpolicy.RebootPolicyAction()
            ]
        }
    costs = [
        DisruptionCost(action, tuple(reasons))
        for action, reasons in reasons_by_action.items()
        # A restart also reads the configuration again.
        if not (
            isinstance(action, disruptionpolicy.ReloadPolicyAction)
            and disruptionpolicy.RestartPolicyAction(action.unit) in reasons_by_action
        )
    ]
    return ConfigDisruption(tuple(sorted(costs, key=_rank_cost)), harmless)


def rank_action(action: disruptionpolicy.PolicyAction) -> DisruptionLevel:
    """Return the level of an action."""
    match action:
        case disruptionpolicy.NonePolicyAction():
            return DisruptionLevel.NONE
        case disruptionpolicy.DaemonReloadPolicyAction():
            return DisruptionLevel.DAEMON_RELOAD
        case disruptionpolicy.ReloadPolicyAction():
            return DisruptionLevel.RELOAD
        case disruptionpolicy.RestartPolicyAction():
            return DisruptionLevel.RESTART
        case disruptionpolicy.DrainPolicyAction() | disruptionpolicy.SpecialPolicyAction():
            return DisruptionLevel.DRAIN
        case disruptionpolicy.RebootPolicyAction():
            return DisruptionLevel.REBOOT
        case _:
            assert_never(action)


def _rank_cost(cost: DisruptionCost) -> tuple[DisruptionLevel, str]:
    action = cost.action
    unit = (
        action.unit
        if isinstance(
            action, disruptionpolicy.ReloadPolicyAction | disruptionpolicy.RestartPolicyAction
        )
        else ""
    )
    return cost.level, unit


def _find_actions(
    diff: ConfigDiff, policy: disruptionpolicy.DisruptionPolicy
) -> Iterator[tuple[disruptionpolicy.PolicyAction, DisruptionReason]]:
    for change in diff.files:
        yield from _find_path_actions(
            "file", change, policy, is_safe=_is_safe_registries_change(change)
        )
    for directory in diff.directories:
        yield from _find_path_actions("directory", directory, policy, is_safe=False)
    for link in diff.links:
        yield from _find_path_actions("link", link, policy, is_safe=False)
    units = {unit_policy.name: unit_policy.actions for unit_policy in policy.units}
    for unit in diff.units:
        rule = f"policy for {unit.key}" if unit.key in units else "no policy for this unit"
        for action in units.get(unit.key, (disruptionpolicy.RebootPolicyAction(),)):
            yield action, DisruptionReason(f"unit {unit}", rule)
    for user in diff.users:
        for action in policy.ssh_key_actions:
            yield action, DisruptionReason(f"keys or password of {user}", "policy for sshkey")
    for aspect in diff.os:
        # Another image of extensions does not change the installed packages.
        if aspect is not OSAspect.EXTENSIONS_IMAGE:
            yield (
                disruptionpolicy.RebootPolicyAction(),
                DisruptionReason(f"{aspect} changed", "part of the operating system"),
            )


def _find_path_actions(
    kind: str,
    change: EntryChange[object],
    policy: disruptionpolicy.DisruptionPolicy,
    *,
    is_safe: bool,
) -> Iterator[tuple[disruptionpolicy.PolicyAction, DisruptionReason]]:
    """Return the actions of the policy for the path, or for its closest parent directory."""
    policies = [
        rule
        for rule in policy.files
        if change.key == rule.path or change.key.startswith(rule.path.rstrip("/") + "/")
    ]
    if not policies:
        yield (
            disruptionpolicy.RebootPolicyAction(),
            DisruptionReason(f"{kind} {change}", "no policy for this path"),
        )
        return
    closest = max(policies, key=lambda rule: len(rule.path))
    reason = DisruptionReason(f"{kind} {change}", f"policy for {closest.path}")
    for action in closest.actions:
        if not isinstance(action, disruptionpolicy.SpecialPolicyAction):
            yield action, reason
            continue
        yield disruptionpolicy.ReloadPolicyAction(disruptionpolicy.CRIO), reason
        if not is_safe:
            yield disruptionpolicy.DrainPolicyAction(), reason


def _is_safe_registries_change(change: EntryChange[wanted_state.WantedFile]) -> bool:
    """Return whether the container runtime can read the changed file while pods run."""
    if change.key != node_paths.REGISTRIES_CONF or change.old is None or change.new is None:
        return False
    from treenail.config import image_mirrors  # noqa: PLC0415 - rare, and it needs tomllib

    return image_mirrors.is_safe_change(
        change.old.contents.decode_bytes(), change.new.contents.decode_bytes()
    )


def describe_action(action: disruptionpolicy.PolicyAction) -> str:
    """Return the action as text for users."""
    match action:
        case disruptionpolicy.NonePolicyAction():
            return "nothing"
        case disruptionpolicy.DaemonReloadPolicyAction():
            return "daemon-reload"
        case disruptionpolicy.ReloadPolicyAction(unit):
            return f"reload {unit}"
        case disruptionpolicy.RestartPolicyAction(unit):
            return f"restart {unit}"
        case disruptionpolicy.DrainPolicyAction() | disruptionpolicy.SpecialPolicyAction():
            return "drain"
        case disruptionpolicy.RebootPolicyAction():
            return "drain and reboot"


def _read_provenance(config: machineconfig.MachineConfig) -> provenance.Provenance:
    text = config.metadata.annotations.get(provenance.PROVENANCE)
    return provenance.Provenance({}) if text is None else provenance.Provenance.from_text(text)


def _find_sources(
    diff: ConfigDiff, old: provenance.Provenance, new: provenance.Provenance
) -> Iterator[tuple[str, str]]:
    def find_last(section: str, key: str) -> str:
        return _name_last(new.find_sources(section, key) or old.find_sources(section, key))

    for file in diff.files:
        yield f"file {file}", find_last("files", file.key)
    for directory in diff.directories:
        yield f"directory {directory}", find_last("directories", directory.key)
    for link in diff.links:
        yield f"link {link}", find_last("links", link.key)
    for unit in diff.units:
        yield f"unit {unit}", find_last("units", unit.key)
    for user in diff.users:
        yield f"keys or password of {user}", find_last("users", user.key)
    for aspect in diff.os:
        sources = new.find_section_sources(aspect.value) or old.find_section_sources(aspect.value)
        yield f"{aspect} changed", _name_last(sources)


def _name_last(sources: tuple[str, ...]) -> str:
    return f"MachineConfig {sources[-1]}" if sources else ""


T = TypeVar("T", bound=object)

REASONS_LIMIT = 20


@dataclass(frozen=True, slots=True)
class UpdateImpact:
    """The part of a planned update that decisions depend on; it holds no contents."""

    os: Annotated[deployment_change.DeploymentChange, codec.Key(is_required=True)] = (
        deployment_change.NO_CHANGE
    )
    needs_write: Annotated[bool, codec.Key("needsWrite", is_required=True)] = False
    """Files, units or users must be written."""
    level: Annotated[
        DisruptionLevel, codec.Key(fallback=DisruptionLevel.REBOOT, is_required=True)
    ] = DisruptionLevel.NONE
    reasons: tuple[str, ...] = ()
    """The causes of the most disruptive action, at most `REASONS_LIMIT`."""
    checked_id: Annotated[str, codec.Key("checkedID")] = ""
    """The deployment whose image was compared with the config; empty before, and without an image
    beside the config."""
    writes_image_files: Annotated[bool, codec.Key("writesImageFiles")] = False
    """In image mode the agent writes the files and units that the image lacks."""
    machine_arguments: Annotated[Mapping[str, int], codec.Key("machineArguments")] = field(
        default_factory=dict
    )
    """How often the machine itself has each kernel argument of the configs."""

    @property
    def level_name(self) -> str:
        """The level as a word for users."""
        return self.level.name.lower().replace("_", "-")

    @property
    def needs_drain(self) -> bool:
        """The node must be drained."""
        return self.level >= DisruptionLevel.DRAIN

    @property
    def needs_reboot(self) -> bool:
        return self.level is DisruptionLevel.REBOOT


def compute_impact(
    steps: Sequence[step_types.ConfigStep],
    impact: UpdateImpact,
    disruption: ConfigDisruption,
    find_cause: Callable[[DisruptionReason], object],
) -> UpdateImpact:
    """Return the impact with its level, and with the causes of its most disruptive action."""
    gravest = disruption.costs[-1].reasons if disruption.costs else ()
    reasons = tuple(str(find_cause(reason)) for reason in gravest[: REASONS_LIMIT - 1])
    if len(gravest) > len(reasons):
        reasons += (f"and {len(gravest) - len(reasons)} more",)
    return replace(impact, needs_write=bool(steps), level=disruption.level, reasons=reasons)


def compute_differences(
    old: wanted_state.WantedState,
    new: wanted_state.WantedState,
    steps: Sequence[step_types.ConfigStep],
    change: deployment_change.DeploymentChange,
) -> ConfigDiff:
    """Return the differences between the configs, and of the machine from the new one.

    Of the operating system only ``change`` counts: the rest is booted already.
    """
    configs, machine = compare_configs(old, new), convert_steps_to_diff(new, steps)
    return ConfigDiff(
        files=tuple(_merge_changes(configs.files, machine.files)),
        directories=tuple(_merge_changes(configs.directories, machine.directories)),
        links=tuple(_merge_changes(configs.links, machine.links)),
        units=tuple(_merge_changes(configs.units, machine.units)),
        users=tuple(_merge_changes(configs.users, machine.users)),
        os=os_change.list_aspects(change),
    )


def plan_service_steps(
    steps: Sequence[step_types.ConfigStep], actions: Sequence[disruptionpolicy.PolicyAction]
) -> tuple[step_types.ConfigStep, ...]:
    """Return the steps that make services notice other steps: the ``actions`` of a policy.

    systemd reloads its units first if one changed.
    """
    service_steps: list[step_types.ConfigStep] = []
    if disruptionpolicy.DaemonReloadPolicyAction() in actions or any(map(_is_unit_step, steps)):
        service_steps.append(step_types.ReloadDaemon())
    for action in actions:
        if isinstance(action, disruptionpolicy.ReloadPolicyAction):
            service_steps.append(step_types.ReloadUnit(action.unit))
        elif isinstance(action, disruptionpolicy.RestartPolicyAction):
            service_steps.append(step_types.RestartUnit(action.unit))
    return tuple(service_steps)


def convert_steps_to_diff(
    new: wanted_state.WantedState, steps: Sequence[step_types.ConfigStep]
) -> ConfigDiff:
    """Return the steps as differences of configs, to which a disruption policy applies."""
    written = {
        step.path
        for step in steps
        if isinstance(step, step_types.WriteFile | step_types.RestoreEntry)
    }
    removed = {step.path for step in steps if isinstance(step, step_types.RemoveEntry)}
    links = {step.path for step in steps if isinstance(step, step_types.MakeLink)}

    def is_unit_file(path: str) -> bool:
        return _is_unit_path(path) and path not in new.files

    units = {
        *(
            name
            for step in steps
            if isinstance(step, step_types.EnablementStep)
            for name in step.units
        ),
        *(_parse_unit_name(path) for path in written | removed | links if is_unit_file(path)),
    }
    return ConfigDiff(
        files=tuple(
            EntryChange(path, wanted_state.WantedFile(path), None)
            if path in removed
            else EntryChange(path, None, new.files.get(path, wanted_state.WantedFile(path)))
            for path in sorted(written | removed)
            if not is_unit_file(path)
        ),
        directories=tuple(
            EntryChange(step.path, None, new.directories.get(step.path))
            for step in steps
            if isinstance(step, step_types.MakeDirectory)
        ),
        links=tuple(
            EntryChange(path, None, new.links.get(path))
            for path in sorted(links)
            if not is_unit_file(path)
        ),
        units=tuple(EntryChange(name, None, new.units.get(name)) for name in sorted(units)),
        users=tuple(
            EntryChange(name, None, new.users.get(name))
            for name in dict.fromkeys(
                step.user
                for step in steps
                if isinstance(step, step_types.SetSshKeys | step_types.SetPassword)
            )
        ),
    )


def _is_unit_step(step: step_types.ConfigStep) -> bool:
    if isinstance(step, step_types.EnablementStep):
        return True
    return (
        isinstance(step, step_types.EntryStep)
        and not isinstance(step, step_types.BackUpEntry | step_types.RelabelEntry)
        and _is_unit_path(step.path)
    )


def _is_unit_path(path: str) -> bool:
    return path.startswith(node_paths.UNIT_DIRECTORY + "/")


def _parse_unit_name(path: str) -> str:
    """Return the unit of a unit file or drop-in."""
    return path.removeprefix(node_paths.UNIT_DIRECTORY + "/").partition("/")[0].removesuffix(".d")


def _merge_changes(
    configs: Sequence[EntryChange[T]], machine: Sequence[EntryChange[T]]
) -> Iterator[EntryChange[T]]:
    """Return all changes; one between configs replaces the less precise one of the machine."""
    yield from configs
    known = {change.key for change in configs}
    yield from (change for change in machine if change.key not in known)
