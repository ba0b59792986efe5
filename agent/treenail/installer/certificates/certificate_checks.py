"""Checks of the certificates of a bootstrap host before anything starts: they show its clock."""

import datetime as dt
from collections.abc import Mapping

from cryptography import x509

from treenail.errors import ConfigError


def check_certificates(certificates: Mapping[str, bytes], now: float) -> None:
    """Raise `ConfigError` for certificates that are not valid now; empty contents are skipped.

    A wrong clock shows itself here, before machines refuse TLS without a readable reason.
    """
    moment = dt.datetime.fromtimestamp(now, dt.UTC)
    problems = []
    for name, content in certificates.items():
        for begin, end in _list_validities(name, content):
            if not begin <= moment < end:
                problems.append(
                    f"the certificate {name} is valid from {format_moment(begin)} to "
                    f"{format_moment(end)}"
                )
                break
    if problems:
        raise ConfigError(
            f"cannot use certificates with this host's clock, which shows {format_moment(moment)}: "
            + "; ".join(problems),
            remedy="see whether the clock is right: timedatectl; correct it with: chronyc "
            "makestep; otherwise create the certificates again",
        )


def _list_validities(name: str, content: bytes) -> list[tuple[dt.datetime, dt.datetime]]:
    if not content.strip():
        return []
    try:
        return [read_validity(each) for each in x509.load_pem_x509_certificates(content)]
    except ValueError as error:
        raise ConfigError(
            f"cannot read the certificate {name}: expected PEM",
            remedy=f"check it with: openssl x509 -noout -text -in {name}",
        ) from error


def read_validity(certificate: x509.Certificate) -> tuple[dt.datetime, dt.datetime]:
    """Return begin and end, in UTC."""
    if hasattr(certificate, "not_valid_before_utc"):
        return certificate.not_valid_before_utc, certificate.not_valid_after_utc
    # Before cryptography 42: naive, in UTC.
    begin, end = certificate.not_valid_before, certificate.not_valid_after
    return begin.replace(tzinfo=dt.UTC), end.replace(tzinfo=dt.UTC)


def format_moment(moment: dt.datetime) -> str:
    """Format a time in UTC, to the second."""
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")
