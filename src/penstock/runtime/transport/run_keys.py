"""The key of a run, by which its processes know each other: derived from a token that all of them must have.

The token is the environment variable ``PENSTOCK_TOKEN``. It is never written anywhere. Without it, the processes share
one that the first of them puts into the store at which they meet. Anyone who can reach the store then has it.

Every process contributes a random number to the key, so what was recorded in another run proves nothing in this one.
docs/trust.md says what the key protects, and what it does not.
"""

import hmac
import os
import secrets
from collections.abc import Callable, Sequence

from penstock.errors import TransportError

TOKEN = "PENSTOCK_TOKEN"
"""The environment variable of the token."""
PROOF_BYTES = 32
"""The size of a proof."""
_LEAST_CHARACTERS = 16
"""A shorter token could be found by trying."""


class RunKey:
    """Proves to other processes of the run that this one knows the key `secret`, and checks their proofs."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def proof(self, *parts: bytes) -> bytes:
        """Proves that the sender of `parts` has the key, in `PROOF_BYTES` bytes. Equal parts have equal proofs."""
        made = hmac.new(self._secret, digestmod="sha256")
        for part in parts:
            made.update(len(part).to_bytes(8, "little") + part)
        return made.digest()

    def proves(self, proof: bytes, *parts: bytes) -> bool:
        """Whether `proof` is that of `parts`."""
        return hmac.compare_digest(proof, self.proof(*parts))

    def derived(self, purpose: str) -> "RunKey":
        """Returns the key for one `purpose`. Its proofs are of no use for another."""
        return RunKey(self.proof(b"purpose", purpose.encode()))


def agree_on_key(rank: int, gather: Callable[[str], Sequence[str]], share: Callable[[str], bytes]) -> RunKey:
    """Returns the key of the run, after all processes have proved to each other that they have it. Collective.

    `gather` returns the text that each process passes to it, by rank. `share` returns the text that the first process
    has passed to it. `TransportError` on every rank if the token of one of them is another one, or too short to protect
    anything.
    """
    token = os.environ.get(TOKEN)
    usable = token is None or len(token) >= _LEAST_CHARACTERS
    nonces = gather(secrets.token_hex(16))
    secret = share(secrets.token_hex(32)) if token is None else token.encode()
    key = RunKey(secret).derived(" ".join(nonces))
    proofs = gather(key.proof(b"rank", str(rank).encode()).hex() if usable else "")
    if not usable:
        raise TransportError(
            f"{TOKEN} on rank {rank}: expected at least {_LEAST_CHARACTERS} characters, found {len(token or '')}. Set "
            "it to the same random text on every rank (openssl rand -hex 32), or unset it on all"
        )
    others = [
        other
        for other, proof in enumerate(proofs)
        if not hmac.compare_digest(proof.encode(), key.proof(b"rank", str(other).encode()).hex().encode())
    ]
    if others:
        raise TransportError(
            f"rank(s) {', '.join(map(str, others))} and rank {rank} have different tokens: expected the same {TOKEN} "
            f"on every rank, found {'one that is set' if token is not None else 'none'} on rank {rank}. Set it to the "
            "same text on every rank, or unset it on all"
        )
    return key
