"""Asks those whom a pool's policy names before a node is taken out of service.

Who can't be asked, or gives an answer that can't be understood, is an error that stops the
rollout and is shown: never a yes, and never a no without a word.
"""

import json
import logging
from typing import Protocol
from urllib.parse import urlencode

from treenail.api.decode import Fields, load_json
from treenail.controllers.rollout.gates.external import LockServer, PrometheusAlerts
from treenail.controllers.rollout.gates.os_image import GateBlocked, GateWaiting
from treenail.controllers.rollout.policy import RolloutPolicy
from treenail.controllers.runtime.web import WebFailure, WebRequest, WebResponse
from treenail.errors import ConfigError

log = logging.getLogger(__name__)

GATE_UNAVAILABLE = "GateUnavailable"
GATE_MISCONFIGURED = "GateMisconfigured"

_MESSAGE_LIMIT = 200


class GateServers(Protocol):
    """`treenail.controllers.runtime.web.WebClient`."""

    def send_request(self, asked: WebRequest) -> WebResponse | WebFailure: ...


class GateClient:
    """Asks alerts of Prometheus, and lock servers of the FleetLock protocol."""

    def __init__(self, servers: GateServers) -> None:
        self._servers = servers

    def check_alerts(self, policy: RolloutPolicy) -> GateWaiting | GateBlocked | None:
        """Whether an alert of the policy speaks against the rollout."""
        return None if policy.alerts is None else self._check_prometheus(policy.alerts)

    def acquire_lock(self, server: LockServer, node: str) -> GateWaiting | GateBlocked | None:
        """Ask that the node may be out of service; it may when it was let before."""
        return self._call_fleet_lock(server, node, "pre-reboot")

    def release_lock(self, server: LockServer, node: str) -> GateWaiting | GateBlocked | None:
        """Say that the node is back; harmless when that is known."""
        return self._call_fleet_lock(server, node, "steady-state")

    def _call_fleet_lock(
        self, server: LockServer, node: str, endpoint: str
    ) -> GateWaiting | GateBlocked | None:
        body = {"client_params": {"id": node, "group": server.group}}
        headers = (("fleet-lock-protocol", "true"),)
        found = self._servers.send_request(
            WebRequest(f"{server.url}/v1/{endpoint}", json.dumps(body).encode(), headers)
        )
        who = f"lock server {server.url}, group {server.group}"
        if isinstance(found, WebFailure):
            return GateBlocked(f"{who}, can't be asked: {found.reason}", GATE_UNAVAILABLE)
        if 200 <= found.status < 300:
            return None
        kind, value = _parse_refusal(found.body)
        if kind is None:
            return GateBlocked(f"{who}, answers with HTTP {found.status}, which says nothing",
                           GATE_MISCONFIGURED)  # fmt: skip
        return GateWaiting(f"{who}, does not let node {node} go: {value or kind}")

    def _check_prometheus(self, alerts: PrometheusAlerts) -> GateWaiting | GateBlocked | None:
        who = f"Prometheus {alerts.url}"
        query = urlencode([("type", "alert"), *(("rule_name[]", name) for name in alerts.names)])
        found = self._servers.send_request(WebRequest(f"{alerts.url}/api/v1/rules?{query}"))
        if isinstance(found, WebFailure):
            return GateBlocked(f"{who} can't be asked: {found.reason}", GATE_UNAVAILABLE)
        if found.status != 200:
            return GateBlocked(f"{who} answers with HTTP {found.status}", GATE_UNAVAILABLE)
        try:
            states = _parse_alert_states(found.body)
        except ConfigError as error:
            return GateBlocked(
                f"{who} answers what can't be understood: {error}", GATE_MISCONFIGURED
            )
        for name in alerts.names:
            # An alert that was renamed would never fire.
            if name not in states:
                return GateBlocked(f"{who} has no alert named {name}", GATE_MISCONFIGURED)
        firing = [name for name in alerts.names if "firing" in states[name]]
        if firing:
            return GateWaiting(f"alert {firing[0]} is firing")
        unknown = [name for name in alerts.names if not states[name] <= {"inactive", "pending"}]
        if unknown:
            return GateBlocked(f"{who} can't evaluate alert {unknown[0]}", GATE_MISCONFIGURED)
        return None


def _parse_refusal(body: bytes) -> tuple[str | None, str]:
    """Kind and value of a refusal in the FleetLock protocol; a kind of None when it is none."""
    try:
        fields = Fields.from_json(load_json(body, where="the answer"), "the answer")
        return fields.get_required_text("kind")[:_MESSAGE_LIMIT], fields.get_text("value")[
            :_MESSAGE_LIMIT
        ]
    except ConfigError:
        return None, ""


def _parse_alert_states(body: bytes) -> dict[str, set[str]]:
    """The states of alerts by name; several rules may share one. Raises `ConfigError`."""
    data = Fields.from_json(load_json(body, where="the answer"), "the answer").get_object("data")
    states: dict[str, set[str]] = {}
    for group in data.iter_objects("groups"):
        for rule in group.iter_objects("rules"):
            healthy = rule.get_text("health") in ("ok", "unknown", "")
            state = rule.get_text("state") if healthy else "err"
            states.setdefault(rule.get_text("name"), set()).add(state)
    return states
