"""Discovery of the resources that an API server serves."""

import logging
from collections.abc import Iterator, Sequence

from treenail import errors
from treenail.kube import api_client, resources

log = logging.getLogger(__name__)

_VERBS = {"list", "delete"}
"""Verbs of stored objects: metrics of pods have no delete, reviews have no list."""


def discover_resources(
    client: api_client.Client,
) -> tuple[list[resources.Resource], dict[str, errors.ClusterError]]:
    """Return the resources of stored objects, in the preferred version of each group.

    The errors are those of group versions whose server, that of an APIService, is down. Raises
    `ClusterError` when the list of groups cannot be read.
    """
    found, failed = [], {}
    groups = iter_objects(client.read_path("/apis").get("groups"))
    preferred = (resources.get_object(group, "preferredVersion") for group in groups)
    for group_version in ("v1", *(str(version.get("groupVersion")) for version in preferred)):
        group, _, version = group_version.rpartition("/")
        try:
            document = client.read_path(f"/{'apis' if group else 'api'}/{group_version}")
        except errors.ClusterError as error:
            failed[group_version] = error
            continue
        for entry in iter_objects(document.get("resources")):
            plural, verbs = str(entry.get("name")), entry.get("verbs")
            if "/" not in plural and isinstance(verbs, list) and _VERBS.issubset(verbs):
                kind, is_namespaced = str(entry.get("kind")), bool(entry.get("namespaced"))
                found.append(resources.Resource(group, version, plural, kind, is_namespaced))
    return found, failed


def find_served_version(client: api_client.Client, group: str, versions: Sequence[str]) -> str:
    """Return the first of the versions that the API server serves; raise `NotFoundError`."""
    listed = iter_objects(client.read_path(f"/apis/{group}").get("versions"))
    served = [str(entry.get("version")) for entry in listed]
    if version := next((version for version in versions if version in served), ""):
        return version
    raise errors.NotFoundError(
        f"the API server serves {group}/{', '.join(served):.200}, not {' or '.join(versions)}",
        remedy=f"update treenail, or run: kubectl get crds | grep {group}",
    )


def find_preferred_version(client: api_client.Client, group: str, versions: Sequence[str]) -> str:
    """Return the first served version; the first of all, with a log entry, if none is known."""
    try:
        return find_served_version(client, group, versions)
    except errors.ClusterError as error:
        log.warning("assuming version %s of %s: %s", versions[0], group, error)
        return versions[0]


def iter_objects(value: object) -> Iterator[api_client.Json]:
    """Yield the objects of a list; nothing of another value."""
    return (item for item in (value if isinstance(value, list) else ()) if isinstance(item, dict))
