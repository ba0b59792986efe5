"""Discovery of the resources that an API server serves."""

from collections.abc import Iterator, Sequence

from treenail import errors
from treenail.kube import api_client, resources

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


def iter_objects(value: object) -> Iterator[api_client.Json]:
    """Yield the objects of a list; nothing of another value."""
    return (item for item in (value if isinstance(value, list) else ()) if isinstance(item, dict))
