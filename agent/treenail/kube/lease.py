"""Leader election by a Lease with client-go's rules, so that both can compete for one Lease.

Writes of a process that may lose its lead are not sent, or undone if they come too late.
"""

import logging
import random
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from treenail import clocks, errors, retry
from treenail.kube import api_client, resources
from treenail.kube.request import ApiRequest, ApiResponse

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LeaderElectionConfig:
    """Lease, identity and times of a candidate; the defaults are those of client-go.

    ``identity`` must differ between processes. A Lease is valid for ``lease_duration_s``. Its
    leader stops leading when it could not renew for ``renew_deadline_s``. Each candidate tries
    every ``retry_period_s``.
    """

    namespace: str
    name: str
    identity: str
    lease_duration_s: float = 15.0
    renew_deadline_s: float = 10.0
    retry_period_s: float = 2.0
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels of a Lease that this candidate creates."""


class LeaderElector:
    """One candidate for one Lease.

    The callbacks alternate and run on the thread that calls ``try_acquire_or_renew``. The client's
    time limit should be a fraction of ``renew_deadline_s``.
    """

    def __init__(
        self,
        client: api_client.Client,
        config: LeaderElectionConfig,
        clock: clocks.Clock,
        *,
        on_started_leading: Callable[[], None],
        on_stopped_leading: Callable[[], None],
        jitter: retry.Random = random.random,
    ) -> None:
        self._client = client
        self._config = config
        self._clock = clock
        self._on_started_leading = on_started_leading
        self._on_stopped_leading = on_stopped_leading
        self._jitter = jitter
        self._is_leading = False
        self._renewed_at = 0.0
        self._observed_spec: api_client.Json = {}
        self._observed_at = 0.0
        self._read_at = float("-inf")
        self._reported = ""

    @property
    def is_leader(self) -> bool:
        """True while this process may write, also after it was suspended.

        It ends at the renew deadline: a request that begins then is over before the Lease expires.
        The clock must count the time in which the machine sleeps.
        """
        return (
            self._is_leading
            and self._clock.monotonic() < self._renewed_at + self._config.renew_deadline_s
        )

    @property
    def observed_spec(self) -> api_client.Json | None:
        """Spec of the Lease; None when the last read is older than the renew deadline."""
        is_known = self._clock.monotonic() < self._read_at + self._config.renew_deadline_s
        return self._observed_spec if is_known and self._observed_spec else None

    def run(self, stop: threading.Event) -> None:
        """Acquire and renew until ``stop``, then release the Lease."""
        while not stop.wait(self.try_acquire_or_renew()):
            pass
        self.release_lease()

    def try_acquire_or_renew(self) -> float:
        """Try once to acquire or renew the Lease; return the seconds until the next attempt."""
        started_at = self._clock.monotonic()
        try:
            holder = self._acquire_or_renew()
        except (errors.AlreadyExistsError, errors.ConflictError) as error:
            # Another candidate wrote it first.
            log.debug("lease %s: %s", self._config.name, error)
            holder = None
        except errors.ClusterError as error:
            self._report(logging.WARNING, f"cannot use lease {self._lease}: {error}")
            holder = None
        else:
            if holder != self._config.identity:
                self._report(logging.INFO, f"waiting for lease {self._lease}, held by {holder}")
        if holder == self._config.identity:
            # From before the request: the API server may have stored it at once.
            self._renewed_at = started_at
            self._reported = ""
            self._start_leading()
        elif (
            holder is not None
            or self._clock.monotonic() >= self._renewed_at + self._config.renew_deadline_s
        ):
            self._stop_leading()
        return self._config.retry_period_s * (
            1.0 if self._is_leading else 1.0 + 0.2 * self._jitter()
        )

    def release_lease(self) -> None:
        """Let another candidate acquire the Lease at once; do nothing without the lead."""
        if not self._is_leading:
            return
        try:
            retry.retry_api_write(self._clear_holder, self._clock)
        except errors.ClusterError as error:
            log.warning("lease %s not released, it will expire: %s", self._config.name, error)
        self._stop_leading()

    @property
    def _lease(self) -> str:
        return f"{self._config.namespace}/{self._config.name}"

    def _report(self, level: int, text: str) -> None:
        """Log the text, once until it changes: each attempt finds the same."""
        if text != self._reported:
            self._reported = text
            log.log(level, "%s", text)

    def _clear_holder(self) -> None:
        lease = self._read_lease()
        spec = resources.get_object(lease, "spec")
        if spec.get("holderIdentity") == self._config.identity:
            # As client-go's release: an empty holder and a duration of one second.
            self._update_lease(lease, {**spec, "holderIdentity": "", "leaseDurationSeconds": 1})

    def _acquire_or_renew(self) -> str:
        """Acquire or renew the Lease if possible; return its holder."""
        try:
            lease = self._read_lease()
        except errors.NotFoundError:
            body: api_client.Json = {
                "apiVersion": resources.LEASES.api_version,
                "kind": resources.LEASES.kind,
                "metadata": {"name": self._config.name, "namespace": self._config.namespace,
                             "labels": dict(self._config.labels)},
                "spec": self._build_spec({}),
            }  # fmt: skip
            self._client.create(resources.LEASES, body, namespace=self._config.namespace)
            return self._config.identity
        spec = resources.get_object(lease, "spec")
        self._read_at = self._clock.monotonic()
        if spec != self._observed_spec:
            self._observed_spec, self._observed_at = spec, self._clock.monotonic()
        holder = str(spec.get("holderIdentity") or "")
        if holder not in {"", self._config.identity} and not self._is_expired(spec):
            return holder
        self._update_lease(lease, self._build_spec(spec))
        return self._config.identity

    def _is_expired(self, spec: api_client.Json) -> bool:
        # Our monotonic clock since we observed the last renewal, as in client-go: the clocks of
        # two machines may differ.
        seconds = spec.get("leaseDurationSeconds")
        lease_s = seconds if isinstance(seconds, int) else self._config.lease_duration_s
        return self._clock.monotonic() >= self._observed_at + lease_s

    def _build_spec(self, before: api_client.Json) -> api_client.Json:
        now = clocks.format_micro_time(self._clock.now())
        is_renewal = before.get("holderIdentity") == self._config.identity
        changes = before.get("leaseTransitions")
        changes = changes if isinstance(changes, int) else 0
        return {
            **before,
            "holderIdentity": self._config.identity,
            "leaseDurationSeconds": int(self._config.lease_duration_s),
            "acquireTime": before.get("acquireTime") if is_renewal else now,
            # Other candidates do not read this time: they measure from when they observe the
            # change.
            "renewTime": now,
            # It counts the changes of the holder (LeaseSpec in coordination/v1).
            "leaseTransitions": changes if is_renewal or not before else changes + 1,
        }

    def _read_lease(self) -> api_client.Json:
        return self._client.get(
            resources.LEASES, self._config.name, namespace=self._config.namespace
        )

    def _update_lease(self, lease: api_client.Json, spec: api_client.Json) -> None:
        """Replace the Lease that was read; the resourceVersion rejects a concurrent write."""
        self._client.update(
            resources.LEASES,
            self._config.name,
            {**lease, "spec": spec},
            namespace=self._config.namespace,
        )

    def _start_leading(self) -> None:
        if not self._is_leading:
            self._is_leading = True
            log.info("acquired lease %s as %s", self._config.name, self._config.identity)
            self._on_started_leading()

    def _stop_leading(self) -> None:
        if self._is_leading:
            self._is_leading = False
            log.info("lost lease %s", self._config.name)
            self._on_stopped_leading()


class LeaderTransport:
    """Checks the lead directly before each write, and passes reads on.

    A process may be paused between its decision and the write, for minutes. Then another process
    leads, and the decision is outdated.
    """

    def __init__(self, transport: api_client.Transport, is_leader: Callable[[], bool]) -> None:
        self._transport = transport
        self._is_leader = is_leader

    def send(self, request: ApiRequest) -> ApiResponse:
        """Send the request; raise NotLeaderError for a write without the lead."""
        if request.method != "GET" and not self._is_leader():
            raise errors.NotLeaderError(
                f"{request.method} {request.path} was not sent: this process no longer leads"
            )
        return self._transport.send(request)

    def open_stream(self, request: ApiRequest, *, duration_s: float) -> api_client.ResponseStream:
        """Open a watch."""
        return self._transport.open_stream(request, duration_s=duration_s)

    def close(self) -> None:
        """Close the connections."""
        self._transport.close()


class LateWrites:
    """Deletes objects that this process created after its lead had ended.

    `LeaderTransport` cannot prevent that: the process may be paused while it sends, and the next
    leader may have cleaned up before the request arrives.
    """

    def __init__(self, client: api_client.Client, is_leader: Callable[[], bool]) -> None:
        """``client`` writes without the lead, too."""
        self._client = client
        self._is_leader = is_leader

    def check_created(self, resource: resources.Resource, created: api_client.Json) -> None:
        """Without the lead, delete a created object and raise NotLeaderError.

        An object that another client changed since then stays. An update with equal content
        changes no resourceVersion, so the object needs a part that differs for each process.
        """
        if self._is_leader():
            return
        meta = {key: str(value) for key, value in resources.get_object(created, "metadata").items()}
        with suppress(errors.ConflictError, errors.NotFoundError):
            self._client.delete(
                resource,
                meta["name"],
                namespace=meta.get("namespace", ""),
                uid=meta["uid"],
                resource_version=meta["resourceVersion"],
            )
        raise errors.NotLeaderError(
            f"{resource.kind} {meta['name']} was created too late and deleted: "
            "this process no longer leads"
        )
