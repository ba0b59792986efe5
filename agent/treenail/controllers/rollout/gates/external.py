"""External gates of a rollout policy: FleetLock servers and Prometheus alerts.

A gate that does not respond, or whose response is invalid, blocks the rollout and is reported in
the pool's conditions. It never counts as open.
"""

import base64
import binascii
import json
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlencode

from treenail.api.decode import Fields, Json, load_json
from treenail.controllers.pools.os_image import GateAnswer, GateBlocked, GateWaiting
from treenail.controllers.pools.policy import LockServer, PrometheusAlerts
from treenail.controllers.runtime.web import WebClient, WebFailure, WebRequest
from treenail.errors import ClusterError, ConfigError, NotFoundError

GATE_UNAVAILABLE = "GateUnavailable"
GATE_MISCONFIGURED = "GateMisconfigured"
SECRET_TYPE = "treenail.io/gate"  # noqa: S105  # a type, no secret
"""Type of a Secret that a policy may name. Without it a policy could send any Secret anywhere."""

_MESSAGE_LIMIT = 200


@dataclass(frozen=True, slots=True)
class LockHolder:
    """A node that holds or requests a lock."""

    name: str
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
    def from_json(cls, secret: Json) -> "GateCredentials":
        """Parse a Secret; raises `ConfigError` for another type and for data that is no text."""
        fields = Fields.from_json(secret, "Secret")
        if fields.get_text("type") != SECRET_TYPE:
            raise ConfigError(
                f"it is of type {fields.get_text('type')!r:.60}, expected {SECRET_TYPE}"
            )
        data = fields.get_object("data")
        return cls(_decode_text(data, "token").strip(), _decode_text(data, "ca.crt"))


LoadSecret = Callable[[str], Json]
"""Reads a Secret of the controller's namespace by name. Raises `ClusterError`."""


class GateClient:
    """Client of Prometheus and FleetLock servers. None means that the gate is open."""

    def __init__(self, web: WebClient, load_secret: LoadSecret | None = None) -> None:
        self._web = web
        self._load_secret = load_secret

    def check_alerts(self, alerts: PrometheusAlerts | None) -> GateAnswer:
        """Check that none of the policy's alerts is firing."""
        return None if alerts is None else self._check_prometheus(alerts)

    def acquire_lock(self, server: LockServer, holder: LockHolder) -> GateAnswer:
        """Acquire the lock that lets the node leave service. Idempotent."""
        return self._call_fleet_lock(server, holder, "pre-reboot")

    def release_lock(self, server: LockServer, holder: LockHolder) -> GateAnswer:
        """Release the lock of a node that is back in service. Idempotent."""
        return self._call_fleet_lock(server, holder, "steady-state")

    def _call_fleet_lock(self, server: LockServer, holder: LockHolder, endpoint: str) -> GateAnswer:
        body = {"client_params": {"id": holder.uid, "group": server.group}}
        headers = (("fleet-lock-protocol", "true"),)
        response = self._web.send_request(
            WebRequest(f"{server.url}/v1/{endpoint}", json.dumps(body).encode(), headers)
        )
        name = f"lock server {server.url} (group {server.group})"
        if isinstance(response, WebFailure):
            return GateBlocked(f"cannot reach {name}: {response.reason}", GATE_UNAVAILABLE)
        if response.status == 200:
            return None
        kind, value = _parse_refusal(response.body)
        if kind is None:
            return GateBlocked(
                f"{name} responded with HTTP {response.status} and no FleetLock error",
                GATE_MISCONFIGURED,
            )
        return GateWaiting(
            f"waiting: {name} refuses a lock for node {holder.name}: {value or kind}"
        )

    def _check_prometheus(self, alerts: PrometheusAlerts) -> GateAnswer:
        name = f"Prometheus {alerts.url}"
        credentials = self._load_credentials(alerts.secret)
        if isinstance(credentials, GateBlocked):
            return credentials
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
            return GateBlocked(f"cannot reach {name}: {response.reason}", GATE_UNAVAILABLE)
        if response.status in (401, 403):
            hint = f"Secret {alerts.secret}" if alerts.secret else "the policy names no secret"
            return GateBlocked(
                f"{name} refuses access with HTTP {response.status} (alerts.secret: {hint})",
                GATE_MISCONFIGURED,
            )
        if response.status != 200:
            return GateBlocked(f"{name} responded with HTTP {response.status}", GATE_UNAVAILABLE)
        try:
            states = _parse_alert_states(response.body)
        except ConfigError as error:
            return GateBlocked(f"invalid response from {name}: {error}", GATE_MISCONFIGURED)
        for alert in alerts.names:
            # A renamed alert would never fire, so a missing one must not count as quiet.
            if alert not in states:
                return GateBlocked(f"{name} has no alert named {alert}", GATE_MISCONFIGURED)
        firing = [alert for alert in alerts.names if "firing" in states[alert]]
        if firing:
            return GateWaiting(f"waiting: alert {firing[0]} is firing")
        quiet = {"inactive", "pending"}
        unknown = [alert for alert in alerts.names if not states[alert] <= quiet]
        if unknown:
            return GateBlocked(f"{name} cannot evaluate alert {unknown[0]}", GATE_MISCONFIGURED)
        return None

    def _load_credentials(self, secret: str) -> GateCredentials | GateBlocked:
        if not secret or self._load_secret is None:
            return GateCredentials()
        where = f"Secret {secret} in the namespace of the controller"
        try:
            return GateCredentials.from_json(self._load_secret(secret))
        except NotFoundError:
            return GateBlocked(
                f"{where} does not exist; create it with the type {SECRET_TYPE} and the keys "
                "token and ca.crt, or correct alerts.secret",
                GATE_MISCONFIGURED,
            )
        except ConfigError as error:
            return GateBlocked(f"cannot use {where}: {error}", GATE_MISCONFIGURED)
        except ClusterError as error:
            return GateBlocked(f"cannot read {where}: {error}", GATE_UNAVAILABLE)


def _decode_text(data: Fields, name: str) -> str:
    """Decode a value of a Secret; empty when absent. Errors quote no part of it."""
    try:
        text = base64.b64decode(data.get_text(name), validate=True).decode()
    except (binascii.Error, ValueError) as error:
        raise ConfigError(f"key {name} is not base64 of a text") from error
    if not text.replace("\n", "").replace("\r", "").isprintable():
        raise ConfigError(f"key {name} contains control characters")
    return text


def _parse_refusal(body: bytes) -> tuple[str | None, str]:
    """Parse kind and value of a FleetLock error; kind is None when the body is no such error."""
    try:
        fields = Fields.from_json(load_json(body, where="the response"), "the response")
        kind, value = fields.get_required_text("kind"), fields.get_text("value")
    except ConfigError:
        return None, ""
    return kind[:_MESSAGE_LIMIT], value[:_MESSAGE_LIMIT]


def _parse_alert_states(body: bytes) -> dict[str, set[str]]:
    """Parse the states of alerts by name; several rules may share one. Raises `ConfigError`."""
    data = Fields.from_json(load_json(body, where="the response"), "the response").get_object(
        "data"
    )
    states: dict[str, set[str]] = {}
    for group in data.iter_objects("groups"):
        for rule in group.iter_objects("rules"):
            is_healthy = rule.get_text("health") in ("ok", "unknown", "")
            state = rule.get_text("state") if is_healthy else "err"
            states.setdefault(rule.get_text("name"), set()).add(state)
    return states
