"""Who else is asked before a node is taken out of service, as a pool's policy names them."""

from dataclasses import dataclass
from urllib.parse import urlsplit

from treenail.api.decode import Fields

MAX_ALERTS = 50


@dataclass(frozen=True, slots=True)
class LockServer:
    """A server of the FleetLock protocol, asked for each node."""

    url: str
    group: str

    @property
    def text(self) -> str:
        """What `from_text` reads."""
        return f"{self.group} {self.url}"

    @classmethod
    def from_text(cls, text: str) -> "LockServer | None":
        """The server that `text` names, None when it names none."""
        group, _, url = text.partition(" ")
        return cls(url, group) if group and url else None


@dataclass(frozen=True, slots=True)
class PrometheusAlerts:
    """Alerts of a Prometheus that hold a rollout up while one of them fires."""

    url: str
    names: tuple[str, ...]


def parse_lock_server(fields: Fields) -> LockServer:
    """The server in a policy; raises `ConfigError`."""
    group = fields.get_required_text("group")
    # The characters that the protocol allows.
    if not group.isascii() or not group.replace("-", "").replace(".", "").isalnum():
        raise fields.make_error("group", "letters, digits, dots and dashes")
    return LockServer(_parse_url(fields), group)


def parse_alerts(fields: Fields) -> PrometheusAlerts:
    """The alerts in a policy; raises `ConfigError`."""
    names = fields.get_text_list("names")
    if not names or len(names) > MAX_ALERTS or not all(names):
        raise fields.error(f"{fields.path_of('names')}: expected 1 to {MAX_ALERTS} names of alerts")
    return PrometheusAlerts(_parse_url(fields), names)


def _parse_url(fields: Fields) -> str:
    text = fields.get_required_text("url")
    try:
        parts = urlsplit(text)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
        parts = urlsplit("")
    if not usable or parts.username or parts.query or parts.fragment or not text.isprintable():
        raise fields.make_error("url", "an http or https URL without user, query and fragment")
    return text.rstrip("/")
