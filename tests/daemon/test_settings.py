import logging
from pathlib import Path

import pytest

from treenail.daemon.agent_settings import (
    AgentSettings,
    BackendSetting,
    DrainMode,
    DriftSettings,
    FirstBootSettings,
    HealthSettings,
    ImageFiles,
    LimitSettings,
    PartialSettings,
    PreflightSettings,
    RebootMode,
    load_settings,
    merge_settings,
    parse_settings,
)
from treenail.errors import UsageError
from treenail.update.checks.preflight_reason import PreflightReason
from treenail.update.drift.drift_policy import DriftReaction
from treenail.update.state.boot_trial import HealthCheckMode

DEFAULTS = AgentSettings(
    kubeconfig="/var/lib/kubelet/kubeconfig",
    node_name="",
    root="/",
    pull_secret="/var/lib/kubelet/config.json",
    internal_pull_secret="/etc/mco/internal-registry-pull-secret.json",
    drain=DrainMode.REQUEST,
    image_files=ImageFiles.BAKED,
    backend=BackendSetting.AUTO,
    reboot=RebootMode.FULL,
    log_level=logging.INFO,
    limits=LimitSettings(
        stage_s=3600,
        stall_s=600,
        drain_s=3600,
        call_s=30,
        retry_first_s=5,
        retry_max_s=300,
        resync_s=60,
    ),
)
EVERYTHING = b"""
kubeconfig = "/etc/kubeconfig"
node_name = "other"
root = "/rootfs"
pull_secret = "/etc/pull.json"
internal_pull_secret = "/etc/internal.json"
drain = "never"
image_files = "write"
backend = "bootc"
reboot = "auto"
log_level = "debug"

[limits]
stage_s = 7200
stall_s = 1
drain_s = 60
call_s = 0.5
retry_first_s = 2
retry_max_s = 86400
resync_s = 10

[health]
mode = "report"
deadline_s = 300
settle_s = 0.1
failing_s = 30
ready_s = 60
outage_s = 600
check_s = 5
interval_s = 1

[preflight]
registry_s = 20
only_warn = ["OtherUpdateDriver", "NoSpaceOnBoot"]

[drift]
default = "report"
repairs_per_hour = 5
full_check_s = 60

[drift.paths]
"/etc/motd" = "repair"
"/etc/systemd/system/*" = "block"
"""
IMAGE = "registry.example.com/os/node@sha256:" + "a" * 64
EVERYTHING += f"""
[firstboot]
image = "{IMAGE}"
""".encode()


def test_defaults_hold_without_file_and_arguments():
    assert merge_settings(PartialSettings(), PartialSettings()) == DEFAULTS


def test_file_with_all_settings_is_parsed():
    assert merge_settings(
        parse_settings(EVERYTHING, where="f"), PartialSettings()
    ) == AgentSettings(
        kubeconfig="/etc/kubeconfig",
        node_name="other",
        root="/rootfs",
        pull_secret="/etc/pull.json",
        internal_pull_secret="/etc/internal.json",
        drain=DrainMode.NEVER,
        image_files=ImageFiles.WRITE,
        backend=BackendSetting.BOOTC,
        reboot=RebootMode.AUTO,
        log_level=logging.DEBUG,
        limits=LimitSettings(
            stage_s=7200,
            stall_s=1,
            drain_s=60,
            call_s=0.5,
            retry_first_s=2,
            retry_max_s=86400,
            resync_s=10,
        ),
        health=HealthSettings(
            mode=HealthCheckMode.REPORT,
            deadline_s=300,
            settle_s=0.1,
            failing_s=30,
            ready_s=60,
            outage_s=600,
            check_s=5,
            interval_s=1,
        ),
        preflight=PreflightSettings(
            registry_s=20,
            only_warn=frozenset(
                {PreflightReason.OTHER_UPDATE_DRIVER, PreflightReason.NO_SPACE_ON_BOOT}
            ),
        ),
        firstboot=FirstBootSettings(IMAGE),
        drift=DriftSettings(
            default=DriftReaction.REPORT,
            paths=(
                ("/etc/motd", DriftReaction.REPAIR),
                ("/etc/systemd/system/*", DriftReaction.BLOCK),
            ),
            repairs_per_hour=5,
            full_check_s=60,
        ),
    )


def test_empty_file_sets_nothing():
    assert parse_settings(b"# nothing\n", where="f") == PartialSettings()


def test_command_line_overrides_the_file():
    arguments = PartialSettings(node_name="mine", root="/mnt", log_level=logging.WARNING)
    settings = merge_settings(parse_settings(EVERYTHING, where="f"), arguments)
    assert (settings.node_name, settings.root, settings.log_level, settings.kubeconfig) == (
        "mine",
        "/mnt",
        logging.WARNING,
        "/etc/kubeconfig",
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('nodename = "x"', "f: unknown setting nodename"),
        ("[limits]\nstages = 1", "f: unknown setting limits.stages"),
        ("[limit]", "f: unknown setting limit"),
        ("kubeconfig = 1", "f: kubeconfig is 1; allowed is a string"),
        ("root = ['/']", "f: root is ['/']; allowed is a string"),
        ('drain = "later"', """f: drain is 'later'; allowed is "request" or "never\""""),
        (
            '[drift]\ndefault = "fix"',
            """f: drift.default is 'fix'; allowed is "report" or "repair" or "block\"""",
        ),
        (
            '[drift.paths]\n"/etc/*" = true',
            """f: drift.paths./etc/* is True; allowed is "report" or "repair" or "block\"""",
        ),
        (
            "[drift]\nrepairs_per_hour = -1",
            "f: drift.repairs_per_hour is -1; allowed is a number from 0 to 1000",
        ),
        ("drain = false", """f: drain is False; allowed is "request" or "never\""""),
        (
            'log_level = "loud"',
            """f: log_level is 'loud'; allowed is "debug" or "info" or "warning" or "error\"""",
        ),
        (
            "[limits]\nretry_first_s = 9\nretry_max_s = 8",
            "f: limits.retry_first_s is 9.0; allowed is at most retry_max_s, 8",
        ),
        ("limits = 3", "f: limits is 3; allowed is a table"),
        *(
            (
                f"[limits]\nstage_s = {value}",
                f"f: limits.stage_s is {found}; allowed is a number of seconds from 0.1 to 86400",
            )
            for value, found in [
                ("0", "0"),
                ("-1", "-1"),
                ("1e9", "1000000000.0"),
                ("true", "True"),
                ('"soon"', "'soon'"),
                ("nan", "nan"),
                ("inf", "inf"),
            ]
        ),
    ],
)
def test_invalid_value_is_named_with_allowed_values(content, message):
    with pytest.raises(UsageError) as refused:
        parse_settings(content.encode(), where="f")
    assert str(refused.value) == message


def test_unknown_key_names_the_known_keys():
    with pytest.raises(UsageError) as refused:
        parse_settings(b"[limits]\nfoo = 1", where="f")
    assert refused.value.remedy == (
        "remove it, or use one of: stage_s, stall_s, drain_s, call_s, "
        "retry_first_s, retry_max_s, resync_s"
    )


@pytest.mark.parametrize("content", [b"drain =", b"\xff", b"a = 1\na = 2", b"a = " + b"[" * 9999])
def test_invalid_toml_is_rejected(content):
    with pytest.raises(UsageError, match=r"^cannot parse f as TOML: "):
        parse_settings(content, where="f")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (PartialSettings(kubeconfig="x"), "kubeconfig is 'x'; allowed is an absolute path"),
        (PartialSettings(root=""), "root is ''; allowed is an absolute path"),
        (
            PartialSettings(pull_secret="/a\0"),
            r"pull_secret is '/a\x00'; allowed is an absolute path",
        ),
        (
            PartialSettings(node_name="Worker_1"),
            (
                "node_name is 'Worker_1'; allowed is the name of a Node: "
                "lower-case letters, digits, - and ."
            ),
        ),
    ],
)
def test_invalid_value_is_rejected_from_every_source(given, message):
    for file, arguments in ((given, PartialSettings()), (PartialSettings(), given)):
        with pytest.raises(UsageError) as refused:
            merge_settings(file, arguments)
        assert str(refused.value) == message


def test_missing_file_is_empty_unless_required(tmp_path: Path):
    path = tmp_path / "agent.toml"
    assert load_settings(path, PartialSettings(), is_required=False) == DEFAULTS
    with pytest.raises(UsageError, match=r"cannot read .*/agent.toml: no such file"):
        load_settings(path, PartialSettings(), is_required=True)
    path.write_bytes(EVERYTHING)
    assert load_settings(path, PartialSettings(), is_required=True) == merge_settings(
        parse_settings(EVERYTHING, where="f"), PartialSettings()
    )
    path.write_text("x")
    with pytest.raises(UsageError, match=r"agent.toml as TOML"):
        load_settings(path, PartialSettings(), is_required=False)
    with pytest.raises(UsageError, match=r"cannot read .*: Is a directory"):
        load_settings(tmp_path, PartialSettings(), is_required=False)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[health]\ndeadline_s = 0", "f: health.deadline_s is 0; allowed is a number of seconds"),
        (
            '[health]\nmode = "pray"',
            'f: health.mode is \'pray\'; allowed is "enforce" or "report" or "off"',
        ),
        ("[health]\ntries = 1", "f: unknown setting health.tries"),
        ("[preflight]\nonly_warn = 'NoSpaceOnBoot'", "allowed is a list of strings"),
        ("[preflight]\nonly_warn = ['Everything']", "f: preflight.only_warn is 'Everything'"),
        ("[firstboot]\nimage = 'os/node:latest'", "f: firstboot.image is 'os/node:latest', but"),
    ],
)
def test_invalid_table_key_is_named(content, message):
    with pytest.raises(UsageError) as refused:
        parse_settings(content.encode(), where="f")
    assert message in str(refused.value)
