"""Access to configs with access tokens, whose uses are counted.

While the API server is unreachable, uses are kept in memory and recorded later.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from http import HTTPStatus
from typing import Self

from treenail import clocks, errors, sanitize
from treenail.api.machineconfigpool import MachineConfigPool
from treenail.kube import event_recorder, resources
from treenail.provisioning.tokens import bootstrap_tokens, certificates, token_store, tokens

log = logging.getLogger(__name__)

UseKey = tuple[str, str]
"""Name of the token, and address of the machine."""


class OfflineUses:
    """Uses that only this server knows. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._uses: dict[UseKey, tokens.TokenUse] = {}

    def add(self, name: str, use: tokens.TokenUse) -> None:
        """Add a use, or replace that of the same address."""
        with self._lock:
            self._uses[name, use.address] = use

    def remove(self, name: str, address: str) -> bool:
        """Forget a use that was not completed; return False if there is none."""
        with self._lock:
            use = self._uses.get((name, address))
            if use is None:
                return False
            if use.state is tokens.UseState.CLAIMED:
                del self._uses[name, address]
            return True

    def has(self, name: str, address: str) -> bool:
        """Return whether the use of this address waits for the API server."""
        return (name, address) in self._uses

    def complete_record(self, record: tokens.TokenRecord) -> tokens.TokenRecord:
        """Return the record with the uses that wait."""
        if not self._uses:
            return record
        with self._lock:
            waiting = [use for (name, _), use in self._uses.items() if name == record.name]
        for use in waiting:
            record = merge_use(record, use)
        return record

    def get_all(self) -> Mapping[UseKey, tokens.TokenUse]:
        """Return a copy."""
        with self._lock:
            return dict(self._uses)

    def discard(self, recorded: Mapping[UseKey, tokens.TokenUse]) -> None:
        """Forget uses that the API server has recorded, unless they changed meanwhile."""
        with self._lock:
            for key, use in recorded.items():
                if self._uses.get(key) is use:
                    del self._uses[key]


def merge_use(record: tokens.TokenRecord, use: tokens.TokenUse) -> tokens.TokenRecord:
    """Return the record with a use of another source, even if the token was used up."""
    if use.state is not tokens.UseState.CLAIMED:
        return tokens.confirm_use(record, use.address, use.at)
    if any(earlier.address == use.address for earlier in record.used):
        return record
    return replace(record, used=(*record.used, use))


def merge_uses(
    table: tokens.TokenTable, waiting: Mapping[UseKey, tokens.TokenUse]
) -> tuple[tokens.TokenTable, tuple[tokens.TokenRecord, ...]]:
    """Return the table with the uses, and the tokens that too many machines used.

    The uses of a token that was revoked meanwhile are dropped.
    """
    changed: dict[str, tokens.TokenRecord] = {}
    for (name, _), use in waiting.items():
        record = changed.get(name) or table.tokens.get(name)
        if record is not None:
            changed[name] = merge_use(record, use)
    excess = tuple(record for record in changed.values() if len(record.used) > record.uses)
    return replace(table, tokens={**table.tokens, **changed}), excess


CHECK_S = 5.0
"""Interval of the upkeep."""
_KEEP_EXPIRED_S = 86_400.0
"""Time for which lists show an expired token."""
_STATUS = {
    tokens.Refusal.UNKNOWN: HTTPStatus.UNAUTHORIZED,
    tokens.Refusal.EXPIRED: HTTPStatus.UNAUTHORIZED,
    tokens.Refusal.OTHER_POOL: HTTPStatus.FORBIDDEN,
    tokens.Refusal.USED_UP: HTTPStatus.FORBIDDEN,
}


class TokenMode(StrEnum):
    """Whether machines need a token."""

    OFF = "off"
    """Serve every request."""
    ASK = "ask"
    """Serve machines without a token too; a metric counts them. Refuse invalid tokens."""
    REQUIRE = "require"
    """Refuse requests without a token."""


@dataclass(frozen=True, slots=True)
class TokenSettings:
    """How the server treats tokens."""

    mode: TokenMode = TokenMode.REQUIRE
    retry_window_s: float = 600.0
    """Time for which the address that used a token may use it again."""
    grace_s: float = 600.0
    """Time without the API server for which the server accepts tokens by its own knowledge."""


class TokenAccess:
    """Allows requests with a token that permits them; a context manager that runs the upkeep.

    A use is claimed in the Secret before the config is sent, so two servers never serve one token
    to two machines. While the API server is unreachable each server decides by what it knows.
    """

    def __init__(
        self,
        store: token_store.TokenStore,
        clock: clocks.Clock,
        settings: TokenSettings,
        credentials: bootstrap_tokens.MachineCredentials,
        *,
        is_watch_current: Callable[[], bool] = lambda: False,
        open_credentials: bootstrap_tokens.MachineCredentials | None = None,
        settle_uses: Callable[[], None] = lambda: None,
        report_overuse: Callable[[tokens.TokenRecord], None] = lambda _: None,
    ) -> None:
        """``open_credentials`` are those of machines without a token.

        The upkeep calls ``settle_uses``, which may raise `TreenailError`. ``report_overuse`` gets
        a token that more machines used than it permits, when the API server is reachable again.
        """
        self._store = store
        self._clock = clock
        self._settings = settings
        self._credentials = credentials
        self._open_credentials = open_credentials or bootstrap_tokens.SharedCredentials()
        self._is_watch_current = is_watch_current
        self._settle_uses = settle_uses
        self._report_overuse = report_overuse
        self._last_problems: tuple[str, ...] = ()
        self._offline = OfflineUses()
        self._offline_lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run_upkeep, name="tokens", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopped.set()
        self._thread.join()

    def check(self, token: str, pool: str, address: str) -> tokens.AccessVerdict:
        """Decide about a request by what is in memory; read the Secret for an unknown token."""
        if not token:
            return self._check_open(pool, address)
        observed = self._store.observed
        if observed is None:
            return _refuse_request(
                HTTPStatus.SERVICE_UNAVAILABLE, "the access tokens cannot be read yet"
            )
        if observed.table is None:
            return _refuse_request(
                HTTPStatus.SERVICE_UNAVAILABLE,
                "the access tokens cannot be read: the log of the server has the error",
            )
        record = self._find_record(observed.table, token)
        if record is None and tokens.read_name(token):
            # Ignition gives up at 401; the token may have been created a moment ago.
            if not self._store.confirm_copy():
                return _refuse_request(
                    HTTPStatus.SERVICE_UNAVAILABLE,
                    "the token is unknown, and the API server does not answer",
                )
            latest = self._store.observed or observed
            record = self._find_record(latest.table or observed.table, token)
        refusal = self._find_refusal(record, pool, address)
        if record is None or refusal is not None:
            return _refuse_token(record, refusal or tokens.Refusal.UNKNOWN)
        return tokens.AccessVerdict(
            token_name=record.name,
            machine=record.machine,
            kubeconfig=self._credentials.make_placeholder(),
            pool=pool,
            address=address,
            token=token,
        )

    def claim(self, verdict: tokens.AccessVerdict) -> tokens.AccessVerdict:
        """Reserve a use in the Secret, and issue the kubeconfig."""
        if not verdict.token:
            return verdict
        is_offline = False
        try:
            self._record_offline_uses()
            claimed = self._store.change(partial(self._claim_in_table, verdict))
        except errors.UnreachableError as error:
            is_offline = True
            claimed = self._claim_offline(verdict, error)
        except errors.TreenailError as error:
            return self._refuse_for_error("cannot record the use of the token", error, verdict)
        if isinstance(claimed, tokens.AccessVerdict):
            return claimed
        try:
            kubeconfig = self._credentials.issue(
                verdict.token, claimed, verdict.address, is_offline=is_offline
            )
        except errors.TreenailError as error:
            self.release(verdict)
            return self._refuse_for_error("cannot create the kubelet's credential", error, verdict)
        return replace(verdict, kubeconfig=kubeconfig)

    def confirm_sent(self, verdict: tokens.AccessVerdict) -> None:
        """Count the use. It waits in memory when the API server does not accept it now."""
        name, address, now = verdict.token_name, verdict.address, self._clock.now()
        if not verdict.token:
            return
        if not self._offline.has(name, address):
            try:
                confirm = partial(tokens.confirm_use, address=address, now=now)
                is_known = self._store.change(partial(_change_record, name, confirm))
            except errors.TreenailError as error:
                log.warning("cannot record the use of token %s yet: %s", name, error)
            else:
                if not is_known:
                    self._revoke_credential(verdict)
                return
        self._offline.add(name, tokens.TokenUse(address, now, tokens.UseState.SENT))

    def release(self, verdict: tokens.AccessVerdict) -> None:
        """Give the use back. If that fails, the address of the request may still use it."""
        name, address = verdict.token_name, verdict.address
        if not verdict.token or self._offline.remove(name, address):
            return
        try:
            release = partial(tokens.release_use, address=address)
            is_known = self._store.change(partial(_change_record, name, release))
        except errors.TreenailError as error:
            log.warning("cannot release the use of token %s by %s: %s", name, address, error)
        else:
            if not is_known:
                self._revoke_credential(verdict)

    def run_upkeep(self) -> None:
        """Complete what waits for the API server, and settle and drop tokens; never raises."""
        if self._is_watch_current():
            self._store.note_contact()
        steps = (
            self._record_offline_uses,
            self._create_pending_credentials,
            self._settle_uses,
            self._drop_expired,
        )
        problems: list[str] = []
        for step in steps:
            try:
                step()
            except errors.TreenailError as error:
                problems.append(str(error))
                if str(error) not in self._last_problems:
                    log.warning("upkeep of access tokens failed: %s", error)
                if isinstance(error, errors.UnreachableError):
                    # The other steps would wait for the API server, too.
                    break
        self._last_problems = tuple(problems)

    def _revoke_credential(self, verdict: tokens.AccessVerdict) -> None:
        """Delete what was issued while a user revoked the access token."""
        name = verdict.token_name
        log.warning("token %s was revoked while %s used it", name, verdict.address)
        try:
            # The record is gone: it may have been a token for one machine or for several.
            for uses in (1, 2):
                self._credentials.revoke(
                    bootstrap_tokens.compute_identity(name, uses, verdict.address)
                )
        except errors.TreenailError as error:
            log.error("cannot delete the bootstrap token of revoked token %s: %s", name, error)  # noqa: TRY400  # no traceback

    def _create_pending_credentials(self) -> None:
        observed = self._store.observed
        if observed is not None and observed.table is not None:
            self._credentials.create_pending(observed.table.tokens.keys())

    def _drop_expired(self) -> None:
        observed = self._store.observed
        table = (observed and observed.table) or tokens.TokenTable()
        oldest = self._clock.now() - _KEEP_EXPIRED_S
        kept = table.prune(oldest)
        for name in table.tokens.keys() - kept.tokens.keys():
            for identity in bootstrap_tokens.list_identities(table.tokens[name]):
                self._credentials.revoke(identity)
        if kept != table:
            self._store.change(lambda current: (current.prune(oldest), None))

    def _run_upkeep(self) -> None:
        while not self._stopped.wait(CHECK_S):
            self.run_upkeep()

    def _check_open(self, pool: str, address: str) -> tokens.AccessVerdict:
        if self._settings.mode is TokenMode.REQUIRE:
            return _refuse_request(
                HTTPStatus.UNAUTHORIZED,
                "the request has no token; create one with: treenail-controller token create",
            )
        return tokens.AccessVerdict(
            kubeconfig=self._open_credentials.make_placeholder(), pool=pool, address=address
        )

    def _find_record(self, table: tokens.TokenTable, token: str) -> tokens.TokenRecord | None:
        record = table.find(token)
        return None if record is None else self._offline.complete_record(record)

    def _find_refusal(
        self, record: tokens.TokenRecord | None, pool: str, address: str
    ) -> tokens.Refusal | None:
        window_s = self._settings.retry_window_s
        return tokens.find_refusal(
            record, pool, address, self._clock.now(), retry_window_s=window_s
        )

    def _claim_in_table(
        self, verdict: tokens.AccessVerdict, table: tokens.TokenTable
    ) -> tuple[tokens.TokenTable, tokens.TokenRecord | tokens.AccessVerdict]:
        record = table.find(verdict.token)
        refusal = self._find_refusal(record, verdict.pool, verdict.address)
        if record is None or refusal is not None:
            return table, _refuse_token(record, refusal or tokens.Refusal.UNKNOWN)
        now = self._clock.now()
        claimed = tokens.claim_use(
            record, verdict.address, now, retry_window_s=self._settings.retry_window_s
        )
        return certificates.record_nodes(table.put(claimed), self._store.nodes, now), claimed

    def _claim_offline(
        self, verdict: tokens.AccessVerdict, error: errors.UnreachableError
    ) -> tokens.TokenRecord | tokens.AccessVerdict:
        """Claim by what this server knows: at most as often as the token permits."""
        observed, silence_s = self._store.observed, self._store.silence_s
        now = self._clock.now()
        with self._offline_lock:
            table = (observed and observed.table) or tokens.TokenTable()
            record = self._find_record(table, verdict.token)
            refusal = self._find_refusal(record, verdict.pool, verdict.address)
            if record is None or refusal is not None:
                return _refuse_token(record, refusal or tokens.Refusal.UNKNOWN)
            own = tokens.find_own_use(record, verdict.address, now, self._settings.retry_window_s)
            if own is None and silence_s > self._settings.grace_s:
                what = f"the API server has been unreachable for {silence_s:.0f} s"
                return self._refuse_for_error(what, error, verdict)
            if own is None:
                self._offline.add(
                    record.name, tokens.TokenUse(verdict.address, now, tokens.UseState.CLAIMED)
                )
                log.warning(
                    "accepting token %s from %s, although the API server has been unreachable for "
                    "%.0f s",
                    record.name,
                    verdict.address,
                    silence_s,
                )
            return record

    def _record_offline_uses(self) -> None:
        waiting = self._offline.get_all()
        if not waiting:
            return
        excess = self._store.change(lambda table: merge_uses(table, waiting))
        self._offline.discard(waiting)
        log.info("recorded %d uses of tokens from the time without the API server", len(waiting))
        for record in excess:
            log.error("%s", describe_overuse(record))
            self._report_overuse(record)

    def _refuse_for_error(
        self, what: str, error: errors.TreenailError, verdict: tokens.AccessVerdict
    ) -> tokens.AccessVerdict:
        # The client does not learn names of objects and addresses of the cluster.
        log.error("%s (token %s): %s", what, verdict.token_name, sanitize.escape_line(str(error)))
        return tokens.AccessVerdict(
            HTTPStatus.SERVICE_UNAVAILABLE, what, verdict.token_name, verdict.machine
        )


def _change_record(
    name: str, change: Callable[[tokens.TokenRecord], tokens.TokenRecord], table: tokens.TokenTable
) -> tuple[tokens.TokenTable, bool]:
    """Return the table, and whether it has the token."""
    record = table.tokens.get(name)
    return (table, False) if record is None else (table.put(change(record)), True)


def _refuse_token(
    record: tokens.TokenRecord | None, refusal: tokens.Refusal
) -> tokens.AccessVerdict:
    # The name in an unknown token is that of the client.
    name, machine = (record.name, record.machine) if record else ("", "")
    return tokens.AccessVerdict(_STATUS[refusal], refusal.value, name, machine)


def _refuse_request(status: HTTPStatus, reason: str) -> tokens.AccessVerdict:
    return tokens.AccessVerdict(status, reason)


OVERUSED = "TokenOverused"
"""Reason of the Event about a token that too many machines used."""
_MAX_ADDRESSES = 3


class PoolEvents:
    """Records Events of pools. Never raises. Thread-safe."""

    def __init__(
        self,
        recorder: event_recorder.EventRecorder,
        get_pools: Callable[[], Iterable[MachineConfigPool]],
    ) -> None:
        self._recorder = recorder
        self._get_pools = get_pools

    def report_overuse(self, record: tokens.TokenRecord) -> None:
        """Record that more machines used a token than it permits, unless the pool is gone."""
        for pool in self._get_pools():
            if pool.name == record.pool:
                reference = event_recorder.ObjectReference(
                    resources.MACHINECONFIGPOOLS.kind,
                    pool.name,
                    pool.metadata.uid,
                    api_version=resources.MACHINECONFIGPOOLS.api_version,
                )
                self._recorder.record_warning(reference, OVERUSED, describe_overuse(record))

    def flush_pending(self) -> None:
        """Write Events that wait for the API server."""
        self._recorder.flush_pending()


def describe_overuse(record: tokens.TokenRecord) -> str:
    """Return what happened and what to do, with a few addresses of the machines."""
    addresses = [use.address for use in record.used]
    named = ", ".join(addresses[:_MAX_ADDRESSES])
    more = f" and {len(addresses) - _MAX_ADDRESSES} more" if addresses[_MAX_ADDRESSES:] else ""
    return sanitize.escape_line(
        f"token {record.name} permits {record.uses} machines, and {len(addresses)} used it while "
        f"the API server was unreachable: {named}{more}; remove the machines that are not yours, "
        f"and rotate the secrets of pool {record.pool}"
    )
