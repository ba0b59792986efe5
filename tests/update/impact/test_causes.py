"""The causes of a disruption: the MachineConfig that decided each difference."""

from tests.api.configs import ignition, with_files
from treenail.api.disruptionpolicy import DEFAULT_POLICY
from treenail.api.machineconfig import MachineConfig
from treenail.api.object_meta import ObjectMeta
from treenail.config.diff import compare_configs
from treenail.config.provenance import PROVENANCE, Provenance
from treenail.config.wanted_state import read_wanted_state
from treenail.update.impact.impact import ConfigSources, DisruptionReason, compute_disruption

OLD = MachineConfig(
    metadata=ObjectMeta(
        annotations={PROVENANCE: Provenance({("files", "/etc/b"): ("00-old",)}).to_text()}
    ),
    config=with_files({"path": "/etc/b"}),
)
NEW = MachineConfig(
    metadata=ObjectMeta(
        annotations={
            PROVENANCE: Provenance(
                {
                    ("files", "/etc/a"): ("00-worker", "99-a"),
                    ("kernelArguments", "quiet"): ("50-kernel",),
                }
            ).to_text()
        }
    ),
    config=with_files({"path": "/etc/a"}),
    kernel_arguments=("quiet",),
    os_image_url="quay.example/os@sha256:" + "0" * 64,
)


def find_causes(image_source: str = "") -> list[DisruptionReason]:
    diff = compare_configs(read_wanted_state(OLD), read_wanted_state(NEW))
    sources = ConfigSources(diff, OLD, NEW, image_source=image_source)
    return [
        sources.find_cause(reason)
        for cost in compute_disruption(diff, DEFAULT_POLICY).costs
        for reason in cost.reasons
    ]


def test_cause_is_the_last_config_or_for_removed_entries_the_old_one() -> None:
    assert list(map(str, find_causes())) == [
        "file /etc/b removed (no policy for this path), from MachineConfig 00-old",
        "file /etc/a added (no policy for this path), from MachineConfig 99-a",
        "osImageURL changed (part of the operating system)",
        "kernelArguments changed (part of the operating system), from MachineConfig 50-kernel",
    ]


def test_cause_of_image_in_an_annotation_is_the_annotation() -> None:
    assert find_causes("annotation desiredImage")[2] == DisruptionReason(
        "osImageURL changed", "part of the operating system", "annotation desiredImage"
    )


def test_cause_without_provenance_has_no_source() -> None:
    old, new = (
        MachineConfig(config=ignition()),
        MachineConfig(config=with_files({"path": "/etc/a"})),
    )
    diff = compare_configs(read_wanted_state(old), read_wanted_state(new))
    (cost,) = compute_disruption(diff, DEFAULT_POLICY).costs
    assert [ConfigSources(diff, old, new).find_cause(each).source for each in cost.reasons] == [""]
