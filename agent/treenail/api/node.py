"""A Node, as far as the agent looks at it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from treenail.api.decode import Fields
from treenail.api.meta import Condition, ObjectMeta


@dataclass(frozen=True, slots=True)
class Node:
    """One look at a Node."""

    name: str
    annotations: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    unschedulable: bool = False
    ready: bool = False
    """The Ready condition is True."""
    not_ready: str = ""
    """Why it is not, as the kubelet says."""
    boot_id: str = ""
    """The boot of the kernel in which the kubelet reported last."""
    heard: str = ""
    """When the kubelet reported last, RFC 3339; not later than every few minutes."""
    uid: str = ""
    resource_version: str = ""

    @classmethod
    def from_json(cls, document: object) -> "Node":
        """The Node in an API object; raises `ConfigError`."""
        fields = Fields.of(document, "Node")
        meta = ObjectMeta.from_fields(fields.nested("metadata"))
        status = fields.nested("status")
        conditions = status.each("conditions", Condition.from_fields)
        ready = next((each for each in conditions if each.type == "Ready"), None)
        heard = status.each("conditions", lambda each: each.text("lastHeartbeatTime"))
        return cls(
            name=fields.nested("metadata").required_text("name"),
            annotations=meta.annotations,
            labels=meta.labels,
            unschedulable=fields.nested("spec").flag("unschedulable"),
            ready=ready is not None and ready.status == "True",
            not_ready=ready.message if ready is not None and ready.status != "True" else "",
            boot_id=status.nested("nodeInfo").text("bootID"),
            heard=max(heard, default=""),
            uid=meta.uid,
            resource_version=meta.resource_version,
        )
