"""How two nodes of a run come to trust each other over a socket, and what they say before a file is sent.

Both have the run's token, which never goes over the wire. The server greets with a number used once; the client
answers with its own one and its request, under an HMAC-SHA256 of all of it; the server's answer is under one too.
So a stranger gets the greeting and nothing else, what was overheard cannot be said again, and a client knows that
it was not a stranger who answered. What follows is not encrypted, as Ray's own traffic is not by default.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import socket
import struct
import time
from typing import Any

_HELLO = b"ray_ckpt files 1\n"
_NONCE_BYTES = 32
_HEAD = struct.Struct(f"!{_NONCE_BYTES}s32sI")  # number used once, HMAC, length of what follows
_LONGEST_BYTES = 16 << 10  # of a request or an answer
SHORTEST_TOKEN_BYTES = 16


class PeerError(Exception):
    """The other side is a stranger, or does not keep to the protocol; the text says how."""


class Patience:
    """How long to wait for the other side, all waits together.

    Args:
        silence_s: longest single wait.
        total_s: of all waits together; what this side does in between does not count.
    """

    def __init__(self, silence_s: float, total_s: float) -> None:
        self._silence_s, self._left_s = silence_s, total_s

    def receive(self, peer: socket.socket, buffer: memoryview) -> int:
        """Takes what is there; 0 when the other side has ended.

        Raises:
            TimeoutError: it took too long.
            OSError: the connection broke.
        """
        started = time.monotonic()
        if self._left_s <= 0:
            raise TimeoutError("timed out")
        peer.settimeout(min(self._silence_s, self._left_s))
        try:
            return peer.recv_into(buffer)
        finally:
            self._left_s -= time.monotonic() - started

    def receive_all(self, peer: socket.socket, count: int) -> bytes:
        """So many bytes.

        Raises:
            PeerError: the other side ended before.
            OSError: see :meth:`receive`.
        """
        data = memoryview(bytearray(count))
        have = 0
        while have < count:
            got = self.receive(peer, data[have:])
            if not got:
                raise PeerError("it ended the connection without an answer")
            have += got
        return bytes(data)


def greet(peer: socket.socket) -> bytes:
    """The server's first words; returns its number used once."""
    nonce = secrets.token_bytes(_NONCE_BYTES)
    peer.sendall(_HELLO + nonce)
    return nonce


def read_greeting(peer: socket.socket, patience: Patience) -> bytes:
    """The server's number used once.

    Raises:
        PeerError: it is no such server.
        OSError: the connection broke, or it took too long.
    """
    hello = patience.receive_all(peer, len(_HELLO) + _NONCE_BYTES)
    if not hello.startswith(_HELLO):
        raise PeerError("it speaks another protocol")
    return hello[len(_HELLO) :]


def say(peer: socket.socket, token: bytes, what: bytes, theirs: bytes, words: Any) -> bytes:
    """Sends a request or an answer; returns this side's number used once.

    Args:
        peer: the other side.
        token: of the run.
        what: which of the two it is, so that one cannot be sent back as the other.
        theirs: number used once of the other side.
        words: plain values.
    """
    nonce = secrets.token_bytes(_NONCE_BYTES)
    text = json.dumps(words).encode()
    peer.sendall(_HEAD.pack(nonce, _mac(token, what, theirs, nonce, text), len(text)) + text)
    return nonce


def hear(
    peer: socket.socket, token: bytes, what: bytes, ours: bytes, patience: Patience
) -> tuple[bytes, Any]:
    """What the other side says, and its number used once; see :func:`say`.

    Raises:
        PeerError: it has not the run's token, or says what cannot be understood.
        OSError: the connection broke, or it took too long.
    """
    nonce, mac, length = _HEAD.unpack(patience.receive_all(peer, _HEAD.size))
    if length > _LONGEST_BYTES:
        raise PeerError(f"it says more than {_LONGEST_BYTES} bytes")
    text = patience.receive_all(peer, length)
    if not hmac.compare_digest(mac, _mac(token, what, ours, nonce, text)):
        raise PeerError("it does not have the run's token")
    try:
        return nonce, json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PeerError(f"it says what is no JSON ({error})") from error


def _mac(token: bytes, what: bytes, theirs: bytes, ours: bytes, text: bytes) -> bytes:
    return hmac.new(token, b"\n".join((_HELLO, what, theirs, ours, text)), hashlib.sha256).digest()
