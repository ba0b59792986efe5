"""A difference costs the least that brings it into effect, in a fixed order, once."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.api.configs import configs, ignition, with_files, with_units, with_users
from tests.api.fuzzing import fuzz
from treenail.api.disruptionpolicy import (
    DEFAULTS,
    Action,
    DaemonReload,
    DisruptionPolicy,
    Drain,
    FilePolicy,
    Nothing,
    Reboot,
    Reload,
    Restart,
    UnitPolicy,
)
from treenail.api.machineconfig import MachineConfig
from treenail.config.diff import Diff, diff
from treenail.config.wanted import wanted
from treenail.update.impact.disruption import Cost, Disruption, Level, Reason, disruption

CRIO = "crio.service"
POLICY = "/etc/containers/policy.json"
PULL_SECRET = "/var/lib/kubelet/config.json"
REGISTRIES = "/etc/containers/registries.conf"
USER_CA = "/etc/pki/ca-trust/source/anchors/openshift-config-user-ca-bundle.crt"
TRUST = "coreos-update-ca-trust.service"


def config(document: object = None, **spec: object) -> MachineConfig:
    return MachineConfig(config=document, **spec)


def between(old: MachineConfig, new: MachineConfig) -> Diff:
    return diff(wanted(old), wanted(new))


def files(*paths: str) -> Diff:
    return between(config(), config(with_files(*({"path": path} for path in paths))))


def actions(difference: Diff, policy: DisruptionPolicy = DEFAULTS) -> list[Action]:
    return [cost.action for cost in disruption(difference, policy).costs]


def by_path(*policies: tuple[str, tuple[Action, ...]]) -> DisruptionPolicy:
    return DisruptionPolicy(files=tuple(FilePolicy(*entry) for entry in policies))


def test_no_difference_costs_nothing() -> None:
    assert disruption(Diff(), DEFAULTS) == Disruption()
    assert Disruption().level is Level.NONE
    assert not Disruption().drains


def test_each_action_names_everything_that_asks_for_it() -> None:
    assert disruption(files(POLICY, "/etc/crio/policies/a.json", PULL_SECRET), DEFAULTS) == (
        Disruption(
            costs=(
                Cost(
                    Reload(CRIO),
                    (
                        Reason(f"file {POLICY} added", f"policy for {POLICY}"),
                        Reason(
                            "file /etc/crio/policies/a.json added", "policy for /etc/crio/policies"
                        ),
                    ),
                ),
            ),
            free=(Reason(f"file {PULL_SECRET} added", f"policy for {PULL_SECRET}"),),
        )
    )


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        ([PULL_SECRET], []),
        (["/etc/nmstate/openshift/a/b.yml"], []),
        ([POLICY], [Reload(CRIO)]),
        ([USER_CA], [Restart(TRUST), Restart(CRIO)]),
        ([USER_CA, POLICY], [Restart(TRUST), Restart(CRIO)]),
        ([POLICY, USER_CA], [Restart(TRUST), Restart(CRIO)]),
        ([REGISTRIES, PULL_SECRET], [Reload(CRIO), Drain()]),
        (["/etc/motd"], [Reboot()]),
        ([POLICY, "/etc/motd", USER_CA], [Reboot()]),
        (["/etc/containers/registries.d"], [Reload(CRIO)]),
        (["/etc/containers/registries.dd/a"], [Reboot()]),
        (
            [
                "/etc/systemd/system/kubelet.service.d/40-kubelet-crio-image-credential-provider.conf"
            ],
            [DaemonReload(), Restart("kubelet.service")],
        ),
    ],
)
def test_files_cost_what_the_defaults_say(paths: list[str], expected: list[Action]) -> None:
    assert sorted(actions(files(*paths)), key=str) == sorted(expected, key=str)
    assert [cost.level for cost in disruption(files(*paths), DEFAULTS).costs] == sorted(
        cost.level for cost in disruption(files(*paths), DEFAULTS).costs
    )


def test_the_closest_path_decides() -> None:
    policy = by_path(
        ("/etc/mco/f1", (Restart("a.service"),)),
        ("/etc/mco/f1/f2", (Restart("b.service"),)),
        ("/etc/mco/f1/f2/f3", (Restart("c.service"),)),
    )
    assert actions(files("/etc/mco/f1/f2/x"), policy) == [Restart("b.service")]
    assert actions(files("/etc/mco/f1/f2/f3"), policy) == [Restart("c.service")]
    assert actions(files("/etc/mco/f1/test"), policy) == [Restart("a.service")]
    assert actions(files("/etc/mco/f10"), policy) == [Reboot()]
    assert actions(files("/etc/mco"), policy) == [Reboot()]


def test_actions_come_in_order_and_once() -> None:
    policy = by_path(
        ("/a", (Drain(), Restart("z.service"), Reload("b.service"))),
        ("/b", (Restart("a.service"), DaemonReload(), Reload("c.service"))),
        ("/c", (Reload("b.service"), Reload("z.service"), DaemonReload())),
    )
    assert actions(files("/c", "/b", "/a"), policy) == [
        DaemonReload(),
        Reload("b.service"),
        Reload("c.service"),
        Restart("a.service"),
        Restart("z.service"),
        Drain(),
    ]


def test_a_reboot_leaves_nothing_else_to_do() -> None:
    found = disruption(files("/etc/motd", POLICY, PULL_SECRET), DEFAULTS)
    assert found.costs == (
        Cost(Reboot(), (Reason("file /etc/motd added", "no policy for this path"),)),
    )
    assert found.reboots
    assert found.drains
    assert [reason.subject for reason in found.free] == [f"file {PULL_SECRET} added"]


def test_units_cost_a_reboot_unless_a_policy_is_for_their_name() -> None:
    difference = between(config(), config(with_units({"name": "a.service", "contents": "x"})))
    assert actions(difference) == [Reboot()]
    policy = DisruptionPolicy(units=(UnitPolicy("a.service", (Restart("a.service"),)),))
    assert disruption(difference, policy).costs == (
        Cost(Restart("a.service"), (Reason("unit a.service added", "policy for a.service"),)),
    )


def test_keys_and_password_cost_what_the_policy_for_keys_says() -> None:
    difference = between(config(), config(with_users({"name": "core", "passwordHash": "canary"})))
    found = disruption(difference, DEFAULTS)
    assert found == Disruption(
        free=(Reason("keys or password of core added", "policy for sshkey"),)
    )
    assert actions(difference, DisruptionPolicy(logins=(Reboot(),))) == [Reboot()]
    assert "canary" not in repr(found)


@pytest.mark.parametrize(
    ("spec", "costs"),
    [
        ({"os_image_url": "r/os@sha256:2"}, [Reboot()]),
        ({"kernel_arguments": ("a",)}, [Reboot()]),
        ({"kernel_type": "realtime"}, [Reboot()]),
        ({"extensions": ("ipsec",)}, [Reboot()]),
        ({"fips": True}, [Reboot()]),
        ({"extensions_image": "r/ext@sha256:2"}, []),
    ],
)
def test_the_operating_system_costs_a_reboot(spec: dict[str, object], costs: list[Action]) -> None:
    assert actions(between(config(), config(**spec))) == costs


def registries(old: str | None, new: str | None) -> list[Action]:
    def document(text: str | None) -> MachineConfig:
        source = {"source": "data:," + (text or "").replace("\n", "%0A").replace(" ", "%20")}
        entry = {"path": REGISTRIES, "contents": source}
        return config(ignition() if text is None else with_files(entry))

    return actions(between(document(old), document(new)))


def test_registries_are_read_again_and_drained_for_when_it_matters() -> None:
    assert registries("a = 1\n", "a = 2\n") == [Reload(CRIO)]
    assert registries("a = 1\n", "broken\n") == [Reload(CRIO), Drain()]
    assert registries("a = 1\n", None) == [Reload(CRIO), Drain()]
    assert registries(None, "a = 1\n") == [Reload(CRIO), Drain()]


def test_a_policy_of_nothing_frees_a_path() -> None:
    policy = DEFAULTS.overridden_by(by_path(("/etc/motd", (Nothing(),))))
    assert disruption(files("/etc/motd"), policy).level is Level.NONE


policies = st.lists(
    st.builds(
        FilePolicy,
        st.sampled_from(["/a", "/b", "/c", "/a/b"]),
        st.lists(
            st.sampled_from(
                [
                    DaemonReload(),
                    Reload("a.service"),
                    Restart("a.service"),
                    Restart("b.service"),
                    Drain(),
                ]
            ),
            min_size=1,
        ).map(tuple),
    ),
    unique_by=lambda policy: policy.path,
).map(lambda found: DisruptionPolicy(files=tuple(found)))


@fuzz
@given(configs(), configs(), policies, st.randoms(use_true_random=False))
def test_the_cost_depends_on_nothing_but_the_difference(
    old: dict[str, object], new: dict[str, object], policy: DisruptionPolicy, chance: random.Random
) -> None:
    found = disruption(between(config(old), config(new)), policy)
    chance.shuffle(new["storage"]["files"])
    chance.shuffle(new["systemd"]["units"])
    again = disruption(between(config(old), config(new)), policy)
    assert [cost.action for cost in found.costs] == [cost.action for cost in again.costs]
    assert [cost.level for cost in found.costs] == sorted(cost.level for cost in found.costs)
    assert len({cost.action for cost in found.costs}) == len(found.costs)
    assert (
        found.reboots
        == (found.level is Level.REBOOT)
        == (Reboot() in [c.action for c in found.costs])
    )
    if between(config(old), config(new)).empty:
        assert found == Disruption()
