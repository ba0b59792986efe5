"""Documents of users and of the cluster's API."""

import base64
import gzip
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from tests import oracle
from tests.api import test_ignition, test_ignition2, test_machineconfig
from tests.controllers import test_fuzz
from tests.fuzz.target import FuzzTarget, Grammar
from tests.fuzz.targets.objects import CONTROLLER_CONFIG, IMAGE_CONFIG
from treenail.api import documents
from treenail.api.decode import Fields, load_json
from treenail.api.ignition.checks import check_document, check_unit_syntax
from treenail.api.ignition.model import Contents
from treenail.api.ignition.parser import VERSIONS, parse_ignition
from treenail.api.machineconfig import MachineConfig
from treenail.config.diff import compare_configs
from treenail.config.drift_comparison import compute_expected_entries
from treenail.config.ignition.emit import VERSIONS_SERVED, emit_ignition
from treenail.config.ignition.withhold import withhold_secrets
from treenail.config.image_mirrors import is_safe_change
from treenail.config.merge import DefaultImages, merge_machine_configs
from treenail.config.pullsecret import encode_pull_secret, parse_pull_secret, read_login_secret
from treenail.config.redact import redact_json, redact_text
from treenail.config.trust_anchors import find_certificates
from treenail.config.validation import find_ignored_fields, validate_config
from treenail.config.wanted_state import read_wanted_state
from treenail.controllers.render import render
from treenail.encoding import yaml11
from treenail.encoding.yaml11 import find_positions
from treenail.errors import ConfigError, IgnitionError
from treenail.image.build_result import BuildResult
from treenail.image.containerfile import (
    expand_variables,
    find_containerfile_problems,
    parse_containerfile,
)
from treenail.installer.directory import install_config, install_files

Json = dict[str, Any]
_LONG_NUMBER = re.compile("[0-9]{18}")
_DIGEST = "sha256:" + "1" * 64


def _encode(document: object) -> bytes:
    return json.dumps(document).encode()


def _parse(content: bytes) -> object:
    return load_json(content, where="input")


def read_machine_config(content: bytes) -> Iterable[str]:
    """Read, render, compare and write a MachineConfig, as controllers and agent do."""
    config = MachineConfig.from_json(documents.load_document(content, where="input"))
    written = config.to_json()
    assert MachineConfig.from_json(written) == config
    validate_config(config)
    ignored = [str(each) for each in find_ignored_fields(config)]
    merge_machine_configs([config, config], DefaultImages("os", "ext"))
    wanted = read_wanted_state(config)
    assert compare_configs(wanted, wanted).is_empty
    compute_expected_entries(wanted)
    json.dumps(redact_json(written)).encode()
    return ignored


def read_ignition(content: bytes) -> Iterable[str]:
    """Read an Ignition config, check it as a document, and write it in each version."""
    document = _parse(content)
    config = parse_ignition(document)
    again = parse_ignition(config.to_json())
    assert again.to_json() == config.to_json()
    for file in config.files:
        for each in (file.contents, *file.append):
            _ignore_refusal(each)
    for version in VERSIONS_SERVED:
        try:
            emitted = emit_ignition(config, version)
        except ConfigError:
            continue
        json.dumps(withhold_secrets(emitted)).encode()
    check_document(Fields.from_json(document, "spec.config"), config)
    return ()


def _ignore_refusal(contents: Contents) -> None:
    try:
        contents.decode_bytes()
    except IgnitionError:
        return


def read_contents(content: bytes) -> Iterable[str]:
    """Decode the contents of one file: the URL, the compression and the digest."""
    fields = Fields.from_json(_parse(content), "contents", IgnitionError)
    Contents.from_fields(fields).decode_bytes()
    return ()


def read_gzip(content: bytes) -> Iterable[str]:
    """Decompress bytes that a data URL carries."""
    url = "data:;base64," + base64.b64encode(content).decode()
    Contents(url, "gzip").decode_bytes()
    return ()


def read_data_url(content: bytes) -> Iterable[str]:
    """Decode a data URL."""
    Contents("data:" + content.decode("utf-8", "replace")).decode_bytes()
    return ()


def read_yaml(content: bytes) -> Iterable[str]:
    """Read YAML, find the lines of its fields, and write it again."""
    found = documents.load_located_documents(content, where="input")
    text = documents.decode_text(content, "input")
    for _, document in found:
        written = documents.dump_document(document)
        # YAML has integers of 64 bits, and JSON's are not limited.
        again = documents.load_documents(written, where="written")
        assert again == [document] or _LONG_NUMBER.search(text), written
    if len(found) == 1:
        positions = find_positions(text, where="input")
        assert all(positions.find_line(key) >= 0 for key in found[0][1])
    return ()


def read_manifests(content: bytes) -> Iterable[str]:
    """Read files of all kinds, and render their pools."""
    found = render.read_manifests([("input", content)])
    rendered, errors = render.render_pools(found)
    for each in rendered:
        json.dumps(each.config.to_json()).encode()
    return [*found.warnings, *map(str, errors)]


def read_containerfile(content: bytes) -> Iterable[str]:
    """Read a Containerfile."""
    text = content.decode("utf-8", "surrogateescape")
    found = parse_containerfile(text)
    lines = [line for each in found.instructions for line in (each.line, each.end_line)]
    assert lines == sorted(lines)
    for each in found.instructions:
        expand_variables(each.operands, {"A": "b"})
    return [str(each) for each in find_containerfile_problems(text)]


def read_pull_secret(content: bytes) -> Iterable[str]:
    """Read a pull secret, and a Secret that has it."""
    secret = parse_pull_secret(content, where="input")
    assert parse_pull_secret(encode_pull_secret(secret), where="written") == secret
    data = {".dockerconfigjson": base64.b64encode(content).decode()}
    read_login_secret({"type": "kubernetes.io/dockerconfigjson", "data": data}, where="Secret")
    return ()


def read_login_object(content: bytes) -> Iterable[str]:
    """Read a Secret with logins."""
    read_login_secret(_parse(content), where="Secret")
    return ()


def read_install_config(content: bytes) -> Iterable[str]:
    """Read install-config.yaml, and treenail's own file."""
    for name in ("install-config.yaml", install_files.OWN_INSTALL_CONFIG):
        found = install_config.parse_install_config(content, name)
        yield from (str(each) for each in found.problems)


def read_node_file(content: bytes) -> Iterable[str]:
    """Read contents of files that are compared or shown: registries.conf, units, certificates."""
    is_safe_change(content, content + b"\n")
    find_certificates(content)
    text = content.decode("utf-8", "replace")
    redact_text(text)
    check_unit_syntax(text, "input")
    return ()


def read_build_result(content: bytes) -> Iterable[str]:
    """Read the termination message of a build's pod."""
    result = BuildResult.from_text(content)
    assert BuildResult.from_text(result.to_text()) is not None
    return [str(result.exit_code), result.message]


def read_scalar(content: bytes) -> Iterable[str]:
    """Read one unquoted scalar of YAML."""
    yaml11.resolve_scalar(content.decode("utf-8", "replace"))
    return ()


def _list_ignition() -> Iterator[bytes]:
    yield _encode(test_ignition.FULL)
    yield _encode(test_ignition2.FULL if hasattr(test_ignition2, "FULL") else {})
    for version in VERSIONS:
        yield _encode({**test_ignition.FULL, "ignition": {"version": version}})
        yield _encode({"ignition": {"version": version}})
    for record in oracle.records("parse_convert")[:200]:
        for value in record.values():
            if isinstance(value, dict):
                yield _encode(value)
            elif isinstance(value, str) and value.startswith("{"):
                yield value.encode("utf-8", "replace")


def _list_machine_configs() -> Iterator[bytes]:
    yield _encode(test_machineconfig.FULL)
    yield _encode(test_fuzz.MACHINE_CONFIG)
    for path in oracle.rendered():
        if path.stat().st_size < 20_000:
            yield path.read_bytes()
    for ignition in _list_ignition():
        yield b'{"spec": {"config": %s}}' % ignition


def _list_contents() -> Iterator[bytes]:
    packed = base64.b64encode(gzip.compress(b"a\n" * 20)).decode()
    for more in ({}, {"compression": "gzip"}, {"verification": {"hash": f"sha256-{'0' * 64}"}}):
        for url in (
            f"data:;base64,{packed}",
            "data:,a%20b",
            'data:text/plain;a="b\\"";base64,YQ==',
        ):
            yield _encode({"source": url, **more})
    yield _encode({"source": "https://a/b", "httpHeaders": [{"name": "a", "value": "b"}]})


def _list_urls() -> Iterator[bytes]:
    yield b",a%20b"
    yield b";base64,YWJj"
    yield b'text/plain;charset="a\\"b";base64,YQ=='
    yield b";" + b'a="' * 400


def _list_gzip() -> Iterator[bytes]:
    one = gzip.compress(b"hello\n" * 10)
    yield one
    yield one + one
    yield gzip.compress(b"\0" * 5_000_000)


def _list_yaml() -> Iterator[bytes]:
    yield from (b"a: 1\nb: [x, {y: z}]\n", b"a: &x {b: 1}\nc: *x\nd: {<<: *x, e: 0x1F}\n")
    yield b"---\na: |\n  x\n  y\n---\nb: !!str 1\nc: 2020-01-01\nd: 1:20\ne: 1e3\nf: 0o17\n"
    yield b"a: &a [1,1,1,1]\nb: &b [*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b]\nd: [*c,*c,*c,*c]\n"
    for line in (oracle.DATA / "goyaml.jsonl").read_text("utf-8").splitlines()[:40]:
        for value in json.loads(line).values():
            yield value.encode("utf-8", "replace") if isinstance(value, str) else _encode(value)
    for path in sorted((oracle.ROOT / "bootstrap").rglob("*.yaml")):
        if path.stat().st_size < 4000:
            yield path.read_bytes()


def _list_manifests() -> Iterator[bytes]:
    items = [test_fuzz.POOL, test_fuzz.MACHINE_CONFIG]
    policy = {"kind": "RolloutPolicy", "metadata": {"name": "careful"}, "spec": test_fuzz.POLICY}
    valid: Json = json.loads(_encode(test_fuzz.MACHINE_CONFIG))
    valid["spec"]["config"]["storage"].pop("raid")
    valid["spec"]["config"]["storage"].pop("luks")
    yield _encode({"kind": "List", "items": [test_fuzz.POOL, valid]})
    yield _encode({"kind": "List", "items": items})
    yield _encode(
        {
            "kind": "List",
            "items": [test_fuzz.POOL, valid, policy, IMAGE_CONFIG, CONTROLLER_CONFIG],
        }
    )


def _list_containerfiles() -> Iterator[bytes]:
    path = oracle.DATA / "containerfiles.jsonl"
    for line in path.read_text("utf-8").splitlines()[:300]:
        yield json.loads(line)["text"].encode("utf-8", "surrogatepass")
    yield b"# escape=`\nARG A=b\nFROM --platform=$A r.example.com/a AS x\nFROM configs AS final\n"
    yield b'FROM configs AS final\nCOPY --from=x a b\nENV a=b c="d e"\nRUN <<-EOF\n\tx\n\tEOF\n'


def _list_pull_secrets() -> Iterator[bytes]:
    auth = base64.b64encode(b"user:password").decode()
    yield _encode({"auths": {"r.example.com": {"auth": auth}, "q/a/b": {"identitytoken": "x"}}})
    yield _encode({"auths": {"https://r.example.com/v1/": {"username": "u", "password": "p"}}})


def _list_login_secrets() -> Iterator[bytes]:
    for content in _list_pull_secrets():
        data = base64.b64encode(content).decode()
        yield _encode(
            {"type": "kubernetes.io/dockerconfigjson", "data": {".dockerconfigjson": data}}
        )
        auths = base64.b64encode(_encode(json.loads(content)["auths"])).decode()
        yield _encode({"type": "kubernetes.io/dockercfg", "data": {".dockercfg": auths}})


def _list_install_configs() -> Iterator[bytes]:
    yield (
        b"baseDomain: example.com\ncontrolPlane: {name: master, architecture: amd64}\n"
        b"compute:\n- {name: worker, architecture: arm64}\npullSecret: '{\"auths\": {}}'\n"
        b"imageMode:\n  enabled: true\n  registry: {type: bootstrap}\n  workers: wait\n  pools:\n"
        b"  - name: master\n    renderedImagePushSpec: r.example.com/os/master:latest\n"
        b"    containerFile: Containerfile.master\n"
    )
    yield b"imageMode: {enabled: true, pools: [{name: worker}]}\npullSecret: ''\n"


def _list_node_files() -> Iterator[bytes]:
    yield b'unqualified-search-registries = ["a"]\n[[registry]]\nprefix = ""\nlocation = "q/t"\n'
    yield b"[Unit]\nDescription=a\n[Service]\nExecStart=/bin/true \\\n  x\nEnvironment=PASSWORD=x\n"
    yield b"-----BEGIN CERTIFICATE-----\nYWJj\n-----END CERTIFICATE-----\n"
    yield b'password: x\n  "token": "abc"\nAuthorization: Bearer abc\nhttps://u:p@h/x?y=z\n'


def _list_results() -> Iterator[bytes]:
    yield b'{"phase":"push","digest":"%s","seconds":{"a":1}}' % _DIGEST.encode()
    yield b'{"phase":"build","reason":"BuildFailed","line":3,"message":"x\\u001b"}'


def _list_scalars() -> Iterator[bytes]:
    yield from (b"0x1f", b"0b11", b"-0o7", b"1_000", b"1e3", b".5", b"+.inf", b"017", b"1:20", b"_")


TARGETS = (
    FuzzTarget("machineconfig", read_machine_config, _list_machine_configs, Grammar.YAML),
    FuzzTarget("ignition", read_ignition, _list_ignition, Grammar.JSON),
    FuzzTarget("contents", read_contents, _list_contents, Grammar.JSON),
    FuzzTarget("data-url", read_data_url, _list_urls),
    FuzzTarget("gzip", read_gzip, _list_gzip, max_bytes=16384),
    FuzzTarget("yaml", read_yaml, _list_yaml, Grammar.YAML),
    FuzzTarget("yaml-text", read_yaml, _list_yaml, Grammar.LINES),
    FuzzTarget("yaml-scalar", read_scalar, _list_scalars, max_bytes=100),
    FuzzTarget("manifests", read_manifests, _list_manifests, Grammar.YAML, max_bytes=8192),
    FuzzTarget("containerfile", read_containerfile, _list_containerfiles, Grammar.LINES),
    FuzzTarget("pull-secret", read_pull_secret, _list_pull_secrets, Grammar.JSON),
    FuzzTarget("login-secret", read_login_object, _list_login_secrets, Grammar.JSON),
    FuzzTarget("install-config", read_install_config, _list_install_configs, Grammar.YAML),
    FuzzTarget("node-file", read_node_file, _list_node_files, Grammar.LINES),
    FuzzTarget("build-result", read_build_result, _list_results, Grammar.JSON),
)
