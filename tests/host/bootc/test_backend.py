"""The back end for bootc on a machine in memory: which deployments it drops by their index."""

from pathlib import Path

import pytest

from tests.fakes.bootc_host import bootc_of
from tests.fakes.clock import FakeClock
from tests.fakes.world import System, World
from tests.update.build import A, B, C
from treenail.deployment_change import DeploymentChange
from treenail.host.ostree.deployments import TransactionProgress, TransactionVerdict


def go_on(_progress: TransactionProgress) -> TransactionVerdict:
    return TransactionVerdict.CONTINUE


@pytest.mark.parametrize(("others", "is_dropped"), [((), True), ((System(C.digest),), False)])
def test_former_deployment_is_dropped_only_where_its_index_is_known(
    tmp_path: Path, *, others: tuple[System, ...], is_dropped: bool
) -> None:
    former = System(B.digest, serial=7)
    world = World(booted=A.digest, previous=former, others=others, unschedulable=True)
    world.annotations["machineconfiguration.openshift.io/lastAppliedDrain"] = "drain-x"
    bootc = bootc_of(world, FakeClock(), str(tmp_path))
    bootc.stage_deployment(DeploymentChange(image=B.image), watch=go_on)
    bootc.finalize_staged(B.digest)
    assert world.staged == B.digest
    assert (world.previous is None) is is_dropped
    assert world.violations == []
