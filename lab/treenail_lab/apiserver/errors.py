"""What a Kubernetes API server says when it says no: a Status object with code and reason."""

from dataclasses import dataclass, field

from treenail_lab.apiserver.objects import Json


@dataclass(frozen=True, slots=True)
class Cause:
    """One entry of ``status.details.causes``."""

    reason: str
    message: str
    field: str = ""

    def json(self) -> Json:
        cause = {"reason": self.reason, "message": self.message}
        return cause | ({"field": self.field} if self.field else {})

    def __str__(self) -> str:
        return f"{self.field}: {self.message}" if self.field else self.message


@dataclass(slots=True)
class ApiError(Exception):
    """A request that failed; :meth:`status` is the body of the answer."""

    code: int
    reason: str
    message: str
    details: Json = field(default_factory=dict)
    retry_after_s: int | None = None

    def __str__(self) -> str:
        return self.message

    def status(self) -> Json:
        details = self.details
        if self.retry_after_s:
            details = details | {"retryAfterSeconds": self.retry_after_s}
        body: Json = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            "reason": self.reason,
        }
        if details:
            body["details"] = details
        return body | {"code": self.code}


def group_resource(group: str, plural: str) -> str:
    """``nodes`` or ``machineconfigs.machineconfiguration.openshift.io``."""
    return f"{plural}.{group}" if group else plural


def details(group: str, kind: str, name: str) -> Json:
    """``status.details`` without the keys that would be empty."""
    found = {"name": name, "group": group, "kind": kind}
    return {key: value for key, value in found.items() if value}


def not_found(group: str, plural: str, name: str) -> ApiError:
    message = f'{group_resource(group, plural)} "{name}" not found'
    return ApiError(404, "NotFound", message, details(group, plural, name))


def no_such_path() -> ApiError:
    return ApiError(404, "NotFound", "the server could not find the requested resource")


def already_exists(group: str, plural: str, name: str) -> ApiError:
    message = f'{group_resource(group, plural)} "{name}" already exists'
    return ApiError(409, "AlreadyExists", message, details(group, plural, name))


MODIFIED = (
    "the object has been modified; please apply your changes to the latest version and try again"
)


def conflict(group: str, plural: str, name: str, why: str = MODIFIED) -> ApiError:
    resource = group_resource(group, plural)
    message = f'Operation cannot be fulfilled on {resource} "{name}": {why}'
    return ApiError(409, "Conflict", message, details(group, plural, name))


def invalid(group: str, kind: str, name: str, causes: list[Cause]) -> ApiError:
    """422 with one cause per field; ``kind`` is CamelCase here, as in the real one."""
    texts = [str(cause) for cause in causes]
    joined = texts[0] if len(texts) == 1 else f"[{', '.join(texts)}]"
    found = details(group, kind, name) | {"causes": [cause.json() for cause in causes]}
    return ApiError(422, "Invalid", f'{kind} "{name}" is invalid: {joined}', found)


def forbidden(group: str, plural: str, name: str, why: str) -> ApiError:
    resource = group_resource(group, plural)
    subject = f'{resource} "{name}"' if name else resource
    message = f"{subject} is forbidden: {why}"
    return ApiError(403, "Forbidden", message, details(group, plural, name))


def unauthorized() -> ApiError:
    return ApiError(401, "Unauthorized", "Unauthorized")


def bad_request(message: str) -> ApiError:
    return ApiError(400, "BadRequest", message)


def expired(asked: int, oldest: int) -> ApiError:
    return ApiError(410, "Expired", f"too old resource version: {asked} ({oldest})")


def expired_continue() -> ApiError:
    return ApiError(
        410,
        "Expired",
        "The provided continue parameter is too old to display a consistent list result. "
        "You must start a new list without the continue parameter.",
    )


def method_not_allowed() -> ApiError:
    message = "the server does not allow this method on the requested resource"
    return ApiError(405, "MethodNotAllowed", message)


def unsupported_media_type(accepted: list[str]) -> ApiError:
    message = (
        "the body of the request was in an unknown format - accepted media types include: "
        + ", ".join(accepted)
    )
    return ApiError(415, "UnsupportedMediaType", message)


def too_many_requests(message: str, retry_after_s: int, causes: list[Cause]) -> ApiError:
    found = {"causes": [cause.json() for cause in causes]} if causes else {}
    return ApiError(429, "TooManyRequests", message, found, retry_after_s)


def too_large_version(asked: int, current: int) -> ApiError:
    message = f"Too large resource version: {asked}, current: {current}"
    cause = Cause("ResourceVersionTooLarge", "Too large resource version")
    return ApiError(504, "Timeout", message, {"causes": [cause.json()]}, 1)
