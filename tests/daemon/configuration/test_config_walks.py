"""Random walks of a node between configs with and without an image, and with one that fails.

As in the walks between images. In the end files, units, kernel arguments and the image
are all of one config, and what needs a drain never changes on a node in service.
"""

from copy import deepcopy
from functools import cache

import pytest

from tests.daemon import nodes, walk_budget
from tests.daemon.machines import TOP, apply_config
from tests.daemon.nodes import Node, Process, assert_at_rest
from tests.daemon.reconcile.test_walks import Chaos as OSChaos
from tests.daemon.reconcile.test_walks import recorded, request_another_and_back, strike
from tests.fakes.disk import Entry
from tests.fakes.world import Killed, PowerCut, World
from tests.update.build import A, B, C
from treenail.api import annotations as key
from treenail.api.machineconfig import MachineConfig
from treenail.api.object_meta import ObjectMeta
from treenail.config.wanted_state import read_wanted_state
from treenail.daemon.local.metrics import METRICS_FILE
from treenail.host.rollback.undo_log import UNDO_DIRECTORY as UNDO
from treenail.update.decision.user_requests import RequestKind, UserRequest, explain_too_late
from treenail.update.state.ledger_record import Target
from treenail.update.steps.inventory import OWNERSHIP_FILE

APP, FREE, BAKED = "/etc/app.conf", "/etc/nmstate/openshift/free", "/etc/baked.conf"


def config(
    name: str,
    files: dict[str, str],
    *,
    image: str = "",
    arguments: tuple[str, ...] = (),
    units: tuple[dict[str, object], ...] = (),
) -> MachineConfig:
    return MachineConfig(
        ObjectMeta(name=name),
        config={
            "ignition": {"version": "3.5.0"},
            "storage": {
                "files": [
                    {"path": path, "contents": {"source": f"data:,{text}"}, "overwrite": True}
                    for path, text in files.items()
                ]
            },
            "systemd": {"units": list(units)},
        },
        os_image_url=image,
        kernel_arguments=arguments,
    )


UNIT = {
    "name": "app.service",
    "contents": "[Service]\nExecStart=/bin/true\n[Install]\nWantedBy=multi-user.target\n",
    "enabled": True,
}
BAD = {
    "name": "bad.service",
    "contents": "[Service]\nExecStart=/bin/true\n[Install]\nWantedBy=%H.target\n",
    "enabled": True,
}
STOCK, NEXT, FREELY, BROKEN = map(Target, ("stock", "next", "freely", "broken"))
BAKED_TEXT = "from-the-image"
CONFIGS = (
    config(A.config, {}),
    config(B.config, {}, arguments=("b=1",)),
    config(STOCK.config, {APP: "stock", BAKED: BAKED_TEXT}, image=C.image, units=(UNIT,)),
    config(NEXT.config, {APP: "next"}, image=C.image, arguments=("n=1", "n=2")),
    config(FREELY.config, {APP: "next", FREE: "x"}, image=C.image, arguments=("n=1", "n=2")),
    config(BROKEN.config, {APP: "broken", FREE: "broken"}, image=A.image, units=(BAD,)),
)
TARGETS = (A, B, STOCK, NEXT, FREELY, BROKEN)


def world_at(target: Target) -> World:
    """A world whose node is at rest at the target."""
    return deepcopy(_settled_world(target))


@cache
def _settled_world(target: Target) -> World:
    world = nodes.world_at(A, *CONFIGS)
    # What the image has baked in is what a config without the image wants to write.
    baked = Entry("file", 0o644, BAKED_TEXT.encode())
    world.vendor = {A.digest: {"baked.conf": baked}, B.digest: {"app.conf": baked}}
    world.disk.replace_by(world.disk.tree() | {TOP + BAKED: baked})
    node = Node(world)
    node.settle()
    world.request_target(target)
    node.settle()
    assert_at_rest(world, target)
    world.violations.clear()
    return world


class Chaos(OSChaos):
    """Faults between any two calls to the disk as well."""

    def step(self) -> None:
        super().step()
        self._node.world.disk.calls_left = None
        draw = self._random.random()
        if draw < 0.25:
            self._node.world.disk.calls_left = self._random.randrange(60)
            self._node.disk_kills = draw < 0.12

    def uncordon_by_hand(self) -> None:
        # While files are being changed that has them change back in service, as it must.
        if not any(path.startswith(f"{TOP}{UNDO}/") for path in self._node.world.disk.tree()):
            super().uncordon_by_hand()

    def change_target(self) -> None:
        if self._node.world.api_up:
            self.target = self._random.choice(TARGETS)
            self._node.world.request_target(self.target)


def watched(world: World) -> tuple[bytes | None, ...]:
    """The files that must not change on a node in service."""
    return world.file(APP), world.file(BAKED), world.file("/etc/systemd/system/app.service")


@walk_budget.walk
def test_walk_ends_with_all_of_one_config(part: int) -> None:
    for seed in walk_budget.seeds(part):
        world = world_at(STOCK)
        node = Node(world)
        chaos = Chaos(node, seed)
        chaos.target = STOCK
        world.fault_point, world.on_wait = chaos.fault_point, chaos.on_wait
        try:
            for _ in range(80):
                chaos.step()
                before, served = watched(world), world.in_service
                node.turn()
                if served and world.in_service and watched(world) != before:
                    world.violations.append(f"{before} became {watched(world)} in service")
            world.fault_point, world.on_wait = (lambda _: None), (lambda: None)
            world.disk.calls_left = None
            world.api_up, world.loses_answers = True, 0
            node.settle()
            if chaos.target == BROKEN:
                assert world.annotations[key.STATE] == "Degraded"
                reason = world.annotations[key.REASON]
                assert "enable bad.service" in reason or "was cancelled on this node" in reason
                assert world.file(APP) != b"broken"
            if '"quarantined": {' in (world.ledger or ""):
                request_another_and_back(node, STOCK if chaos.target == BROKEN else chaos.target)
                assert_at_rest(world, STOCK if chaos.target == BROKEN else chaos.target)
            else:
                assert_at_rest(world, chaos.target)
        except AssertionError as error:
            raise AssertionError(
                f"seed {seed}: {error}\n{world.annotations}\n{world.ledger}"
            ) from error


@pytest.mark.parametrize("turns", range(1, 6))
def test_cancelled_update_restores_its_files(turns: int) -> None:
    world = world_at(STOCK)
    node = Node(world)
    node.settle()
    boots, before = world.boots, watched(world)
    world.request_target(NEXT)
    for _ in range(turns):
        node.turn()
        world.drain_controller()
    update = recorded(world).update
    assert not explain_too_late(update)
    world.request = UserRequest(RequestKind.CANCEL, update.id)
    node.settle()
    assert (world.boots, watched(world)) == (boots, before)
    assert "was cancelled on this node" in world.annotations[key.REASON]
    world.request = UserRequest(RequestKind.RETRY)
    node.settle()
    assert_at_rest(world, NEXT)


def test_drift_is_repaired_on_request() -> None:
    world = world_at(STOCK)
    tree = dict(world.disk.tree())
    tree |= {TOP + path: tree[TOP + path]._replace(content=b"other") for path in (APP, BAKED)}
    world.disk.replace_by(tree)
    node = Node(world)
    node.turn()
    assert "treenail drift --repair" in world.annotations[key.REASON]
    world.request = UserRequest(RequestKind.REPAIR, paths=(APP,))
    node.turn()
    assert world.request is None
    assert (world.file(APP), world.file(BAKED)) == (b"stock", b"other")
    world.request = UserRequest(RequestKind.REPAIR, paths=("/etc/as-it-should-be",))
    node.turn()
    assert world.request is None
    world.request = UserRequest(RequestKind.REPAIR, paths=(BAKED,))
    node.settle()
    assert_at_rest(world, STOCK)


def test_drift_fixed_by_user_resolves_without_reboot() -> None:
    world = world_at(STOCK)
    node, boots, good = Node(world), world.boots, world.disk.tree()
    world.disk.replace_by(good | {TOP + APP: Entry("file", 0o644, b"changed by another program")})
    node.settle()
    assert world.annotations[key.STATE] == "Degraded"
    assert APP in world.annotations[key.REASON]
    world.disk.replace_by(good)
    node.settle()
    assert_at_rest(world, STOCK)
    assert world.boots == boots


@pytest.mark.parametrize("lost", ["ledger", "record", "both"])
def test_deleted_agent_state_is_recreated_by_next_update(
    lost: str,
) -> None:
    world = world_at(STOCK)
    node = Node(world)
    node.settle()
    if lost != "record":
        world.ledger = None
    if lost != "ledger":
        tree = world.disk.tree()
        assert tree.pop(TOP + OWNERSHIP_FILE).kind == "file"
        world.disk.replace_by(tree)
    node.process = None
    node.settle()
    world.request_target(NEXT)
    node.settle()
    assert_at_rest(world, NEXT)
    assert world.file(OWNERSHIP_FILE) is not None
    assert recorded(world).current == NEXT


WAYS = [(STOCK, NEXT), (NEXT, FREELY), (STOCK, A), (A, STOCK), (A, B), (B, NEXT)]


@pytest.mark.parametrize(("origin", "target"), WAYS)
def test_update_takes_one_reboot_or_none(origin: Target, target: Target) -> None:
    world = world_at(origin)
    boots = world.boots
    world.request_target(target)
    Node(world).settle()
    assert_at_rest(world, target)
    assert world.boots - boots == (0 if target == FREELY else 1)


def test_files_lost_in_etc_merge_are_restored_before_agent_is_ready() -> None:
    world = world_at(A)
    world.request_target(STOCK)
    node = Node(world)
    while world.booted != C.digest:
        world.drain_controller()
        node.turn()
    assert world.file(BAKED) is None, "it was the same in the image's /usr/etc"
    process = Process(world, node.clock)
    process.loop.finish_boot()
    assert world.file(BAKED) == BAKED_TEXT.encode()
    assert process.cluster.get_cached_node() is None, "and the API server was not needed"


def test_boot_into_old_deployment_restores_files_before_agent_is_ready() -> None:
    world = world_at(STOCK)
    world.request_target(B)
    world.finalizes = False
    node = Node(world)
    boots = world.boots
    while world.boots == boots:
        world.drain_controller()
        node.turn()
    assert world.file(APP) is None
    process = Process(world, node.clock)
    process.loop.finish_boot()
    assert world.file(APP) == b"stock"


def test_vendor_file_of_image_is_restored() -> None:
    world = world_at(A)
    ours = Entry("file", 0o644, b"installed with")
    # The machine was installed with a config's file over the vendor's, which has no backup.
    there = world.disk.tree() | {
        TOP + APP: ours,
        TOP + "/usr/etc": Entry("directory", 0o755, b""),
        TOP + "/usr/etc/app.conf": Entry("file", 0o644, b"vendor"),
    }
    world.disk.replace_by(there)
    apply_config(world.disk, read_wanted_state(CONFIGS[2]), STOCK.config)
    kept = {path for path in world.disk.tree() if "/original" in path}
    world.disk.replace_by({p: e for p, e in world.disk.tree().items() if p not in kept})
    apply_config(world.disk, read_wanted_state(CONFIGS[1]), B.config)
    assert world.file(APP) == b"vendor"


def count_effects(origin: Target, target: Target) -> int:
    """Return the number of effects of the update, without those on the disk."""
    steps: list[str] = []
    world = world_at(origin)
    world.request_target(target)
    world.fault_point = steps.append
    Node(world).settle()
    return len(steps)


@pytest.mark.parametrize(("origin", "target"), WAYS)
@pytest.mark.parametrize("fault", [Killed, PowerCut])
@walk_budget.exhaustive
def test_update_survives_interruption_at_any_effect(
    origin: Target, target: Target, fault: type[BaseException]
) -> None:
    for index in walk_budget.sample(range(count_effects(origin, target))):
        world = world_at(origin)
        world.request_target(target)
        left = strike(world, fault, after=index)
        Node(world).settle()
        assert next(left, None) is None, f"effect {index} did not happen"
        try:
            assert_at_rest(world, target)
        except AssertionError as error:
            raise AssertionError(f"{fault.__name__} at effect {index}: {error}") from error


@pytest.mark.parametrize(("origin", "target"), WAYS)
@pytest.mark.parametrize("kills", [True, False], ids=["killed", "power cut"])
@walk_budget.exhaustive
def test_update_survives_end_at_any_disk_call(origin: Target, target: Target, kills: bool) -> None:
    for calls in walk_budget.sample(range(count_disk_calls(origin, target))):
        world = world_at(origin)
        world.request_target(target)
        node = Node(world)
        node.disk_kills = kills
        world.disk.calls_left = calls
        node.settle()
        assert world.disk.calls_left is None, f"disk call {calls} did not happen"
        try:
            assert_at_rest(world, target)
        except AssertionError as error:
            raise AssertionError(f"disk call {calls}: {error}") from error


def count_disk_calls(origin: Target, target: Target) -> int:
    world = world_at(origin)
    world.request_target(target)
    world.disk.calls_left = many = 1_000_000
    Node(world).settle()
    assert_at_rest(world, target)
    return many - world.disk.calls_left


def test_failing_step_is_undone_and_node_stays_in_service() -> None:
    world = world_at(NEXT)
    before = world.disk.tree()
    world.request_target(BROKEN)
    Node(world).settle()
    assert not world.unschedulable
    assert not world.staged
    assert world.annotations[key.STATE] == "Degraded"
    assert "enable bad.service" in world.annotations[key.REASON]
    left = {path for path, _ in before.items() ^ world.disk.tree().items()}
    own = ("/var/lib/treenail/configs", METRICS_FILE)
    assert {path for path in left if not any(each in path for each in own)} == set()
    world.request_target(NEXT)
    Node(world).settle()
    assert_at_rest(world, NEXT)
