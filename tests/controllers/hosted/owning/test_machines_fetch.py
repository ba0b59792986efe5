"""24 hours by a test clock: a machine younger than 5.5 h gets a config from every living server.

The controller is killed between its writes and stays away for hours, configs are refreshed and
rolled out, the clock jumps back, and one of two servers dies and comes again.
"""

import base64
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from http import HTTPStatus

import pytest

from tests.controllers.hosted.owning.secret_site import (
    HASHES,
    HOUR,
    SecretSite,
    make_config,
    make_machine,
)
from treenail.api import object_meta
from treenail.api.decode import Json
from treenail.api.hosted import clusterapi
from treenail.controllers.hosted.owning import token_secrets
from treenail.kube import watch
from treenail.provisioning.tokens.hosted_tokens import HostedTokens

STEP_S = 600.0
YOUNG_S = token_secrets.RENEWAL_S


class SiteView:
    """The token Secrets of a site, as a watch delivers them."""

    def __init__(
        self, site: SecretSite, scope: watch.WatchScope, project: Callable[[Json], object]
    ) -> None:
        self._site, self._scope, self._project = site, scope, project
        self._known: dict[str, tuple[Json, object]] = {}

    def get_all(self) -> dict[str, object]:
        return {
            f"clusters-one/{name}": self._read(name, secret)
            for name, secret in self._site.secrets.items()
            if name.startswith("token-") and self._scope.label_selector
        }

    def _read(self, name: str, secret: Json) -> object:
        """Read an object when it changes, as an informer does."""
        if name not in self._known or self._known[name][0] is not secret:
            assert self._scope.label_selector in object_meta.read_metadata(secret).labels
            self._known[name] = secret, self._project(secret)
        return self._known[name][1]

    def find(self, key: str) -> object:
        return self.get_all().get(key)


class SiteInformers:
    def __init__(self, site: SecretSite) -> None:
        self._site = site

    def add_view(self, scope: watch.WatchScope, project: Callable[[Json], object]) -> SiteView:
        return SiteView(self._site, scope, project)


class SiteClock:
    """The wall clock of a site."""

    def __init__(self, site: SecretSite) -> None:
        self._site = site

    def now(self) -> float:
        return self._site.now

    def monotonic(self) -> float:
        return self._site.now

    def sleep(self, seconds: float) -> None:
        self._site.now += seconds


def start_server(site: SecretSite) -> HostedTokens:
    return HostedTokens(SiteInformers(site), object(), SiteClock(site))  # type: ignore[arg-type]  # reads no cluster


@dataclass
class Day:
    """One NodePool over a day. Machines boot from the user data that a template names."""

    chance: random.Random
    site: SecretSite = field(default_factory=SecretSite)
    machines: list[clusterapi.ClusterMachine] = field(default_factory=list)
    bearers: dict[str, str] = field(default_factory=dict)
    templates: list[str] = field(default_factory=lambda: [f"user-data-np-{HASHES[0]}"])
    hashes: int = 1
    away_until: float = 0.0
    refused: list[str] = field(default_factory=list)

    def run(self) -> None:
        servers = [start_server(self.site), start_server(self.site)]
        self.control(None)
        begin = self.site.now
        while (hours := (self.site.now - begin) / HOUR) < 24:
            self.site.now += STEP_S
            if 12 <= hours < 16:
                del servers[1:]
            elif len(servers) < 2:
                servers.append(start_server(self.site))
            self.change_config()
            if self.site.now >= self.away_until:
                self.control(self.chance.choice([None, None, 0, 1, 1, 2]))
            self.change_machines()
            for server in servers:
                self.check(server)

    def change_config(self) -> None:
        if self.chance.random() < 0.03 and self.hashes < len(HASHES):
            new = HASHES[self.hashes]
            self.hashes += 1
            changes: dict[str, object] = {"config": make_config(new)}
            if self.chance.random() < 0.5:
                changes["rolled_hash"] = new
            self.site.facts = replace(self.site.facts, **changes)  # type: ignore[arg-type]  # fields

    def control(self, writes: int | None) -> None:
        """Let the controller run; a number of writes ends with a kill and hours without it."""
        site = self.site
        plan = site.plan(machines=self.machines, templates=self.templates)
        site.apply(plan, writes=writes)
        if writes is not None and plan.writes:
            self.away_until = site.now + self.chance.uniform(0, 5) * HOUR
            return
        name = f"user-data-np-{site.facts.rolled_hash}"
        if name not in self.templates:
            # Cluster API keeps the MachineSet of the old template for a while.
            self.templates = [*self.templates[-1:], name]
        elif self.chance.random() < 0.1:
            self.templates = self.templates[-1:]

    def change_machines(self) -> None:
        for number, machine in enumerate(self.machines):
            if not machine.node_name and self.chance.random() < 0.01:
                self.machines[number] = replace(machine, node_name=machine.name)
        template = self.chance.choice(self.templates)
        name = f"m{len(self.bearers)}"
        token = self.site.read_bearer(template)
        self.bearers[name] = base64.b64encode(token.encode()).decode()
        self.machines.append(make_machine(name, template, self.site.now))
        self.machines = self.machines[-60:]

    def check(self, server: HostedTokens) -> None:
        for machine in self.machines:
            created = machine.metadata.created
            age_s = self.site.now - parse(created)
            if age_s < YOUNG_S and not machine.node_name:
                verdict = server.check(self.bearers[machine.name], "", "")
                if verdict.status != HTTPStatus.OK:
                    self.refused.append(f"{machine.name} at {age_s / HOUR:.1f} h")
                else:
                    assert server.read_inputs(verdict.source).config.name in HASHES


def parse(text: str) -> float:
    seconds = token_secrets.clocks.parse_rfc3339(text)
    assert seconds is not None
    return seconds


@pytest.mark.parametrize("seed", range(8))
def test_young_machine_always_gets_a_config(seed: int) -> None:
    day = Day(random.Random(seed))  # a test
    day.run()
    assert day.refused == []
    assert day.hashes > 1
