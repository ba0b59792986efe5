"""The rule of the machine's signature policy, containers-policy.json(5), for an image."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from treenail import errors, sanitize
from treenail.api import pullspec

POLICY_PATH = "/etc/containers/policy.json"


class SignatureTrust(StrEnum):
    """The policy's treatment of an image."""

    UNSIGNED = "unsigned"
    """Accepted without a signature."""
    SIGNED = "signed"
    """Accepted only with a valid signature."""
    REJECTED = "rejected"
    """Never accepted."""


@dataclass(frozen=True, slots=True)
class SignatureRule:
    """The rule for one image."""

    trust: SignatureTrust
    scope: str
    """The part of the policy that has the rule, for users."""
    keys: tuple[str, ...] = ()
    """The paths of the keys that verify the signature."""
    is_strict: bool = False
    """Pull with ostree-image-signed, which ostree refuses if the policy's default accepts anything.
    The program that pulls the image enforces the rule in any case."""


_STORAGE = "containers-storage"
_ANYTHING = "insecureAcceptAnything"
_SIGNED = frozenset({"signedBy", "sigstoreSigned"})
_KNOWN = frozenset({_ANYTHING, "reject", "signedBaseLayer", *_SIGNED})


def find_rule(policy: bytes, image: str) -> SignatureRule:
    """Return the rule for the pull spec ``image``; raises `ConfigError` for an invalid policy."""
    default, docker = _read_policy(policy, "docker")
    for scope in pullspec.list_scopes(image):
        if scope in docker:
            where = f"transports.docker[{scope!r}]"
            return _make_rule(_read_requirements(docker[scope], where), where, default)
    return _make_rule(default, "default", default)


def find_storage_rule(policy: bytes) -> SignatureRule:
    """Return the rule for images in podman's storage, which applies when they are copied out."""
    default, storage = _read_policy(policy, _STORAGE)
    if "" in storage:
        where = f"transports.{_STORAGE}['']"
        return _make_rule(_read_requirements(storage[""], where), where, default)
    return _make_rule(default, f"default, which also applies to transports.{_STORAGE}", default)


def _read_policy(
    policy: bytes, transport: str
) -> tuple[list[Mapping[str, object]], Mapping[str, object]]:
    """Return the default requirements, and those of the transport by scope."""
    try:
        document: object = json.loads(policy)
    except (ValueError, RecursionError) as error:
        raise _make_policy_error(f"it is not JSON: {error}") from error
    if not isinstance(document, Mapping):
        raise _make_policy_error("it is not a JSON object")
    default = _read_requirements(document.get("default"), "default")
    transports = _expect_object(document.get("transports"), "transports")
    return default, _expect_object(transports.get(transport), transport)


def _make_rule(
    requirements: list[Mapping[str, object]], scope: str, default: list[Mapping[str, object]]
) -> SignatureRule:
    types = {str(requirement.get("type")) for requirement in requirements}
    if "reject" in types:
        return SignatureRule(SignatureTrust.REJECTED, scope)
    if not types & _SIGNED:
        return SignatureRule(SignatureTrust.UNSIGNED, scope)
    keys = tuple(key for requirement in requirements for key in _list_keys(requirement))
    is_strict = all(requirement.get("type") != _ANYTHING for requirement in default)
    return SignatureRule(SignatureTrust.SIGNED, scope, keys, is_strict)


def _expect_object(value: object, where: str) -> Mapping[str, object]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise _make_policy_error(f"{where} is not an object")
    return value


def _read_requirements(value: object, where: str) -> list[Mapping[str, object]]:
    if not isinstance(value, list) or not value:
        raise _make_policy_error(f"{where} is not a list of requirements")
    requirements = [element for element in value if isinstance(element, Mapping)]
    for requirement in requirements:
        kind = requirement.get("type")
        if not isinstance(kind, str) or kind not in _KNOWN:
            raise _make_policy_error(
                f"{where} has a requirement of type {sanitize.quote_value(kind)}"
            )
    if len(requirements) != len(value):
        raise _make_policy_error(f"{where} is not a list of requirements")
    return requirements


def _list_keys(requirement: Mapping[str, object]) -> Iterator[str]:
    path, paths = requirement.get("keyPath"), requirement.get("keyPaths")
    yield from (
        name
        for name in (path, *(paths if isinstance(paths, list) else ()))
        if isinstance(name, str)
    )


def _make_policy_error(problem: str) -> errors.ConfigError:
    return errors.ConfigError(
        f"cannot use {POLICY_PATH}: {problem}",
        remedy="fix it; see containers-policy.json(5)",
    )
