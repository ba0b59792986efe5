"""What a node reports in its MachineConfigNode, where nodes have one."""

from dataclasses import dataclass

from treenail.api.decode import Fields
from treenail.api.machineconfignode import ConditionType
from treenail.api.meta import Condition, ObjectMeta
from treenail.controllers.rollout.nodes import Target


@dataclass(frozen=True, slots=True)
class Reported:
    """The status of a MachineConfigNode, as far as counting goes."""

    name: str
    config: str = ""
    """The config the node says it is after."""
    image: str = ""
    updated: bool = False
    degraded: str | None = None
    """Why the node says it is degraded; None when it does not say so."""

    @classmethod
    def from_json(cls, document: object) -> "Reported":
        """The report in a MachineConfigNode; raises `ConfigError`."""
        fields = Fields.of(document, "MachineConfigNode")
        status = fields.nested("status")
        true = {
            found.type: found
            for found in status.each("conditions", Condition.from_fields)
            if found.status == "True"
        }
        degraded = true.get(ConditionType.NODE_DEGRADED)
        return cls(
            name=ObjectMeta.from_fields(fields.nested("metadata")).name,
            config=status.nested("configVersion").text("desired"),
            image=status.nested("configImage").text("desiredImage"),
            updated=ConditionType.UPDATED in true,
            degraded=degraded.message if degraded else None,
        )

    def has(self, target: Target) -> bool:
        """The node says it was updated, and to this."""
        return self.updated and self.after(target)

    def after(self, target: Target) -> bool:
        if target.config == "" or self.config != target.config:
            return False
        return self.image == (target.image or "") and target.image != ""
