"""Every reason for a disruption names who had the last word on what differs."""

from tests.api.configs import ignition, with_files
from treenail.api.disruptionpolicy import DEFAULTS
from treenail.api.machineconfig import MachineConfig
from treenail.api.meta import ObjectMeta
from treenail.config.diff import diff
from treenail.config.provenance import PROVENANCE, Provenance
from treenail.config.wanted import wanted
from treenail.update.impact.disruption import disruption
from treenail.update.impact.explain import Because, Sources

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


def reasons(image_source: str = "") -> list[Because]:
    found = diff(wanted(OLD), wanted(NEW))
    sources = Sources(found, OLD, NEW, image_source=image_source)
    return [
        sources.because(reason)
        for cost in disruption(found, DEFAULTS).costs
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
    assert reasons("annotation desiredImage")[2] == Because(
        "osImageURL changed", "part of the operating system", "annotation desiredImage"
    )


def test_config_without_provenance_names_nobody() -> None:
    old, new = (
        MachineConfig(config=ignition()),
        MachineConfig(config=with_files({"path": "/etc/a"})),
    )
    found = diff(wanted(old), wanted(new))
    (cost,) = disruption(found, DEFAULTS).costs
    assert [Sources(found, old, new).because(each).source for each in cost.reasons] == [""]
