"""External gates of a rollout policy: FleetLock servers and Prometheus alerts.

A gate that does not respond, or whose response is invalid, blocks the rollout and is reported in
the pool's conditions. It never counts as open. `BackgroundGates` asks gates on threads of its own,
so that a gate that hangs delays no reconciliation.
"""

import json
import logging
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Annotated, Protocol
from urllib.parse import urlencode

from treenail import clocks, errors
from treenail.api import decode
from treenail.controllers.pools import os_image, rollout_policy
from treenail.controllers.runtime.web import WebClient, WebFailure, WebRequest
from treenail.encoding import codec, json_text

log = logging.getLogger(__name__)

GATE_UNAVAILABLE = "GateUnavailable"
GATE_MISCONFIGURED = "GateMisconfigured"
SECRET_TYPE = "treenail.io/gate"  # noqa: S105  # a type, no secret
"""Type of a Secret that a policy may name. Without it a policy could send any Secret anywhere."""
_MESSAGE_LIMIT = 200
LoadSecret = Callable[[str], decode.Json]
"""Reads a Secret of the controller's namespace by name. Raises `ClusterError`."""
MAX_PARALLEL_REQUESTS = 8
OPEN_FOR_S = 5.0
"""How long an open gate may let a node pass; later it is asked again."""
CLOSED_FOR_S = 30.0
"""How long a closed gate is not asked again."""
GATE_RETRY_S = 30.0
"""Delay until a gate that is not open is asked again."""
PENDING_RETRY_S = 0.25
"""Delay until the answer of a gate is looked for."""
_FORGET_AFTER_S = 600.0


@dataclass(frozen=True, slots=True)
class LockHolder:
    """A node that holds or requests a lock."""

    name: Annotated[str, codec.Key("node")]
    uid: str
    """The id of the lock: unlike the name it differs between clusters and after a new install."""


@dataclass(frozen=True, slots=True)
class GateCredentials:
    """Credentials for a gate, from a Secret."""

    token: str = ""
    certificate_authority: str = ""
    """PEM; empty for those of the system."""

    def __repr__(self) -> str:
        # A token must not reach a log.
        return "GateCredentials()"

    @classmethod
    def from_json(cls, secret: decode.Json) -> "GateCredentials":
        """Parse a Secret; raises `ConfigError` for another type and for data that is no text."""
        fields = decode.Fields.from_json(secret, "Secret")
        if fields.get_text("type") != SECRET_TYPE:
            raise errors.ConfigError(
                f"it is of type {fields.get_text('type')!r:.60}, expected {SECRET_TYPE}"
            )
        data = fields.get_object("data")
        return cls(_decode_text(data, "token").strip(), _decode_text(data, "ca.crt"))


class GateClient:
    """Client of Prometheus and FleetLock servers. None means that the gate is open."""

    def __init__(self, web: WebClient, load_secret: LoadSecret | None = None) -> None:
        self._web = web
        self._load_secret = load_secret

    def check_alerts(self, alerts: rollout_policy.PrometheusAlerts | None) -> os_image.GateAnswer:
        """Check that none of the policy's alerts is firing."""
        return None if alerts is None else self._check_prometheus(alerts)

    def acquire_lock(
        self, server: rollout_policy.LockServer, holder: LockHolder
    ) -> os_image.GateAnswer:
        """Acquire the lock that lets the node leave service. Idempotent."""
        return self._call_fleet_lock(server, holder, "pre-reboot")

    def release_lock(
        self, server: rollout_policy.LockServer, holder: LockHolder
    ) -> os_image.GateAnswer:
        """Release the lock of a node that is back in service. Idempotent."""
        return self._call_fleet_lock(server, holder, "steady-state")

    def _call_fleet_lock(
        self, server: rollout_policy.LockServer, holder: LockHolder, endpoint: str
    ) -> os_image.GateAnswer:
        body = {"client_params": {"id": holder.uid, "group": server.group}}
        # Required by Zincati's FleetLock protocol.
        headers = (("fleet-lock-protocol", "true"),)
        response = self._web.send_request(
            WebRequest(f"{server.url}/v1/{endpoint}", json.dumps(body).encode(), headers)
        )
        name = f"lock server {server.url} (group {server.group})"
        if isinstance(response, WebFailure):
            return os_image.GateBlocked(f"cannot reach {name}: {response.reason}", GATE_UNAVAILABLE)
        if response.status == 200:
            return None
        kind, value = _parse_refusal(response.body)
        if kind is None:
            return os_image.GateBlocked(
                f"{name} responded with HTTP {response.status} and no FleetLock error",
                GATE_MISCONFIGURED,
            )
        return os_image.GateWaiting(
            f"waiting: {name} refuses a lock for node {holder.name}: {value or kind}"
        )

    def _check_prometheus(self, alerts: rollout_policy.PrometheusAlerts) -> os_image.GateAnswer:
        name = f"Prometheus {alerts.url}"
        credentials = self._load_credentials(alerts.secret)
        if isinstance(credentials, os_image.GateBlocked):
            return credentials
        # A server that does not know rule_name[] ignores it, and returns all alerts.
        query = urlencode([("type", "alert"), *(("rule_name[]", name) for name in alerts.names)])
        headers = (("Authorization", f"Bearer {credentials.token}"),) if credentials.token else ()
        response = self._web.send_request(
            WebRequest(
                f"{alerts.url}/api/v1/rules?{query}",
                headers=headers,
                certificate_authority=credentials.certificate_authority,
            )
        )
        if isinstance(response, WebFailure):
            return os_image.GateBlocked(f"cannot reach {name}: {response.reason}", GATE_UNAVAILABLE)
        if response.status in (401, 403):
            hint = f"Secret {alerts.secret}" if alerts.secret else "the policy names no secret"
            return os_image.GateBlocked(
                f"{name} refuses access with HTTP {response.status} (alerts.secret: {hint})",
                GATE_MISCONFIGURED,
            )
        if response.status != 200:
            return os_image.GateBlocked(
                f"{name} responded with HTTP {response.status}", GATE_UNAVAILABLE
            )
        try:
            states = _parse_alert_states(response.body)
        except errors.ConfigError as error:
            return os_image.GateBlocked(
                f"invalid response from {name}: {error}", GATE_MISCONFIGURED
            )
        for alert in alerts.names:
            # A renamed alert would never fire, so a missing one must not count as quiet.
            if alert not in states:
                return os_image.GateBlocked(
                    f"{name} has no alert named {alert}", GATE_MISCONFIGURED
                )
        firing = [alert for alert in alerts.names if "firing" in states[alert]]
        if firing:
            return os_image.GateWaiting(f"waiting: alert {firing[0]} is firing")
        quiet = {"inactive", "pending"}
        unknown = [alert for alert in alerts.names if not states[alert] <= quiet]
        if unknown:
            return os_image.GateBlocked(
                f"{name} cannot evaluate alert {unknown[0]}", GATE_MISCONFIGURED
            )
        return None

    def _load_credentials(self, secret: str) -> GateCredentials | os_image.GateBlocked:
        if not secret or self._load_secret is None:
            return GateCredentials()
        where = f"Secret {secret} in the namespace of the controller"
        try:
            return GateCredentials.from_json(self._load_secret(secret))
        except errors.NotFoundError:
            return os_image.GateBlocked(
                f"{where} does not exist; create it with the type {SECRET_TYPE} and the keys "
                "token and ca.crt, or correct alerts.secret",
                GATE_MISCONFIGURED,
            )
        except errors.ConfigError as error:
            return os_image.GateBlocked(f"cannot use {where}: {error}", GATE_MISCONFIGURED)
        except errors.ClusterError as error:
            return os_image.GateBlocked(f"cannot read {where}: {error}", GATE_UNAVAILABLE)


def _decode_text(data: decode.Fields, name: str) -> str:
    """Decode a value of a Secret; empty when absent. Errors quote no part of it."""
    try:
        text = json_text.decode_base64(data.get_text(name)).decode()
    except ValueError as error:
        raise errors.ConfigError(f"key {name} is not base64 of a text") from error
    if not text.replace("\n", "").replace("\r", "").isprintable():
        raise errors.ConfigError(f"key {name} contains control characters")
    return text


def _parse_refusal(body: bytes) -> tuple[str | None, str]:
    """Parse kind and value of a FleetLock error; kind is None when the body is no such error."""
    try:
        fields = decode.Fields.from_json(
            decode.load_json(body, where="the response"), "the response"
        )
        kind, value = fields.get_required_text("kind"), fields.get_text("value")
    except errors.ConfigError:
        return None, ""
    return kind[:_MESSAGE_LIMIT], value[:_MESSAGE_LIMIT]


def _parse_alert_states(body: bytes) -> dict[str, set[str]]:
    """Parse the states of alerts by name; several rules may share one. Raises `ConfigError`."""
    data = decode.Fields.from_json(
        decode.load_json(body, where="the response"), "the response"
    ).get_object("data")
    states: dict[str, set[str]] = {}
    for group in data.iter_objects("groups"):
        for rule in group.iter_objects("rules"):
            # "unknown" before the first evaluation, "err" after one that failed (RuleHealth in
            # Prometheus).
            is_healthy = rule.get_text("health") in ("ok", "unknown", "")
            state = rule.get_text("state") if is_healthy else "err"
            states.setdefault(rule.get_text("name"), set()).add(state)
    return states


class Gates(Protocol):
    """External gates; None means that the gate is open."""

    def check_alerts(
        self, alerts: rollout_policy.PrometheusAlerts | None
    ) -> os_image.GateAnswer: ...
    def acquire_lock(
        self, server: rollout_policy.LockServer, holder: LockHolder
    ) -> os_image.GateAnswer: ...
    def release_lock(
        self, server: rollout_policy.LockServer, holder: LockHolder
    ) -> os_image.GateAnswer: ...


def find_retry_s(answer: os_image.GateAnswer) -> float | None:
    """Return the delay until the gate is asked again; None when it is open."""
    if answer is None:
        return None
    return PENDING_RETRY_S if isinstance(answer, os_image.GatePending) else GATE_RETRY_S


@dataclass(slots=True)
class _GateQuestion:
    """One request to a gate, and its last answer."""

    answer: os_image.GateAnswer = None
    answered_at: float | None = None
    is_running: bool = False
    is_used: bool = False
    """An open lock lets one node pass once; it must be asked again for the next time."""


class BackgroundGates:
    """Answers at once: with a recent answer, or `GatePending` until there is one. Thread-safe."""

    def __init__(self, gates: Gates, clock: clocks.Clock, executor: Executor) -> None:
        self._gates = gates
        self._clock = clock
        self._executor = executor
        self._lock = threading.Lock()
        self._questions: dict[Hashable, _GateQuestion] = {}

    def check_alerts(self, alerts: rollout_policy.PrometheusAlerts | None) -> os_image.GateAnswer:
        """Return the recent state of the alerts."""
        if alerts is None:
            return None
        return self._ask_gate(("alerts", alerts), lambda: self._gates.check_alerts(alerts))

    def acquire_lock(
        self, server: rollout_policy.LockServer, holder: LockHolder
    ) -> os_image.GateAnswer:
        """Return the answer of the lock server, once."""
        if self._is_opposite_running(("release", server, holder)):
            return os_image.GatePending()
        return self._ask_gate(
            ("acquire", server, holder),
            lambda: self._gates.acquire_lock(server, holder),
            once=True,
        )

    def release_lock(
        self, server: rollout_policy.LockServer, holder: LockHolder
    ) -> os_image.GateAnswer:
        """Return the answer of the lock server, once."""
        # A lock that was granted before its release must not count as granted after it.
        if self._is_opposite_running(("acquire", server, holder)):
            return os_image.GatePending()
        return self._ask_gate(
            ("release", server, holder),
            lambda: self._gates.release_lock(server, holder),
            once=True,
        )

    def _is_opposite_running(self, key: Hashable) -> bool:
        """Return True while the opposite request runs: the server must see them in order."""
        with self._lock:
            question = self._questions.get(key)
            if question is not None and question.is_running:
                return True
            self._questions.pop(key, None)
            return False

    def _ask_gate(
        self, key: Hashable, send: Callable[[], os_image.GateAnswer], *, once: bool = False
    ) -> os_image.GateAnswer:
        now = self._clock.monotonic()
        with self._lock:
            self._prune_questions(now)
            question = self._questions.setdefault(key, _GateQuestion())
            is_current = self._is_current(question, now)
            if not is_current and not question.is_running:
                question.is_running = True
                self._executor.submit(self._send_question, question, send)
            if question.answered_at is None or (question.answer is None and not is_current):
                return os_image.GatePending()
            if question.answer is None and once:
                question.is_used = True
            # A closed gate stays closed until it answers again.
            return question.answer

    def _is_current(self, question: _GateQuestion, now: float) -> bool:
        if question.answered_at is None or question.is_used:
            return False
        limit_s = OPEN_FOR_S if question.answer is None else CLOSED_FOR_S
        return now - question.answered_at < limit_s

    def _send_question(
        self, question: _GateQuestion, send: Callable[[], os_image.GateAnswer]
    ) -> None:
        try:
            answer = send()
        except Exception as error:
            # A bug with one gate must not end its thread without an answer.
            log.exception("cannot ask a gate")
            answer = os_image.GateBlocked(f"cannot ask the gate: {error}", GATE_UNAVAILABLE)
        with self._lock:
            question.answer = answer
            question.answered_at = self._clock.monotonic()
            question.is_running = question.is_used = False

    def _prune_questions(self, now: float) -> None:
        old = [
            key
            for key, question in self._questions.items()
            if question.answered_at is not None
            and not question.is_running
            and now - question.answered_at > _FORGET_AFTER_S
        ]
        for key in old:
            del self._questions[key]
