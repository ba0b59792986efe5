"""Both controllers of an owned InPlace pool in random order, killed between any two writes.

The management cluster is an API server of the lab, the hosted cluster is in memory.
"""

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import pytest

from tests.controllers.hosted.in_place.world import IMAGE, GuestApi, OwnWorld
from tests.controllers.hosted.owning import site as owned_site
from tests.controllers.hosted.owning.site import CapiActor, KillingTransport, OwnedSite
from tests.controllers.rollout.world import Killed, OpenGates
from tests.fixtures import hosted
from tests.fixtures.controllers import open_client
from treenail.api import annotations as key
from treenail.api.hosted import annotations as hosted_key
from treenail.api.hosted import clusterapi, nodepool
from treenail.controllers.drain import decide
from treenail.controllers.hosted.conduct import conductor, own_update, pool_facts
from treenail.controllers.hosted.owning.token_secrets import SecretFacts, SecretPlan
from treenail.controllers.hosted.rollout_store import RolloutStore
from treenail.errors import ClusterError
from treenail.kube.api_client import Client
from treenail.kube.resources import HOSTEDCLUSTERS, MACHINES, MACHINESETS
from treenail_lab.apiserver.serving.server import LabServer

pytestmark = pytest.mark.integration
Json = dict[str, Any]


def plan_secrets(facts: SecretFacts, new_token: Any) -> SecretPlan:
    """Add the payload that agents expect, which the plan does not compare."""
    plan = owned_site.plan_secrets(facts, new_token)
    for secret in cast("tuple[Json, ...]", plan.writes):
        target = str(secret["metadata"]["name"]).rpartition("-")[2]
        secret["data"]["payload"] = hosted.encode(f"payload-of-{target}")
    return plan


class PayloadSite(OwnedSite):
    """The controller ``nodepools`` with payloads in its Secrets."""

    def start(self) -> None:
        super().start()
        settings = self.controller._settings
        self.controller._settings = replace(settings, plan_secrets=plan_secrets)


class BothWorld(OwnWorld):
    """The actors of `OwnWorld` in the hosted cluster, of `OwnedSite` in the management cluster."""

    def __init__(self, client: Client, number: int, seed: int, *, kills: float) -> None:
        self.random = random.Random(seed)
        self.seconds, self.upgrade_type, self.policy, self.image = 1e9, "InPlace", "", IMAGE
        self.services, self.drain_keys, self.guest_problem = None, decide.USUAL_KEYS, ""
        self.bad, self.is_stuck, self.timeline, self.warnings = set(), set(), [], []
        self.guest = GuestApi(self.now)
        self.site = PayloadSite(client, "InPlace", number=number)
        self.site.create_pool(replicas=3, management={"upgradeType": "InPlace"})
        self.actor, self.killed, self.rate = CapiActor(self.site), 0, 0.0
        self.given: list[tuple[str, str]] = []
        self.transport = KillingTransport(client._transport)
        self.start()
        self.turn_until_done()
        self.rate = kills
        self.guest.before_write = self.guest.after_write = self.maybe_kill
        self.guest.observe = self.note_write

    def note_write(self, verb: str, plural: str, name: str, body: Json) -> None:
        if (verb, plural) == ("patch", "nodes"):
            target = body["metadata"]["annotations"].get(key.DESIRED_CONFIG)
            assert (name, target) not in self.given, "each target at most once"
            self.given.append((name, target))

    def maybe_kill(self) -> None:
        if self.random.random() < self.rate:
            raise Killed

    def start(self) -> None:
        client: Any = Client(self.transport, field_manager="treenail-hosted")
        self.transport.left = None
        self.tools = own_update.ConductTools(
            client, self, OpenGates(), cast("Any", self), RolloutStore(client), dict, lambda: "",
            agent_image=IMAGE,
        )  # fmt: skip
        self.known: conductor.PoolConductor | None = None

    def find_objects(self) -> pool_facts.PoolObjects:
        site = self.site
        cluster = site.client.get(HOSTEDCLUSTERS, "one", namespace=site.namespace)
        owner = site.client.find(MACHINESETS, "np", namespace=site.plane)
        return pool_facts.PoolObjects(
            nodepool.NodePool.from_json(site.read_pool()),
            nodepool.HostedCluster.from_json(cluster),
            None if owner is None else clusterapi.MachineSet.from_json(owner),
            machines=tuple(map(clusterapi.ClusterMachine.from_json, site.list(MACHINES))),
            is_owned=True,
        )

    def sync(self) -> float | None:
        objects = self.find_objects()
        if self.known is None:
            self.known = self.conductor = conductor.PoolConductor(self.tools, objects)
        return super().sync()

    def run_controllers(self) -> None:
        steps = [self.site.sync, self.sync]
        self.random.shuffle(steps)
        for step, transport in ((step, self.site.transport) for step in steps):
            for each in (transport, self.transport):
                is_due = self.random.random() < self.rate * 4
                each.left = self.random.randint(0, 3) if is_due else None
            try:
                step()
            except Killed:
                self.killed += 1
                self.site.start()
                self.start()
            except ClusterError:
                pass

    def turn_once(self) -> None:
        self.seconds += 30.0
        self.actor.step()
        for name, config in self.actor.boots.items():
            if ("nodes", name) not in self.guest.objects:
                self.add_node(name, config)
        self.act_as_agents()
        self.run_controllers()

    def notes_of_owner(self) -> Json:
        metadata: Json = (self.site.read_owner() or {}).get("metadata", {})
        return dict(metadata.get("annotations", {}))

    def is_over(self, before: set[str]) -> bool:
        """Whether the pool has a target that is none of those before, and all says so."""
        notes = self.notes_of_owner()
        target = notes.get(hosted_key.TARGET_CONFIG)
        states = {kind: each["status"] for kind, each in self.site.conditions().items()}
        return (
            target not in {None, *before}
            and notes.get(hosted_key.UPDATED_CONFIG) == target
            and states.get("UpdatingConfig") == "False"
            and states.get("Ready") == "True"
            and self.list_left() == []
        )

    def turn_until_done(self, *before: str) -> None:
        for _ in range(120):
            self.turn_once()
            if self.is_over({*before}):
                return
        raise AssertionError((self.notes_of_owner(), self.list_left(), self.site.conditions()))


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with (
        LabServer(tmp_path_factory.mktemp("management")) as server,
        open_client(server.admin_kubeconfig) as found,
    ):
        owned_site.install_kinds(found)
        yield found


def play(world: BothWorld) -> tuple[Json, set[str]]:
    """Change the config, then config, release and size in the middle of the rollout."""
    before = [world.notes_of_owner()[hosted_key.TARGET_CONFIG]]
    world.site.set_config("b")
    for _ in range(world.random.randint(0, 8)):
        world.turn_once()
    before.append(world.notes_of_owner()[hosted_key.TARGET_CONFIG])
    world.site.set_config("c")
    replicas = world.random.choice((3, 4))
    world.site.patch_pool({"spec": {"replicas": replicas}})
    world.turn_until_done(*before)
    for _ in range(3):
        world.turn_once()
    notes = world.notes_of_owner()
    target = notes[hosted_key.TARGET_CONFIG]
    assert {node.current_config for node in world.nodes().values()} == {target}
    assert world.list_left() == []
    assert len(world.site.list(MACHINES)) == replicas
    return notes, {each["metadata"]["name"] for each in world.site.list(MACHINES)}


def check_seed(client: Client, seed: int) -> None:
    plain = BothWorld(client, 2 * seed, seed, kills=0.0)
    notes, machines = play(plain)
    killed = BothWorld(client, 2 * seed + 1, seed, kills=0.12)
    other_notes, other_machines = play(killed)
    assert killed.killed > 0
    assert other_notes[hosted_key.TARGET_CONFIG] == notes[hosted_key.TARGET_CONFIG]
    assert machines >= {"np-1", "np-2", "np-3"} <= other_machines, "no machine was replaced"


def test_controllers_killed_in_random_order_end_as_undisturbed(client: Client) -> None:
    check_seed(client, 0)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1, 40))
def test_more_orders_of_killed_controllers_end_as_undisturbed(client: Client, seed: int) -> None:
    check_seed(client, seed)
