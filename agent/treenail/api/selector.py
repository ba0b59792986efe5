"""Label selectors, with the meaning that Kubernetes gives them."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from treenail.api.decode import Fields, Json


class SelectorOperator(StrEnum):
    """How a requirement looks at the label it names."""

    IN = "In"
    NOT_IN = "NotIn"
    EXISTS = "Exists"
    DOES_NOT_EXIST = "DoesNotExist"


@dataclass(frozen=True, slots=True)
class LabelRequirement:
    """One thing that must be so of one label."""

    key: str
    operator: SelectorOperator
    values: tuple[str, ...] = ()

    def matches(self, labels: Mapping[str, str]) -> bool:
        match self.operator:
            case SelectorOperator.IN:
                return labels.get(self.key) in self.values
            case SelectorOperator.NOT_IN:
                return labels.get(self.key) not in self.values
            case SelectorOperator.EXISTS:
                return self.key in labels
            case SelectorOperator.DOES_NOT_EXIST:
                return self.key not in labels

    @property
    def query(self) -> str:
        """As a part of the query parameter ``labelSelector``."""
        match self.operator:
            case SelectorOperator.IN:
                return f"{self.key} in ({','.join(self.values)})"
            case SelectorOperator.NOT_IN:
                return f"{self.key} notin ({','.join(self.values)})"
            case SelectorOperator.EXISTS:
                return self.key
            case SelectorOperator.DOES_NOT_EXIST:
                return f"!{self.key}"


@dataclass(frozen=True, slots=True)
class LabelSelector:
    """All requirements must hold; without any, everything matches.

    A selector that is absent matches nothing. That is another thing, so it is None here.
    """

    requirements: tuple[LabelRequirement, ...] = ()

    @classmethod
    def from_fields(cls, fields: Fields) -> "LabelSelector":
        """The selector in ``matchLabels`` and ``matchExpressions``; raises `ConfigError`."""
        labels = fields.get_text_map("matchLabels")
        equal = tuple(
            LabelRequirement(key, SelectorOperator.IN, (labels[key],)) for key in sorted(labels)
        )
        return cls(equal + fields.map_objects("matchExpressions", _parse_requirement))

    @property
    def is_empty(self) -> bool:
        return not self.requirements

    @property
    def query(self) -> str:
        """As the query parameter ``labelSelector``, which matches everything when empty."""
        return ",".join(requirement.query for requirement in self.requirements)

    def matches(self, labels: Mapping[str, str]) -> bool:
        return all(requirement.matches(labels) for requirement in self.requirements)

    def to_json(self) -> Json:
        """The selector as expressions."""
        return {
            "matchExpressions": [
                {
                    "key": found.key,
                    "operator": found.operator.value,
                    **({"values": list(found.values)} if found.values else {}),
                }
                for found in self.requirements
            ]
        }


def parse_optional_selector(fields: Fields, name: str) -> LabelSelector | None:
    """The selector in a field, None when the field is absent."""
    if fields.values.get(name) is None:
        return None
    return LabelSelector.from_fields(fields.get_object(name))


def _parse_requirement(fields: Fields) -> LabelRequirement:
    key = fields.get_required_text("key")
    values = fields.get_text_list("values")
    name = fields.get_text("operator")
    if name not in list(SelectorOperator):
        raise fields.error(
            f"{fields.path_of('operator')}: expected one of {', '.join(SelectorOperator)}, found {name!r:.40}"
        )
    operator = SelectorOperator(name)
    if (operator in (SelectorOperator.IN, SelectorOperator.NOT_IN)) != bool(values):
        wanted = "none" if values else "at least one"
        raise fields.error(
            f"{fields.path_of('values')}: expected {wanted} beside {operator}, found {len(values)}"
        )
    return LabelRequirement(key, operator, values)
