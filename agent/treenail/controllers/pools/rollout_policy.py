"""RolloutPolicy: limits of a rollout beyond ``maxUnavailable``, in an object that pools name.

::

    apiVersion: treenail.io/v1alpha1
    kind: RolloutPolicy
    metadata: {name: careful}
    spec:
      canary: {nodes: 1, soak: 30m, nodeSelector: {matchLabels: {canary: ""}}}
      waves: [10%, 50%]          # updated share of the pool; the rest follows
      soak: 10m                  # between waves
      maxFailures: 0             # one more failed node halts the rollout
      rebootTimeout: 30m         # a node that is not Ready for longer has failed
      order: spread              # over all zones; or zones: one after the other
      prestage: {maxParallel: 10} # all nodes pull the image before the first is drained
      windows:
      - {days: [Sat, Sun], start: "01:00", duration: 4h, timeZone: Europe/Berlin}
      fleetLock: {url: "http://locks.example.com", group: workers}
      alerts: {url: "https://prometheus.example.com", names: [ApiErrors], secret: prometheus}
      healthMode: Enforce        # or Report, Off; absent: agent.toml of the node
      resume: {worker: "1"}      # a new value resumes the halted rollout of pool worker

Every field is optional. Without a policy nothing but ``maxUnavailable`` limits a rollout, as with
the Machine Config Operator.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TypeVar
from urllib.parse import urlsplit

from treenail import errors, label_selector
from treenail.api import decode, machineconfigpool, object_meta
from treenail.controllers.pools import maintenance_windows

API_VERSION = "treenail.io/v1alpha1"
KIND = "RolloutPolicy"

POLICY_FIELDS = frozenset({
    "canary", "waves", "soak", "maxFailures", "rebootTimeout", "order", "prestage", "windows",
    "fleetLock", "alerts", "progressDeadline", "healthMode", "resume",
})  # fmt: skip
_CANARY_FIELDS = frozenset({"nodes", "soak", "nodeSelector"})
_SELECTOR_FIELDS = frozenset({"matchLabels", "matchExpressions"})
_REQUIREMENT_FIELDS = frozenset({"key", "operator", "values"})

_MAX_COUNT = 2**31 - 1
"""The schema has the format int32."""

DEFAULT_MAX_PARALLEL = 10
"""Nodes that pull at the same time: a compromise between speed and load on the registry."""

DEFAULT_PROGRESS_DEADLINE_S = 3600.0

_T = TypeVar("_T")
_Choice = TypeVar("_Choice", bound=StrEnum)

# Not \d, which matches the digits of every script; the schema of the CRD has the same limits.
_DURATION = re.compile(r"(?:([0-9]{1,6})h)?(?:([0-9]{1,6})m)?(?:([0-9]{1,6})s)?")
_MAX_WAVES, _MAX_WINDOWS, _MAX_RESUMES, _MAX_RESUME_CHARS = 20, 50, 200, 253
_PERCENTAGE = re.compile(r"(100|[1-9]?[0-9])%")
MAX_ALERTS = 50
# The schema of the CRD has the same limits. The FleetLock protocol allows these characters.
_GROUP = re.compile(r"[a-zA-Z0-9.-]{1,253}")
_URL = re.compile(r"https?://[^/@?#\s]+(/[^?#\s]*)?")
_MAX_NAME_CHARS, _MAX_URL_CHARS = 253, 1024


class NodeOrder(StrEnum):
    """Order in which nodes get the target."""

    ZONES = "zones"
    SPREAD = "spread"


class HealthMode(StrEnum):
    """Effect of a failed health check after a reboot; the controller copies it to the nodes."""

    ENFORCE = "Enforce"
    """Roll back."""
    REPORT = "Report"
    OFF = "Off"


@dataclass(frozen=True, slots=True)
class PoolShare:
    """A part of a pool, as a count or a percentage."""

    count: int = 0
    percent: int = 0

    def compute_count(self, total: int) -> int:
        """Compute the number of nodes for a pool of ``total`` nodes, at least one."""
        return min(total, max(1, self.count, total * self.percent // 100))


@dataclass(frozen=True, slots=True)
class Wave:
    """A wave: total share of updated nodes at its end, and the soak time before the next one."""

    share: PoolShare
    soak_s: float = 0.0
    selector: label_selector.LabelSelector | None = None
    """Selects the nodes of the wave; None selects all."""


@dataclass(frozen=True, slots=True)
class LockServer:
    """A FleetLock server, which grants a lock for each node."""

    url: str
    group: str

    @property
    def text(self) -> str:
        """Format for an annotation, as `from_text` parses it."""
        return f"{self.group} {self.url}"

    @classmethod
    def from_text(cls, text: str) -> "LockServer | None":
        """Parse an annotation value; None when it names no server."""
        group, _, url = text.partition(" ")
        return cls(url, group) if group and url else None


@dataclass(frozen=True, slots=True)
class PrometheusAlerts:
    """Prometheus alerts that pause a rollout while one of them fires."""

    url: str
    names: tuple[str, ...]
    secret: str = ""
    """Name of the Secret with the bearer token and the certificate authority; empty for none."""


@dataclass(frozen=True, slots=True)
class RolloutPolicy:
    """Limits of a rollout in addition to ``maxUnavailable``."""

    waves: tuple[Wave, ...] = ()
    max_failures: int | None = None
    """Number of nodes that may fail; None means any number."""
    reboot_timeout_s: float | None = None
    progress_deadline_s: float = DEFAULT_PROGRESS_DEADLINE_S
    """Time without progress after which the pool is stalled; 0 disables the deadline."""
    order: NodeOrder = NodeOrder.ZONES
    prestage_max_parallel: int | None = None
    """Nodes that prestage at the same time; None disables prestaging."""
    windows: tuple[maintenance_windows.MaintenanceWindow, ...] = ()
    lock_server: LockServer | None = None
    alerts: PrometheusAlerts | None = None
    health_mode: HealthMode | None = None
    """None leaves the choice to the settings of each node."""
    resume: Mapping[str, str] = field(default_factory=dict)
    """By pool: a new value resumes its halted rollout."""


class MissingPolicyError(errors.ConfigError):
    """A pool names a RolloutPolicy that does not exist."""


@dataclass(frozen=True, slots=True)
class ObservedPolicy:
    """A RolloutPolicy from the cache, possibly with an invalid spec."""

    name: str
    policy: RolloutPolicy = field(default_factory=RolloutPolicy)
    error: errors.ConfigError | None = None
    """Why the spec is invalid."""
    generation: int = 0
    status: decode.Json = field(default_factory=dict, repr=False)
    resource_version: str = field(default="", compare=False)

    @classmethod
    def from_json(cls, document: decode.Json) -> "ObservedPolicy":
        """Parse a RolloutPolicy; raises `ConfigError` only for invalid metadata or status."""
        fields = decode.Fields.from_json(document, "")
        meta = object_meta.ObjectMeta.from_fields(fields.get_object("metadata"))
        observed = cls(
            meta.name,
            generation=meta.generation,
            status=fields.get_object("status").values,
            resource_version=meta.resource_version,
        )
        try:
            return replace(observed, policy=parse_policy(document, meta.name))
        except errors.ConfigError as error:
            return replace(observed, error=error)

    @property
    def decision_key(self) -> tuple[object, ...]:
        """The fields that determine a decision."""
        return self.policy, str(self.error)


def find_policy(
    pool: machineconfigpool.MachineConfigPool, policies: Mapping[str, ObservedPolicy]
) -> RolloutPolicy:
    """Return the policy of the pool; raises `ConfigError` when it is missing or invalid."""
    name = pool.rollout_policy
    if not name:
        return RolloutPolicy()
    if (observed := policies.get(name)) is None:
        raise MissingPolicyError(
            f"RolloutPolicy {name} does not exist, and spec.rolloutPolicy of pool {pool.name} "
            "names it",
            remedy="create it, or correct spec.rolloutPolicy; until then no node is assigned",
        )
    if observed.error is not None:
        raise observed.error
    return observed.policy


def parse_policy(document: decode.Json, name: str) -> RolloutPolicy:
    """Parse the spec of a RolloutPolicy; raises `ConfigError` that names the field."""
    try:
        fields = decode.Fields.from_json(document, "")
        decode.reject_unknown_fields(fields, {"apiVersion", "kind", "metadata", "spec", "status"})
        return _parse_spec(fields.get_object("spec"))
    except errors.ConfigError as error:
        raise errors.ConfigError(f"RolloutPolicy {name}: {error}", remedy=error.remedy) from error


def parse_duration_s(fields: decode.Fields, name: str) -> float | None:
    """Parse a duration such as ``1h30m`` or ``45s``; None when absent."""
    text = fields.get_optional_text(name)
    if text is None:
        return None
    match = _DURATION.fullmatch(text)
    if not match or not text:
        raise fields.error(
            f"{fields.path_of(name)}: expected a duration such as 10m or 1h30m, found {text!r:.40}"
        )
    hours, minutes, rest = (int(part or 0) for part in match.groups())
    return hours * 3600.0 + minutes * 60.0 + rest


def _parse_spec(fields: decode.Fields) -> RolloutPolicy:
    # An ignored typo would disable a limit that the user relies on.
    decode.reject_unknown_fields(fields, POLICY_FIELDS)
    return RolloutPolicy(
        waves=_parse_waves(fields),
        max_failures=_parse_max_failures(fields),
        reboot_timeout_s=parse_duration_s(fields, "rebootTimeout"),
        progress_deadline_s=_parse_progress_deadline(fields),
        order=_parse_order(fields),
        prestage_max_parallel=_parse_max_parallel(fields),
        windows=_parse_windows(fields),
        lock_server=_parse_optional(fields, "fleetLock", parse_lock_server),
        alerts=_parse_optional(fields, "alerts", parse_alerts),
        health_mode=_parse_health_mode(fields),
        resume=_parse_resume(fields),
    )


def _parse_windows(fields: decode.Fields) -> tuple[maintenance_windows.MaintenanceWindow, ...]:
    _get_bounded_list(fields, "windows", _MAX_WINDOWS)
    return fields.map_objects(
        "windows",
        lambda window: maintenance_windows.parse_window(
            window, parse_duration_s(window, "duration")
        ),
    )


def _parse_resume(fields: decode.Fields) -> dict[str, str]:
    resume = fields.get_text_map("resume")
    if len(resume) > _MAX_RESUMES or any(len(text) > _MAX_RESUME_CHARS for text in resume.values()):
        raise fields.error(
            f"{fields.path_of('resume')}: expected at most {_MAX_RESUMES} pools, each with a text "
            f"of at most {_MAX_RESUME_CHARS} characters"
        )
    return resume


def _get_bounded_list(fields: decode.Fields, name: str, limit: int) -> list[object]:
    values = fields.get_list(name)
    if len(values) > limit:
        raise fields.error(
            f"{fields.path_of(name)}: expected at most {limit} entries, found {len(values)}"
        )
    return values


def _parse_optional(
    fields: decode.Fields, name: str, parse: Callable[[decode.Fields], _T]
) -> _T | None:
    return None if fields.values.get(name) is None else parse(fields.get_object(name))


def _parse_waves(fields: decode.Fields) -> tuple[Wave, ...]:
    waves = []
    soak_s = parse_duration_s(fields, "soak") or 0.0
    if fields.values.get("canary") is not None:
        canary = fields.get_object("canary")
        decode.reject_unknown_fields(canary, _CANARY_FIELDS)
        _reject_unknown_selector_fields(canary.get_object("nodeSelector"))
        share = (
            PoolShare(1)
            if canary.values.get("nodes") is None
            else _parse_share(canary.values["nodes"], canary.path_of("nodes"))
        )
        own_s = parse_duration_s(canary, "soak")
        selector = label_selector.parse_optional_selector(
            canary.values.get("nodeSelector"), canary.path_of("nodeSelector")
        )
        waves.append(Wave(share, soak_s if own_s is None else own_s, selector))
    for index, value in enumerate(_get_bounded_list(fields, "waves", _MAX_WAVES)):
        share = _parse_share(value, f"{fields.path_of('waves')}[{index}]")
        if waves and not _is_larger(waves[-1].share, share):
            raise errors.ConfigError(
                f"{fields.path_of('waves')}[{index}]: expected more than in the previous wave, "
                f"found {value!r:.40}",
                remedy="write the total share of updated nodes at the end of each wave",
            )
        waves.append(Wave(share, soak_s))
    return tuple(waves)


def _reject_unknown_selector_fields(selector: decode.Fields) -> None:
    decode.reject_unknown_fields(selector, _SELECTOR_FIELDS)
    for requirement in selector.iter_objects("matchExpressions"):
        decode.reject_unknown_fields(requirement, _REQUIREMENT_FIELDS)


def _is_larger(before: PoolShare, after: PoolShare) -> bool:
    if before.percent and after.percent:
        return after.percent > before.percent
    # A count and a percentage are comparable only when the size of the pool is known.
    return not (before.count and after.count) or after.count > before.count


def _parse_share(value: object, place: str) -> PoolShare:
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return PoolShare(count=value)
    if isinstance(value, str) and (match := _PERCENTAGE.fullmatch(value)) and value != "0%":
        return PoolShare(percent=int(match[1]))
    raise errors.ConfigError(
        f"{place}: expected a count of nodes or a percentage from 1% to 100%, found {value!r:.40}"
    )


def _parse_max_failures(fields: decode.Fields) -> int:
    value = fields.get_optional_integer("maxFailures") or 0
    if not 0 <= value <= _MAX_COUNT:
        raise fields.make_error("maxFailures", "a count of nodes")
    return value


def _parse_progress_deadline(fields: decode.Fields) -> float:
    seconds = parse_duration_s(fields, "progressDeadline")
    return DEFAULT_PROGRESS_DEADLINE_S if seconds is None else seconds


def _parse_max_parallel(fields: decode.Fields) -> int | None:
    if fields.values.get("prestage") is None:
        return None
    prestage = fields.get_object("prestage")
    decode.reject_unknown_fields(prestage, {"maxParallel"})
    value = prestage.get_optional_integer("maxParallel")
    if value is not None and not 1 <= value <= _MAX_COUNT:
        raise prestage.make_error("maxParallel", "a positive count of nodes")
    return value or DEFAULT_MAX_PARALLEL


def _parse_order(fields: decode.Fields) -> NodeOrder:
    return _parse_choice(fields, "order", NodeOrder) or NodeOrder.ZONES


def _parse_health_mode(fields: decode.Fields) -> HealthMode | None:
    return _parse_choice(fields, "healthMode", HealthMode)


def _parse_choice(fields: decode.Fields, name: str, choices: type[_Choice]) -> _Choice | None:
    text = fields.get_optional_text(name)
    if text is None:
        return None
    try:
        return choices(text)
    except ValueError as error:
        raise fields.error(
            f"{fields.path_of(name)}: expected one of {', '.join(choices)}, found {text!r:.40}"
        ) from error


def parse_lock_server(fields: decode.Fields) -> LockServer:
    """Parse the lock server of a policy; raises `ConfigError`."""
    decode.reject_unknown_fields(fields, {"url", "group"})
    group = fields.get_required_text("group")
    if not _GROUP.fullmatch(group):
        raise fields.make_error("group", "letters, digits, dots and dashes")
    return LockServer(_parse_url(fields), group)


def parse_alerts(fields: decode.Fields) -> PrometheusAlerts:
    """Parse the alerts of a policy; raises `ConfigError`."""
    decode.reject_unknown_fields(fields, {"url", "names", "secret"})
    names = fields.get_text_list("names")
    is_list = 0 < len(names) <= MAX_ALERTS and len(set(names)) == len(names)
    if not is_list or not all(0 < len(name) <= _MAX_NAME_CHARS for name in names):
        raise fields.error(
            f"{fields.path_of('names')}: expected 1 to {MAX_ALERTS} different names of alerts"
        )
    url, secret = _parse_url(fields), fields.get_text("secret")
    if fields.values.get("secret") is not None and not 0 < len(secret) <= _MAX_NAME_CHARS:
        raise fields.make_error("secret", "the name of a Secret")
    if secret and not url.startswith("https://"):
        raise fields.make_error("url", "an https URL, because a token is sent there")
    return PrometheusAlerts(url, names, secret)


def _parse_url(fields: decode.Fields) -> str:
    text = fields.get_required_text("url")
    try:
        parts = urlsplit(text)
        is_usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        # The resolver rejects empty labels (http://a..b) and labels of more than 63 characters.
        (parts.hostname or "").encode("idna")
    except ValueError:
        is_usable = False
        parts = urlsplit("")
    is_plain = text.isprintable() and _URL.fullmatch(text) is not None
    if not (is_usable and is_plain) or len(text) > _MAX_URL_CHARS:
        raise fields.make_error("url", "an http or https URL without user, query and fragment")
    return text.rstrip("/")
