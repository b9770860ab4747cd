"""A backend without a model: each next token is arithmetic on the tokens before it.

So a wrong block, slot, position or row gives an exact wrong answer, which tests see at once.
"""

from octavo.backends.null.backend import BACKEND, NullBackend
from octavo.backends.null.bundle import write_engine
from octavo.backends.null.context_hash import expected_next_token

__all__ = ["BACKEND", "NullBackend", "expected_next_token", "write_engine"]
