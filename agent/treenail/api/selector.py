"""Label selectors, with the meaning that Kubernetes gives them."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from treenail.api.decode import Fields, Json


class Operator(StrEnum):
    """How a requirement looks at the label it names."""

    IN = "In"
    NOT_IN = "NotIn"
    EXISTS = "Exists"
    DOES_NOT_EXIST = "DoesNotExist"


@dataclass(frozen=True, slots=True)
class Requirement:
    """One thing that must be so of one label."""

    key: str
    operator: Operator
    values: tuple[str, ...] = ()

    def matches(self, labels: Mapping[str, str]) -> bool:
        match self.operator:
            case Operator.IN:
                return labels.get(self.key) in self.values
            case Operator.NOT_IN:
                return labels.get(self.key) not in self.values
            case Operator.EXISTS:
                return self.key in labels
            case Operator.DOES_NOT_EXIST:
                return self.key not in labels

    @property
    def query(self) -> str:
        """As a part of the query parameter ``labelSelector``."""
        match self.operator:
            case Operator.IN:
                return f"{self.key} in ({','.join(self.values)})"
            case Operator.NOT_IN:
                return f"{self.key} notin ({','.join(self.values)})"
            case Operator.EXISTS:
                return self.key
            case Operator.DOES_NOT_EXIST:
                return f"!{self.key}"


@dataclass(frozen=True, slots=True)
class LabelSelector:
    """All requirements must hold; without any, everything matches.

    A selector that is absent matches nothing. That is another thing, so it is None here.
    """

    requirements: tuple[Requirement, ...] = ()

    @classmethod
    def from_fields(cls, fields: Fields) -> "LabelSelector":
        """The selector in ``matchLabels`` and ``matchExpressions``; raises `ConfigError`."""
        labels = fields.text_map("matchLabels")
        equal = tuple(Requirement(key, Operator.IN, (labels[key],)) for key in sorted(labels))
        return cls(equal + fields.each("matchExpressions", _requirement))

    @property
    def selects_all(self) -> bool:
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


def optional_selector(fields: Fields, name: str) -> LabelSelector | None:
    """The selector in a field, None when the field is absent."""
    if fields.values.get(name) is None:
        return None
    return LabelSelector.from_fields(fields.nested(name))


def _requirement(fields: Fields) -> Requirement:
    key = fields.required_text("key")
    values = fields.texts("values")
    name = fields.text("operator")
    if name not in list(Operator):
        raise fields.error(
            f"{fields.at('operator')}: expected one of {', '.join(Operator)}, found {name!r:.40}"
        )
    operator = Operator(name)
    if (operator in (Operator.IN, Operator.NOT_IN)) != bool(values):
        wanted = "none" if values else "at least one"
        raise fields.error(
            f"{fields.at('values')}: expected {wanted} beside {operator}, found {len(values)}"
        )
    return Requirement(key, operator, values)
