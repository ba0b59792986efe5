"""The config layer: the last layer of an image, with the files and units of a rendered config.

It is made without the tree of the base image and is byte-equal for an equal config. What depends
on that tree, or what no image may contain, is omitted: the agent writes it on the node.

The layer has the links that enable units, as ``systemctl enable`` makes them, if the config has the
unit files: those of a base image, and with them their [Install] sections, are unknown.
"""

import io
import json
import posixpath
import struct
import tarfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace

from treenail import errors, oci_content
from treenail.api import decode, machineconfig
from treenail.config import drift_comparison, image_content, node_paths, wanted_state
from treenail.units import unit_files, unit_install


@dataclass(frozen=True, slots=True)
class ConfigUnitLinks:
    """Links by path with their targets, and the units that need something else."""

    made: Mapping[str, str] = field(default_factory=dict)
    left: tuple[str, ...] = ()
    """Units of the base that the agent enables or disables."""
    presets: tuple[str, ...] = ()
    """Lines of a preset file, which keep the enablement in a first boot."""
    problems: Mapping[str, str] = field(default_factory=dict)
    """Reasons by unit why neither links nor the agent can enable it."""


CURRENT_CONFIG = "/etc/machine-config-daemon/currentconfig"
PRESETS = "/etc/systemd/system-preset/20-treenail.preset"
_OWN_FILES = (CURRENT_CONFIG, PRESETS)
_PRIVATE = 0o600
_WHITEOUT = ".wh."
# Only these come from the image in every deployment; other directories are often links into /var.
_CARRIED = ("/etc/", "/usr/")
_DIRECTORY_MODE = 0o755
_STORED_LIMIT = 65535
_WantedEntry = wanted_state.WantedFile | wanted_state.WantedDirectory | wanted_state.WantedLink


@dataclass(frozen=True, slots=True)
class NotBakeable:
    """A part of a config that neither the image nor the agent can provide."""

    path: str
    why: str


@dataclass(frozen=True, slots=True)
class ConfigLayer:
    """The layer, its digests, and what it lacks: each omission is ``PATH: REASON``."""

    tar_gz: bytes = field(repr=False)
    diff_id: str
    digest: str
    omitted: tuple[str, ...] = ()
    problems: tuple[NotBakeable, ...] = ()

    @property
    def size(self) -> int:
        """Bytes of the compressed layer."""
        return len(self.tar_gz)


@dataclass(frozen=True, slots=True)
class _Entry:
    kind: bytes
    content: bytes = field(default=b"", repr=False)
    mode: int = _DIRECTORY_MODE
    user: int = 0
    group: int = 0
    target: str = ""


def make_config_layer(
    config: machineconfig.MachineConfig, *, trust_bundle: bytes = b""
) -> ConfigLayer:
    """Return the layer of a rendered config; raises `ConfigError` for an invalid config.

    ``trust_bundle`` is the cluster's CA bundle, PEM. The layer must not be used if it has problems.
    """
    wanted = wanted_state.read_wanted_state(config)
    builder = _LayerBuilder(wanted)
    builder.add_state()
    if trust_bundle:
        builder.entries[node_paths.USER_CA_BUNDLE] = _Entry(tarfile.REGTYPE, trust_bundle, 0o644)
    document = _omit_secrets(config, set(builder.withheld))
    content = json.dumps(document, sort_keys=True, separators=(",", ":")).encode() + b"\n"
    builder.entries[CURRENT_CONFIG] = _Entry(tarfile.REGTYPE, content, _PRIVATE)
    tree = _write_tar(builder.entries)
    packed = _store_gzip(tree)
    return ConfigLayer(
        packed,
        diff_id=oci_content.compute_digest(tree),
        digest=oci_content.compute_digest(packed),
        omitted=tuple(f"{path}: {why}" for path, why in builder.omitted.items()),
        problems=tuple(builder.problems),
    )


class _LayerBuilder:
    def __init__(self, wanted: wanted_state.WantedState) -> None:
        self.entries: dict[str, _Entry] = {}
        self.omitted: dict[str, str] = {}
        self.withheld: list[str] = []
        """Files that the copy of the config must lack."""
        self.problems: list[NotBakeable] = []
        self._wanted = wanted

    def add_state(self) -> None:
        for directory in self._wanted.directories.values():
            if self._can_add(directory.path, directory):
                self._add(directory, _Entry(tarfile.DIRTYPE, mode=directory.mode))
        for file in self._wanted.files.values():
            if self._can_add(file.path, file):
                content = file.contents.decode_bytes()
                self._add(file, _Entry(tarfile.REGTYPE, content, file.mode))
        for link in self._wanted.links.values():
            if self._can_add(link.path, link):
                self._add_link(link)
        for unit in self._wanted.units.values():
            self._add_unit_files(unit)
        self._add_unit_links(compute_unit_links(self._wanted))

    def _can_add(self, path: str, entry: _WantedEntry) -> bool:
        is_file = isinstance(entry, wanted_state.WantedFile)
        if image_content.is_machine_state(path):
            self.omitted[path] = "the agent writes logins and certificates"
            if is_file and node_paths.holds_logins(path):
                self.withheld.append(path)
            return False
        if not image_content.can_image_carry(path):
            self.omitted[path] = "no image carries it, the agent writes it"
            if is_file:
                self.withheld.append(path)
            return False
        is_local = path.startswith("/usr/local/")
        if is_local or not path.startswith(_CARRIED):
            self.omitted[path] = "its directory is a link into /var on many systems"
            return False
        # The owner of a link is not compared.
        if image_content.has_named_owner(entry) and not isinstance(entry, wanted_state.WantedLink):
            if node_paths.is_read_only(path):
                why = "its owner is a name: write the number, as an image below /usr needs it"
                self.problems.append(NotBakeable(path, why))
            else:
                self.omitted[path] = "its owner is a name, which the agent translates"
            return False
        return True

    def _add(self, wanted: _WantedEntry, entry: _Entry) -> None:
        user, group = _get_number(wanted.user), _get_number(wanted.group)
        self.entries[wanted.path] = replace(entry, user=user, group=group)

    def _add_link(self, link: wanted_state.WantedLink) -> None:
        if not link.is_hard:
            self._add(link, _Entry(tarfile.SYMTYPE, mode=0o777, target=link.target))
            return
        file = self.entries.get(link.target)
        if file is None or file.kind != tarfile.REGTYPE:
            why = (
                f"it is a hard link to {link.target}, which is not in the same layer: "
                "set hard to false"
            )
            self.problems.append(NotBakeable(link.path, why))
            return
        # A copy: layers are unpacked in other file systems, and the name alone is compared.
        self.entries[link.path] = file

    def _add_unit_files(self, unit: wanted_state.WantedUnit) -> None:
        path = node_paths.unit_path(unit.name)
        if unit.mask:
            self.entries[path] = _Entry(
                tarfile.SYMTYPE, mode=0o777, target=drift_comparison.MASK_TARGET
            )
        elif unit.contents:
            self.entries[path] = _Entry(
                tarfile.REGTYPE, unit.contents.encode(), drift_comparison.UNIT_MODE
            )
        for name, text in unit.dropins.items():
            dropin = node_paths.dropin_path(unit.name, name)
            if text:
                self.entries[dropin] = _Entry(
                    tarfile.REGTYPE, text.encode(), drift_comparison.UNIT_MODE
                )
            else:
                # The config demands that the base's drop-in does not exist.
                whiteout = node_paths.dropin_path(unit.name, _WHITEOUT + name)
                self.entries[whiteout] = _Entry(tarfile.REGTYPE, mode=0o644)

    def _add_unit_links(self, links: ConfigUnitLinks) -> None:
        for path, target in links.made.items():
            self.entries[path] = _Entry(tarfile.SYMTYPE, mode=0o777, target=target)
        for name in links.left:
            self.omitted[name] = "the agent enables or disables units of the base"
        self.problems += [NotBakeable(name, why) for name, why in links.problems.items()]
        if links.presets:
            # A first boot applies the presets, and would undo what the links say.
            text = "".join(f"{line}\n" for line in links.presets)
            self.entries.setdefault(PRESETS, _Entry(tarfile.REGTYPE, text.encode(), 0o644))


def _omit_secrets(config: machineconfig.MachineConfig, withheld: set[str]) -> decode.Json:
    """Return the config as the MCO stores it, without withheld files and password hashes."""
    document = deepcopy(config.to_json())
    spec = document.get("spec")
    ignition = spec.get("config") if isinstance(spec, dict) else None
    if not isinstance(ignition, dict):
        return document
    storage = ignition.get("storage")
    if isinstance(storage, dict) and isinstance(storage.get("files"), list):
        storage["files"] = [
            file
            for file in storage["files"]
            if not isinstance(file, dict) or file.get("path") not in withheld
        ]
    passwd = ignition.get("passwd")
    for user in passwd.get("users") or () if isinstance(passwd, dict) else ():
        if isinstance(user, dict):
            user.pop("passwordHash", None)
    metadata = document.get("metadata")
    if isinstance(metadata, dict):
        # What the API server adds differs between clusters and times.
        kept = ("name", "labels", "annotations")
        document["metadata"] = {name: metadata[name] for name in kept if metadata.get(name)}
    return document


def _write_tar(entries: Mapping[str, _Entry]) -> bytes:
    complete = {**dict(_iter_parents(entries)), **entries}
    tree = io.BytesIO()
    with tarfile.open(fileobj=tree, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path in sorted(complete):
            entry = complete[path]
            member = tarfile.TarInfo(path.removeprefix("/"))
            member.type, member.mode, member.linkname = entry.kind, entry.mode, entry.target
            member.uid, member.gid, member.mtime = entry.user, entry.group, 0
            member.size = len(entry.content)
            archive.addfile(member, io.BytesIO(entry.content))
    return tree.getvalue()


def _iter_parents(entries: Mapping[str, _Entry]) -> Iterator[tuple[str, _Entry]]:
    """Yield the parents that are always root's with the mode 0755.

    Others must keep the mode that they have in the base, such as /etc/audit.
    """
    roots = tuple(
        f"{directory}/"
        for directory in (node_paths.UNIT_DIRECTORY, *map(posixpath.dirname, _OWN_FILES))
    )
    for path in entries:
        parent = posixpath.dirname(path)
        while f"{parent}/".startswith(roots):
            yield parent, _Entry(tarfile.DIRTYPE)
            parent = posixpath.dirname(parent)


def _store_gzip(content: bytes) -> bytes:
    """Wrap content in gzip without compression: compressors differ between versions of zlib."""
    parts = [b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff"]
    for start in range(0, len(content), _STORED_LIMIT):
        block = content[start : start + _STORED_LIMIT]
        is_last = start + _STORED_LIMIT >= len(content)
        parts.append(struct.pack("<BHH", is_last, len(block), len(block) ^ 0xFFFF) + block)
    parts.append(struct.pack("<II", zlib.crc32(content), len(content) & 0xFFFFFFFF))
    return b"".join(parts)


def _get_number(owner: wanted_state.UserOrGroup) -> int:
    return owner if isinstance(owner, int) else 0


def compute_unit_links(wanted: wanted_state.WantedState) -> ConfigUnitLinks:
    """Return the links of the enabled units of a config."""
    files: dict[str, unit_files.FileChange] = {
        **{
            path: file.contents.decode_bytes()
            for path, file in wanted.files.items()
            if unit_files.is_unit_path(path)
        },
        **{path: text.encode() for path, text in wanted.list_unit_files().items()},
        **dict.fromkeys(wanted.list_masks(), unit_files.SymbolicLink("/dev/null")),
    }
    reader = unit_files.UnitFileReader(unit_files.ChangedFiles(None, files))
    made: dict[str, str] = {}
    left: dict[str, None] = {}
    problems: dict[str, str] = {}
    units = [u for u in wanted.units.values() if u.enabled is not None and not u.mask]
    for unit in units:
        if not reader.find_unit_file(unit.name):
            left[unit.name] = None
        elif unit.enabled:
            try:
                made |= reader.plan_enable(unit.name).made
                left |= dict.fromkeys(reader.find_missing_also(unit.name))
            except errors.UnitError as error:
                problems[unit.name] = str(error)
    return ConfigUnitLinks(made, tuple(left), tuple(_list_presets(units, reader)), problems)


def _list_presets(
    units: Iterable[wanted_state.WantedUnit], reader: unit_files.UnitFileReader
) -> Iterator[str]:
    """Yield a line for each unit, and one for the instances of a template together.

    ``systemctl preset-all``, and so a first boot, knows the names of files only: it disables all
    instances of a template whose line names none (systemd.preset(5)).
    """
    by_name = {unit.name: unit for unit in units}
    instances: dict[str, list[str]] = {}
    for name, unit in sorted(by_name.items()):
        template = unit_install.find_template_name(name)
        if template and unit.enabled:
            instances.setdefault(template, []).append(unit_install.get_instance(name) or "")
    for template, names in instances.items():
        install = reader.read_install(template)
        own = by_name.get(template)
        default = install.default_instance if install and own and own.enabled else ""
        yield " ".join(("enable", template, *dict.fromkeys(filter(None, (default, *names)))))
    # The first line that matches a unit counts.
    for name, unit in sorted(by_name.items()):
        yield f"{'enable' if unit.enabled else 'disable'} {name}"
