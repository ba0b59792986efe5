"""Withholds the secrets of Kubernetes objects in files, so that users may share them. Pure."""

from treenail.api.decode import Json, load_json
from treenail.api.documents import dump_document, load_documents
from treenail.config.ignition_withhold import withhold_secrets
from treenail.config.redact import redact_json
from treenail.config.secret_files import WITHHELD
from treenail.errors import ConfigError

# Annotation of `kubectl apply`; has the whole object, with its secrets.
_LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
_SECRET_FIELDS = ("data", "stringData")
_REFERENCE_FIELDS = frozenset({"name", "namespace"})


def format_objects(content: bytes, *, where: str) -> bytes:
    """Format the objects of a YAML or JSON file without secrets, as YAML.

    Raises `ConfigError` if the file cannot be parsed: a Secret in it cannot be recognized then.
    """
    found = [withhold_object(each) for each in load_documents(content, where=where)]
    return "---\n".join(map(dump_document, found)).encode("utf-8", "replace")


def withhold_document(content: bytes, *, where: str) -> object:
    """Parse a JSON document, and withhold its secrets; raise `ConfigError`."""
    document = load_json(content, where=where)
    return withhold_object(document) if isinstance(document, dict) else redact_json(document)


def withhold_object(document: Json) -> Json:
    """Return the object without Secrets' values, contents of secret files, and known secrets."""
    withheld = _withhold_value(document)
    found = _restore_references(withheld, redact_json(withheld))
    return found if isinstance(found, dict) else {}


def _withhold_value(value: object) -> object:
    if isinstance(value, list):
        return [_withhold_value(each) for each in value]
    if not isinstance(value, dict):
        return value
    found = {name: _withhold_value(each) for name, each in value.items() if name != _LAST_APPLIED}
    if value.get("kind") == "Secret":
        found |= {name: _withhold_fields(value[name]) for name in _SECRET_FIELDS if name in value}
    if isinstance(value.get("ignition"), dict):
        return _withhold_ignition(found)
    return found


def _withhold_fields(fields: object) -> object:
    """Withhold all values; the names say what the Secret has."""
    return dict.fromkeys(fields, WITHHELD) if isinstance(fields, dict) else WITHHELD


def _withhold_ignition(config: Json) -> object:
    try:
        return withhold_secrets(config)
    except ConfigError:
        return WITHHELD


def _restore_references(original: object, redacted: object) -> object:
    """Show names of Secrets again: the key `renderedImagePushSecret` names a reference."""
    if redacted == WITHHELD and _is_reference(original):
        return original
    if isinstance(original, dict) and isinstance(redacted, dict):
        return {
            name: _restore_references(original[name], each) if name in original else each
            for name, each in redacted.items()
        }
    if isinstance(original, list) and isinstance(redacted, list):
        return list(map(_restore_references, original, redacted))
    return redacted


def _is_reference(value: object) -> bool:
    return isinstance(value, dict) and "name" in value and value.keys() <= _REFERENCE_FIELDS
