"""Leader election by a Lease, by the rules of client-go, so that both may stand for one lease."""

import logging
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass

from treenail.clock import Clock, micro_time
from treenail.errors import ClusterError, NotFound
from treenail.kube.backoff import Random
from treenail.kube.client import Client, Json
from treenail.kube.resources import LEASES

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Candidacy:
    """Who stands for which lease, and on which terms; client-go's by default.

    ``identity`` must differ between processes. A lease holds for ``lease_s``, its leader gives
    up when it could not renew for ``renew_s``, and everybody tries every ``retry_s``.
    """

    namespace: str
    name: str
    identity: str
    lease_s: float = 15.0
    renew_s: float = 10.0
    retry_s: float = 2.0


class Election:
    """One candidate for one Lease.

    ``on_gain`` and ``on_loss`` are called in turn, on the thread that calls ``turn``. The
    client's time limit should be a fraction of the candidacy's ``renew_s``.
    """

    def __init__(
        self,
        client: Client,
        candidacy: Candidacy,
        clock: Clock,
        *,
        on_gain: Callable[[], None],
        on_loss: Callable[[], None],
        jitter: Random = random.random,
    ) -> None:
        self._client = client
        self._me = candidacy
        self._clock = clock
        self._on_gain = on_gain
        self._on_loss = on_loss
        self._jitter = jitter
        self._leads = False
        self._renewed = 0.0
        self._seen: Json = {}
        self._seen_at = 0.0

    @property
    def is_leader(self) -> bool:
        """Whether the lease is ours right now, also if this process was held up."""
        return self._leads and self._clock.monotonic() < self._renewed + self._me.lease_s

    def run(self, stop: threading.Event) -> None:
        """Stand for election until ``stop``, then give the lease back."""
        while not stop.wait(self.turn()):
            pass
        self.release()

    def turn(self) -> float:
        """Try once to take or to keep the lease; the seconds until the next try."""
        asked = self._clock.monotonic()
        try:
            holder = self._take_or_keep()
        except ClusterError as error:
            log.debug("lease %s: %s", self._me.name, error)
            holder = None
        if holder == self._me.identity:
            self._renewed = asked
            self._gain()
        elif holder is not None or self._clock.monotonic() >= self._renewed + self._me.renew_s:
            self._lose()
        return self._me.retry_s * (1.0 if self._leads else 1.0 + 0.2 * self._jitter())

    def release(self) -> None:
        """Let another take the lease at once; harmless when it is not ours."""
        if not self._leads:
            return
        try:
            lease = self._read()
            if (spec := _spec(lease)).get("holderIdentity") == self._me.identity:
                self._write(lease, {**spec, "holderIdentity": "", "leaseDurationSeconds": 1})
        except ClusterError as error:
            log.warning("lease %s not released, it runs out: %s", self._me.name, error)
        self._lose()

    def _take_or_keep(self) -> str:
        """Who holds the lease now."""
        try:
            lease = self._read()
        except NotFound:
            body: Json = {
                "apiVersion": LEASES.api_version,
                "kind": LEASES.kind,
                "metadata": {"name": self._me.name, "namespace": self._me.namespace},
                "spec": self._ours({}),
            }
            self._client.create(LEASES, body, namespace=self._me.namespace)
            return self._me.identity
        spec = _spec(lease)
        if spec != self._seen:
            self._seen, self._seen_at = spec, self._clock.monotonic()
        holder = str(spec.get("holderIdentity") or "")
        if holder not in {"", self._me.identity} and not self._ran_out(spec):
            return holder
        self._write(lease, self._ours(spec))
        return self._me.identity

    def _ran_out(self, spec: Json) -> bool:
        # By our own clock since we saw the last renewal: clocks of two machines may differ.
        seconds = spec.get("leaseDurationSeconds")
        lease_s = seconds if isinstance(seconds, int) else self._me.lease_s
        return self._clock.monotonic() >= self._seen_at + lease_s

    def _ours(self, before: Json) -> Json:
        now = micro_time(self._clock.now())
        kept = before.get("holderIdentity") == self._me.identity
        changes = before.get("leaseTransitions")
        changes = changes if isinstance(changes, int) else 0
        return {
            **before,
            "holderIdentity": self._me.identity,
            "leaseDurationSeconds": int(self._me.lease_s),
            "acquireTime": before.get("acquireTime") if kept else now,
            "renewTime": now,
            "leaseTransitions": changes if kept or not before else changes + 1,
        }

    def _read(self) -> Json:
        return self._client.get(LEASES, self._me.name, namespace=self._me.namespace)

    def _write(self, lease: Json, spec: Json) -> None:
        """Write it where it was read: the resourceVersion refuses whoever comes second."""
        self._client.update(
            LEASES,
            self._me.name,
            {**lease, "spec": spec},
            namespace=self._me.namespace,
        )

    def _gain(self) -> None:
        if not self._leads:
            self._leads = True
            log.info("lease %s is ours: %s", self._me.name, self._me.identity)
            self._on_gain()

    def _lose(self) -> None:
        if self._leads:
            self._leads = False
            log.info("lease %s is not ours any more", self._me.name)
            self._on_loss()


def _spec(lease: Json) -> Json:
    spec = lease.get("spec")
    return spec if isinstance(spec, dict) else {}
