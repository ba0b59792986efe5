"""External gates of a rollout policy: FleetLock servers and Prometheus alerts.

A gate that does not respond, or whose response is invalid, blocks the rollout and is reported in
the pool's conditions. It never counts as open.
"""

import json
from dataclasses import dataclass
from urllib.parse import urlencode, urlsplit

from treenail.api.decode import Fields, load_json
from treenail.controllers.rollout.gates.os_image import GateBlocked, GateWaiting
from treenail.controllers.runtime.web import WebClient, WebFailure, WebRequest
from treenail.errors import ConfigError

MAX_ALERTS = 50
GATE_UNAVAILABLE = "GateUnavailable"
GATE_MISCONFIGURED = "GateMisconfigured"

_MESSAGE_LIMIT = 200


@dataclass(frozen=True, slots=True)
class LockServer:
    """A FleetLock server, which grants a lock for each node."""

    url: str
    group: str

    @property
    def text(self) -> str:
        """Annotation value, as `from_text` parses it."""
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


def parse_lock_server(fields: Fields) -> LockServer:
    """Parse the lock server of a policy; raises `ConfigError`."""
    group = fields.get_required_text("group")
    # The FleetLock protocol allows these characters in a group.
    if not group.isascii() or not group.replace("-", "").replace(".", "").isalnum():
        raise fields.make_error("group", "letters, digits, dots and dashes")
    return LockServer(_parse_url(fields), group)


def parse_alerts(fields: Fields) -> PrometheusAlerts:
    """Parse the alerts of a policy; raises `ConfigError`."""
    names = fields.get_text_list("names")
    if not names or len(names) > MAX_ALERTS or not all(names):
        raise fields.error(f"{fields.path_of('names')}: expected 1 to {MAX_ALERTS} names of alerts")
    return PrometheusAlerts(_parse_url(fields), names)


def _parse_url(fields: Fields) -> str:
    text = fields.get_required_text("url")
    try:
        parts = urlsplit(text)
        is_usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_usable = False
        parts = urlsplit("")
    if not is_usable or parts.username or parts.query or parts.fragment or not text.isprintable():
        raise fields.make_error("url", "an http or https URL without user, query and fragment")
    return text.rstrip("/")


class GateClient:
    """Client of Prometheus and FleetLock servers. None means that the gate is open."""

    def __init__(self, web: WebClient) -> None:
        self._web = web

    def check_alerts(self, alerts: PrometheusAlerts | None) -> GateWaiting | GateBlocked | None:
        """Check that none of the policy's alerts is firing."""
        return None if alerts is None else self._check_prometheus(alerts)

    def acquire_lock(self, server: LockServer, node: str) -> GateWaiting | GateBlocked | None:
        """Acquire the lock that lets the node leave service. Idempotent."""
        return self._call_fleet_lock(server, node, "pre-reboot")

    def release_lock(self, server: LockServer, node: str) -> GateWaiting | GateBlocked | None:
        """Release the lock of a node that is back in service. Idempotent."""
        return self._call_fleet_lock(server, node, "steady-state")

    def _call_fleet_lock(
        self, server: LockServer, node: str, endpoint: str
    ) -> GateWaiting | GateBlocked | None:
        body = {"client_params": {"id": node, "group": server.group}}
        headers = (("fleet-lock-protocol", "true"),)
        response = self._web.send_request(
            WebRequest(f"{server.url}/v1/{endpoint}", json.dumps(body).encode(), headers)
        )
        name = f"lock server {server.url} (group {server.group})"
        if isinstance(response, WebFailure):
            return GateBlocked(f"cannot reach {name}: {response.reason}", GATE_UNAVAILABLE)
        if 200 <= response.status < 300:
            return None
        kind, value = _parse_refusal(response.body)
        if kind is None:
            return GateBlocked(
                f"{name} responded with HTTP {response.status} and no FleetLock error",
                GATE_MISCONFIGURED,
            )
        return GateWaiting(f"waiting: {name} refuses a lock for node {node}: {value or kind}")

    def _check_prometheus(self, alerts: PrometheusAlerts) -> GateWaiting | GateBlocked | None:
        name = f"Prometheus {alerts.url}"
        query = urlencode([("type", "alert"), *(("rule_name[]", name) for name in alerts.names)])
        response = self._web.send_request(WebRequest(f"{alerts.url}/api/v1/rules?{query}"))
        if isinstance(response, WebFailure):
            return GateBlocked(f"cannot reach {name}: {response.reason}", GATE_UNAVAILABLE)
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
