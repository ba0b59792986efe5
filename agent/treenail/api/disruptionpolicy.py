"""NodeDisruptionPolicy: the actions that a change of a file, a unit or an SSH key needs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from treenail.api.decode import Fields
from treenail.errors import ConfigError

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


@dataclass(frozen=True, slots=True)
class FileDisruptionPolicy:
    """Policy for the file at ``path``, or for all files below that directory."""

    path: str
    actions: PolicyActions


@dataclass(frozen=True, slots=True)
class UnitDisruptionPolicy:
    """Policy for the unit of this name."""

    name: str
    actions: PolicyActions


@dataclass(frozen=True, slots=True)
class DisruptionPolicy:
    """Actions for each change; a file or unit without a policy needs a reboot."""

    files: tuple[FileDisruptionPolicy, ...] = ()
    units: tuple[UnitDisruptionPolicy, ...] = ()
    ssh_key_actions: PolicyActions = (NonePolicyAction(),)
    """Actions for SSH keys and the password hash."""

    @classmethod
    def from_fields(cls, fields: Fields) -> "DisruptionPolicy":
        """Read the policy; raise `ConfigError`."""
        logins = fields.get_object("sshkey")
        return cls(
            files=fields.map_objects(
                "files",
                lambda f: FileDisruptionPolicy(f.get_required_text("path"), _parse_actions(f)),
            ),
            units=fields.map_objects(
                "units",
                lambda f: UnitDisruptionPolicy(f.get_required_text("name"), _parse_actions(f)),
            ),
            ssh_key_actions=_parse_actions(logins) if logins.values else (NonePolicyAction(),),
        )

    def override_with(self, other: "DisruptionPolicy") -> "DisruptionPolicy":
        """Merge both policies; ``other`` wins for the same path or name."""
        return DisruptionPolicy(
            files=_merge_policies(self.files, other.files, lambda policy: policy.path),
            units=_merge_policies(self.units, other.units, lambda policy: policy.name),
            ssh_key_actions=other.ssh_key_actions,
        )


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
        fields = Fields.from_json(document, "MachineConfiguration")
        status = fields.get_object("status")
        generation = fields.get_object("metadata").get_optional_integer("generation")
        observed = status.get_optional_integer("observedGeneration")
        # Without the MCO no program writes a status, and then the spec applies at once.
        settled = not status.values or generation == observed
        overrides = (
            fields.get_object("spec")
            .get_object("irreconcilableValidationOverrides")
            .get_text_list("storage")
        )
        reported = status.get_object("nodeDisruptionPolicyStatus").get_object("clusterPolicies")
        if reported.values:
            return cls(
                DisruptionPolicy.from_fields(reported),
                is_settled=settled,
                irreconcilable_overrides=overrides,
            )
        requested = fields.get_object("spec").get_object("nodeDisruptionPolicy")
        policy = DEFAULT_POLICY.override_with(DisruptionPolicy.from_fields(requested))
        return cls(policy, is_settled=settled, irreconcilable_overrides=overrides)


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


def _parse_actions(fields: Fields) -> PolicyActions:
    actions = fields.map_objects("actions", _parse_action)
    if not actions:
        raise fields.error(f"{fields.path_of('actions')}: expected at least one action, found none")
    if len(actions) > 1 and any(action in _EXCLUSIVE_ACTIONS for action in actions):
        raise fields.error(f"{fields.path_of('actions')}: Reboot and None must be the only action")
    return actions


def _parse_action(fields: Fields) -> PolicyAction:
    kind = fields.get_required_text("type")
    match kind:
        case "Reload":
            return ReloadPolicyAction(fields.get_object("reload").get_required_text("serviceName"))
        case "Restart":
            return RestartPolicyAction(
                fields.get_object("restart").get_required_text("serviceName")
            )
        case _ if kind in _ACTIONS_WITHOUT_UNIT:
            return _ACTIONS_WITHOUT_UNIT[kind]
        case _:
            names = ", ".join((*_ACTIONS_WITHOUT_UNIT, "Reload", "Restart"))
            raise ConfigError(
                f"{fields.path_of('type')}: expected one of {names}, found {kind!r:.40}"
            )


def _merge_policies(
    present: tuple[T, ...], others: tuple[T, ...], key: Callable[[T], str]
) -> tuple[T, ...]:
    return tuple({key(policy): policy for policy in (*present, *others)}.values())
