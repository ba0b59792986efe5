"""Errors of a Kubernetes API server: Status objects with code and reason."""

from dataclasses import dataclass, field

from treenail_lab.apiserver.objects import Json


@dataclass(frozen=True, slots=True)
class StatusCause:
    """One entry of ``status.details.causes``."""

    reason: str
    message: str
    field: str = ""

    def to_json(self) -> Json:
        cause = {"reason": self.reason, "message": self.message}
        return cause | ({"field": self.field} if self.field else {})

    def __str__(self) -> str:
        return f"{self.field}: {self.message}" if self.field else self.message


@dataclass(slots=True)
class ApiError(Exception):
    """A request that failed; :meth:`to_status` is the body of the answer."""

    code: int
    reason: str
    message: str
    details: Json = field(default_factory=dict)
    retry_after_s: int | None = None

    def __str__(self) -> str:
        return self.message

    def to_status(self) -> Json:
        details = self.details
        if self.retry_after_s:
            details = details | {"retryAfterSeconds": self.retry_after_s}
        body: Json = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
        }
        if self.reason:
            body["reason"] = self.reason
        if details:
            body["details"] = details
        return body | {"code": self.code}


def group_resource(group: str, plural: str) -> str:
    """Return ``nodes`` or ``machineconfigs.machineconfiguration.openshift.io``."""
    return f"{plural}.{group}" if group else plural


def build_details(group: str, kind: str, name: str) -> Json:
    """Return ``status.details`` without empty keys."""
    details = {"name": name, "group": group, "kind": kind}
    return {key: value for key, value in details.items() if value}


def not_found_error(group: str, plural: str, name: str) -> ApiError:
    message = f'{group_resource(group, plural)} "{name}" not found'
    return ApiError(404, "NotFound", message, build_details(group, plural, name))


def path_not_found_error() -> ApiError:
    return ApiError(404, "NotFound", "the server could not find the requested resource")


def already_exists_error(group: str, plural: str, name: str) -> ApiError:
    message = f'{group_resource(group, plural)} "{name}" already exists'
    return ApiError(409, "AlreadyExists", message, build_details(group, plural, name))


MODIFIED_MESSAGE = (
    "the object has been modified; please apply your changes to the latest version and try again"
)


def conflict_error(group: str, plural: str, name: str, why: str = MODIFIED_MESSAGE) -> ApiError:
    resource = group_resource(group, plural)
    message = f'Operation cannot be fulfilled on {resource} "{name}": {why}'
    return ApiError(409, "Conflict", message, build_details(group, plural, name))


def invalid_error(group: str, kind: str, name: str, causes: list[StatusCause]) -> ApiError:
    """Return 422 with one cause for each field; ``kind`` is in CamelCase, as in kube-apiserver."""
    texts = [str(cause) for cause in causes]
    joined = texts[0] if len(texts) == 1 else f"[{', '.join(texts)}]"
    details = build_details(group, kind, name) | {"causes": [cause.to_json() for cause in causes]}
    message = f'{group_resource(group, kind)} "{name}" is invalid: {joined}'
    return ApiError(422, "Invalid", message, details)


def untyped_patch_error(api_version: str, kind: str, name: str, paths: list[str]) -> ApiError:
    """Return 500 without a reason for an apply with fields that its kind does not have.

    ``name`` is NAMESPACE/NAME.
    """
    problems = [f".{path}: field not declared in schema" for path in paths]
    errors = problems[0] if len(problems) == 1 else "errors:\n  " + "\n  ".join(problems)
    what = f"({name}; {api_version}, Kind={kind})"
    return ApiError(500, "", f"failed to create typed patch object {what}: {errors}")


def forbidden_error(group: str, plural: str, name: str, why: str) -> ApiError:
    resource = group_resource(group, plural)
    subject = f'{resource} "{name}"' if name else resource
    message = f"{subject} is forbidden: {why}"
    return ApiError(403, "Forbidden", message, build_details(group, plural, name))


def unauthorized_error() -> ApiError:
    return ApiError(401, "Unauthorized", "Unauthorized")


def bad_request_error(message: str) -> ApiError:
    return ApiError(400, "BadRequest", message)


def expired_error(requested: int, oldest: int) -> ApiError:
    return ApiError(410, "Expired", f"too old resource version: {requested} ({oldest})")


def expired_continue_error() -> ApiError:
    return ApiError(
        410,
        "Expired",
        "The provided continue parameter is too old to display a consistent list result. "
        "You must start a new list without the continue parameter.",
    )


def method_not_allowed_error() -> ApiError:
    message = "the server does not allow this method on the requested resource"
    return ApiError(405, "MethodNotAllowed", message)


def unsupported_media_type_error(accepted: list[str]) -> ApiError:
    message = (
        "the body of the request was in an unknown format - accepted media types include: "
        + ", ".join(accepted)
    )
    return ApiError(415, "UnsupportedMediaType", message)


def too_many_requests_error(
    message: str, retry_after_s: int, causes: list[StatusCause]
) -> ApiError:
    details = {"causes": [cause.to_json() for cause in causes]} if causes else {}
    return ApiError(429, "TooManyRequests", message, details, retry_after_s)


def too_large_version_error(requested: int, current: int) -> ApiError:
    message = f"Too large resource version: {requested}, current: {current}"
    cause = StatusCause("ResourceVersionTooLarge", "Too large resource version")
    return ApiError(504, "Timeout", message, {"causes": [cause.to_json()]}, 1)
