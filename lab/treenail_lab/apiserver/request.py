"""A request, parsed from its HTTP method, path and query."""

from collections.abc import Mapping
from dataclasses import dataclass

from treenail_lab.apiserver.errors import bad_request_error, path_not_found_error

_VERBS = {"GET": "get", "HEAD": "get", "POST": "create", "PUT": "update", "PATCH": "patch",
          "DELETE": "delete"}  # fmt: skip
_ON_COLLECTIONS = {"get": "list", "delete": "deletecollection"}
_NAMESPACE_SUBRESOURCES = ("status",)


@dataclass(frozen=True, slots=True)
class ServerRequest:
    """A request for a resource; for other paths only ``verb`` and ``path`` are set."""

    verb: str
    path: str
    query: Mapping[str, str]
    group: str = ""
    version: str = ""
    plural: str = ""
    namespace: str = ""
    name: str = ""
    subresource: str = ""

    @property
    def is_resource_request(self) -> bool:
        return bool(self.plural)

    @property
    def resource(self) -> str:
        """``pods`` or ``pods/eviction``."""
        return f"{self.plural}/{self.subresource}" if self.subresource else self.plural

    @property
    def is_change(self) -> bool:
        """Return whether a request may change something."""
        return self.verb not in {"get", "list", "watch"}

    def read_flag(self, name: str) -> bool:
        """Read a boolean query parameter; false when absent."""
        value = self.query.get(name, "")
        if value.lower() in {"", "0", "false"}:
            return False
        if value.lower() in {"1", "true"}:
            return True
        raise bad_request_error(f"query parameter {name}: expected true or false, found {value!r}")

    def read_number(self, name: str) -> int | None:
        """Read a non-negative query parameter; None when absent or empty."""
        value = self.query.get(name, "")
        if not value:
            return None
        if not value.isdigit():
            raise bad_request_error(f"query parameter {name}: expected a number, found {value!r}")
        return int(value)

    @property
    def is_dry_run(self) -> bool:
        value = self.query.get("dryRun", "")
        if value not in {"", "All"}:
            raise bad_request_error(
                f'dryRun: Unsupported value: "{value}": supported values: "All"'
            )
        return value == "All"


def parse_request(method: str, path: str, query: Mapping[str, str]) -> ServerRequest:
    """Parse an HTTP request line; raise 404 for a path that cannot be a resource."""
    verb = _VERBS.get(method, method.lower())
    parts = [part for part in path.split("/") if part]
    match parts:
        case ["api", version, *rest] if rest:
            group = ""
        case ["apis", group, version, *rest] if rest:
            pass
        case _:
            return ServerRequest(verb, path, query)
    namespace = ""
    match rest:
        case ["namespaces", name, subresource] if subresource in _NAMESPACE_SUBRESOURCES:
            pass
        case ["namespaces", namespace, _, *_]:
            rest = rest[2:]
        case _:
            pass
    plural, name, subresource = (*rest, "", "")[:3]
    if len(rest) > 3:
        raise path_not_found_error()
    if not name:
        verb = _ON_COLLECTIONS.get(verb, verb)
    request = ServerRequest(verb, path, query, group, version, plural, namespace, name, subresource)
    if request.verb == "list" and request.read_flag("watch"):
        verb = "watch"
    return ServerRequest(verb, path, query, group, version, plural, namespace, name, subresource)
