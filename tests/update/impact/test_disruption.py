"""The disruption of a difference: the least actions, in a fixed order, each once."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.api.configs import configs, ignition, with_files, with_units, with_users
from tests.api.fuzzing import fuzz
from treenail.api.disruptionpolicy import (
    DEFAULT_POLICY,
    DaemonReloadPolicyAction,
    DisruptionPolicy,
    DrainPolicyAction,
    FileDisruptionPolicy,
    NonePolicyAction,
    PolicyAction,
    RebootPolicyAction,
    ReloadPolicyAction,
    RestartPolicyAction,
    UnitDisruptionPolicy,
)
from treenail.api.machineconfig import MachineConfig
from treenail.config.diff import ConfigDiff, compare_configs
from treenail.config.wanted_state import read_wanted_state
from treenail.update.impact.impact import (
    ConfigDisruption,
    DisruptionCost,
    DisruptionLevel,
    DisruptionReason,
    compute_disruption,
)

CRIO = "crio.service"
POLICY = "/etc/containers/policy.json"
PULL_SECRET = "/var/lib/kubelet/config.json"
REGISTRIES = "/etc/containers/registries.conf"
USER_CA = "/etc/pki/ca-trust/source/anchors/openshift-config-user-ca-bundle.crt"
TRUST = "coreos-update-ca-trust.service"


def config(document: object = None, **spec: object) -> MachineConfig:
    return MachineConfig(config=document, **spec)


def between(old: MachineConfig, new: MachineConfig) -> ConfigDiff:
    return compare_configs(read_wanted_state(old), read_wanted_state(new))


def files(*paths: str) -> ConfigDiff:
    return between(config(), config(with_files(*({"path": path} for path in paths))))


def actions(
    difference: ConfigDiff, policy: DisruptionPolicy = DEFAULT_POLICY
) -> list[PolicyAction]:
    return [cost.action for cost in compute_disruption(difference, policy).costs]


def by_path(*policies: tuple[str, tuple[PolicyAction, ...]]) -> DisruptionPolicy:
    return DisruptionPolicy(files=tuple(FileDisruptionPolicy(*entry) for entry in policies))


def test_no_difference_disrupts_nothing() -> None:
    assert compute_disruption(ConfigDiff(), DEFAULT_POLICY) == ConfigDisruption()
    assert ConfigDisruption().level is DisruptionLevel.NONE
    assert not ConfigDisruption().needs_drain


def test_each_action_names_all_its_reasons() -> None:
    assert compute_disruption(
        files(POLICY, "/etc/crio/policies/a.json", PULL_SECRET), DEFAULT_POLICY
    ) == (
        ConfigDisruption(
            costs=(
                DisruptionCost(
                    ReloadPolicyAction(CRIO),
                    (
                        DisruptionReason(f"file {POLICY} added", f"policy for {POLICY}"),
                        DisruptionReason(
                            "file /etc/crio/policies/a.json added", "policy for /etc/crio/policies"
                        ),
                    ),
                ),
            ),
            harmless=(DisruptionReason(f"file {PULL_SECRET} added", f"policy for {PULL_SECRET}"),),
        )
    )


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        ([PULL_SECRET], []),
        (["/etc/nmstate/openshift/a/b.yml"], []),
        ([POLICY], [ReloadPolicyAction(CRIO)]),
        ([USER_CA], [RestartPolicyAction(TRUST), RestartPolicyAction(CRIO)]),
        ([USER_CA, POLICY], [RestartPolicyAction(TRUST), RestartPolicyAction(CRIO)]),
        ([POLICY, USER_CA], [RestartPolicyAction(TRUST), RestartPolicyAction(CRIO)]),
        ([REGISTRIES, PULL_SECRET], [ReloadPolicyAction(CRIO), DrainPolicyAction()]),
        (["/etc/motd"], [RebootPolicyAction()]),
        ([POLICY, "/etc/motd", USER_CA], [RebootPolicyAction()]),
        (["/etc/containers/registries.d"], [ReloadPolicyAction(CRIO)]),
        (["/etc/containers/registries.dd/a"], [RebootPolicyAction()]),
        (
            [
                "/etc/systemd/system/kubelet.service.d/40-kubelet-crio-image-credential-provider.conf"
            ],
            [DaemonReloadPolicyAction(), RestartPolicyAction("kubelet.service")],
        ),
    ],
)
def test_files_need_the_actions_of_the_default_policy(
    paths: list[str], expected: list[PolicyAction]
) -> None:
    assert sorted(actions(files(*paths)), key=str) == sorted(expected, key=str)
    assert [
        cost.level for cost in compute_disruption(files(*paths), DEFAULT_POLICY).costs
    ] == sorted(cost.level for cost in compute_disruption(files(*paths), DEFAULT_POLICY).costs)


def test_closest_path_of_the_policy_decides() -> None:
    policy = by_path(
        ("/etc/mco/f1", (RestartPolicyAction("a.service"),)),
        ("/etc/mco/f1/f2", (RestartPolicyAction("b.service"),)),
        ("/etc/mco/f1/f2/f3", (RestartPolicyAction("c.service"),)),
    )
    assert actions(files("/etc/mco/f1/f2/x"), policy) == [RestartPolicyAction("b.service")]
    assert actions(files("/etc/mco/f1/f2/f3"), policy) == [RestartPolicyAction("c.service")]
    assert actions(files("/etc/mco/f1/test"), policy) == [RestartPolicyAction("a.service")]
    assert actions(files("/etc/mco/f10"), policy) == [RebootPolicyAction()]
    assert actions(files("/etc/mco"), policy) == [RebootPolicyAction()]


def test_actions_are_ordered_and_unique() -> None:
    policy = by_path(
        (
            "/a",
            (
                DrainPolicyAction(),
                RestartPolicyAction("z.service"),
                ReloadPolicyAction("b.service"),
            ),
        ),
        (
            "/b",
            (
                RestartPolicyAction("a.service"),
                DaemonReloadPolicyAction(),
                ReloadPolicyAction("c.service"),
            ),
        ),
        (
            "/c",
            (
                ReloadPolicyAction("b.service"),
                ReloadPolicyAction("z.service"),
                DaemonReloadPolicyAction(),
            ),
        ),
    )
    assert actions(files("/c", "/b", "/a"), policy) == [
        DaemonReloadPolicyAction(),
        ReloadPolicyAction("b.service"),
        ReloadPolicyAction("c.service"),
        RestartPolicyAction("a.service"),
        RestartPolicyAction("z.service"),
        DrainPolicyAction(),
    ]


def test_reboot_replaces_all_other_actions() -> None:
    disruption = compute_disruption(files("/etc/motd", POLICY, PULL_SECRET), DEFAULT_POLICY)
    assert disruption.costs == (
        DisruptionCost(
            RebootPolicyAction(),
            (DisruptionReason("file /etc/motd added", "no policy for this path"),),
        ),
    )
    assert disruption.needs_reboot
    assert disruption.needs_drain
    assert [reason.subject for reason in disruption.harmless] == [f"file {PULL_SECRET} added"]


def test_unit_without_a_policy_needs_a_reboot() -> None:
    difference = between(config(), config(with_units({"name": "a.service", "contents": "x"})))
    assert actions(difference) == [RebootPolicyAction()]
    policy = DisruptionPolicy(
        units=(UnitDisruptionPolicy("a.service", (RestartPolicyAction("a.service"),)),)
    )
    assert compute_disruption(difference, policy).costs == (
        DisruptionCost(
            RestartPolicyAction("a.service"),
            (DisruptionReason("unit a.service added", "policy for a.service"),),
        ),
    )


def test_keys_and_password_need_the_actions_for_keys() -> None:
    difference = between(config(), config(with_users({"name": "core", "passwordHash": "canary"})))
    disruption = compute_disruption(difference, DEFAULT_POLICY)
    assert disruption == ConfigDisruption(
        harmless=(DisruptionReason("keys or password of core added", "policy for sshkey"),)
    )
    assert actions(difference, DisruptionPolicy(ssh_key_actions=(RebootPolicyAction(),))) == [
        RebootPolicyAction()
    ]
    assert "canary" not in repr(disruption)


@pytest.mark.parametrize(
    ("spec", "costs"),
    [
        ({"os_image_url": "r/os@sha256:2"}, [RebootPolicyAction()]),
        ({"kernel_arguments": ("a",)}, [RebootPolicyAction()]),
        ({"kernel_type": "realtime"}, [RebootPolicyAction()]),
        ({"extensions": ("ipsec",)}, [RebootPolicyAction()]),
        ({"fips": True}, [RebootPolicyAction()]),
        ({"extensions_image": "r/ext@sha256:2"}, []),
    ],
)
def test_operating_system_needs_a_reboot(
    spec: dict[str, object], costs: list[PolicyAction]
) -> None:
    assert actions(between(config(), config(**spec))) == costs


def registries(old: str | None, new: str | None) -> list[PolicyAction]:
    def document(text: str | None) -> MachineConfig:
        source = {"source": "data:," + (text or "").replace("\n", "%0A").replace(" ", "%20")}
        entry = {"path": REGISTRIES, "contents": source}
        return config(ignition() if text is None else with_files(entry))

    return actions(between(document(old), document(new)))


def test_unsafe_change_of_registries_needs_a_drain() -> None:
    assert registries("a = 1\n", "a = 2\n") == [ReloadPolicyAction(CRIO)]
    assert registries("a = 1\n", "broken\n") == [ReloadPolicyAction(CRIO), DrainPolicyAction()]
    assert registries("a = 1\n", None) == [ReloadPolicyAction(CRIO), DrainPolicyAction()]
    assert registries(None, "a = 1\n") == [ReloadPolicyAction(CRIO), DrainPolicyAction()]


def test_policy_without_actions_disrupts_nothing() -> None:
    policy = DEFAULT_POLICY.override_with(by_path(("/etc/motd", (NonePolicyAction(),))))
    assert compute_disruption(files("/etc/motd"), policy).level is DisruptionLevel.NONE


policies = st.lists(
    st.builds(
        FileDisruptionPolicy,
        st.sampled_from(["/a", "/b", "/c", "/a/b"]),
        st.lists(
            st.sampled_from(
                [
                    DaemonReloadPolicyAction(),
                    ReloadPolicyAction("a.service"),
                    RestartPolicyAction("a.service"),
                    RestartPolicyAction("b.service"),
                    DrainPolicyAction(),
                ]
            ),
            min_size=1,
        ).map(tuple),
    ),
    unique_by=lambda policy: policy.path,
).map(lambda found: DisruptionPolicy(files=tuple(found)))


@fuzz
@given(configs(), configs(), policies, st.randoms(use_true_random=False))
def test_disruption_depends_only_on_the_difference(
    old: dict[str, object], new: dict[str, object], policy: DisruptionPolicy, chance: random.Random
) -> None:
    disruption = compute_disruption(between(config(old), config(new)), policy)
    chance.shuffle(new["storage"]["files"])
    chance.shuffle(new["systemd"]["units"])
    again = compute_disruption(between(config(old), config(new)), policy)
    assert [cost.action for cost in disruption.costs] == [cost.action for cost in again.costs]
    assert [cost.level for cost in disruption.costs] == sorted(
        cost.level for cost in disruption.costs
    )
    assert len({cost.action for cost in disruption.costs}) == len(disruption.costs)
    assert (
        disruption.needs_reboot
        == (disruption.level is DisruptionLevel.REBOOT)
        == (RebootPolicyAction() in [c.action for c in disruption.costs])
    )
    if between(config(old), config(new)).is_empty:
        assert disruption == ConfigDisruption()
