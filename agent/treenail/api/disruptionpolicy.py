"""NodeDisruptionPolicy: the actions that a change of a file, a unit or an SSH key needs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, TypeVar

from treenail.encoding import codec, json_values

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class NonePolicyAction:
    """The written change needs no action."""


@dataclass(frozen=True, slots=True)
class DaemonReloadPolicyAction:
    """systemd reloads its units (daemon-reload)."""


@dataclass(frozen=True, slots=True)
class ReloadPolicyAction:
    """Reload a unit."""

    unit: str


@dataclass(frozen=True, slots=True)
class RestartPolicyAction:
    """Restart a unit."""

    unit: str


@dataclass(frozen=True, slots=True)
class DrainPolicyAction:
    """Drain the node."""


@dataclass(frozen=True, slots=True)
class RebootPolicyAction:
    """Drain and reboot the node."""


@dataclass(frozen=True, slots=True)
class SpecialPolicyAction:
    """Reload the container runtime's registries; drain first unless the change is safe."""


PolicyAction = (
    NonePolicyAction
    | DaemonReloadPolicyAction
    | ReloadPolicyAction
    | RestartPolicyAction
    | DrainPolicyAction
    | RebootPolicyAction
    | SpecialPolicyAction
)
PolicyActions = tuple[PolicyAction, ...]

_ACTIONS_WITHOUT_UNIT: dict[str, PolicyAction] = {
    "None": NonePolicyAction(),
    "DaemonReload": DaemonReloadPolicyAction(),
    "Drain": DrainPolicyAction(),
    "Reboot": RebootPolicyAction(),
    "Special": SpecialPolicyAction(),
}
_EXCLUSIVE_ACTIONS = (NonePolicyAction(), RebootPolicyAction())


class _ActionFields(codec.Shape):
    type: codec.NonEmptyText
    reload_unit: Annotated[str, codec.Key("reload.serviceName")] = ""
    restart_unit: Annotated[str, codec.Key("restart.serviceName")] = ""


def _build_action(fields: _ActionFields) -> PolicyAction:
    kind = fields.type
    units = {"Reload": fields.reload_unit, "Restart": fields.restart_unit}
    if units.get(kind) == "":
        raise json_values.Mismatch("a string", at=[kind.lower(), "serviceName"])
    match kind:
        case "Reload":
            return ReloadPolicyAction(fields.reload_unit)
        case "Restart":
            return RestartPolicyAction(fields.restart_unit)
        case _ if kind in _ACTIONS_WITHOUT_UNIT:
            return _ACTIONS_WITHOUT_UNIT[kind]
        case _:
            expected = f"one of {', '.join((*_ACTIONS_WITHOUT_UNIT, *units))}"
            problem = f"expected {expected}, found {kind!r:.40}"
            raise json_values.Mismatch(problem=problem, at=["type"])


def _check_actions(actions: PolicyActions) -> PolicyActions:
    if not actions:
        raise json_values.Mismatch(problem="expected at least one action, found none")
    if len(actions) > 1 and any(action in _EXCLUSIVE_ACTIONS for action in actions):
        raise json_values.Mismatch(problem="Reboot and None must be the only action")
    return actions


_ActionsField = Annotated[
    PolicyActions,
    codec.Via(
        _check_actions,
        wire=tuple[Annotated[PolicyAction, codec.Via(_build_action, wire=_ActionFields)], ...],
    ),
]


@dataclass(frozen=True, slots=True)
class FileDisruptionPolicy(codec.JsonObject):
    """Policy for the file at ``path``, or for all files below that directory."""

    path: codec.NonEmptyText
    actions: _ActionsField


@dataclass(frozen=True, slots=True)
class UnitDisruptionPolicy(codec.JsonObject):
    """Policy for the unit of this name."""

    name: codec.NonEmptyText
    actions: _ActionsField


@dataclass(frozen=True, slots=True)
class DisruptionPolicy(codec.JsonObject):
    """Actions for each change; a file or unit without a policy needs a reboot."""

    files: tuple[FileDisruptionPolicy, ...] = ()
    units: tuple[UnitDisruptionPolicy, ...] = ()
    ssh_key_actions: Annotated[_ActionsField, codec.Key("sshkey.actions")] = (NonePolicyAction(),)
    """Actions for SSH keys and the password hash."""

    def override_with(self, other: "DisruptionPolicy") -> "DisruptionPolicy":
        """Merge both policies; ``other`` wins for the same path or name."""
        return DisruptionPolicy(
            files=_merge_policies(self.files, other.files, lambda policy: policy.path),
            units=_merge_policies(self.units, other.units, lambda policy: policy.name),
            ssh_key_actions=other.ssh_key_actions,
        )


class _MachineConfigurationFields(codec.Shape, where="MachineConfiguration"):
    status: codec.Json
    generation: Annotated[int | None, codec.Key("metadata.generation")] = None
    observed_generation: Annotated[int | None, codec.Key("status.observedGeneration")] = None
    reported: Annotated[
        DisruptionPolicy | None,
        codec.Key("status.nodeDisruptionPolicyStatus.clusterPolicies"),
    ] = None
    requested: Annotated[DisruptionPolicy, codec.Key("spec.nodeDisruptionPolicy")] = (
        DisruptionPolicy()
    )
    overrides: Annotated[
        tuple[str, ...], codec.Key("spec.irreconcilableValidationOverrides.storage")
    ] = ()


@dataclass(frozen=True, slots=True)
class ClusterDisruptionPolicy:
    """Policy of a cluster; ``is_settled`` is False while the operator applies a change of it."""

    policy: DisruptionPolicy
    is_settled: bool = True
    irreconcilable_overrides: tuple[str, ...] = ()
    """Parts of ``storage`` that may differ between a node and its config."""

    @classmethod
    def from_json(cls, document: object) -> "ClusterDisruptionPolicy":
        """Read a MachineConfiguration: its status, else its spec over the defaults."""
        fields = _MachineConfigurationFields.from_json(document)
        # Without the MCO no program writes a status, and then the spec applies at once.
        is_settled = not fields.status or fields.generation == fields.observed_generation
        return cls(
            fields.reported or DEFAULT_POLICY.override_with(fields.requested),
            is_settled=is_settled,
            irreconcilable_overrides=fields.overrides,
        )


CRIO = "crio.service"
_KUBELET = "kubelet.service"
_TRUST = "coreos-update-ca-trust.service"
_IRI = "iri-registry.service"
_ANCHORS = "/etc/pki/ca-trust/source/anchors"

DEFAULT_POLICY = DisruptionPolicy(
    files=(
        FileDisruptionPolicy("/var/lib/kubelet/config.json", (NonePolicyAction(),)),
        FileDisruptionPolicy(
            "/etc/machine-config-daemon/no-reboot/containers-gpg.pub", (ReloadPolicyAction(CRIO),)
        ),
        FileDisruptionPolicy("/etc/containers/policy.json", (ReloadPolicyAction(CRIO),)),
        FileDisruptionPolicy("/etc/containers/registries.d", (ReloadPolicyAction(CRIO),)),
        FileDisruptionPolicy("/etc/crio/policies", (ReloadPolicyAction(CRIO),)),
        FileDisruptionPolicy("/etc/containers/registries.conf", (SpecialPolicyAction(),)),
        FileDisruptionPolicy("/etc/nmstate/openshift", (NonePolicyAction(),)),
        FileDisruptionPolicy(
            f"{_ANCHORS}/openshift-config-user-ca-bundle.crt",
            (RestartPolicyAction(_TRUST), RestartPolicyAction(CRIO)),
        ),
        FileDisruptionPolicy(
            "/etc/kubernetes/credential-providers", (RestartPolicyAction(_KUBELET),)
        ),
        FileDisruptionPolicy(
            "/etc/systemd/system/kubelet.service.d/40-kubelet-crio-image-credential-provider.conf",
            (DaemonReloadPolicyAction(), RestartPolicyAction(_KUBELET)),
        ),
        FileDisruptionPolicy("/etc/iri-registry", (RestartPolicyAction(_IRI),)),
        FileDisruptionPolicy("/usr/local/bin/load-registry-image.sh", (RestartPolicyAction(_IRI),)),
        FileDisruptionPolicy(f"{_ANCHORS}/iri-root-ca.crt", (RestartPolicyAction(_TRUST),)),
    ),
    units=(UnitDisruptionPolicy(_IRI, (DaemonReloadPolicyAction(), RestartPolicyAction(_IRI))),),
)
"""Default policies of the MCO (NodeDisruptionPolicy of the cluster)."""


def _merge_policies(
    present: tuple[T, ...], others: tuple[T, ...], key: Callable[[T], str]
) -> tuple[T, ...]:
    return tuple({key(policy): policy for policy in (*present, *others)}.values())
