"""Label selectors with the meaning that Kubernetes gives them (apimachinery's LabelSelector)."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from treenail.errors import ConfigError


class SelectorOperator(StrEnum):
    """Relation between a label and the values of a requirement."""

    IN = "In"
    NOT_IN = "NotIn"
    EXISTS = "Exists"
    DOES_NOT_EXIST = "DoesNotExist"


@dataclass(frozen=True, slots=True)
class LabelRequirement:
    """Condition on one label."""

    key: str
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
        """Read ``matchLabels`` and ``matchExpressions``.

        Raises `ConfigError`, which names the wrong field below ``location``.
        """
        selector = _read_object(document, location)
        place = f"{location}.matchLabels"
        equal = tuple(
            LabelRequirement(
                _read_text(key, place), SelectorOperator.IN, (_read_text(value, f"{place}.{key}"),)
            )
            for key, value in sorted(_read_object(selector.get("matchLabels"), place).items())
        )
        expressions = _read_list(selector.get("matchExpressions"), f"{location}.matchExpressions")
        return cls(equal + tuple(_parse_requirement(entry, path) for path, entry in expressions))

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

    def to_json(self) -> dict[str, object]:
        """The selector in ``matchExpressions`` form."""
        return {
            "matchExpressions": [
                {
                    "key": requirement.key,
                    "operator": requirement.operator.value,
                    **({"values": list(requirement.values)} if requirement.values else {}),
                }
                for requirement in self.requirements
            ]
        }


def parse_optional_selector(document: object, location: str) -> LabelSelector | None:
    """Read a selector; None when the document is absent. Raises `ConfigError`."""
    return None if document is None else LabelSelector.from_json(document, location)


def matches_selector(document: object, labels: Mapping[str, str]) -> bool:
    """Return True when the selector in a stored object matches the labels.

    An absent selector matches nothing, and so does one that cannot be read.
    """
    try:
        selector = parse_optional_selector(document, "selector")
    except ConfigError:
        return False
    return selector is not None and selector.matches(labels)


def _parse_requirement(document: object, location: str) -> LabelRequirement:
    expression = _read_object(document, location)
    key = _read_text(expression.get("key"), f"{location}.key")
    if not key:
        raise ConfigError(f"{location}.key: expected a string, found nothing")
    values = tuple(
        _read_text(text, path)
        for path, text in _read_list(expression.get("values"), f"{location}.values")
    )
    name = _read_text(expression.get("operator"), f"{location}.operator")
    if name not in list(SelectorOperator):
        raise ConfigError(
            f"{location}.operator: expected one of {', '.join(SelectorOperator)}, "
            f"found {name!r:.40}"
        )
    operator = SelectorOperator(name)
    if (operator in (SelectorOperator.IN, SelectorOperator.NOT_IN)) != bool(values):
        expected = "none" if values else "at least one"
        raise ConfigError(
            f"{location}.values: expected {expected} beside {operator}, found {len(values)}"
        )
    return LabelRequirement(key, operator, values)


# Go decodes null as the zero value: an empty object, an empty list, an empty string.


def _read_object(value: object, location: str) -> Mapping[str, object]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(f"{location}: expected an object, found {_describe_value(value)}")
    return value


def _read_list(value: object, location: str) -> Iterator[tuple[str, object]]:
    if value is None:
        return
    if not isinstance(value, list):
        raise ConfigError(f"{location}: expected a list, found {_describe_value(value)}")
    for index, item in enumerate(value):
        yield f"{location}[{index}]", item


def _read_text(value: object, location: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ConfigError(f"{location}: expected a string, found {_describe_value(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        # JSON escapes can spell half a surrogate pair, which no encoding can write.
        raise ConfigError(f"{location}: expected a string, found half a surrogate pair") from error
    return value


def _describe_value(value: object) -> str:
    match value:
        case str():
            return "a string"
        case list():
            return "a list"
        case dict():
            return "an object"
        case _:
            return repr(value)[:40]
