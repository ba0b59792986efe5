"""A canary in every place that can hold a secret, and whatever a node shows, tells and starts."""

import base64
import gzip
import io
import json
import stat
import tarfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from gi.repository import Gio, GLib

from tests.integration.commands import Completed, treenail
from tests.integration.site import LAYERS, LIMIT_S, LOGIN, SETTINGS, SIZE, Options, Site
from tests.integration.test_config import Configs
from tests.integration.test_trust import hand_out
from tests.waiting import wait_until
from treenail.api import annotations as key
from treenail.api.controllerconfig import NAME
from treenail.kube.resources import CONTROLLERCONFIGS, EVENTS, MACHINECONFIGNODES, NODES
from treenail.log import SYSLOG_IDENTIFIER
from treenail_lab.cluster import build_pull_secret
from treenail_lab.images import Credential, make_image
from treenail_lab.machine.bus.objects import bus_method, call_method, scoped_connection

pytestmark = [pytest.mark.integration]

FIELDS = (
    "password of the cluster's pull secret",
    "password that a registry refuses",
    "token of the cluster's pull secret",
    "password of the internal registry",
    "password hash of core",
    "public key of core",
    "file for its owner alone",
    "file that is compressed",
    "file where credentials are kept",
    "kubeconfig",
    "environment file",
    "environment of a unit",
    "environment in a drop-in",
    "proxy with a login",
    "key of an encrypted disk",
    "file that costs no drain",
    "file that drifted",
    "file that is refused",
    "kernel argument",
    "what stood there before",
)
"""Whatever of a node's config and credentials can hold a secret."""
CANARIES = {name: f"Canary{number:02d}x7e2b91" for number, name in enumerate(FIELDS)}
WORLD = 0o644
READERS = ("bootc", "podman", "ostree", "journalctl")
FREE = "/etc/nmstate/openshift/net.yml"
BEFORE = "/etc/before.key"


def traces(canary: str) -> tuple[str, ...]:
    """Return the forms of a secret: plain, and in each encoding in which it was given."""
    login = base64.b64encode(f"{LOGIN.username}:{canary}".encode()).decode()
    return canary, canary.encode().hex(), base64.b64encode(canary.encode()).decode()[:16], login


TRACES = {name: traces(canary) for name, canary in CANARIES.items()}


def found(text: str, *but: str) -> list[str]:
    """The fields whose canary is in the text."""
    return [
        name
        for name, traces in TRACES.items()
        if name not in but and any(each in text for each in traces)
    ]


@pytest.fixture(scope="module", params=["", "bootc"], ids=["rpm-ostree", "bootc"])
def options(request: pytest.FixtureRequest) -> Options:
    return Options(agent_settings=f'log_level = "debug"\n{SETTINGS}', backend=request.param)


class Bus:
    """Everything that is said on the machine's bus in one boot."""

    def __init__(self, address: str) -> None:
        self._lock = threading.Lock()
        self._messages: list[tuple[str, str]] = []
        self._open = ExitStack()
        bus = self._open.enter_context(scoped_connection(address))
        bus.add_filter(self._hear)
        name, path, _, _ = bus_method("")
        monitor = (name, path, f"{name}.Monitoring", "BecomeMonitor")
        call_method(bus, monitor, GLib.Variant("(asu)", ([], 0)))

    def read_bodies(self) -> list[tuple[str, str]]:
        """The member and the body of every message."""
        with self._lock:
            return list(self._messages)

    def close(self) -> None:
        with suppress(GLib.Error):  # a reboot takes the bus away
            self._open.close()

    def _hear(
        self,
        _bus: Gio.DBusConnection,
        message: Gio.DBusMessage,
        incoming: bool,
    ) -> Gio.DBusMessage | None:
        if not incoming:
            return message
        body = message.get_body()
        with self._lock:
            self._messages.append((message.get_member() or "", body.print_(False) if body else ""))
        # The call is for another client: do not answer it.
        return None if message.get_message_type() is Gio.DBusMessageType.METHOD_CALL else message


class Programs:
    """Notes the arguments and the environment of every program that the agent has started."""

    def __init__(self, site: Site) -> None:
        self._log = site.directory / "programs"
        self._log.touch()
        commands = [site.machine.root / "usr/bin" / name for name in READERS]
        for command in (*commands, site.machine.root.parent / "bin/skopeo"):
            first, rest = command.read_text().split("\n", 1)
            note = f'{{ printf "%s\\n" "$0" "$@"; env; }} >> {self._log}'
            command.write_text(f"{first}\n{note}\n{rest}")

    def text(self) -> str:
        return self._log.read_text()


def inline(text: str, path: str, mode: int = 0o600, *, packed: bool = False) -> dict[str, object]:
    """A file of a config; ``packed`` with gzip."""
    content = gzip.compress(text.encode()) if packed else text.encode()
    source = "data:;base64," + base64.b64encode(content).decode()
    contents = {"source": source, **({"compression": "gzip"} if packed else {})}
    return {"path": path, "mode": mode, "contents": contents}


def config(*, free: str = "") -> dict[str, object]:
    """A config with all the canaries that one can have."""
    c = CANARIES
    files = [
        inline(c["file for its owner alone"], "/etc/app.token"),
        inline(f'{{"auths":{{"q":{{"auth":"{c["file where credentials are kept"]}"}}}}}}',
               "/etc/containers/auth.json", WORLD),
        inline(f"users: [{{user: {{token: {c['kubeconfig']}}}}}]\n", "/etc/a/kubeconfig", WORLD),
        inline(f"DB_PASSWORD={c['environment file']}\n", "/etc/app.env", WORLD),
        inline(f"HTTPS_PROXY=http://me:{c['proxy with a login']}@proxy:1\n", "/etc/p.env", WORLD),
        inline(c["key of an encrypted disk"], "/etc/luks/root.key", WORLD),
        inline(f"new\npassword: {c['file that is compressed']}\n", BEFORE, packed=True),
        inline(f"secret: {free or c['file that costs no drain']}\n", FREE),
    ]  # fmt: skip
    unit = {
        "name": "app.service",
        "contents": f"[Service]\nEnvironment=PASSWORD={c['environment of a unit']}\n"
        "ExecStart=/bin/true\n",
        "dropins": [
            {
                "name": "a.conf",
                "contents": f"[Service]\nEnvironment=TOKEN={c['environment in a drop-in']}\n",
            }
        ],
    }
    user = {
        "name": "core",
        "passwordHash": f"$6$salt${c['password hash of core']}",
        "sshAuthorizedKeys": [f"ssh-ed25519 AAAA{c['public key of core']} me"],
    }
    return {
        "storage": {"files": files},
        "systemd": {"units": [unit]},
        "passwd": {"users": [user]},
    }


def has_people(root: Path) -> None:
    """Give the machine a credential, and a secret in a file that the config replaces."""
    for path, text in {
        "etc/passwd": "root:x:0:0::/root:/bin/sh\ncore:x:1000:1000::/home/core:/bin/sh\n",
        "etc/group": "root:x:0:\ncore:x:1000:\n",
        "etc/shadow": f"core:$6$salt${CANARIES['what stood there before']}:1::::::\n",
        BEFORE[1:]: f"password: {CANARIES['what stood there before']}\n",
    }.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
        (root / path).chmod(0o644 if path in {"etc/passwd", "etc/group"} else 0o600)


def holds(root: Path) -> list[str]:
    """The fields whose canary the machine has, where the config has it."""
    places = [
        path
        for top in ("etc", "home", "var/home")
        for path in (root / top).rglob("*")
        if path.is_file()
    ]
    return found("".join(path.read_bytes().decode("latin-1") for path in places))


def shown(site: Site) -> Iterator[tuple[str, str]]:
    """Everything that commands show, by where."""
    for words in (
        ("status",), ("status", "--json"), ("plan",), ("plan", "--json"), ("why", "--json"),
        ("history", "--json"), ("drift",),
    ):  # fmt: skip
        yield " ".join(words), _all(treenail(site, *words))
    bundle = site.directory / "bundle.tar.gz"
    bundle.unlink(missing_ok=True)
    yield "collect", _all(treenail(site, "collect", "--output", str(bundle)))
    with tarfile.open(fileobj=io.BytesIO(bundle.read_bytes())) as parts:
        for part in parts:
            content = parts.extractfile(part)
            assert content is not None
            yield f"bundle: {part.name.partition('/')[2]}", content.read().decode()


def list_outputs(site: Site) -> Iterator[tuple[str, str]]:
    """Yield everything that the agent has written, by place, and what other users see of it."""
    for resource in (NODES, EVENTS, MACHINECONFIGNODES):
        yield resource.plural, json.dumps(site.lab.client.list(resource).items)
    # The kernel's own record of its arguments is in there, too.
    ours = site.machine.read_journal({"SYSLOG_IDENTIFIER": SYSLOG_IDENTIFIER})
    yield "journal", json.dumps(ours)
    yield "output of the agent", site.machine.agent_log.read_text()
    process = Path("/proc") / str(site.machine.agent.pid)
    yield "arguments of the agent", (process / "cmdline").read_text()
    yield "environment of the agent", (process / "environ").read_text()
    for directory in ("var/lib/treenail", "run/treenail"):
        for path in (site.machine.root / directory).rglob("*"):
            if path.is_file() and stat.S_IMODE(path.stat().st_mode) & 0o077:
                yield str(path), path.read_bytes().decode("latin-1")


def leaks(*places: Iterator[tuple[str, str]]) -> dict[str, list[str]]:
    """The fields whose canary was found, by where."""
    texts = {place: text for each in places for place, text in each}
    return {place: names for place, text in texts.items() if (names := found(text))}


@contextmanager
def heard(site: Site) -> Iterator[Bus]:
    """Within, the bus is listened to; in the end nothing secret was said but what has to be."""
    with closing(Bus(site.machine.address)) as bus:
        yield bus
        bodies_seen = bus.read_bodies()
    # rpm-ostreed needs the kernel arguments, and shows them to every client.
    bodies = {member: found(body, "kernel argument") for member, body in bodies_seen}
    assert {member: names for member, names in bodies.items() if names} == {}
    starts = [body for member, body in bodies_seen if member == "StartTransientUnit"]
    assert [found(body) for body in starts if found(body)] == []


def _all(completed: Completed) -> str:
    return completed.stdout + completed.stderr


def logins(site: Site, *images_: object) -> str:
    document = json.loads(build_pull_secret([site.current.image, *images_]))  # type: ignore[list-item]  # images
    token = CANARIES["token of the cluster's pull secret"]
    document["auths"]["other.example"] = {"auth": "", "identitytoken": token}
    return json.dumps(document)


@pytest.fixture
def programs(site: Site) -> Iterator[Programs]:
    """Once the test is over nothing that the agent started has had a secret among its arguments."""
    noted = Programs(site)
    yield noted
    assert found(noted.text()) == []


@pytest.fixture
def configs(site: Site) -> Iterator[Configs]:
    has_people(site.machine.root)
    yield Configs(site)
    site.reach(site.goal())


@pytest.fixture
def arguments(options: Options) -> list[str]:
    """With bootc alone kernel arguments are in the image."""
    return [] if options.backend else [f"luks.passphrase={CANARIES['kernel argument']}"]


def test_registry_credentials_reach_registries_only(site: Site, programs: Programs) -> None:
    login = Credential(LOGIN.username, CANARIES["password of the cluster's pull secret"])
    refused = Credential(LOGIN.username, CANARIES["password that a registry refuses"])
    image = make_image("os/node", "canary", SIZE, layers=LAYERS, credential=login)
    internal = CANARIES["password of the internal registry"]
    document = {"auths": {"internal:5000": {"username": "i", "password": internal}}}
    handed = base64.b64encode(json.dumps(document).encode()).decode()
    goal = site.goal(image=image)
    hand_out(site, internalRegistryPullSecret=handed)
    with heard(site):
        site.pull_secret.write_text(logins(site, replace(image, credential=refused)))
        site.ask(goal)
        site.wait_degraded("unauthorized")
        assert leaks(shown(site), list_outputs(site)) == {}
        site.pull_secret.write_text(logins(site, image))
        wait_until(lambda: site.phase() not in {"", "staging"}, limit_s=LIMIT_S)
    site.settle(goal)
    assert leaks(list_outputs(site)) == {}
    assert "skopeo" in programs.text()
    merged = (site.machine.root / "var/lib/treenail/auth.json").read_text()
    assert len(json.loads(merged)["auths"]) == 3
    site.lab.client.delete(CONTROLLERCONFIGS, NAME)


@pytest.mark.long("bootc")
def test_config_secrets_stay_hidden_before_and_after_reboot(
    site: Site, configs: Configs, programs: Programs, arguments: list[str]
) -> None:
    name = configs.add(*arguments, **config())
    with site.drains_held(), heard(site):
        configs.ask(name)
        site.wait_phase("draining")
        assert leaks(shown(site), list_outputs(site)) == {}
    wait_until(lambda: configs.at(name), limit_s=LIMIT_S)
    assert [each for each in FIELDS[4:16] if each not in holds(site.machine.root)] == []
    assert leaks(list_outputs(site)) == {}


@pytest.mark.long("bootc")
def test_secrets_stay_hidden_in_drift_and_refusal(
    site: Site, configs: Configs, programs: Programs, arguments: list[str]
) -> None:
    drifted = CANARIES["file that drifted"]
    configs.reach(configs.add(*arguments, **config()))
    with heard(site):
        configs.reach(configs.add(*arguments, **config(free=drifted)))
        (site.machine.root / "etc/app.token").write_text(drifted)
        (site.machine.root / "etc/app.env").write_text(f"DB_PASSWORD={drifted}\n")
        site.wait_degraded("/etc/app.token")
        assert leaks(shown(site), list_outputs(site)) == {}
        healed = treenail(site, "drift", "--repair", "/etc/app.token", "/etc/app.env")
        assert found(_all(healed)) == []
        wait_until(lambda: site.notes().get(key.STATE) == "Done", limit_s=LIMIT_S)
        source = f"data:;base64,{CANARIES['file that is refused']}*"
        bad = {"storage": {"files": [{"path": "/etc/x", "contents": {"source": source}}]}}
        configs.ask(configs.add(*arguments, **bad))
        site.wait_degraded("contents.source")
        assert leaks(list_outputs(site)) == {}
