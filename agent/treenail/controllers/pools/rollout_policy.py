"""RolloutPolicy: limits of a rollout beyond ``maxUnavailable``, in an object that pools name.

::

    apiVersion: treenail.io/v1alpha1
    kind: RolloutPolicy
    metadata: {name: careful}
    spec:
      canary: {nodes: 1, soak: 30m}
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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Annotated, cast
from urllib.parse import urlsplit

from treenail import errors, label_selector
from treenail.api import decode, machineconfigpool, object_meta
from treenail.controllers.pools import maintenance_windows
from treenail.encoding import codec, json_values

API_VERSION = "treenail.io/v1alpha1"
KIND = "RolloutPolicy"

_MAX_COUNT = 2**31 - 1
"""The schema has the format int32."""

DEFAULT_MAX_PARALLEL = 10
"""Nodes that pull at the same time: a compromise between speed and load on the registry."""

DEFAULT_PROGRESS_DEADLINE_S = 3600.0

# The schema of the CRD has the same limits.
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

    def __str__(self) -> str:
        return f"{self.percent}%" if self.percent else str(self.count)

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
class LockServer(codec.JsonObject):
    """A FleetLock server, which grants a lock for each node."""

    url: str
    group: str

    @property
    def text(self) -> str:
        """Format for the annotation of a node."""
        return f"{self.group} {self.url}"


@dataclass(frozen=True, slots=True)
class PrometheusAlerts(codec.JsonObject):
    """Prometheus alerts that pause a rollout while one of them fires."""

    url: codec.NonEmptyText
    names: tuple[str, ...]
    secret: Annotated[
        str, codec.require("the name of a Secret", lambda name: 0 < len(name) <= _MAX_NAME_CHARS)
    ] = ""
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
        meta = fields.get_object("metadata").read(object_meta.ObjectMeta)
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
        # An ignored typo would disable a limit that the user relies on.
        read = codec.read_value(_PolicyDocument, document, "", is_strict=True)
        return cast("_PolicyDocument", read).spec
    except errors.ConfigError as error:
        raise errors.ConfigError(f"RolloutPolicy {name}: {error}", remedy=error.remedy) from error


# The JSON of the spec.


def _read_share(value: object) -> PoolShare:
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return PoolShare(count=value)
    if isinstance(value, str) and (match := _PERCENTAGE.fullmatch(value)) and value != "0%":
        return PoolShare(percent=int(match[1]))
    expected = "a count of nodes or a percentage from 1% to 100%"
    actual = "null" if value is None else repr(value)[:40]
    raise json_values.Mismatch(problem=f"expected {expected}, found {actual}")


def _limit_entries(limit: int) -> codec.Via:
    def read(entries: Sequence[object]) -> Sequence[object]:
        if len(entries) > limit:
            raise json_values.Mismatch(
                problem=f"expected at most {limit} entries, found {len(entries)}"
            )
        return entries

    return codec.Via(read)


def _check_lock_server(server: LockServer) -> LockServer:
    if not _GROUP.fullmatch(server.group):
        raise json_values.Mismatch("letters, digits, dots and dashes", server.group, at=["group"])
    return replace(server, url=_normalize_url(server.url))


def _check_alerts(alerts: PrometheusAlerts) -> PrometheusAlerts:
    names, url = alerts.names, _normalize_url(alerts.url)
    is_list = 0 < len(names) <= MAX_ALERTS and len(set(names)) == len(names)
    if not is_list or not all(0 < len(name) <= _MAX_NAME_CHARS for name in names):
        problem = f"expected 1 to {MAX_ALERTS} different names of alerts"
        raise json_values.Mismatch(problem=problem, at=["names"])
    if alerts.secret and not url.startswith("https://"):
        raise json_values.Mismatch("an https URL, because a token is sent there", url, at=["url"])
    return replace(alerts, url=url)


def _normalize_url(text: str) -> str:
    try:
        parts = urlsplit(text)
        is_usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        # The resolver rejects empty labels (http://a..b) and labels of more than 63 characters.
        (parts.hostname or "").encode("idna")
    except ValueError:
        is_usable = False
    is_plain = text.isprintable() and _URL.fullmatch(text) is not None
    if not (is_usable and is_plain) or len(text) > _MAX_URL_CHARS:
        expected = "an http or https URL without user, query and fragment"
        raise json_values.Mismatch(expected, text, at=["url"])
    return text.rstrip("/")


def _check_resume(resume: Mapping[str, str]) -> Mapping[str, str]:
    if len(resume) > _MAX_RESUMES or any(len(text) > _MAX_RESUME_CHARS for text in resume.values()):
        raise json_values.Mismatch(
            problem=f"expected at most {_MAX_RESUMES} pools, each with a text of at most "
            f"{_MAX_RESUME_CHARS} characters"
        )
    return resume


_Duration = maintenance_windows.Duration
_ShareField = Annotated[PoolShare, codec.Via(_read_share, wire=object)]


class _CanaryFields(codec.Shape):
    nodes: _ShareField = PoolShare(1)
    soak: _Duration | None = None
    node_selector: label_selector.SelectorField | None = None


class _PrestageFields(codec.Shape):
    max_parallel: Annotated[
        int, codec.require("a positive count of nodes", lambda count: 1 <= count <= _MAX_COUNT)
    ] = DEFAULT_MAX_PARALLEL


class _PolicyFields(codec.Shape):
    canary: _CanaryFields | None = None
    waves: Annotated[tuple[_ShareField, ...], _limit_entries(_MAX_WAVES)] = ()
    soak: _Duration = 0.0
    max_failures: Annotated[
        int, codec.require("a count of nodes", lambda count: 0 <= count <= _MAX_COUNT)
    ] = 0
    reboot_timeout: _Duration | None = None
    progress_deadline: _Duration = DEFAULT_PROGRESS_DEADLINE_S
    order: NodeOrder = NodeOrder.ZONES
    prestage: _PrestageFields | None = None
    windows: Annotated[
        tuple[maintenance_windows.MaintenanceWindow, ...], _limit_entries(_MAX_WINDOWS)
    ] = ()
    fleet_lock: Annotated[LockServer | None, codec.Via(_check_lock_server)] = None
    alerts: Annotated[PrometheusAlerts | None, codec.Via(_check_alerts)] = None
    health_mode: HealthMode | None = None
    resume: Annotated[Mapping[str, str], codec.Via(_check_resume)]


def _build_policy(fields: _PolicyFields) -> RolloutPolicy:
    return RolloutPolicy(
        waves=tuple(_list_waves(fields)),
        max_failures=fields.max_failures,
        reboot_timeout_s=fields.reboot_timeout,
        progress_deadline_s=fields.progress_deadline,
        order=fields.order,
        prestage_max_parallel=fields.prestage.max_parallel if fields.prestage else None,
        windows=fields.windows,
        lock_server=fields.fleet_lock,
        alerts=fields.alerts,
        health_mode=fields.health_mode,
        resume=fields.resume,
    )


def _list_waves(fields: _PolicyFields) -> Iterator[Wave]:
    before: PoolShare | None = None
    if (canary := fields.canary) is not None:
        soak_s = fields.soak if canary.soak is None else canary.soak
        yield Wave(before := canary.nodes, soak_s, canary.node_selector)
    for index, share in enumerate(fields.waves):
        if before is not None and not _is_larger(before, share):
            raise json_values.Mismatch(
                problem="expected more than in the previous wave, "
                f"found {share.count or str(share)!r}",
                remedy="write the total share of updated nodes at the end of each wave",
                at=["waves", index],
            )
        yield Wave(before := share, fields.soak)


def _is_larger(before: PoolShare, after: PoolShare) -> bool:
    if before.percent and after.percent:
        return after.percent > before.percent
    # A count and a percentage are comparable only when the size of the pool is known.
    return not (before.count and after.count) or after.count > before.count


_SpecField = Annotated[RolloutPolicy, codec.Via(_build_policy, wire=_PolicyFields)]


class _PolicyDocument(codec.Shape, kind=KIND, api_version=API_VERSION):
    metadata: codec.Json
    spec: _SpecField = RolloutPolicy(max_failures=0)
    status: codec.Json
