"""Whether a controller leads, from its Lease: without one, conditions of pools may be outdated."""

from dataclasses import dataclass
from enum import StrEnum

from treenail.api.decode import Fields, Json
from treenail.clock import Clock, format_rfc3339, parse_rfc3339
from treenail.controllers.install.installation import NAME, InstallOptions
from treenail.errors import ClusterError, ConfigError, NotFoundError
from treenail.kube.client import Client
from treenail.kube.resources import LEASES

_SKEW_S = 5.0
"""The clock of this machine and that of the controllers may differ by this much."""
_CHANGE_S = 30.0
"""A leader that ends releases the Lease; another process acquires it within this time."""
_READ_INTERVAL_S = 5.0
# Without --namespace: where the manifests install the controllers.
_DEFAULT_NAMESPACE = InstallOptions().namespace


class LeaderState(StrEnum):
    """State of the leader election."""

    LEADING = "leading"
    CHANGING = "changing"
    """The last leader has just ended, and another process takes over."""
    NONE = "none"
    ABSENT = "absent"
    """There is no Lease: no controller has ever led in this namespace."""
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class LeaderReport:
    """Leader of the controllers, as a Lease shows it."""

    state: LeaderState
    namespace: str = _DEFAULT_NAMESPACE
    holder: str = ""
    renewed_at: float | None = None
    """When the last leader renewed the Lease, in seconds since the epoch."""
    reason: str = ""
    """Why the state is unknown."""

    @property
    def message(self) -> str:
        """Sentence for users; empty while a controller leads."""
        match self.state:
            case LeaderState.LEADING | LeaderState.CHANGING:
                return ""
            case LeaderState.NONE:
                since = "" if self.renewed_at is None else f" since {_format_time(self.renewed_at)}"
                return f"no controller leads{since}: pools show old reports"
            case LeaderState.ABSENT:
                return (
                    f"no controller has led in namespace {self.namespace}: it has no Lease {NAME}, "
                    "so what pools report may be outdated"
                )
            case LeaderState.UNKNOWN:
                return f"cannot tell whether a controller leads: {self.reason}"

    @property
    def remedy(self) -> str:
        """Command that helps; empty while a controller leads."""
        match self.state:
            case LeaderState.LEADING | LeaderState.CHANGING:
                return ""
            case LeaderState.NONE:
                return f"run: kubectl -n {self.namespace} get pods"
            case LeaderState.ABSENT:
                return (
                    "name the namespace of the controllers with --namespace, or install them: "
                    "treenail-controller manifests | kubectl apply -f -"
                )
            case LeaderState.UNKNOWN:
                return (
                    f"permit this user to get the Lease {NAME} in namespace {self.namespace}, or "
                    "name another namespace with --namespace"
                )

    def to_json(self) -> Json:
        """Format the report for scripts and for the page."""
        renewed = None if self.renewed_at is None else format_rfc3339(self.renewed_at)
        return {
            "state": str(self.state),
            "namespace": self.namespace,
            "holder": self.holder,
            "renewed": renewed,
            "message": self.message,
            "remedy": self.remedy,
        }


def evaluate_lease(lease: Json, *, now: float) -> LeaderReport:
    """Decide from a Lease whether its holder leads; ``now`` is in seconds since the epoch."""
    try:
        fields = Fields.from_json(lease, "Lease")
        namespace = fields.get_object("metadata").get_text("namespace") or _DEFAULT_NAMESPACE
        spec = fields.get_object("spec")
        holder, renewed = spec.get_text("holderIdentity"), spec.get_text("renewTime")
        lease_s = spec.get_optional_integer("leaseDurationSeconds") or 0
    except ConfigError as error:
        return LeaderReport(LeaderState.UNKNOWN, reason=str(error))
    renewed_at = parse_rfc3339(renewed)
    if renewed_at is None:
        reason = f"the Lease {NAME} has no valid renewTime"
        return LeaderReport(LeaderState.UNKNOWN, namespace, reason=reason)
    age_s = now - renewed_at
    if holder and age_s <= lease_s + _SKEW_S:
        state = LeaderState.LEADING
    elif age_s <= max(lease_s + _SKEW_S, _CHANGE_S):
        state = LeaderState.CHANGING
    else:
        state = LeaderState.NONE
    return LeaderReport(state, namespace, holder, renewed_at)


class LeaderReader:
    """Reads the Lease of the controllers, at most once in five seconds."""

    def __init__(self, client: Client, clock: Clock, namespace: str = "") -> None:
        self._client = client
        self._clock = clock
        self._namespace = namespace
        self._read_at = float("-inf")
        self._report = LeaderReport(LeaderState.UNKNOWN, reason="the Lease was not read yet")

    def read_leader(self) -> LeaderReport:
        """Return who leads; a failed request is a report too."""
        now = self._clock.monotonic()
        if now - self._read_at >= _READ_INTERVAL_S:
            self._read_at = now
            self._report = self._read()
        return self._report

    def _read(self) -> LeaderReport:
        namespace = self._namespace or _DEFAULT_NAMESPACE
        try:
            lease = self._client.get(LEASES, NAME, namespace=namespace)
        except NotFoundError:
            return self._search(namespace)
        except ClusterError as error:
            return LeaderReport(LeaderState.UNKNOWN, namespace, reason=str(error))
        return evaluate_lease(lease, now=self._clock.now())

    def _search(self, namespace: str) -> LeaderReport:
        """Search the other namespaces, if no namespace was chosen and the user may."""
        absent = LeaderReport(LeaderState.ABSENT, namespace)
        if self._namespace:
            return absent
        try:
            found = self._client.list(LEASES, params={"fieldSelector": f"metadata.name={NAME}"})
        except ClusterError:
            return absent
        reports = [evaluate_lease(each, now=self._clock.now()) for each in found.items]
        return next(
            (each for each in reports if each.state is LeaderState.LEADING),
            reports[0] if reports else absent,
        )


def _format_time(seconds: float) -> str:
    return format_rfc3339(seconds).replace("T", " ").replace("Z", " UTC")
