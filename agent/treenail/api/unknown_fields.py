"""Refuses fields that a kind does not have, as the API server does with strict validation."""

from collections.abc import Collection

from treenail.api.decode import Fields
from treenail.errors import ConfigError


def reject_unknown_fields(fields: Fields, known: Collection[str]) -> None:
    """Raise `ConfigError` that names the first unknown field and the most similar known one."""
    unknown = sorted(fields.values.keys() - set(known))
    if not unknown:
        return
    import difflib  # noqa: PLC0415  # only errors need it

    # Case is the most frequent mistake: nodeselector for nodeSelector.
    by_case = {name.lower(): name for name in known}
    similar = difflib.get_close_matches(unknown[0].lower(), by_case, n=1)
    remedy = f"did you mean {by_case[similar[0]]}?" if similar else ""
    raise ConfigError(
        f"{fields.path_of(unknown[0])}: unknown field",
        remedy=remedy or f"use one of: {', '.join(sorted(known))}",
    )
