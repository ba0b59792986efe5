"""The parts of a Node that the agent needs."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from treenail.api import decode, object_meta
from treenail.encoding import codec

DEFAULT_ARCHITECTURE = "amd64"
"""For a pool without nodes."""
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}

_PLACEHOLDER_NAMES = frozenset({
    # Without a name (systemd, man 5 hostname; an unset utsname), and those of /etc/hosts.
    "", "(none)", "linux", "none", "localhost", "localhost4", "localhost6",
    "fedora", "centos", "rhel", "almalinux", "rocky",  # DEFAULT_HOSTNAME in their os-release
    # /etc/hostname in images of installers and clouds
    "debian", "ubuntu", "archlinux", "opensuse", "raspberrypi", "core", "host", "host-name",
})  # fmt: skip


def is_placeholder_name(name: str) -> bool:
    """Return whether machines have this host name before they get one of their own."""
    return name.partition(".")[0] in _PLACEHOLDER_NAMES


def convert_machine_name(machine: str) -> str:
    """Return the architecture of a machine of uname(2), as in the label ``kubernetes.io/arch``."""
    return _ARCHITECTURES.get(machine, machine)


class _NodeCondition(codec.Shape):
    """A condition; the kubelet repeats it every few minutes."""

    type: str
    status: str
    message: str
    last_heartbeat_time: str


@dataclass(frozen=True, slots=True)
class Node:
    """Snapshot of a Node."""

    name: str
    annotations: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    is_unschedulable: bool = False
    is_ready: bool = False
    """True when the Ready condition is True."""
    not_ready_message: str = ""
    """Message of the Ready condition when it is not True."""
    boot_id: str = ""
    """Boot ID of the kernel at the last report of the kubelet."""
    last_heartbeat: str = ""
    """Time of the last kubelet report, RFC 3339. The kubelet reports every few minutes."""
    uid: str = ""
    resource_version: str = ""

    @classmethod
    def from_json(cls, document: object) -> "Node":
        """Read an API object; raise `ConfigError`."""
        fields = decode.Fields.from_json(document, "Node")
        meta = fields.get_object("metadata").read(object_meta.ObjectMeta)
        status = fields.get_object("status")
        conditions = status.read_list("conditions", _NodeCondition)
        ready = next((condition for condition in conditions if condition.type == "Ready"), None)
        return cls(
            name=fields.get_object("metadata").get_required_text("name"),
            annotations=meta.annotations,
            labels=meta.labels,
            is_unschedulable=fields.get_object("spec").get_bool("unschedulable"),
            is_ready=ready is not None and ready.status == "True",
            not_ready_message=ready.message if ready is not None and ready.status != "True" else "",
            boot_id=status.get_object("nodeInfo").get_text("bootID"),
            last_heartbeat=max((at.last_heartbeat_time for at in conditions), default=""),
            uid=meta.uid,
            resource_version=meta.resource_version,
        )
