"""Label and field selectors, of query parameters and of LabelSelector objects."""

import re
from collections.abc import Callable, Mapping

from treenail.errors import ConfigError
from treenail.label_selector import LabelRequirement, LabelSelector, SelectorOperator
from treenail_lab.apiserver.errors import bad_request_error
from treenail_lab.apiserver.objects import Json, find_value, read_labels
from treenail_lab.apiserver.schema.kinds import JsonPath, ResourceKind

ObjectPredicate = Callable[[Json], bool]
_LabelCheck = Callable[[Mapping[str, str]], bool]

_TERM = re.compile(
    r"\s*(?:(?P<not>!)\s*(?P<absent>[\w./-]+)"
    r"|(?P<key>[\w./-]+)\s*(?:(?P<op>==|=|!=|>|<)\s*(?P<value>[\w.-]*)"
    r"|\s(?P<set>in|notin)\s*\((?P<values>[^)]*)\))?)\s*(?:,|$)"
)


def match_everything(_: Json) -> bool:
    return True


def parse_label_selector(selector: str) -> ObjectPredicate:
    """Return the predicate of a ``labelSelector`` parameter; raise 400 for an invalid one."""
    if not selector.strip():
        return match_everything
    checks: list[_LabelCheck] = []
    at = 0
    while at < len(selector):
        match = _TERM.match(selector, at)
        if match is None or match.end() == at:
            raise bad_request_error(f'unable to parse requirement: found "{selector[at:]}"')
        checks.append(_build_check(match))
        at = match.end()
    return lambda obj: all(check(read_labels(obj)) for check in checks)


def _build_check(match: re.Match[str]) -> _LabelCheck:
    if match["not"]:
        return LabelRequirement(match["absent"], SelectorOperator.DOES_NOT_EXIST).matches
    name = match["key"]
    if match["set"]:
        values = tuple(value.strip() for value in match["values"].split(","))
        operator = SelectorOperator.IN if match["set"] == "in" else SelectorOperator.NOT_IN
        return LabelRequirement(name, operator, values).matches
    match match["op"]:
        case "=" | "==":
            return LabelRequirement(name, SelectorOperator.IN, (match["value"],)).matches
        case "!=":
            return LabelRequirement(name, SelectorOperator.NOT_IN, (match["value"],)).matches
        case ">" | "<" as order:
            return _build_ordered(name, order, match["value"])
        case _:
            return LabelRequirement(name, SelectorOperator.EXISTS).matches


def _build_ordered(name: str, order: str, value: str) -> _LabelCheck:
    try:
        bound = int(value)
    except ValueError:
        message = f"values[0][{name}]: Invalid value: \"{value}\": for 'Gt', 'Lt' operators, "
        raise bad_request_error(message + "the value must be an integer") from None

    def check(labels: Mapping[str, str]) -> bool:
        try:
            number = int(labels[name])
        except (KeyError, ValueError):
            return False
        return number > bound if order == ">" else number < bound

    return check


def compile_selector(selector: Json | None) -> Callable[[Mapping[str, str]], bool]:
    """Return the check of a LabelSelector: an empty one matches all, None nothing."""
    if selector is None:
        return lambda _: False
    try:
        return LabelSelector.from_json(selector, "selector").matches
    except ConfigError as error:
        raise bad_request_error(str(error)) from error


def parse_field_selector(selector: str, kind: ResourceKind) -> ObjectPredicate:
    """Return the predicate of a ``fieldSelector`` parameter; raise 400 for other fields."""
    checks: list[tuple[JsonPath, str, bool]] = []
    for term in filter(None, (part.strip() for part in selector.split(","))):
        label, value, equal = _parse_field_term(term)
        path = kind.find_field_path(label)
        if path is None:
            raise bad_request_error(f"field label not supported: {label}")
        checks.append((path, value, equal))
    if not checks:
        return match_everything
    return lambda obj: all(
        (_format_text(find_value(obj, *path)) == value) is equal for path, value, equal in checks
    )


def find_exact_name(selector: str) -> str:
    """Return the name in ``metadata.name=`` of a field selector; empty without one."""
    return find_exact_value(selector, "metadata.name")


def find_exact_value(selector: str, label: str) -> str:
    """Return the only value that a field selector allows for a field; empty otherwise."""
    for term in filter(None, (part.strip() for part in selector.split(","))):
        name, value, equal = _parse_field_term(term)
        if name == label and equal:
            return value
    return ""


def _parse_field_term(term: str) -> tuple[str, str, bool]:
    for operator, equal in (("!=", False), ("==", True), ("=", True)):
        label, separator, value = term.partition(operator)
        if separator:
            return label, value, equal
    raise bad_request_error(f"invalid field selector: {term!r}")


def _format_text(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return "" if value is None else str(value)
