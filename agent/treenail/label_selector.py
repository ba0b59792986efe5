"""Label selectors with the meaning that Kubernetes gives them (apimachinery's LabelSelector)."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, cast

from treenail.encoding import codec, json_values
from treenail.errors import ConfigError


class SelectorOperator(StrEnum):
    """Relation between a label and the values of a requirement."""

    IN = "In"
    NOT_IN = "NotIn"
    EXISTS = "Exists"
    DOES_NOT_EXIST = "DoesNotExist"


@dataclass(frozen=True, slots=True)
class LabelRequirement(codec.JsonObject, omits_defaults=True):
    """Condition on one label."""

    key: codec.NonEmptyText
    operator: SelectorOperator
    values: tuple[str, ...] = ()

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Return True when the labels meet the condition; NotIn accepts an absent label."""
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
        """The requirement as a part of the query parameter ``labelSelector``."""
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
    """Requirements that must all hold; a selector without requirements matches every object.

    An absent selector matches no object. It is None, never an empty `LabelSelector`.
    """

    requirements: tuple[LabelRequirement, ...] = ()

    @classmethod
    def from_json(cls, document: object, location: str) -> "LabelSelector":
        """Read a selector; raise `ConfigError`."""
        return cast("LabelSelector", codec.read_value(SelectorField, document, location))

    @property
    def is_empty(self) -> bool:
        """True when the selector matches every object."""
        return not self.requirements

    @property
    def query(self) -> str:
        """The value of the query parameter ``labelSelector``; empty when it matches everything."""
        return ",".join(requirement.query for requirement in self.requirements)

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Return True when every requirement holds."""
        return all(requirement.matches(labels) for requirement in self.requirements)

    def to_json(self) -> codec.Json:
        """The selector in ``matchExpressions`` form."""
        return {"matchExpressions": [requirement.to_json() for requirement in self.requirements]}


def _check_values(requirement: LabelRequirement) -> LabelRequirement:
    operator, count = requirement.operator, len(requirement.values)
    if (operator in (SelectorOperator.IN, SelectorOperator.NOT_IN)) != bool(count):
        expected = f"expected {'none' if count else 'at least one'} beside {operator}"
        raise json_values.Mismatch(problem=f"{expected}, found {count}", at=["values"])
    return requirement


class _SelectorFields(codec.Shape):
    match_labels: Mapping[str, str]
    match_expressions: tuple[Annotated[LabelRequirement, codec.Via(_check_values)], ...] = ()


def _build_selector(fields: _SelectorFields) -> LabelSelector:
    equal = (
        LabelRequirement(key, SelectorOperator.IN, (value,))
        for key, value in sorted(fields.match_labels.items())
    )
    return LabelSelector((*equal, *fields.match_expressions))


SelectorField = Annotated[LabelSelector, codec.Via(_build_selector, wire=_SelectorFields)]
"""The type of a field with a selector."""


def matches_selector(document: object, labels: Mapping[str, str]) -> bool:
    """Return True when the selector in a stored object matches the labels.

    An absent selector matches nothing, and so does one that cannot be read.
    """
    try:
        return document is not None and LabelSelector.from_json(document, "").matches(labels)
    except ConfigError:
        return False
