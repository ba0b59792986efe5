"""The change of the operating system from the configs and the booted system."""

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.update.build import DIGEST_A, DIGEST_B, A, B
from treenail import deployment_change
from treenail.config.diff import OSAspect
from treenail.config.wanted_state import WantedOS, list_required_packages
from treenail.deployment_change import NO_CHANGE, DeploymentChange
from treenail.errors import ConfigError, UnreconcilableError
from treenail.update.impact.os_change import (
    DeploymentState,
    check_kernel_type,
    compute_os_change,
    describe_kept_arguments,
    is_in_effect,
    list_aspects,
)

STOCK = ("kernel", "kernel-core", "kernel-modules", "kernel-modules-core", "kernel-modules-extra")
EXTENSIONS = f"quay.io/extensions@{DIGEST_A}"
WORDS = st.lists(st.sampled_from(["a", "b=1", "b=2", "c"]), max_size=5)
RT = ("kernel-rt-core", "kernel-rt-modules", "kernel-rt-modules-extra")


def test_image_of_a_booted_manifest_list_is_no_change() -> None:
    listed = DeploymentState(DIGEST_A, booted_list_digest=DIGEST_B)
    image = f"registry.example.com/os/node@{DIGEST_B}"
    assert compute_os_change(WantedOS(), WantedOS(), listed, image=image) == NO_CHANGE
    assert is_in_effect(DeploymentChange(image=image), listed)
    assert not is_in_effect(DeploymentChange(image=image), DeploymentState(DIGEST_A))


def test_kernel_type_of_another_architecture_is_refused() -> None:
    for kernel_type in ("default", "realtime", "64k-pages"):
        check_kernel_type(WantedOS(kernel_type=kernel_type), "arm64")
    check_kernel_type(WantedOS(kernel_type="realtime"), "amd64")
    with pytest.raises(UnreconcilableError) as caught:
        check_kernel_type(WantedOS(kernel_type="64k-pages"), "amd64")
    assert str(caught.value) == (
        "cannot use kernelType 64k-pages: it exists for arm64 only, and this machine is amd64"
    )
    assert "kernelType default" in caught.value.remedy


def running(*arguments: str, packages: tuple[str, ...] = (), removed: tuple[str, ...] = ()):
    return DeploymentState(DIGEST_A, ("root=x", "ostree=/x", *arguments), packages, removed)


def arguments(*names: str) -> WantedOS:
    return WantedOS(kernel_arguments=names)


@pytest.mark.parametrize(
    ("old", "new", "now", "change"),
    [
        pytest.param((), (), running(), NO_CHANGE, id="nothing"),
        pytest.param(
            (), ("a", "b=1"), running(), DeploymentChange(append_kargs=("a", "b=1")), id="new"
        ),
        pytest.param(
            ("a",), ("a", "b"), running("a"), DeploymentChange(append_kargs=("b",)), id="one more"
        ),
        pytest.param(
            ("a", "b"),
            ("a",),
            running("a", "b"),
            DeploymentChange(delete_kargs=("b",)),
            id="one less",
        ),
        pytest.param(
            ("a", "b"),
            ("b", "a"),
            running("a", "b"),
            DeploymentChange(append_kargs=("b", "a"), delete_kargs=("a", "b")),
            id="another order",
        ),
        pytest.param(
            ("a",), ("a",), running(), DeploymentChange(append_kargs=("a",)), id="removed by a user"
        ),
        pytest.param((), ("a",), running("a"), NO_CHANGE, id="booted already"),
        pytest.param(("a", "b"), ("b",), running("b"), NO_CHANGE, id="removed already"),
        pytest.param(
            ("a",), (), replace(running("a"), machine_arguments={"a": 1}), NO_CHANGE, id="known"
        ),
        pytest.param(
            (),
            ("console=tty0", "console=ttyS0"),
            running("console=ttyS0"),
            DeploymentChange(
                append_kargs=("console=tty0", "console=ttyS0"), keep_kargs=("console=ttyS0",)
            ),
            id="order beside an argument of the host",
        ),
    ],
)
def test_change_of_kernel_arguments_appends_and_deletes(
    old: tuple[str, ...], new: tuple[str, ...], now: DeploymentState, change: DeploymentChange
) -> None:
    assert compute_os_change(arguments(*old), arguments(*new), now, image="") == change


def test_argument_that_leaves_the_config_and_not_the_machine_is_described() -> None:
    old, new = arguments("a", "b", "token=canary"), arguments("b")
    now = replace(running("a", "b"), machine_arguments={"a": 1})
    (note,) = describe_kept_arguments(old, new, now)
    assert note == (
        "keeping the kernel argument a: the machine may have had it before the config; if it did "
        "not, remove it: rpm-ostree kargs --delete=a"
    )
    secret = replace(running("token=canary"), machine_arguments={"token=canary": 1})
    assert "canary" not in "".join(describe_kept_arguments(old, new, secret))


def test_change_of_kernel_type_and_extensions_is_in_packages() -> None:
    wanted = WantedOS(kernel_type="realtime", extensions=frozenset({"usbguard"}))
    change = compute_os_change(WantedOS(), wanted, running(), image="")
    assert change == DeploymentChange(install_packages=(*RT, "usbguard"), override_remove=STOCK)
    layered = running(packages=change.install_packages, removed=change.override_remove)
    assert is_in_effect(change, layered)
    assert compute_os_change(WantedOS(), wanted, layered, image="") == NO_CHANGE
    back = compute_os_change(wanted, WantedOS(), layered, image="")
    assert back == DeploymentChange(uninstall_packages=(*RT, "usbguard"), override_reset=STOCK)
    assert is_in_effect(back, running())


@pytest.mark.parametrize(
    ("old", "new", "now", "is_named"),
    [
        ("", "realtime", running(), True),
        ("realtime", "realtime", running(packages=(*RT, "usbguard"), removed=STOCK), False),
        ("realtime", "", running(packages=(*RT, "usbguard"), removed=STOCK), True),
    ],
    ids=["layered", "booted already", "one goes, one stays"],
)
def test_change_of_packages_names_the_extensions_image(
    old: str, new: str, now: DeploymentState, *, is_named: bool
) -> None:
    def wanted(kernel: str) -> WantedOS:
        usbguard = frozenset({"usbguard"})
        return WantedOS(kernel_type=kernel, extensions=usbguard, extensions_image=B.image)

    change = compute_os_change(wanted(old), wanted(new), now, image="")
    assert change.extensions_image == (B.image if is_named else "")


def test_change_of_image_names_the_extensions_image_for_layered_packages() -> None:
    wanted = WantedOS(
        image=B.image, extensions=frozenset({"usbguard"}), extensions_image=EXTENSIONS
    )
    change = compute_os_change(WantedOS(), wanted, running(packages=("usbguard",)), image="")
    assert change == DeploymentChange(image=B.image, extensions_image=EXTENSIONS)
    assert list_aspects(change) == (OSAspect.IMAGE,)


@pytest.mark.parametrize("image", ["", B.image])
def test_change_without_packages_omits_the_extensions_image(image: str) -> None:
    unpinned = WantedOS(extensions_image="quay.io/extensions:latest", kernel_arguments=("a",))
    assert compute_os_change(WantedOS(), unpinned, running(), image=image).extensions_image == ""


def test_extensions_image_by_tag_is_refused() -> None:
    wanted = WantedOS(
        extensions=frozenset({"usbguard"}), extensions_image="quay.io/extensions:latest"
    )
    with pytest.raises(ConfigError, match=r"baseOSExtensionsContainerImage .*it names a tag"):
        compute_os_change(WantedOS(), wanted, running(), image="")


def test_extension_of_an_earlier_release_is_complete_until_the_next_image() -> None:
    ipsec = WantedOS(image=A.image, extensions=frozenset({"ipsec"}))
    earlier = running(packages=("NetworkManager-libreswan", "libreswan"))
    assert compute_os_change(ipsec, ipsec, earlier, image="") == NO_CHANGE
    assert list_required_packages(ipsec) == set(earlier.packages)
    newer = WantedOS(image=B.image, extensions=frozenset({"ipsec"}))
    assert compute_os_change(ipsec, newer, earlier, image="") == DeploymentChange(
        image=B.image, install_packages=("openvswitch3.5-ipsec",)
    )
    assert len(compute_os_change(WantedOS(), ipsec, running(), image="").install_packages) == 3


def test_packages_layered_by_a_user_stay() -> None:
    layered = running(packages=("strace",), removed=("nano",))
    assert compute_os_change(WantedOS(), WantedOS(), layered, image="") == NO_CHANGE


def test_image_beside_the_config_replaces_layered_packages() -> None:
    wanted = WantedOS(image=A.image, extensions=frozenset({"usbguard"}))
    layered = running(packages=("usbguard",))
    change = compute_os_change(wanted, wanted, layered, image=B.image)
    assert change == DeploymentChange(image=B.image, uninstall_packages=("usbguard",))


def test_booted_digest_under_another_name_is_no_change() -> None:
    mirrored = WantedOS(image=f"mirror.example.com/x@{DIGEST_A}")
    assert compute_os_change(WantedOS(), mirrored, running(), image="") == NO_CHANGE


def test_image_by_tag_is_refused() -> None:
    with pytest.raises(ConfigError, match="osImageURL"):
        compute_os_change(WantedOS(), WantedOS(image="quay.io/os:latest"), running(), image="")


# The machine has an argument of the config behind the one that the old config added.
@example(old=["a"], new=["b=1", "a"], booted=["a", "b=1"])
@given(old=WORDS, new=WORDS, booted=WORDS)
def test_staged_arguments_are_in_effect_after_boot(
    old: list[str], new: list[str], booted: list[str]
) -> None:
    now = running(*booted)
    change = compute_os_change(arguments(*old), arguments(*new), now, image="")
    after = replace(
        now,
        kernel_arguments=deployment_change.apply_edit(now.kernel_arguments, change),
    )
    assert is_in_effect(change, after)
    assert change.is_empty or not is_in_effect(change, now)
    assert deployment_change.are_effective(new, after.kernel_arguments)
    assert compute_os_change(arguments(*new), arguments(*new), after, image="") == NO_CHANGE
