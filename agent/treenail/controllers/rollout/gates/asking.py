"""Asks those whom a pool's policy names before a node is taken out of service.

Who can't be asked, or gives an answer that can't be understood, is an error that stops the
rollout and is shown: never a yes, and never a no without a word.
"""

import json
import logging
from typing import Protocol
from urllib.parse import urlencode

from treenail.api.decode import Fields, load_json
from treenail.controllers.rollout.gates.external import Alerts, LockServer
from treenail.controllers.rollout.gates.os_image import Blocked, Hold
from treenail.controllers.rollout.policy import Policy
from treenail.controllers.runtime.web import Answer, Asked, Silence
from treenail.errors import ConfigError

log = logging.getLogger(__name__)

UNAVAILABLE = "GateUnavailable"
MISCONFIGURED = "GateMisconfigured"

_SAID_LIMIT = 200


class Servers(Protocol):
    """`treenail.controllers.runtime.web.Web`."""

    def ask(self, asked: Asked) -> Answer | Silence: ...


class Asker:
    """Asks alerts of Prometheus, and lock servers of the FleetLock protocol."""

    def __init__(self, servers: Servers) -> None:
        self._servers = servers

    def ask(self, policy: Policy) -> Hold | Blocked | None:
        """Whether an alert of the policy speaks against the rollout."""
        return None if policy.alerts is None else self._alerts(policy.alerts)

    def lock(self, server: LockServer, node: str) -> Hold | Blocked | None:
        """Ask that the node may be out of service; it may when it was let before."""
        return self._fleet_lock(server, node, "pre-reboot")

    def unlock(self, server: LockServer, node: str) -> Hold | Blocked | None:
        """Say that the node is back; harmless when that is known."""
        return self._fleet_lock(server, node, "steady-state")

    def _fleet_lock(self, server: LockServer, node: str, verb: str) -> Hold | Blocked | None:
        body = {"client_params": {"id": node, "group": server.group}}
        headers = (("fleet-lock-protocol", "true"),)
        found = self._servers.ask(
            Asked(f"{server.url}/v1/{verb}", json.dumps(body).encode(), headers)
        )
        who = f"lock server {server.url}, group {server.group}"
        if isinstance(found, Silence):
            return Blocked(f"{who}, can't be asked: {found.reason}", UNAVAILABLE)
        if 200 <= found.status < 300:
            return None
        kind, value = _refusal(found.body)
        if kind is None:
            return Blocked(f"{who}, answers with HTTP {found.status}, which says nothing",
                           MISCONFIGURED)  # fmt: skip
        return Hold(f"{who}, does not let node {node} go: {value or kind}")

    def _alerts(self, alerts: Alerts) -> Hold | Blocked | None:
        who = f"Prometheus {alerts.url}"
        query = urlencode([("type", "alert"), *(("rule_name[]", name) for name in alerts.names)])
        found = self._servers.ask(Asked(f"{alerts.url}/api/v1/rules?{query}"))
        if isinstance(found, Silence):
            return Blocked(f"{who} can't be asked: {found.reason}", UNAVAILABLE)
        if found.status != 200:
            return Blocked(f"{who} answers with HTTP {found.status}", UNAVAILABLE)
        try:
            states = _states(found.body)
        except ConfigError as error:
            return Blocked(f"{who} answers what can't be understood: {error}", MISCONFIGURED)
        for name in alerts.names:
            # An alert that was renamed would never fire.
            if name not in states:
                return Blocked(f"{who} has no alert named {name}", MISCONFIGURED)
        firing = [name for name in alerts.names if "firing" in states[name]]
        if firing:
            return Hold(f"alert {firing[0]} is firing")
        unknown = [name for name in alerts.names if not states[name] <= {"inactive", "pending"}]
        if unknown:
            return Blocked(f"{who} can't evaluate alert {unknown[0]}", MISCONFIGURED)
        return None


def _refusal(body: bytes) -> tuple[str | None, str]:
    """Kind and value of a refusal in the FleetLock protocol; a kind of None when it is none."""
    try:
        fields = Fields.of(load_json(body, where="the answer"), "the answer")
        return fields.required_text("kind")[:_SAID_LIMIT], fields.text("value")[:_SAID_LIMIT]
    except ConfigError:
        return None, ""


def _states(body: bytes) -> dict[str, set[str]]:
    """The states of alerts by name; several rules may share one. Raises `ConfigError`."""
    data = Fields.of(load_json(body, where="the answer"), "the answer").nested("data")
    states: dict[str, set[str]] = {}
    for group in data.objects("groups"):
        for rule in group.objects("rules"):
            healthy = rule.text("health") in ("ok", "unknown", "")
            state = rule.text("state") if healthy else "err"
            states.setdefault(rule.text("name"), set()).add(state)
    return states
