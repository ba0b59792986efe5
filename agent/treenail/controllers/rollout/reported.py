"""What a node reports in its MachineConfigNode, where nodes have one."""

from dataclasses import dataclass

from treenail.api.decode import Fields
from treenail.api.machineconfignode import ConditionType
from treenail.api.meta import Condition, ObjectMeta
from treenail.controllers.rollout.nodes import RolloutTarget


@dataclass(frozen=True, slots=True)
class NodeReport:
    """The status of a MachineConfigNode, as far as counting goes."""

    name: str
    config: str = ""
    """The config the node says it is after."""
    image: str = ""
    is_updated: bool = False
    degraded_message: str | None = None
    """Why the node says it is degraded; None when it does not say so."""

    @classmethod
    def from_json(cls, document: object) -> "NodeReport":
        """The report in a MachineConfigNode; raises `ConfigError`."""
        fields = Fields.from_json(document, "MachineConfigNode")
        status = fields.get_object("status")
        true = {
            found.type: found
            for found in status.map_objects("conditions", Condition.from_fields)
            if found.status == "True"
        }
        degraded = true.get(ConditionType.NODE_DEGRADED)
        return cls(
            name=ObjectMeta.from_fields(fields.get_object("metadata")).name,
            config=status.get_object("configVersion").get_text("desired"),
            image=status.get_object("configImage").get_text("desiredImage"),
            is_updated=ConditionType.UPDATED in true,
            degraded_message=degraded.message if degraded else None,
        )

    def is_updated_to(self, target: RolloutTarget) -> bool:
        """The node says it was updated, and to this."""
        return self.is_updated and self.is_assigned(target)

    def is_assigned(self, target: RolloutTarget) -> bool:
        if target.config == "" or self.config != target.config:
            return False
        return self.image == (target.image or "") and target.image != ""
