"""Views of objects that several controllers watch; clusters may lack their kinds."""

from treenail.api import machineosbuild, machineosconfig
from treenail.controllers.pools import rollout_policy
from treenail.controllers.runtime import informer_set
from treenail.kube import resources, watch


def add_build_views(
    informers: informer_set.InformerSet,
) -> tuple[
    informer_set.InformerView[machineosconfig.MachineOSConfig],
    informer_set.InformerView[machineosbuild.MachineOSBuild],
]:
    """Watch the MachineOSConfigs and the MachineOSBuilds."""
    configs = informers.add_view(
        watch.WatchScope(resources.MACHINEOSCONFIGS),
        machineosconfig.MachineOSConfig.from_json,
        optional=True,
    )
    builds = informers.add_view(
        watch.WatchScope(resources.MACHINEOSBUILDS),
        machineosbuild.MachineOSBuild.from_json,
        optional=True,
    )
    return configs, builds


def add_policy_view(
    informers: informer_set.InformerSet,
) -> informer_set.InformerView[rollout_policy.ObservedPolicy]:
    """Watch the RolloutPolicies."""
    return informers.add_view(
        watch.WatchScope(resources.ROLLOUTPOLICIES),
        rollout_policy.ObservedPolicy.from_json,
        optional=True,
    )
