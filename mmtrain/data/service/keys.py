"""Keys by which trainers and producers know each other (ZeroMQ's CURVE), derived from one secret that both hold."""

import hashlib
import ipaddress
import os
import stat
from dataclasses import dataclass
from pathlib import Path

import zmq
from zmq.utils import z85

from mmtrain.errors import DataError

MIN_SECRET_BYTES = 32
HOW_TO_MAKE_A_SECRET = "(umask 077; openssl rand -hex 32 > FILE)"


@dataclass(frozen=True)
class CurveKeys:
    """The key pairs of the producers and of the trainers that share a secret, in Z85."""

    producer_public: bytes
    producer_private: bytes
    trainer_public: bytes
    trainer_private: bytes

    @classmethod
    def derive(cls, secret: bytes) -> "CurveKeys":
        """Derive both pairs; who holds the secret may be a producer or a trainer."""
        producer, trainer = (
            z85.encode(hashlib.sha256(b"mmtrain " + role + b"\0" + secret).digest())
            for role in (b"producer", b"trainer")
        )
        return cls(zmq.curve_public(producer), producer, zmq.curve_public(trainer), trainer)

    def authenticate_producer(self, socket: zmq.Socket[bytes]) -> None:
        """Let a socket that will listen prove that it is a producer, and encrypt what it sends."""
        socket.curve_server = True
        socket.curve_publickey = self.producer_public
        socket.curve_secretkey = self.producer_private

    def authenticate_trainer(self, socket: zmq.Socket[bytes]) -> None:
        """Let a socket that will connect prove that it is a trainer's, to nobody but a producer."""
        socket.curve_serverkey = self.producer_public
        socket.curve_publickey = self.trainer_public
        socket.curve_secretkey = self.trainer_private

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether a connecting socket is a trainer's, as pyzmq's authenticator asks."""
        return key == self.trainer_public


def load_keys(path: Path | None) -> CurveKeys | None:
    """Read the secret of `data.producer_secret`; None if there is none.

    Raises DataError for a file that is missing, short, or open to other users.
    """
    if path is None:
        return None
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            secret = file.read().strip()
    except OSError as error:
        raise DataError(
            f"data.producer_secret: {path}: {error.strerror}; make one with {HOW_TO_MAKE_A_SECRET}"
        ) from error
    if mode & 0o077:
        raise DataError(
            f"data.producer_secret: {path} has mode {mode:o}, so that other users may use it; allowed: 600 "
            f"(chmod 600 {path})"
        )
    if len(secret) < MIN_SECRET_BYTES:
        raise DataError(
            f"data.producer_secret: {path} holds {len(secret)} bytes, at least {MIN_SECRET_BYTES} are needed; make one "
            f"with {HOW_TO_MAKE_A_SECRET}"
        )
    return CurveKeys.derive(secret)


def require_keys_beyond_loopback(bind: str, keys: CurveKeys | None) -> None:
    """Raise DataError for an address that other machines reach, if producer and trainers share no secret."""
    if keys is None and not is_local(bind):
        raise DataError(
            f"--bind: {bind} can be reached from other machines, and whoever reaches it could read the data; set "
            f"data.producer_secret to a file that holds a secret, here and in the trainers ({HOW_TO_MAKE_A_SECRET}), "
            "or listen on tcp://127.0.0.1:PORT"
        )


def is_local(address: str) -> bool:
    """Return whether only processes of this machine reach an address to listen at."""
    transport, _, place = address.partition("://")
    if transport != "tcp":
        return True  # ipc: a file, whose permissions decide
    host = place.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name, a network interface, or `*`
        return host == "localhost"
