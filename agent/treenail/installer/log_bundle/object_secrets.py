"""Withholds secrets of Kubernetes objects, so that users may share a log bundle."""

from treenail import errors
from treenail.api import decode, documents
from treenail.config import node_paths, redact
from treenail.config.ignition.withhold import withhold_secrets

# Annotation of `kubectl apply`; has the whole object, with its secrets.
_LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
_SECRET_FIELDS = ("data", "stringData")
_REFERENCE_FIELDS = frozenset({"name", "namespace"})


def format_objects(content: bytes, *, where: str) -> bytes:
    """Format the objects of a YAML or JSON file without secrets, as YAML.

    Raises `ConfigError` if the file cannot be parsed: a Secret in it cannot be recognized then.
    """
    objects = [
        withhold_object(document) for document in documents.load_documents(content, where=where)
    ]
    return "---\n".join(map(documents.dump_document, objects)).encode("utf-8", "replace")


def withhold_document(content: bytes, *, where: str) -> object:
    """Parse a JSON document, and withhold its secrets; raise `ConfigError`."""
    document = decode.load_json(content, where=where)
    return withhold_object(document) if isinstance(document, dict) else redact.redact_json(document)


def withhold_object(document: decode.Json) -> decode.Json:
    """Return the object without Secrets' values, contents of secret files, and known secrets."""
    withheld = _withhold_value(document)
    restored = _restore_references(withheld, redact.redact_json(withheld))
    return restored if isinstance(restored, dict) else {}


def _withhold_value(value: object) -> object:
    if isinstance(value, list):
        return [_withhold_value(element) for element in value]
    if not isinstance(value, dict):
        return value
    kept = {
        name: _withhold_value(member) for name, member in value.items() if name != _LAST_APPLIED
    }
    if value.get("kind") == "Secret":
        kept |= {name: _withhold_fields(value[name]) for name in _SECRET_FIELDS if name in value}
    if isinstance(value.get("ignition"), dict):
        return _withhold_ignition(kept)
    return kept


def _withhold_fields(fields: object) -> object:
    """Withhold all values; the names say what the Secret has."""
    return (
        dict.fromkeys(fields, node_paths.WITHHELD)
        if isinstance(fields, dict)
        else node_paths.WITHHELD
    )


def _withhold_ignition(config: decode.Json) -> object:
    try:
        return withhold_secrets(config)
    except errors.ConfigError:
        return node_paths.WITHHELD


def _restore_references(original: object, redacted: object) -> object:
    """Show names of Secrets again: the key `renderedImagePushSecret` names a reference."""
    if redacted == node_paths.WITHHELD and _is_reference(original):
        return original
    if isinstance(original, dict) and isinstance(redacted, dict):
        return {
            name: _restore_references(original[name], member) if name in original else member
            for name, member in redacted.items()
        }
    if isinstance(original, list) and isinstance(redacted, list):
        return list(map(_restore_references, original, redacted))
    return redacted


def _is_reference(value: object) -> bool:
    return isinstance(value, dict) and "name" in value and value.keys() <= _REFERENCE_FIELDS
