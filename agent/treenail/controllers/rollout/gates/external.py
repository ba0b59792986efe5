"""Who else is asked before a node is taken out of service, as a pool's policy names them."""

from dataclasses import dataclass
from urllib.parse import urlsplit

from treenail.api.decode import Fields

ALERTS_AT_MOST = 50


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
class Alerts:
    """Alerts of a Prometheus that hold a rollout up while one of them fires."""

    url: str
    names: tuple[str, ...]


def lock_server(fields: Fields) -> LockServer:
    """The server in a policy; raises `ConfigError`."""
    group = fields.required_text("group")
    # The characters that the protocol allows.
    if not group.isascii() or not group.replace("-", "").replace(".", "").isalnum():
        raise fields.refuse("group", "letters, digits, dots and dashes")
    return LockServer(_url(fields), group)


def alerts(fields: Fields) -> Alerts:
    """The alerts in a policy; raises `ConfigError`."""
    names = fields.texts("names")
    if not names or len(names) > ALERTS_AT_MOST or not all(names):
        raise fields.error(f"{fields.at('names')}: expected 1 to {ALERTS_AT_MOST} names of alerts")
    return Alerts(_url(fields), names)


def _url(fields: Fields) -> str:
    text = fields.required_text("url")
    try:
        parts = urlsplit(text)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
        parts = urlsplit("")
    if not usable or parts.username or parts.query or parts.fragment or not text.isprintable():
        raise fields.refuse("url", "an http or https URL without user, query and fragment")
    return text.rstrip("/")
