"""Config documents of a NodePool: HyperShift's tables, splitting, bad input, rendering.

The texts are those of HyperShift's TestGenerateMCORawConfig and
TestDefaultAndValidateConfigManifest, without what the control plane adds.
"""

from textwrap import dedent
from typing import Any

import pytest

from treenail.controllers.hosted.config import config_documents
from treenail.controllers.hosted.config.config_documents import PoolDocuments
from treenail.controllers.render import render

Json = dict[str, Any]


def config_map(text: str, key: str = "config") -> Json:
    return {"data": {key: text}}


def read(*texts: str, **maps: Json | None) -> PoolDocuments:
    """Read texts, each in a ConfigMap of its own: map-1, map-2 and so on."""
    numbered = {f"map-{number}": config_map(text) for number, text in enumerate(texts, start=1)}
    return config_documents.read_config_maps({**numbered, **maps}, len(numbered) + len(maps))


WRITTEN = """
apiVersion: machineconfiguration.openshift.io/v1
kind: MachineConfig
metadata:
  labels:
    machineconfiguration.openshift.io/role: master
  name: config-1
spec:
  config:
    ignition:
      version: 3.2.0
    storage:
      files:
      - contents:
        source: "[Service]\\nExecStart=/usr/bin/echo Hello World\\n\\n[Install]\\n"
        filesystem: root
        mode: 493
        path: /usr/local/bin/file1.sh
"""
DEFAULTED = """\
apiVersion: machineconfiguration.openshift.io/v1
kind: MachineConfig
metadata:
  creationTimestamp: null
  labels:
    machineconfiguration.openshift.io/role: worker
  name: config-1
spec:
  baseOSExtensionsContainerImage: ""
  config:
    ignition:
      version: 3.2.0
    storage:
      files:
      - contents: null
        filesystem: root
        mode: 493
        path: /usr/local/bin/file1.sh
        source: |
          [Service]
          ExecStart=/usr/bin/echo Hello World

          [Install]
  extensions: null
  fips: false
  kernelArguments: null
  kernelType: ""
  osImageURL: ""
"""


def machine_config(number: int, text: str = WRITTEN) -> str:
    text = text.replace("World", f"World {number}").replace("file1", f"file{number}")
    return text.replace("config-1", f"config-{number}")


def kubelet_config(name: str, pods: int, *, is_defaulted: bool = False) -> str:
    head = "apiVersion: machineconfiguration.openshift.io/v1\nkind: KubeletConfig\nmetadata:\n"
    spec = f"  name: {name}\nspec:\n  kubeletConfig:\n    maxPods: {pods}\n"
    if not is_defaulted:
        return f"\n{head}{spec}"
    return (
        f"{head}  creationTimestamp: null\n{spec}  machineConfigPoolSelector:\n    matchLabels:\n"
        '      machineconfiguration.openshift.io/mco-built-in: ""\nstatus:\n  conditions: null\n'
    )


PODS_100, PODS_200 = kubelet_config("set-max-pods", 100), kubelet_config("set-max-pods-2", 200)
PODS_DEFAULTED = [
    kubelet_config("set-max-pods", 100, is_defaulted=True),
    kubelet_config("set-max-pods-2", 200, is_defaulted=True),
]
RUNTIME = """\
apiVersion: machineconfiguration.openshift.io/v1
kind: ContainerRuntimeConfig
metadata:
  name: set-pids-limit
spec:
  containerRuntimeConfig:
    logSizeMax: "0"
    overlaySize: "0"
    pidsLimit: 2048
"""
RUNTIME_DEFAULTED = """\
apiVersion: machineconfiguration.openshift.io/v1
kind: ContainerRuntimeConfig
metadata:
  creationTimestamp: null
  name: set-pids-limit
spec:
  containerRuntimeConfig:
    logSizeMax: "0"
    overlaySize: "0"
    pidsLimit: 2048
  machineConfigPoolSelector:
    matchLabels:
      machineconfiguration.openshift.io/mco-built-in: ""
status:
  conditions: null
"""
EMPTY_CONFIG = """\
apiVersion: machineconfiguration.openshift.io/v1
kind: MachineConfig
metadata:
  name: test-config
"""
EMPTY_CONFIG_DEFAULTED = """\
apiVersion: machineconfiguration.openshift.io/v1
kind: MachineConfig
metadata:
  creationTimestamp: null
  labels:
    machineconfiguration.openshift.io/role: worker
  name: test-config
spec:
  baseOSExtensionsContainerImage: ""
  config: null
  extensions: null
  fips: false
  kernelArguments: null
  kernelType: ""
  osImageURL: ""
"""
TWO_CONFIGS = machine_config(2) + "--- # empty yamls should be ignored\n\n---" + machine_config(3)


def defaulted(*numbers: int) -> list[str]:
    return [machine_config(number, DEFAULTED) for number in numbers]


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ([machine_config(1)], defaulted(1)),
        ([machine_config(1), TWO_CONFIGS], defaulted(1, 2, 3)),
        ([TWO_CONFIGS, machine_config(1)], defaulted(1, 2, 3)),
        ([RUNTIME], [RUNTIME_DEFAULTED]),
        ([EMPTY_CONFIG], [EMPTY_CONFIG_DEFAULTED]),
        ([PODS_100], PODS_DEFAULTED[:1]),
        ([PODS_200, PODS_100], PODS_DEFAULTED),
        ([""], []),
    ],
)  # fmt: skip
def test_documents_have_the_texts_of_hypershift(texts: list[str], expected: list[str]) -> None:
    found = read(*texts)
    assert found.problems == ()
    assert found.is_readable
    assert "\n---\n".join(one.text for one in found.documents) == "\n---\n".join(expected)


MIRRORS = """\
apiVersion: config.openshift.io/v1
kind: ImageDigestMirrorSet
metadata: {name: mirrors}
spec:
  imageDigestMirrors:
  - {source: quay.io/a, mirrors: [mirror.example.com/a]}
"""
POLICY = """\
apiVersion: config.openshift.io/v1alpha1
kind: ClusterImagePolicy
metadata:
  name: policy
  annotations: {source: config.openshift.io/v1alpha1}
"""


def test_mirrors_keep_their_text_with_comments_and_the_first_separator() -> None:
    found = read(f"---\n{MIRRORS}---\n# why\n{MIRRORS.replace('mirrors}', 'more}')}")
    assert [one.text for one in found.documents] == [
        "# why\n" + MIRRORS.replace("mirrors}", "more}"),
        "---\n" + MIRRORS,
    ]
    assert [one.location for one in found.documents] == [
        "ConfigMap map-1, document 2",
        "ConfigMap map-1, document 1",
    ]


def test_old_image_policy_becomes_v1_at_its_first_place() -> None:
    (document,) = read(POLICY).documents
    assert document.text == POLICY.replace("/v1alpha1", "/v1", 1)
    assert document.value["apiVersion"] == "config.openshift.io/v1"


@pytest.mark.parametrize(
    ("first", "second", "is_equal"),
    [
        (EMPTY_CONFIG, "# comment\n" + EMPTY_CONFIG, True),
        (EMPTY_CONFIG, EMPTY_CONFIG + "spec: {fips: false, osImageURL: null}\n", True),
        (EMPTY_CONFIG, EMPTY_CONFIG + "spec: {kernelArgs: [quiet]}\n", True),
        (EMPTY_CONFIG, EMPTY_CONFIG + "spec: {kernelArguments: []}\n", False),
        (EMPTY_CONFIG, EMPTY_CONFIG + "spec: {fips: true}\n", False),
        (MIRRORS, "# comment\n" + MIRRORS, False),
        (MIRRORS, MIRRORS.replace("\n", "\r\n"), True),
        (MIRRORS, MIRRORS + "\n", False),
    ],
)
def test_texts_are_equal_when_hypershift_hashes_the_same(
    first: str, second: str, *, is_equal: bool
) -> None:
    texts = [read(text).documents[0].text for text in (first, second)]
    assert (texts[0] == texts[1]) is is_equal


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("unsupported", "ConfigMap map-1, document 1: expected an object at the top"),
        ("invalid: yaml\n  - content\n", "found no kind of apiVersion none; remove the document"),
        ("# nothing\n", "ConfigMap map-1, document 1: expected one document, found 0"),
        (EMPTY_CONFIG + "---more\n", "ConfigMap map-1, document 1, line "),
        (
            EMPTY_CONFIG
            + "---\napiVersion: hypershift.openshift.io/v1beta1\nkind: HostedCluster\n",
            "HostedCluster of apiVersion hypershift.openshift.io/v1beta1; remove the document",
        ),
        (
            "apiVersion: config.openshift.io/v1\nkind: ImageTagMirrorSet\n",
            "ConfigMap map-1, document 1: expected one of MachineConfig, ",
        ),
        (
            "apiVersion: machineconfiguration.openshift.io/v2\nkind: MachineConfig\n",
            "; set apiVersion: machineconfiguration.openshift.io/v1",
        ),
        (EMPTY_CONFIG + "spec: 5\n", "ConfigMap map-1, document 1.spec: expected an object"),
        ("x" * 2 * 1024 * 1024, "ConfigMap map-1: expected at most 1048576 bytes of data, found "),
    ],
)
def test_unreadable_document_is_one_problem_with_its_place(text: str, problem: str) -> None:
    found = read(text)
    assert not found.is_readable
    (actual,) = found.problems
    assert problem in actual
    assert "; " in actual
    assert config_documents.render_documents(found, render.ControllerConfig()).config is None


def test_missing_config_map_and_missing_key_are_problems() -> None:
    found = read(gone=None, other=config_map(EMPTY_CONFIG, "Config"))
    gone, other = found.problems
    assert gone == "ConfigMap gone does not exist; create it, or correct spec.config"
    assert other.startswith("ConfigMap other: expected data.config, found none; write the ")
    assert not found.is_readable
    assert read(other=config_map("", "Config")).is_readable


def test_eleven_config_maps_are_refused() -> None:
    texts = [EMPTY_CONFIG.replace("test-config", f"c-{number}") for number in range(11)]
    assert read(*texts[:10]).is_readable
    found = read(*texts)
    assert not found.is_readable
    assert found.problems[0].startswith("spec.config: expected at most 10 ConfigMaps, found 11; ")


def test_all_kinds_render_to_one_config() -> None:
    config = EMPTY_CONFIG + "spec: {kernelArguments: [quiet]}\n"
    runtime = RUNTIME.replace('overlaySize: "0"', "overlaySize: 8G")
    found = read(config, kubelet_config("pods", 100), runtime, MIRRORS)
    rendered = config_documents.render_documents(found, render.ControllerConfig())
    assert rendered.problems == ()
    assert rendered.config is not None
    assert rendered.config.kernel_arguments == ("quiet",)
    assert rendered.config.config is not None
    assert {file["path"] for file in rendered.config.config["storage"]["files"]} >= {  # type: ignore[index]
        "/etc/kubernetes/kubelet.conf",
        "/etc/crio/crio.conf.d/01-ctrcfg-pidsLimit",
        "/etc/containers/storage.conf",
        "/etc/containers/registries.conf",
    }


@pytest.mark.parametrize(
    ("text", "problem", "is_rendered"),
    [
        (
            EMPTY_CONFIG + "spec: {kernelArgs: [quiet]}\n",
            "ConfigMap map-1, document 1, MachineConfig test-config: spec.kernelArgs: ",
            True,
        ),
        (
            EMPTY_CONFIG + "spec: {kernelType: fast}\n",
            "spec.kernelType: expected one of default, realtime, 64k-pages, found 'fast'; ",
            False,
        ),
        (
            EMPTY_CONFIG + "spec: {config: {ignition: {version: 9.0.0}}}\n",
            "document 1, MachineConfig test-config: spec.config.ignition.version: ",
            False,
        ),
        (
            dedent(kubelet_config("pods", 100)).replace("maxPods: 100", "maxPod: 100"),
            "ConfigMap map-1, document 1, KubeletConfig pods: ",
            False,
        ),
        (EMPTY_CONFIG + "---\n" + EMPTY_CONFIG, "expected a metadata.name that no other", False),
        (
            EMPTY_CONFIG.replace("name: test-config", "labels: {}"),
            "expected a metadata.name",
            False,
        ),
    ],
)
def test_invalid_document_is_a_problem_with_its_place(
    text: str, problem: str, *, is_rendered: bool
) -> None:
    rendered = config_documents.render_documents(read(text), render.ControllerConfig())
    assert problem in rendered.problems[0]
    assert (rendered.config is not None) is is_rendered
