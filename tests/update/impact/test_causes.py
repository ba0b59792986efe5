"""Every reason for a disruption names who had the last word on what differs."""

from tests.api.configs import ignition, with_files
from treenail.api.disruptionpolicy import DEFAULT_POLICY
from treenail.api.machineconfig import MachineConfig
from treenail.api.meta import ObjectMeta
from treenail.config.diff import compare_configs
from treenail.config.provenance import PROVENANCE, Provenance
from treenail.config.wanted import read_wanted_state
from treenail.update.impact.disruption import ConfigSources, DisruptionCause, compute_disruption

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


def reasons(image_source: str = "") -> list[DisruptionCause]:
    found = compare_configs(read_wanted_state(OLD), read_wanted_state(NEW))
    sources = ConfigSources(found, OLD, NEW, image_source=image_source)
    return [
        sources.find_cause(reason)
        for cost in compute_disruption(found, DEFAULT_POLICY).costs
        for reason in cost.reasons
    ]


def test_last_word_is_named_and_what_is_removed_has_the_one_of_the_old_config() -> None:
    assert list(map(str, reasons())) == [
        "file /etc/b removed (no policy for this path), from MachineConfig 00-old",
        "file /etc/a added (no policy for this path), from MachineConfig 99-a",
        "osImageURL changed (part of the operating system)",
        "kernelArguments changed (part of the operating system), from MachineConfig 50-kernel",
    ]


def test_image_that_an_annotation_asks_for_is_from_there() -> None:
    assert reasons("annotation desiredImage")[2] == DisruptionCause(
        "osImageURL changed", "part of the operating system", "annotation desiredImage"
    )


def test_config_without_provenance_names_nobody() -> None:
    old, new = (
        MachineConfig(config=ignition()),
        MachineConfig(config=with_files({"path": "/etc/a"})),
    )
    found = compare_configs(read_wanted_state(old), read_wanted_state(new))
    (cost,) = compute_disruption(found, DEFAULT_POLICY).costs
    assert [ConfigSources(found, old, new).find_cause(each).source for each in cost.reasons] == [""]
