"""The two hashes of a NodePool's config, and which changes roll its nodes. Pure.

Both depend on the inputs of a config and never on the version of treenail: an upgrade of treenail
rolls nothing.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping

from treenail.api import annotations as key
from treenail.api import decode, machineconfig
from treenail.api.hosted import node_mode
from treenail.config import diff, reconcilable, wanted_state
from treenail.controllers.hosted.config.config_documents import ConfigDocument
from treenail.errors import ConfigError
from treenail.update.impact import impact

HAPROXY_CONFIG = "20-apiserver-haproxy"
"""MachineConfig of HyperShift with the nodes' proxy of the API server, whose image it changes."""


def compute_target_hash(
    documents: Iterable[ConfigDocument], names: decode.Json, contents: Mapping[str, str]
) -> str:
    """Hash all inputs; ``names`` are those beside the documents, ``contents`` are files by path.

    As in HyperShift the order of ConfigMaps and documents does not count, and their text does.
    """
    return _hash([document.text for document in documents], names, contents)


def compute_rollout_hash(documents: Iterable[ConfigDocument], names: decode.Json) -> str:
    """Hash what may need a drain or a reboot: documents without HAProxy, comments and defaults.

    The keys of a user and mirrors are in documents, so that their change changes this hash too.
    `needs_rollout` decides from the configs whether nodes must roll.
    """
    values = [_simplify(document.value) for document in documents if not is_haproxy(document)]
    return _hash([json.dumps(value, sort_keys=True) for value in values], names, {})


def _hash(texts: list[str], names: decode.Json, contents: Mapping[str, str]) -> str:
    text = json.dumps([sorted(texts), drop_nulls(names), contents], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def is_haproxy(document: ConfigDocument) -> bool:
    """Return whether the document is the proxy's config, by its name."""
    return document.title == f"{machineconfig.KIND} {HAPROXY_CONFIG}"


def _simplify(document: decode.Json) -> list[object]:
    """Return the parts of a document that a config is made from."""
    fields = decode.Fields(document, "")
    metadata, spec = fields.get_object("metadata"), fields.get_object("spec").values
    if document["kind"] == machineconfig.KIND:
        spec = {name: value for name, value in spec.items() if value not in ("", False, [])}
    suffix = metadata.get_text_map("annotations").get(key.CONFIG_NAME_SUFFIX)
    names = metadata.get_text("namespace"), metadata.get_text("name"), suffix
    return [document["kind"], *names, drop_nulls(spec)]


def drop_nulls(value: object) -> object:
    """Return the value without fields that are null or an empty object, which Go omits."""
    if isinstance(value, list):
        return [drop_nulls(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    found = {name: drop_nulls(inner) for name, inner in value.items()}
    return {name: inner for name, inner in found.items() if inner is not None and inner != {}}


def needs_rollout(old: machineconfig.MachineConfig, new: machineconfig.MachineConfig) -> bool:
    """Return whether nodes must drain or reboot, or be replaced, to get from one to the other.

    The rules are those of the agent in hosted mode: SSH keys, added mirrors, pull secret and trust
    bundle need neither. True also for an invalid config, and for what no running node can change.
    """
    was, will_be = wanted_state.ParsedConfig(old), wanted_state.ParsedConfig(new)
    try:
        is_possible = not reconcilable.find_irreconcilable_changes(was, will_be)
        changes = diff.compare_configs(was.wanted, will_be.wanted)
    except ConfigError:
        return True
    return (
        not is_possible
        or impact.compute_disruption(changes, node_mode.DISRUPTION_POLICY).needs_drain
    )
