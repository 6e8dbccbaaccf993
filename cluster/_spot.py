"""Whether AWS is about to take this machine back, asked of the machine's own metadata service (IMDSv2)."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable

SERVICE = "http://169.254.169.254"
_TOKEN = "X-aws-ec2-metadata-token"
_TIMEOUT_S = 2.0
_POLL_S = 5.0  # as AWS advises; there are two minutes


def notice(service: str = SERVICE) -> str:
    """What is announced for this machine and when, in words; empty when nothing is.

    Raises:
        OSError: the service does not answer, or not as it should: this is no machine of AWS, say.
    """
    # A proxy from the environment has no business on the way to this machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    ask = urllib.request.Request(
        f"{service}/latest/api/token", method="PUT", headers={f"{_TOKEN}-ttl-seconds": "60"}
    )
    with opener.open(ask, timeout=_TIMEOUT_S) as answer:
        token = answer.read().decode()
    look = urllib.request.Request(
        f"{service}/latest/meta-data/spot/instance-action", headers={_TOKEN: token}
    )
    try:
        with opener.open(look, timeout=_TIMEOUT_S) as answer:
            said = json.loads(answer.read())
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return ""
        raise
    except ValueError as error:
        raise OSError(f"the metadata service said no JSON: {error}") from error
    return f"AWS will {said.get('action', 'end')} this machine at {said.get('time', 'some time')}"


def wait_for_notice(
    say: Callable[[str], None],
    service: str = SERVICE,
    sleep: Callable[[float], None] = time.sleep,
) -> str:
    """Waits until the end of this machine is announced; returns the announcement. Mute services are asked again."""
    mute = False
    while True:
        try:
            if found := notice(service):
                return found
            mute = False
        except OSError as error:
            if not mute:
                say(f"whether this machine is reclaimed cannot be told: {error}; asking on")
            mute = True
        sleep(_POLL_S)
