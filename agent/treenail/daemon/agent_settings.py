"""The agent's settings, from /etc/treenail/agent.toml and the command line.

`TomlTable` reads a table of the file key by key, and rejects unknown keys.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from treenail import errors
from treenail.api import object_meta, pullspec
from treenail.host.ostree.backend_settings import BackendSetting
from treenail.update.checks.preflight_reason import PreflightReason
from treenail.update.drift import drift_policy
from treenail.update.state import boot_trial

T = TypeVar("T")
_E = TypeVar("_E", bound=StrEnum)

_MIN_S = 0.1
_MAX_S = 86_400.0
_MAX_COUNT = 1000


class TomlTable:
    """A TOML table whose keys are taken one by one; keys that are left are rejected."""

    def __init__(self, content: dict[str, object], *, where: str, path: str = "") -> None:
        self._content = content
        self._where = where
        self._path = path
        self._known_keys: list[str] = []

    def take_text(self, key: str) -> str | None:
        value = self._take_value(key)
        if value is None or isinstance(value, str):
            return value
        raise self.build_error(key, value, "a string")

    def take_choice(self, key: str, choices: Mapping[str, T]) -> T | None:
        value = self._take_value(key)
        if value is None:
            return None
        if isinstance(value, str) and value in choices:
            return choices[value]
        raise self.build_error(key, value, " or ".join(f'"{choice}"' for choice in choices))

    def take_enum(self, key: str, kind: type[_E]) -> _E | None:
        return self.take_choice(key, {member.value: member for member in kind})

    def take_choices(self, key: str, choices: Mapping[str, T]) -> tuple[T, ...]:
        values = self._take_value(key)
        if values is None:
            return ()
        if not isinstance(values, list):
            raise self.build_error(key, values, "a list of strings")
        for value in values:
            if not isinstance(value, str) or value not in choices:
                raise self.build_error(key, value, " or ".join(f'"{choice}"' for choice in choices))
        return tuple(choices[value] for value in values)

    def take_seconds(self, key: str, default: float) -> float:
        value = self._take_value(key)
        if value is None:
            return default
        if (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and _MIN_S <= value <= _MAX_S
        ):
            return float(value)
        raise self.build_error(key, value, f"a number of seconds from {_MIN_S:g} to {_MAX_S:g}")

    def take_count(self, key: str, default: int) -> int:
        value = self._take_value(key)
        if value is None:
            return default
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_COUNT:
            return value
        raise self.build_error(key, value, f"a number from 0 to {_MAX_COUNT}")

    def list_keys(self) -> tuple[str, ...]:
        return tuple(self._content)

    def take_table(self, key: str) -> "TomlTable":
        value = self._take_value(key)
        if value is None or isinstance(value, dict):
            return TomlTable(value or {}, where=self._where, path=f"{self._path}{key}.")
        raise self.build_error(key, value, "a table")

    def reject_unknown_keys(self) -> None:
        for key in self._content:
            if key not in self._known_keys:
                raise errors.UsageError(
                    f"{self._where}: unknown setting {self._path}{key}",
                    remedy=f"remove it, or use one of: {', '.join(self._known_keys)}",
                )

    def build_error(self, key: str, value: object, allowed: str) -> errors.UsageError:
        shown = _format_value(value)
        return errors.UsageError(
            f"{self._where}: {self._path}{key} is {shown}; allowed is {allowed}"
        )

    def _take_value(self, key: str) -> object:
        self._known_keys.append(key)
        return self._content.get(key)


def _format_value(value: object) -> str:
    """Return the value as Python writes it, shortened."""
    try:
        return f"{value!r:.200}"
    except ValueError:
        # Python formats no number of more than 4,300 digits; TOML can write one in hexadecimal.
        return "a number of thousands of digits"


SETTINGS_FILE = "/etc/treenail/agent.toml"

_LOG_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
_MAX_BYTES = 1024 * 1024
_TABLE_HEADERS = frozenset(
    (b"[limits]", b"[health]", b"[preflight]", b"[firstboot]", b"[drift]", b"[drift.paths]")
)


class DrainMode(StrEnum):
    """How the node is drained before it reboots."""

    REQUEST = "request"
    """Request the drain from a controller through the Node's annotations."""
    NEVER = "never"
    """Do not drain: the reboot ends the pods."""


class RebootMode(StrEnum):
    """The scope of the reboot after a change of the operating system."""

    FULL = "full"
    """The machine."""
    AUTO = "auto"
    """User space only, when kernel, kernel arguments and initramfs do not change."""


class ImageFiles(StrEnum):
    """The source of a config's files and units in image mode."""

    BAKED = "baked"
    """The image. An image that lacks a part is rejected."""
    WRITE = "write"
    """The image, and the agent writes what it lacks."""


@dataclass(frozen=True, slots=True)
class LimitSettings:
    """Time limits and retry delays, in seconds."""

    stage_s: float = 3600.0
    """For pulling and staging an image, in total."""
    stall_s: float = 600.0
    """For staging without any progress."""
    drain_s: float = 3600.0
    """For a drain, before its delay is reported."""
    call_s: float = 30.0
    """For one call to D-Bus or the API server."""
    retry_first_s: float = 5.0
    """From the first failure to the next attempt; doubled after each further failure."""
    retry_max_s: float = 300.0
    """The longest delay between two attempts."""
    resync_s: float = 60.0
    """The interval of a full pass when no event causes one."""


@dataclass(frozen=True, slots=True)
class HealthSettings(boot_trial.TrialLimits):
    """The boot trial after a reboot into a target; times are in seconds."""

    mode: boot_trial.HealthCheckMode = boot_trial.HealthCheckMode.ENFORCE
    """The effect of a failed check."""
    check_s: float = 30.0
    """The time limit of one custom check."""
    interval_s: float = 5.0
    """The interval between two runs of the checks."""
    retention_s: float = 86_400.0
    """How long the previous deployment stays pinned after a successful trial."""


@dataclass(frozen=True, slots=True)
class PreflightSettings:
    """The pre-flight checks of an update."""

    registry_s: float = 60.0
    """The time limit for inspecting the image in the registry, in seconds."""
    only_warn: frozenset[PreflightReason] = frozenset()
    """The findings that are logged and do not block."""


@dataclass(frozen=True, slots=True)
class DriftSettings(drift_policy.DriftPolicy):
    """How drift is detected, and the reaction to it."""

    full_check_s: float = 600.0
    """The interval of a full check, in seconds; touched paths are checked within seconds."""


@dataclass(frozen=True, slots=True)
class FirstBootSettings:
    """The target of a node before it joins its cluster."""

    image: str = ""
    """The image by digest; when empty, the one of the node's first config."""


@dataclass(frozen=True, slots=True)
class PartialSettings:
    """The settings of the file or of the command line; None where one is not set."""

    kubeconfig: str | None = None
    node_name: str | None = None
    root: str | None = None
    pull_secret: str | None = None
    internal_pull_secret: str | None = None
    drain: DrainMode | None = None
    image_files: ImageFiles | None = None
    backend: BackendSetting | None = None
    reboot: RebootMode | None = None
    log_level: int | None = None
    limits: LimitSettings | None = None
    health: HealthSettings | None = None
    preflight: PreflightSettings | None = None
    firstboot: FirstBootSettings | None = None
    drift: DriftSettings | None = None


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """All settings with their values. All paths except ``root`` are below the root."""

    kubeconfig: str = "/var/lib/kubelet/kubeconfig"
    node_name: str = ""
    """Empty unless it is set; `choose_identity` names the Node."""
    root: str = "/"
    pull_secret: str = "/var/lib/kubelet/config.json"  # noqa: S105 - a path
    """The cluster's pull secret."""
    internal_pull_secret: str = "/etc/mco/internal-registry-pull-secret.json"  # noqa: S105 - as above
    """The pull secret of the cluster's own registry; the file need not exist."""
    drain: DrainMode = DrainMode.REQUEST
    image_files: ImageFiles = ImageFiles.BAKED
    backend: BackendSetting = BackendSetting.AUTO
    reboot: RebootMode = RebootMode.FULL
    log_level: int = logging.INFO
    limits: LimitSettings = LimitSettings()
    health: HealthSettings = HealthSettings()
    preflight: PreflightSettings = PreflightSettings()
    firstboot: FirstBootSettings = FirstBootSettings()
    drift: DriftSettings = DriftSettings()


def load_settings(path: Path, arguments: PartialSettings, *, is_required: bool) -> AgentSettings:
    """Load the file, and override its settings by those of the command line.

    A missing file is empty, unless ``is_required``. Raises `UsageError` with the key, its value and
    what is allowed.
    """
    try:
        with path.open("rb") as stream:
            content = stream.read(_MAX_BYTES + 1)
    except FileNotFoundError as error:
        if is_required:
            raise errors.UsageError(
                f"cannot read {path}: no such file", remedy="name a file that exists"
            ) from error
        return merge_settings(PartialSettings(), arguments)
    except OSError as error:
        raise errors.UsageError(f"cannot read {path!s:.200}: {error.strerror}") from error
    if len(content) > _MAX_BYTES:
        raise errors.UsageError(
            f"cannot read {path}: it has more than {_MAX_BYTES} bytes",
            remedy="name a file with settings, see treenail-agent.toml(5)",
        )
    return merge_settings(parse_settings(content, where=str(path)), arguments)


def parse_settings(content: bytes, *, where: str) -> PartialSettings:
    """Parse the TOML document. Raises a `UsageError` that begins with ``where``."""
    if _has_no_setting(content):
        return PartialSettings()
    import tomllib  # noqa: PLC0415 - 1 MiB, and most nodes have no setting in the file

    try:
        document = tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise errors.UsageError(f"cannot parse {where} as TOML: {error}") from error
    table = TomlTable(document, where=where)
    partial = PartialSettings(
        kubeconfig=table.take_text("kubeconfig"),
        node_name=table.take_text("node_name"),
        root=table.take_text("root"),
        pull_secret=table.take_text("pull_secret"),
        internal_pull_secret=table.take_text("internal_pull_secret"),
        drain=table.take_enum("drain", DrainMode),
        image_files=table.take_enum("image_files", ImageFiles),
        backend=table.take_enum("backend", BackendSetting),
        reboot=table.take_enum("reboot", RebootMode),
        log_level=table.take_choice("log_level", _LOG_LEVELS),
        limits=_parse_limits(table.take_table("limits")),
        health=_parse_health(table.take_table("health")),
        preflight=_parse_preflight(table.take_table("preflight")),
        firstboot=_parse_first_boot(table.take_table("firstboot"), where=where),
        drift=_parse_drift(table.take_table("drift")),
    )
    table.reject_unknown_keys()
    return partial


def _has_no_setting(content: bytes) -> bool:
    """Return True for comments and headers of known tables only, as in the packaged file."""
    lines = map(bytes.strip, content.splitlines())
    return all(not line or line.startswith(b"#") or line in _TABLE_HEADERS for line in lines)


def merge_settings(file: PartialSettings, arguments: PartialSettings) -> AgentSettings:
    """Merge settings: the command line wins over the file, the file over the defaults."""
    values: dict[str, Any] = {
        field.name: value
        for source in (file, arguments)
        for field in fields(source)
        if (value := getattr(source, field.name)) is not None
    }
    settings = AgentSettings(**values)
    for key in ("kubeconfig", "root", "pull_secret", "internal_pull_secret"):
        path: str = getattr(settings, key)
        if not path.startswith("/") or "\0" in path:
            raise errors.UsageError(f"{key} is {path!r}; allowed is an absolute path")
    name = values.get("node_name", "unset")
    if not object_meta.is_object_name(name):
        raise errors.UsageError(
            f"node_name is {name!r}; allowed is the name of a Node: lower-case "
            "letters, digits, - and .",
            remedy="set node_name to the name that the kubelet registers, or remove it",
        )
    return settings


def _take_all_seconds(
    table: TomlTable, default: LimitSettings | HealthSettings
) -> dict[str, float]:
    """Return the settings that are a number of seconds."""
    names = [field.name for field in fields(default) if field.name.endswith("_s")]
    return {name: table.take_seconds(name, getattr(default, name)) for name in names}


def _parse_limits(table: TomlTable) -> LimitSettings:
    limits = LimitSettings(**_take_all_seconds(table, LimitSettings()))
    table.reject_unknown_keys()
    if limits.retry_first_s > limits.retry_max_s:
        raise table.build_error(
            "retry_first_s", limits.retry_first_s, f"at most retry_max_s, {limits.retry_max_s:g}"
        )
    return limits


def _parse_health(table: TomlTable) -> HealthSettings:
    default = HealthSettings()
    mode = table.take_enum("mode", boot_trial.HealthCheckMode) or default.mode
    trial = HealthSettings(mode=mode, **_take_all_seconds(table, default))
    table.reject_unknown_keys()
    return trial


def _parse_preflight(table: TomlTable) -> PreflightSettings:
    default = PreflightSettings()
    preflight = PreflightSettings(
        registry_s=table.take_seconds("registry_s", default.registry_s),
        only_warn=frozenset(
            table.take_choices("only_warn", {str(reason): reason for reason in PreflightReason})
        ),
    )
    table.reject_unknown_keys()
    return preflight


def _parse_drift(table: TomlTable) -> DriftSettings:
    default = DriftSettings()
    reactions = drift_policy.DriftReaction
    paths = table.take_table("paths")
    drift = DriftSettings(
        default=table.take_enum("default", reactions) or default.default,
        paths=tuple(
            (glob, reaction)
            for glob in paths.list_keys()
            if (reaction := paths.take_enum(glob, reactions))
        ),
        repairs_per_hour=table.take_count("repairs_per_hour", default.repairs_per_hour),
        full_check_s=table.take_seconds("full_check_s", default.full_check_s),
    )
    table.reject_unknown_keys()
    return drift


def _parse_first_boot(table: TomlTable, *, where: str) -> FirstBootSettings:
    image = table.take_text("image") or ""
    table.reject_unknown_keys()
    if image:
        try:
            pullspec.parse_pull_spec(image, where=f"{where}: firstboot.image")
        except errors.ConfigError as error:
            raise errors.UsageError(str(error), remedy=error.remedy) from error
    return FirstBootSettings(image)
