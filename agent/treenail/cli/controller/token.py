"""``treenail-controller token``: create, list and revoke access tokens, and print user data."""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING

from treenail import clocks, errors
from treenail.api import component_names
from treenail.api.object_meta import is_object_name
from treenail.cli import argument_parser, files, output_format, terminal
from treenail.cli.controller import connect, ignition
from treenail.config.ignition.pointer import check_server_url
from treenail.provisioning.content.document import HEADERS_SINCE, build_pointer
from treenail.provisioning.tokens import tokens

if TYPE_CHECKING:
    from treenail.kube.api_client import Client
    from treenail.provisioning.tokens.token_store import TokenStore

_MAX_TTL_S = 365 * 86400.0
_MAX_REFUSALS = 3
"""Refused requests of a token that are shown: its machine can create any number of them."""
_COLUMNS = (
    output_format.TableColumn("NAME"),
    output_format.TableColumn("POOL"),
    output_format.TableColumn("STATE"),
    output_format.TableColumn("USES"),
    output_format.TableColumn("EXPIRES"),
    output_format.TableColumn("MACHINE"),
    output_format.TableColumn("USED BY"),
)


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the arguments of the commands."""
    parser = commands.add_parser(
        "token",
        help="manage the access tokens of new machines",
        description="Create, list and revoke access tokens, with which new machines fetch the "
        "Ignition config of their pool from `treenail-controller serve`.",
        epilog=terminal.format_examples(
            ("create a token", "treenail-controller token create --pool worker --server URL"),
            ("show which machines used tokens", "treenail-controller token list"),
        ),
        formatter_class=terminal.HelpFormatter,
    )
    verbs = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_create(verbs)
    _add_list(verbs)
    _add_revoke(verbs)
    _add_pointer(verbs)


def _add_create(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = verbs.add_parser(
        "create",
        help="create a token and print it once",
        description="Create an access token, and print it with user data for machines. The "
        "cluster keeps only its digest, so no later command can print it again.",
        epilog=terminal.format_examples(
            (
                "write user data for one machine",
                "treenail-controller token create --pool worker --server URL -o user-data > x.ign",
            ),
            (
                "create a token for ten machines within a week",
                "treenail-controller token create --pool worker --uses 10 --ttl 7d",
            ),
        ),
        formatter_class=terminal.HelpFormatter,
    )
    parser.add_argument("--pool", metavar="NAME", required=True, help="the pool of the machines")
    parser.add_argument(
        "--ttl", type=argument_parser.parse_duration, default=86400.0, metavar="DURATION",
        help="let the token expire after this time, at most 365d (default: 24h)",
    )  # fmt: skip
    parser.add_argument(
        "--uses", type=argument_parser.parse_count, default=1, metavar="N",
        help=f"let N machines use it, at most {tokens.MAX_USES} (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--machine", metavar="NAME", default="",
        help="node name of the machine that it is for (default: any machine)",
    )  # fmt: skip
    _add_pointer_arguments(parser, is_server_required=False)
    parser.add_argument(
        "-o", "--output", choices=("text", "token", "user-data", "json"), default="text",
        help="print the token, the user data, or both (default: %(default)s)",
    )  # fmt: skip
    _add_cluster_arguments(parser)
    parser.set_defaults(run=create_token)


def _add_list(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = verbs.add_parser(
        "list",
        help="list tokens, their state and the machines that used them",
        description="List the access tokens by name, without their secret part: state, uses, and "
        "the addresses of the machines that used them. A token is listed until a day after its "
        "expiry.",
        epilog=terminal.format_examples(
            ("list the tokens of a pool", "treenail-controller token list --pool worker"),
        ),
        formatter_class=terminal.HelpFormatter,
    )
    parser.add_argument("--pool", metavar="NAME", help="list the tokens of this pool only")
    output_format.add_format_arguments(
        parser,
        (
            output_format.OutputFormat.TABLE,
            output_format.OutputFormat.JSON,
            output_format.OutputFormat.YAML,
        ),
    )
    _add_cluster_arguments(parser)
    parser.set_defaults(run=list_tokens)


def _add_revoke(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = verbs.add_parser(
        "revoke",
        help="revoke tokens",
        description="Delete access tokens. The server refuses them at once.",
        epilog=terminal.format_examples(
            ("revoke a token", "treenail-controller token revoke ab2cd3"),
            ("remove expired tokens", "treenail-controller token revoke --expired"),
        ),
        formatter_class=terminal.HelpFormatter,
    )
    parser.add_argument(
        "names", metavar="NAME", nargs="*", help="name of a token, as `token list` shows it"
    )
    parser.add_argument(
        "--expired", action="store_true", help="revoke all tokens that have expired"
    )
    _add_cluster_arguments(parser)
    parser.set_defaults(run=revoke_tokens)


def _add_pointer(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = verbs.add_parser(
        "user-data",
        help="print user data with a token",
        description="Print the pointer config with which machines fetch the config of a pool. Read "
        "the token from a file, since other users can read the arguments of a process.",
        epilog=terminal.format_examples(
            (
                "print user data for machines whose Ignition reads 3.2",
                "treenail-controller token user-data --pool worker --server URL --spec 3.2 < token",
            ),
        ),
        formatter_class=terminal.HelpFormatter,
    )
    parser.add_argument("--pool", metavar="NAME", required=True, help="the pool of the machines")
    parser.add_argument(
        "--token-file", metavar="FILE", default=files.STDIN,
        help="read the token from this file (default: the standard input)",
    )  # fmt: skip
    _add_pointer_arguments(parser, is_server_required=True)
    parser.set_defaults(run=print_token_pointer)


def _add_pointer_arguments(parser: argparse.ArgumentParser, *, is_server_required: bool) -> None:
    optional = "" if is_server_required else "; without it no user data are printed"
    parser.add_argument(
        "--server", metavar="URL", required=is_server_required,
        help=f"the config server that machines reach, https://HOST:PORT{optional}",
    )  # fmt: skip
    parser.add_argument(
        "--ca", metavar="FILE",
        help="CA of the server's certificate, PEM (default: the CAs of the machine's image)",
    )  # fmt: skip
    parser.add_argument(
        "--spec", metavar="VERSION", type=ignition.parse_version, default=HEADERS_SINCE,
        help=f"version of Ignition's format: {', '.join(ignition.VERSIONS)} (default: 3.1, which "
        "each newer Ignition reads); before 3.1 the token is part of the URL, which proxies may "
        "log",
    )  # fmt: skip


def _add_cluster_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-n", "--namespace", type=connect.parse_namespace, default=component_names.IGNITION_SERVER,
        help="namespace of the server (default: %(default)s)",
    )  # fmt: skip
    connect.add_connection_arguments(parser)


def create_token(arguments: argparse.Namespace) -> int:
    """Create a token and print it; raise `UsageError` and `ClusterError`."""
    _check_new_token(arguments)
    expires = clocks.SystemClock().now() + arguments.ttl
    token, record = tokens.make_token(
        arguments.pool, expires=expires, uses=arguments.uses, machine=arguments.machine
    )
    # First: an invalid URL or CA must not leave a token that was never printed.
    user_data = "" if arguments.server is None else _format_pointer(arguments, token)
    with connect.connect_cluster(arguments) as client:
        _check_pool(client, arguments.pool)
        _open_store(client, arguments).change(partial(_add_to_table, record))
    match arguments.output:
        case "token":
            print(token)
        case "user-data":
            print(user_data)
        case "json":
            content: dict[str, object] = {**_describe_token(record, 0.0), "token": token}
            if user_data:
                content["userData"] = user_data
            document = output_format.build_document("AccessToken", content)
            print(output_format.format_document(output_format.OutputFormat.JSON, document), end="")
        case _:
            print(f"token: {token}")
            if user_data:
                print(f"user data: {user_data}")
    print(
        f"treenail-controller: created token {record.name} for pool {record.pool}: "
        f"{_format_uses(record.uses)}, expires at {clocks.format_rfc3339(record.expires)}",
        file=sys.stderr,
    )
    return 0


def list_tokens(arguments: argparse.Namespace) -> int:
    """List tokens."""
    with connect.connect_cluster(arguments) as client:
        store = _open_store(client, arguments)
        table = store.load()
        refusals = _list_refusals(client)
    now = clocks.SystemClock().now()
    records = [record for record in table.tokens.values() if arguments.pool in (None, record.pool)]
    if arguments.output is output_format.OutputFormat.TABLE and not records:
        pool = f" of pool {arguments.pool}" if arguments.pool else ""
        terminal.print_lines([f"no access token{pool} in {store.where}"], sys.stderr)
        return 0
    if arguments.output is output_format.OutputFormat.TABLE:
        output_format.print_table_with_notes(
            _COLUMNS,
            (_format_row(record, now) for record in records),
            (refusals.get(record.name, ()) for record in records),
        )
        return 0
    items = [
        {**_describe_token(record, now), "refusals": refusals.get(record.name, [])}
        for record in records
    ]
    output_format.print_document(arguments.output, "AccessTokenList", {"items": items})
    return 0


def _list_refusals(client: "Client") -> Mapping[str, list[str]]:
    """Return why certificates of a token's machines were refused, and what to do."""
    from treenail.provisioning.approval.request import list_kubelet_requests
    from treenail.provisioning.machines.joined_machines import describe_certificate
    from treenail.provisioning.machines.machine_report import find_certificate_remedy

    refusals: dict[str, list[str]] = {}
    for request in list_kubelet_requests(client):
        texts = refusals.setdefault(request.token, [])
        if request.failure and len(texts) < _MAX_REFUSALS:
            texts.append(f"{describe_certificate(request)}; {find_certificate_remedy(request)}")
    return refusals


def revoke_tokens(arguments: argparse.Namespace) -> int:
    """Revoke tokens and the bootstrap tokens that belong to them.

    Raises `UsageError` for a name that does not exist.
    """
    # Imported late: user data need no cluster.
    from treenail.provisioning.tokens.bootstrap_tokens import (
        delete_bootstrap_token,
        list_identities,
    )

    if not arguments.names and not arguments.expired:
        raise errors.UsageError(
            "cannot revoke tokens: expected the names of tokens, or --expired",
            remedy="list the names with: treenail-controller token list",
        )
    expired_at = clocks.SystemClock().now() if arguments.expired else 0.0
    with connect.connect_cluster(arguments) as client:
        store = _open_store(client, arguments)
        revoked = store.change(partial(_revoke_in_table, arguments.names, expired_at))
        for record in revoked:
            # First: without the access to kube-system the token is revoked nevertheless.
            print(f"revoked token {record.name}")
        for record in revoked:
            for identity in list_identities(record):
                delete_bootstrap_token(client, identity)
    return 0


def print_token_pointer(arguments: argparse.Namespace) -> int:
    """Print a pointer config with the token of a file; raise `UsageError`."""
    token = files.read_input(arguments.token_file).decode("ascii", "replace").strip()
    if not tokens.read_name(token):
        raise errors.UsageError(
            f"cannot read the token in {arguments.token_file:.200}: expected tn_NAME_SECRET",
            remedy="create one with: treenail-controller token create",
        )
    print(_format_pointer(arguments, token))
    return 0


def _check_new_token(arguments: argparse.Namespace) -> None:
    # Imported late: user data need no cluster.
    from treenail.provisioning.tokens.bootstrap_tokens import MAX_MACHINE_LENGTH, MAX_POOL_LENGTH

    if arguments.output == "user-data" and arguments.server is None:
        raise errors.UsageError(
            "cannot print user data: the URL of the config server is missing",
            remedy="give the address that new machines reach: --server https://HOST:22623",
        )
    if not 1 <= arguments.uses <= tokens.MAX_USES:
        raise errors.UsageError(
            f"cannot create a token for {arguments.uses} machines: expected at most "
            f"{tokens.MAX_USES}",
            remedy="create several tokens, one for each rack or batch of machines",
        )
    if not 0 < arguments.ttl <= _MAX_TTL_S:
        raise errors.UsageError(
            f"cannot create a token: expected a --ttl from 1s to 365d, found {arguments.ttl:.0f}s",
            remedy="leave --ttl out for 24 hours",
        )
    if arguments.machine and arguments.uses > 1:
        raise errors.UsageError(
            f"cannot use --machine with --uses {arguments.uses}: a name is for one machine",
            remedy="leave one of the two out",
        )
    _check_name("--pool", arguments.pool, MAX_POOL_LENGTH)
    if arguments.machine:
        _check_name("--machine", arguments.machine, MAX_MACHINE_LENGTH)


def _check_name(option: str, name: str, limit: int) -> None:
    """Raise `UsageError` for a name that no pool or Node has, or that no group can contain."""
    if not is_object_name(name) or len(name) > limit:
        raise errors.UsageError(
            f"cannot create a token: expected a name of at most {limit} lower-case letters, "
            f"digits, dashes and dots in {option}, found {name!r:.80}",
            remedy="list the names with: kubectl get "
            + ("machineconfigpools" if option == "--pool" else "nodes"),
        )


def _check_pool(client: "Client", pool: str) -> None:
    # Imported late: user data need no cluster.
    from treenail.errors import NotFoundError
    from treenail.kube.resources import MACHINECONFIGPOOLS

    try:
        client.get(MACHINECONFIGPOOLS, pool)
    except NotFoundError as error:
        raise errors.UsageError(
            f"cannot create a token: MachineConfigPool {pool:.80} does not exist",
            remedy="list the pools with: treenail-controller status",
        ) from error


def _open_store(client: "Client", arguments: argparse.Namespace) -> "TokenStore":
    # Imported late: user data need no cluster.
    from treenail.provisioning.tokens.token_store import TokenStore

    return TokenStore(client, arguments.namespace, clocks.SystemClock())


def _add_to_table(
    record: tokens.TokenRecord, table: tokens.TokenTable
) -> tuple[tokens.TokenTable, None]:
    if record.name in table.tokens:
        raise errors.ClusterError(
            f"cannot create a token: its random name {record.name} exists",
            remedy="run the command again",
        )
    return table.put(record), None


def _revoke_in_table(
    names: list[str], expired_at: float, table: tokens.TokenTable
) -> tuple[tokens.TokenTable, tuple[tokens.TokenRecord, ...]]:
    for name in names:
        if name not in table.tokens:
            raise errors.UsageError(
                f"cannot revoke token {name:.80}: no token has this name",
                remedy="list the names with: treenail-controller token list",
            )
    expired = (record.name for record in table.tokens.values() if record.is_expired(expired_at))
    revoked = tuple(dict.fromkeys([*names, *expired]))
    kept = table.keep(lambda record: record.name not in revoked)
    return kept, tuple(table.tokens[name] for name in revoked)


def _format_pointer(arguments: argparse.Namespace, token: str) -> str:
    authorities = ignition.read_authorities(arguments.ca)
    if arguments.spec < HEADERS_SINCE:
        print(
            "treenail-controller: warning: the token is part of the URL, which proxies may log; "
            "use --spec 3.1 or newer if the machine's Ignition reads it",
            file=sys.stderr,
        )
    pointer = build_pointer(
        check_server_url(arguments.server),
        arguments.pool,
        arguments.spec,
        authorities=authorities,
        token=token,
    )
    return json.dumps(pointer, separators=(",", ":"))


def _format_row(record: tokens.TokenRecord, now: float) -> tuple[str, ...]:
    rest_s = record.expires - now
    expires = (
        f"in {terminal.format_duration(rest_s)}"
        if rest_s > 0
        else f"{terminal.format_duration(-rest_s)} ago"
    )
    return (
        record.name,
        record.pool,
        tokens.find_state(record, now),
        f"{len(record.used)}/{record.uses}",
        expires,
        record.machine,
        ", ".join(_format_users(record)),
    )


def _format_users(record: tokens.TokenRecord) -> Iterator[str]:
    for use in record.used:
        is_usual = use.state in (tokens.UseState.SENT, tokens.UseState.JOINED)
        yield use.address if is_usual else f"{use.address} ({use.state})"


def _describe_token(record: tokens.TokenRecord, now: float) -> Mapping[str, object]:
    uses = [
        {"address": use.address, "time": clocks.format_rfc3339(use.at), "state": use.state.value}
        for use in record.used
    ]
    return {
        "name": record.name,
        "pool": record.pool,
        "state": tokens.find_state(record, now),
        "uses": record.uses,
        "expires": clocks.format_rfc3339(record.expires),
        **({"machine": record.machine} if record.machine else {}),
        "used": uses,
    }


def _format_uses(uses: int) -> str:
    return "one machine can use it" if uses == 1 else f"{uses} machines can use it"
