"""A ContainerRuntimeConfig becomes the files of the MCO, or names what no runtime accepts."""

import re
from typing import Any

import pytest

from tests.config.generated import runtime_objects
from treenail.config.generated import container_runtime
from treenail.errors import ConfigError

DROP_IN = "/etc/crio/crio.conf.d/01-ctrcfg-"
STORAGE = "/etc/containers/storage.conf"


def generate(**config: Any) -> dict[str, str]:
    (source,) = runtime_objects.read(runtime_objects.build_runtime(**config))
    container_runtime.check_runtime_config(source)
    base = runtime_objects.build_base()
    files = container_runtime.generate_runtime_files(source, base)
    return {file.path: file.contents for file in files}


def format_drop_in(line: str) -> str:
    return f"[crio]\n  [crio.runtime]\n    {line}\n"


def build_stores(*paths: str) -> list[dict[str, str]]:
    return [{"path": path} for path in paths]


@pytest.mark.parametrize(
    ("config", "name", "line"),
    [
        ({"logLevel": "debug"}, "logLevel", 'log_level = "debug"'),
        ({"pidsLimit": 4096}, "pidsLimit", "pids_limit = 4096"),
        ({"pidsLimit": 0}, "pidsLimit", "pids_limit = 0"),
        ({"pidsLimit": 20}, "pidsLimit", "pids_limit = 20"),
        ({"logSizeMax": "16Ki"}, "logSizeMax", "log_size_max = 16384"),
        ({"logSizeMax": 8193}, "logSizeMax", "log_size_max = 8193"),
        ({"logSizeMax": "8192500m"}, "logSizeMax", "log_size_max = 8193"),
        ({"logSizeMax": "-1"}, "logSizeMax", "log_size_max = -1"),
        ({"defaultRuntime": "runc"}, "defaultRuntime", 'default_runtime = "runc"'),
        (
            {"additionalArtifactStores": build_stores("/a", "/b/c")},
            "additionalArtifactStores",
            'additional_artifact_stores = ["/a", "/b/c"]',
        ),
    ],
)
def test_field_becomes_drop_in(config: dict[str, Any], name: str, line: str) -> None:
    assert generate(**config) == {f"{DROP_IN}{name}": format_drop_in(line)}


@pytest.mark.parametrize(
    "config",
    [{}, {"logLevel": "", "defaultRuntime": ""}, {"logSizeMax": 0, "overlaySize": "0Gi"},
     {"pidsLimit": None}],
)  # fmt: skip
def test_empty_field_becomes_no_file(config: dict[str, Any]) -> None:
    assert generate(**config) == {}


def test_files_have_the_order_of_the_mco() -> None:
    files = generate(
        defaultRuntime="crun", logSizeMax="1M", pidsLimit=100, logLevel="info", overlaySize="8Gi",
        additionalArtifactStores=build_stores("/a"),
    )  # fmt: skip
    assert [path.removeprefix(DROP_IN) for path in files] == [
        STORAGE, "logLevel", "pidsLimit", "logSizeMax", "defaultRuntime",
        "additionalArtifactStores",
    ]  # fmt: skip


def test_storage_conf_keeps_the_known_fields_of_the_base() -> None:
    files = generate(
        overlaySize="8192Mi",
        additionalLayerStores=build_stores("/l"),
        additionalImageStores=build_stores("/i", "/j/"),
    )
    assert files == {
        STORAGE: """\
[storage]
  driver = "overlay"
  runroot = "/run/containers/storage"
  graphroot = "/var/lib/containers/storage"
  [storage.options]
    additionalimagestores = ["/i", "/j/"]
    additionallayerstores = ["/l:ref"]
    size = "8Gi"
    force_mask = 0
    auto-userns-min-size = 0
    auto-userns-max-size = 0
    [storage.options.overlay]
      skip_mount_home = "true"
    [storage.options.pull_options]
      enable_partial_images = "false"
      ostree_repos = ""
      use_hard_links = "false"
"""
    }


@pytest.mark.parametrize(
    ("quantity", "text"),
    [
        ("10Gi", "10Gi"), ("010Ki", "010Ki"), ("8192Mi", "8Gi"), ("5Ei", "5Ei"),
        ("1.5Gi", "1536Mi"), ("1.3Gi", "1395864371200m"), (".5Gi", "512Mi"), ("0.1Ki", "102400m"),
        ("100m", "100m"), ("0.5", "500m"), ("1.G", "1.G"), ("+5G", "+5G"), ("+5000", "5k"),
        ("5000", "5k"), ("5e3", "5e3"), ("1e5", "100e3"), ("1000E3", "1e6"), ("2e0", "2e0"),
        ("1.00005e0", "1000050e-6"), (16384, "16384"), (100000, "100k"), ("1n", "1n"),
        ("0.0000000001", "1n"), ("2000e-3", "2"), ("05Ei", "5Ei"),
    ],
)  # fmt: skip
def test_quantity_has_the_text_of_go(quantity: object, text: str) -> None:
    assert f'\n    size = "{text}"\n' in generate(overlaySize=quantity)[STORAGE]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"pidsLimit": -1}, "pidsLimit: expected 0 or at least 20, found -1"),
        ({"pidsLimit": 19}, "pidsLimit: expected 0 or at least 20, found 19"),
        ({"pidsLimit": "20"}, "pidsLimit: expected an integer"),
        ({"logLevel": "Debug"}, "logLevel: expected one of fatal, .* trace, found 'Debug'"),
        ({"logSizeMax": "8Ki"}, "logSizeMax: expected more than 8192, or -1 .*, found 8Ki"),
        ({"logSizeMax": 1}, "logSizeMax: expected more than 8192, or -1 for no limit, found 1"),
        ({"logSizeMax": "5Zi"}, "logSizeMax: expected a size such as 10Gi, found '5Zi'"),
        ({"overlaySize": "-1"}, "overlaySize: expected a positive size, found -1"),
        ({"overlaySize": True}, "overlaySize: expected a size"),
        ({"overlaySize": "9Ei"}, "overlaySize: expected at most 9223372036854775807 bytes"),
        ({"overlaySize": "1" * 99}, "overlaySize: expected a size"),
        ({"overlaySize": "1e999999999"}, "overlaySize: expected a size"),
        ({"defaultRuntime": "runsc"}, "defaultRuntime: expected crun or runc, found 'runsc'"),
        ({"loglevel": "info"}, "loglevel: unknown field"),
        ({"additionalLayerStores": []}, "additionalLayerStores: expected 1 to 5 different"),
        ({"additionalLayerStores": build_stores(*map("/{}".format, range(6)))}, "expected 1 to 5"),
        ({"additionalImageStores": build_stores("/a", "/a")}, "expected 1 to 10 different"),
        ({"additionalImageStores": build_stores("a")}, r"\[0\].path: expected an absolute path"),
        ({"additionalImageStores": build_stores("/a//b")}, "expected an absolute path"),
        ({"additionalImageStores": build_stores("/a:ref")}, "expected an absolute path"),
        ({"additionalImageStores": build_stores("/" + "a" * 256)}, "expected an absolute path"),
        ({"additionalImageStores": [{"dir": "/a"}]}, r"\[0\].dir: unknown field"),
    ],
)  # fmt: skip
def test_wrong_field_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        generate(**config)
    assert str(caught.value).startswith("spec.containerRuntimeConfig.")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({}, "spec.containerRuntimeConfig: expected an object"),
        ({"containerRuntimeConfig": {}, "poolSelector": {}}, "spec.poolSelector: unknown field"),
    ],
)
def test_wrong_spec_is_refused(spec: dict[str, Any], message: str) -> None:
    document = runtime_objects.build_runtime() | {"spec": spec}
    with pytest.raises(ConfigError, match=re.escape(message)):
        container_runtime.check_runtime_config(*runtime_objects.read(document))


@pytest.mark.parametrize(
    ("base", "message"),
    [
        ({}, "expected it in a MachineConfig of the pool, found none"),
        ({STORAGE: "[storage"}, "expected TOML"),
        ({STORAGE: "storage = 1"}, "storage: expected an object"),
        ({STORAGE: '[storage.options]\nforce_mask = "0700"'}, "force_mask: expected an integer"),
    ],
)
def test_wrong_base_is_refused(base: dict[str, str], message: str) -> None:
    (source,) = runtime_objects.read(runtime_objects.build_runtime(overlaySize="1Gi"))
    with pytest.raises(ConfigError, match=message):
        container_runtime.generate_runtime_files(source, runtime_objects.build_base(base))
