"""Label selectors, evaluated here: apimachinery's rules."""

from collections.abc import Mapping


def matches_selector(selector: object, labels: Mapping[str, str]) -> bool:
    """Whether a ``LabelSelector`` object matches: an empty one matches all, none matches nothing.

    A requirement that can't be read matches nothing.
    """
    if not isinstance(selector, dict):
        return False
    exact = selector.get("matchLabels") or {}
    requirements = selector.get("matchExpressions") or []
    if not (isinstance(exact, dict) and isinstance(requirements, list)):
        return False
    return all(labels.get(key) == value for key, value in exact.items()) and all(
        isinstance(requirement, dict) and _matches_requirement(requirement, labels)
        for requirement in requirements
    )


def _matches_requirement(requirement: Mapping[str, object], labels: Mapping[str, str]) -> bool:
    key = requirement.get("key")
    if not isinstance(key, str):
        return False
    values = requirement.get("values") or []
    found = labels.get(key)
    match requirement.get("operator"):
        case "In":
            return found is not None and isinstance(values, list) and found in values
        case "NotIn":
            return found is None or (isinstance(values, list) and found not in values)
        case "Exists":
            return found is not None
        case "DoesNotExist":
            return found is None
        case _:
            return False
