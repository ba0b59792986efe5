"""The install configuration: the field ``imageMode``, the number of machines, logins. Pure.

Of ``install-config.yaml`` the other fields belong to the OpenShift installer, which checks them.
`remove_field` removes one field, and leaves every other byte of the file as it is.
"""

import codecs
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from treenail.api import decode, documents, machineconfigpool
from treenail.controllers.handover import image_mode_field
from treenail.encoding import yaml11
from treenail.errors import ConfigError
from treenail.image.build_inputs import ARCHITECTURES
from treenail.installer.directory import install_files, install_manifests
from treenail.installer.directory.problems import InstallProblem

CONTROL_PLANE_MACHINES, ARBITER_MACHINES = "controlPlane", "arbiter"
"""Fields of an install configuration with the numbers of machines."""

_CONFIGMAP, _NAMESPACE, _KEY = "cluster-config-v1", "kube-system", "install-config"
"""The OpenShift installer consumes install-config.yaml, and keeps it in this ConfigMap."""
_REPLICAS = "replicas"
_LIMIT = 100


def find_machine_count(
    manifests: install_manifests.InstallManifests, install_config: bytes | None
) -> int | None:
    """Return the machines of the pools master and arbiter; None if no file says it.

    ``install_config`` is the content of the install configuration; None without the file.
    """
    manifest = manifests.find("ConfigMap", _CONFIGMAP, _NAMESPACE)
    data = None if manifest is None else manifest.document.get("data")
    text = data.get(_KEY) if isinstance(data, Mapping) else None
    content = text.encode("utf-8", "replace") if isinstance(text, str) else install_config
    if content is None:
        return None
    try:
        document = documents.load_document(documents.decode_text(content, _KEY), where=_KEY)
    except ConfigError:
        # The OpenShift installer reports the problems of its own file.
        return None
    return count_machines(document)


def count_machines(document: decode.Json) -> int | None:
    """Return the machines that an install configuration names; None without a number."""
    counts = [_find_replicas(document, name) for name in (CONTROL_PLANE_MACHINES, ARBITER_MACHINES)]
    known = [count for count in counts if count is not None]
    # Without an own number the control plane's size is a default of the installer's release.
    return None if counts[0] is None else sum(known)


def find_count_problems(document: decode.Json) -> Iterator[tuple[str, str]]:
    """Yield field and text for each wrong number of machines."""
    for name in (CONTROL_PLANE_MACHINES, ARBITER_MACHINES):
        if name not in document:
            continue
        machines = document[name]
        has_others = not isinstance(machines, Mapping) or [*machines] != [_REPLICAS]
        if has_others or _find_replicas(document, name) is None:
            yield name, f"{name}: expected {_REPLICAS}, a number from 1 to {_LIMIT}, alone"


def _find_replicas(document: decode.Json, name: str) -> int | None:
    machines = document.get(name)
    count = machines.get(_REPLICAS) if isinstance(machines, Mapping) else None
    if not isinstance(count, int) or isinstance(count, bool):
        return None
    return count if 0 < count <= _LIMIT else None


PULL_SECRET_FIELD = "pullSecret"  # noqa: S105  # the name of a field
_MAX_VALUES = 100_000
_OWN_FIELDS = (image_mode_field.FIELD, PULL_SECRET_FIELD, CONTROL_PLANE_MACHINES, ARBITER_MACHINES)


@dataclass(frozen=True, slots=True)
class InstallConfig:
    """An install configuration."""

    name: str
    content: bytes = field(repr=False)
    mode: image_mode_field.ParsedImageMode = field(default_factory=image_mode_field.ParsedImageMode)
    pull_secret: bytes = field(default=b"", repr=False)
    """Logins of registries; empty without any."""
    architectures: Mapping[str, str] = field(default_factory=dict)
    """Architecture of the machines by pool, where the file says it."""
    machines: int | None = None
    """Machines of the control plane; None where the file does not say it."""
    problems: tuple[InstallProblem, ...] = ()

    @property
    def is_own(self) -> bool:
        """True for the file of treenail: no other program reads it."""
        return self.name == install_files.OWN_INSTALL_CONFIG


def parse_install_config(content: bytes, name: str) -> InstallConfig:
    """Read the file; raise `ConfigError` if it is not a YAML object."""
    text = documents.decode_text(content, name)
    document = documents.load_document(text, where=name, budget=yaml11.ValueBudget(_MAX_VALUES))
    mode = image_mode_field.parse_image_mode(text, where=name)
    problems = [
        InstallProblem(name, problem.text, problem.remedy, problem.line)
        for problem in mode.problems
    ]
    if name == install_files.OWN_INSTALL_CONFIG:
        positions = yaml11.find_positions(text, where=name)
        problems += [
            InstallProblem(
                name,
                f"unknown field {field_name:.60}, expected one of {', '.join(_OWN_FIELDS)}",
                "remove it",
                positions.find_line(field_name),
            )
            for field_name in document
            if field_name not in _OWN_FIELDS
        ]
        problems += [
            InstallProblem(
                name,
                text,
                f"write, for example: {field_name}: {{replicas: 3}}",
                positions.find_line(field_name),
            )
            for field_name, text in find_count_problems(document)
        ]
    secret = document.get(PULL_SECRET_FIELD)
    return InstallConfig(
        name,
        content,
        mode,
        secret.encode("utf-8", "surrogatepass") if isinstance(secret, str) else b"",
        _find_architectures(document),
        count_machines(document),
        tuple(problems),
    )


def _find_architectures(document: decode.Json) -> dict[str, str]:
    architectures: dict[str, str] = {}
    for name, pool in (
        (CONTROL_PLANE_MACHINES, machineconfigpool.MASTER),
        (ARBITER_MACHINES, machineconfigpool.ARBITER),
    ):
        _add_architecture(architectures, pool, document.get(name))
    compute = document.get("compute")
    for machine_pool in compute if isinstance(compute, list) else []:
        if (
            isinstance(machine_pool, dict)
            and machine_pool.get("name", machineconfigpool.WORKER) == machineconfigpool.WORKER
        ):
            _add_architecture(architectures, machineconfigpool.WORKER, machine_pool)
    return architectures


def _add_architecture(architectures: dict[str, str], pool: str, machines: object) -> None:
    architecture = machines.get("architecture") if isinstance(machines, dict) else None
    if isinstance(architecture, str) and architecture in ARCHITECTURES:
        architectures[pool] = architecture


_BLANK = " \t"
_COMMENT_LINE = re.compile(r"([ \t]*)#[^\r\n]*(?:\r\n|\r|\n|$)")
_EMPTY_LINE = re.compile(r"[ \t]*(?:\r\n|\r|\n)")


def remove_field(content: bytes, name: str, *, where: str) -> bytes:
    """Return the file without a field at the top; raise `ConfigError` if that is impossible.

    Comments beside and below the field go with it. The result is parsed again: every other field
    has the value that it had. A file without the field is returned as it is.
    """
    text = documents.decode_text(content, where)
    document = documents.load_document(text, where=where)
    positions = yaml11.find_positions(text, where=where)
    if name not in document:
        return content
    if name not in positions.ranges:
        raise _make_error(name, where, "it comes from a merge key or a list of keys")
    expected = {key: value for key, value in document.items() if key != name}
    for candidate in _list_candidates(text, positions.ranges[name]):
        if _has_fields(candidate, expected, where):
            mark = codecs.BOM_UTF8 if content.startswith(codecs.BOM_UTF8) else b""
            return mark + candidate.encode()
    line = positions.find_line(name)
    cause = "another field uses an anchor in it, or is on the same line"
    raise _make_error(name, f"{where}, line {line}", cause)


def _list_candidates(text: str, field: yaml11.FieldRange) -> list[str]:
    """Return texts without the field, the best first."""
    if field.is_flow:
        return [_cut_flow(text, field)]
    start = _find_line_start(text, field.key_start)
    end = _find_line_end(text, field.value_end)
    # A comment with more indent than the key is the field's; it would become part of a text above.
    while (match := _COMMENT_LINE.match(text, end)) and len(match[1]) > field.key_start - start:
        end = match.end()
    later = end
    while match := _EMPTY_LINE.match(text, later):
        later = match.end()
    before, rest = text[:start], text[end:]
    if not field.is_only:
        # Empty lines may become part of the text before them.
        return [before + rest, before + text[later:]]
    newline = "\r\n" if "\r\n" in text else "\n"
    return [f"{before}{{}}{newline}{rest}"]


def _cut_flow(text: str, field: yaml11.FieldRange) -> str:
    """Cut key, value and one comma."""
    start, end = field.key_start, field.value_end
    after = _skip_space(text, end)
    if after < len(text) and text[after] == ",":
        end = after + 1
        while end < len(text) and text[end] in _BLANK:
            end += 1
        return text[:start] + text[end:]
    before = len(text[:start].rstrip())
    if before and text[before - 1] == ",":
        # A comment may follow the comma.
        return text[: before - 1] + text[end:]
    return text[:start] + text[end:]


def _skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position] in " \t\r\n":
        position += 1
    return position


def _find_line_start(text: str, position: int) -> int:
    return max(text.rfind("\n", 0, position), text.rfind("\r", 0, position)) + 1


def _find_line_end(text: str, position: int) -> int:
    """Return the index behind the line break of a line; a value may end behind its own."""
    if position and text[position - 1] in "\r\n":
        return position
    match = re.compile(r"[^\r\n]*(?:\r\n|\r|\n|$)").match(text, position)
    return match.end() if match else position


def _has_fields(text: str, expected: decode.Json, where: str) -> bool:
    try:
        return documents.load_document(text, where=where) == expected
    except ConfigError:
        return False


def _make_error(name: str, where: str, why: str) -> ConfigError:
    return ConfigError(
        f"cannot remove the field {name} from {where}: {why}",
        remedy=f"write {name} as a field of its own at the top of the file, without anchors that "
        "other fields use",
    )
