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
    is_unschedulable: bool = False
    is_ready: bool = False
    """The Ready condition is True."""
    not_ready_message: str = ""
    """Why it is not, as the kubelet says."""
    boot_id: str = ""
    """The boot of the kernel in which the kubelet reported last."""
    last_heartbeat: str = ""
    """When the kubelet reported last, RFC 3339; not later than every few minutes."""
    uid: str = ""
    resource_version: str = ""

    @classmethod
    def from_json(cls, document: object) -> "Node":
        """The Node in an API object; raises `ConfigError`."""
        fields = Fields.from_json(document, "Node")
        meta = ObjectMeta.from_fields(fields.get_object("metadata"))
        status = fields.get_object("status")
        conditions = status.map_objects("conditions", Condition.from_fields)
        ready = next((each for each in conditions if each.type == "Ready"), None)
        heard = status.map_objects("conditions", lambda each: each.get_text("lastHeartbeatTime"))
        return cls(
            name=fields.get_object("metadata").get_required_text("name"),
            annotations=meta.annotations,
            labels=meta.labels,
            is_unschedulable=fields.get_object("spec").get_bool("unschedulable"),
            is_ready=ready is not None and ready.status == "True",
            not_ready_message=ready.message if ready is not None and ready.status != "True" else "",
            boot_id=status.get_object("nodeInfo").get_text("bootID"),
            last_heartbeat=max(heard, default=""),
            uid=meta.uid,
            resource_version=meta.resource_version,
        )
