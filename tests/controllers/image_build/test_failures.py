"""Failures of builds: reason, number of attempts, no false success, and recovery.

The registry is a real one with injected faults, and time is virtual. The table of all failures is
in docs/fidelity.md.
"""

import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.controllers.image_build.site import (
    CONTAINERFILE,
    NAMESPACE,
    BuildSite,
    Json,
    Kubelet,
    MovableClock,
    open_site,
)
from tests.fixtures.objects import find_condition
from tests.waiting import wait_until
from treenail.api import annotations as key
from treenail.controllers.image_build.build_objects import decode_report
from treenail.image.build_result import (
    BuildPhase,
    BuildReason,
    BuildResult,
    RetryClass,
    classify_retry,
)
from treenail.kube.resources import (
    CONFIGMAPS,
    JOBS,
    MACHINEOSBUILDS,
    MACHINEOSCONFIGS,
    PODS,
    SECRETS,
)
from treenail.registry.transport import RegistryLimits
from treenail_lab.registry.front import FaultKind, RegistryFault
from treenail_lab.registry.service import PULLER, PUSHER, RegistryService

pytestmark = [pytest.mark.integration]

LIMITS = RegistryLimits(connect_s=1.0, idle_s=0.3, request_s=1.0)
STEP_S = 10.0
STARTED = ("Prepared", "Building")
OTHER = "unrelated"
"""A MachineOSConfig without a pool. Its events make waiting workers read the moved clock."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BuildSite]:
    with (
        RegistryService() as registry,
        open_site(tmp_path_factory.mktemp("site"), registry) as found,
    ):
        found.add_image_config(OTHER)
        yield found


@pytest.fixture
def pool(site: BuildSite, request: pytest.FixtureRequest) -> Iterator[str]:
    """A pool of the test's own. Its MachineOSConfig and all faults are gone afterwards."""
    name = f"pool-{zlib.crc32(request.node.name.encode())}"
    site.add_pool(name)
    yield name
    site.registry.faults.clear()
    found = site.client.list(MACHINEOSCONFIGS).items
    if any(each["metadata"]["name"] == name for each in found):  # type: ignore[index,call-overload]
        site.client.delete(MACHINEOSCONFIGS, name)
    wait_until(lambda: not read_builds(site, name), limit_s=20)


def read_builds(site: BuildSite, pool: str) -> list[Json]:
    return [each for each in site.builds() if each["spec"]["machineOSConfig"]["name"] == pool]


def read_state(site: BuildSite, pool: str) -> tuple[str, str, int]:
    """Type and reason of the true condition of the pool's build, and its failed attempts."""
    found = read_builds(site, pool)
    if not found:
        return "", "", 0
    notes = found[0]["metadata"].get("annotations", {})
    attempts = decode_report(notes.get(key.BUILD_REPORT, "")).attempts
    for kind in ("Prepared", "Building", "Failed", "Succeeded", "Interrupted"):
        status, reason, _ = find_condition(found[0], kind)
        if status == "True":
            return kind, reason, attempts
    return "", "", attempts


def wait_state(site: BuildSite, pool: str, *expected: object) -> None:
    """Wait for a state, and check that no image is served before the build has succeeded."""
    found: list[object] = []

    def look() -> bool:
        found[:] = read_state(site, pool)
        return found == list(expected)

    try:
        wait_until(look, limit_s=30)
    except AssertionError:
        assert found == list(expected), site.condition("Accepted", pool)
    assert site.image(pool) == ""
    assert site.condition("ImageReady", pool)[0] != "True"


def pass_time(
    site: BuildSite, clock: MovableClock, condition: Callable[[], bool], *, step_s: float = STEP_S
) -> float:
    """Move the clock until the condition is true; return the seconds that passed."""
    began = clock.now()

    def step() -> bool:
        if condition():
            return True
        clock.move(step_s)
        note: Json = {"metadata": {"annotations": {"example.com/now": str(clock.now())}}}
        site.client.patch(MACHINEOSCONFIGS, OTHER, note)
        return condition()

    wait_until(step, limit_s=60)
    return clock.now() - began


def is_served(site: BuildSite, pool: str) -> bool:
    return site.image(pool) != "" and read_state(site, pool)[0] == "Succeeded"


def check_recovery(
    site: BuildSite, pool: str, clock: MovableClock, reason: str, end_failure: Callable[[], object]
) -> None:
    """Check that the attempts continue as the reason says, until the failure ends."""
    if classify_retry(BuildReason(reason)) is RetryClass.EXTERNAL:
        wait_state(site, pool, "Building", reason, 1)
        passed_s = pass_time(site, clock, lambda: read_state(site, pool)[2] == 2)
        assert passed_s >= 60.0 - STEP_S
        wait_state(site, pool, "Building", reason, 2)
        end_failure()
        passed_s = pass_time(site, clock, lambda: is_served(site, pool))
        assert passed_s >= 300.0 - STEP_S
        assert len(read_builds(site, pool)) == 1
        return
    wait_state(site, pool, "Failed", reason, 1)
    end_failure()
    end = clock.now() + 7200.0
    pass_time(site, clock, lambda: clock.now() > end, step_s=600.0)
    wait_state(site, pool, "Failed", reason, 1)
    site.request_rebuild(pool)
    wait_until(lambda: is_served(site, pool), limit_s=30)


STATUSES = {
    401: ("BaseLoginRefused", "PushLoginRefused"),
    403: ("BaseLoginRefused", "PushDenied"),
    404: ("BaseNotFound", "PushDenied"),
    413: ("BaseNotFound", "PushDenied"),
    429: ("RegistryBusy", "RegistryBusy"),
    500: ("RegistryBusy", "RegistryBusy"),
    503: ("RegistryBusy", "RegistryBusy"),
}
FULL = "write /var/lib/registry: no space left on device"


def list_faults() -> list[Any]:
    """Each fault with its reason; a few run in each test run, all of them in long ones."""
    often = {"pull-401", "push-403", "push-503", "push-hang"}
    faults = []
    for status, (pull, push) in STATUSES.items():
        fault = RegistryFault(FaultKind.STATUS, times=0, status=status)
        faults += [(f"pull-{status}", pull, fault), (f"push-{status}", push, fault)]
    for kind in (FaultKind.DROP, FaultKind.HANG):
        for phase in ("pull", "push"):
            fault = RegistryFault(kind, times=0)
            faults.append((f"{phase}-{kind}", "RegistryUnreachable", fault))
    full = RegistryFault(FaultKind.STATUS, times=0, status=500, text=FULL)
    wrong = RegistryFault(FaultKind.WRONG_DIGEST, times=0)
    faults += [("push-full", "RegistryFull", full), ("push-wrong", "DigestMismatch", wrong)]
    return [
        pytest.param(each[0], *each[1:], id=each[0], marks=[pytest.mark.long][each[0] in often :])
        for each in faults
    ]


@pytest.mark.parametrize(("name", "reason", "fault"), list_faults())
def test_registry_failure_has_its_reason_and_recovers(
    site: BuildSite, pool: str, name: str, reason: str, fault: RegistryFault
) -> None:
    clock = MovableClock()
    is_pull = name.startswith("pull")
    method = "HEAD" if fault.kind is FaultKind.WRONG_DIGEST else "PUT"
    place = "/os/base/manifests/" if is_pull else f"/os/{pool}/manifests/"
    site.registry.faults.add(replace(fault, method="GET" if is_pull else method, path=place))
    site.add_image_config(pool)
    with site.controller(clock=clock, limits=LIMITS):
        check_recovery(site, pool, clock, reason, site.registry.faults.clear)


@pytest.mark.parametrize(
    ("host", "reason"),
    [
        pytest.param("registry.invalid:5000", "RegistryUnreachable", marks=pytest.mark.long),
        # The bundle has the CA of the registry for its address alone.
        ("localhost", "CertificateUnknown"),
    ],
)
def test_unusable_registry_has_its_reason_until_the_spec_names_another(
    site: BuildSite, pool: str, host: str, reason: str
) -> None:
    port = site.registry.host.rpartition(":")[2]
    host = host if ":" in host else f"{host}:{port}"
    site.put_secret("elsewhere", host=host)
    site.add_image_config(
        pool,
        renderedImagePushSpec=f"{host}/os/{pool}:latest",
        renderedImagePushSecret={"name": "elsewhere"},
    )
    clock = MovableClock()
    is_retried = reason == "RegistryUnreachable"
    with site.controller(clock=clock, limits=LIMITS):
        wait_state(site, pool, "Building" if is_retried else "Failed", reason, 1)
        spec: Json = {
            "renderedImagePushSpec": f"{site.registry.host}/os/{pool}:latest",
            "renderedImagePushSecret": {"name": "push"},
        }
        site.client.patch(MACHINEOSCONFIGS, pool, {"spec": spec})
        site.wait_image(pool)
    states = {each["metadata"]["name"]: find_condition(each, "Succeeded")[0]
              for each in read_builds(site, pool)}  # fmt: skip
    assert sorted(states.values()) == ["False", "True"]


def test_rotated_login_is_used_by_the_next_attempt_without_a_user(
    site: BuildSite, pool: str
) -> None:
    clock = MovableClock()
    old = site.registry.passwords[PUSHER]
    site.registry.rotate_password(PUSHER, "push-password-2")
    site.add_image_config(pool)
    try:
        with site.controller(clock=clock, limits=LIMITS):
            # The Secret "push" has the old password; so has the pull Secret of the cluster.
            wait_until(lambda: read_state(site, pool)[1].endswith("LoginRefused"), limit_s=20)
            reason = read_state(site, pool)[1]

            def rotate() -> None:
                site.put_secret("push")
                site.put_secret("global-pull-secret-copy")

            check_recovery(site, pool, clock, reason, rotate)
    finally:
        site.registry.rotate_password(PUSHER, old)
        site.put_secret("push")
        site.put_secret("global-pull-secret-copy")


@pytest.mark.parametrize(
    ("reason", "text"), [("PushLoginRefused", "refuses"), ("PushDenied", "push")]
)
def test_login_that_cannot_push_is_found_before_any_job(
    site: BuildSite, pool: str, kubelet: "PoolKubelet", reason: str, text: str
) -> None:
    clock = MovableClock()
    if reason == "PushDenied":
        site.put_secret("other", PULLER)
    else:
        old = site.registry.passwords[PUSHER]
        site.registry.passwords[PUSHER] = "wrong"
        site.put_secret("other")
        site.registry.passwords[PUSHER] = old
    site.add_image_config(
        pool,
        f"{CONTAINERFILE}LABEL pool={pool}\n",
        renderedImagePushSecret={"name": "other"},
    )
    is_retried = classify_retry(BuildReason(reason)) is RetryClass.EXTERNAL
    with site.controller(clock=clock, limits=LIMITS):
        wait_state(site, pool, "Building" if is_retried else "Failed", reason, 1)
        assert text in site.build_state(read_builds(site, pool)[0]["metadata"]["name"])[2]
        assert kubelet.jobs() == []
        site.put_secret("other")
        if is_retried:
            pass_time(site, clock, lambda: kubelet.has_job("-2"))
        else:
            site.request_rebuild(pool)
        kubelet.kubelet.succeed(kubelet.next_pod())
        wait_until(lambda: is_served(site, pool), limit_s=30)
    assert len(kubelet.pods) == 1


# Failures of Jobs


class PoolKubelet:
    """Runs the pods of one pool, and counts them."""

    def __init__(self, site: BuildSite, pool: str) -> None:
        self._site, self._pool = site, pool
        self.kubelet = Kubelet(site)
        self.pods: list[str] = []

    def next_pod(self) -> Json:
        """Wait for a pod that was not returned before."""
        found: list[Json] = []

        def look() -> bool:
            found[:] = [
                each for each in self._find_pods() if each["metadata"]["uid"] not in self.pods
            ]
            return bool(found)

        wait_until(look, limit_s=30)
        self.pods.append(found[0]["metadata"]["uid"])
        return found[0]

    def has_job(self, suffix: str) -> bool:
        return any(each.endswith(suffix) for each in self.jobs())

    def wait_end(self) -> None:
        """Wait until the controller has ended a Job that would replace its failed pod."""
        wait_until(lambda: not self.jobs() and not self._find_pods(), limit_s=20)

    def _find_pods(self) -> list[Json]:
        return [
            each
            for each in self.kubelet.find_pods()
            if each["metadata"]["labels"].get(key.IMAGE_CONFIG) == self._pool
        ]

    def jobs(self) -> list[str]:
        return [
            each["metadata"]["name"]
            for each in self._site.jobs()
            if each["metadata"]["labels"][key.IMAGE_CONFIG] == self._pool
        ]


@pytest.fixture
def kubelet(site: BuildSite, pool: str) -> PoolKubelet:
    return PoolKubelet(site, pool)


def request_build(site: BuildSite, pool: str) -> None:
    """Request an image with a Job of its own: no other pool has its key."""
    site.add_image_config(pool, f"{CONTAINERFILE}LABEL pool={pool}\n")


REPORTS = {
    "bad-text": (BuildPhase.BUILD, "ContainerfileInvalid", 1),
    "run-fails": (BuildPhase.BUILD, "InstructionFailed", 1),
    "run-fills-the-disk": (BuildPhase.BUILD, "DiskFull", 4),
    "base-missing": (BuildPhase.FETCH, "BaseNotFound", 1),
    "registry-full": (BuildPhase.PUSH, "RegistryFull", 4),
}


@pytest.mark.parametrize(
    "name",
    [
        "run-fails",
        *(pytest.param(each, marks=pytest.mark.long) for each in REPORTS if each != "run-fails"),
    ],
)
def test_reported_failure_of_a_job_has_its_reason_and_recovers(
    site: BuildSite, pool: str, kubelet: PoolKubelet, name: str
) -> None:
    phase, reason, pods = REPORTS[name]
    clock = MovableClock()
    result = BuildResult(phase, reason=BuildReason(reason), message="it failed")
    request_build(site, pool)
    with site.controller(clock=clock):
        for _ in range(pods):
            kubelet.kubelet.fail(kubelet.next_pod(), result)
        is_external = classify_retry(BuildReason(reason)) is RetryClass.EXTERNAL
        wait_state(site, pool, "Building" if is_external else "Failed", reason, 1)
        if is_external:
            pass_time(site, clock, lambda: kubelet.has_job("-2"))
        else:
            assert len(kubelet.jobs()) == 1
            site.request_rebuild(pool)
        kubelet.kubelet.succeed(kubelet.next_pod())
        wait_until(lambda: is_served(site, pool), limit_s=30)
    assert len(kubelet.pods) == pods + 1
    assert key.REBUILD not in site.image_config(pool)["metadata"]["annotations"]
    assert read_state(site, pool)[2] == (1 if is_external else 0)


def end_container(site: BuildSite, pod: Json, reason: str, code: int) -> None:
    """Report as a kubelet that the container ``build`` ended without a result."""
    ended = {"exitCode": code, "reason": reason, "startedAt": None, "finishedAt": None}
    container = {
        "name": "build", "image": "builder", "imageID": "", "ready": False, "restartCount": 0,
        "state": {"terminated": {name: value for name, value in ended.items() if value}},
    }  # fmt: skip
    status: Json = {"status": {"phase": "Failed", "initContainerStatuses": [container]}}
    name = pod["metadata"]["name"]
    site.client.patch(PODS, name, status, namespace=NAMESPACE, subresource="status")


def test_out_of_memory_is_retried_once(site: BuildSite, pool: str, kubelet: PoolKubelet) -> None:
    clock = MovableClock()
    request_build(site, pool)
    with site.controller(clock=clock):
        end_container(site, kubelet.next_pod(), "OOMKilled", 137)
        wait_state(site, pool, "Building", "OutOfMemory", 1)
        kubelet.wait_end()
        pass_time(site, clock, lambda: kubelet.has_job("-2"))
        end_container(site, kubelet.next_pod(), "OOMKilled", 137)
        wait_state(site, pool, "Failed", "OutOfMemory", 2)
        kubelet.wait_end()
        site.request_rebuild(pool)
        kubelet.kubelet.succeed(kubelet.next_pod())
        wait_until(lambda: is_served(site, pool), limit_s=30)


def test_deadline_is_retried_once(site: BuildSite, pool: str, kubelet: PoolKubelet) -> None:
    clock = MovableClock()
    request_build(site, pool)

    # The shortest deadline that the annotation allows is a minute.
    def hurry(job: Json) -> None:
        job["spec"]["activeDeadlineSeconds"] = 1

    with site.controller(edit_job=hurry, clock=clock):
        kubelet.next_pod()
        # On a busy machine the second attempt may end before the first one is seen.
        wait_until(lambda: read_state(site, pool)[1] == "DeadlineExceeded", limit_s=30)
        pass_time(site, clock, lambda: read_state(site, pool)[2] == 2)
        wait_state(site, pool, "Failed", "DeadlineExceeded", 2)


def test_job_without_a_failure_policy_ends_at_the_first_user_error(
    site: BuildSite, pool: str, kubelet: PoolKubelet
) -> None:
    request_build(site, pool)
    result = BuildResult(BuildPhase.BUILD, reason=BuildReason.INSTRUCTION_FAILED, message="no")

    with site.controller(edit_job=lambda job: job["spec"].pop("podFailurePolicy")):
        kubelet.kubelet.fail(kubelet.next_pod(), result)
        wait_state(site, pool, "Failed", "InstructionFailed", 1)
        kubelet.wait_end()


def test_deleted_job_cancels_the_build_until_a_rebuild(
    site: BuildSite, pool: str, kubelet: PoolKubelet
) -> None:
    clock = MovableClock()
    request_build(site, pool)
    with site.controller(clock=clock):
        kubelet.next_pod()
        wait_until(lambda: read_state(site, pool)[0] in STARTED, limit_s=20)
        (job,) = kubelet.jobs()
        site.client.delete(JOBS, job, namespace=NAMESPACE, propagation="Background")
        wait_state(site, pool, "Interrupted", "Cancelled", 0)
        end = clock.now() + 7200.0
        pass_time(site, clock, lambda: clock.now() > end, step_s=600.0)
        assert kubelet.jobs() == []
        site.request_rebuild(pool)
        kubelet.kubelet.succeed(kubelet.next_pod())
        wait_until(lambda: is_served(site, pool), limit_s=30)


def test_deleted_config_leaves_no_build_job_or_login(
    site: BuildSite, pool: str, kubelet: PoolKubelet
) -> None:
    request_build(site, pool)
    with site.controller():
        kubelet.next_pod()
        wait_until(lambda: read_state(site, pool)[0] in STARTED, limit_s=20)
        site.client.delete(MACHINEOSCONFIGS, pool)

        def list_left() -> list[str]:
            params = {"labelSelector": f"{key.IMAGE_CONFIG}={pool}"}
            found = [
                *site.client.list(MACHINEOSBUILDS, params=params).items,
                *(
                    each
                    for resource in (JOBS, PODS, SECRETS, CONFIGMAPS)
                    for each in site.client.list(resource, namespace=NAMESPACE, params=params).items
                ),
            ]
            return [str(each["metadata"]) for each in found]

        wait_until(lambda: not list_left(), limit_s=30)


def test_wrong_digest_is_retried_until_the_registry_has_the_image(
    site: BuildSite, pool: str, kubelet: PoolKubelet
) -> None:
    clock = MovableClock()
    request_build(site, pool)
    with site.controller(clock=clock):
        kubelet.kubelet.succeed(kubelet.next_pod(), digest=f"sha256:{'5' * 64}")
        wait_state(site, pool, "Building", "DigestMismatch", 1)
        pass_time(site, clock, lambda: kubelet.has_job("-2"))
        kubelet.kubelet.succeed(kubelet.next_pod())
        wait_until(lambda: is_served(site, pool), limit_s=30)


def test_evicted_pods_are_replaced_and_count_no_attempt(
    site: BuildSite, pool: str, kubelet: PoolKubelet
) -> None:
    request_build(site, pool)
    with site.controller():
        for _ in range(2):
            kubelet.kubelet.evict(kubelet.next_pod())
        kubelet.kubelet.succeed(kubelet.next_pod())
        wait_until(lambda: is_served(site, pool), limit_s=30)
    assert read_state(site, pool)[2] == 0
    assert len(kubelet.pods) == 3
