"""NodeDisruptionPolicy: what a change of a file, a unit or a key costs a node in service."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from treenail.api.decode import Fields
from treenail.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Nothing:
    """The change is in effect once it is written."""


@dataclass(frozen=True, slots=True)
class DaemonReload:
    """systemd reads its units again."""


@dataclass(frozen=True, slots=True)
class Reload:
    """A unit reads its configuration again."""

    unit: str


@dataclass(frozen=True, slots=True)
class Restart:
    """A unit is restarted."""

    unit: str


@dataclass(frozen=True, slots=True)
class Drain:
    """The node's pods are evicted."""


@dataclass(frozen=True, slots=True)
class Reboot:
    """The node is drained and rebooted."""


@dataclass(frozen=True, slots=True)
class Special:
    """The container runtime reads its registries again, drained unless the change is safe."""


Action = Nothing | DaemonReload | Reload | Restart | Drain | Reboot | Special
Actions = tuple[Action, ...]

_PLAIN: dict[str, Action] = {
    "None": Nothing(),
    "DaemonReload": DaemonReload(),
    "Drain": Drain(),
    "Reboot": Reboot(),
    "Special": Special(),
}
_ALONE = (Nothing(), Reboot())


@dataclass(frozen=True, slots=True)
class FilePolicy:
    """For the file at ``path``, and those below it if it is a directory."""

    path: str
    actions: Actions


@dataclass(frozen=True, slots=True)
class UnitPolicy:
    """For the unit of this name."""

    name: str
    actions: Actions


@dataclass(frozen=True, slots=True)
class DisruptionPolicy:
    """What each change costs; a file or unit that no policy is for costs a reboot."""

    files: tuple[FilePolicy, ...] = ()
    units: tuple[UnitPolicy, ...] = ()
    logins: Actions = (Nothing(),)
    """For SSH keys and the password."""

    @classmethod
    def from_fields(cls, fields: Fields) -> "DisruptionPolicy":
        """The policy in its API form; raises `ConfigError`."""
        logins = fields.nested("sshkey")
        return cls(
            files=fields.each("files", lambda f: FilePolicy(f.required_text("path"), _actions(f))),
            units=fields.each("units", lambda f: UnitPolicy(f.required_text("name"), _actions(f))),
            logins=_actions(logins) if logins.values else (Nothing(),),
        )

    def overridden_by(self, other: "DisruptionPolicy") -> "DisruptionPolicy":
        """This policy, but where the other has one for the same path or name, that one."""
        return DisruptionPolicy(
            files=_overridden(self.files, other.files, lambda policy: policy.path),
            units=_overridden(self.units, other.units, lambda policy: policy.name),
            logins=other.logins,
        )


@dataclass(frozen=True, slots=True)
class ClusterPolicy:
    """The policy of a cluster; not ``settled`` while its operator still works on a change to it."""

    policy: DisruptionPolicy
    settled: bool = True
    overrides: tuple[str, ...] = ()
    """What of ``storage`` may differ between a node and its config."""

    @classmethod
    def from_json(cls, document: object) -> "ClusterPolicy":
        """The policy in a MachineConfiguration: the operator's result, or what it would make."""
        fields = Fields.of(document, "MachineConfiguration")
        status = fields.nested("status")
        generation = fields.nested("metadata").optional_integer("generation")
        settled = generation == status.optional_integer("observedGeneration")
        overrides = (
            fields.nested("spec").nested("irreconcilableValidationOverrides").texts("storage")
        )
        made = status.nested("nodeDisruptionPolicyStatus").nested("clusterPolicies")
        if made.values:
            return cls(DisruptionPolicy.from_fields(made), settled=settled, overrides=overrides)
        asked = fields.nested("spec").nested("nodeDisruptionPolicy")
        policy = DEFAULTS.overridden_by(DisruptionPolicy.from_fields(asked))
        return cls(policy, settled=settled, overrides=overrides)


_CRIO = "crio.service"
_KUBELET = "kubelet.service"
_TRUST = "coreos-update-ca-trust.service"
_IRI = "iri-registry.service"
_ANCHORS = "/etc/pki/ca-trust/source/anchors"

DEFAULTS = DisruptionPolicy(
    files=(
        FilePolicy("/var/lib/kubelet/config.json", (Nothing(),)),
        FilePolicy("/etc/machine-config-daemon/no-reboot/containers-gpg.pub", (Reload(_CRIO),)),
        FilePolicy("/etc/containers/policy.json", (Reload(_CRIO),)),
        FilePolicy("/etc/containers/registries.d", (Reload(_CRIO),)),
        FilePolicy("/etc/crio/policies", (Reload(_CRIO),)),
        FilePolicy("/etc/containers/registries.conf", (Special(),)),
        FilePolicy("/etc/nmstate/openshift", (Nothing(),)),
        FilePolicy(
            f"{_ANCHORS}/openshift-config-user-ca-bundle.crt", (Restart(_TRUST), Restart(_CRIO))
        ),
        FilePolicy("/etc/kubernetes/credential-providers", (Restart(_KUBELET),)),
        FilePolicy(
            "/etc/systemd/system/kubelet.service.d/40-kubelet-crio-image-credential-provider.conf",
            (DaemonReload(), Restart(_KUBELET)),
        ),
        FilePolicy("/etc/iri-registry", (Restart(_IRI),)),
        FilePolicy("/usr/local/bin/load-registry-image.sh", (Restart(_IRI),)),
        FilePolicy(f"{_ANCHORS}/iri-root-ca.crt", (Restart(_TRUST),)),
    ),
    units=(UnitPolicy(_IRI, (DaemonReload(), Restart(_IRI))),),
)
"""What the reference's operator begins with."""


def _actions(fields: Fields) -> Actions:
    found = fields.each("actions", _action)
    if not found:
        raise fields.error(f"{fields.at('actions')}: expected at least one action, found none")
    if len(found) > 1 and any(action in _ALONE for action in found):
        raise fields.error(f"{fields.at('actions')}: Reboot and None go with no other action")
    return found


def _action(fields: Fields) -> Action:
    kind = fields.required_text("type")
    match kind:
        case "Reload":
            return Reload(fields.nested("reload").required_text("serviceName"))
        case "Restart":
            return Restart(fields.nested("restart").required_text("serviceName"))
        case _ if kind in _PLAIN:
            return _PLAIN[kind]
        case _:
            names = ", ".join((*_PLAIN, "Reload", "Restart"))
            raise ConfigError(f"{fields.at('type')}: expected one of {names}, found {kind!r:.40}")


def _overridden(
    present: tuple[T, ...], others: tuple[T, ...], key: Callable[[T], str]
) -> tuple[T, ...]:
    return tuple({key(policy): policy for policy in (*present, *others)}.values())
