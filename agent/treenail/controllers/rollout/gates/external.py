"""External gates of a rollout policy: FleetLock servers and Prometheus alerts.

A gate that does not respond, or whose response is invalid, blocks the rollout and is reported in
the pool's conditions. It never counts as open.
"""

import base64
import binascii
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlencode, urlsplit

from treenail.api.decode import Fields, Json, load_json
from treenail.api.unknown_fields import reject_unknown_fields
from treenail.controllers.rollout.gates.os_image import GateAnswer, GateBlocked, GateWaiting
from treenail.controllers.runtime.web import WebClient, WebFailure, WebRequest
from treenail.errors import ClusterError, ConfigError, NotFoundError

MAX_ALERTS = 50
GATE_UNAVAILABLE = "GateUnavailable"
GATE_MISCONFIGURED = "GateMisconfigured"
# The schema of the CRD has the same limits. The FleetLock protocol allows these characters.
_GROUP = re.compile(r"[a-zA-Z0-9.-]{1,253}")
_URL = re.compile(r"https?://[^/@?#\s]+(/[^?#\s]*)?")
_MAX_NAME_CHARS, _MAX_URL_CHARS = 253, 1024
SECRET_TYPE = "treenail.io/gate"  # noqa: S105  # a type, no secret
"""Type of a Secret that a policy may name. Without it a policy could send any Secret anywhere."""

_MESSAGE_LIMIT = 200


@dataclass(frozen=True, slots=True)
class LockServer:
    """A FleetLock server, which grants a lock for each node."""

    url: str
    group: str

    @property
    def text(self) -> str:
        """Format for an annotation, as `from_text` parses it."""
        return f"{self.group} {self.url}"

    @classmethod
    def from_text(cls, text: str) -> "LockServer | None":
        """Parse an annotation value; None when it names no server."""
        group, _, url = text.partition(" ")
        return cls(url, group) if group and url else None


@dataclass(frozen=True, slots=True)
class LockHolder:
    """A node that holds or requests a lock."""

    name: str
    uid: str
    """The id of the lock: unlike the name it differs between clusters and after a new install."""


@dataclass(frozen=True, slots=True)
class PrometheusAlerts:
    """Prometheus alerts that pause a rollout while one of them fires."""

    url: str
    names: tuple[str, ...]
    secret: str = ""
    """Name of the Secret with the bearer token and the certificate authority; empty for none."""


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


def parse_lock_server(fields: Fields) -> LockServer:
    """Parse the lock server of a policy; raises `ConfigError`."""
    reject_unknown_fields(fields, {"url", "group"})
    group = fields.get_required_text("group")
    if not _GROUP.fullmatch(group):
        raise fields.make_error("group", "letters, digits, dots and dashes")
    return LockServer(_parse_url(fields), group)


def parse_alerts(fields: Fields) -> PrometheusAlerts:
    """Parse the alerts of a policy; raises `ConfigError`."""
    reject_unknown_fields(fields, {"url", "names", "secret"})
    names = fields.get_text_list("names")
    is_list = 0 < len(names) <= MAX_ALERTS and len(set(names)) == len(names)
    if not is_list or not all(0 < len(name) <= _MAX_NAME_CHARS for name in names):
        raise fields.error(
            f"{fields.path_of('names')}: expected 1 to {MAX_ALERTS} different names of alerts"
        )
    url, secret = _parse_url(fields), fields.get_text("secret")
    if fields.values.get("secret") is not None and not 0 < len(secret) <= _MAX_NAME_CHARS:
        raise fields.make_error("secret", "the name of a Secret")
    if secret and not url.startswith("https://"):
        raise fields.make_error("url", "an https URL, because a token is sent there")
    return PrometheusAlerts(url, names, secret)


def _parse_url(fields: Fields) -> str:
    text = fields.get_required_text("url")
    try:
        parts = urlsplit(text)
        is_usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        # The resolver rejects empty labels (http://a..b) and labels of more than 63 characters.
        (parts.hostname or "").encode("idna")
    except ValueError:
        is_usable = False
        parts = urlsplit("")
    is_plain = text.isprintable() and _URL.fullmatch(text) is not None
    if not (is_usable and is_plain) or len(text) > _MAX_URL_CHARS:
        raise fields.make_error("url", "an http or https URL without user, query and fragment")
    return text.rstrip("/")


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
