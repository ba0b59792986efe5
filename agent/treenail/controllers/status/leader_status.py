"""State of the leading controller, read from its Lease.

Without a leader, the conditions of pools may be outdated. Under the Machine Config Operator its
controllers lead, with a Lease of their own.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from treenail import clocks, errors
from treenail.api import component_names, decode
from treenail.kube import api_client, resources

_SKEW_S = 5.0
"""The clock of this machine and that of the controllers may differ by this much."""
_MAX_AHEAD_S = 60.0
"""A renewal further in the future than this says nothing about the present."""
_CHANGE_S = 30.0
"""A leader that ends releases the Lease; another process acquires it within this time."""
_RENEWAL_S = 60.0
"""A holder that renewed the Lease while this process watched leads for as long."""
_READ_INTERVAL_S = 5.0
_SERVER_REMEDY = "check the API server: kubectl get --raw /readyz"
_WAIT_REMEDY = "the next leader repairs it; run: kubectl get leases -A"
_MCO_LEASE = "machine-config-controller"


class LeaderState(StrEnum):
    """State of the leader election."""

    LEADING = "leading"
    CHANGING = "changing"
    """The last leader has just ended, and another process takes over."""
    NONE = "none"
    ABSENT = "absent"
    """There is no Lease: no controller was installed here, or all run without an election."""
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class LeaderReport:
    """Leader of the controllers, as a Lease shows it."""

    state: LeaderState
    namespace: str = component_names.NAMESPACE
    holder: str = ""
    renewed_at: float | None = None
    """When the last leader renewed the Lease, in seconds since the epoch."""
    reason: str = ""
    """Why the state is unknown."""
    reason_remedy: str = ""
    """What helps against the reason, unless it is a permission."""

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
                    f"cannot tell whether a controller leads: namespace {self.namespace} has no "
                    f"Lease {component_names.CONTROLLER} (controllers with --no-leader-election "
                    "have none)"
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
                return self.reason_remedy or (
                    f"permit this user to get the Lease {component_names.CONTROLLER} in namespace "
                    f"{self.namespace}, or name another namespace with --namespace"
                )

    def to_json(self) -> decode.Json:
        """Format the report for scripts and for the page."""
        renewed = None if self.renewed_at is None else clocks.format_rfc3339(self.renewed_at)
        return {
            "state": str(self.state),
            "namespace": self.namespace,
            "holder": self.holder,
            "renewed": renewed,
            "message": self.message,
            "remedy": self.remedy,
        }


def evaluate_lease(lease: decode.Json, *, now: float) -> LeaderReport:
    """Decide from a Lease whether its holder leads; ``now`` is in seconds since the epoch."""
    try:
        fields = decode.Fields.from_json(lease, "Lease")
        namespace = fields.get_object("metadata").get_text("namespace") or component_names.NAMESPACE
        spec = fields.get_object("spec")
        holder, renewed = spec.get_text("holderIdentity"), spec.get_text("renewTime")
        lease_s = spec.get_optional_integer("leaseDurationSeconds") or 0
    except errors.ConfigError as error:
        return LeaderReport(LeaderState.UNKNOWN, reason=str(error), reason_remedy=_WAIT_REMEDY)
    renewed_at = clocks.parse_rfc3339(renewed)
    if renewed_at is None:
        reason = "its Lease has no valid renewTime"
        return LeaderReport(
            LeaderState.UNKNOWN, namespace, reason=reason, reason_remedy=_WAIT_REMEDY
        )
    age_s = now - renewed_at
    if age_s < -_MAX_AHEAD_S:
        # A leader that is gone would seem to lead until this clock reaches that time.
        reason = f"by the clock of this machine its Lease was renewed {-age_s:.0f} s in the future"
        return LeaderReport(
            LeaderState.UNKNOWN,
            namespace,
            holder,
            renewed_at,
            reason=reason,
            reason_remedy="correct the clock of this machine, or those of the controllers",
        )
    # A leader that stops empties holderIdentity (client-go, leaderelection.go, release).
    if holder and age_s <= lease_s + _SKEW_S:
        state = LeaderState.LEADING
    elif age_s <= max(lease_s + _SKEW_S, _CHANGE_S):
        state = LeaderState.CHANGING
    else:
        state = LeaderState.NONE
    return LeaderReport(state, namespace, holder, renewed_at)


_LED = (LeaderState.LEADING, LeaderState.CHANGING)


class LeaderReader:
    """Reads the Lease of the controllers, at most once in five seconds.

    A holder that renews the Lease between two reads leads, whatever the clocks say.
    """

    def __init__(self, client: api_client.Client, clock: clocks.Clock, namespace: str = "") -> None:
        self._client = client
        self._clock = clock
        self._namespace = namespace
        self._read_at = float("-inf")
        self._report = LeaderReport(LeaderState.UNKNOWN, reason="the Lease was not read yet")
        self._renewed_at: dict[str, float | None] = {}
        """The last renewal by namespace."""
        self._seen_at: dict[str, float] = {}
        """When a read found a new renewal, on the monotonic clock."""

    def read_leader(self) -> LeaderReport:
        """Return who leads; a failed request is a report too."""
        now = self._clock.monotonic()
        if now - self._read_at >= _READ_INTERVAL_S:
            self._read_at = now
            self._report = self._read()
        return self._report

    def _read(self) -> LeaderReport:
        namespace = self._namespace or component_names.NAMESPACE
        own = self._read_lease(namespace, component_names.CONTROLLER)
        others: list[LeaderReport] = []
        if own.state not in _LED and namespace in (
            component_names.NAMESPACE,
            component_names.MCO_NAMESPACE,
        ):
            others.append(self._read_lease(component_names.MCO_NAMESPACE, _MCO_LEASE))
        if own.state is LeaderState.ABSENT and not self._namespace:
            others += self._search_leases()
        return _choose_report(own, others)

    def _read_lease(self, namespace: str, name: str) -> LeaderReport:
        try:
            return self._evaluate_lease(
                self._client.get(resources.LEASES, name, namespace=namespace)
            )
        except errors.NotFoundError:
            return LeaderReport(LeaderState.ABSENT, namespace)
        except errors.ClusterError as error:
            remedy = (
                "" if isinstance(error, errors.ForbiddenError) else error.remedy or _SERVER_REMEDY
            )
            return LeaderReport(
                LeaderState.UNKNOWN, namespace, reason=str(error), reason_remedy=remedy
            )

    def _search_leases(self) -> list[LeaderReport]:
        """Search the other namespaces, if the user may."""
        try:
            leases = self._client.list(
                resources.LEASES,
                params={"fieldSelector": f"metadata.name={component_names.CONTROLLER}"},
            )
        except errors.ClusterError:
            return []
        return [self._evaluate_lease(lease) for lease in leases.items]

    def _evaluate_lease(self, lease: decode.Json) -> LeaderReport:
        report = evaluate_lease(lease, now=self._clock.now())
        if not report.holder or report.renewed_at is None:
            return report
        known, now = report.namespace, self._clock.monotonic()
        if self._renewed_at.setdefault(known, report.renewed_at) != report.renewed_at:
            self._renewed_at[known] = report.renewed_at
            self._seen_at[known] = now
        if now - self._seen_at.get(known, float("-inf")) <= _RENEWAL_S:
            return replace(report, state=LeaderState.LEADING, reason="", reason_remedy="")
        return report


def _choose_report(own: LeaderReport, others: Iterable[LeaderReport]) -> LeaderReport:
    """Return a report of a leader if there is one, else the first that found a Lease."""
    reports = [own, *(report for report in others if report.state is not LeaderState.UNKNOWN)]
    for states in (_LED, (LeaderState.NONE, LeaderState.UNKNOWN)):
        for report in reports:
            if report.state in states:
                return report
    return own


def _format_time(seconds: float) -> str:
    return clocks.format_rfc3339(seconds).replace("T", " ").replace("Z", " UTC")
